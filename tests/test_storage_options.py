"""Storage options reach what they are for, each dataset's own too, and what is secret in them shows nowhere."""

import collections
import json
import logging
import pickle
import traceback
from itertools import islice

import corpora
import pyarrow as pa
import pytest
import texts
import torch
from fault_proxy import FaultProxy
from torchdata.nodes import BaseNode

from ibm_nodes import Filter, Mapper, Reader, checkpoint, list_recipes, load_recipe, stats, storage
from ibm_nodes.recipes import object_store
from ibm_nodes.recipes.distributed import fsspec_options, options_by_dataset
from ibm_nodes.settings import describe

SIZES = {"seq_len": 32, "eos_id": 1, "global_batch_size": 4, "num_shards": 4}
CALLS = {
    "pretrain": {**SIZES, "weights": {"web": 2, "code": 1}},
    "long-context": {**SIZES, "weights": {"web": 2, "code": 1}},
    "sft": {**SIZES, "weights": {"web": 2, "code": 1}, "response_ids": [1002], "overflow": "drop"},
    "validation": {**SIZES, "holdout": 0.5},
    "pretrain-text": {**SIZES, "eos_id": 0, "weights": {"web": 2, "code": 1}, "column": "text"},
}


@pytest.fixture(scope="module")
def root(s3):
    """Datasets of tokens and text, and a tokenizer."""
    url = object_store.make_bucket(s3.storage_options, "options")
    for name in ("web", "code"):
        tokens = corpora.documents([3 + number % 9 for number in range(120)])
        text = [f"{name} yes no {number}" for number in range(120)]
        table = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32())), "text": text})
        storage.write(f"{url}{name}/0.parquet", corpora.parquet([table]), s3.storage_options)
    texts.save(f"{url}tokenizer.json", s3.storage_options)
    return url


def build(name, root, storage_options):
    more = {"tokenizer": f"{root}tokenizer.json"} if name == "pretrain-text" else {}
    if name == "quickstart":
        return load_recipe(name)(f"{root}quickstart/", storage_options=storage_options)
    datasets = {dataset: f"{root}{dataset}/" for dataset in ("web", "code")}
    return load_recipe(name)(datasets, storage_options=storage_options, **more, **CALLS[name])


def test_every_recipe_that_gives_a_loader_is_tested_here():
    assert {*CALLS, "quickstart", "fsdp-ethernet"} == set(list_recipes())


class TestOfOneDataset:
    def test_each_dataset_is_read_with_its_own_over_the_common_ones(self, s3, root):
        with FaultProxy(s3.endpoint) as one, FaultProxy(s3.endpoint) as other:
            options = {**s3.storage_options, "endpoint_url": one.endpoint}
            options["datasets"] = {"code": {"endpoint_url": other.endpoint, "give_up_seconds": 9}}
            with build("pretrain", root, options) as loader:
                next(iter(loader))
                checkpoint.save(loader, f"{root}saved/own", step=1, storage_options=options).result()
            folders = [{request.path.split("/")[2] for request in proxy.reads} for proxy in (one, other)]
            assert folders == [{"web"}, {"code"}]
            writes = [request for request in one.requests if request.is_write()]
            (saved,) = [request for request in writes if "/listings/" not in request.path]
            assert "saved/own" in saved.path
            assert not [request for request in other.requests if request.is_write()]

    def test_a_tokenizer_is_read_with_the_common_ones(self, s3, root):
        with build("pretrain-text", root, {**s3.storage_options, "datasets": {"web": None}}) as loader:
            assert next(iter(loader))["input_ids"].shape == (4, 32)

    def test_those_of_an_unknown_dataset_are_an_error(self, s3, root):
        with pytest.raises(
            ValueError, match=r"\['datasets'\] must be for the datasets \['code', 'web'\], got \['wbe'\]"
        ):
            build("pretrain", root, {**s3.storage_options, "datasets": {"wbe": {"anon": True}}})

    def test_they_are_flags_with_dots(self, s3, root, ibm_nodes):
        options = {"key": "wrong", "secret": "wrong-secret", "endpoint_url": s3.endpoint}
        given = {"key": s3.storage_options["key"], "secret": s3.storage_options["secret"]}
        options |= {f"datasets.{name}.{key}": value for name in ("web", "code") for key, value in given.items()}
        flags = [part for key, value in options.items() for part in ("--storage-option", f"{key}={value}")]
        mix = [
            part for name in ("web", "code") for part in ("--data", f"{name}={root}{name}/", "--weight", f"{name}=1")
        ]
        sizes = ["--seq-len", 32, "--eos-id", 1, "--global-batch-size", 4, "--num-shards", 4]
        code, output, _ = ibm_nodes("run", "pretrain", *mix, *sizes, *flags, "--steps", 1, "--json")
        assert (code, json.loads(output)["recipe"]) == (0, "pretrain")
        code, output, errors = ibm_nodes("run", "pretrain", *mix, *sizes, *flags[:6], "--steps", 1)
        assert code != 0
        assert "cannot be listed" in errors
        assert "wrong-secret" not in output + errors

    def test_what_is_ours_is_not_for_fsspec(self):
        assert fsspec_options({"key": "k", "give_up_seconds": 3, "datasets": {}}) == {"key": "k"}
        assert fsspec_options(None) == {}
        assert options_by_dataset(["a", "b"], {"key": "k", "datasets": {"a": {"key": None}}}) == {
            "a": {"key": None},
            "b": {"key": "k"},
        }


