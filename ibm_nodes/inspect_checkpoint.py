"""A look into saved checkpoints without a loader: what is there, what a step holds, and whether it could be loaded."""

from collections.abc import Iterable, Iterator
from typing import Any

from ibm_nodes.checkpoint import Saved, list_saved, read_saved
from ibm_nodes.reader import Reader
from ibm_nodes.schedule import SCHEDULE_KEY, Schedule, shares
from ibm_nodes.sharder import Sharder
from ibm_nodes.state import SHARDS_KEY, State, merge
from ibm_nodes.stats import dataset_totals
from ibm_nodes.storage import Options

FAULTS = (ValueError, LookupError, TypeError, AttributeError, FileNotFoundError)
"""What the reading of a file may raise that is damaged, foreign, or has gone since it was listed."""
NUM_NAMED = 4


def survey(url: str, storage_options: Options = None) -> list[dict[str, Any]]:
    """Lists the attempts at all steps, oldest first, with a look into the smallest file of each.

    Returns:
        For each a dict of ``step``, ``lineage``, ``world_size``, ``complete``, ``missing`` (names of files), ``bytes``,
        ``position`` (None where the file cannot be read) and ``fault`` (why it cannot, or None).

    Raises:
        FileNotFoundError: if there is nothing.
    """
    entries = []
    for saved in _some(url, storage_options):
        position, fault = None, None
        try:
            content = read_saved(min(saved.files.values(), key=lambda item: item.size), storage_options)
            position = content["state"][Sharder.POSITION_KEY]
        except FAULTS as error:
            fault = _words(error)
        entries.append(
            {
                "step": saved.step,
                "lineage": saved.lineage,
                "world_size": saved.world_size,
                "complete": not saved.missing,
                "missing": saved.missing,
                "bytes": sum(item.size for item in saved.files.values()),
                "position": position,
                "fault": fault,
            }
        )
    return entries


def describe_step(url: str, step: int | None = None, storage_options: Options = None) -> dict[str, Any]:
    """Says what a complete step holds, the newest one if ``step`` is None.

    Returns:
        A dict of ``step``, ``lineage``, ``world_size``, ``position``, ``num_shards``, ``settings``, ``tokens``,
        ``datasets`` (as ``ibm_nodes.stats`` gives them, of all ranks together, and ``epochs``: the lowest and the
        highest that a logical shard is in), ``schedule`` (None without one, else what ``describe_schedule`` gives),
        ``quarantined`` (the places in the data that are left out because of a fault: ``dataset``, ``file``, the
        blocks [``first``, ``end``) of it, with an end of None all that follow, ``reason``, and ``shards``, how many
        logical shards recorded it) and ``bytes_per_rank``.

    Raises:
        FileNotFoundError: if there is no complete checkpoint, or not of that step.
        ValueError: if a file is damaged, or the files are not of one step.
    """
    found = _some(url, storage_options)
    steps = [saved.step for saved in found if not saved.missing]
    wanted = max(steps, default=None) if step is None else step
    candidates = [saved for saved in found if saved.step == wanted and not saved.missing]
    if not candidates:
        raise FileNotFoundError(_not_complete(url, step, found))
    chosen = newest(candidates, storage_options)
    contents = list(read_ranks(chosen, range(chosen.world_size), storage_options))
    state = merge(content["state"] for content in contents)
    shards = list(state[SHARDS_KEY].values())
    datasets: dict[str, dict[str, Any]] = {**dataset_totals(shards, state[Sharder.NUM_SHARDS_KEY], len(shards))}
    readers = list(_readers(shards))
    for reader in readers:
        entry = datasets[reader["settings"]["name"]]
        low, high = entry.get("epochs", (reader["epoch"], reader["epoch"]))
        entry["epochs"] = min(low, reader["epoch"]), max(high, reader["epoch"])
    return {
        "step": chosen.step,
        "lineage": chosen.lineage,
        "world_size": chosen.world_size,
        "position": state[Sharder.POSITION_KEY],
        "num_shards": state[Sharder.NUM_SHARDS_KEY],
        "settings": contents[0]["settings"],
        "tokens": sum(entry.get("tokens", 0) for entry in datasets.values()),
        "datasets": datasets,
        "schedule": describe_schedule(state[SCHEDULE_KEY], state[Sharder.POSITION_KEY]),
        "quarantined": _quarantined(readers),
        "bytes_per_rank": [chosen.files[rank].size for rank in range(chosen.world_size)],
    }


