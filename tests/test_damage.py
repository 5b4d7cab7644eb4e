"""Files that are empty, odd, damaged or of something else: right documents or an error that names the file."""

import gzip
import io
import json
import random
import struct
import subprocess
import sys

import corpora
import layouts
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from layouts import LAYOUTS

from ibm_nodes import Reader, storage
from ibm_nodes.formats import jsonl, sequential

ERRORS = (ValueError, LookupError, TypeError, OSError, pa.ArrowException)
every_layout = pytest.mark.parametrize("name", LAYOUTS)
ROWS = corpora.documents([3, 0, 40, 1, 7, 200, 5] * 3)


def read(url, **more):
    documents = Reader(url, shard=0, num_shards=1, epochs=1, **more)
    return {(document.url, document.row): document.tokens.tolist() for document in documents}


def described(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def check_error(url, *words, kind=ERRORS, **more):
    """Reading ends in an error that names the file, now and when it is asked again."""
    reader = Reader(url, shard=0, num_shards=1, epochs=1, **more)
    for _ in range(2):
        with pytest.raises(kind) as raised:
            list(reader)
        for word in (url, *words):
            assert word in described(raised.value)


def files_of(layout, batches):
    data = layout.write(batches)
    return data if isinstance(data, dict) else {layout.ending: data}


def put(url, files):
    for ending, data in files.items():
        storage.write(f"{url}0{ending}", data)


@every_layout
def test_a_file_that_was_cut_off_is_an_error_that_names_it(tmp_path, name):
    url = f"file://{tmp_path}/"
    files = files_of(LAYOUTS[name], [ROWS])
    for ending, data in files.items():
        for length in {1, 3, 40, len(data) // 3, len(data) // 2, len(data) - 30, len(data) - 1}:
            if LAYOUTS[name].format == "webdataset" and ending == ".tar" and length > len(data) - 5000:
                continue  # all but the padding is there
            if ending == ".jsonl" and length == len(data) - 1:
                continue  # all but the last line's end is there
            put(url, files | {ending: data[:length]})
            check_error(url)


@every_layout
def test_files_without_a_row_are_passed_over_wherever_they_are(tmp_path, name):
    layout = LAYOUTS[name]
    for number, files in enumerate(([[], [ROWS], [[]]], [[ROWS], [], [ROWS[:1]]], [[[], []], [[]], [ROWS]])):
        url = f"file://{tmp_path}/{number}/"
        rows = layouts.write(url, files, layout)
        if layout.ending == ".jsonl":
            storage.write(f"{url}blank.jsonl", b"\n\r\n  \n")
        assert read(url) == {place: tokens for place, tokens in rows.items() if tokens}
    url = f"file://{tmp_path}/none/"
    layouts.write(url, [[], [[[], []]]], layout)
    storage.write(f"{url}9.jsonl", b"\n")  # an empty object is no data at all
    with pytest.raises(ValueError, match="'none' at .* has no token"):
        next(Reader(url, shard=0, num_shards=3))


@every_layout
def test_a_column_that_is_not_there_is_an_error_that_names_the_file(tmp_path, name):
    if LAYOUTS[name].format == "megatron":
        pytest.skip("has no columns")
    url = f"file://{tmp_path}/"
    put(url, files_of(LAYOUTS[name], [ROWS]))
    check_error(url, "'nothing'", kind=LookupError, column="nothing")


@every_layout
def test_an_id_beyond_the_vocabulary_is_an_error_that_names_the_file(tmp_path, name):
    url = f"file://{tmp_path}/"
    put(url, files_of(LAYOUTS[name], [[[1, 2], [3, 99]]]))
    assert sorted(read(url, vocab_size=100).values()) == [[1, 2], [3, 99]]
    check_error(url, "must be below 99, got 99", kind=ValueError, vocab_size=99)


@every_layout
def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path, name):
    url = f"file://{tmp_path}/"
    files = files_of(LAYOUTS[name], [ROWS])
    for data in (
        b"x",
        b"\xff" * 1000,
        bytes(range(256)) * 40,
        b'{"tokens": "text"}\n',
        b"\xff\xff\xff\xff" + bytes(90),
    ):
        for ending in files:
            put(url, files | {ending: data})
            check_error(url)


# Noise. In a process of its own, which could die.


def test_noise_gives_documents_or_an_error_that_names_the_file_and_never_a_crash(tmp_path):
    spoil_in_a_process(f"file://{tmp_path}/", 10)


@pytest.mark.slow
def test_much_noise_gives_documents_or_an_error_that_names_the_file_and_never_a_crash(tmp_path):
    spoil_in_a_process(f"file://{tmp_path}/", 300)


def spoil_in_a_process(url, count):
    result = subprocess.run([sys.executable, __file__, url, str(count)], capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-200:]}\n{result.stderr[-3000:]}"


