"""What a training run says of datasets: which token is of which, and sums over ranks."""

import json

import numpy as np
import pytest

from ibm_nodes import CausalLMCollator, Loader, Sample
from ibm_nodes.recipes import train_log
from ibm_nodes.recipes.train_log import DatasetTagger, line, merge_datasets, tag_datasets
from ibm_nodes.recipes.trainer import schedule


def sample(starts, names):
    return Sample(np.arange(6, dtype=np.uint16), starts, tuple((name, "url", 0, 0) for name in names))


def test_tags_each_token_with_the_dataset_of_its_document():
    tagger = DatasetTagger(CausalLMCollator(shift_labels=False))
    batch = tagger([sample((0, 2, 5), ("web", "code", "web")), sample((0,), ("books",)), sample((0,), ())])
    assert batch["dataset_ids"].tolist() == [[0, 0, 1, 1, 1, 0], [2] * 6, [-1] * 6]
    assert tagger.names == ["web", "code", "books"]
    assert tagger([sample((0, 1), ("books", "code"))])["dataset_ids"].tolist() == [[2, 1, 1, 1, 1, 1]]
    assert batch["input_ids"].tolist() == [list(range(6))] * 3


def test_leaves_batches_of_other_items_and_those_that_have_tags():
    assert DatasetTagger(lambda items: {"input_ids": items})([[1, 2]]) == {"input_ids": [[1, 2]]}
    given = {"input_ids": 1, "dataset_ids": 2}
    assert DatasetTagger(lambda items: given)([sample((0,), ("web",))]) is given


def test_a_loader_without_a_collator_is_left_as_it_is():
    from torchdata.nodes import IterableWrapper

    assert tag_datasets(Loader(IterableWrapper([1]))) is None


def test_merges_what_the_ranks_found_of_their_parts():
    everyone = [
        {"datasets": {"web": {"tokens": 30, "passes": 1.0}}, "losses": {"web": (6.0, 3.0)}},
        {"datasets": {"web": {"tokens": 50, "passes": 2.0}, "code": {"tokens": 20}}, "losses": {"code": (0.0, 0.0)}},
    ]
    assert merge_datasets(everyone) == {
        "code": {"tokens": 20, "share": 0.2, "passes": 0.0, "loss": None},
        "web": {"tokens": 80, "share": 0.8, "passes": 1.5, "loss": 2.0},
    }


def test_a_line_says_what_is_known(tmp_path):
    datasets = {"web": {"share": 1.0, "loss": 2.5}, "code": {"share": 0.0, "loss": None}}
    record = {"step": 7, "loss": 2.5, "tokens_per_second": 1234.5, "mfu": 0.417, "waited_share": 0.001}
    record |= {"datasets": datasets, "validation_loss": 3.0}
    assert line(record) == (
        "step 7  loss 2.5000  1,234 tokens/s  MFU 41.7%  waited for data 0.1%  web 100.0% loss 2.5000  code 0.0%  "
        "validation loss 3.0000"
    )
    for number in (1, 2):
        train_log.append(str(tmp_path / "log"), {"step": number})
    assert [json.loads(text) for text in (tmp_path / "log").read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_the_learning_rate_rises_and_falls_along_a_cosine():
    rates = [schedule(step, 10, 4, 0.1) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55)  # half of the way down
    assert rates[-1] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert schedule(1, 1, 0, 0.1) == pytest.approx(0.1)
