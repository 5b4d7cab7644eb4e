"""Blocks: which parts of a dataset a logical shard owns, and in which order it visits them."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ibm_nodes import formats
from ibm_nodes.formats.lists import check_ids
from ibm_nodes.listing import Listing, StoredObject
from ibm_nodes.permutation import derive_key, permutation, random_index, random_words
from ibm_nodes.quarantine import FAULTS, Fault, Place, Quarantine, is_gone, is_of_data, reason
from ibm_nodes.storage import Object


class Cursor(NamedTuple):
    """Where a reader stands; file and block count in the order in which they are visited."""

    epoch: int
    whole: bool
    file: int
    block: int


class Block(NamedTuple):
    """The non-empty rows of a block that a shard owns, in the order in which they are handed out."""

    lists: formats.Lists
    begins: np.ndarray
    ends: np.ndarray
    rows: np.ndarray
    lengths: np.ndarray
    mean_length: float
    url: str
    num_rows: int
    num_empty: int
    num_blocks: int
    num_files: int
    passes: float
    share: float
    listing: str
    size: int
    ask_at: int  # the row at which the next block is asked for
    chained: bool  # whether blocks of its file go on where the one before was decoded to
    fault: Fault | None  # why it could not be read, if it is to be left out


class Loaded:
    """A block that was read. Its rows are put into their order by who uses them, in many small steps of numpy.

    (Each of these lets go of Python's lock. In the thread that reads they would stop the one that uses, over and over.)
    """

    __slots__ = ("_block", "_make")

    def __init__(self, make: Callable[[], Block]) -> None:
        self._make = make
        self._block: Block | None = None

    @classmethod
    def of(cls, block: Block) -> "Loaded":
        """Gives a block whose rows are in order."""
        return cls(lambda: block)

    def block(self) -> Block:
        """Gives the block."""
        if self._block is None:
            self._block = self._make()
        return self._block


class HeldOut(NamedTuple):
    """A split of the rows by a hash of dataset, file and row alone.

    Attributes:
        name: the dataset's name.
        share: share of the rows that are held out.
        wanted: whether those are read, or the others.
    """

    name: str
    share: float
    wanted: bool

    def choose(self, key: str, rows: np.ndarray) -> np.ndarray:
        """Tells which rows of a file are read."""
        limit = np.uint64(min(round(self.share * 2**64), 2**64 - 1))
        words = random_words(derive_key("holdout", self.name, key), rows)
        chosen: np.ndarray = (words < limit) == self.wanted
        return chosen


class Blocks:
    """Finds and reads the blocks of one logical shard; threads may use it at the same time.

    Args:
        key: seeds and names that the order depends on.
        part: this logical shard, and their number.
        column: the column of integer lists, or a tuple of columns.
        format: a format's name, what opens its files, or None to tell by the ending.
        vocab_size: ids must be below it, if it is given.
        listing: gives what is under the url.
        held_out: which rows to leave out.
        where: which rows are wanted; all others count as empty.
        left_out: bad places that are not read; its reader adds to it.
        tolerant: give a block with a fault for data that cannot be read, in place of an error.
    """

    def __init__(
        self,
        *,
        key: tuple[Any, ...],
        part: tuple[int, int],
        column: formats.Columns,
        format: formats.Format,
        vocab_size: int | None,
        listing: Callable[[], Listing],
        held_out: "HeldOut | None" = None,
        where: formats.Where | None = None,
        left_out: Quarantine,
        tolerant: bool = False,
    ) -> None:
        self._left_out, self._tolerant = left_out, tolerant
        self._key, self._part = key, part
        self._held_out = held_out
        self._column, self._format, self._vocab_size = column, format, vocab_size
        self._listing = listing
        self._where, self._condition = where, str(where)
        self._made: dict[str, tuple[Any, np.ndarray]] = {}

    def load(self, at: Cursor) -> "Loaded":
        """Reads the block at a cursor; where there is none, gives one without rows."""
        listing = self._listing()
        found, num_files = self._find(listing, at)
        if found is None:
            return Loaded.of(self._empty(at, num_files, 0, listing))
        index, item, start, (low, high) = found
        file = self._open(listing, index, at)
        if file is None or isinstance(file, Fault):
            return Loaded.of(self._empty(at, num_files, 0, listing)._replace(fault=file))
        turn, num_turns = 0, 1
        if file.splittable:
            blocks = self._blocks_of(file, found, at.epoch)
        else:
            turn, num_turns = self._turn(listing, index, at.whole)
            blocks = np.arange(len(file.groups) if turn >= 0 else 0)
        if at.block >= len(blocks):
            return Loaded.of(self._empty(at, num_files, len(blocks), listing))
        number = int(blocks[at.block])
        lists = self._lists(listing, index, at, file, number)
        if lists is None or isinstance(lists, Fault):
            num_blocks = len(blocks) if file.splittable else at.block + 1  # the rest is left out with it
            return Loaded.of(self._empty(at, num_files, num_blocks, listing)._replace(fault=lists))
        if file.splittable:
            span = start + int(file.spans[number]), start + int(file.spans[number + 1])
            own = range(*_own_rows(len(lists.rows), *span, low, high))
        else:
            own = range((turn - number) % num_turns, len(lists.rows), num_turns)
        base = self._empty(at, num_files, len(blocks), listing)._replace(
            lists=lists,
            url=item.url,
            size=file.size(number),
            chained=not file.splittable or len(set(file.groups[blocks].tolist())) < len(blocks),
        )
        return Loaded(partial(self._arrange, base, item.key, own, (*self._key, item.key, number, at.epoch)))

    def is_at_hand(self, at: Cursor) -> bool:
        """Tells whether a block, of a file that is open, takes so little to read that no other thread is worth it."""
        listing = self._listing()
        found, _ = self._find(listing, at)
        file: Any = None if found is None else listing.opened(self._file_key(found[0]))
        if found is None or not hasattr(file, "is_at_hand"):
            return False
        blocks = self._blocks_of(file, found, at.epoch)
        return at.block < len(blocks) and file.is_at_hand(int(blocks[at.block]))

    def _find(self, listing: Listing, at: Cursor) -> tuple["_Found | None", int]:
        """Finds the file that a cursor stands at, or None behind the last; gives too how many the shard has."""
        low, high = self._interval(listing, at.whole)
        first = bisect_right(listing.starts, low) - 1
        num_files = max(0, bisect_left(listing.starts, high) - first)
        if at.file >= num_files:
            return None, num_files
        order = self._kept(
            "files", (at.epoch, num_files), lambda: permutation(derive_key(*self._key, "files", at.epoch), num_files)
        )
        index = first + int(order[at.file])
        return (index, listing.objects[index], listing.starts[index], (low, high)), num_files

    def _file_key(self, index: int) -> tuple[Any, ...]:
        return index, self._column, self._format, self._condition

    def _blocks_of(self, file: formats.ShardFile, found: "_Found", epoch: int) -> np.ndarray:
        """Gives the blocks of a file that overlap the shard's interval, in the order in which they are visited."""
        _, item, start, (low, high) = found
        return self._kept("blocks", (item, epoch, low), lambda: self._owned(file, start, low, high, (item.key, epoch)))

    def _arrange(self, block: Block, name: str, own: range, names: tuple[Any, ...]) -> Block:
        """Puts the rows that the shard owns into their order."""
        lists, key = block.lists, derive_key(*names)
        order = permutation(key, len(own)) * own.step + own.start
        if self._held_out is not None:
            order = order[self._held_out.choose(name, lists.rows[order])]
        num_chosen = len(order)
        begins, ends = lists.begins[order], lists.ends[order]
        lengths = ends - begins
        if num_chosen and not lengths.all():
            order = order[lengths > 0]
            begins, ends = lists.begins[order], lists.ends[order]
            lengths = ends - begins
        return block._replace(
            begins=begins,
            ends=ends,
            rows=lists.rows[order],
            lengths=lengths,
            mean_length=int(lengths.sum()) / max(1, len(lengths)) or 1.0,
            num_rows=len(order),
            num_empty=num_chosen - len(order),
            # Somewhere in the middle half, so that the readers of many shards do not all ask at one moment.
            ask_at=len(order) // 4 + random_index(key, 0, len(order) // 2 + 1),
        )

    def _kept(self, what: str, of: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Gives what ``make`` makes, or made last for the same: most blocks are of the file of the one before."""
        made = self._made.get(what)
        if made is None or made[0] != of:
            made = self._made[what] = of, make()
        return made[1]

    def _open(self, listing: Listing, index: int, at: Cursor) -> formats.ShardFile | Fault | None:
        """Opens a file; gives None if it is left out, or why it is to be."""
        item = listing.objects[index]
        if self._left_out.has(item.key, None, at):
            return None
        try:
            return listing.file(
                self._file_key(index),
                partial(_open, listing, item, self._column, self._format, self._where),
            )
        except FAULTS as error:
            fault = self._fault(error, listing, item, Place(item.key, 0, None, at, reason(error)))
            if fault is None:
                raise
            return fault

    def _lists(
        self, listing: Listing, index: int, at: Cursor, file: formats.ShardFile, number: int
    ) -> formats.Lists | Fault | None:
        """Reads a block; gives None if it is left out, or why it is to be, with what goes on where it ends."""
        item = listing.objects[index]
        if self._left_out.has(item.key, number, at):
            return None
        names = (index, number, self._column, self._format, self._vocab_size, self._condition)
        try:
            return listing.block(names, partial(self._read, file, number, item))
        except FAULTS as error:
            end = int(np.searchsorted(file.groups, file.groups[number], "right")) if file.splittable else None
            fault = self._fault(error, listing, item, Place(item.key, number, end, at, reason(error)))
            if fault is None:
                raise
            return fault

    def _read(self, file: formats.ShardFile, number: int, item: Object) -> formats.Lists:
        try:
            lists = file.read(number)
            return lists if isinstance(self._column, tuple) else check_ids(lists, self._vocab_size, item.url)
        except (ValueError, OSError, pa.ArrowException) as error:
            error.add_note(f"in block {number} of {item.url}")
            raise

    def _fault(self, error: BaseException, listing: Listing, item: Object, place: Place) -> Fault | None:
        """Gives what is to be recorded of an error, or None if it is not the data's, or not to be recorded."""
        if not self._tolerant or not is_of_data(error):
            return None
        if is_gone(error):
            place = place._replace(first=0, end=None)
        return Fault(place, item.url, listing, error.with_traceback(None))  # which would keep the data of its frames

    def _interval(self, listing: Listing, whole: bool) -> tuple[int, int]:
        shard, num_shards = (0, 1) if whole else self._part
        total = listing.starts[-1]
        return shard * total // num_shards, (shard + 1) * total // num_shards

    def _turn(self, listing: Listing, index: int, whole: bool) -> tuple[int, int]:
        """Gives this shard's place among those that deal out the rows of an unsplittable file, or -1, and their number.

        They are the shards whose interval begins in the file, or, if there is none, the one that holds its first byte.
        """
        shard, num_shards = (0, 1) if whole else self._part
        total, start = listing.starts[-1], listing.starts[index]
        first, last = (-(-edge * num_shards // total) for edge in (start, listing.starts[index + 1]))
        if first >= last or total < num_shards:  # (with fewer bytes than shards, some intervals are empty)
            first = ((start + 1) * num_shards - 1) // total
            last = first + 1
        return (shard - first if first <= shard < last else -1), last - first

    def _owned(self, file: formats.ShardFile, start: int, low: int, high: int, key: tuple[str, int]) -> np.ndarray:
        """Gives the blocks that overlap the interval: groups in a random order, in a group as they lie."""
        first = max(0, int(np.searchsorted(file.spans, low - start, "right")) - 1)
        last = min(len(file.groups), int(np.searchsorted(file.spans, high - start, "left")))
        groups = file.groups[first:last]
        if not len(groups):
            return groups
        rank = np.argsort(permutation(derive_key(*self._key, *key), int(groups[-1] - groups[0]) + 1))
        return first + np.argsort(rank[groups - groups[0]], kind="stable")

    def _empty(self, at: Cursor, num_files: int, num_blocks: int, listing: Listing) -> Block:
        share = 1 / max(1, num_files)
        passes = at.epoch + share * at.file + share / max(1, num_blocks) * at.block
        none = np.empty(0, np.int64)
        return Block(
            lists=formats.Lists(none, none, none, none),
            begins=none,
            ends=none,
            rows=none,
            lengths=none,
            mean_length=1.0,
            url="",
            num_rows=0,
            num_empty=0,
            num_blocks=num_blocks,
            num_files=num_files,
            passes=passes,
            share=share / max(1, num_blocks),
            listing=str(listing),
            size=0,
            ask_at=0,
            chained=False,
            fault=None,
        )


_Found = tuple[int, Object, int, tuple[int, int]]
"""A file's number and object, where it begins in the dataset's bytes, and the interval of those that the shard owns."""


def _open(
    listing: Listing, item: Object, column: formats.Columns, format: formats.Format, where: formats.Where | None
) -> formats.ShardFile:
    try:
        return formats.open_file(StoredObject(listing, item), format, column, where)
    except (ValueError, OSError, pa.ArrowException) as error:
        error.add_note(f"while opening {item.url}")
        raise


def _own_rows(num_rows: int, begin: int, end: int, low: int, high: int) -> tuple[int, int]:
    """Gives the rows whose place in the bytes, begin + (end - begin) * row // num_rows, lies in [low, high)."""
    size = end - begin
    first, last = (-(-(edge - begin) * num_rows // size) for edge in (low, high))
    return min(max(first, 0), num_rows), min(max(last, 0), num_rows)