def spoil(url, name, count):
    """Spoils files; where the format has checksums of all data, no change may go unseen."""
    layout = LAYOUTS[name]
    files = files_of(layout, [ROWS[:10], ROWS[10:]])
    put(url, files)
    expected = read(url)
    for number, (ending, data) in enumerate(spoiled(files, random.Random(name), count)):
        sys.stdout.write(f"{name}: change {number} of {ending}\n")
        sys.stdout.flush()
        put(url, files | {ending: data})
        left = read(url, on_error="quarantine")
        try:
            found = read(url)
        except ERRORS as error:
            assert url in described(error), described(error)
        else:
            assert left == found
            assert len(found) <= 2 * len(ROWS)
            if layout.ending.endswith((".gz", ".zst", ".zstd")):
                assert found == expected


def spoiled(files, rng, count):
    """Flips bits and overwrites runs of bytes, then a bit in each byte of a Parquet footer: some are sizes of lists."""
    for _ in range(count):
        ending = rng.choice(list(files))
        data = bytearray(files[ending])
        begin = rng.randrange(len(data))
        length = min(rng.choice([1, 1, 1, 4, 50]), len(data) - begin)
        data[begin : begin + length] = rng.randbytes(length)
        yield ending, bytes(data)
    if data := files.get(".parquet"):
        for place in range(len(data) - 8 - struct.unpack_from("<i", data, len(data) - 8)[0], len(data)):
            yield ".parquet", data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


# JSON lines.


def lines(url, text, ending=".jsonl", **more):
    storage.write(f"{url}0{ending}", text)
    return [tokens for _, tokens in sorted(read(url, **more).items())]


def test_lines_end_at_their_newline_and_nowhere_else(tmp_path):
    url = f"file://{tmp_path}/"
    odd = "\u2028 \u2029 \x85 \\u000b é"
    text = "".join(f'{{"tokens": [{number}], "text": "{odd}"}}\r\n' for number in range(3)).encode()
    assert lines(url, text) == [[0], [1], [2]]
    assert lines(url, text.rstrip()) == [[0], [1], [2]]
    for ending, compress in ((".jsonl.gz", gzip.compress), (".jsonl.zst", zstandard.compress)):
        (tmp_path / "0.jsonl").unlink(missing_ok=True)
        assert lines(url, compress(text.rstrip()), ending) == [[0], [1], [2]]
        (tmp_path / f"0{ending}").unlink()


def test_a_mark_at_the_beginning_blank_lines_other_keys_and_nulls_are_fine(tmp_path):
    text = (
        b'\xef\xbb\xbf{"a": 1, "tokens": [1]}\n\n  \r\n{"tokens": [], "b": {}}\n{"tokens": null}\n\t\n{"tokens": [2]}'
    )
    url = f"file://{tmp_path}/"
    assert lines(url, text) == [[1], [2]]
    reader = Reader(url, shard=0, num_shards=1, epochs=1)
    for document in reader:
        row = text[document.row :].lstrip(b"\xef\xbb\xbf")
        assert json.loads(row.split(b"\n")[0])["tokens"] == document.tokens.tolist()
    assert reader.state_dict()["skipped"] == 2


@pytest.mark.parametrize(
    ("line", "kind", "word"),
    [
        (b'{"tokens": [1, 2}', ValueError, "not JSON"),
        (b'{"tokens": [1]', ValueError, "not JSON"),
        (b'{"tokens": [1], "t": "\xff"}\xff', ValueError, "not JSON"),
        (b"[1]", ValueError, "not a JSON object"),
        (b'{"ids": [1]}', LookupError, "'ids'"),
        (b'{"tokens": "text"}', ValueError, "lists of integers, got str"),
        (b'{"tokens": [1, null]}', ValueError, "lists of integers"),
        (b'{"tokens": [1, 2.0]}', ValueError, "lists of integers"),
        (b'{"tokens": [true]}', ValueError, "lists of integers"),
        (b'{"tokens": [9223372036854775808]}', ValueError, "must be below"),
        (b'{"tokens": [1, -5]}', ValueError, "must not be negative, got -5"),
        (b'{"tokens": [1 2]}', ValueError, "not JSON"),
        (b'{"tokens": [1,, 2]}', ValueError, "not JSON"),
        (b'{"tokens": [1, 2,]}', ValueError, "not JSON"),
        (b'{"tokens": [,]}', ValueError, "not JSON"),
        (b'{"tokens": [1, [2], 3]}', ValueError, "lists of integers"),
        (b'{"tokens": [99999999999999999999]}', ValueError, "must be below"),
        (b'{"meta": {"tokens": [1]}}', LookupError, "'meta'"),
        (b'{"text": "\\"tokens\\": [1]"}', LookupError, "'text'"),
        (b'{"a": 1, "tokens" [1]}', ValueError, "not JSON"),
        (b'{"tokens": [1]} {"tokens": [2]}', ValueError, "not JSON"),
    ],
)
def test_a_bad_line_is_an_error_that_names_file_and_line(tmp_path, line, kind, word):
    good = b'{"tokens": [1, 2]}\n'
    url = f"file://{tmp_path}/"
    for ending, compress in ((".jsonl", bytes), (".jsonl.gz", gzip.compress)):
        storage.write(f"{url}0{ending}", compress(good * 3 + line + b"\n" + good))
        check_error(url, word, f"line at byte {3 * len(good)}", kind=kind)
        (tmp_path / f"0{ending}").unlink()


