"""How well the documents of a corpus that is sorted are mixed into global batches."""

import math
import random
from collections import Counter

import corpora
import numpy as np
import pyarrow as pa
import pytest

from ibm_nodes import Packer, Reader, Sharder, Shuffler
from ibm_nodes.formats import arrow

NUM_LABELS, NUM_FILES, NUM_SHARDS, BATCH = 10, 200, 240, 240
SEQ_LEN, MEAN_LENGTH, STRIDE = 256, 40, 1000
FIRST_BATCH, NUM_BATCHES = 20, 200
EOS = 0


def write_sorted(url, form, *, rows_per_batch=50, seed=0):
    """200 files of unequal size, sorted by label: the first twentieth to the last; gives each document's label and length.

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
        corpora.put(f"{url}{number:03}.{form}", corpora.FORMATS[form](tables))
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


@pytest.mark.parametrize(("form", "num_shards"), [("arrow", NUM_SHARDS), ("parquet", NUM_SHARDS), ("arrow", 120)])
def test_every_global_batch_of_a_corpus_sorted_by_label_has_each_label_in_its_share(tmp_path, form, num_shards):
    """Within four standard deviations of a batch of documents drawn independently from all of the corpus."""
    url = f"file://{tmp_path}/"
    labels, lengths = write_sorted(url, form)
    totals = np.bincount(labels, lengths, NUM_LABELS)
    shares = totals / totals.sum()
    num_documents = BATCH * SEQ_LEN / (lengths.mean() + 1)
    for number, documents in enumerate(global_batches(url, num_shards, FIRST_BATCH + NUM_BATCHES)):
        found = np.bincount(labels[documents], minlength=NUM_LABELS) / len(documents)
        for label, share in enumerate(shares):
            # A ratio of sums over documents: the variance of length * ([has the label] - share).
            of_label = (labels == label) - share
            deviation = math.sqrt(np.mean((lengths * of_label) ** 2) / num_documents) / lengths.mean()
            if number >= FIRST_BATCH:
                assert abs(found[label] - share) <= 4 * deviation, f"label {label} in batch {number}: {found[label]}"


def meetings(url, num_shards, num_batches):
    """How many pairs of neighbours in a file begin in the same global batch, and how many would by chance."""
    first_seen, count = {}, Counter()
    for number, documents in enumerate(global_batches(url, num_shards, num_batches)):
        for document in set(documents.tolist()):
            if first_seen.setdefault(document, number) == number:
                count[number] += 1
    return first_seen, count


@pytest.mark.parametrize(("form", "num_shards"), [("arrow", NUM_SHARDS), ("parquet", NUM_SHARDS), ("arrow", 120)])
def test_neighbours_in_a_file_meet_in_a_global_batch_at_most_three_times_as_often_as_by_chance(
    tmp_path, form, num_shards
):
    """Documents are shuffled within a block, and blocks within a logical shard's part of the dataset.

    So neighbours come within one block's documents of each other, and meet about as many times as often as by chance as
    a logical shard has blocks: here one or two. A terabyte in 240 shards and blocks of a megabyte is 4,000 blocks a
    shard; there the chance is a few in a million, and that of neighbours a sample's documents over a block's: below one
    in a hundred. The bound of three holds for datasets of up to about three blocks for each logical shard, and this test
    is of such a one.
    """
    url = f"file://{tmp_path}/"
    _, lengths = write_sorted(url, form)
    check_meetings(url, lengths, num_shards, 3)


def check_meetings(url, lengths, num_shards, times):
    """Over one pass, or nearly: a batch of n of N documents has a pair of neighbours with a chance of about (n / N)^2."""
    num_batches = int(lengths.sum() * 0.9 / (BATCH * SEQ_LEN))
    first_seen, count = meetings(url, num_shards, num_batches)
    assert len(first_seen) > 0.8 * len(lengths)
    found = sum(first_seen[document] == first_seen.get(document + 1) for document in first_seen)
    chance = sum(size**2 for size in count.values()) / len(lengths)
    assert found <= times * chance, f"{found} pairs of neighbours met, {chance:.0f} would by chance"
    return found / chance
