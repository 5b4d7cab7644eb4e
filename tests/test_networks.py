"""What lies between a cluster and its store: an authority of one's own, proxies, names, addresses, who pays."""

import contextlib
import os
import socket
import ssl
import threading
import time
import traceback
import uuid
from itertools import repeat

import pytest
import stubs
import trustme
from fault_proxy import Fault, FaultProxy, ForwardProxy, Request

from ibm_nodes import attempts, storage
from ibm_nodes.recipes import object_store

DATA = bytes(range(256)) * 40
PASSWORD = "not-a-password-of-anyone"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 30.0)
    monkeypatch.setattr(storage, "_filesystems", {})  # clients keep the proxies that they were made with
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """An authority that nobody knows, and its certificate as a file."""
    made = trustme.CA()
    made.file = str(tmp_path_factory.mktemp("authority") / "ca.pem")
    made.cert_pem.write_to_path(made.file)
    return made


def context(authority, *names):
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(made)
    return made


@pytest.fixture(scope="module")
def tls(s3, authority):
    """The server behind TLS."""
    with FaultProxy(s3.endpoint, context(authority, "127.0.0.1", "store.test")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bucket(s3):
    url = object_store.make_bucket(s3.storage_options, f"t-{uuid.uuid4().hex[:12]}")
    storage.write(f"{url}d/x.bin", DATA, s3.storage_options)
    return url


def use(url, options):
    """All that is ever asked of a store."""
    storage.write(f"{url}w/new", b"new", options)
    assert storage.read_whole(f"{url}w/new", options) == b"new"
    storage.delete([f"{url}w/new"], options)
    (item,) = storage.find(f"{url}d", options)
    assert bytes(storage.read(item, 10, 9000, options)) == DATA[10:9000]
    assert storage.find(f"{url}d/x.bin", options) == [item._replace(url=f"{url}d/x.bin", key="x.bin")]
    assert storage.find(f"{url}nothing", options) == []


def with_options(s3, **changes):
    return {**s3.storage_options, **changes}


REGION = {"region_name": "us-east-1"}


def test_the_authority_of_a_store_may_be_told_by_an_option(s3, bucket, tls, authority):
    use(bucket, with_options(s3, endpoint_url=tls.endpoint, client_kwargs={**REGION, "verify": authority.file}))


def test_the_authority_of_a_store_may_be_told_by_the_environment(s3, bucket, tls, authority, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.file)
    use(bucket, with_options(s3, endpoint_url=tls.endpoint))


SET = r"set AWS_CA_BUNDLE or storage_options' client_kwargs=\{'verify': '/path/to/ca.pem'\}"


def test_an_unknown_authority_is_an_error_at_once_that_says_what_to_set(s3, bucket, tls):
    options = with_options(s3, endpoint_url=tls.endpoint)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"d/x.bin cannot be read: .*certificate verify failed.*{SET}"):
        storage.read_whole(f"{bucket}d/x.bin", options)
    with pytest.raises(ConnectionError, match=rf"d cannot be listed: .*{SET}"):
        storage.find(f"{bucket}d", options)
    assert time.monotonic() - began < 10


def test_a_file_of_an_authority_that_is_missing_is_an_error_at_once_that_says_what_to_set(s3, bucket, tls, tmp_path):
    client = {**REGION, "verify": f"{tmp_path}/missing.pem"}
    with pytest.raises(ConnectionError, match=rf"x.bin cannot be read: .*No such file.*{SET}"):
        storage.read_whole(f"{bucket}d/x.bin", with_options(s3, endpoint_url=tls.endpoint, client_kwargs=client))


def test_a_certificate_of_another_host_is_an_error_at_once(s3, bucket, authority):
    client = {**REGION, "verify": authority.file}
    with FaultProxy(s3.endpoint, context(authority, "other.test")) as proxy:
        options = with_options(s3, endpoint_url=proxy.endpoint, client_kwargs=client)
        with pytest.raises(ConnectionError, match=r"x.bin cannot be read: .*IP address mismatch"):
            storage.read_whole(f"{bucket}d/x.bin", options)


@pytest.fixture
def forward(s3, tls):
    with ForwardProxy(s3.endpoint, tls.endpoint) as proxy:
        yield proxy


