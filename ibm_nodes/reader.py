"""Reader: the documents of one logical shard of one dataset."""

import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal

import pyarrow.compute as pc

from ibm_nodes import formats
from ibm_nodes.blocks import Block, Blocks, Cursor, HeldOut, Loaded
from ibm_nodes.changes import check_on_change, settle
from ibm_nodes.items import ORIGIN_KEYS, Document, Documents, Row
from ibm_nodes.listing import Listing, current_session
from ibm_nodes.node import Node, Snapshot
from ibm_nodes.permutation import Seed, check_seed
from ibm_nodes.quarantine import Quarantine, check_policy
from ibm_nodes.read_ahead import Task, read_ahead
from ibm_nodes.state import State, check_keys, check_settings
from ibm_nodes.storage import Options, Url

FIRST_READ_BYTES = 1 << 20
MAX_DEPTH = 8
SETTINGS = ("name", "seed", "shard", "num_shards", "column", "columns", "where", "holdout", "split")


class Reader(Node[Any]):
    """Yields the documents, or rows, of one logical shard of a dataset, each pass in another order.

    The dataset is what lies under a prefix. Logical shard l owns the bytes [l T / L, (l + 1) T / L) of the T bytes
    listed: blocks that lie inside it, and its part of the rows of blocks that its edges cut, so that every row has
    exactly one owner. Files, the blocks of a file and the rows of a block are visited in a random order that is a
    function of (seed, name, shard, epoch) and the keys. Resuming is a seek. Documents without tokens are passed over
    and counted.

    A shard that owns no token of a small dataset reads the whole of it, in an order of its own, if ``epochs`` is None;
    with a number it has nothing there, and all shards together yield every document once a pass.

    Args:
        url: prefix (or one file) at any store that fsspec knows: ``s3://...``, ``file:///...``, ``memory://...``.
        name: the dataset's name, which the order depends on; the prefix's last component if None.
        shard: this logical shard.
        num_shards: number of logical shards.
        seed: an int or a tuple of ints, the same for all shards.
        column: the column of integer lists.
        columns: yield rows in place of documents: dicts of these columns of any types, and the place under
            ``__url__``, ``__row__``, ``__name__`` and ``__epoch__``. Lists of integers are arrays, except from JSON
            lines; the rest are Python's own values. Rows in which all of them are null or empty are passed over and
            counted. Not for the formats megatron, mds and one's own.
        format: "arrow", "parquet", "jsonl", "megatron", "mds" or "webdataset"; None tells by the ending. Or what opens
            a file of a format of one's own, and gives a ``ShardFile``.
        where: yield only the rows for which this expression over their columns is true, such as
            ``pyarrow.compute.field("score") > 0.5``; the others are passed over and counted. What it looks at is read
            too, but not yielded. For the formats arrow, parquet and jsonl.
        epochs: passes over the data; None goes on for ever.
        vocab_size: ids must be below it, if it is given.
        on_error: "raise", or "quarantine": blocks that cannot be decoded, have no such column or ids out of range, and
            files that cannot be opened, are gone or were replaced, are left out from then on, and are in the state.
            Errors of the store that another attempt may cure are raised in any case.
        max_errors: how many such places a logical shard may leave out; the next one is an error.
        holdout: share of the documents that are held out, chosen by a hash of dataset, file and row alone.
        split: "train" reads the documents that are not held out, "validation" those that are.
        listing: what is under the url: from ``list_dataset``, or the URL of a file that ``Listing.write`` or
            ``ibm-nodes list`` wrote, so that nothing needs to be listed; None lists at the start, once for all readers
            of a Sharder.
        on_change: what to do where a state was saved with other files under the url: "error" says which; "keep" reads
            the files of then alone, all of which must be there; "restart" begins the dataset again. The first two take
            the files of then from the listing beside the checkpoints of ``checkpoint.save``.
        storage_options: fsspec's options for the store, such as key, secret and endpoint_url.

    Raises:
        ValueError: if an argument is out of range; while reading: if an id is negative or not below vocab_size, the
            dataset has no token at all, or its files have changed. A note names url and row.
        LookupError, TypeError: if a file has no such column, or not one of integer lists, or where cannot be computed.
        FileNotFoundError, PermissionError, OSError: if the store cannot be read.
        RuntimeError: if there are more bad places than max_errors.
    """

    SETTINGS_KEY = "settings"
    QUARANTINED_KEY = "quarantined"
    COUNTER_KEYS = ("epoch", "whole", "file", "block", "row", "documents", "skipped", "passes")

    def __init__(
        self,
        url: Url,
        *,
        name: str | None = None,
        shard: int,
        num_shards: int,
        seed: Seed = 0,
        column: str = "tokens",
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        format: formats.Format = None,
        epochs: int | None = None,
        vocab_size: int | None = None,
        on_error: Literal["raise", "quarantine"] = "raise",
        max_errors: int = 100,
        holdout: float = 0.0,
        split: str = "train",
        listing: Listing | str | None = None,
        on_change: str = "error",
        storage_options: Options = None,
    ) -> None:
        super().__init__()
        if num_shards < 1 or not 0 <= shard < num_shards:
            raise ValueError(f"shard must be from 0 to num_shards - 1, got {shard} of {num_shards}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1 or None, got {epochs}")
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1 or None, got {vocab_size}")
        if not 0 <= holdout < 1 or split not in ("train", "validation"):
            raise ValueError(
                f'holdout must be from 0 to below 1 and split "train" or "validation", got {holdout} and {split!r}'
            )
        if split == "validation" and not holdout:
            raise ValueError('split="validation" needs a holdout above 0, the one that the training data are read with')
        if columns is not None and (isinstance(columns, str) or not columns or len(set(columns)) < len(columns)):
            raise ValueError(f"columns must be a list of different names, or None, got {columns!r}")
        if columns is not None and vocab_size is not None:
            raise ValueError("vocab_size must be None with columns: rows are not looked into")
        check_on_change(on_change, epochs)
        formats.suffixes(format)
        check_policy(on_error, max_errors)
        self.condition = formats.Where(where) if where is not None else None
        self.where = self.condition and str(self.condition)
        self.url = os.fspath(url)
        self.name = self.url.rstrip("/").rsplit("/", 1)[-1] if name is None else name
        self.shard = shard
        self.num_shards = num_shards
        self.seed = check_seed(seed)
        self.column = column
        self.columns = None if columns is None else tuple(columns)
        self.format = format
        self.epochs = epochs
        self.vocab_size = vocab_size
        self.on_error = on_error
        self.max_errors = max_errors
        self.holdout = holdout
        self.split = split
        self.listing = listing
        self.on_change = on_change
        self.storage_options = storage_options

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        session = current_session()
        suffixes = formats.suffixes(self.format)
        listing = partial(session.listing, self.url, self.storage_options, suffixes, self.listing)
        settings = {name: getattr(self, name) for name in SETTINGS}
        fresh: State = {self.SETTINGS_KEY: {**settings, "listing": None}, self.QUARANTINED_KEY: []}
        fresh |= dict.fromkeys(self.COUNTER_KEYS, 0)
        state = fresh if initial_state is None else initial_state
        check_keys(self, state, fresh)
        check_settings(self, state[self.SETTINGS_KEY], **settings)
        expected = state[self.SETTINGS_KEY]["listing"] or session.expected.get(self.name)
        self.began_again = False
        if self.on_change == "restart":
            self.began_again = state is not fresh and expected not in (None, str(listing()))
            if self.began_again:
                state = {**fresh, "skipped": state["skipped"]}
                state[self.SETTINGS_KEY]["listing"] = str(listing())
            expected = None
        self._settings: dict[str, Any] = dict(state[self.SETTINGS_KEY])
        self._at = Cursor(state["epoch"], bool(state["whole"]), state["file"], state["block"])
        self._row: int = state["row"]
        self._documents: int = state["documents"]
        self._skipped: int = state["skipped"]
        self._passes: float = state["passes"]
        self._quarantine = Quarantine(self.name, self.shard, self.max_errors, state[self.QUARANTINED_KEY])
        self._blocks = Blocks(
            key=("Reader", self.seed, self.name, self.shard),
            part=(self.shard, self.num_shards),
            column=self.columns or self.column,
            format=self.format,
            vocab_size=self.vocab_size,
            listing=partial(
                settle, listing, name=self.name, expected=expected, keep=self.on_change == "keep", session=session
            ),
            where=self.condition,
            held_out=HeldOut(self.name, self.holdout, self.split == "validation") if self.holdout else None,
            left_out=self._quarantine,
            tolerant=self.on_error == "quarantine",
        )
        self._block: Block | None = None
        self._queue: deque[tuple[Cursor, Task[Loaded]]] = deque()
        self._depth = 1
        self._near = False
        self._ask_at = 0
        self._ask()

    def next(self) -> Document | Row:
        item: Document | Row = self.draw(1, extra=1)[0]
        return item

    def draw(self, num_tokens: int, extra: int = 0) -> Sequence[Any]:
        count = 0
        for length in self._lengths(self._wait(), num_tokens):
            count += 1
            num_tokens -= length + extra
            if num_tokens <= 0:
                break
        return self.take(count)

    def peek(self, num_tokens: int, wait: bool = False) -> list[int]:
        if self.columns is not None:
            raise TypeError(f"columns must be None where tokens are counted, got {self.columns}: rows have none")
        block = self._wait() if wait else self._block
        return [] if block is None else self._lengths(block, num_tokens)

    def take(self, count: int) -> Sequence[Any]:
        if self.columns is not None:
            return self._rows(count)
        block, values, part = self._move(count)
        ends, lengths = block.ends[part], block.lengths[part].tolist()
        edges = zip(block.begins[part].tolist(), ends.tolist(), strict=True)
        places = zip(repeat(self.name), repeat(block.url), block.rows[part].tolist(), repeat(0))
        return Documents(
            [values[begin:end] for begin, end in edges],
            lengths,
            values[ends - 1].tolist(),
            list(places),
            [self._at.epoch] * count,
        )

    def _lengths(self, block: Block, num_tokens: int) -> list[int]:
        """Gives the lengths of the next documents, or 1 for each row, by their mean enough of them and some more."""
        last = self._row + 8 + int(num_tokens / block.mean_length * 1.25)
        lengths: list[int] = block.lengths[self._row : last].tolist()
        return lengths

    def _rows(self, count: int) -> list[Row]:
        block, values, part = self._move(count)
        places = ((block.url, row, self.name, self._at.epoch) for row in block.rows[part].tolist())
        each = zip(values[block.begins[part]], places, strict=True)
        return [{**row, **dict(zip(ORIGIN_KEYS, place, strict=True))} for row, place in each]

    def _wait(self) -> Block:
        """Gives the block that has the next row."""
        block = self._block
        while block is None or self._row >= block.num_rows:
            if block is not None:
                self._finish(block)
            block = self._load()
        return block

    def _move(self, count: int) -> tuple[Block, Any, slice]:
        """Moves past rows of the block; gives it, its values, and which rows they are."""
        block, first = self._block, self._row
        assert block is not None
        self._row = last = first + count
        if first <= self._ask_at < last:
            self._ask()
        return block, block.lists.values, slice(first, last)

    def undo(self, count: int) -> None:
        self._row -= count

    def snapshot(self) -> Snapshot:
        block = self._block
        passes = (self._passes, 0.0) if not (block and block.num_rows) else (block.passes, block.share / block.num_rows)
        counters = self._row, self._documents, self._skipped, *passes
        # Bad places, which tell from where on they hold, are shared: what draws ahead has states from before them.
        return _state, (self._settings, self._at, counters, self._quarantine)

    def close(self) -> None:
        """Gives up the reads that it has asked for; the next document asks anew."""
        if hasattr(self, "_queue"):
            self._queue.clear()

    def _load(self) -> Block:
        """Waits for the block that the cursor stands at."""
        if self.epochs is not None and self._at.epoch >= self.epochs:
            raise StopIteration
        if self._queue and self._queue[0][0] != self._at:
            self._queue.clear()
        late = not (self._near or (self._queue and self._queue[0][1].done()))
        self._near = False
        if not self._queue:
            self._queue.append((self._at, Task(partial(self._blocks.load, self._at))))
        block = self._result()
        if block.fault is not None:
            self._queue.clear()  # what was asked for before knows nothing of it
            self._quarantine.add(block.fault)
        if late and self._settings["listing"] is not None:
            self._depth = min(self._depth + 1, MAX_DEPTH)
        self._settings["listing"] = block.listing  # also for snapshots taken before, of which items may be handed out
        self._block, self._ask_at = block, block.ask_at
        if self._depth > 1:
            self._ask()
        return block

    def _result(self) -> Block:
        """Takes the first block of the queue; after an error the next call asks for it anew."""
        try:
            block = self._queue[0][1].result().block()
            if block.fault is not None:  # once more: it may have been spoiled on its way
                block = self._blocks.load(self._at).block()
        except StopIteration as error:
            self._queue.clear()
            raise RuntimeError(f"reading {self.url} raised StopIteration, which is no end of data") from error
        except BaseException:
            self._queue.clear()
            raise
        self._queue.popleft()
        return block

    def _ask(self) -> None:
        """Asks for the blocks to come, as far as it is known which they are."""
        while len(self._queue) < self._depth:
            if self._queue:
                last, task = self._queue[-1]
                loaded = task.peek()
                known = loaded.block() if loaded else self._block if self._at[:3] == last[:3] else None
                cursor = self._following(last, known) if known and (task.done() or not known.chained) else None
            else:
                cursor = self._following(self._at, self._block) if self._block else self._at
            if cursor is None or (self.epochs is not None and cursor.epoch >= self.epochs):
                return
            if self._block and self._blocks.is_at_hand(cursor):
                self._near = not self._queue  # it is read when it is due
                return
            size = self._block.size if self._block else FIRST_READ_BYTES
            queued = read_ahead(partial(self._blocks.load, cursor), size)
            if queued is None:  # the budget is used up: once more before the block ends
                if self._block:
                    self._ask_at = self._row + max(1, (self._block.num_rows - self._row) // 2)
                return
            self._queue.append((cursor, queued))

    def _following(self, at: Cursor, block: Block) -> Cursor | None:
        """Gives the cursor of the block after one, or None where that depends on the rest of the pass."""
        if at.block + 1 < block.num_blocks:
            return at._replace(block=at.block + 1)
        if at.file + 1 < block.num_files:
            return at._replace(file=at.file + 1, block=0)
        if self._documents or block.num_rows:
            return Cursor(at.epoch + 1, at.whole, 0, 0)
        return None

    def _finish(self, block: Block) -> None:
        """Moves the cursor past a block."""
        self._documents += block.num_rows
        self._skipped += block.num_empty
        self._passes = block.passes + block.share if block.num_rows else self._passes
        following = self._following(self._at, block)
        if following is None:  # a pass without a single token
            if self.epochs is not None:
                following = Cursor(self.epochs, False, 0, 0)
            elif self._at.whole:
                raise ValueError(
                    f"dataset {self.name!r} at {self.url} has no "
                    + ("row" if self.columns else f"token in column {self.column!r}")
                    + (f" where {self.where}" if self.where else "")
                    + (f" of its {self.split} split with holdout={self.holdout}" if self.holdout else "")
                    + f": leave it out of the mix{self._quarantine}"
                )
            else:
                following = Cursor(self._at.epoch, True, 0, 0)
        if following.epoch > self._at.epoch:
            self._documents = 0
            self._passes = float(following.epoch)
        self._at, self._row, self._block = following, 0, None


def _state(
    settings: dict[str, Any],
    at: Cursor,
    counters: tuple[int, int, int, float, float],
    quarantine: Quarantine,
    back: int = 0,
) -> State:
    epoch, whole, file, block = at
    row, documents, skipped, passes, share = counters
    return {
        Reader.SETTINGS_KEY: settings.copy() if settings["listing"] is None else settings,  # else they do not change
        Reader.QUARANTINED_KEY: quarantine.state() if quarantine.places else [],
        "epoch": epoch,
        "whole": whole,
        "file": file,
        "block": block,
        "row": row - back,
        "documents": documents,
        "skipped": skipped,
        "passes": passes + share * (row - back),
    }
