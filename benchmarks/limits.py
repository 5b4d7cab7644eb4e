"""The least that a loader has to do, as tight loops: what its rate is compared with.

Nothing of it could be resumed or rescaled.
"""

import asyncio
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Sequence

import corpus
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import s3fs
from pipeline import BATCH_SIZE, SEQ_LEN
from tokenizers import Tokenizer

from ibm_nodes.s3 import client_options

RANGE_BYTES, IN_FLIGHT = 4 << 20, 16
TEXTS_PER_BATCH = 1000


def pack(urls: dict[str, str], buffer_size: int = 10_000) -> Iterator[np.ndarray]:
    """Mixes, packs and shuffles the Arrow files of all datasets for ever, in one thread, a record batch at a time.

    Yields batches; the mix is exact to a record batch.
    """
    rng = np.random.default_rng(0)
    sources = {name: _closed_batches(url) for name, url in urls.items()}
    drawn = dict.fromkeys(urls, 0)
    buffer, filled = np.empty((buffer_size, SEQ_LEN), np.int32), 0
    rest = np.empty(0, np.int32)
    while True:
        name = min(urls, key=lambda name: drawn[name] / corpus.WEIGHTS[name])
        tokens = next(sources[name])
        drawn[name] += len(tokens)
        tokens = np.concatenate([rest, tokens])
        end = len(tokens) - len(tokens) % SEQ_LEN
        rows, rest = tokens[:end].reshape(-1, SEQ_LEN), tokens[end:]
        missing = min(buffer_size - filled, len(rows))
        buffer[filled : filled + missing] = rows[:missing]
        filled += missing
        for at in range(missing, len(rows), BATCH_SIZE):
            new = rows[at : at + BATCH_SIZE]
            chosen = rng.choice(buffer_size, len(new), replace=False, shuffle=False)
            batch = buffer[chosen].astype(np.int64)
            buffer[chosen] = new
            yield batch


def _closed_batches(url: str) -> Iterator[np.ndarray]:
    """Gives the tokens of each record batch, with an EOS after each document."""
    for path in itertools.cycle(_files(url)):
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column(0)
            ends = column.offsets.to_numpy()[1:]
            closed = np.insert(column.values.to_numpy(), ends, corpus.EOS_ID)
            yield closed


def get_record_batches(urls: dict[str, str]) -> Iterator[int]:
    """Has pyarrow give the record batches of IBM's layout, one by one, from a memory map; yields numbers of tokens."""
    for path in itertools.cycle(_files(*urls.values())):
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        for number in range(reader.num_record_batches):
            yield len(reader.get_batch(number).column(0).to_numpy())


def decode_row_groups(urls: dict[str, str]) -> Iterator[int]:
    """Has pyarrow decode all Parquet files, a row group at a time, in one thread; yields numbers of tokens.

    It looks at each token.
    """
    for path in itertools.cycle(_files(*urls.values())):
        with pq.ParquetFile(path, memory_map=True) as file:
            for number in range(file.num_row_groups):
                group = file.read_row_group(number, columns=["tokens"], use_threads=False)
                for chunk in group.column(0).chunks:
                    tokens = chunk.values.to_numpy()
                    tokens.max()
                    yield len(tokens)


def read_ranges(prefixes: Sequence[str], storage_options: dict[str, object], seconds: float) -> float:
    """Gives the bytes a second of ranged GETs by s3fs alone: of 4 MiB, 16 in flight."""
    return asyncio.run(_read_ranges(prefixes, storage_options, seconds))


async def _read_ranges(prefixes: Sequence[str], storage_options: dict[str, object], seconds: float) -> float:
    fs = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, **client_options(storage_options))
    session = await fs.set_session()
    sizes = {path: info["size"] for url in prefixes for path, info in (await fs._find(url, detail=True)).items()}
    ranges = itertools.cycle(
        [
            (path, begin, min(begin + RANGE_BYTES, size))
            for path, size in sizes.items()
            for begin in range(0, size, RANGE_BYTES)
        ]
    )
    total = 0

    async def work() -> None:
        nonlocal total
        for path, begin, stop in ranges:
            data = await fs._cat_file(path, start=begin, end=stop)
            total += len(data)

    workers = [asyncio.create_task(work()) for _ in range(IN_FLIGHT)]
    while total < IN_FLIGHT * RANGE_BYTES / 2:  # until all connections are there
        await asyncio.sleep(0.01)
    began, before = time.perf_counter(), total
    while (passed := time.perf_counter() - began) < seconds or total == before:
        await asyncio.sleep(0.01)
    came = total - before
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await session.close()
    return came / passed


def encode(urls: dict[str, str], tokenizer: str, *, fast: bool) -> Iterator[int]:
    """Has ``tokenizers`` encode the texts in large batches; yields numbers of tokens.

    Args:
        urls: JSON lines by dataset.
        tokenizer: path of the ``tokenizer.json``.
        fast: by ``encode_batch_fast``, which does not say where a token is in its text.
    """
    model = Tokenizer.from_file(tokenizer)
    encode_batch = model.encode_batch_fast if fast else model.encode_batch
    for path in itertools.cycle(_files(*urls.values())):
        with path.open() as file:
            texts = [json.loads(line)["text"] for line in file]
        for begin in range(0, len(texts), TEXTS_PER_BATCH):
            encodings = encode_batch(texts[begin : begin + TEXTS_PER_BATCH], add_special_tokens=False)
            yield sum(map(len, encodings))


def _files(*urls: str) -> list[pathlib.Path]:
    return sorted(path for url in urls for path in pathlib.Path(url.removeprefix("file://")).iterdir())
