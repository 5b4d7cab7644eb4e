"""Settings: what is saved beside a state, the same on all ranks, and put into words where it changed."""

import corpora
import pytest
import torchdata.nodes
from sources import stored

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Schedule,
    Sharder,
    Shuffler,
    load_recipe,
    storage,
)
from ibm_nodes.checkpoint import load, save
from ibm_nodes.settings import derive_lineage, describe, differences, find_sharder

SECRETS = {"key": "AKIASECRETKEY", "secret": "hunter2hunter2", "endpoint_url": "http://localhost:1"}
WEIGHTS = {"web": 0.75, "code": 0.25}


def build(rank=0, world_size=1, *, url="s3://nowhere/", weights=None, batch=24, prefetch=2, seed=0, filler=None):
    weights = WEIGHTS if weights is None else weights

    def graph(shard, num_shards):
        options = {"shard": shard, "num_shards": num_shards, "seed": seed, "storage_options": dict(SECRETS)}
        readers = {name: Reader(f"{url}{name}/", **options) for name in weights}
        packer = Packer(Mixer(readers, weights=weights, seed=(seed, shard)), seq_len=32, eos_id=1)
        return Shuffler(packer, buffer_size=3, seed=(seed, shard))

    node = Sharder(graph, num_shards=24, rank=rank, world_size=world_size, filler=filler)
    node = Batcher(node, batch_size=batch // world_size, collate=CausalLMCollator(shift_labels=False))
    return Loader(Prefetcher(node, prefetch_factor=prefetch) if prefetch else node)


def everyone(**changes):
    return [build(rank, size, **changes) for size in (1, 2, 3, 4, 6, 8, 12, 24) for rank in range(size)]


def test_all_ranks_of_all_world_sizes_have_the_same_settings_and_lineage():
    first, *others = map(describe, everyone())
    assert all(list(settings.items()) == list(first.items()) for settings in others)
    assert len({derive_lineage(None, settings) for settings in [first, *others]}) == 1
    assert len({derive_lineage(("0123456789ab", 48), settings) for settings in [first, *others]}) == 1


def test_what_shapes_the_data_is_described_and_can_be_stored():
    found = describe(build())
    assert found["Sharder.num_shards"] == 24
    assert found["global_batch_size"] == 24 and found["prefetch_factor"] == 2
    assert found["Packer.seq_len"] == 32 and found["Packer.eos_id"] == 1 and found["Packer.bos_id"] is None
    assert found["Shuffler.buffer_size"] == 3
    assert found["web.Reader.url"] == "s3://nowhere/web/"
    assert found["Mixer.weights.web"] == 3 * found["Mixer.weights.code"]
    assert stored(found) == found


def test_nothing_is_listed_read_or_started(monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("touched the store")

    monkeypatch.setattr(storage, "_filesystem", fail)
    loader = build()
    assert describe(loader) == describe(loader)
    assert loader.state_dict()["position"] == 0


def test_credentials_are_not_in_it():
    text = repr(describe(build()))
    assert not any(secret in text for secret in SECRETS.values())


def test_the_recipe_is_described_without_the_credentials_of_its_listing(bucket):
    options = bucket.storage_options
    url = corpora.write(f"{bucket.url}web/", [[corpora.documents([40] * 30)]], "parquet", options)
    common = {"weights": {"web": 1}, "seq_len": 8, "eos_id": 1, "global_batch_size": 12, "num_shards": 12}
    found = [
        describe(load_recipe("pretrain")({"web": url}, rank=rank, world_size=size, storage_options=options, **common))
        for rank, size in [(0, 1), (0, 2), (1, 2), (3, 4)]
    ]
    assert all(settings == found[0] for settings in found)
    assert found[0]["global_batch_size"] == 12
    text = repr(found[0])
    assert not any(str(options[name]) in text for name in ("key", "secret"))


def test_the_global_batch_is_what_a_step_takes_however_it_is_cut(tmp_path):
    url = corpora.write(f"file://{tmp_path}/web/", [[corpora.documents([40] * 60)]], "parquet")
    common = {"weights": {"web": 1}, "seq_len": 8, "eos_id": 1, "global_batch_size": 24, "num_shards": 24}
    cuts = [(1, None), (1, 4), (2, 3), (4, 6), (4, None), (8, 1)]
    found = [
        describe(load_recipe("pretrain")({"web": url}, rank=0, world_size=size, micro_batch_size=micro, **common))
        for size, micro in cuts
    ]
    assert [settings["global_batch_size"] for settings in found] == [24] * len(cuts)
    assert len({derive_lineage(None, settings) for settings in found}) == 1
    loader = build(rank=1, world_size=2, batch=8)
    assert describe(loader)["global_batch_size"] == 8
    assert describe(Loader(loader.root, global_batch_size=32))["global_batch_size"] == 32
    with pytest.raises(ValueError, match="global_batch_size must be at least 1 or None, got 0"):
        Loader(loader.root, global_batch_size=0)


def test_differences_are_put_into_words():
    before = {"kept": 1, "weight": 0.5, "gone": "x", "none": None}
    after = {"kept": 1, "weight": 0.25, "new": [1], "none": 0}
    assert differences(before, after) == [
        "gone is gone (was 'x')",
        "new is new ([1])",
        "none was None and is now 0",
        "weight was 0.5 and is now 0.25",
    ]
    assert differences(before, before) == []


def test_every_change_that_is_allowed_is_named():
    before = describe(build())
    for changes, expected in [
        ({"batch": 48}, ["global_batch_size was 24 and is now 48"]),
        ({"prefetch": 5}, ["prefetch_factor was 2 and is now 5"]),
        ({"prefetch": 0}, ["prefetch_factor is gone (was 2)"]),
        ({}, []),
    ]:
        assert differences(before, describe(build(**changes))) == expected
    weights = differences(before, describe(build(weights={"web": 1, "code": 1})))
    assert [change.split(" ")[0] for change in weights] == ["Mixer.weights.code", "Mixer.weights.web"]
    added = differences(before, describe(build(weights={**WEIGHTS, "books": 1})))
    assert any(change.startswith("books.Reader.url is new ('s3://nowhere/books/')") for change in added)
    gone = differences(before, describe(build(weights={"web": 1})))
    assert any(change.startswith("code.Reader.url is gone (was 's3://nowhere/code/')") for change in gone)


def test_the_lineage_changes_with_whatever_changes_the_data_and_with_the_parent():
    settings = [
        describe(build(**changes))
        for changes in [
            {},
            {"batch": 48},
            {"weights": {"web": 0.74, "code": 0.26}},
            {"weights": {"web": 1.0}},
            {"weights": {**WEIGHTS, "books": 1}},
            {"url": "s3://elsewhere/"},
            {"seed": 1},
        ]
    ]
    parents = [None, ("0123456789ab", 48), ("0123456789ab", 72), ("0123456789ac", 48)]
    lineages = {derive_lineage(parent, one) for parent in parents for one in settings}
    assert len(lineages) == len(settings) * len(parents)
    assert all(len(lineage) == 12 and set(lineage) <= set("0123456789abcdef") for lineage in lineages)


def test_the_lineage_does_not_depend_on_the_order_in_which_settings_are_named():
    one = build(weights={"web": 3, "code": 1})
    other = build(weights={"code": 1, "web": 3})
    assert derive_lineage(None, describe(one)) == derive_lineage(None, describe(other))


def test_a_chain_of_starts_has_one_lineage_on_all_ranks_at_every_world_size(tmp_path):
    url = f"file://{tmp_path}/data/"
    for name in WEIGHTS:
        corpora.write(f"{url}{name}/", [[corpora.documents([40] * 60)]], "parquet")
    names = {}
    for sizes in [(1, 2, 3), (4, 6, 2), (8, 1, 4)]:
        target = f"file://{tmp_path}/run-{sizes[0]}"
        for step, size in enumerate(sizes):
            group = [build(rank, size, url=url) for rank in range(size)]
            for loader in group:
                # Credentials are for a store that is not used here.
                find_sharder(loader).graph = local(find_sharder(loader).graph)
                load(loader, target, missing="start")
                next(iter(loader))
            for future in [save(loader, target, step=step) for loader in group]:
                future.result(30)
            for loader in group:
                loader.close()
            found = {file.name.split("-")[1] for file in tmp_path.glob(f"run-{sizes[0]}/step-{step:08}/*.pt")}
            assert len(found) == 1
            names.setdefault(step, set()).update(found)
    assert [len(found) for found in names.values()] == [1, 1, 1]
    assert len(set.union(*names.values())) == 3


def local(graph):
    def built(shard, num_shards):
        node = graph(shard, num_shards)
        for reader in node.source.source.sources.values():
            reader.storage_options = None
        return node

    return built


def test_a_loader_without_a_sharder_is_refused():
    with pytest.raises(ValueError, match="must have a Sharder"):
        describe(Loader(Reader("file:///nowhere/", shard=0, num_shards=1)))


def test_a_loader_of_another_class_is_refused():
    with pytest.raises(TypeError, match="loader must be an ibm_nodes.Loader, got a torchdata.nodes.loader.Loader"):
        describe(torchdata.nodes.Loader(build().root))


def test_settings_do_not_depend_on_how_far_a_loader_has_drawn():
    """Ranks that are at the same batch may have drawn further than others, and must agree on what they save."""
    schedule = Schedule(
        [(0, {"web": 3, "code": 1}), (100, {"web": 1, "code": 1})], interpolate=True, seq_len={0: 2, 50: 4}
    )

    def graph(shard, num_shards):
        readers = {name: Reader(f"s3://nowhere/{name}/", shard=shard, num_shards=num_shards) for name in WEIGHTS}
        return Packer(Mixer(readers, weights=schedule, seed=shard), seq_len=schedule, eos_id=1)

    loader = Loader(Sharder(graph, num_shards=2, rank=0, world_size=1, schedule=schedule))
    found = []
    for now in (0, 10, 60, 1000):
        schedule.now = now
        found.append(describe(loader))
    assert found == found[:1] * 4
    assert found[0]["Packer.seq_len"] == 2
    assert "seq_len={0: 2, 50: 4}" in found[0]["schedule"]
