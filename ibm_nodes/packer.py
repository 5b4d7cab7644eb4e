"""Packer: documents to samples of a fixed number of tokens."""

from collections.abc import Iterator

import numpy as np
from torchdata.nodes import BaseNode

from ibm_nodes.items import Document, Place, Sample, freeze, thaw
from ibm_nodes.node import Node, Snapshot, draw, render, snapshot
from ibm_nodes.state import State, check_keys, check_settings


class Packer(Node[Sample]):
    """Packs documents end to end into samples of exactly ``seq_len`` tokens.

    Each document is closed with EOS, and opened with BOS if there is one, where the data does not already have it. What
    does not fit goes on in the next sample; nothing is padded or dropped. When the source ends, a last sample that is
    shorter than ``seq_len`` is yielded. The tokens that wait for the next sample are part of the state.

    Args:
        source: node of documents.
        seq_len: tokens in a sample.
        eos_id: id that closes a document.
        bos_id: id that opens a document, or None.

    Raises:
        ValueError: if seq_len is below 1 or an id is negative.
    """

    SETTING_KEYS = ("seq_len", "eos_id", "bos_id")
    TAIL_KEY = "tail"
    SOURCE_KEY = "source"

    def __init__(self, source: BaseNode[Document], *, seq_len: int, eos_id: int, bos_id: int | None = None) -> None:
        super().__init__()
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        for name, value in (("eos_id", eos_id), ("bos_id", bos_id)):
            if value is not None and not 0 <= value < 1 << 31:
                raise ValueError(f"{name} must be from 0 to 2**31 - 1, got {value}")
        self.source = source
        self.seq_len = seq_len
        self.eos_id = eos_id
        self.bos_id = bos_id
        self._eos = _one_token(eos_id)
        self._bos = None if bos_id is None else _one_token(bos_id)

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        # The open sample, and what of the last document goes beyond it: arrays, and where each document begins.
        self._pieces: list[np.ndarray] = []
        self._starts: list[int] = []
        self._places: list[Place] = []
        self._length = 0
        if initial_state is None:
            self.source.reset(None)
            return
        check_keys(self, initial_state, (*self.SETTING_KEYS, self.TAIL_KEY, self.SOURCE_KEY))
        check_settings(self, initial_state, **{name: getattr(self, name) for name in self.SETTING_KEYS})
        for tokens, _, (place,) in thaw(initial_state[self.TAIL_KEY]):
            self._pieces.append(tokens)
            self._starts.append(self._length)
            self._places.append(place)
            self._length += len(tokens)
        self.source.reset(initial_state[self.SOURCE_KEY])

    def next(self) -> Sample:
        closing = 1 if self._bos is None else 2
        while self._length < self.seq_len:
            try:
                documents = draw(self.source, self.seq_len - self._length, closing)
            except StopIteration:
                break
            self._add(documents)
        if not self._length:
            raise StopIteration
        return self._cut()

    def snapshot(self) -> Snapshot:
        open_sample = tuple(self._pieces), tuple(self._starts), tuple(self._places), self._length
        return _state, (self.seq_len, self.eos_id, self.bos_id, open_sample, snapshot(self.source))

    def _add(self, documents: list[Document]) -> None:
        pieces, starts, places, end = self._pieces, self._starts, self._places, self._length
        bos, bos_id, eos, eos_id = self._bos, self.bos_id, self._eos, self.eos_id
        for tokens, url, row, name, _ in documents:
            length = len(tokens)
            if not length:
                continue
            offset = 0
            starts.append(end)
            if bos is not None and tokens.item(0) != bos_id:
                pieces.append(bos)
                end += 1
                offset = -1
            pieces.append(tokens)
            end += length
            if tokens.item(-1) != eos_id or (length == 1 and bos_id == eos_id):
                pieces.append(eos)
                end += 1
            places.append((name, url, row, offset))
        self._length = end

    def _cut(self) -> Sample:
        """Takes a sample off the front; what remains is part of one document at most.

        The one copy of the tokens: sample and rest are parts of it, so that neither keeps a block of megabytes in
        memory.
        """
        pieces, length = self._pieces, self._length
        tokens = pieces[0] if len(pieces) == 1 and self._places[0][3] > 0 else np.concatenate(pieces)
        sample = Sample(tokens[: self.seq_len], tuple(self._starts), tuple(self._places))
        if length <= self.seq_len:
            self._pieces, self._starts, self._places, self._length = [], [], [], 0
            return sample
        name, url, row, offset = self._places[-1]
        place = (name, url, row, offset + self.seq_len - self._starts[-1])
        self._pieces, self._starts, self._places = [tokens[self.seq_len :]], [0], [place]
        self._length = length - self.seq_len
        return sample


_OpenSample = tuple[tuple[np.ndarray, ...], tuple[int, ...], tuple[Place, ...], int]


def _state(seq_len: int, eos_id: int, bos_id: int | None, open_sample: _OpenSample, source: Snapshot) -> State:
    return {
        "seq_len": seq_len,
        "eos_id": eos_id,
        "bos_id": bos_id,
        Packer.TAIL_KEY: [freeze(run) for run in _runs(*open_sample)],
        Packer.SOURCE_KEY: render(source),
    }


def _runs(
    pieces: tuple[np.ndarray, ...], starts: tuple[int, ...], places: tuple[Place, ...], length: int
) -> Iterator[Sample]:
    """Gives the open tokens, one document at a time, with the types that they have, in arrays of their own."""
    if len(pieces) == 1:
        yield Sample(pieces[0].copy(), (0,), places)
        return
    remaining = iter(pieces)
    for start, end, place in zip(starts, (*starts, length)[1:], places, strict=True):
        run = [next(remaining)]
        while sum(map(len, run)) < end - start:
            run.append(next(remaining))
        yield Sample(np.concatenate(run), (0,), (place,))


def _one_token(token: int) -> np.ndarray:
    return np.array([token], np.uint16 if token < 1 << 16 else np.int32)
