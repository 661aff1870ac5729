"""Temporary directories go, also where an interrupt comes at the moment that they are made; files get their room."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
from disk_kit import longest_file

from ckpt8.cli.bench.probe import run_child
from ckpt8.core.closing import deferred
from ckpt8.core.files import atomic
from ckpt8.core.files.atomic import allocate, temporary_directory, write_at

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


class StruckError(Exception):
    """What the handler of these tests raises."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def number(request):
    """A signal that raises an exception."""

    def strike(number, frame):
        raise StruckError

    before = signal.signal(request.param, strike)
    yield request.param
    signal.signal(request.param, before)


def test_what_a_thread_makes_while_others_are_removed_at_exit_keeps_none(tmp_path, monkeypatch):
    removed = []

    def remove(path):
        removed.append(path)
        atomic.unfinished[tmp_path / "late"] = os.getpid()

    monkeypatch.setattr(atomic, "unfinished", dict.fromkeys((tmp_path / "a", tmp_path / "b"), os.getpid()))
    monkeypatch.setattr(atomic, "remove", remove)
    atomic._remove_unfinished()
    assert removed == [tmp_path / "a", tmp_path / "b"]


@posix
def test_a_file_has_its_room_before_it_is_written(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        with longest_file(1000), pytest.raises(OSError, match="too large"):
            allocate(file.fileno(), 1 << 20)
        allocate(file.fileno(), 1 << 20)
        taken = os.fstat(file.fileno())
        assert taken.st_size == 1 << 20
        assert taken.st_blocks * 512 >= 1 << 20
        allocate(file.fileno(), 0)
        assert file.read() == b""


@posix
def test_a_file_is_written_where_no_advice_is_taken(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with (tmp_path / "file").open("w+b") as file:
        write_at(file.fileno(), memoryview(b"bytes"), 0)
        assert file.read() == b"bytes"


def test_a_directory_is_there_within_the_block_only(tmp_path):
    with temporary_directory("some-", tmp_path) as path:
        assert list(tmp_path.glob("some-*")) == [path]
        (path / "folder").mkdir()
        (path / "folder" / "file").touch()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError), temporary_directory("some-", tmp_path / "none"):
        raise AssertionError
    with pytest.raises(StruckError), temporary_directory("some-", tmp_path):
        raise StruckError
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_signal_strikes_at_the_end_of_the_block(number):
    after = []

    def work():
        with deferred():
            signal.raise_signal(number)
            after.append("inside")
        after.append("outside")

    with pytest.raises(StruckError):
        work()
    assert after == ["inside"]
    with pytest.raises(StruckError):
        signal.raise_signal(number)


@posix
def test_a_handler_that_python_cannot_set_again_is_left_alone(number, monkeypatch):
    before = signal.getsignal(number)
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    struck = []
    with deferred():
        try:
            signal.raise_signal(number)
        except StruckError:
            struck.append("inside")
    monkeypatch.undo()
    assert struck == ["inside"]
    assert signal.getsignal(number) is before


@posix
def test_a_signal_at_the_moment_a_directory_is_made_leaves_none(number, tmp_path, monkeypatch):
    made = []
    real = tempfile.mkdtemp

    def struck(*args, **options):
        made.append(real(*args, **options))
        signal.raise_signal(number)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", struck)
    with pytest.raises(StruckError), temporary_directory("some-", tmp_path):
        raise AssertionError
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_signal_at_the_moment_a_process_starts_leaves_none(number, tmp_path, monkeypatch):
    children = []
    real = subprocess.Popen

    def struck(*args, **options):
        children.append(real([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True))
        signal.raise_signal(number)
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", struck)
    with pytest.raises(StruckError):
        run_child(tmp_path)("ckpt8.cli.bench.probe", {}, False)
    assert [child.poll() is None for child in children] == [False]


def test_other_threads_have_nothing_to_defer(tmp_path):
    found = []

    def work():
        with temporary_directory("some-", tmp_path) as path:
            found.append(path.is_dir())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]
    assert list(tmp_path.iterdir()) == []


LEAST_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from ckpt8.core.files.atomic import Partial, temporary_directory

def fill(path, spare):
    (path / "inner" / "most").mkdir(parents=True)
    for name in ("a", "inner/b", "inner/most/c"):
        (path / name).write_bytes(b"content")
    (path / "link").symlink_to(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + spare, hard))

if sys.argv[2] == "partial":
    partial = Partial(Path(sys.argv[1]) / "run", directory=True)
    fill(partial.path, 0)
    partial.close()
else:
    with temporary_directory("t-", Path(sys.argv[1])) as path:
        fill(path, 1)
"""


@pytest.mark.parametrize("kind", ["partial", "temporary"])
def test_a_directory_goes_where_no_more_files_can_be_opened(kind, tmp_path):
    """``shutil.rmtree`` alone needs three descriptors for each level, and leaves the directory."""
    (tmp_path / "kept").write_bytes(b"kept")
    subprocess.run([sys.executable, "-c", LEAST_DESCRIPTORS, str(tmp_path), kind], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
