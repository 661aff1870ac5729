"""``chain --watch``: processes that write checkpoints slowly, beside one that compresses what is at rest."""

from __future__ import annotations

import json
import os
import shutil
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


@pytest.mark.slow
def test_the_last_file_of_trainer_and_a_damaged_one(watched, sources, inputs, tmp_path):
    for step in (20, 30):
        folder = shutil.copytree(inputs / "trainer-adamw", watched / f"checkpoint-{step}")
        progress = json.loads((folder / "trainer_state.json").read_text()) | {"global_step": step}
        (folder / "trainer_state.json").write_text(json.dumps(progress))
    shutil.copytree(watched / "checkpoint-20", tmp_path / "original")
    state = (watched / "checkpoint-20" / "trainer_state.json").rename(watched.parent / "state")
    for source in sources[:2]:
        shutil.copy(source, watched)
    until(lambda: {"step-5.ckpt8", "step-10.ckpt8"} <= set(containers(watched)))
    assert containers(watched) == ["step-10.ckpt8", "step-5.ckpt8"], "one is not complete, and one the newest"
    state.rename(watched / "checkpoint-20" / "trainer_state.json")
    until(lambda: "checkpoint-20.ckpt8" in containers(watched))
    until(lambda: not (watched / "checkpoint-20").exists())
    assert not ckpt8.verify(watched / "checkpoint-20.ckpt8", tmp_path / "original").failures
    assert (watched / "checkpoint-30").is_dir()


@pytest.mark.slow
def test_a_failure_is_told_once_and_the_others_go_on(tmp_path, sources):
    """The run starts later than the watch: its folder is not there yet, nor the one above."""
    folder = tmp_path / "runs" / "run"
    process = command("chain", folder, "--watch", "--rest", 0.2)
    try:
        assert process.stdout.readline() == f"{folder}: is not there yet; waiting for it\n"
        folder.mkdir(parents=True)
        (folder / "step-1.pt").write_bytes(sources[0].read_bytes()[:-200])
        shutil.copy(sources[1], folder)
        until(lambda: containers(folder) == ["step-10.ckpt8"])
        time.sleep(1)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.count("\n") == 1
    assert "step-1.pt" in err
