"""What a loader has handed out, and what it waited for."""

from collections.abc import Iterator
from typing import Any

from torchdata.nodes import Loader

from ibm_nodes.packer import COUNTS, Packer
from ibm_nodes.read_ahead import counters
from ibm_nodes.state import SHARDS_KEY, State

READER_COUNTS = ("passes", "skipped", "quarantined")


def stats(loader: Loader[Any]) -> dict[str, Any]:
    """Gives what the loader has handed out on this rank since the run began, as plain numbers.

    Returns:
        A dict of ``position`` (samples handed out on all ranks), ``filler`` (share of filler in what this rank drew
        since it was built), ``waited_seconds`` (of the consumer, for the loader),
        ``store`` (of the whole process: requests, bytes, seconds in requests, seconds that nodes waited for blocks),
        ``packing``: documents that were packed, the shares of them that were ``truncated`` (cut by the end of a sample
        or to its length) and ``dropped``, and the share of samples that is ``padding``; and ``datasets``: for each name
        tokens and documents drawn, ``share`` of all tokens, ``weight``, ``passes`` over the data, ``skipped``,
        documents without tokens, ``used_up``, the share of this rank's logical shards in which it has ended,
        ``quarantined``, bad places that are left out, each counted by every logical shard that came by it, and
        ``dropped`` documents and ``dropped_tokens`` if a ``Filter`` dropped any. What waits in buffers counts.
    """
    state = loader.state_dict()
    shards = list(state.get(SHARDS_KEY, {0: state}).values())
    return {
        "position": state.get("position"),
        "filler": sum(getattr(node, "num_filler", 0) for node in _chain(loader.root))
        / max(1, sum(getattr(node, "num_items", 0) for node in _chain(loader.root))),
        "waited_seconds": sum(getattr(node, "waited_seconds", 0.0) for node in _chain(loader.root)),
        "store": {
            "requests": counters.requests,
            "bytes": counters.bytes,
            "seconds": counters.store_seconds,
            "waited_seconds": counters.waited_seconds,
        },
        "packing": packing_totals(shards),
        "datasets": dataset_totals(shards, state.get("num_shards", 1), len(state.get(SHARDS_KEY, [0]))),
    }


def packing_totals(shards: list[State]) -> dict[str, float]:
    """Gives what shards' states say of packing."""
    total = dict.fromkeys(COUNTS, 0)
    for packer in (found for shard in shards for found in _find(shard, Packer.TAIL_KEY) if Packer.COUNTS_KEY in found):
        for name, count in packer[Packer.COUNTS_KEY].items():
            total[name] += count
    return {
        "documents": total["documents"],
        "truncated": total["truncated"] / max(1, total["documents"]),
        "dropped": total["dropped"] / max(1, total["documents"]),
        "padding": total["padding"] / max(1, total["tokens"] + total["padding"]),
    }


def dataset_totals(shards: list[State], num_shards: int, num_owned: int) -> dict[str, dict[str, float]]:
    """Gives what shards' states say of each dataset; ``num_owned`` of ``num_shards`` are given."""
    datasets: dict[str, dict[str, float]] = {}
    for mixer in (found for shard in shards for found in _find(shard, "credits")):
        total = sum(mixer["weights"].values()) or 1
        for name, tokens in mixer["tokens"].items():
            entry = datasets.setdefault(
                name, dict.fromkeys(("tokens", "documents", "share", "weight", "used_up", *READER_COUNTS), 0)
            )
            entry["tokens"] += tokens
            entry["documents"] += mixer["documents"][name]
            entry["weight"] = mixer["weights"].get(name, 0) / total
            entry["used_up"] += name in mixer["ended"]
    for name, reader in (found for shard in shards for found in _readers(shard)):
        entry = datasets.setdefault(name or reader["settings"]["name"], dict.fromkeys(READER_COUNTS, 0))
        entry["passes"] += reader["passes"] * (num_shards if reader["whole"] else 1) / num_owned
        entry["skipped"] += reader["skipped"]
        entry["quarantined"] += len(reader.get("quarantined", ()))  # none in states of older versions
    for state in (found for shard in shards for found in _find(shard, "dropped_by_dataset")):
        for name, (documents, tokens) in state["dropped_by_dataset"].items():
            entry = datasets.setdefault(name, dict.fromkeys(READER_COUNTS, 0))
            entry["dropped"] = entry.get("dropped", 0) + documents
            entry["dropped_tokens"] = entry.get("dropped_tokens", 0) + tokens
    drawn = sum(entry.get("tokens", 0) for entry in datasets.values())
    for entry in datasets.values():
        entry["used_up"] = entry.get("used_up", 0) / num_owned
        if drawn and "tokens" in entry:
            entry["share"] = entry["tokens"] / drawn
    return datasets


def _readers(shard: State) -> Iterator[tuple[str, State]]:
    """Gives the states of readers by the name that a mixer has for each; "" without a mixer."""
    mixed = [(name, source) for mixer in _find(shard, "credits") for name, source in mixer["sources"].items()]
    for name, source in mixed or [("", shard)]:
        texts = sum(found["without_tokens"] for found in _find(source, "without_tokens"))
        for reader in _find(source, "passes"):
            yield name, {**reader, "skipped": reader["skipped"] + texts}
            texts = 0


def _find(state: Any, key: str) -> Iterator[State]:
    """Gives the states, at any depth, that have a key."""
    if isinstance(state, dict):
        if key in state:
            yield state
        state = list(state.values())
    if isinstance(state, list | tuple):
        for value in state:
            yield from _find(value, key)


def _chain(node: Any) -> Iterator[Any]:
    while node is not None:
        yield node
        node = getattr(node, "source", None)