@pytest.mark.parametrize(
    "line",
    [
        b'{"tokens":[ 1,2 ,\t3 ] }',
        b'{"meta": {"tokens": [9]}, "tokens": [1, 2, 3]}',
        b'{"tokens": [1, 2, 3], "text": "\\"tokens\\": [9]"}',
        b'{"\\u0074okens": [1, 2, 3], "x": {"tokens": [9]}}',
        b'{"text": "\\u0000", "a": [[]], "tokens" : [1, 2, 3]}',
        b'{"tokens": [9], "tokens": [1, 2, 3]}',
        b'{"tokens": [1, 2, 3], "text": "\xc3\xa9 ] ["}',
    ],
)
def test_a_good_line_is_read_as_json_would(tmp_path, line):
    assert lines(f"file://{tmp_path}/", line + b"\n" + line) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("num_rows", [1, 1000])
@pytest.mark.parametrize(
    ("ending", "compress"), [(".jsonl.gz", gzip.compress), (".jsonl.zst", zstandard.ZstdCompressor().compress)]
)
def test_all_members_and_frames_are_read_and_one_that_was_cut_is_an_error(
    tmp_path, monkeypatch, ending, compress, num_rows
):
    members = [compress(b"".join(map(layouts.line, [[member, row] for row in range(num_rows)]))) for member in range(3)]
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"12345" if ending == ".jsonl.zst" else b"\0" * 512
    url = f"file://{tmp_path}/"
    for size in (7, 300, 1 << 20):
        monkeypatch.setattr(sequential, "CHUNK_BYTES", size if num_rows == 1 else max(size, 300))
        for middle in (b"", skippable):
            found = lines(url, middle.join(members) + middle, ending)
            assert found == [[member, row] for member in range(3) for row in range(num_rows)]
        storage.write(f"{url}0{ending}", b"".join(members)[:-9])
        check_error(url, kind=ValueError)


def test_a_line_of_any_length_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(jsonl, "LOOK_AHEAD_BYTES", 50)
    rows = corpora.documents([1, 2000, 3, 300, 0, 4000, 20, 20, 170, 1])
    url = f"file://{tmp_path}/"
    for num_shards in (1, 3, 8):
        storage.write(f"{url}0.jsonl", layouts.json_lines([rows]))
        readers = [Reader(url, shard=shard, num_shards=num_shards, epochs=1) for shard in range(num_shards)]
        found = [document.tokens.tolist() for reader in readers for document in reader]
        assert sorted(found) == sorted(filter(None, rows))


# Other formats.


def test_an_arrow_stream_whose_dictionary_is_replaced_is_read_right(tmp_path):
    first, second = [[1, 2], [3]], [[4], [5, 6, 7]]
    sink = io.BytesIO()
    parts = [
        pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array(rows, pa.list_(pa.int32())))
        for rows in (first, second)
    ]
    schema = pa.schema({"tokens": parts[0].type})
    with pa.ipc.new_stream(sink, schema) as writer:
        for part in parts:
            writer.write_batch(pa.record_batch([part], schema))
    storage.write(f"file://{tmp_path}/0.arrow", sink.getvalue())
    assert [tokens for _, tokens in sorted(read(f"file://{tmp_path}/").items())] == [*first[::-1], *second[::-1]]