def describe_schedule(state: State | None, position: int) -> dict[str, Any] | None:
    """Says what is in force at a position and what was, or will be.

    Returns:
        A dict of ``weights`` (shares in force), ``entries`` (what was given: each with ``sample`` and ``tokens`` from
        which on it holds, and its shares as ``weights``), ``interpolate``, ``changes`` (what was set in the run: each
        with ``sample`` and ``weights``), ``seq_len`` (in force) and ``seq_lens`` (each with ``sample``, ``tokens`` and
        ``seq_len``; a schedule that was not told of lengths has one of 1, and counts samples for tokens).
    """
    if state is None:
        return None
    schedule = Schedule.restore(state)
    lengths = [
        {"sample": number, "tokens": schedule.tokens(number), "seq_len": length} for number, length in schedule.seq_lens
    ]
    return {
        "weights": shares(schedule.weights(position)[0]),
        "entries": [
            {"sample": number, "tokens": tokens, "weights": shares(weights)}
            for (number, weights), (tokens, _) in zip(schedule.entries, schedule.given, strict=True)
        ],
        "interpolate": schedule.interpolate,
        "changes": [{"sample": number, "weights": shares(weights)} for number, weights in schedule.changes],
        "seq_len": schedule.seq_len_at(position)[0],
        "seq_lens": lengths,
    }


def verify(url: str, step: int | None = None, storage_options: Options = None) -> tuple[list[str], list[str]]:
    """Reads every file of a step, or of all complete steps if ``step`` is None.

    Returns:
        In words what is whole, and the reasons for which something cannot be loaded. Steps that are not complete are a
        reason only if there is no other, or one was asked for.

    Raises:
        FileNotFoundError: if there is nothing.
    """
    found = [saved for saved in _some(url, storage_options) if step in (None, saved.step)]
    complete = [saved for saved in found if not saved.missing]
    if not complete:
        return [], [_not_complete(url, step, found or list_saved(url, storage_options))]
    whole, reasons = [], []
    for saved in complete:
        faults = _faults(saved, storage_options)
        reasons += [f"step {saved.step} cannot be loaded: {fault}" for fault in faults]
        if not faults:
            size = sum(item.size for item in saved.files.values())
            whole.append(
                f"step {saved.step} of lineage {saved.lineage} is whole: {len(saved.files)} files, {size} bytes"
            )
    whole += [
        f"step {saved.step} of lineage {saved.lineage} is not complete and will not be chosen: it lacks {_names(saved)}"
        for saved in found
        if saved.missing
    ]
    return whole, reasons


def newest(attempts: Iterable[Saved], storage_options: Options = None) -> Saved:
    """Gives the attempt that was saved last: the one that a load would choose."""
    first, *others = attempts
    if not others:
        return first
    return max([first, *others], key=lambda saved: read_saved(saved.files[0], storage_options)["saved_at"])


def read_ranks(saved: Saved, ranks: Iterable[int], storage_options: Options = None) -> Iterator[dict[str, Any]]:
    """Reads the files of some ranks.

    Raises:
        ValueError: if one is damaged, or holds something else than its name says.
    """
    for rank in ranks:
        content = read_saved(saved.files[rank], storage_options)
        expected = {"step": saved.step, "lineage": saved.lineage, "world_size": saved.world_size, "rank": rank}
        for name, value in expected.items():
            if content[name] != value:
                url = saved.files[rank].url
                raise ValueError(f"{url} has {name} {content[name]} inside and {value} in its name: was it renamed?")
        yield content


