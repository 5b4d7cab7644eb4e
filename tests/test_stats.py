"""What a loader says of itself is what an oracle counts."""

from collections import Counter

import corpora
import pytest
from sources import Items
from sources import documents as made

from ibm_nodes import Loader, Mixer, Packer, Prefetcher, Reader, Sharder, stats


def test_counts_tokens_documents_shares_and_passes_of_each_dataset(tmp_path):
    rows = {"a": corpora.documents([5, 0, 7] * 20), "b": corpora.documents([9] * 30, first=100)}
    for name, documents in rows.items():
        corpora.write(f"file://{tmp_path}/{name}/", [corpora.every(documents, 4)], "arrow")
    drawn: Counter[str] = Counter()

    class Watch(Reader):
        def next(self):
            document = super().next()
            drawn[document.name] += 1
            return document

    def graph(shard, num_shards):
        sources = {name: Watch(f"file://{tmp_path}/{name}/", shard=shard, num_shards=num_shards) for name in rows}
        return Packer(Mixer(sources, weights={"a": 3, "b": 1}, seed=(0, shard)), seq_len=16, eos_id=1)

    loader = Loader(Prefetcher(Sharder(graph, num_shards=3, rank=0, world_size=1), prefetch_factor=1))
    assert stats(loader)["datasets"] == {} and stats(loader)["position"] == 0
    with loader:
        for _, _ in zip(range(240), loader, strict=False):
            pass
        found = stats(loader)
    assert found["position"] == 240
    assert abs(found["datasets"]["a"]["share"] - 0.75) < 0.01
    assert found["datasets"]["a"]["weight"] == 0.75
    total = sum(entry["tokens"] for entry in found["datasets"].values())
    assert 240 * 16 * 0.8 < total < 240 * 16
    for name, entry in found["datasets"].items():
        assert entry["documents"] <= drawn[name]
        full = sum(len(row) for row in rows[name])
        assert abs(entry["passes"] - entry["tokens"] / full) < 0.35
    assert found["datasets"]["b"]["skipped"] == 0 < found["datasets"]["a"]["skipped"]
    assert found["store"]["requests"] > 0


@pytest.mark.parametrize(
    ("strategy", "overflow", "expected"),
    [
        ("concat", "split", {"documents": 10, "truncated": 0.2, "dropped": 0, "padding": 3 / 48}),
        ("pad", "split", {"documents": 10, "truncated": 0.2, "dropped": 0, "padding": 11 / 56}),
        ("pad", "drop", {"documents": 10, "truncated": 0, "dropped": 0.2, "padding": 0}),
        ("best_fit", "truncate", {"documents": 10, "truncated": 0.2, "dropped": 0, "padding": 0}),
    ],
)
def test_gives_the_rates_of_packing_over_all_shards(strategy, overflow, expected):
    def graph(shard, num_shards):
        return Packer(Items(made([7, 2, 28, 1, 2])), seq_len=8, eos_id=1, strategy=strategy, overflow=overflow)

    loader = Loader(Sharder(graph, num_shards=2, rank=0, world_size=1))
    assert set(stats(loader)["packing"].values()) == {0}
    samples = list(loader)
    found = stats(loader)["packing"]
    assert found == pytest.approx(expected)
    assert found["padding"] == pytest.approx(1 - sum(len(sample.tokens) for sample in samples) / (8 * len(samples)))
