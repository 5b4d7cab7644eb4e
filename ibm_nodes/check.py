"""A look ahead at what a run would read: the listing and one block of each dataset."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from torchdata.nodes import BaseNode, Loader

from ibm_nodes import formats
from ibm_nodes.batcher import Batcher
from ibm_nodes.formats.lists import check_ids
from ibm_nodes.listing import Listing, StoredObject
from ibm_nodes.mixer import Mixer
from ibm_nodes.packer import Packer
from ibm_nodes.prefetcher import Prefetcher
from ibm_nodes.read_ahead import BUDGET_BYTES
from ibm_nodes.reader import Reader
from ibm_nodes.sharder import Sharder
from ibm_nodes.shuffler import Shuffler
from ibm_nodes.storage import Object
from ibm_nodes.tokenizer import Tokenizer, encoder

N = TypeVar("N")

MAX_BLOCKS = 32
"""How many blocks are looked at, at most, for one that has a token."""
ROW_BYTES = 150
"""What a logical shard keeps in memory for a row of its present block, beside the tokens."""


class Block(NamedTuple):
    """What one block says of its dataset.

    ``resume_bytes`` is what resuming in its file decodes again at most: the blocks that go on from each other;
    ``fault`` is what a run would raise for it.
    """

    type: str
    num_tokens: int
    largest_id: int
    stored_bytes: int
    memory_bytes: int
    resume_bytes: int
    fault: ValueError | None


def check(
    loader: Loader[Any], arguments: Mapping[str, Any], *, world_size: int, num_tokens: int | None = None
) -> tuple[dict[str, Any], list[Exception]]:
    """Says what a run would meet, as far as a block of each dataset tells; starts nothing of the loader.

    Args:
        loader: what a recipe returned.
        arguments: of the recipe, with its defaults; global_batch_size and micro_batch_size count.
        world_size: number of ranks that memory is meant for.
        num_tokens: length of the run.

    Returns:
        Plain data to show, and what the run would fail on.

    Raises:
        TypeError: if the loader has no Reader in its graph.
    """
    nodes = list(_nodes(loader.root))
    sharder = _first(nodes, Sharder)
    num_shards = sharder.num_shards if sharder else 1
    if sharder:
        nodes += _nodes(sharder.graph(0, num_shards))
    readers = [node for node in nodes if isinstance(node, Reader)]
    if not readers:
        raise TypeError("a recipe must have a Reader in its loader to be checked, and this one has none")
    num_owned = -(-num_shards // world_size)
    problems: list[Exception] = _beyond_vocabulary(nodes)
    datasets, blocks_bytes = {}, 0
    for reader in readers:
        listing, share = _listing(reader), _share(nodes, reader.name)
        tokenizer = _tokenizer(nodes, reader)
        block, fault = _block(reader, listing, tokenizer)
        if fault and share:  # nothing is drawn at a weight of zero
            problems.append(fault)
        datasets[reader.name] = _dataset(reader, tokenizer, listing, block, share, num_tokens)
        blocks_bytes += _blocks_bytes(listing, block, num_owned)
    packer = _first(nodes, Packer)
    return {
        "datasets": datasets,
        "num_shards": num_shards,
        "global_batch_size": arguments.get("global_batch_size"),
        "seq_len": packer.seq_len if packer else None,
        "num_tokens": num_tokens,
        "num_samples": _num_samples(packer, num_tokens) if packer and num_tokens else None,
        "world_size": world_size,
        "memory_bytes": blocks_bytes + min(blocks_bytes, BUDGET_BYTES) + _buffers_bytes(nodes, num_owned),
        "world_sizes": _world_sizes(num_shards, arguments),
    }, problems


def _nodes(node: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    """Gives a node and those that it draws from."""
    yield node
    for source in [node.source] if hasattr(node, "source") else getattr(node, "sources", {}).values():
        yield from _nodes(source)


def _first(nodes: Sequence[Any], kind: type[N]) -> N | None:
    return next((node for node in nodes if isinstance(node, kind)), None)


def _share(nodes: Sequence[Any], name: str) -> float:
    mixer = _first(nodes, Mixer)
    return mixer.weights[name] / sum(mixer.weights.values()) if mixer and name in mixer.weights else 1.0


def _tokenizer(nodes: Sequence[Any], reader: Reader) -> Tokenizer | None:
    """Gives the tokenizer of a reader's rows."""
    tokenizers = (node for node in nodes if isinstance(node, Tokenizer))
    return next((node for node in tokenizers if any(below is reader for below in _nodes(node))), None)


def _listing(reader: Reader) -> Listing:
    options = reader.storage_options
    if isinstance(reader.listing, Listing):
        return reader.listing
    return formats.list_dataset(reader.url, format=reader.format, listing=reader.listing, storage_options=options)


def _block(reader: Reader, listing: Listing, tokenizer: Tokenizer | None) -> tuple[Block | None, Exception | None]:
    """Gives a block that has a token, if there is one, and what reading the dataset would raise."""
    try:
        for item, file, number in itertools.islice(_places(reader, listing), MAX_BLOCKS):
            block = _read(item, file, number, reader.vocab_size, tokenizer)
            if block.num_tokens:
                return block, block.fault
    except (ValueError, LookupError, TypeError, OSError, ImportError, pa.ArrowException) as error:
        return None, error
    return None, ValueError(
        f"dataset {reader.name!r} at {reader.url} has no token in column {_column(reader)!r}, as far as was looked: "
        "leave it out of the mix"
    )


