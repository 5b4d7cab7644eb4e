import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ibm_nodes.recipes import corpus


@pytest.fixture(params=["file", "s3"])
def target(request, tmp_path):
    """The URL of an empty prefix, and its storage options."""
    if request.param == "file":
        return f"file://{tmp_path}/corpus", None
    bucket = request.getfixturevalue("bucket")
    return f"{bucket.url}corpus", bucket.storage_options


def read(url, storage_options):
    """The files below ``url`` by name, and their record batches or row groups."""
    filesystem, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
    files = {}
    for path in sorted(filesystem.find(root)):
        source = pa.BufferReader(filesystem.cat_file(path))
        if path.endswith(".parquet"):
            reader = pq.ParquetFile(source)
            batches = [reader.read_row_group(number) for number in range(reader.num_row_groups)]
        else:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        files[path.rpartition("/")[2]] = batches
    return files


def decode(files):
    rows = [row for batches in files.values() for batch in batches for row in batch.column("tokens").to_pylist()]
    return [bytes(row).decode() for row in rows]


def test_the_files_hold_the_documents(target):
    urls = corpus.build_corpus(*target)
    assert urls == {name: f"{target[0]}/{name}/" for name in ("code", "prose")}
    files = {name: read(url, target[1]) for name, url in urls.items()}
    assert list(files["code"]) == ["000.parquet", "001.parquet", "002.parquet", "003.parquet"]
    assert list(files["prose"]) == ["000.arrow", "001.arrow", "002.arrow"]
    assert decode(files["code"]) == corpus.code_documents()
    assert decode(files["prose"]) == corpus.prose_documents()
    for batches in (batches for dataset in files.values() for batches in dataset.values()):
        assert len(batches) > 1
        assert batches[0].schema.field("tokens").type == pa.list_(pa.uint16())


def test_building_twice_gives_the_same_bytes(tmp_path):
    contents = []
    for name in ("first", "second"):
        corpus.build_corpus(f"file://{tmp_path}/{name}")
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append([(path.relative_to(tmp_path / name), path.read_bytes()) for path in files])
    assert contents[0] == contents[1]
    assert len(contents[0]) == 7


def test_the_documents_are_the_text_and_of_a_useful_size():
    code, prose = corpus.code_documents(), corpus.prose_documents()
    assert "import" in "".join(code)
    assert "PYTHON SOFTWARE FOUNDATION" in "".join(prose).upper()
    assert 1_000_000 < sum(len(text.encode()) for text in code) <= 4_000_000
    assert 100_000 < sum(len(text.encode()) for text in prose)
    assert all(code)
    assert all(prose)
    assert len(code) > 256
    assert len(prose) > 256
