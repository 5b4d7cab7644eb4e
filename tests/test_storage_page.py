"""The options of docs/storage.md, as printed: by TLS, under the hosts that they name, to a server that checks them."""

import pathlib
import re
import ssl

import corpora
import pytest
import trustme
from fault_proxy import FaultProxy, ForwardProxy

from ibm_nodes import attempts, storage
from ibm_nodes.recipes import object_store

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "storage.md").read_text()
SERVICE_CA = "/var/run/secrets/kubernetes.io/serviceaccount/service-ca.crt"
AWS = "s3.eu-central-1.amazonaws.com"
COS = "s3.us-south.cloud-object-storage.appdomain.cloud"
NOOBAA = "s3.openshift-storage.svc"
R2 = "0123456789abcdef0123456789abcdef.r2.cloudflarestorage.com"
GCS = "storage.googleapis.com"
DOMAINS = [AWS, COS, "s3.us-east-1.amazonaws.com", "s3.amazonaws.com"]
STORES = {
    "AWS": f"corpora.{AWS}",
    "IBM Cloud Object Storage": f"corpora.{COS}",
    "MinIO, Ceph and NooBaa": NOOBAA,
    "Cloudflare R2": R2,
    "Google Cloud Storage": GCS,
}


@pytest.fixture(scope="module")
def server(s3, tmp_path_factory):
    """A server that knows buckets by host, too."""
    flags = [f"-s3.domainName={','.join(DOMAINS)}"]
    with object_store.serve(tmp_path_factory.mktemp("s3"), flags=flags) as store:
        for bucket, folder in (("corpora", "web"), ("open-code", "files")):
            object_store.make_bucket(store.storage_options, bucket)
            rows = corpora.documents([3, 40, 90, 300] * 12)
            corpora.write(f"s3://{bucket}/{folder}/", [corpora.every(rows, 12)], "parquet", store.storage_options)
        yield store


@pytest.fixture
def internet(server, monkeypatch, tmp_path):
    """All hosts are that server, behind TLS, by way of a proxy; gives the proxy."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    hosts = [*STORES.values(), *(f"*.{domain}" for domain in DOMAINS)]
    authority.issue_cert(*hosts).configure_cert(context)
    with FaultProxy(server.endpoint, context) as tls, ForwardProxy(server.endpoint, tls.endpoint) as proxy:
        monkeypatch.setattr(storage, "_filesystems", {})
        monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 3.0)
        monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.storage_options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.storage_options["secret"])
        proxy.store, proxy.authority = tls, str(tmp_path / "ca.pem")
        yield proxy


def blocks(internet):
    code = PAGE.replace("4096", "32").replace("=1024", "=4").replace(SERVICE_CA, internet.authority)
    return re.findall(r"```python\n(.*?)```", code, re.S)


@pytest.mark.parametrize("store", STORES)
def test_the_options_for_a_store_read_from_the_host_that_they_name(internet, store):
    assert f"**{store}" in PAGE
    first, block = blocks(internet)[0], blocks(internet)[1 + list(STORES).index(store)]
    names = {}
    exec(compile(first + block, "storage.md", "exec"), names)
    with names["loader"] as loader:
        assert next(iter(loader))["input_ids"].shape == (4, 32)
    host = STORES[store]
    assert set(internet.tunnels) == {f"{host}:443"}
    requests = internet.store.requests
    assert {request.headers["host"] for request in requests} == {host}
    assert all(request.path.startswith("/corpora") != host.startswith("corpora.") for request in requests)
    assert len([request for request in requests if request.is_read()]) >= 1
    assert {request.method for request in requests} == {"GET"}


def test_datasets_in_different_stores_are_read_from_both(internet):
    first, block = blocks(internet)[0], blocks(internet)[1 + len(STORES)]
    block = block.replace(
        '"anon": True', '"client_kwargs": {"region_name": "eu-central-1"}'
    )  # it has no public buckets
    names = {}
    exec(compile(first + block, "storage.md", "exec"), names)
    with names["loader"] as loader:
        next(iter(loader))
    assert set(internet.tunnels) == {f"{NOOBAA}:443", f"open-code.{AWS}:443"}


def test_the_deadlines_are_those_of_the_page():
    assert (attempts.FIRST_BYTE_SECONDS, attempts.GIVE_UP_SECONDS, attempts.MIN_BYTES_PER_SECOND) == (5, 60, 1 << 20)
    assert (attempts.FIRST_DELAY_SECONDS, attempts.MAX_DELAY_SECONDS) == (0.1, 5)
    delays = attempts.delays()
    found = [next(delays) for _ in range(12)]
    for number, delay in enumerate(found):
        full = min(5, 0.1 * 2**number)
        assert full / 2 <= delay <= full
    assert found != [next(delays) for _ in range(12)]
