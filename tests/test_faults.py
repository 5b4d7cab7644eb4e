"""A run over an object store that misbehaves yields, batch for batch, what a clean run yields, only later."""

import random
import sys
import time
from itertools import islice

import children
import corpora
import pytest
from fault_proxy import Fault, FaultProxy

from ibm_nodes.recipes import object_store

NUM_BATCHES, FEWER = 200, 60
KINDS = ["busy", "reset", "truncated", "stall", "latency", "expired"]
QUICK = {"read_timeout": 1.0}
"""An answer that stalls for five seconds is given up after one."""


@pytest.fixture(scope="module")
def corpus(s3):
    """Datasets of files that take two requests or more each."""
    url = object_store.make_bucket(s3.storage_options, "faults")
    draw, first = random.Random(0), 0
    for name, form, num_files in (("web", "parquet", 120), ("code", "arrow", 60)):
        files = []
        for _ in range(num_files):
            rows = corpora.documents([draw.randrange(1, 1500) for _ in range(30)], first=first, stride=2000)
            files.append(corpora.every(rows, 12))
            first += 30
        corpora.write(f"{url}{name}/", files, form, s3.storage_options)
    return {"web": f"{url}web/", "code": f"{url}code/"}


@pytest.fixture(scope="module")
def credentials(s3, tmp_path_factory):
    """A file of credentials, as the SDK reads it, and so something that may be renewed."""
    file = tmp_path_factory.mktemp("credentials") / "credentials"
    key, secret = s3.storage_options["key"], s3.storage_options["secret"]
    file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        yield file


def run(corpus, endpoint, num_batches, **config):
    """The digests of a run's batches, and its seconds."""
    options = {"endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}, "config_kwargs": config}
    began = time.monotonic()
    config = {"datasets": corpus, "weights": {"web": 2, "code": 1}, "storage_options": options}
    with children.build({**config, "seq_len": 2048, "global_batch_size": 16, "num_shards": 16}) as loader:
        digests = [children.digest(batch) for batch in islice(loader, num_batches)]
    return digests, time.monotonic() - began


@pytest.fixture(scope="module")
def clean(s3, corpus, credentials):
    """A clean run, through a proxy too."""
    with FaultProxy(s3.endpoint) as proxy:
        digests, seconds = run(corpus, proxy.endpoint, NUM_BATCHES)
        assert len(digests) == NUM_BATCHES
        assert len(proxy.reads) > 300
    return digests, seconds


class Faults:
    """Draws what becomes of each request: a share of them meets a fault of a kind."""

    def __init__(self, kinds):
        self.kinds, self.random = kinds, random.Random(3)
        self.expired_until, self.met, self.count = None, dict.fromkeys(kinds, 0), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        delay = 0.03 if "latency" in self.kinds else 0.0
        self.met.update({"latency": self.count} if delay else {})
        for kind in self.kinds:
            if (fault := self.draw(kind, delay)) is not None:
                self.met[kind] += 1
                return fault
        return Fault(delay=delay)

    def draw(self, kind, delay):
        if kind == "expired":
            if self.expired_until is None and self.count == 60:
                self.expired_until = time.monotonic() + 3
            expired = self.expired_until is not None and time.monotonic() < self.expired_until
            return Fault(403, "ExpiredToken", delay=delay) if expired else None
        share = {"busy": 0.05, "reset": 0.05, "truncated": 0.05, "stall": 0.01}.get(kind, 0)
        if self.random.random() >= share:
            return None
        after = self.random.choice([-1, 0, 100, 3000, 50_000])
        return {
            "busy": Fault(503, "SlowDown", delay=delay),
            "reset": Fault(after=max(0, after), delay=delay),
            "truncated": Fault(cut=1 + max(0, after), delay=delay),
            "stall": Fault(after=after, then="stall", stall_seconds=5.0, delay=delay),
        }[kind]


def check(s3, corpus, clean, kinds, num_batches, capsys, **config):
    expected, seconds = clean
    faults = Faults(kinds)
    with FaultProxy(s3.endpoint) as proxy:
        proxy.spoil(faults, lambda request: True)
        digests, spoiled = run(corpus, proxy.endpoint, num_batches, **config)
    assert digests == expected[:num_batches]
    assert all(faults.met.values()), faults.met
    with capsys.disabled():
        sys.stdout.write(
            f"\n{'+'.join(kinds)}: {num_batches} batches in {spoiled:.1f} s, clean {NUM_BATCHES} in {seconds:.1f} s; "
            f"{faults.count} requests, of which met faults: {faults.met} "
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_alone_changes_no_batch(s3, corpus, clean, kind, capsys):
    check(s3, corpus, clean, [kind], FEWER, capsys, **QUICK)


@pytest.mark.timeout(120)
def test_all_faults_together_change_no_batch(s3, corpus, clean, capsys):
    check(s3, corpus, clean, KINDS, NUM_BATCHES, capsys, **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids="+".join)
def test_faults_change_no_batch_of_a_longer_run_with_the_default_time_outs(s3, corpus, clean, kinds, capsys):
    check(s3, corpus, clean, kinds, NUM_BATCHES, capsys)
