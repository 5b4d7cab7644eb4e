"""Archive: what is written is what is read, or an error that names the file."""

import collections
import hashlib
import io
import os
import random

import numpy as np
import pytest
import torch
from sources import same

from ibm_nodes.archive import FORMAT, VERSION, decode, encode, pack, unpack

URL = "s3://bucket/step-00000001/loader-0123456789ab-00000-of-00001.pt"
TENSORS = [
    torch.arange(5, dtype=torch.int64),
    torch.tensor([0, 65_535], dtype=torch.int32),
    torch.tensor([0, 65_536], dtype=torch.int32),
    torch.tensor([-1, 3], dtype=torch.int64),
    torch.tensor([-(1 << 62), 1 << 62]),
    torch.from_numpy(np.array([1, 65_535], np.uint16)),
    torch.tensor([200, 3], dtype=torch.uint8),
    torch.tensor([-3, 3], dtype=torch.int16),
    torch.tensor([0.5, float("inf"), -0.0]),
    torch.tensor([0.1], dtype=torch.float64),
    torch.tensor([1.5], dtype=torch.float16),
    torch.tensor([1.5], dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor(7),
    torch.empty(0, dtype=torch.int32),
    torch.empty(2, 0, 3),
    torch.arange(24).reshape(2, 3, 4),
    torch.arange(24).reshape(4, 6).t(),
    torch.arange(20)[::3],
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}")
def test_a_tensor_comes_back_with_its_values_type_and_shape(tensor):
    (found,) = unpack(decode(encode({"packed": pack([tensor])}), URL)["packed"])
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def test_a_state_of_plain_data_comes_back_as_it_was():
    state = {
        "none": None,
        "numbers": [1, -2.5, True, 1 << 70, float("inf")],
        "text": "\udcff and \0 and é",
        "nested": ({"tokens": torch.arange(9)}, [(), [], {}], [torch.arange(3), {"more": torch.tensor([70_000])}]),
        5: {0.5: "keys of all kinds", True: None, "list": {"x": ["tuple", "list"]}},
        "bytes": [b"", b"\0x", ["bytes"], ("dict", 1)],
    }
    found = unpack(decode(encode({"packed": pack(state)}), URL)["packed"])
    assert same(found, state)
    assert same(unpack(pack(state)), state)


@pytest.mark.parametrize("foreign", [np.int64(3), object(), np.arange(3), {1, 2}, [torch.float32]])
def test_what_is_no_plain_data_is_refused_when_it_is_saved(foreign):
    with pytest.raises(TypeError, match="must be made of plain data and tensors to be saved, got "):
        pack({"x": [foreign]})


@pytest.mark.parametrize("data", [b"", b"1234567", b"\5" + bytes(7) + b"hello", bytes(16)])
def test_bytes_that_are_no_packed_state_are_refused(data):
    with pytest.raises(ValueError, match="no packed state"):
        unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


def test_what_was_unpacked_can_be_written_to_and_shares_no_memory():
    tensor = torch.arange(4)
    packed = pack({"one": tensor, "two": tensor})
    tensor.zero_()
    found = unpack(packed)
    found["one"].fill_(9)
    assert found["two"].tolist() == [0, 1, 2, 3] and unpack(packed)["one"].tolist() == [0, 1, 2, 3]


def test_ids_below_65536_take_two_bytes_and_a_shard_is_one_tensor():
    for tensors, size in [
        ([torch.arange(1000, dtype=torch.int64), torch.arange(1000, dtype=torch.int32)], 4000),
        ([torch.arange(1000) + 65_000], 8000),
        ([torch.arange(1000, dtype=torch.uint8)], 1000),
        ([torch.zeros(1000, dtype=torch.float32)], 4000),
    ]:
        tensor = pack({"buffer": tensors})
        assert tensor.dtype == torch.uint8 and size < tensor.numel() < size + 200
        assert len(encode({"packed": tensor})) < size + 8000


def test_the_size_does_not_grow_with_what_a_view_is_a_part_of():
    assert len(encode({"packed": pack([torch.arange(1_000_000)[5:9]])})) < 8000


def small():
    return encode({"step": 3, "packed": pack({"tail": [torch.arange(600)]})})


def outcome(data, expected):
    """What becomes of damaged bytes: there is no other way than an error that names the file, or the same content."""
    try:
        found = decode(data, URL)
    except ValueError as error:
        return "named" if URL in str(error) else f"unnamed {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "the same" if same(found, expected) else "other content"


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_a_damaged_byte_anywhere_is_an_error_that_names_the_file_or_changes_nothing(flip):
    data = small()
    expected = decode(data, URL)
    outcomes = collections.Counter()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= flip
        outcomes[outcome(bytes(damaged), expected)] += 1
    # What changes nothing is padding and what zip repeats; all that carries content is checked.
    assert outcomes.keys() <= {"named", "the same"}, outcomes
    assert outcomes["named"] > len(data) // 2


def test_a_file_that_is_cut_short_at_any_byte_is_an_error_that_names_it():
    data = small()
    expected = decode(data, URL)
    for length in range(len(data)):
        assert outcome(data[:length], expected) == "named", length


def test_a_damaged_byte_among_the_tokens_is_found():
    data = encode({"packed": pack({"tail": [torch.arange(5000)]})})
    place = data.index(torch.arange(5000).numpy().astype(np.uint16).tobytes()[:200]) + 77
    damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    with pytest.raises(ValueError, match=f"{URL} is damaged .its checksum differs.: load an older step"):
        decode(damaged, URL)


def stored(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_a_newer_version_is_told_from_damage():
    data = {"format": FORMAT, "version": VERSION + 1, "something": "else"}
    with pytest.raises(
        ValueError, match=f"{URL} was written by a newer ibm_nodes .version {VERSION + 1}, .* {VERSION}."
    ):
        decode(stored(data), URL)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"PK\x03\x04 and more",
        random.Random(0).randbytes(2000),
        stored({"format": "other"}),
        stored({}),
        stored([1, 2]),
        stored(torch.arange(5)),
        stored({"format": FORMAT}),
        stored({"format": FORMAT, "version": "one", "payload": 3, "checksum": 4}),
        stored({"model": torch.nn.Linear(2, 2).state_dict()}),
    ],
)
def test_a_foreign_file_is_an_error_that_names_it(data):
    with pytest.raises(ValueError, match=URL):
        decode(data, URL)


class Intruder:
    def __reduce__(self):
        return (os.mkdir, (os.environ["INTRUDER"],))


def test_nothing_in_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("INTRUDER", str(tmp_path / "made"))
    payload = stored({"state": Intruder()})
    inner = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": hashlib.blake2b(payload, digest_size=16).hexdigest(),
        "payload": torch.frombuffer(bytearray(payload), dtype=torch.uint8),
    }
    for data in (stored(Intruder()), stored(inner)):
        with pytest.raises(ValueError, match=URL):
            decode(data, URL)
    assert not (tmp_path / "made").exists()
