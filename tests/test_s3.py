import random
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat

import pytest
from fault_proxy import Fault, FaultProxy, Request

from ibm_nodes import attempts, read_ahead, s3, storage
from ibm_nodes.listing import list_objects
from ibm_nodes.recipes import object_store

SIZE = 1 << 20
DATA = random.Random(0).randbytes(SIZE)
START, END = 1000, 900_000
SLOW_DOWN = Fault(status=503, code="SlowDown")


@pytest.fixture(scope="module")
def bucket(s3):
    """One bucket for the file, and so one client."""
    return object_store.make_bucket(s3.storage_options, f"t-{uuid.uuid4().hex[:12]}"), s3.storage_options


@pytest.fixture(scope="module")
def proxy(s3):
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fail and try again in a tenth of the time."""
    monkeypatch.setattr(attempts, "FIRST_BYTE_SECONDS", 0.3)
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 10.0)
    monkeypatch.setattr(attempts, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(attempts, "MAX_DELAY_SECONDS", 0.2)


class Store:
    """One object, put directly and read through the proxy."""

    def __init__(self, bucket, proxy, **options):
        url, direct = bucket
        self.direct = direct
        self.options = {**direct, "endpoint_url": proxy.endpoint, **options}
        self.url = f"{url}data/x.bin"
        self.prefix = f"{url}data"
        self.put(DATA)
        proxy.spoil([])
        (self.item,) = self.list().objects

    def put(self, data):
        storage.write(self.url, data, self.direct)

    def list(self):
        return list_objects(self.prefix, self.options)

    def read(self, start=START, end=END):
        return bytes(storage.read(self.item, start, end, self.options))


@pytest.fixture
def store(bucket, proxy):
    return Store(bucket, proxy)


def ranges(proxy):
    return [request.range for request in proxy.reads]


def test_reads_a_range_in_one_pinned_request(store, proxy):
    proxy.spoil([])
    assert store.read() == DATA[START:END]
    (request,) = proxy.requests
    assert request.range == (START, END)
    assert request.headers["if-match"].strip('"') == store.item.version.strip('"')


@pytest.mark.parametrize("edges", [(0, 1), (0, SIZE), (SIZE - 1, SIZE), (262_143, 262_145)])
def test_reads_ranges_at_every_edge(store, edges):
    assert store.read(*edges) == DATA[slice(*edges)]


REFUSALS = [
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (500, "InternalError"),
    (502, "BadGateway"),
    (504, "GatewayTimeout"),
    (429, "TooManyRequests"),
    (408, "RequestTimeout"),
    (400, "RequestTimeout"),
    (403, "RequestTimeTooSkewed"),
]


@pytest.mark.parametrize("answer", REFUSALS, ids=str)
def test_survives_a_store_that_is_too_busy(store, proxy, answer):
    proxy.spoil([Fault(*answer)])
    assert store.read() == DATA[START:END]
    assert ranges(proxy) == [(START, END)] * 2


def test_survives_a_store_that_is_busy_three_times(store, proxy):
    proxy.spoil([SLOW_DOWN, Fault(500, "InternalError"), Fault(429, "TooManyRequests")])
    assert store.read() == DATA[START:END]
    assert ranges(proxy) == [(START, END)] * 4


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("times", [1, 3])
def test_survives_a_connection_that_ends_before_the_answer(store, proxy, then, times):
    proxy.spoil([Fault(after=-1, then=then)] * times)
    assert store.read() == DATA[START:END]
    assert times + 1 <= len(proxy.reads) <= 2 * times + 1


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("after", [0, 1, 300_000, END - START - 1])
def test_goes_on_from_the_byte_that_a_broken_answer_reached(store, proxy, then, after):
    proxy.spoil([Fault(after=after, then=then)])
    assert store.read() == DATA[START:END]
    first, second = ranges(proxy)
    assert first == (START, END)
    assert START <= second[0] <= START + after
    assert second[1] == END
    if then == "close":
        assert second[0] > START + after - (1 << 18)


def test_every_answer_may_break_as_long_as_each_brings_something(store, proxy):
    proxy.spoil([Fault(after=200_000, then="close")] * 4)
    assert store.read() == DATA[START:END]
    starts = [start for start, _ in ranges(proxy)]
    assert len(starts) <= 8
    assert starts == sorted(starts)


@pytest.mark.parametrize("cut", [1, 1000, END - START - 1, END - START])
def test_completes_an_answer_that_is_short_and_says_so(store, proxy, cut):
    proxy.spoil([Fault(cut=cut)])
    assert store.read() == DATA[START:END]
    assert ranges(proxy) == [(START, END), (END - cut, END)]


@pytest.mark.parametrize("after", [-1, 0, 500_000])
def test_gives_up_waiting_for_an_answer_that_stalls(store, proxy, after):
    proxy.spoil([Fault(after=after, then="hang")])
    began = time.monotonic()
    assert store.read() == DATA[START:END]
    assert time.monotonic() - began < 3
    assert len(proxy.reads) == 2
    assert proxy.reads[1].range[0] >= START + max(0, after - (1 << 18))


def test_gives_up_an_answer_that_drips_and_keeps_what_came(store, proxy):
    proxy.spoil([Fault(rate=300_000)])
    began = time.monotonic()
    assert store.read() == DATA[START:END]
    assert time.monotonic() - began < 4
    (_, (start, _)) = ranges(proxy)
    assert START + 50_000 < start < START + 700_000


def test_keeps_an_answer_that_is_slow_but_moves(store, proxy, monkeypatch):
    monkeypatch.setattr(attempts, "MIN_BYTES_PER_SECOND", 200_000)
    proxy.spoil([Fault(rate=800_000)])
    assert store.read() == DATA[START:END]
    assert len(proxy.reads) == 1


def test_a_token_that_was_given_and_has_expired_is_an_error_at_once(store, proxy):
    proxy.spoil(repeat(Fault(status=403, code="ExpiredToken")))
    with pytest.raises(PermissionError, match=r"x\.bin .* the credentials have expired, and are from storage_options"):
        store.read()
    assert len(proxy.reads) == 1


def test_no_permission_is_an_error_at_once(store, proxy):
    proxy.spoil([Fault(status=403, code="AccessDenied")])
    with pytest.raises(PermissionError, match=r"s3://.*x\.bin .*cannot be read: AccessDenied: check the credentials"):
        store.read()
    assert len(proxy.reads) == 1


def test_an_object_that_is_gone_is_an_error_at_once(store, proxy):
    storage.delete([store.url], store.direct)
    proxy.spoil([])
    with pytest.raises(FileNotFoundError, match=r"s3://.*x\.bin .*is gone since it was listed"):
        store.read()
    assert len(proxy.reads) == 1


@pytest.mark.parametrize("size", [SIZE, SIZE // 2, 500, 2 * SIZE])
def test_an_object_that_was_replaced_is_an_error_at_once(store, proxy, size):
    store.put(b"Z" * size)
    proxy.spoil([])
    with pytest.raises(OSError, match=r"s3://.*x\.bin has changed since it was listed"):
        store.read()
    assert len(proxy.reads) == 1


def test_an_object_that_is_replaced_between_two_attempts_is_never_mixed(store, proxy):
    proxy.spoil([Fault(after=400_000, then="close"), Fault(before=lambda: store.put(b"Z" * SIZE))])
    with pytest.raises(OSError, match=r"x\.bin has changed since it was listed"):
        store.read()
    assert len(proxy.reads) == 2


@pytest.mark.parametrize(
    "fault",
    [SLOW_DOWN, Fault(after=-1), Fault(cut=SIZE), Fault(after=-1, then="hang")],
    ids=["busy", "reset", "short", "hang"],
)
def test_gives_up_in_the_end_and_names_object_range_attempts_and_cause(store, proxy, fault, monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    proxy.spoil(repeat(fault))
    began = time.monotonic()
    with pytest.raises(OSError, match=rf"x\.bin bytes {START} to {END} could not be read in \d+ attempts: .") as raised:
        store.read()
    assert 0.4 < time.monotonic() - began < 4
    assert len(proxy.reads) <= 20
    assert raised.value.__cause__ is not None
    proxy.spoil([])
    assert store.read() == DATA[START:END]


def test_attempts_grow_rarer(store, proxy, monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    monkeypatch.setattr(attempts, "MAX_DELAY_SECONDS", 5.0)
    proxy.spoil(repeat(SLOW_DOWN))
    with pytest.raises(OSError, match="could not be read in"):
        store.read()
    assert 4 <= len(proxy.reads) <= 8


def test_waits_for_a_server_that_is_away(bucket, proxy, monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    with FaultProxy(proxy.server) as away:
        store = Store(bucket, away)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"x\.bin bytes .* could not be read in \d+ attempts"):
        store.read()
    assert 0.4 < time.monotonic() - began < 4


def test_spoiled_answers_use_up_no_connections(bucket, proxy):
    store = Store(bucket, proxy, config_kwargs={"max_pool_connections": 2})
    spoiled = [
        Fault(after=10, then="hang"),
        Fault(cut=5),
        Fault(after=10, then="close"),
        Fault(after=-1),
        Fault(after=-1, then="hang"),
        Fault(after=0, then="reset"),
        SLOW_DOWN,
    ]
    proxy.spoil(chain.from_iterable([fault, None] for fault in spoiled))
    for _ in spoiled:
        assert store.read() == DATA[START:END]
    with pytest.raises(FileNotFoundError):
        storage.read(store.item._replace(url=store.url + "2"), 0, 9, store.options)
    assert store.read() == DATA[START:END]


def test_many_reads_at_once_survive_all_faults_together(store, proxy):
    draw = random.Random(1)
    kinds = [SLOW_DOWN, Fault(after=-1), Fault(after=50_000), Fault(after=70_000, then="close"), Fault(cut=9)]
    kinds += [Fault(after=9, then="hang"), *[None] * 10]
    proxy.spoil(draw.choice(kinds) for _ in repeat(0))
    edges = [sorted(draw.sample(range(SIZE), 2)) for _ in range(60)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda each: store.read(*each), edges)) == [DATA[start:end] for start, end in edges]
    assert len(proxy.reads) < 200


def test_a_wait_ends_when_it_is_told_to_and_drops_the_connection(store, proxy):
    proxy.spoil(repeat(Fault(after=10, then="hang")))
    stopped, caught = threading.Event(), []

    def wait():
        read_ahead.stop_waiting_when(stopped.is_set)
        with pytest.raises(read_ahead.Interrupted) as raised:
            store.read()
        caught.append(raised.value)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    open_before = proxy.connections
    began = time.monotonic()
    stopped.set()
    thread.join(5)
    assert time.monotonic() - began < 0.5
    assert caught
    while proxy.connections == open_before:
        assert time.monotonic() - began < 2
        time.sleep(0.02)


def test_a_requester_who_pays_says_so_in_every_read(bucket, proxy):
    store = Store(bucket, proxy, requester_pays=True)
    assert store.read() == DATA[START:END]
    assert proxy.reads[-1].headers["x-amz-request-payer"] == "requester"


def test_the_users_time_outs_win_over_ours():
    given = {"key": "k", "config_kwargs": {"read_timeout": 9, "retries": {"mode": "legacy"}}}
    options = s3.client_options(given)
    assert options["config_kwargs"]["read_timeout"] == 9
    assert options["config_kwargs"]["retries"] == {"mode": "legacy"}
    assert options["config_kwargs"]["max_pool_connections"] == s3.MAX_CONNECTIONS
    assert given == {"key": "k", "config_kwargs": {"read_timeout": 9, "retries": {"mode": "legacy"}}}


@pytest.mark.parametrize(
    "faults",
    [
        [SLOW_DOWN],
        [SLOW_DOWN] * 3,
        [Fault(500, "InternalError")] * 2,
        [Fault(429, "TooManyRequests")],
        [Fault(after=-1)],
        [Fault(after=-1, then="close")],
        [Fault(after=50, then="close")],
        [Fault(after=50, then="reset")],
    ],
    ids=["busy", "busy-3", "500-2", "429", "reset", "close", "close-in-body", "reset-in-body"],
)
def test_a_listing_survives_what_a_read_survives(store, proxy, faults):
    proxy.spoil(faults, Request.is_listing)
    (item,) = store.list().objects
    assert item == store.item
    assert len(proxy.requests) <= 2 * len(faults) + 4


def test_a_listing_that_never_comes_is_an_error_that_names_the_prefix(store, proxy, monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    proxy.spoil(repeat(SLOW_DOWN), lambda request: True)
    began = time.monotonic()
    with pytest.raises(OSError, match=store.prefix):
        store.list()
    assert time.monotonic() - began < 10
    assert len(proxy.requests) <= 25


HUNG = Fault(after=-1, then="hang")


@pytest.mark.parametrize(
    "faults", [[HUNG], [HUNG] * 2, [SLOW_DOWN] * 3, [Fault(after=-1)], [Fault(after=-1, then="close")]], ids=str
)
def test_a_write_survives_what_a_read_survives(store, proxy, monkeypatch, faults):
    monkeypatch.setattr(s3, "WRITE_SECONDS", 0.3)
    proxy.spoil(faults, Request.is_write)
    storage.write(store.url, b"new", store.options)
    (store.item,) = store.list().objects
    assert store.read(0, 3) == b"new"


def test_a_write_that_is_never_answered_is_an_error_that_names_the_object(store, proxy, monkeypatch):
    monkeypatch.setattr(s3, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    proxy.spoil(repeat(HUNG), Request.is_write)
    with pytest.raises(OSError, match=r"x\.bin could not be written in \d+ attempts"):
        storage.write(store.url, b"new", store.options)


def test_errors_show_no_credentials(store, proxy):
    secrets = [store.options["key"], store.options["secret"]]
    for fault, where in [
        (Fault(403, "AccessDenied"), Request.is_read),
        (Fault(404, "NoSuchKey"), Request.is_read),
        (Fault(status=412, code="PreconditionFailed"), Request.is_read),
        (Fault(403, "AccessDenied"), Request.is_listing),
    ]:
        proxy.spoil(repeat(fault), where)
        with pytest.raises(OSError) as raised:
            store.list()
            store.read()
        text = "".join(traceback.format_exception(raised.value)) + repr(raised.value)
        assert not any(secret in text for secret in secrets)
