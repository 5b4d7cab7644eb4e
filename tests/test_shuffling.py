"""How well the documents of a corpus that is sorted are mixed into global batches."""

import math
import random
from collections import Counter

import corpora
import numpy as np
import pyarrow as pa
import pytest

from ibm_nodes import Packer, Reader, Sharder, Shuffler, storage
from ibm_nodes.formats import arrow

NUM_LABELS, NUM_FILES, NUM_SHARDS, BATCH = 10, 200, 240, 240
SEQ_LEN, MEAN_LENGTH, STRIDE = 256, 40, 1000
FIRST_BATCH, NUM_BATCHES = 20, 200
EOS = 0
CASES = [("arrow", NUM_SHARDS), ("parquet", NUM_SHARDS), ("arrow", NUM_SHARDS // 2)]


def write_sorted(url, form, *, rows_per_batch=2000, seed=0):
    """200 files of unequal size, sorted by label; gives each document's label and length.

    Document d is the tokens ``STRIDE * d + 1`` and on, so that a token tells its document.
    """
    rng = random.Random(seed)
    labels, lengths = [], []
    for number in range(NUM_FILES):
        num_rows = rng.randint(1200, 1800)
        first = len(lengths)
        sizes = [min(999, 1 + int(rng.expovariate(1 / MEAN_LENGTH))) for _ in range(num_rows)]
        labels += [number * NUM_LABELS // NUM_FILES] * num_rows
        lengths += sizes
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        starts = STRIDE * np.arange(first, first + num_rows) + 1
        flat = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, sizes)
        rows = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, pa.int32()))
        table = pa.table({"tokens": rows})
        tables = [table.slice(begin, rows_per_batch) for begin in range(0, num_rows, rows_per_batch)]
        storage.write(f"{url}{number:03}.{form}", corpora.FORMATS[form](tables))
    return np.array(labels), np.array(lengths)


def graph(url):
    """Readers, packers and shufflers of logical shards, as in a recipe."""

    def build(shard, num_shards):
        reader = Reader(url, name="sorted", shard=shard, num_shards=num_shards)
        return Shuffler(Packer(reader, seq_len=SEQ_LEN, eos_id=EOS), buffer_size=16, seed=(0, shard))

    return build


def global_batches(url, num_shards, num_batches):
    """For each global batch, the document of every token."""
    node = Sharder(graph(url), num_shards=num_shards, rank=0, world_size=1)
    for _ in range(num_batches):
        tokens = np.concatenate([next(node).tokens for _ in range(BATCH)])
        yield tokens[tokens != EOS] // STRIDE


@pytest.mark.parametrize(("form", "num_shards"), CASES)
def test_every_global_batch_of_a_corpus_sorted_by_label_has_each_label_in_its_share(tmp_path, form, num_shards):
    """Within four standard deviations of a batch of documents drawn independently from all of the corpus."""
    url = f"file://{tmp_path}/"
    labels, lengths = write_sorted(url, form)
    totals = np.bincount(labels, lengths, NUM_LABELS)
    shares = totals / totals.sum()
    # A share is a ratio of sums over documents: the variance of length * ([has the label] - share).
    num_documents = BATCH * SEQ_LEN / (lengths.mean() + 1)
    errors = [lengths * ((labels == label) - share) for label, share in enumerate(shares)]
    limits = [4 * math.sqrt(np.mean(error**2) / num_documents) / lengths.mean() for error in errors]
    for number, documents in enumerate(global_batches(url, num_shards, FIRST_BATCH + NUM_BATCHES)):
        found = np.bincount(labels[documents], minlength=NUM_LABELS) / len(documents)
        if number >= FIRST_BATCH:
            assert np.all(np.abs(found - shares) <= limits), f"batch {number}: {found}, not {shares}"


def check_meetings(url, lengths, num_shards, times):
    """Over a pass, or nearly: in a batch of n of N documents, about n^2 / N neighbours would meet by chance."""
    num_batches = int(lengths.sum() * 0.9 / (BATCH * SEQ_LEN))
    first_seen = {}
    for number, documents in enumerate(global_batches(url, num_shards, num_batches)):
        for document in set(documents.tolist()):
            first_seen.setdefault(document, number)
    assert len(first_seen) > 0.8 * len(lengths)
    found = sum(number == first_seen.get(document + 1) for document, number in first_seen.items())
    chance = sum(size**2 for size in Counter(first_seen.values()).values()) / len(lengths)
    assert found <= times * chance, f"{found} pairs of neighbours met, {chance:.0f} would by chance"


@pytest.mark.parametrize(("form", "num_shards"), CASES)
def test_neighbours_in_a_file_meet_in_a_global_batch_at_most_three_times_as_often_as_by_chance(
    tmp_path, form, num_shards
):
    """Where a logical shard has up to about two blocks, as here; else as the next test says."""
    url = f"file://{tmp_path}/"
    _, lengths = write_sorted(url, form)
    check_meetings(url, lengths, num_shards, 3)


@pytest.mark.parametrize(("form", "rows_per_batch"), [("arrow", 400), ("arrow", 50), ("parquet", 400), ("parquet", 50)])
def test_neighbours_meet_more_often_by_no_more_than_the_number_of_blocks_of_a_logical_shard(
    tmp_path, monkeypatch, form, rows_per_batch
):
    """Documents are shuffled within a block, and blocks within a logical shard's part of the dataset.

    A shard takes the documents of one block after the other, so neighbours come within one block's documents of each
    other. They are in the same sample with a chance of a sample's documents over a block's, which is that of any two
    documents of the shard times its number of blocks. A block is about a megabyte of Arrow record batches, here one
    record batch; or a row group, however small. A terabyte in 240 logical shards is 4,000 blocks a shard: there two
    documents are in one sample with a chance of about one in a million, and neighbours, of samples of six documents out
    of blocks of a thousand, with one in two hundred.
    """
    monkeypatch.setattr(arrow, "BLOCK_BYTES", 1)
    url = f"file://{tmp_path}/"
    _, lengths = write_sorted(url, form, rows_per_batch=rows_per_batch)
    num_blocks = len(lengths) / NUM_SHARDS / rows_per_batch
    check_meetings(url, lengths, NUM_SHARDS, 2 + num_blocks)
