"""Credentials come from where the user said, are renewed from there, and are never replaced by others in silence."""

import logging
import os
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import stubs

from ibm_nodes import attempts, storage

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(attempts, "MAX_DELAY_SECONDS", 0.1)


@pytest.fixture
def metadata():
    """What the node says of its role."""
    with stubs.Stub(lambda asked: metadata_stub.answer(asked)) as metadata_stub:
        metadata_stub.answer = stubs.node_role
        yield metadata_stub


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path, metadata):
    """A pod without any credentials, on a node that has a role."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint)


class Store:
    """One object behind a stub of S3 that knows some session tokens."""

    def __init__(self, stub, knows):
        self.stub, self.knows = stub, knows
        self.options = {"endpoint_url": stub.endpoint}

    def read(self, start=100, end=5000):
        item = storage.Object("s3://bucket/d/x.bin", "x.bin", len(DATA), stubs.ETAG)
        return bytes(storage.read(item, start, end, self.options))

    @property
    def seen(self):
        """The session tokens that came, in order, without repetition; None for a request without a signature."""
        tokens = [
            asked.headers.get("x-amz-security-token", "") if "authorization" in asked.headers else None
            for asked in self.stub.requests
        ]
        return list(dict.fromkeys(tokens))


@pytest.fixture
def store():
    knows = stubs.TokenStore(DATA)
    with stubs.Stub(knows) as stub:
        yield Store(stub, knows)


class Identity:
    """A web identity: a token file, and the service that gives credentials for it."""

    def __init__(self, file, service, stub):
        self.file, self.service, self.stub = file, service, stub

    def rotate(self, token):
        new = self.file.with_suffix(".new")
        new.write_text(token)
        new.rename(self.file)


@pytest.fixture
def identity(monkeypatch, tmp_path):
    service = stubs.TokenService()
    with stubs.Stub(service) as stub:
        identity = Identity(tmp_path / "token", service, stub)
        identity.rotate("first")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(identity.file))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/reader")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", stub.endpoint)
        yield identity


def test_a_web_identity_reads_and_lists(store, identity):
    store.knows.tokens = {"session-of-first"}
    assert store.read() == DATA[100:5000]
    (item,) = storage.find("s3://bucket/d", store.options)
    assert (item.url, item.size) == ("s3://bucket/d/x.bin", len(DATA))
    assert store.seen == ["session-of-first"]
    assert len(identity.stub.requests) == 1


def test_a_token_file_that_was_rotated_is_read_again_when_the_store_says_that_the_old_one_has_expired(store, identity):
    store.knows.tokens = {"session-of-first"}
    assert store.read() == DATA[100:5000]
    identity.rotate("second")
    store.knows.tokens = {"session-of-second"}
    assert store.read() == DATA[100:5000]
    assert store.seen == ["session-of-first", "session-of-second"]


def test_a_token_file_that_was_rotated_is_read_again_when_the_credentials_are_about_to_expire(store, identity):
    identity.service.seconds = 30
    store.knows.tokens = {"session-of-first"}
    assert store.read() == DATA[100:5000]
    identity.rotate("second")
    store.knows.tokens = {"session-of-second"}
    asked = len(store.stub.requests)
    assert store.read() == DATA[100:5000]
    assert len(store.stub.requests) == asked + 1


def test_a_rotation_that_comes_late_is_waited_for(store, identity):
    store.knows.tokens = {"session-of-second"}
    later = threading.Timer(1.0, identity.rotate, ["second"])
    later.start()
    began = time.monotonic()
    assert store.read() == DATA[100:5000]
    assert 0.9 < time.monotonic() - began < 15
    later.join()


def test_many_reads_whose_credentials_expire_at_once_ask_for_new_ones_once(store, identity):
    store.knows.tokens = {"session-of-first"}
    store.read()
    identity.rotate("second")
    store.knows.tokens = {"session-of-second"}
    asked = len(identity.stub.requests)
    with ThreadPoolExecutor(16) as pool:
        reads = list(pool.map(lambda number: store.read(number, 5000), range(48)))
    assert reads == [DATA[number:5000] for number in range(48)]
    assert len(identity.stub.requests) - asked <= 2  # to see whether there are new ones, and by the new client


def test_credentials_that_nobody_renews_are_a_named_error_in_the_end(store, identity, monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    with pytest.raises(
        PermissionError, match=r"x.bin bytes 100 to 5000 could not be read in \d+ attempts: .*ExpiredToken.*credentials"
    ):
        store.read()
    assert store.seen == ["session-of-first"]


@pytest.mark.parametrize(
    "status, code", [(500, "InternalFailure"), (503, "Unavailable"), (400, "IDPCommunicationError")]
)
def test_a_service_that_fails_for_a_while_is_asked_again(store, identity, status, code):
    store.knows.tokens = {"session-of-first"}
    identity.service.faults = [(status, f"<ErrorResponse>{stubs.error(code)}</ErrorResponse>")] * 2
    assert store.read() == DATA[100:5000]
    assert len(identity.stub.requests) == 3


def test_an_answer_of_the_service_that_was_cut_off_is_asked_for_again(store, identity):
    store.knows.tokens = {"session-of-first"}
    identity.service.faults = [(200, "<AssumeRoleWithWebIdentityResponse><AssumeRole")]
    assert store.read() == DATA[100:5000]
    assert len(identity.stub.requests) == 2


def test_a_token_of_the_file_that_has_expired_is_waited_for(store, identity):
    store.knows.tokens = {"session-of-first"}
    refusal = f"<ErrorResponse>{stubs.error('ExpiredTokenException')}</ErrorResponse>"
    identity.service.faults = [(400, refusal)] * 3
    assert store.read() == DATA[100:5000]


def check_no_other_source(store, metadata):
    """Neither without a signature nor by the node's role."""
    assert None not in store.seen
    assert "session-of-node" not in store.seen
    assert metadata.requests == []


