"""Settings: what a loader was built with, as plain data to save beside its state and to compare."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torchdata.nodes import BaseNode

from ibm_nodes.batcher import Batcher
from ibm_nodes.loader import Loader
from ibm_nodes.prefetcher import Prefetcher
from ibm_nodes.sharder import Sharder

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
    node: Any = loader.root
    while node is not sharder:
        if isinstance(node, Batcher):
            found["global_batch_size"] = loader.global_batch_size or node.batch_size * sharder.world_size
        if isinstance(node, Prefetcher):
            found["prefetch_factor"] = node.prefetch_factor
        node = node.source
    _add(found, "", sharder.graph(0, sharder.num_shards))
    return found


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
