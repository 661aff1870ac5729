"""``chain --watch``: processes that write checkpoints slowly, beside one that compresses what is at rest."""

from __future__ import annotations

import os
import signal
import time

import pytest
from chain_command_kit import command, make_run, until
from faults_kit import digest

import ckpt8
from ckpt8.chaining.chain import Rest
from ckpt8.cli.app import EXIT_CODES

REST = 1.5


@pytest.fixture
def sources(tmp_path):
    return make_run(tmp_path / "sources", 3)


@pytest.fixture
def watched(tmp_path):
    """A folder with a process that watches it; it ends with Ctrl-C and leaves nothing."""
    folder = tmp_path / "run"
    folder.mkdir()
    process = command("chain", folder, "--watch", "--rest", REST, "--remove", "--keep-raw", 1)
    yield folder
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGINT, "")
    assert "130 and 143 SIGINT" in EXIT_CODES
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert all(line.startswith(str(folder)) for line in out.splitlines())


def containers(folder):
    return sorted(path.name for path in folder.glob("*.ckpt8"))


@pytest.mark.slow
def test_a_slow_writer(watched, sources):
    """Its files have their final length from the first moment, and it pauses for less than the rest."""
    contents = {watched / source.name: source.read_bytes() for source in sources}
    for path, content in contents.items():
        path.write_bytes(bytes(len(content)))
    parts, last, slowest = 8, time.monotonic(), 0.0
    for part in range(parts):
        time.sleep(REST / 5)
        for path, content in contents.items():
            with path.open("r+b") as file:
                file.seek(len(content) * part // parts)
                file.write(content[file.tell() : len(content) * (part + 1) // parts])
        now = time.monotonic()
        slowest, last = max(slowest, now - last), now
        # On a machine that is too busy for this writer nothing can be said.
        assert slowest > REST / 2 or containers(watched) == []
    until(lambda: containers(watched) == ["step-10.ckpt8", "step-5.ckpt8"])
    until(lambda: not (watched / "step-10.pt").exists())
    assert digest(watched / "step-15.pt") == digest(sources[2]), "the newest stays as it is"
    for source in sources[:2]:
        assert not ckpt8.verify(watched / source.with_suffix(".ckpt8").name, source).failures
        assert not (watched / source.name).exists()


def test_rest_counts_from_the_last_change(tmp_path, monkeypatch):
    """With a clock that the test turns: every change starts the wait again, also one of time, link or name alone."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "a").write_text("one")
    rest = Rest(10, watched=True)

    def is_at_rest():
        return rest.problem(folder) is None

    assert not is_at_rest()
    now[0] += 9.9
    assert not is_at_rest()
    now[0] += 0.1
    assert is_at_rest()
    changes = [
        lambda: (folder / "a").write_text("two"),
        lambda: os.utime(folder / "a", (5, 5)),
        lambda: (folder / "b").symlink_to("a"),
        (folder / "sub").mkdir,
        lambda: (folder / "a").rename(folder / "c"),
        (folder / "b").unlink,
    ]
    for change in changes:
        change()
        assert not is_at_rest()
        now[0] += 9.9
        assert not is_at_rest()
        now[0] += 0.1
        assert is_at_rest()


def test_what_nobody_touched_for_long_is_at_rest_at_once(tmp_path):
    path = tmp_path / "step-1.pt"
    path.write_text("x")
    assert Rest(10, watched=False).problem(path) is not None
    os.utime(path, (time.time() + 1000,) * 2)
    assert Rest(10, watched=False).problem(path) is not None, "a time to come says nothing"
    os.utime(path, (time.time() - 11,) * 2)
    assert Rest(10, watched=False).problem(path) is None
    assert Rest(10, watched=True).problem(path) is not None
    assert Rest(0, watched=True).problem(path) is None
