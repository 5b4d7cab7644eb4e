"""What flows between nodes, and how a buffer of it becomes plain data for a state."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch

T = TypeVar("T")
U = TypeVar("U")

TAG = "__item__"
KEY_TYPES = (str, int, float, bool)


class Document(NamedTuple):
    """The tokens of one document and the place that they come from.

    Attributes:
        tokens: one-dimensional array of token ids, as narrow as the ids of its block allow: uint16, int32 or int64.
            Do not write to it, it is a view of the block; and widen it before arithmetic that may leave its range.
        url: the object that holds the document.
        row: its row in that object, counted from 0.
        name: the dataset's name.
        epoch: how many times the dataset was passed before, in this logical shard.
    """

    tokens: np.ndarray
    url: str = ""
    row: int = 0
    name: str = ""
    epoch: int = 0


Place = tuple[str, str, int, int]
"""Where a run of tokens comes from: the dataset's name, the object's URL, the row in it, and the offset, in the
document, of the first token of the run; an offset of -1 is a BOS that the packer put before it. (A plain tuple, so
that a state can hold it as it is.)
"""


class Documents(Sequence[Document]):
    """Documents by columns: an object for each is made when it is asked for.

    Args:
        tokens: the tokens of each.
        lengths: their numbers.
        last: the last token of each, or an empty list where that is not known without a look at each.
        places: where each comes from.
        epochs: how many times its dataset was passed before.
    """

    __slots__ = ("tokens", "lengths", "last", "places", "epochs")  # in the order of the arguments

    def __init__(
        self,
        tokens: Sequence[np.ndarray],
        lengths: Sequence[int],
        last: Sequence[int],
        places: Sequence[Place],
        epochs: Sequence[int],
    ) -> None:
        self.tokens, self.lengths, self.last, self.places, self.epochs = tokens, lengths, last, places, epochs

    @classmethod
    def of(cls, documents: Iterable[Document]) -> "Documents":
        """Puts documents into columns."""
        tokens, urls, rows, names, epochs = zip(*documents, strict=True)
        lengths = [len(array) for array in tokens]
        last = [array.item(-1) for array in tokens] if all(lengths) else ()
        return cls(tokens, lengths, last, list(zip(names, urls, rows, repeat(0))), epochs)

    @classmethod
    def woven(cls, parts: "Sequence[Documents]", turns: Sequence[int]) -> "Documents":
        """Puts the documents of several sequences into one order.

        Args:
            parts: the sequences.
            turns: for each document the number of the sequence that it is the next of.
        """
        edges = [*accumulate(map(len, parts), initial=0)]
        numbers = [iter(range(*edge)) for edge in pairwise(edges)]
        order = list(map(next, map(numbers.__getitem__, turns)))
        if len(order) < 2:
            return next((part for part in parts if len(part)), parts[0])
        choose = itemgetter(*order)
        columns = ([*chain.from_iterable(getattr(part, name) for part in parts)] for name in cls.__slots__)
        return cls(*(choose(column) for column in columns))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        name, url, row, _ = self.places[index]
        return Document(self.tokens[index], url, row, name, self.epochs[index])


class Sample(NamedTuple):
    """One training sequence.

    Attributes:
        tokens: one-dimensional array of token ids, of the widest type of its documents, or fewer than a full sample
            has. Do not write to it: the buffer of a shuffle may still be saving it. A token that is not to be learned
            is negative, its complement ``~token`` (see ``PromptMasker``).
        starts: positions in ``tokens`` at which the documents begin, ascending, the first one 0.
        documents: for each start, the place of that document (or of the rest of it).
    """

    tokens: np.ndarray
    starts: tuple[int, ...] = (0,)
    documents: tuple[Place, ...] = ()

    @property
    def is_filler(self) -> bool:
        """Whether no document is in it: it keeps the turn of a logical shard that has ended."""
        return not self.starts


def filler(seq_len: int, pad_id: int = 0) -> Sample:
    """Gives the sample that logical shards which have ended yield in a finite pass: padding alone."""
    return Sample(np.full(seq_len, pad_id, np.int32), starts=())


Row = dict[str, Any]
"""A row of a dataset: its columns by name, and beside them its place, under `ORIGIN_KEYS`."""


class Origin(NamedTuple):
    """Where a document or a row comes from; the attributes are those of ``Document``."""

    url: str = ""
    row: int = 0
    name: str = ""
    epoch: int = 0


ORIGIN_KEYS = tuple(f"__{field}__" for field in Origin._fields)


def origin_of(item: Any) -> Origin | None:
    """Gives where an item comes from; None if it is neither a document nor a row."""
    if type(item) is Document:
        return Origin(*item[1:])
    if isinstance(item, dict) and ORIGIN_KEYS[0] in item:
        return Origin(*(item[key] for key in ORIGIN_KEYS))
    return None


def num_tokens_of(item: Any) -> int:
    """Gives how many tokens an item has; a row, whose tokens are not known, has none."""
    return len(item.tokens) if hasattr(item, "tokens") else 0


def call(function: Callable[[T], U], item: T) -> U:
    """Calls a user's function of an item; an error names the place, and is never taken for the end of data."""
    try:
        return function(item)
    except StopIteration as error:
        raise RuntimeError(f"a function of {_describe(item)} raised StopIteration, which is no end of data") from error
    except BaseException as error:
        error.add_note(f"in {_describe(item)}")
        raise


