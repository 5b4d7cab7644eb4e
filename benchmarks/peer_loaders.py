"""The benchmarks' corpus through other loaders, each in one process and used as its own documentation says.

All give batches of 8 x 4096 tokens, int64, for ever, of datasets mixed by the corpus's weights. Some pack documents
while they read; the others read rows that were packed offline by ``pack_*``. Each imports its package when it is
called, so that one of them needs none of the others.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import corpus
import fsspec
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader
from torchdata import nodes

SEQ_LEN, BATCH_SIZE = 4096, 8
SHUFFLED_ROWS = 1024
EOS = np.array([corpus.EOS_ID], np.int32)
NAMES, WEIGHTS = list(corpus.WEIGHTS), list(corpus.WEIGHTS.values())
Urls = dict[str, str]
Options = dict[str, Any] | None


@dataclass(frozen=True)
class Peer:
    """Another loader.

    Attributes:
        distribution: The name of its package.
        form: The format of the corpus that it reads, or that is packed for it offline.
        load: Gives its batches, [8, 4096] and int64, from the URLs of the datasets and the options of their store.
        pack: Packs a dataset (a URL) offline into a directory, which then is the URL for ``load``.
        requirements: The file that pins it.
    """

    distribution: str
    form: str
    load: Callable[[Urls, Options], Iterator[torch.Tensor]]
    pack: Callable[[str, pathlib.Path], None] | None = None
    requirements: str = "benchmarks/peers.txt"


def _files(url: str, suffix: str) -> list[str]:
    return sorted(map(str, pathlib.Path(url.removeprefix("file://")).glob(f"*{suffix}")))


class Documents:
    """Gives the documents of the Arrow files of a dataset once; files of an object store are read as a whole."""

    def __init__(self, url: str, storage_options: Options = None) -> None:
        self._filesystem, self._path = fsspec.url_to_fs(url, **(storage_options or {}))

    def __iter__(self) -> Iterator[np.ndarray]:
        is_local = "file" in self._filesystem.protocol
        for path in sorted(self._filesystem.glob(f"{self._path.rstrip('/')}/*.arrow")):
            source = pa.memory_map(path) if is_local else pa.BufferReader(self._filesystem.cat_file(path))
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                for document in reader.get_batch(number).column(0):
                    yield document.values.to_numpy()


class Packing(nodes.BaseNode[np.ndarray]):
    """Joins documents, each with EOS after it, and cuts them into rows of ``SEQ_LEN`` tokens."""

    def __init__(self, source: nodes.BaseNode[np.ndarray]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self._rest = np.empty(0, np.int32) if initial_state is None else initial_state["rest"]

    def next(self) -> np.ndarray:
        pieces, length = [self._rest], len(self._rest)
        while length < SEQ_LEN:
            document = next(self.source)
            pieces += [document, EOS]
            length += len(document) + 1
        joined = np.concatenate(pieces)
        self._rest = joined[SEQ_LEN:]
        return joined[:SEQ_LEN]

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "rest": self._rest.copy()}


def _to_tensor(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def plain_torchdata(urls: Urls, storage_options: Options = None) -> Iterator[torch.Tensor]:
    """Wraps a generator of documents for each dataset, and mixes, packs and batches with nodes."""
    sources = {name: nodes.IterableWrapper(Documents(url, storage_options)) for name, url in urls.items()}
    weights = {name: corpus.WEIGHTS[name] for name in urls}
    node = nodes.MultiNodeWeightedSampler(sources, weights, stop_criteria=nodes.StopCriteria.CYCLE_FOREVER)
    node = nodes.Mapper(nodes.Batcher(Packing(node), batch_size=BATCH_SIZE), _to_tensor)
    return iter(nodes.Loader(node))


def hugging_face(urls: Urls, storage_options: Options = None) -> Iterator[torch.Tensor]:
    """Streams Parquet, interleaves by probability, packs in a batched map over numpy arrays, and shuffles rows."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    def group(batch: dict[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
        joined = np.concatenate([piece for tokens in batch["tokens"] for piece in (tokens, EOS)])
        return {"tokens": list(joined[: len(joined) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN))}

    streams = [
        datasets.load_dataset("parquet", data_files=_files(urls[name], ".parquet"), split="train", streaming=True)
        for name in NAMES
    ]
    mixed = datasets.interleave_datasets(
        [stream.repeat(None) for stream in streams], probabilities=WEIGHTS, seed=0, stopping_strategy="all_exhausted"
    )
    packed = mixed.with_format("numpy").map(group, batched=True, batch_size=1000)
    shuffled = packed.shuffle(seed=0, buffer_size=SHUFFLED_ROWS).with_format("torch")
    for batch in DataLoader(shuffled, batch_size=BATCH_SIZE):
        yield batch["tokens"].long()