def _places(reader: Reader, listing: Listing) -> Iterator[tuple[Object, formats.ShardFile, int]]:
    """Gives the blocks of a dataset, those of the largest file first, and of a file those from the middle on."""
    for item in sorted(listing.objects, key=lambda item: -item.size):
        file = formats.open_file(
            StoredObject(listing, item), reader.format, reader.columns or reader.column, reader.condition
        )
        middle = len(file.groups) // 2 if file.splittable else 0
        for number in [*range(middle, len(file.groups)), *range(middle)]:
            yield item, file, number


def _read(
    item: Object, file: formats.ShardFile, number: int, vocab_size: int | None, tokenizer: Tokenizer | None
) -> Block:
    place, fault = f"in block {number} of {item.url}", None
    try:
        lists = file.read(number)
        if tokenizer is not None:
            lists = _tokens(lists, tokenizer)
            vocab_size = tokenizer.vocab_size
    except (ValueError, TypeError, OSError, pa.ArrowException) as error:
        error.add_note(place)
        raise
    kind = f"lists of {lists.values.dtype}" if tokenizer is None else "text"
    rows = zip(lists.begins.tolist(), lists.ends.tolist(), strict=True)
    largest_id = max((int(lists.values[begin:end].max()) for begin, end in rows if begin < end), default=-1)
    try:
        lists = check_ids(lists, vocab_size, item.url)
    except ValueError as error:
        error.add_note(place)
        fault = error
    return Block(
        kind,
        int((lists.ends - lists.begins).sum()),
        largest_id,
        int(file.spans[number + 1] - file.spans[number]),
        lists.values.nbytes + ROW_BYTES * len(lists.rows),
        int(np.diff(file.spans[np.append(np.unique(file.groups, return_index=True)[1], -1)]).max()),
        fault,
    )


def _column(reader: Reader) -> str:
    return ", ".join(reader.columns or [reader.column])


def _tokens(lists: formats.Lists, tokenizer: Tokenizer) -> formats.Lists:
    """Tokenizes rows of text."""
    texts = [row[tokenizer.column] or "" for row in lists.values]
    made = encoder(tokenizer.tokenizer, tokenizer.allow_special_tokens, tokenizer.storage_options)
    return formats.Lists.of(made.encode(texts, tokenizer.add_special_tokens), lists.rows)


def _dataset(
    reader: Reader,
    tokenizer: Tokenizer | None,
    listing: Listing,
    block: Block | None,
    share: float,
    num_tokens: int | None,
) -> dict[str, Any]:
    num_bytes = listing.starts[-1]
    estimate = num_bytes * block.num_tokens // block.stored_bytes if block else None
    return {
        "url": reader.url,
        "files": len(listing.objects),
        "bytes": num_bytes,
        "tokens": estimate,
        "share": share,
        "passes": num_tokens * share / estimate if num_tokens and estimate else None,
        "column": _column(reader),
        "type": block.type if block else None,
        "largest_id": block.largest_id if block else None,
        "vocab_size": reader.vocab_size if tokenizer is None else tokenizer.vocab_size,
        "resume_bytes": block.resume_bytes if block else None,
    }


def _beyond_vocabulary(nodes: Sequence[Any]) -> list[Exception]:
    packer, reader = _first(nodes, Packer), _first(nodes, Tokenizer) or _first(nodes, Reader)
    vocab_size = reader.vocab_size if reader else None
    if packer is None or vocab_size is None:
        return []
    ids = {"eos_id": packer.eos_id, "bos_id": packer.bos_id}
    return [
        ValueError(f"{name} must be below vocab_size={vocab_size}, got {value}: the model would have no row for it")
        for name, value in ids.items()
        if value is not None and value >= vocab_size
    ]


def _blocks_bytes(listing: Listing, block: Block | None, num_owned: int) -> int:
    """Gives what the present blocks of the logical shards take; shards that stand in one block share it."""
    if block is None:
        return 0
    return min(num_owned, -(-listing.starts[-1] // block.stored_bytes)) * block.memory_bytes


def _buffers_bytes(nodes: Sequence[Any], num_owned: int) -> int:
    """Gives what the shuffles' samples and the batches that are ready take."""
    packer, shuffler = _first(nodes, Packer), _first(nodes, Shuffler)
    batcher, prefetcher = _first(nodes, Batcher), _first(nodes, Prefetcher)
    num_open = packer.num_open if packer and packer.strategy == "best_fit" else 1
    num_samples = num_owned * (num_open + (shuffler.buffer_size if shuffler else 0))
    num_batched = (2 + (prefetcher.prefetch_factor if prefetcher else 0)) * (batcher.batch_size if batcher else 0)
    return (_longest(packer) if packer else 0) * (4 * num_samples + 16 * num_batched)


def _longest(packer: Packer) -> int:
    return packer.schedule.longest if packer.schedule else packer.seq_len


def _num_samples(packer: Packer, num_tokens: int) -> float:
    return packer.schedule.samples(num_tokens) if packer.schedule else num_tokens / packer.seq_len


def _world_sizes(num_shards: int, arguments: Mapping[str, Any]) -> list[int]:
    """Gives the world sizes that divide both the logical shards and the batch."""
    batch_size = arguments.get("global_batch_size") or num_shards
    micro_batch_size = arguments.get("micro_batch_size") or 1
    sizes = range(1, num_shards + 1)
    return [size for size in sizes if num_shards % size == 0 and batch_size % (size * micro_batch_size) == 0]
