"""Archive: the bytes of one checkpoint file, checked when they are read."""

import hashlib
import io
import json
import math
import pickle
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import torch

FORMAT = "ibm_nodes checkpoint"
VERSION = 1
SCALARS = frozenset({str, int, float, bool, type(None)})
LENGTH = struct.Struct("<q")
DAMAGE = (
    AssertionError, AttributeError, BufferError, EOFError, IndexError, KeyError, OSError, RuntimeError, TypeError,
    ValueError, pickle.UnpicklingError,
)  # fmt: skip
"""What damaged bytes may raise below ``torch.load``."""


def encode(content: dict[str, Any]) -> bytes:
    """Gives the bytes of a file: plain data, with a version and a checksum."""
    payload = pack(content)
    file = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, "checksum": _checksum(payload), "payload": payload}, file)
    return file.getvalue()


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
        is_whole = newer or _checksum(outer["payload"]) == outer["checksum"]
    except DAMAGE as error:
        raise ValueError(f"{url} is damaged ({error!r}): load an older step") from error
    if newer:
        raise ValueError(
            f"{url} was written by a newer ibm_nodes (version {outer['version']}, this one reads {VERSION}): upgrade"
        )
    if not is_whole:
        raise ValueError(f"{url} is damaged (its checksum differs): load an older step")
    try:
        content: dict[str, Any] = unpack(outer["payload"])
    except DAMAGE as error:
        raise ValueError(f"{url} is no checkpoint of a loader ({error}): load an older step") from error
    return content


def pack(state: Any) -> torch.Tensor:
    """Makes one tensor of bytes of a state: its structure as compressed JSON, then its arrays, ids in 16 bits.

    (``torch.save`` calls a function of Python's for every object of a structure, under the lock that a trainer needs.)

    Raises:
        TypeError: if something in it is no plain data.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_pack(state, arrays, [0]), separators=(",", ":")).encode()
    structure = zlib.compress(text, 1)
    size = LENGTH.size + len(structure)
    packed = np.empty(size + sum(array.nbytes for array in arrays), np.uint8)
    packed[:size] = np.frombuffer(LENGTH.pack(len(structure)) + structure, np.uint8)
    for array in arrays:
        packed[size : size + array.nbytes] = array.reshape(-1).view(np.uint8)
        size += array.nbytes
    return torch.from_numpy(packed)


def unpack(packed: torch.Tensor) -> Any:
    """Gives the state that ``pack`` was given.

    Raises:
        ValueError: if it is something else.
    """
    data = packed.numpy()
    try:
        (length,) = LENGTH.unpack(data[: LENGTH.size].tobytes())
        end = LENGTH.size + length
        structure = json.loads(zlib.decompress(data[LENGTH.size : end].tobytes()))
    except (struct.error, zlib.error) as error:
        raise ValueError(f"this is no packed state ({error})") from error
    return _unpack(structure, data[end:])


def _pack(state: Any, arrays: list[np.ndarray], end: list[int]) -> Any:
    """Gives JSON for a state: what JSON knows as it is, all else as a list that begins with what it is."""
    kind = type(state)
    if kind in SCALARS:
        return state
    if kind in (list, tuple):
        return [kind.__name__, *(value if type(value) in SCALARS else _pack(value, arrays, end) for value in state)]
    if kind is dict:
        if all(type(key) is str for key in state):
            return {key: _pack(value, arrays, end) for key, value in state.items()}
        return ["dict", *((_pack(key, arrays, end), _pack(value, arrays, end)) for key, value in state.items())]
    if kind is bytes:
        array = np.frombuffer(state, np.uint8)
        return ["bytes", *_store(array, arrays, end)]
    if not isinstance(state, torch.Tensor):
        raise TypeError(f"a state must be made of plain data and tensors to be saved, got {kind.__name__}")
    if state.dtype == torch.bfloat16:
        return ["bfloat16", *_store(state.view(torch.int16).numpy(), arrays, end)]
    return ["tensor", *_store(state.numpy(), arrays, end)]


def _store(array: np.ndarray, arrays: list[np.ndarray], end: list[int]) -> tuple[str, str, int, list[int]]:
    """Adds an array to those stored; gives its type, the one that it is stored with, where it begins, and its shape."""
    stored = np.ascontiguousarray(array)
    if array.dtype.kind in "iu" and array.itemsize > 2 and array.size and 0 <= array.min() and array.max() < 1 << 16:
        stored = array.astype(np.uint16)
    arrays.append(stored)
    begin = end[0]
    end[0] += stored.nbytes
    return array.dtype.str, stored.dtype.str, begin, list(array.shape)


def _unpack(structure: Any, data: np.ndarray) -> Any:
    if type(structure) is dict:
        return {key: _unpack(value, data) for key, value in structure.items()}
    if type(structure) is not list:
        return structure
    kind, *parts = structure
    if kind in ("list", "tuple"):
        values = [_unpack(value, data) if type(value) in (list, dict) else value for value in parts]
        return values if kind == "list" else tuple(values)
    if kind == "dict":
        return {_unpack(key, data): _unpack(value, data) for key, value in parts}
    dtype, stored, begin, shape = parts
    size = np.dtype(stored).itemsize * math.prod(shape)
    array = np.frombuffer(data[begin : begin + size].tobytes(), stored).astype(dtype).reshape(shape)
    if kind == "bytes":
        return array.tobytes()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if kind == "bfloat16" else tensor


def _checksum(payload: torch.Tensor) -> str:
    return hashlib.blake2b(payload.numpy().data, digest_size=16).hexdigest()


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
