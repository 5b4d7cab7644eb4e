"""States: plain data, checked strictly, and merged from the ranks that saved them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

State = dict[str, Any]

SHARDS_KEY = "shards"


def check_keys(node: object, state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Checks that a state has exactly the keys that a node writes.

    Raises:
        ValueError: naming the node and the keys that are missing or unknown.
    """
    expected, found = set(keys), set(state)
    if expected != found:
        missing, unknown = sorted(expected - found), sorted(map(str, found - expected))
        raise ValueError(
            f"this is not a state of {type(node).__name__}: missing keys {missing}, unknown keys {unknown}; "
            "load it into the graph that it was saved from"
        )


def check_settings(node: object, state: Mapping[str, Any], **settings: Any) -> None:
    """Checks that settings which shape the order of data are those that the state was saved with.

    Raises:
        ValueError: naming the setting and both values.
    """
    for name, value in settings.items():
        if state[name] != value:
            raise ValueError(
                f"{type(node).__name__} was saved with {name}={state[name]!r} and is now built with {name}={value!r}, "
                "which would change the order of data: build it as it was, or start without the state"
            )


def copy_state(state: Any) -> Any:
    """Copies a state, so that whoever writes to the copy changes nothing else."""
    if type(state) is dict:
        return {key: copy_state(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)([copy_state(value) for value in state])
    return state.clone() if isinstance(state, torch.Tensor) else state


def merge(states: Iterable[State]) -> State:
    """Merges the states of all ranks into one that can be loaded at any world size.

    What stands under ``shards`` is united; everything else must be equal on all ranks.

    Raises:
        ValueError: if there are no states, two of them hold the same logical shard, or they disagree: then they were
            not taken at the same step, and the message says which states disagree about what.
    """
    merged: State | None = None
    owner: dict[Any, int] = {}
    for number, state in enumerate(states):
        if SHARDS_KEY not in state:
            raise ValueError(
                f"state {number} has no {SHARDS_KEY!r}: only states of graphs with a Sharder can be merged"
            )
        if merged is None:
            merged = {**state, SHARDS_KEY: {}}
        _check_equal(merged, state, number)
        for shard, value in state[SHARDS_KEY].items():
            if shard in owner:
                raise ValueError(
                    f"states {owner[shard]} and {number} both hold logical shard {shard}: merge each rank's state once"
                )
            owner[shard] = number
            merged[SHARDS_KEY][shard] = value
    if merged is None:
        raise ValueError("states must not be empty")
    return merged


def _check_equal(first: State, state: State, number: int) -> None:
    for key in sorted({*first, *state} - {SHARDS_KEY}):
        if key not in first or key not in state or first[key] != state[key]:
            ours, theirs = first.get(key, "nothing"), state.get(key, "nothing")
            raise ValueError(
                f"states 0 and {number} disagree about {key!r} ({ours!r} and {theirs!r}): they are not of the same step"
            )
