"""Settings: what a loader was built with, as plain data to save beside its state and to compare."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchdata.nodes import BaseNode

from ibm_nodes.batcher import Batcher
from ibm_nodes.listing import ListingSession, listings_in
from ibm_nodes.loader import Loader
from ibm_nodes.prefetcher import Prefetcher
from ibm_nodes.read_ahead import nothing_ahead
from ibm_nodes.sharder import Sharder
from ibm_nodes.state import SHARDS_KEY

SECRET = ("storage_options", "listing")
PLAIN = (str, int, float, bool, type(None))


def find_sharder(loader: Loader[Any]) -> Sharder[Any]:
    """Gives the loader's Sharder.

    Raises:
        ValueError: if there is none.
        TypeError: if it is a loader of another class.
    """
    if not isinstance(loader, Loader):
        raise TypeError(f"loader must be an ibm_nodes.Loader, got a {type(loader).__module__}.{type(loader).__name__}")
    node: Any = loader.root
    while node is not None and not isinstance(node, Sharder):
        node = getattr(node, "source", None)
    if node is None:
        raise ValueError("loader must have a Sharder in its graph to be saved by rank: use state_dict() for others")
    return node


def describe(loader: Loader[Any]) -> dict[str, Any]:
    """Gives the settings of all nodes by name, equal on all ranks; storage options are left out.

    ``global_batch_size`` is what the loader was told that an optimizer step takes, or else a batch of each rank. A
    graph is built for this, of logical shard 0, and nothing is read.
    """
    sharder = find_sharder(loader)
    found: dict[str, Any] = {"Sharder.num_shards": sharder.num_shards, "Sharder.skip": sharder.skip}
    if sharder.schedule is not None:
        found |= {"schedule": repr(sharder.schedule), "schedule.changes": repr(sharder.schedule.changes)}
    for node in _above(loader, sharder):
        if isinstance(node, Batcher):
            found["global_batch_size"] = loader.global_batch_size or node.batch_size * sharder.world_size
        if isinstance(node, Prefetcher):
            found["prefetch_factor"] = node.prefetch_factor
    _add(found, "", sharder.graph(0, sharder.num_shards))
    return found


def set_weights(loader: Loader[Any], weights: Mapping[str, float], *, at: int) -> None:
    """Changes the weights of a running loader from a sample on; nothing is repaid, and no dataset loses its place.

    All ranks must call it after the same batch, with the same arguments. The change is in the states from then on.

    Args:
        loader: one whose mixers and Sharder share a ``Schedule``, as the recipes' do.
        weights: share of tokens by dataset; a name that is left out has 0.
        at: number of the first sample in the global stream that is drawn with them. At least the position of the last
            batch handed out, and prefetch_factor + 2 global batches more, since other ranks may have drawn so far.

    Raises:
        ValueError: if ``at`` is too early, on every rank alike; if a name is unknown, or a weight out of range; if the
            loader has no Schedule.
    """
    sharder = find_sharder(loader)
    if sharder.schedule is None:
        raise ValueError("loader must have a Schedule to change its weights: give one to its mixers and its Sharder")
    batches, batch_size = 2, 1
    for node in _above(loader, sharder):
        batches += node.prefetch_factor if isinstance(node, Prefetcher) else 0
        batch_size *= node.batch_size if isinstance(node, Batcher) else 1
    earliest = loader.state_dict()[Sharder.POSITION_KEY] + batches * batch_size * sharder.world_size
    if at < earliest:
        raise ValueError(
            f"at must be at least {earliest}, got {at}: samples before it may be drawn already, here or on other ranks"
        )
    sharder.schedule.add(at, weights)


def _above(loader: Loader[Any], sharder: Sharder[Any]) -> Iterator[Any]:
    node: Any = loader.root
    while node is not sharder:
        yield node
        node = node.source


def _add(found: dict[str, Any], prefix: str, node: BaseNode[Any]) -> None:
    path = f"{prefix}{type(node).__name__}"
    for name, value in vars(node).items():
        if name.startswith("_") or name in SECRET:
            continue
        for key, inner in value.items() if isinstance(value, Mapping) else [(None, value)]:
            if isinstance(inner, BaseNode):
                _add(found, prefix if key is None else f"{prefix}{key}.", inner)
            elif _is_plain(inner):
                found[f"{path}.{name}" if key is None else f"{path}.{name}.{key}"] = inner


def _is_plain(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, PLAIN) for part in parts)


def derive_lineage(origin: tuple[str, int] | None, settings: Mapping[str, Any]) -> str:
    """Gives the name of a chain of starts: the origin that this one was loaded from, and its settings.

    Equal on all ranks without a word between them; the same chain gives the same data, at any world size. Of a state
    that was loaded without a lineage the origin knows the position alone, so that two such chains may share a name.
    """
    text = json.dumps([origin, sorted(settings.items())], default=repr)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Puts into words what changed from one description to another."""
    changes = []
    for name in sorted({*before, *after}):
        if name not in after:
            changes.append(f"{name} is gone (was {before[name]!r})")
        elif name not in before:
            changes.append(f"{name} is new ({after[name]!r})")
        elif before[name] != after[name]:
            changes.append(f"{name} was {before[name]!r} and is now {after[name]!r}")
    return changes


def check_graph(sharder: Sharder[Any], state: dict[str, Any]) -> None:
    """Lets the nodes of one logical shard compare their settings with the state's, now and not at the first batch.

    Raises:
        ValueError: naming the node, the setting and both values.
    """
    if state[Sharder.NUM_SHARDS_KEY] == sharder.num_shards:
        own = state[SHARDS_KEY].get(sharder.rank)
        if own is not None and own[2] is not None:
            with nothing_ahead(), ListingSession(sharder.saved_listings, listings_in(state[SHARDS_KEY])):
                sharder.graph(sharder.rank, sharder.num_shards).reset(own[2])