def test_a_proxy_of_the_environment_is_used(s3, bucket, forward, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", forward.endpoint)
    path_style = {"s3": {"addressing_style": "path"}}
    use(bucket, with_options(s3, endpoint_url="http://store.test:9000", config_kwargs=path_style))
    assert {request.path.partition("?")[0].split("/t-")[0] for request in forward.requests} == {
        "http://store.test:9000"
    }


def test_hosts_of_no_proxy_are_reached_without_it(s3, bucket, forward, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", forward.endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    use(bucket, s3.storage_options)
    assert forward.requests == []


def test_a_proxy_of_the_environment_tunnels_tls(s3, bucket, forward, authority, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", forward.endpoint)
    options = {"client_kwargs": {**REGION, "verify": authority.file}, "config_kwargs": {"s3": PATH}}
    use(bucket, with_options(s3, endpoint_url="https://store.test", **options))
    assert set(forward.tunnels) == {"store.test:443"}


PATH = {"addressing_style": "path"}


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_away_is_a_named_error_that_does_not_show_its_password(s3, bucket, monkeypatch, scheme):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://user:{PASSWORD}@127.0.0.1:9")
    options = with_options(s3, endpoint_url=f"{scheme}://store.test", config_kwargs={"s3": PATH})
    with pytest.raises(ConnectionError, match=r"x.bin could not be read in \d+ attempts: .*proxy") as raised:
        storage.read_whole(f"{bucket}d/x.bin", options)
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))


def test_who_does_not_pay_is_refused_and_who_pays_says_so_in_every_request(s3, bucket):
    with FaultProxy(s3.endpoint) as proxy:
        proxy.spoil(
            repeat(Fault(403, "AccessDenied")),
            lambda request: request.headers.get("x-amz-request-payer") != "requester",
        )
        options = with_options(s3, endpoint_url=proxy.endpoint)
        with pytest.raises(PermissionError, match="d cannot be listed: AccessDenied"):
            storage.find(f"{bucket}d", options)
        with pytest.raises(PermissionError, match="x.bin cannot be read: AccessDenied"):
            storage.read_whole(f"{bucket}d/x.bin", options)
        proxy.requests.clear()
        options["requester_pays"] = True
        use(bucket, options)
        assert {request.headers.get("x-amz-request-payer") for request in proxy.requests} == {"requester"}
        assert {request.method for request in proxy.requests} == {"GET", "PUT", "DELETE"}


def test_uploads_and_reads_ask_for_no_checksums_that_only_some_stores_know(s3, bucket, tls, authority):
    """AWS' clients sign uploads in chunks with a checksum at the end, unless they are told not to."""
    tls.spoil([])
    use(bucket, with_options(s3, endpoint_url=tls.endpoint, client_kwargs={**REGION, "verify": authority.file}))
    assert not [
        name
        for request in tls.requests
        for name in request.headers
        if name.startswith(("x-amz-checksum", "x-amz-trailer", "x-amz-sdk-checksum", "transfer-encoding"))
    ]
    (write,) = [request for request in tls.requests if request.is_write()]
    assert write.headers["content-length"] == "3"


def test_the_user_may_ask_for_checksums(s3, bucket, tls, authority):
    tls.spoil([])
    options = with_options(s3, endpoint_url=tls.endpoint, client_kwargs={**REGION, "verify": authority.file})
    use(bucket, {**options, "config_kwargs": {"request_checksum_calculation": "when_supported"}})
    (write,) = [request for request in tls.requests if request.is_write()]
    assert write.headers["x-amz-trailer"] == "x-amz-checksum-crc32"


def test_what_the_options_add_to_requests_is_added_to_those_that_know_it(s3, bucket):
    with FaultProxy(s3.endpoint) as proxy:
        added = {"StorageClass": "STANDARD", "ExpectedBucketOwner": "111122223333"}
        use(bucket, with_options(s3, endpoint_url=proxy.endpoint, s3_additional_kwargs=added))
        owners = [request.headers.get("x-amz-expected-bucket-owner") for request in proxy.requests]
        classes = {request.headers.get("x-amz-storage-class") for request in proxy.requests if request.is_write()}
        assert set(owners) == {"111122223333"}
        assert classes == {"STANDARD"}
        assert not [request for request in proxy.reads if "x-amz-storage-class" in request.headers]


STYLES = [
    (None, "http://store.test/{bucket}", "http://{bucket}."),
    ("path", "http://store.test/{bucket}", "http://{bucket}."),
    ("virtual", "http://{bucket}.store.test/", "http://store.test/{bucket}"),
]


@pytest.mark.parametrize("style, expected, other", STYLES, ids=["default", "path", "virtual"])
def test_buckets_are_addressed_by_host_or_by_path(s3, bucket, forward, monkeypatch, style, expected, other):
    monkeypatch.setenv("HTTP_PROXY", forward.endpoint)
    forward.spoil(repeat(Fault(403, "AccessDenied")), lambda request: True)
    config = {} if style is None else {"s3": {"addressing_style": style}}
    with pytest.raises(PermissionError):
        storage.find(f"{bucket}d", with_options(s3, endpoint_url="http://store.test", config_kwargs=config))
    (request,) = forward.requests
    name = bucket.removeprefix("s3://").strip("/")
    assert request.path.startswith(expected.format(bucket=name))
    assert not request.path.startswith(other.format(bucket=name))


def test_a_bucket_with_dots_in_its_name_is_reached_by_path(s3, forward, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", forward.endpoint)
    options = with_options(s3, endpoint_url="http://store.test", config_kwargs={"s3": PATH})
    object_store.make_bucket(s3.storage_options, "dotted.bucket.name")
    storage.write("s3://dotted.bucket.name/x", b"x", options)
    assert storage.read_whole("s3://dotted.bucket.name/x", options) == b"x"


def test_a_name_that_does_not_resolve_is_a_named_error_after_several_attempts(s3, bucket, monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 3.0)
    options = with_options(s3, endpoint_url="http://store-that-is-nowhere.invalid", config_kwargs={"s3": PATH})
    with pytest.raises(ConnectionError, match=r"x.bin could not be read in \d+ attempts: .*nowhere.invalid") as raised:
        storage.read_whole(f"{bucket}d/x.bin", options)
    assert "in 1 attempts" not in str(raised.value)


def test_a_name_that_resolves_later_is_waited_for(s3, bucket, monkeypatch):
    resolve, asked = socket.getaddrinfo, []

    def resolver(host, *more, **options):
        if host != "store.test":
            return resolve(host, *more, **options)
        asked.append(host)
        if len(asked) <= 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return resolve("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    port = s3.endpoint.rpartition(":")[2]
    options = with_options(s3, endpoint_url=f"http://store.test:{port}", config_kwargs={"s3": PATH})
    assert storage.read_whole(f"{bucket}d/x.bin", options) == DATA
    assert len(asked) == 4


def test_a_store_that_accepts_and_is_silent_is_given_up_by_the_time_outs_of_the_user(s3, bucket):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        options = with_options(s3, endpoint_url=f"http://127.0.0.1:{port}", give_up_seconds=4)
        options["config_kwargs"] = {"read_timeout": 0.8}
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=r"x.bin could not be read in [2-9] attempts: "):
            storage.read_whole(f"{bucket}d/x.bin", options)
        assert 3 < time.monotonic() - began < 15


@pytest.mark.parametrize("seconds", [0, -1, "60", None])
def test_the_deadline_of_the_user_is_a_number_above_zero(s3, bucket, seconds):
    options = with_options(s3, give_up_seconds=seconds)
    if seconds is None:
        assert storage.read_whole(f"{bucket}d/x.bin", options) == DATA
        return
    with pytest.raises(ValueError, match="give_up_seconds in storage_options must be a number of seconds above 0"):
        storage.read_whole(f"{bucket}d/x.bin", options)


def test_a_byte_a_second_is_given_up_too(s3, bucket):
    """Each byte comes within the time-out of a read."""

    def drip(listening):
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            with contextlib.suppress(OSError):  # the client has gone
                for _ in range(30):
                    connection.sendall(b"x")
                    time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        options = with_options(s3, endpoint_url=f"http://127.0.0.1:{port}", give_up_seconds=0.1)
        options["config_kwargs"] = {"read_timeout": 0.6}
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=r"x.bin could not be read in 1 attempts: no answer in time"):
            storage.read_whole(f"{bucket}d/x.bin", options)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("endpoint", ["store.test:9000", "http://", "ftp//x"])
def test_an_endpoint_that_is_none_is_an_error_at_once(s3, bucket, endpoint):
    with pytest.raises(ValueError, match=r"x.bin cannot be read: .*: check storage_options"):
        storage.read_whole(f"{bucket}d/x.bin", with_options(s3, endpoint_url=endpoint))


WRONG = [(400, "InvalidRequest"), (400, "AuthorizationHeaderMalformed"), (405, "MethodNotAllowed"), (409, "Conflict")]


@pytest.mark.parametrize("status, code", WRONG)
def test_a_request_that_is_wrong_is_an_error_at_once_with_what_the_store_says(s3, bucket, status, code):
    with FaultProxy(s3.endpoint) as proxy:
        proxy.spoil(repeat(Fault(status, code)), Request.is_listing)
        with pytest.raises(OSError, match=rf"d cannot be listed: {status} {code}: spoiled: check the URL"):
            storage.find(f"{bucket}d", with_options(s3, endpoint_url=proxy.endpoint))
        assert len(proxy.requests) == 1


def test_a_listing_goes_on_from_the_page_that_failed(s3, bucket):
    options = s3.storage_options
    for number in range(5):
        storage.write(f"{bucket}pages/{number}", b"x", options)
    with FaultProxy(s3.endpoint) as proxy:
        small = with_options(s3, endpoint_url=proxy.endpoint, s3_additional_kwargs={"MaxKeys": 2})
        bad = [None, Fault(500, "InternalError"), Fault(after=60), Fault(cut=40), None, Fault(503, "SlowDown")]
        proxy.spoil(bad, Request.is_listing)
        assert [item.key for item in storage.find(f"{bucket}pages", small)] == list("01234")
        assert len(proxy.requests) == 3 + 4
        assert sum("continuation-token" not in request.path for request in proxy.requests) == 1


def test_keys_with_empty_parts_are_what_the_store_calls_them():
    """SeaweedFS makes one slash of several, which S3 does not."""
    keys = ["d//z", "d/a///b", "d/x//y"]
    entries = "".join(f"<Contents><Key>{key}</Key><Size>9</Size><ETag>tag</ETag></Contents>" for key in keys)

    def answer(asked):
        if "list-type" in asked.path:
            return 200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return 206, asked.path[-9:], {"ETag": "tag", "Content-Range": "bytes 0-8/9"}

    with stubs.Stub(answer) as stub:
        options = {"endpoint_url": stub.endpoint, "key": "k", "secret": "s"}
        found = storage.find("s3://bucket/d/", options)
        assert [(item.key, item.url) for item in found] == [(key[2:], f"s3://bucket/{key}") for key in keys]
        assert [bytes(storage.read(item, 0, 9, options)) for item in found] == [
            f"/bucket/{key}"[-9:].encode() for key in keys
        ]


def test_options_by_environment_reach_every_request(s3, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    use(bucket, None)
    assert "AWS_ENDPOINT_URL_S3" in os.environ


class TestOtherStores:
    """What the clients of other stores meet, over HTTP as fsspec reads it."""

    def test_a_busy_store_is_asked_again(self):
        answers = [(503, ""), (500, ""), (429, "")]
        with stubs.Stub(lambda asked: answers.pop(0) if answers else (200, DATA)) as stub:
            assert storage.read_whole(f"{stub.endpoint}/x", None) == DATA
            assert len(stub.requests) == 4

    def test_a_store_that_stays_busy_is_a_named_error(self):
        with stubs.Stub(lambda asked: (503, "")) as stub:
            with pytest.raises(ConnectionError, match="/x could not be reached in 4 attempts: 503"):
                storage.read_whole(f"{stub.endpoint}/x", None)

    def test_a_range_that_comes_short_is_a_named_error(self):
        with stubs.Stub(lambda asked: (206, DATA[:5])) as stub:
            item = storage.Object(f"{stub.endpoint}/x", "x", len(DATA), None)
            with pytest.raises(OSError, match="/x bytes 0 to 9: only 5 bytes came"):
                storage.read(item, 0, 9)

    def test_a_store_that_is_silent_is_given_up(self, monkeypatch):
        monkeypatch.setattr(storage, "CALL_SECONDS", 0.2)
        monkeypatch.setattr(storage, "NUM_TRIES", 2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            began = time.monotonic()
            with pytest.raises(OSError, match="/x could not be reached in 2 attempts: no answer"):
                storage.read_whole(f"http://127.0.0.1:{silent.getsockname()[1]}/x", None)
            assert time.monotonic() - began < 5

    def test_what_is_not_there_is_an_error_at_once(self):
        with stubs.Stub(lambda asked: (404, "")) as stub:
            with pytest.raises(FileNotFoundError, match="/x is not there"):
                storage.read_whole(f"{stub.endpoint}/x", None)
            assert len(stub.requests) == 1
