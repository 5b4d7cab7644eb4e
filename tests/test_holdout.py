"""Held-out data: two splits that share no document and together are all, whatever else is asked for."""

import itertools
import math

import corpora
import pytest

from ibm_nodes import Reader
from ibm_nodes.testing import assert_resumes

NUM_DOCUMENTS = 3000
SHARE = 0.1


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def url(request, tmp_path_factory):
    rows = corpora.documents([2] * NUM_DOCUMENTS)
    files = [corpora.every(part, 50) for part in corpora.cut(rows, [1000, 700, 1300])]
    return corpora.write(f"file://{tmp_path_factory.mktemp('data')}/", files, request.param)


def places(url, split, num_shards=3, seed=0, epochs=1, **options):
    """Every document by its first token, in the order of the shards."""
    found = []
    for shard in range(num_shards):
        settings = {"name": "data", "holdout": SHARE, "split": split, "epochs": epochs, "seed": seed, **options}
        reader = Reader(url, shard=shard, num_shards=num_shards, **settings)
        found += [int(document.tokens[0]) for document in reader]
    return found


@pytest.mark.parametrize("seed, num_shards", [*itertools.product([0, 1, 2], [1, 4, 30])])
def test_the_splits_share_no_document_and_are_together_all_over_two_epochs(url, seed, num_shards):
    train = places(url, "train", num_shards, seed, epochs=2)
    validation = places(url, "validation", num_shards, seed, epochs=2)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(2 * places(url, "train", holdout=0.0))
    share = len(validation) / 2 / NUM_DOCUMENTS
    assert abs(share - SHARE) < 4 * math.sqrt(SHARE * (1 - SHARE) / NUM_DOCUMENTS)
    assert set(validation) == set(places(url, "validation"))


def test_the_split_depends_on_the_name_and_the_key(url):
    assert set(places(url, "validation")) != set(places(url, "validation", name="other"))


def test_a_larger_share_holds_out_more_of_the_same(url):
    assert set(places(url, "validation")) < set(places(url, "validation", holdout=2 * SHARE))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_reader_of_a_split_resumes(url, split):
    assert_resumes(lambda: Reader(url, shard=1, num_shards=7, holdout=SHARE, split=split, epochs=2), cuts=[0, 1, 5, 20])


def test_a_split_without_a_document_is_an_error_that_says_so(tmp_path):
    one = corpora.write(f"file://{tmp_path}/", [[corpora.documents([3])]], "arrow")
    with pytest.raises(ValueError, match=r"no token in column 'tokens' of its validation split with holdout=0.001"):
        next(Reader(one, shard=0, num_shards=1, holdout=0.001, split="validation"))


@pytest.mark.parametrize(
    "options, named",
    [
        ({"holdout": 1.0}, "holdout must be from 0 to below 1"),
        ({"holdout": -0.1}, "holdout must be from 0 to below 1"),
        ({"holdout": 0.1, "split": "test"}, "got 0.1 and 'test'"),
        ({"split": "validation"}, "needs a holdout above 0"),
    ],
)
def test_refuses_what_is_no_split(options, named):
    with pytest.raises(ValueError, match=named):
        Reader("memory://x/", shard=0, num_shards=1, **options)


def test_a_state_of_the_other_split_is_refused(url):
    options = {"shard": 0, "num_shards": 1, "holdout": SHARE}
    state = Reader(url, split="train", **options).state_dict()
    with pytest.raises(ValueError, match="split='train' and is now built with split='validation'"):
        Reader(url, split="validation", **options).reset(state)