def _some(url: str, storage_options: Options) -> list[Saved]:
    found = list_saved(url, storage_options)
    if not found:
        raise FileNotFoundError(f"no checkpoint under {url}: give the URL that checkpoint.save was given")
    return found


def _faults(saved: Saved, storage_options: Options) -> list[str]:
    """Gives the reasons for which a complete step cannot be loaded: of each file, else of all together."""
    faults: list[str] = []
    contents: list[dict[str, Any]] = []
    for rank in range(saved.world_size):
        try:
            contents += read_ranks(saved, [rank], storage_options)
            faults += _misplaced(contents[-1])
        except FAULTS as error:
            faults.append(f"{saved.files[rank].url}: {_words(error)}")
    if faults:
        return faults
    try:
        state = merge(content["state"] for content in contents)
    except ValueError as error:
        return [_words(error)]
    if any(content["settings"] != contents[0]["settings"] for content in contents):
        return ["its files were saved with different settings"]
    return _out_of_step(state)


def _misplaced(content: dict[str, Any]) -> list[str]:
    """Looks for logical shards that the rank should have saved, or should not."""
    rank, state = content["rank"], content["state"]
    owned = set(range(rank, state[Sharder.NUM_SHARDS_KEY], content["world_size"]))
    faults = []
    if lacking := sorted(owned - set(state[SHARDS_KEY])):
        faults.append(f"the file of rank {rank} lacks the logical shards {lacking[:NUM_NAMED]}")
    if foreign := sorted(set(state[SHARDS_KEY]) - owned):
        faults.append(f"the file of rank {rank} holds the logical shards {foreign[:NUM_NAMED]} of other ranks")
    return faults


def _out_of_step(state: State) -> list[str]:
    """Compares the turns of the logical shards with the position, which tells them as long as none has ended."""
    position, num_shards = state[Sharder.POSITION_KEY], state[Sharder.NUM_SHARDS_KEY]
    if any(ended for _, ended, _ in state[SHARDS_KEY].values()):
        return []
    wrong = [
        shard
        for shard, (turns, _, _) in sorted(state[SHARDS_KEY].items())
        if turns != -((shard - position) // num_shards)
    ]
    return [f"logical shards {wrong[:NUM_NAMED]} do not stand at sample {position}"] if wrong else []


def _readers(state: Any) -> Iterator[State]:
    """Gives the states of readers, at any depth."""
    if isinstance(state, dict):
        if "epoch" in state and "settings" in state:
            yield state
            return
        state = state.values()
    elif not isinstance(state, list | tuple):
        return
    for value in state:
        yield from _readers(value)


def _quarantined(readers: Iterable[State]) -> list[dict[str, Any]]:
    """Gives the places that readers recorded, each once."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for reader in readers:
        for place in reader.get(Reader.QUARANTINED_KEY, []):
            entry = {"dataset": reader["settings"]["name"], **{key: place[key] for key in ("file", "first", "end")}}
            kept = found.setdefault(tuple(entry.values()), {**entry, "reason": place["reason"], "shards": 0})
            kept["shards"] += 1
    return sorted(found.values(), key=lambda place: (place["dataset"], place["file"], place["first"]))


def _names(saved: Saved) -> str:
    more = len(saved.missing) - NUM_NAMED
    return ", ".join(saved.missing[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _not_complete(url: str, step: int | None, found: list[Saved]) -> str:
    what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
    complete = sorted({saved.step for saved in found if not saved.missing})
    torn = [saved for saved in found if saved.missing and step in (None, saved.step)]
    lacking = [f"step {saved.step} lacks {_names(saved)}" for saved in torn[-NUM_NAMED:]]
    there = f"complete are {complete}" if complete else "none is complete"
    return "; ".join([f"{what} under {url}: {there}", *lacking])


def _words(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}: it is no checkpoint of a loader"
    if isinstance(error, ValueError | FileNotFoundError):
        return str(error)
    return f"it is no checkpoint of a loader ({error})"
