"""What readers of an object get, and what the store is asked for: compared with the bytes of a store in memory."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange
from ckpt8.core.files.stores import reading
from ckpt8.core.files.stores.contract import Stat
from ckpt8.core.files.stores.path import StorePath
from ckpt8.core.files.stores.reading import Content, StoreFile

NAME = "s3://bucket/key"


class MemoryStore:
    """A store of one object. ``asked`` are the ranges of its answers."""

    def __init__(self, content):
        self.content, self.version = content, Stat(len(content), "one", 0.0)
        self.asked, self.lock = [], threading.Lock()

    def stat(self, key):
        return self.version

    def first(self, key, length):
        self.asked.append((0, min(length, len(self.content))))
        return self.version, self.content[:length]

    def fill(self, key, tag, start, buffer):
        assert tag == "one"
        with self.lock:
            self.asked.append((start, len(buffer)))
        if self.version.tag != tag:
            raise InputError("changed while it was read")
        buffer[:] = self.content[start : start + len(buffer)]

    @property
    def bytes_asked(self):
        return sum(length for _, length in self.asked)


SMALL = {
    "HEAD": 512,
    "TAIL": 64,
    "PIECE": 2 << 10,
    "GAP": 256,
    "_WINDOW": 32 << 10,
    "_LEAST": 64,
    "_MOST_AHEAD": 16 << 10,
}
"""Sizes a thousand times smaller, so that an object of 100 KB is a large one."""


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(reading, name, value)
        yield


def opened(size, seed=0):
    store = MemoryStore(random.Random(seed).randbytes(size))
    content = Content.at(NAME, store, "key")
    return store, StoreFile(ByteRange(StorePath(NAME), 0, size), content)


reads = st.lists(st.tuples(st.integers(0, 99_999), st.integers(0, 9000), st.booleans()), max_size=30)


@given(reads=reads, keep=st.booleans())
def test_any_reads_give_the_bytes_of_the_object(reads, keep):
    store, file = opened(100_000)
    if keep:
        file.keep_all()
    for at, length, ahead in reads:
        count = min(length, 100_000 - at)
        if ahead:
            file.expect([(at, count)])
        assert file.read(at, count) == store.content[at : at + count]
    file.close()
    if keep:
        assert store.bytes_asked <= 100_000


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 600, 8 << 10, 100_000])
def test_objects_of_all_sizes_come_once_and_in_large_ranges(size):
    store, file = opened(size)
    file.expect([(0, size)])
    assert b"".join(file.read(at, min(700, size - at)) for at in range(0, size, 700)) == store.content
    assert store.bytes_asked == size
    assert len(store.asked) <= 1 + -(-max(0, size - 512) // (2 << 10))
    with pytest.raises(InputError, match=f"ends at byte {size}, needed {size + 1}"):
        file.read(size, 1)


def test_a_reader_that_goes_forwards_is_followed_without_a_word():
    store, file = opened(100_000)
    for at in range(0, 100_000, 100):
        file.read(at, 100)
    assert store.bytes_asked == 100_000
    assert len(store.asked) < 70


def test_readers_of_several_places_are_each_followed():
    store, file = opened(100_000)
    for at in range(0, 25_000, 100):
        for start in range(0, 100_000, 25_000):
            file.read(start + at, 100)
    assert store.bytes_asked == 100_000
    assert len(store.asked) < 110


def test_the_last_bytes_come_together():
    store, file = opened(100_000)
    for at in (99_960, 99_990, 99_936):
        file.read(at, 8)
    assert store.asked[1:] == [(99_936, 64)]


def test_all_that_is_asked_for_at_once_begins_with_the_end():
    store, file = opened(20_000)
    asked = []
    store.fill = lambda key, tag, start, buffer: asked.append((start, len(buffer)))
    file.expect_all()
    pieces = [piece.fetched for piece in file._shared._memory.held]
    assert pieces[0].result().nbytes == 64
    assert sum(piece.result().nbytes for piece in pieces) == 20_000 - 512
    assert (20_000 - 64, 64) in asked
    assert min(asked)[0] == 512
    assert sum(length for _, length in asked) == 20_000 - 512


def test_ranges_that_are_close_come_in_one_request():
    store, file = opened(100_000)
    file.expect([(10_000, 100), (10_200, 100), (40_000, 100)])
    assert file.read(10_200, 100) == store.content[10_200:10_300]
    file.read(40_000, 100)
    assert sorted(store.asked[1:]) == [(10_000, 300), (40_000, 100)]


def test_memory_is_bounded_by_what_was_read_and_nothing_expected_is_lost():
    store, file = opened(100_000)
    file.expect([(0, 100_000)])
    assert store.bytes_asked <= 512 + (32 << 10) + (2 << 10)
    for at in range(0, 100_000, 1000):
        file.read(at, 1000)
        assert file._shared._memory.size <= (32 << 10) + (2 << 10)
    assert store.bytes_asked == 100_000


def test_what_is_kept_on_the_disk_comes_once_in_any_order():
    store, file = opened(100_000)
    file.keep_all()
    places = [*range(0, 100_000, 500)]
    for seed in range(3):
        random.Random(seed).shuffle(places)
        for at in places:
            assert file.read(at, 500) == store.content[at : at + 500]
    assert store.bytes_asked == 100_000


def test_many_threads_read_the_same_bytes():
    store, file = opened(100_000)
    wrong = []

    def work(seed):
        numbers = random.Random(seed)
        for _ in range(200):
            at = numbers.randrange(99_000)
            if file.read(at, 1000) != store.content[at : at + 1000]:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_reader_stops_what_waits():
    store, file = opened(100_000)
    file.expect([(0, 100_000)])
    file.close()
    file.close()
    assert store.bytes_asked < 60_000
    again = StoreFile(file.source, file._shared)
    assert again.read(0, 100_000) == store.content


def test_a_version_that_is_gone_is_an_error_for_every_reader():
    store, file = opened(100_000)
    store.version = Stat(100_000, "two", 1.0)
    for _ in range(2):
        with pytest.raises(InputError, match="changed while it was read"):
            file.read(50_000, 10)
    assert file.read(0, 512) == store.content[:512]
    for check in (file.check_unchanged, file.check_in_place):
        with pytest.raises(InputError, match=f"{NAME}: changed while it was read; nothing was written"):
            check()


def test_a_forked_process_reads_on():
    store, file = opened(100_000)
    file.expect([(0, 50_000)])
    assert file.read(20_000, 10) == store.content[20_000:20_010]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(file.read(0, 100_000) != store.content)
    assert os.waitpid(child, 0)[1] == 0
    assert file.read(0, 100_000) == store.content


def test_small_ranges_that_were_expected_stay_however_much_is_read_after_them():
    """The headers of a zip are read when it is opened, and again at the end."""
    store, file = opened(100_000)
    headers = [(at, 40) for at in range(10_000, 90_000, 5000)]
    file.expect(headers)
    for start, length in headers:
        assert file.read(start, length) == store.content[start : start + length]
    for _ in range(2):
        for at in range(0, 100_000, 5000):
            file.read(at, 5000)
    asked = len(store.asked)
    for start, length in headers:
        assert file.read(start, length) == store.content[start : start + length]
    assert len(store.asked) == asked


@pytest.mark.parametrize("size", [60_000, 200_000])
def test_what_is_read_back_and_forth_is_fetched_once(size):
    """Two passes, as of a file with weights, then moments. A small object is fetched in its order, and kept."""
    store, file = opened(size)
    passes = [(at, 1500) for first in (512, 2012) for at in range(first, size - 5000, 3000)]
    file.expect(passes)
    for start, length in passes:
        assert file.read(start, length) == store.content[start : start + length]
    if size <= 2 * reading._WINDOW:
        assert len(store.asked) <= 1 + -(-size // reading.PIECE)
    assert store.bytes_asked <= size + reading.HEAD


def test_what_may_be_read_again_is_fetched_again_where_there_is_no_room_to_keep_it(monkeypatch):
    usage = shutil.disk_usage(tempfile.gettempdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    _, file = opened(100_000)
    file.keep_all(needs_room=True)
    assert file._shared._spill is None
    file.keep_all()
    assert file._shared._spill is not None


def test_bytes_that_are_needed_now_take_one_request_however_they_are_read():
    store, file = opened(100_000)
    store.asked.clear()
    file.need(10_000, 1500)
    for at in (10_000, 10_100, 11_000):
        file.read(at, 500)
    assert store.asked == [(10_000, 1500)]
    for start in range(11_500, 80_000, 1500):  # and who goes on has the rest sent ahead
        file.need(start, 1500)
        assert file.read(start, 1500) == store.content[start : start + 1500]
    assert len(store.asked) < 70_000 // 1500
