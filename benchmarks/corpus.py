"""The corpus that the benchmarks read: seeded, three datasets, documents of lognormal lengths.

It is written in the layouts that are asked for: Arrow files whose record batches have many documents ("arrow"), Parquet
("parquet"), and Arrow files in which each record batch is one document, as IBM's loader has them ("ibm").
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
MEAN_LENGTH, SIGMA, VOCAB_SIZE, EOS_ID = 700, 1.0, 50_000, 2
TOKENS_PER_FILE = 4_000_000
ROWS_PER_BATCH = 1000


def build(
    root: pathlib.Path,
    *,
    num_tokens: int,
    seed: int = 0,
    layouts: Sequence[str] = ("arrow", "parquet"),
    tokens_per_file: int = TOKENS_PER_FILE,
) -> dict[str, dict[str, str]]:
    """Writes the corpus once in each of the layouts, unless it is there; gives URLs by layout and dataset."""
    settings = [num_tokens, seed, MEAN_LENGTH, SIGMA, tokens_per_file, ROWS_PER_BATCH]
    for layout in layouts:
        stamp = root / f"{layout}.json"
        if stamp.exists() and json.loads(stamp.read_text()) == settings:
            continue
        stamp.unlink(missing_ok=True)
        for at, (name, weight) in enumerate(WEIGHTS.items()):
            _write_dataset(root / layout / name, layout, int(num_tokens * weight), tokens_per_file, (seed, at))
        stamp.write_text(json.dumps(settings))
    return {layout: {name: f"file://{root.resolve()}/{layout}/{name}/" for name in WEIGHTS} for layout in layouts}


def cut(root: pathlib.Path, num_datasets: int) -> dict[str, str]:
    """Deals the Arrow files out to so many datasets, by links; gives their URLs by name.

    Where there are fewer files than datasets, several datasets have the same files.
    """
    folder = root / f"arrow-{num_datasets}"
    files = sorted((root / "arrow").rglob("*.arrow"))
    for number in range(max(num_datasets, len(files))):
        file = files[number % len(files)]
        link = folder / f"{number % num_datasets:02}" / f"{file.parent.name}-{file.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        os.link(file, link)
    return {path.name: f"file://{path.resolve()}/" for path in sorted(folder.iterdir())}


def documents(rng: np.random.Generator, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives the offsets of documents of about so many tokens in all, and their tokens."""
    num_rows = int(num_tokens / MEAN_LENGTH * 1.2) + 8
    lengths = rng.lognormal(np.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA, num_rows).astype(np.int64) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets = offsets[: max(2, np.searchsorted(offsets, num_tokens, "right"))].astype(np.int32)
    return offsets, rng.integers(3, VOCAB_SIZE, offsets[-1], dtype=np.int32)


def _write_dataset(
    folder: pathlib.Path, layout: str, num_tokens: int, tokens_per_file: int, seed: tuple[int, int]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    write, ending = _LAYOUTS[layout]
    for number, begin in enumerate(range(0, num_tokens, tokens_per_file)):
        rng = np.random.default_rng((*seed, number))
        offsets, tokens = documents(rng, min(num_tokens - begin, tokens_per_file))
        write(str(folder / f"{number:05}.{ending}"), offsets, tokens)


def _table(offsets: np.ndarray, tokens: np.ndarray) -> pa.Table:
    return pa.table({"tokens": pa.ListArray.from_arrays(offsets, tokens)})


def _write_arrow(path: str, offsets: np.ndarray, tokens: np.ndarray) -> None:
    table = _table(offsets, tokens)
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_PER_BATCH)


def _write_parquet(path: str, offsets: np.ndarray, tokens: np.ndarray) -> None:
    pq.write_table(
        _table(offsets, tokens), path, row_group_size=ROWS_PER_BATCH, compression="zstd", use_dictionary=False
    )


def _write_ibm(path: str, offsets: np.ndarray, tokens: np.ndarray) -> None:
    schema = pa.schema({"tokens": pa.uint32()})
    column = pa.array(tokens.astype(np.uint32))
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            writer.write_batch(pa.record_batch([column[begin:end]], schema))


_LAYOUTS: dict[str, tuple[Callable[[str, np.ndarray, np.ndarray], None], str]] = {
    "arrow": (_write_arrow, "arrow"),
    "ibm": (_write_ibm, "arrow"),
    "parquet": (_write_parquet, "parquet"),
}
