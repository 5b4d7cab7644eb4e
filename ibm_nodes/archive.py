"""Archive: the bytes of one checkpoint file, checked when they are read."""

import hashlib
import io
import math
import pickle
import warnings
from typing import Any

import numpy as np
import torch

FORMAT = "ibm_nodes checkpoint"
VERSION = 1
PACKED = "__packed__"
DAMAGE = (
    AttributeError, EOFError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError,
)  # fmt: skip
"""What damaged bytes may raise below ``torch.load``."""


def encode(content: dict[str, Any]) -> bytes:
    """Gives the bytes of a file: plain data, with a version and a checksum."""
    payload = _save(content)
    return _save({"format": FORMAT, "version": VERSION, "checksum": _checksum(payload), "payload": _tensor(payload)})


def decode(data: bytes | bytearray, url: str) -> dict[str, Any]:
    """Reads what ``encode`` gave.

    Raises:
        ValueError: if it is damaged, something else, or of a newer version; names the file.
    """
    outer = _load(data, url)
    if outer.get("format") != FORMAT:
        raise ValueError(f"{url} is not a checkpoint of a loader: give the URL that checkpoint.save was given")
    try:
        newer = outer["version"] > VERSION
        checksum, payload = ("", b"") if newer else (outer["checksum"], outer["payload"].numpy().tobytes())
    except DAMAGE as error:
        raise ValueError(f"{url} is damaged ({error!r}): load an older step") from error
    if newer:
        raise ValueError(
            f"{url} was written by a newer ibm_nodes (version {outer['version']}, this one reads {VERSION}): upgrade"
        )
    if _checksum(payload) != checksum:
        raise ValueError(f"{url} is damaged (its checksum differs): load an older step")
    return _load(payload, url)


def pack(state: Any) -> tuple[Any, torch.Tensor]:
    """Takes the tensors out of a state into one of bytes, ids in 16 bits where they fit."""
    parts: list[bytes] = []
    return _pack(state, parts, [0]), _tensor(b"".join(parts))


def unpack(packed: tuple[Any, torch.Tensor]) -> Any:
    """Puts back what ``pack`` took out."""
    structure, tensor = packed
    return _unpack(structure, tensor.numpy().tobytes())


def _pack(state: Any, parts: list[bytes], end: list[int]) -> Any:
    if isinstance(state, torch.Tensor) and state.dtype != torch.bfloat16:
        array = state.numpy()
        stored = array
        if (
            array.dtype.kind in "iu"
            and array.itemsize > 2
            and array.size
            and 0 <= array.min()
            and array.max() < 1 << 16
        ):
            stored = array.astype(np.uint16)
        parts.append(stored.tobytes())
        end[0] += stored.nbytes
        return {PACKED: end[0], "dtype": array.dtype.str, "stored": stored.dtype.str, "shape": tuple(state.shape)}
    if isinstance(state, dict):
        return {key: _pack(value, parts, end) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)([_pack(value, parts, end) for value in state])
    return state


def _unpack(structure: Any, data: bytes) -> Any:
    if isinstance(structure, dict):
        if PACKED not in structure:
            return {key: _unpack(value, data) for key, value in structure.items()}
        stored, count = np.dtype(structure["stored"]), math.prod(structure["shape"])
        array = np.frombuffer(data, stored, count, structure[PACKED] - stored.itemsize * count)
        return torch.from_numpy(array.astype(structure["dtype"]).reshape(structure["shape"]))
    if type(structure) in (list, tuple):
        return type(structure)([_unpack(value, data) for value in structure])
    return structure


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _save(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _load(data: bytes | bytearray, url: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickles that are not its own
            content = torch.load(io.BytesIO(data), weights_only=True)
    except DAMAGE as error:
        raise ValueError(f"{url} is damaged or no checkpoint ({error}): load an older step") from error
    if not isinstance(content, dict):
        raise ValueError(f"{url} is damaged or no checkpoint (a {type(content).__name__}): load an older step")
    return content