def _describe(item: Any) -> str:
    origin = origin_of(item)
    return f"row {origin.row} of {origin.url}" if origin else f"an item of class {type(item).__name__}"


def masked_in(tokens: np.ndarray) -> np.ndarray | None:
    """Says which tokens stand as their complements, or None where none does."""
    if tokens.dtype.kind != "i" or not len(tokens) or tokens.min() >= 0:
        return None
    masked: np.ndarray = tokens < 0
    return masked


def freeze(item: Any) -> Any:
    """Turns an item into plain data that nothing will write to: arrays and bytes become tensors of their own.

    (``torch.save`` writes bytes as text, twice as long, and cannot read empty ones back.)

    Args:
        item: nested dicts, lists and tuples of documents, samples, arrays, tensors, str, bytes, numbers, bool, None.

    Raises:
        TypeError: for any other class, which could not be read back with ``torch.load(weights_only=True)``, or would be
            read back as something else.
    """
    kind = type(item)
    if kind is Sample:
        tokens, starts, documents = item
        return {TAG: "sample", "tokens": freeze(tokens), "starts": starts, "documents": documents}
    if kind is Document:
        return {TAG: "document", "tokens": freeze(item.tokens), "place": tuple(item[1:])}
    if kind is np.ndarray and item.dtype.kind in "biuf" and item.dtype.isnative:
        return {TAG: "array", "tensor": _share(item)}
    if kind in (dict, list, tuple):
        return _freeze_container(item)
    if kind is bytes:
        return {TAG: "bytes", "tensor": torch.from_numpy(np.frombuffer(item, np.uint8).copy())}
    if kind is torch.Tensor:
        return item.detach().clone()
    if item is None or kind in KEY_TYPES:
        return item
    raise _refusal(f"an array of {item.dtype}" if kind is np.ndarray else kind.__name__)


def _share(array: np.ndarray) -> torch.Tensor:
    """Gives a tensor over the memory of an array, which cannot be written to from now on."""
    flags = array.flags
    if not flags.writeable or not flags.c_contiguous:
        return torch.from_numpy(np.array(array))
    tensor = torch.from_numpy(array)
    flags.writeable = False
    return tensor


def _freeze_container(item: Any) -> Any:
    if not isinstance(item, dict):
        return type(item)([freeze(value) for value in item])
    if TAG in item or any(type(key) not in KEY_TYPES for key in item):
        raise _refusal(f"a dict with the keys {list(item)[:4]}")
    return {key: freeze(value) for key, value in item.items()}


def _refusal(what: str) -> TypeError:
    return TypeError(
        f"a buffered item must be made of plain data, arrays of numbers, tensors, Document or Sample, got {what}: "
        "a state that holds it could not be loaded as it was; convert it before the node that buffers it"
    )


def thaw(data: Any) -> Any:
    """Turns what ``freeze`` gave back into the item, with the same types of its arrays."""
    if isinstance(data, dict):
        tag = data.get(TAG)
        if tag == "array":
            array = data["tensor"].numpy()
            array.flags.writeable = False
            return array
        if tag == "sample":
            return Sample(thaw(data["tokens"]), data["starts"], data["documents"])
        if tag == "document":
            return Document(thaw(data["tokens"]), *data["place"])
        if tag == "bytes":
            return data["tensor"].numpy().tobytes()
        return {key: thaw(value) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(thaw(value) for value in data)
    if isinstance(data, torch.Tensor):
        return data.clone()
    return data