def grain_parquet(urls: Urls, storage_options: Options = None) -> Iterator[torch.Tensor]:
    """Reads Parquet, mixes, concatenates then splits, shuffles rows in a window, and batches."""
    import grain

    def close(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"tokens": np.append(row["tokens"], np.int32(corpus.EOS_ID))}

    sources = [
        grain.experimental.RepeatIterDataset(grain.experimental.ParquetIterDataset(_files(urls[name], ".parquet")))
        for name in NAMES
    ]
    mixed = grain.IterDataset.mix([source.map(close) for source in sources], weights=WEIGHTS)
    packed = grain.experimental.ConcatThenSplitIterDataset(mixed, length_struct={"tokens": SEQ_LEN})
    shuffled = grain.experimental.WindowShuffleIterDataset(packed, window_size=SHUFFLED_ROWS, seed=0)
    for batch in shuffled.batch(BATCH_SIZE, drop_remainder=True):
        yield torch.from_numpy(batch["tokens"].astype(np.int64))


def rows_of(url: str) -> Iterator[np.ndarray]:
    """Gives the rows of ``SEQ_LEN`` tokens that all documents of a dataset make, int32."""
    yield from nodes.Loader(Packing(nodes.IterableWrapper(Documents(url))))


@functools.cache
def _streaming() -> Any:
    """Imports MosaicML streaming; its parts for images need torchvision, whose build on PyPI wants CUDA."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import streaming

    return streaming


def pack_mosaicml(url: str, directory: pathlib.Path) -> None:
    """Writes MDS shards."""
    with _streaming().MDSWriter(out=str(directory), columns={"tokens": f"ndarray:int32:{SEQ_LEN}"}) as writer:
        for row in rows_of(url):
            writer.write({"tokens": row})


def mosaicml(urls: Urls, storage_options: Options = None) -> Iterator[torch.Tensor]:
    """Streams MDS shards with a proportion for each dataset, shuffled."""
    streaming = _streaming()
    streams = [streaming.Stream(local=urls[name], proportion=corpus.WEIGHTS[name]) for name in NAMES]
    dataset = streaming.StreamingDataset(streams=streams, shuffle=True, batch_size=BATCH_SIZE)
    loader = streaming.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, drop_last=True)
    while True:
        for batch in loader:
            yield batch["tokens"].long()


def pack_webdataset(url: str, directory: pathlib.Path) -> None:
    """Writes tar files of ``.npy`` samples."""
    import webdataset

    with webdataset.ShardWriter(f"{directory}/%05d.tar", maxcount=1000, verbose=0) as writer:
        for number, row in enumerate(rows_of(url)):
            writer.write({"__key__": f"{number:09}", "npy": row})


def web_dataset(urls: Urls, storage_options: Options = None) -> Iterator[torch.Tensor]:
    """Reads tar files, shuffles shards and rows, and mixes datasets at random."""
    import webdataset

    sources = [
        webdataset.WebDataset(_files(urls[name], ".tar"), shardshuffle=100)
        .shuffle(SHUFFLED_ROWS)
        .decode()
        .to_tuple("npy")
        .repeat()
        for name in NAMES
    ]
    mixed = webdataset.RandomMix(sources, WEIGHTS)
    for (rows,) in webdataset.WebLoader(mixed, batch_size=BATCH_SIZE, num_workers=0):
        yield rows.long()


def _tokens_of(url: str) -> Iterator[torch.Tensor]:
    for row in rows_of(url):
        yield torch.from_numpy(row)


def pack_litdata(url: str, directory: pathlib.Path) -> None:
    """Writes chunks of tokens."""
    import litdata

    litdata.optimize(
        fn=_tokens_of,
        inputs=[url],
        output_dir=str(directory),
        chunk_size=SEQ_LEN * 2000,
        item_loader=litdata.TokensLoader(),
        num_workers=1,
        verbose=False,
    )


def lit_data(urls: Urls, storage_options: Options = None) -> Iterator[torch.Tensor]:
    """Streams chunks of tokens, shuffled, and combines datasets by weight."""
    import litdata

    sources = [
        litdata.StreamingDataset(
            urls[name], item_loader=litdata.TokensLoader(block_size=SEQ_LEN), shuffle=True, drop_last=True
        )
        for name in NAMES
    ]
    combined = litdata.CombinedStreamingDataset(sources, seed=0, weights=WEIGHTS, iterate_over_all=False)
    loader = litdata.StreamingDataLoader(combined, batch_size=BATCH_SIZE, drop_last=True)
    while True:
        for batch in loader:
            if len(batch) == BATCH_SIZE:  # the last batch may be shorter all the same
                yield batch.long()


PEERS = {
    "torchdata": Peer("torchdata", "arrow", plain_torchdata),
    "hugging-face": Peer("datasets", "parquet", hugging_face),
    "grain": Peer("grain", "parquet", grain_parquet),
    "mosaicml": Peer("mosaicml-streaming", "arrow", mosaicml, pack_mosaicml, "benchmarks/peers-mosaicml.txt"),
    "webdataset": Peer("webdataset", "arrow", web_dataset, pack_webdataset),
    "litdata": Peer("litdata", "arrow", lit_data, pack_litdata),
}
