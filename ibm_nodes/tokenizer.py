"""Tokenizer: text to tokens, on the fly."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from ibm_nodes.ahead import Ahead, AheadState, Barren
from ibm_nodes.items import Document, Origin, Row, call, origin_of
from ibm_nodes.node import Node, Snapshot, render
from ibm_nodes.once import Once
from ibm_nodes.state import State, check_keys, check_settings
from ibm_nodes.storage import Options
from ibm_nodes.text import load_tokenizer

MAX_BATCH, GROWTH = 64, 8
MAX_CHARACTERS = 1 << 22
"""A batch is cut where it has as many, or after one document."""


class Tokenizer(Node[Document]):
    """Yields the documents of rows of text, tokenized by a ``tokenizer.json`` of the library ``tokenizers``.

    Documents are tokenized in batches, by all threads that the library uses (``RAYON_NUM_THREADS``): of 1 at first, so
    that the first comes soon, then of 8, then of 64. The state is exact to the document; after resuming, what was
    handed out of a batch is read again but not tokenized again. What truncation and padding the file asks for is not
    done. Texts without tokens, and those that are null, are passed over and counted. A document is tokenized whole,
    however long it is. The logical shards of a process share one tokenizer; nothing but its file is read.

    Args:
        source: node of rows, such as a ``Reader`` with ``columns``.
        tokenizer: the ``tokenizer.json``: a path, or a URL at any store that fsspec knows.
        column: the column of text.
        add_special_tokens: add what the file's post-processor puts around a text, such as BOS; ``Packer`` closes and
            opens documents by itself, and doubles none of them.
        allow_special_tokens: a text that spells out a special token, such as ``<|endoftext|>``, has that token there;
            False makes ordinary tokens of it.
        vocab_size: all ids of the tokenizer must be below it, if it is given.
        storage_options: fsspec's options for the store of the ``tokenizer.json``.

    Raises:
        ImportError, ValueError, OSError: when it is reset, if the library is not there, or the file is of another kind,
            cannot be read, or has ids that are not below vocab_size.
        LookupError, TypeError: while reading, if a row has no such column, or no text in it; a note names the row.
        ValueError: while reading, if no text had a token in 8 passes over the data, or one is not valid Unicode.
    """

    SETTING_KEYS = ("column", "add_special_tokens", "allow_special_tokens")
    DIGEST_KEY = "tokenizer"
    SKIPPED_KEY = "without_tokens"
    TAKEN_KEY = "taken"
    SOURCE_KEY = "source"

    def __init__(
        self,
        source: BaseNode[Row],
        tokenizer: str,
        *,
        column: str = "text",
        add_special_tokens: bool = False,
        allow_special_tokens: bool = False,
        vocab_size: int | None = None,
        storage_options: Options = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.tokenizer = tokenizer
        self.column = column
        self.add_special_tokens = add_special_tokens
        self.allow_special_tokens = allow_special_tokens
        self.vocab_size = vocab_size
        self.storage_options = storage_options

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._encoder = encoder(self.tokenizer, self.allow_special_tokens, self.storage_options)
        if self.vocab_size is not None and self._encoder.num_ids > self.vocab_size:
            raise ValueError(
                f"vocab_size must be at least {self._encoder.num_ids} for {self.tokenizer}, got {self.vocab_size}: the "
                "model could not embed all ids"
            )
        settings = {name: getattr(self, name) for name in self.SETTING_KEYS}
        self._settings = settings | {self.DIGEST_KEY: self._encoder.digest}
        self._skipped, place = 0, None
        if initial_state is not None:
            check_keys(self, initial_state, (*self._settings, self.SKIPPED_KEY, self.TAKEN_KEY, self.SOURCE_KEY))
            check_settings(self, initial_state, **self._settings)
            self._skipped = initial_state[self.SKIPPED_KEY]
            place = initial_state[self.SOURCE_KEY], initial_state[self.TAKEN_KEY]
        self._ahead: Ahead[Row] = Ahead(self.source, place)
        self._ahead.start()
        self._documents: deque[Document] = deque()  # made of the first rows ahead
        self._batch_size = 1
        self._barren = Barren("no text had a token")

    def next(self) -> Document:
        return self.draw(1, extra=1)[0]

    def draw(self, num_tokens: int, extra: int = 0) -> list[Document]:
        documents: list[Document] = []
        while not documents:
            if not self._documents:
                self._encode()
            while self._documents and (num_tokens > 0 or not documents):
                document = self._documents.popleft()
                self._ahead.take(1)
                if len(document.tokens):
                    num_tokens -= len(document.tokens) + extra
                    documents.append(document)
                else:
                    self._skipped += 1
                    self._barren.add([document])
        self._barren.clear()
        return documents

    def snapshot(self) -> Snapshot:
        return _state, (self._settings, self._skipped, self._ahead.snapshot())

    def _encode(self) -> None:
        """Makes documents of some rows; an error comes in place of the first of them that it is about."""
        ahead = self._ahead
        if not ahead.items:
            ahead.fill(self._batch_size)
            while len(ahead.items) < self._batch_size:
                try:
                    ahead.more(self._batch_size - len(ahead.items))
                except StopIteration:
                    break
            self._batch_size = min(GROWTH * self._batch_size, MAX_BATCH)
        rows: list[Row] = []
        texts: list[str] = []
        num_characters = 0
        for row in ahead.items:
            try:
                texts.append(call(self._text, row))
            except (LookupError, TypeError):
                if not rows:
                    raise
                break
            rows.append(row)
            num_characters += len(texts[-1])
            if num_characters >= MAX_CHARACTERS:
                break
        tokens = self._tokenize(rows, texts)
        self._documents.extend(
            Document(ids, *(origin_of(row) or Origin())) for ids, row in zip(tokens, rows, strict=False)
        )

    def _text(self, row: Row) -> str:
        if not isinstance(row, dict):
            raise TypeError(
                f"Tokenizer's items must be rows, got {type(row).__name__}: give Reader columns=[{self.column!r}]"
            )
        if self.column not in row:
            raise LookupError(f"no column {self.column!r}: give column, one of {', '.join(map(repr, row))}")
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise TypeError(f"column {self.column!r} must hold text, got {type(text).__name__}")
        return text or ""

    def _tokenize(self, rows: list[Row], texts: list[str]) -> list[np.ndarray]:
        """Tokenizes texts; where one cannot be, those before it, or it is an error."""
        try:
            return self._encoder.encode(texts, self.add_special_tokens)
        except (TypeError, ValueError):  # the library does not say which
            done: list[np.ndarray] = []
            for row, text in zip(rows, texts, strict=True):
                try:
                    done += call(partial(self._tokenize_one, text), row)
                except ValueError:
                    if not done:
                        raise
                    break
            return done

    def _tokenize_one(self, text: str, _: Row) -> list[np.ndarray]:
        text.encode()  # whose error says what is wrong, which the library's does not
        return self._encoder.encode([text], self.add_special_tokens)


class Encoder:
    """A tokenizer that turns texts into arrays.

    Attributes:
        digest: a hash of its file.
        num_ids: all its ids are below.
    """

    def __init__(self, url: str, allow_special_tokens: bool, storage_options: Options) -> None:
        tokenizer, self.digest = load_tokenizer(url, storage_options)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not allow_special_tokens
        self.num_ids = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._dtype = np.uint16 if self.num_ids <= 1 << 16 else np.int32
        self._encode_batch: Callable[..., Any] = tokenizer.encode_batch_fast

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[np.ndarray]:
        """Gives the token ids of each text."""
        encodings = self._encode_batch(texts, add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]


def encoder(url: str, allow_special_tokens: bool, storage_options: Options) -> Encoder:
    """Gives the encoder of a ``tokenizer.json``, one for all who hold it at the same time."""
    key = url, allow_special_tokens, repr(sorted((storage_options or {}).items(), key=str))
    return _encoders.get(key, lambda: Encoder(url, allow_special_tokens, storage_options))


_encoders: Once[Encoder] = Once(None, weak=True)


def _state(settings: dict[str, Any], skipped: int, ahead: AheadState) -> State:
    place, taken = ahead
    return {
        **settings,
        Tokenizer.SKIPPED_KEY: skipped,
        Tokenizer.TAKEN_KEY: taken,
        Tokenizer.SOURCE_KEY: render(place),
    }