def nodes_of(loader):
    """The loader's nodes, and those of one logical shard."""
    sharder = loader.root
    while not hasattr(sharder, "graph"):
        yield sharder
        sharder = sharder.source
    yield sharder
    waiting = collections.deque([sharder.graph(0, sharder.num_shards)])
    while waiting:
        node = waiting.popleft()
        yield node
        for value in vars(node).values():
            parts = value.values() if isinstance(value, dict) else [value]
            waiting += [part for part in parts if isinstance(part, BaseNode)]


@pytest.fixture
def secrets(s3):
    return [s3.storage_options["key"], s3.storage_options["secret"]]


def with_own(options):
    return {**options, "datasets": {"web": dict(options)}}


@pytest.mark.parametrize("name", [*CALLS, "quickstart"])
def test_what_is_secret_shows_nowhere(name, s3, root, secrets, caplog, tmp_path):
    options = with_own(s3.storage_options) if name != "quickstart" else s3.storage_options
    seen, kinds = [], set()
    with caplog.at_level(logging.DEBUG, "ibm_nodes"), build(name, root, options) as loader:
        for _ in islice(loader, 3):
            pass
        state = loader.state_dict()
        checkpoint.save(loader, f"file://{tmp_path}/saved", step=1).result()
        for node in nodes_of(loader):
            kinds.add(type(node).__name__)
            seen += [repr(node), str(node)]
            graph = getattr(node, "graph", None)
            seen += [repr(graph), repr(getattr(graph, "keywords", None))]
            seen += [repr(getattr(node, "listing", None)), str(getattr(node, "listing", None))]
            if not isinstance(getattr(node, "source", None), BaseNode):
                seen.append(repr(node.state_dict()))
        seen += [repr(loader), str(loader), repr(state), repr(describe(loader)), repr(stats(loader))]
    seen += [record.getMessage() for record in caplog.records if record.name.startswith("ibm_nodes")]
    (file,) = (tmp_path / "saved").rglob("*.pt")
    torch.save(state, tmp_path / "state.pt")
    contents = [file.read_bytes(), (tmp_path / "state.pt").read_bytes(), pickle.dumps(describe(loader))]
    assert {"Reader", "Sharder", "Batcher", "Prefetcher"} <= kinds
    for secret in secrets:
        assert not [text for text in seen if secret in text]
        assert not [content for content in contents if secret.encode() in content]


@pytest.mark.parametrize("name", [*CALLS, "quickstart"])
def test_what_is_secret_shows_in_no_error(name, s3, root, secrets, caplog):
    wrong = {**s3.storage_options, "secret": "hush" * 10}
    with caplog.at_level(logging.DEBUG, "ibm_nodes"), pytest.raises(PermissionError) as raised:
        build(name, root, with_own(wrong) if name != "quickstart" else wrong)
    lines = [*traceback.format_exception(raised.value), repr(raised.value), *map(repr, raised.value.args)]
    lines += [record.getMessage() for record in caplog.records if record.name.startswith("ibm_nodes")]
    assert not [line for line in lines if wrong["secret"] in line or wrong["key"] in line]


def test_an_unknown_option_is_an_error_that_shows_no_other(s3, root):
    options = {**s3.storage_options, "secrte": "hush"}
    with pytest.raises(ValueError, match=r"secrte.*check storage_options") as raised:
        build("pretrain", root, options)
    assert s3.storage_options["secret"] not in "".join(traceback.format_exception(raised.value))


def test_nodes_composed_by_hand_show_nothing_either(s3, root, secrets):
    reader = Reader(f"{root}web/", shard=0, num_shards=1, storage_options=s3.storage_options)
    node = Mapper(Filter(reader, len), lambda document, seed: document, seed=0)
    next(node)
    seen = [repr(reader), str(reader), repr(node), repr(node.state_dict()), repr(node.get_state())]
    assert not [text for text in seen for secret in secrets if secret in text]