def test_a_role_that_is_refused_is_an_error_at_once_and_nothing_else_is_tried(store, identity, metadata):
    identity.service.faults = [(403, f"<ErrorResponse>{stubs.error('AccessDenied')}</ErrorResponse>")] * 9
    store.knows.tokens = {"session-of-node"}
    with pytest.raises(PermissionError, match=r"x.bin .* AssumeRoleWithWebIdentity was refused \(AccessDenied\)"):
        store.read()
    assert len(identity.stub.requests) == 1
    check_no_other_source(store, metadata)


def test_a_token_file_that_is_missing_is_a_named_error_and_nothing_else_is_tried(
    store, identity, metadata, monkeypatch
):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.5)
    identity.file.unlink()
    store.knows.tokens = {"session-of-node"}
    with pytest.raises(PermissionError, match=f"x.bin .* attempts: FileNotFoundError: .*{identity.file}"):
        store.read()
    check_no_other_source(store, metadata)


def test_a_token_file_without_a_role_is_an_error_at_once_and_nothing_else_is_tried(
    store, identity, metadata, monkeypatch
):
    monkeypatch.delenv("AWS_ROLE_ARN")
    with pytest.raises(PermissionError, match=r"x.bin .*AWS_ROLE_ARN"):
        store.read()
    check_no_other_source(store, metadata)


def test_the_role_of_the_node_is_used_where_there_is_no_other_source_and_only_there(store, metadata):
    store.knows.tokens = {"session-of-node"}
    assert store.read() == DATA[100:5000]
    assert store.seen == ["session-of-node"]


def test_no_credentials_at_all_are_an_error_and_no_request_goes_out_unsigned(store, metadata):
    metadata.answer = stubs.no_role
    with pytest.raises(PermissionError, match=r"x.bin .*NoCredentialsError.*storage_options.*anon=True"):
        store.read()
    with pytest.raises(PermissionError, match=r"d cannot be listed: NoCredentialsError"):
        storage.find("s3://bucket/d", store.options)
    assert store.stub.requests == []


def test_anonymous_is_only_who_says_so_and_needs_no_credentials(store, metadata):
    store.options["anon"] = True
    with pytest.raises(PermissionError, match="AccessDenied"):
        store.read()
    assert store.seen == [None]
    assert metadata.requests == []


def write_profile(path, key, token):
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = {token}\n")


def test_a_file_of_credentials_that_was_written_anew_is_read_again(store, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_profile(tmp_path / "credentials", "A", "old")
    store.knows.tokens = {"old"}
    store.read()
    write_profile(tmp_path / "credentials", "B", "new")
    store.knows.tokens = {"new"}
    assert store.read() == DATA[100:5000]
    assert store.seen == ["old", "new"]


def test_credentials_that_are_gone_are_not_replaced_by_the_role_of_the_node(store, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_profile(tmp_path / "credentials", "A", "old")
    store.knows.tokens = {"old"}
    store.read()
    (tmp_path / "credentials").unlink()
    store.knows.tokens = {"session-of-node"}
    for _ in range(2):
        with pytest.raises(PermissionError, match=r"from the source shared-credentials-file, which is not .*iam-role"):
            store.read()
    assert store.seen == ["old"]


def test_a_token_of_the_environment_that_has_expired_is_an_error_at_once(store, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    with pytest.raises(PermissionError, match="have expired, and are from the environment: give new ones"):
        store.read()
    assert len(store.stub.requests) == 1


def test_a_token_of_the_options_that_has_expired_is_an_error_at_once(store, metadata):
    store.options |= {"key": "A", "secret": "hush-hush", "token": "old"}
    with pytest.raises(PermissionError, match="have expired, and are from storage_options: give new ones"):
        store.read()
    assert len(store.stub.requests) == 1
    assert metadata.requests == []


@pytest.mark.parametrize("setting", ["AWS_PROFILE", "AWS_ACCESS_KEY_ID"])
def test_half_of_what_is_needed_is_an_error_at_once_and_nothing_else_is_tried(store, metadata, monkeypatch, setting):
    monkeypatch.setenv(setting, "missing")
    with pytest.raises(PermissionError, match=r"x.bin .*(ProfileNotFound|PartialCredentialsError)"):
        store.read()
    check_no_other_source(store, metadata)


def test_neither_logs_nor_errors_show_credentials(store, identity, monkeypatch, caplog):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 3.0)
    with caplog.at_level(logging.DEBUG, "ibm_nodes"), pytest.raises(PermissionError) as raised:
        store.read()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("ibm_nodes")]
    assert any("attempt 1 failed" in text for text in ours)
    texts = [*ours, *traceback.format_exception(raised.value), repr(raised.value)]
    assert not [text for text in texts if "hush" in text or "session-of" in text or "AKIDOF" in text]