def test_small_batches_of_mixed_metadata_are_read_right(tmp_path):
    """Nulls, empty batches, batches of several rows and compressed ones among those that are decoded side by side."""
    rng = random.Random(0)
    kind = pa.list_(pa.int32())
    batches = []
    for number in range(300):
        rows = [[rng.randrange(100) for _ in range(rng.choice([0, 1, 5]))] for _ in range(rng.choice([0, 1, 1, 1, 3]))]
        batches.append([*rows, None] if number % 50 == 7 else rows)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, pa.schema({"tokens": kind})) as writer:
        for rows in batches:
            array = pa.array([[-1], *rows, [-2]], kind).slice(1, len(rows))
            writer.write_batch(pa.record_batch([array], ["tokens"]))
    url = f"file://{tmp_path}/0.arrow"
    storage.write(url, sink.getvalue())
    places = zip(layouts.in_batches(batches), layouts.flat(batches), strict=True)
    assert read(f"file://{tmp_path}/") == {(url, row): tokens for row, tokens in places if tokens}


@pytest.mark.parametrize("code", [4, 8])
def test_megatron_documents_of_several_sequences_or_none_are_one_row_each(tmp_path, code):
    kind = {4: np.int32, 8: np.uint16}[code]
    sequences = [[1, 2], [3], [], [4, 5, 6], [7]]
    edges = [0, 2, 2, 3, 5]  # the second document has no sequence, the third an empty one
    sizes = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = (np.cumsum(sizes) - sizes).astype(np.int64) * kind().itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(edges))
    storage.write(f"file://{tmp_path}/0.bin", np.concatenate(sequences).astype(kind).tobytes())
    storage.write(f"file://{tmp_path}/0.idx", head + sizes.tobytes() + pointers.tobytes() + np.array(edges).tobytes())
    expected = {(f"file://{tmp_path}/0.bin", 0): [1, 2, 3], (f"file://{tmp_path}/0.bin", 3): [4, 5, 6, 7]}
    assert read(f"file://{tmp_path}/") == expected
    assert read(f"file://{tmp_path}/0.bin") == expected


def test_megatron_files_without_their_index_or_with_another_one_are_errors(tmp_path):
    url = f"file://{tmp_path}/"
    put(url, {".bin": layouts.megatron([ROWS])[".bin"]})
    check_error(url, "0.idx is not there", kind=FileNotFoundError)
    put(url, {".idx": layouts.megatron([ROWS[1:]])[".idx"]})
    check_error(url, "does not fit its index", kind=ValueError)


def test_the_index_of_a_megatron_file_is_part_of_the_listing(tmp_path):
    url = f"file://{tmp_path}/"
    put(url, layouts.megatron([[[1, 2], [3]]]))
    reader = Reader(url, shard=0, num_shards=1)
    next(reader)
    state = reader.state_dict()
    put(url, layouts.megatron([[[1], [2], [3]]]))
    with pytest.raises(ValueError, match="was saved with 1 files of .* now there are 1 files of "):
        reader = Reader(url, shard=0, num_shards=1)
        reader.reset(state)
        next(reader)


@pytest.mark.parametrize("encoding", ["str", "int", "ndarray:float32"])
def test_an_mds_column_of_something_else_is_a_type_error(tmp_path, encoding):
    url = f"file://{tmp_path}/"
    put(url, {".mds": layouts.mds([ROWS], encoding=encoding)})
    check_error(url, f"holds {encoding}", kind=TypeError)


@pytest.mark.parametrize("field", ["npy", "json"])
def test_a_tar_sample_without_the_column_or_with_something_else_in_it_is_an_error(tmp_path, field):
    url = f"file://{tmp_path}/"
    encode = layouts.npy if field == "npy" else layouts.json_list
    put(url, {".tar": layouts.tar([ROWS], field=f"tokens.{field}", encode=encode)})
    assert sorted(read(url).values()) == sorted(filter(None, ROWS))
    check_error(url, "has no 'ids'", kind=LookupError, column="ids")
    for text in (b'{"a": 1}', b'["a"]', b"[1.5]", b"\x93NUMPY", b"["):
        put(url, {".tar": layouts.tar([ROWS], field=f"tokens.{field}", encode=lambda row, text=text: text)})
        check_error(url, f"part/00000.tokens.{field}", kind=ValueError)


def test_a_format_that_is_given_reads_files_of_any_of_its_endings_alone(tmp_path):
    url = f"file://{tmp_path}/"
    put(url, {".jsonl": layouts.json_lines([ROWS[:3]]), ".arrow": layouts.arrow([ROWS[3:]])})
    assert sorted(read(url, format="jsonl").values()) == [ROWS[0], ROWS[2]]
    assert len(read(url)) == sum(map(bool, ROWS))


if __name__ == "__main__":
    for each, name in enumerate(LAYOUTS):
        spoil(f"{sys.argv[1]}{each}/", name, int(sys.argv[2]))
