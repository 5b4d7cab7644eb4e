"""What was in a step: the samples of a global batch and their documents, by a replay of logical shards."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torchdata.nodes import BaseNode

from ibm_nodes import saved_listings
from ibm_nodes.checkpoint import Saved, list_saved
from ibm_nodes.formats.lists import describe_row
from ibm_nodes.inspect_checkpoint import newest, read_ranks
from ibm_nodes.items import Sample, masked_in
from ibm_nodes.listing import ListingSession, listings_in
from ibm_nodes.loader import Loader
from ibm_nodes.schedule import SCHEDULE_KEY
from ibm_nodes.settings import derive_lineage, describe, differences, find_sharder
from ibm_nodes.sharder import NUM_AHEAD, Sharder, sample_number
from ibm_nodes.state import SHARDS_KEY, check_settings, merge
from ibm_nodes.storage import Options
from ibm_nodes.text import ToText

ShardState = tuple[int, bool, Any]


class Origin(NamedTuple):
    """Where a replay begins: after a step that was saved, or at the start, which is step 0."""

    step: int
    position: int
    saved: Saved | None
    changes: list[str]


class Traced(NamedTuple):
    """One sample of a global batch.

    Attributes:
        row: its place in the global batch.
        number: its place in the global stream.
        shard: the logical shard that it comes from.
        sample: the sample.
    """

    row: int
    number: int
    shard: int
    sample: Sample


class Trace(NamedTuple):
    """A step's samples, or the one that was asked for; the global batch is from sample ``begin`` to before ``end``."""

    step: int
    since: int
    begin: int
    end: int
    num_shards: int
    samples: list[Traced]
    changes: list[str]


def trace(
    loader: Loader[Any],
    *,
    step: int,
    global_batch_size: int,
    url: str | None = None,
    row: int | None = None,
    storage_options: Options = None,
) -> Trace:
    """Replays the global batch of a step, from the newest step saved before it or from the start; draws nothing else.

    Args:
        loader: a loader with the settings of the run, of any rank and world size; nothing of it is started.
        step: which step; the first one is 1, and a state saved as step S is the one after it.
        global_batch_size: samples in a step of the run, on all ranks together.
        url: where the checkpoints of the run are; None replays from the start.
        row: only this sample of the batch; None takes all.
        storage_options: fsspec's options for the store of the checkpoints.

    Raises:
        FileNotFoundError: if there is no complete checkpoint under the url.
        ValueError: if row is out of range, settings differ from those of the run, the run took another number of
            samples a step, a logical shard ended before the step, or a file of the checkpoint is damaged.
        TypeError: if the items are not samples.
    """
    if step < 1 or not (row is None or 0 <= row < global_batch_size):
        raise ValueError(
            f"step must be at least 1 and row from 0 to {global_batch_size - 1}, got step {step} and row {row}"
        )
    sharder = find_sharder(loader)
    origin = Origin(0, 0, None, [])
    if url is not None:
        sharder.saved_listings = partial(saved_listings.read, url, storage_options=storage_options)
        origin = _origin(url, step, global_batch_size, describe(loader), storage_options)
    num_before = (step - origin.step - 1) * global_batch_size
    batch = [sample_number(sharder.skip, origin.position, num_before + row) for row in range(global_batch_size)]
    rows = range(global_batch_size) if row is None else [row]
    numbers = [batch[row] for row in rows]
    shards = sorted({number % sharder.num_shards for number in numbers})
    states = _states(sharder, origin.saved, shards, storage_options)
    row_of = dict(zip(numbers, rows, strict=True))
    samples = [
        Traced(row_of[number], number, number % sharder.num_shards, sample)
        for number, sample in _replay(sharder, states, numbers)
    ]
    return Trace(
        step,
        origin.step,
        batch[0],
        batch[-1] + 1,
        sharder.num_shards,
        sorted(samples, key=lambda traced: traced.row),
        origin.changes,
    )


def documents(sample: Sample, *, to_text: ToText | None = None) -> list[dict[str, Any]]:
    """Gives the runs of a sample as plain data, one for each document or part of one.

    Returns:
        For each the offset in the sample (``at``), ``dataset``, ``url``, ``row`` (as ``Document.row``), ``place`` (the
        row in words), the token range in the document [``begin``, ``end``), in which an EOS put after it counts,
        whether a BOS was put before it (``bos``), and what ``to_text`` makes of its tokens (``text``), if given.
    """
    found, tokens = [], sample.tokens
    if (masked := masked_in(tokens)) is not None:
        tokens = np.where(masked, ~tokens, tokens)
    ends = [*sample.starts[1:], len(tokens)]
    for start, stop, (name, url, row, offset) in zip(sample.starts, ends, sample.documents, strict=True):
        entry = {
            "at": start,
            "dataset": name,
            "url": url,
            "row": row,
            "place": describe_row(row, url),
            "begin": max(0, offset),
            "end": offset + stop - start,
            "bos": offset < 0,
        }
        found.append(entry | ({"text": to_text(tokens[start:stop].tolist())} if to_text else {}))
    return found


