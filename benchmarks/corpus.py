"""The corpus that the benchmarks read: seeded, three datasets, documents of lognormal lengths."""

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
MEAN_LENGTH, SIGMA, VOCAB_SIZE, EOS_ID = 700, 1.0, 50_000, 2
TOKENS_PER_FILE = 4_000_000
ROWS_PER_BATCH = 1000


def build(root: pathlib.Path, *, num_tokens: int, seed: int = 0) -> dict[str, dict[str, str]]:
    """Writes the corpus once as Arrow IPC files and once as Parquet; gives URLs by format and dataset."""
    stamp = root / "corpus.json"
    settings = [num_tokens, seed, MEAN_LENGTH, SIGMA, TOKENS_PER_FILE, ROWS_PER_BATCH]
    formats = ("arrow", "parquet")
    urls = {form: {name: f"file://{root.resolve()}/{form}/{name}/" for name in WEIGHTS} for form in formats}
    if stamp.exists() and json.loads(stamp.read_text()) == settings:
        return urls
    rng = np.random.default_rng(seed)
    for name, weight in WEIGHTS.items():
        for form in formats:
            (root / form / name).mkdir(parents=True, exist_ok=True)
        left, number = int(num_tokens * weight), 0
        while left > 0:
            table = _table(rng, min(left, TOKENS_PER_FILE))
            with pa.OSFile(str(root / "arrow" / name / f"{number:05}.arrow"), "wb") as sink:
                with pa.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table, max_chunksize=ROWS_PER_BATCH)
            pq.write_table(
                table,
                root / "parquet" / name / f"{number:05}.parquet",
                row_group_size=ROWS_PER_BATCH,
                compression="zstd",
                use_dictionary=False,
            )
            left -= TOKENS_PER_FILE
            number += 1
    stamp.write_text(json.dumps(settings))
    return urls


def _table(rng: np.random.Generator, num_tokens: int) -> pa.Table:
    num_rows = int(num_tokens / MEAN_LENGTH * 1.2) + 8
    lengths = rng.lognormal(np.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA, num_rows).astype(np.int64) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets = offsets[: max(2, np.searchsorted(offsets, num_tokens, "right"))]
    tokens = rng.integers(3, VOCAB_SIZE, offsets[-1], dtype=np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(offsets.astype(np.int32), tokens)})
