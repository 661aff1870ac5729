"""Requests to S3 and what becomes of their faults, counted on a server: moto's, in a process of its own."""

from __future__ import annotations

import os
import random
import socket
import time

import pytest

from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import ByteRange, open_range
from ckpt8.core.files.stores import attempts, reading, s3
from ckpt8.core.files.stores.s3 import S3Store

CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture
def store(bucket):
    bucket.put("key", CONTENT)
    return S3Store("bucket")


def filled(store, start, length):
    buffer = bytearray(length)
    store.fill("key", store.tag, start, memoryview(buffer))
    return bytes(buffer)


@pytest.fixture
def filling(store, bucket):
    """A store that knows the version of its object; the log is empty."""
    store.tag = store.stat("key").tag
    bucket.order()
    return store


def test_an_object_and_its_version(store, bucket):
    version, head = store.first("key", 1000)
    assert (version.size, head) == (len(CONTENT), CONTENT[:1000])
    assert store.stat("key") == version
    assert abs(version.changed - time.time()) < 600
    assert store.first("key", 1 << 20) == (version, CONTENT)
    assert store.first("none", 10) is None
    assert store.stat("none") is None
    bucket.put("empty", b"")
    version, head = store.first("empty", 10)
    assert (version.size, head) == (0, b"")


def test_every_range_carries_the_version(filling, bucket):
    assert filled(filling, 5, 10) == CONTENT[5:15]
    assert [(each["range"], each["if_match"]) for each in bucket.order()] == [("bytes=5-14", filling.tag)]


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 500, "code": "InternalError"}, {"status": 429}])
def test_a_passing_fault_is_tried_again_and_a_lasting_one_is_an_error(fault, filling, bucket):
    bucket.order({**fault, "times": 3})
    assert filled(filling, 0, 100) == CONTENT[:100]
    assert len(bucket.order({**fault, "times": 1000})) == 4
    for call in (lambda: filled(filling, 0, 100), lambda: filling.first("key", 10), lambda: filling.stat("key")):
        with pytest.raises(InputError, match=r"^s3://bucket/key: cannot be read: [^\n]*$"):
            call()
    assert len(bucket.order()) == 15


def test_a_body_that_is_cut_goes_on_at_the_byte_that_it_reached(filling, bucket):
    bucket.order({"cut": 10_000, "times": 7})
    assert filled(filling, 1000, 100_000) == CONTENT[1000:101_000]
    log = bucket.order({"cut": 10_000, "times": 1})
    assert [each["range"] for each in log] == [f"bytes={1000 + at}-100999" for at in range(0, 80_000, 10_000)]
    assert filling.first("key", 50_000)[1] == CONTENT[:50_000]
    _, second = bucket.order()
    assert (second["range"], second["if_match"]) == ("bytes=10000-49999", filling.tag)


def test_a_connection_that_brings_nothing_is_given_up(filling, bucket):
    bucket.order({"cut": 0, "times": 1000})
    with pytest.raises(InputError, match=r"s3://bucket/key: cannot be read: the connection was cut, in 5 attempts"):
        filled(filling, 0, 100)
    assert len(bucket.order()) == 5


def test_a_server_that_is_silent_is_given_up(filling, bucket, monkeypatch):
    monkeypatch.setattr(s3, "_READ", 0.5)
    monkeypatch.setattr(attempts, "_SECONDS", 0.95)  # between one answer that does not come and two
    s3._client().close()
    s3._client.cache_clear()
    s3._client()  # takes its time on a busy machine
    bucket.order({"sleep": 2, "times": 2})
    start = time.monotonic()
    with pytest.raises(InputError, match=r"s3://bucket/key: cannot be read: Read timeout [^\n]*in 2 attempts"):
        filled(filling, 0, 100)
    assert time.monotonic() - start < 1.9


def test_no_request_outlasts_two_minutes():
    longest_wait = 5
    assert attempts._SECONDS + longest_wait + s3._CONNECT + s3._READ <= 120


def test_nobody_listens(bucket, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(InputError, match=r"s3://bucket/key: cannot be read: Could not connect [^\n]*in 5 attempts"):
            S3Store("bucket").first("key", 10)


@pytest.mark.parametrize("what", ["replaced", "deleted", "replaced where conditions are ignored"])
def test_another_version_is_an_error_and_never_a_mixture(what, filling, bucket):
    if what == "deleted":
        bucket.client.delete_object(Bucket="bucket", Key="key")
    else:
        bucket.put("key", CONTENT[::-1])
    bucket.order({"ignore_conditions": True, "times": 1} if "ignored" in what else {"times": 0})
    with pytest.raises(InputError, match="s3://bucket/key: changed while it was read; nothing was written"):
        filled(filling, 0, 100)
    assert len(bucket.order()) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (403, "InvalidAccessKeyId"), (401, "ExpiredToken")]
)
def test_a_request_that_is_denied_is_not_tried_again(status, code, store, bucket):
    bucket.order({"status": status, "code": code, "times": 1000})
    with pytest.raises(InputError, match=rf"s3://bucket/key: access denied \({code}\); reading needs s3:GetObject"):
        store.first("key", 10)
    assert len(bucket.order()) == 1


def test_no_bucket(bucket):
    with pytest.raises(InputError, match="s3://nowhere/key: there is no bucket nowhere"):
        S3Store("nowhere").first("key", 10)


@pytest.mark.parametrize("url", ["s3://", "s3://bucket", "s3://bucket/", "s3://bucket/a/../b"])
def test_a_url_that_names_no_object(url):
    with pytest.raises(UsageError, match="s3://"):
        as_path(url)


def test_a_path_of_a_store_answers_as_that_of_a_file(store, bucket, tmp_path):
    path = as_path("s3://bucket/key")
    assert str(path) == "s3://bucket/key"
    assert as_path(path) is path
    assert (path.name, str(path.parent), str(path / "x"), path.suffix) == (
        "key",
        "s3://bucket",
        "s3://bucket/key/x",
        "",
    )
    assert (path.is_file(), path.exists(), path.is_dir(), path.is_symlink()) == (True, True, False, False)
    assert path.stat().st_size == len(CONTENT)
    with path.open("rb") as file:
        assert file.read() == CONTENT
        file.seek(-10, 2)
        assert file.read() == CONTENT[-10:]
    assert len(bucket.order()) == 1
    none = as_path("s3://bucket/none")
    assert not none.exists()
    with pytest.raises(FileNotFoundError):
        none.open("rb")
    assert list(path.iterdir()) == []
    for name in ("folder/", "folder/one", "folder/two", "folder/in/three"):
        bucket.put(name, b"")
    assert [str(each) for each in as_path("s3://bucket/folder").iterdir()] == [
        "s3://bucket/folder/one",
        "s3://bucket/folder/two",
    ]
    bucket.order({"status": 403, "code": "AccessDenied", "times": 1})
    with pytest.raises(PermissionError, match="access denied"):
        next(path.parent.iterdir())
    for call in (lambda: os.stat(path), lambda: tmp_path.joinpath(path).read_bytes()):  # noqa: PTH116
        with pytest.raises((TypeError, FileNotFoundError)):
            call()


def test_the_head_of_an_object_is_one_request_for_all_its_readers(store, bucket):
    path = as_path("s3://bucket/key")
    for _ in range(3):
        file = open_range(ByteRange.of(path))
        assert file.read(100, 50) == CONTENT[100:150]
        file.close()
    assert len(CONTENT) < reading.HEAD
    assert len(bucket.order()) == 1
