"""Nodes that tests put at the bottom of a graph."""

import io

import numpy as np
import torch
from torchdata.nodes import BaseNode

from ibm_nodes import Document, Mixer, Packer, Reader, Shuffler


class Items(BaseNode):
    """Yields the items it is given; fails once before the item at each of the places in ``fails``."""

    def __init__(self, items, fails=()):
        super().__init__()
        self.items = items
        self.fails = set(fails)

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.position = 0 if initial_state is None else initial_state["position"]

    def next(self):
        if self.position in self.fails:
            self.fails.discard(self.position)
            raise OSError(f"cannot read item {self.position}")
        if self.position >= len(self.items):
            raise StopIteration
        self.position += 1
        return self.items[self.position - 1]

    def get_state(self):
        return {"position": self.position}


class PassedOn(BaseNode):
    """Passes on a node's items; what is above knows of it that it is a torchdata node, and no more."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.source.reset(initial_state)

    def next(self):
        return next(self.source)

    def get_state(self):
        return self.source.state_dict()


def documents(lengths, dtype=np.int32):
    """Documents whose tokens name themselves: 1000 * (document + 1) + position."""
    return [
        Document((1000 * (number + 1) + np.arange(length)).astype(dtype), f"file-{number % 3}", number, "data", 0)
        for number, length in enumerate(lengths)
    ]


def numbers(shard, num_shards, length=1 << 40):
    """The graph of a logical shard whose items are (shard, 0), (shard, 1), ..."""
    return Items(Counted(shard, length))


def packed(url, shard, num_shards, storage_options=None):
    """The graph of a logical shard over real files: it mixes, packs and shuffles."""
    options = {"shard": shard, "num_shards": num_shards, "storage_options": storage_options}
    readers = {name: Reader(url, name=name, **options) for name in ("one", "two")}
    node = Mixer(readers, weights={"one": 2, "two": 1}, seed=(0, shard))
    return Shuffler(Packer(node, seq_len=8, eos_id=1), buffer_size=4, seed=(0, shard))


class Counted:
    def __init__(self, shard, length):
        self.shard, self.length = shard, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return (self.shard, index)


def stored(state):
    """A state as it comes back from a checkpoint that may hold nothing but plain data and tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stored_bytes(state):
    """How large a state is in a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def same(one, other):
    """Whether two items are equal in value, class and dtype, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and same(one.numpy(), other.numpy())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def read_all(listing):
    """Every object of a listing, in its order."""
    return [(item.key, bytes(listing.read(item, 0, item.size))) for item in listing.objects]