def _origin(url: str, step: int, batch_size: int, settings: Mapping[str, Any], storage_options: Options) -> Origin:
    """Chooses where to begin, and makes sure that what was saved next fits the number of samples in a step."""
    complete = [saved for saved in list_saved(url, storage_options) if not saved.missing]
    if not complete:
        raise FileNotFoundError(f"no complete checkpoint under {url}: leave it out to replay from the start")
    before = max((saved.step for saved in complete if saved.step < step), default=None)
    after = min((saved.step for saved in complete if saved.step >= step), default=None)
    origin, lineage = Origin(0, 0, None, []), ""
    if before is not None:
        chosen = newest((saved for saved in complete if saved.step == before), storage_options)
        content = _first(chosen, storage_options)
        position = content["state"][Sharder.POSITION_KEY]
        origin, lineage = Origin(before, position, chosen, differences(content["settings"], settings)), chosen.lineage
    if after is not None:
        chosen = newest((saved for saved in complete if saved.step == after), storage_options)
        content = _first(chosen, storage_options)
        resumed = derive_lineage((lineage, origin.position), content["settings"])
        if before is None or chosen.lineage in (lineage, resumed):
            _check_batch_size(origin, after, _num_samples(origin.position, content), batch_size)
    return origin


def _num_samples(begin: int, content: Mapping[str, Any]) -> int:
    """Gives how many samples a run took from a position to what it saved, without those that it skipped."""
    end: int = content["state"][Sharder.POSITION_KEY]
    skipped = (range(max(begin, first), min(end, last)) for first, last in content["settings"]["Sharder.skip"])
    return end - begin - sum(map(len, skipped))


def _check_batch_size(origin: Origin, step: int, samples: int, batch_size: int) -> None:
    """Compares the samples of the run between two steps with those that the batch size gives."""
    steps = step - origin.step
    if samples == steps * batch_size:
        return
    if samples % steps:
        raise ValueError(
            f"the run took {samples} samples in the {steps} steps from {origin.step} to {step}, which is no whole "
            "number a step: what a step between them held cannot be told"
        )
    raise ValueError(
        f"global_batch_size must be {samples // steps}, as the run's from step {origin.step} to {step}, "
        f"got {batch_size}"
    )


def _first(saved: Saved, storage_options: Options) -> dict[str, Any]:
    (content,) = read_ranks(saved, [0], storage_options)
    return content


def _states(
    sharder: Sharder[Any], saved: Saved | None, shards: list[int], storage_options: Options
) -> dict[int, ShardState]:
    """Gives the states of some logical shards, and reads only the files that hold them; sets the schedule as it was."""
    if saved is None:
        if sharder.schedule is not None:
            sharder.schedule.load(None, 0)
        return {shard: (0, False, None) for shard in shards}
    ranks = sorted({shard % saved.world_size for shard in shards})
    state = merge(content["state"] for content in read_ranks(saved, ranks, storage_options))
    check_settings(sharder, state, num_shards=sharder.num_shards)
    if sharder.schedule is not None:
        sharder.schedule.load(state[SCHEDULE_KEY], state[Sharder.POSITION_KEY])
    return {shard: state[SHARDS_KEY][shard] for shard in shards}


def _replay(
    sharder: Sharder[Any], states: dict[int, ShardState], numbers: Sequence[int]
) -> Iterator[tuple[int, Sample]]:
    """Draws some numbers of the global stream, shard by shard; the first reads of some shards run side by side."""
    listings = ListingSession(sharder.saved_listings, listings_in(states))
    graphs: dict[int, BaseNode[Any]] = {}
    waiting = iter(states)
    for shard in states:
        for ahead in itertools.islice(waiting, NUM_AHEAD - len(graphs)):
            graphs[ahead] = sharder.graph(ahead, sharder.num_shards)
            with listings:
                graphs[ahead].reset(states[ahead][2])
        turns, ended, _ = states[shard]
        item: Any = None
        graph = graphs.pop(shard)
        for number in (number for number in numbers if number % sharder.num_shards == shard):
            while turns <= number // sharder.num_shards:
                if sharder.schedule is not None:
                    sharder.schedule.now = turns * sharder.num_shards + shard
                item, ended = (None, True) if ended else _draw(graph)
                if ended:
                    item = _filler(sharder, shard, number)
                turns += 1
            if not isinstance(item, Sample):
                raise TypeError(f"the loader must draw samples to be traced, got {type(item).__name__}")
            yield number, item


def _draw(graph: BaseNode[Any]) -> tuple[Any, bool]:
    try:
        return next(graph), False
    except StopIteration:
        return None, True


def _filler(sharder: Sharder[Any], shard: int, number: int) -> Any:
    if sharder.filler is None:
        raise ValueError(
            f"logical shard {shard} ended before sample {number}: without a filler the samples after its end have "
            "other numbers at other world sizes, and cannot be traced"
        )
    return sharder.filler
