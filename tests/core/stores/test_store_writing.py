"""What becomes of bytes that are sent to a store: compared with a list of bytes, and counted on moto's server."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_kit import BUCKET, ENVIRONMENT

from ckpt8.core.errors import OutputError
from ckpt8.core.files.atomic import any_file, noting_replaced
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.stores import s3, writing
from ckpt8.core.files.stores.contract import Stat, Write
from ckpt8.core.files.stores.path import StorePath
from ckpt8.core.files.stores.writing import ObjectOutput

PART = 8 << 10


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(writing, "PART", PART)


class MemoryStore:
    """A store of one object that takes parts as R2 does: all of one size, but the last one."""

    def __init__(self):
        self.content, self.sent, self.parts = None, [], {}
        self.at_once, self.most, self.lock = 0, 0, threading.Lock()
        self.before_part = lambda number: None

    def put(self, write, content):
        self.content = content

    def begin(self, write):
        return "upload"

    def tidy(self, write, upload):
        pass

    def send(self, write, upload, number, content, is_given_up):
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.sent.append(number)
        self.before_part(number)
        with self.lock:
            self.at_once -= 1
            self.parts[number] = content
        return {"number": number, "content": content}

    def complete(self, write, upload, parts):
        assert [part["number"] for part in parts] == [*range(1, len(parts) + 1)]
        assert all(self.parts[part["number"]] is part["content"] for part in parts)
        assert len({len(part["content"]) for part in parts[:-1]}) == 1
        assert len(parts[-1]["content"]) <= len(parts[0]["content"])
        self.content = b"".join(part["content"] for part in parts)

    def abort(self, write, upload):
        self.parts.clear()

    def check(self, write, size):
        assert len(self.content) == size

    def first(self, key, length):
        return None if self.content is None else (Stat(len(self.content), "tag", 0.0), self.content[:length])


class MemoryPath(StorePath):
    """The path of that object."""

    store = None


def output_to(store, **options):
    path = MemoryPath("s3://bucket/key")
    path.store = store
    return ObjectOutput(path, Write("key", None), None, **options)


lengths = st.integers(0, 3 * PART)


@given(
    reserved=st.integers(1, PART),
    bound=st.sampled_from([0, 9000 * (PART + 5)]),
    steps=st.lists(st.tuples(st.lists(lengths, max_size=4), st.lists(lengths, max_size=4)), max_size=4),
    tail=lengths,
)
def test_the_object_is_what_a_file_would_be(reserved, bound, steps, tail):
    """Of each step the first pieces are taken back; the second ones stay."""
    store, source, kept = MemoryStore(), random.Random(0), []
    with output_to(store, reserved=reserved, bound=bound) as output:
        for taken_back, stays in steps:
            output.mark()
            output.append([source.randbytes(length) for length in taken_back])
            output.rollback(len(b"".join(kept)))
            kept += [source.randbytes(length) for length in stays]
            output.append(kept[len(kept) - len(stays) :])
        kept.append(source.randbytes(tail))
        path = output.end(b"h" * reserved, kept[-1:])
        with path.open("rb") as file:
            begins = file.read(reserved)
            file.seek(-tail, 2)
            assert (begins, file.read()) == (b"h" * reserved, kept[-1])
        assert store.content is None
        output.publish()
    assert store.content == b"h" * reserved + b"".join(kept)
    assert store.sent[-1:] in ([], [1]) or len(store.content) <= max(PART, bound // 9000)


def test_few_parts_are_on_their_way_and_an_old_one_never_comes_late():
    store = MemoryStore()
    going = threading.Event()
    store.before_part = lambda number: going.wait(20)
    with output_to(store, reserved=10) as output:
        output.append([b"a" * PART])
        output.mark()
        filling = threading.Thread(target=output.append, args=([b"b" * (2 * writing.IN_FLIGHT * PART)],))
        filling.start()
        until = time.monotonic() + 10
        while len(store.sent) < writing.IN_FLIGHT and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)  # one more would come
        assert store.most == len(store.sent) == writing.IN_FLIGHT
        assert filling.is_alive()
        going.set()
        filling.join()
        slow = threading.Event()
        store.before_part = lambda number: number == 2 and slow.wait(0.1)
        for content in (b"c", b"d"):
            output.rollback(PART)
            output.append([content * (2 * PART)])
        output.end(b"h" * 10, [b"e"])
        output.publish()
    assert store.content == b"h" * 10 + b"a" * PART + b"d" * (2 * PART) + b"e"
    assert store.most == writing.IN_FLIGHT


def test_a_head_that_is_longer_makes_the_first_part_longer():
    store = MemoryStore()
    with output_to(store, reserved=10) as output:
        output.append([b"a" * (3 * PART)])
        output.end(b"h" * 1000, [])
        with pytest.raises(AssertionError):  # R2 refuses unequal parts
            output.publish()
    assert [len(store.parts.get(number, b"")) for number in (1, 2)] == [0, 0]  # and they are removed


# On a server


CONTENT = random.Random(1).randbytes(5 * PART + 100)


@pytest.fixture
def place(bucket):
    return as_path(f"s3://{BUCKET}/{secrets.token_hex(4)}/a.bin")


def write(path, content=CONTENT, *, force=False, before=lambda: None):
    with path.new_object(force=force, check=any_file, reserved=10) as output:
        output.append([content[10:-1]])
        output.end(content[:10], [content[-1:]])
        before()
        output.publish()


def stored(bucket, path):
    """The bytes of an object, None where there is none."""
    objects = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=path.key)
    return bucket.client.get_object(Bucket=BUCKET, Key=path.key)["Body"].read() if objects["KeyCount"] else None


def uploads(bucket, path):
    listed = bucket.client.list_multipart_uploads(Bucket=BUCKET, Prefix=path.key)
    return [upload["Key"] for upload in listed.get("Uploads", ())]


def test_the_answer_of_the_store_shows_what_it_has(place, bucket, monkeypatch):
    """Its tag is the MD5 of those of the parts; where it is not, the object is looked at."""
    with bucket.counted() as log:
        write(place, CONTENT)
    heads = [entry["method"] for entry in log].count("HEAD")
    monkeypatch.setattr(s3, "_tag_of", lambda parts: "encrypted")
    with bucket.counted() as log:
        write(as_path(place), CONTENT, force=True)
    assert (heads, [entry["method"] for entry in log].count("HEAD")) == (0, 1)


@pytest.mark.parametrize("size", [20, PART, PART + 1, len(CONTENT)])
def test_an_object_and_the_requests_for_it(size, place, bucket):
    content = CONTENT[:size]
    parts = -(-size // PART)
    with bucket.counted() as log:
        write(place, content)
    assert (
        [entry["what"] for entry in log if entry["what"] in ("put", "part")] == ["part"] * parts
        if parts > 1
        else ["put"]
    )
    assert len(log) <= parts + 6
    sent = {int(entry["part"]): entry["sent"] for entry in log if entry["part"]}
    assert {size for number, size in sent.items() if number < parts} <= {PART}
    assert [entry["if_none_match"] for entry in log if entry["what"] in ("put", "complete")] == ["*"]
    assert stored(bucket, place) == content
    with place.open("rb") as file:
        assert file.read() == content
    with noting_replaced() as replaced, bucket.counted() as log:
        with pytest.raises(OutputError, match=r"a\.bin: exists; use force=True to replace it"):
            write(as_path(place), b"other" * 9)
        write(as_path(place), b"other" * 9, force=True)
    assert stored(bucket, place) == b"other" * 9
    assert replaced == [f"{place}: a file of {size:,} bytes"]
    assert [entry["if_match"] is not None for entry in log if entry["what"] == "put"] == [True]


@pytest.mark.parametrize("what", ["begin", "part", "complete", "put"])
def test_a_passing_fault_is_tried_again(what, place, bucket):
    bucket.order({"status": 503, "times": 3, "what": what})
    content = CONTENT if what != "put" else CONTENT[:100]
    write(place, content)
    assert stored(bucket, place) == content
    assert uploads(bucket, place) == []


@pytest.mark.parametrize("what", ["begin", "part", "complete", "put"])
def test_a_lasting_fault_is_an_error_that_leaves_nothing(what, place, bucket):
    bucket.order({"status": 503, "times": 1000, "what": what})
    with pytest.raises(OutputError, match=r"a\.bin: cannot be written: [^\n]*$"):
        write(place, CONTENT if what != "put" else CONTENT[:100])
    log = bucket.order()
    assert sum(entry["what"] == what for entry in log) <= 5 * writing.IN_FLIGHT
    assert stored(bucket, place) is None
    assert uploads(bucket, place) == []


@pytest.mark.parametrize("what", ["part", "complete", "put"])
@pytest.mark.parametrize("force", [False, True])
def test_an_answer_that_is_lost(what, force, place, bucket):
    if force:
        bucket.put(place.key, b"old")
    content = CONTENT if what != "put" else CONTENT[:100]
    bucket.order({"lose_answer": True, "times": 1, "what": what})
    write(place, content, force=force)
    assert stored(bucket, place) == content
    assert uploads(bucket, place) == []


@pytest.mark.parametrize("size", [100, len(CONTENT)])
@pytest.mark.parametrize("force", [False, True])
def test_another_writer_is_not_overwritten(force, size, place, bucket):
    if force:
        bucket.put(place.key, b"old")
    said = "changed while its successor was written" if force else "exists; use force=True"
    with pytest.raises(OutputError, match=rf"a\.bin: {said}"):
        write(place, CONTENT[:size], force=force, before=lambda: bucket.put(place.key, b"rival"))
    assert stored(bucket, place) == b"rival"
    assert uploads(bucket, place) == []


@pytest.mark.parametrize("size", [100, len(CONTENT)])
@pytest.mark.parametrize("force", [False, True])
def test_where_conditions_are_ignored_the_last_writer_wins(force, size, place, bucket):
    """The object is ours and whole; nothing tells that there was another, and nothing is left behind."""
    if force:
        bucket.put(place.key, b"old")
    bucket.order({"ignore_conditions": True, "times": 1000})
    rival = {"Bucket": BUCKET, "Key": place.key, "Body": b"rival"}
    write(place, CONTENT[:size], force=force, before=lambda: bucket.client.put_object(**rival))
    log = bucket.order()
    last = next(entry for entry in reversed(log) if entry["what"] in ("put", "complete"))
    assert last["if_match" if force else "if_none_match"]
    assert stored(bucket, place) == CONTENT[:size]
    assert uploads(bucket, place) == []


def test_where_conditions_are_ignored_another_version_is_not_removed(place, bucket):
    bucket.put(place.key, b"old")
    assert place.exists()
    bucket.put(place.key, b"rival")
    bucket.order({"ignore_conditions": True, "times": 1000})
    with pytest.raises(OutputError, match="changed meanwhile; it stays as it is"):
        place.unlink()
    assert stored(bucket, place) == b"rival"


def test_an_object_that_a_store_without_conditions_replaced_at_once_is_noticed(place, bucket, monkeypatch):
    complete = s3.S3Store.complete

    def replace(*arguments):
        complete(*arguments)
        bucket.client.put_object(Bucket=BUCKET, Key=place.key, Body=b"rival")

    monkeypatch.setattr(s3.S3Store, "complete", replace)
    with pytest.raises(OutputError, match="the store holds another object than the 41060 bytes that were written"):
        write(place)


@pytest.mark.parametrize("what", ["begin", "put", "part"])
@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", r"access denied \(AccessDenied\); writing needs s3:PutObject, s3:GetObject and "),
        (501, "NotImplemented", "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"),
        (404, "NoSuchBucket", "there is no bucket bucket"),
    ],
)
def test_what_is_refused_is_not_tried_again(status, code, said, what, place, bucket):
    bucket.order({"status": status, "code": code, "times": 1000, "what": what})
    with pytest.raises(OutputError, match=rf"^s3://bucket/[0-9a-f]*/a\.bin: [^\n]*{said}[^\n]*$"):
        write(place, CONTENT if what != "put" else CONTENT[:100])
    assert sum(entry["what"] == what for entry in bucket.order()) <= (writing.IN_FLIGHT + 1 if what == "part" else 1)
    assert stored(bucket, place) is None


def test_uploads_that_were_left_behind_long_ago_go(place, bucket):
    """moto gives all uploads a time of 2010."""
    for key in (place.key, f"{place.key}.other"):
        bucket.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    write(place)
    assert uploads(bucket, place) == [f"{place.key}.other"]
    bucket.client.create_multipart_upload(Bucket=BUCKET, Key=place.key)
    bucket.order({"status": 403, "code": "AccessDenied", "times": 1000, "what": "uploads"})
    write(as_path(place), force=True)
    assert stored(bucket, place) == CONTENT


def test_an_exception_removes_what_was_sent(place, bucket):
    def fail():
        until = time.monotonic() + 60
        while uploads(bucket, place) != [place.key]:  # a thread begins it
            assert time.monotonic() < until
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        write(place, before=fail)
    assert uploads(bucket, place) == []
    assert stored(bucket, place) is None


PROGRAM = """
import sys
from ckpt8.core.files.stores import writing
writing.PART = 8 << 10
sys.argv = ["ckpt8", "compress", {source!r}, "-o", {target!r}]
from ckpt8.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_ended_leaves_no_object(number, place, bucket, inputs):
    program = PROGRAM.format(source=str(inputs / "gpt_bf16.pt"), target=str(place))
    environment = os.environ | ENVIRONMENT | {"AWS_ENDPOINT_URL": bucket.endpoint}
    bucket.order({"sleep": 2, "what": "part", "times": 1000, "after": 6})
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE) as process:
        try:
            log = []
            until = time.monotonic() + 60
            while not sum(entry["what"] == "part" for entry in log) > 6 and time.monotonic() < until:
                time.sleep(0.05)
                log += bucket.look()
            process.send_signal(number)
            assert process.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
            assert process.stderr.read() == b""
        finally:
            process.kill()
    bucket.order()
    assert stored(bucket, place) is None
    assert uploads(bucket, place) == ([place.key] if number == signal.SIGKILL else [])
    assert not Path(str(place)).exists()
