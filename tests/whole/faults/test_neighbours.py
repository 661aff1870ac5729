"""Other processes beside a run: the source changes, a second run writes the same target, a dead one left something."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from faults_kit import INPUTS, LEFTOVER, digest, make_run

import ckpt8
from ckpt8.checkpoint.replacing import checkpoint_directory, turn_in_store
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files import atomic
from ckpt8.core.files.atomic import IDLE_SECONDS, AtomicFile, partial_path
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.workers import Workers
from ckpt8.inspecting.verify import measure


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Temporaries of processes that are gone


@pytest.fixture(params=["file", "directory"])
def make(request):
    """Something that is written to, under a name."""
    if request.param == "file":
        return lambda target, force=True: AtomicFile(target, force=force)
    return lambda target, force=True: AtomicDirectory(
        target, force=force, keep=Path("/elsewhere/x"), check=checkpoint_directory(), turn=turn_in_store
    )


DYING = """
import os
import sys
from pathlib import Path
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.container.writer import AtomicFile
target = Path(sys.argv[1])
if sys.argv[2] == "file":
    made = AtomicFile(target, force=True)
else:
    made = AtomicDirectory(target, force=True, keep=Path("/elsewhere/x"), check=str, turn=len)
    (made.path / "half").write_text("half")
print(made.path.name, flush=True)
if sys.argv[3] == "wait":
    sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def start(target, kind, how):
    command = [sys.executable, "-c", DYING, str(target), kind, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name = process.stdout.readline().strip()
    assert LEFTOVER.fullmatch(name)
    return process, name


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), [("file", "directory"), ("directory", "file")], indirect=["make"])
def test_what_a_killed_process_left_is_removed_and_what_a_running_one_writes_is_not(kind, make, tmp_path):
    target = tmp_path / "out"
    alive, written = start(target, kind, "wait")
    dead, left = start(target, kind, "die")
    dead.communicate(timeout=60)
    assert names(tmp_path) == sorted([left, written])
    with make(target) as output:
        assert names(tmp_path) == sorted([written, output.path.name])
    assert names(tmp_path) == [written]
    alive.communicate(timeout=60)
    with make(target) as output:
        assert names(tmp_path) == [output.path.name]
        output.publish()
    assert names(tmp_path) == ["out"]


def test_only_temporaries_of_the_same_target_are_removed(make, tmp_path):
    kept = [".other.0123456789abcdef.ckpt8-partial", ".out.0123456789abcde.ckpt8-partial", "out.ckpt8-partial", ".out"]
    for name in kept:
        (tmp_path / name).write_text("x")
    abandoned = partial_path(tmp_path / "out")
    abandoned.write_text("x")
    with make(tmp_path / "out") as output:
        assert names(tmp_path) == sorted([*kept, output.path.name])


def test_a_link_in_their_place_is_not_followed(make, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    partial_path(tmp_path / "out").symlink_to(tmp_path / "mine")
    with make(tmp_path / "out"):
        pass
    assert (tmp_path / "mine" / "x").read_text() == "x"


@pytest.mark.parametrize("why", ["another machine", "no locks"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_where_a_lock_does_not_tell_an_hour_does(kind, why, make, tmp_path, monkeypatch):
    """Another machine's lock may not be seen; some file systems have none."""
    left = partial_path(tmp_path / "out")
    if why == "another machine":
        left = left.with_name(f".out.{'0' * 8}{'1' * 8}{atomic.SUFFIX}")
        assert LEFTOVER.fullmatch(left.name)
    else:

        def unsupported(*_):
            raise OSError(37, "No locks available")

        monkeypatch.setattr(fcntl, "flock", unsupported)
    inside = left
    if kind == "directory":
        left.mkdir()
        inside = left / "half"
    inside.write_text("half")
    now = time.time()
    os.utime(left, (now - IDLE_SECONDS - 60,) * 2)
    # The directory is old, but something in it is not.
    os.utime(inside, (now - IDLE_SECONDS + 60,) * 2)
    with make(tmp_path / "out"):
        assert left.name in names(tmp_path)
    os.utime(inside, (now - IDLE_SECONDS - 60,) * 2)
    with make(tmp_path / "out") as output:
        assert names(tmp_path) == [output.path.name]


def test_one_that_is_taken_away_before_it_is_locked_is_made_again(make, tmp_path, monkeypatch):
    hold, taken = atomic._hold, []

    def late(descriptor, path):
        if len(taken) < 2:
            taken.append(path)
            atomic.remove_abandoned(tmp_path / "out")
            assert not path.exists()
        return hold(descriptor, path)

    monkeypatch.setattr(atomic, "_hold", late)
    with make(tmp_path / "out") as output:
        assert output.path not in taken
        output.publish()
    assert names(tmp_path) == ["out"]


def test_the_temporary_directory_of_a_save(tmp_path, monkeypatch):
    """It lies where all temporary files do, is nobody else's to look into, and is cleaned up like the others."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    abandoned = partial_path(tmp_path / "tmp" / "a.pt")
    abandoned.mkdir()
    seen = []

    class Looking:
        def __reduce__(self):
            seen.extend((path.name, path.stat().st_mode & 0o777) for path in (tmp_path / "tmp").iterdir())
            return (int, ())

    with pytest.warns(UserWarning, match="will refuse it: x"):
        ckpt8.save({"w": torch.ones(3), "x": Looking()}, tmp_path / "a.ckpt8")
    ((name, mode),) = seen
    assert LEFTOVER.fullmatch(name)
    assert name != abandoned.name
    assert mode == 0o700
    assert names(tmp_path / "tmp") == []


@pytest.mark.parametrize("swap", [True, False], ids=["exchange", "two steps"])
def test_without_force_nothing_that_came_in_between_is_replaced(swap, make, tmp_path, monkeypatch):
    if not swap:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    target = tmp_path / "out"
    with make(target, force=False) as output:
        target.mkdir()
        with pytest.raises(OutputError, match="exists"):
            output.publish()
    assert names(tmp_path) == ["out"]
    target.rmdir()
    with make(target, force=False) as output:
        output.publish()
    assert names(tmp_path) == ["out"]


def test_a_directory_is_replaced_at_once(tmp_path, monkeypatch):
    """At no moment is there nothing under the name."""
    if not _can_exchange(tmp_path):
        pytest.skip("the file system cannot exchange names")
    target = tmp_path / "out"
    target.mkdir()
    shutil.copy(INPUTS / "views.pt", target / "old")
    seen = []
    removing = atomic.remove

    def watched(path):
        if path.exists():
            seen.append((sorted(each.name for each in target.iterdir()), sorted(each.name for each in path.iterdir())))
        removing(path)

    monkeypatch.setattr(atomic, "remove", watched)
    check = checkpoint_directory(["old"])
    with AtomicDirectory(
        target, force=True, keep=tmp_path / "elsewhere" / "x", check=check, turn=turn_in_store
    ) as output:
        output.make_directory("new")
        output.publish()
    assert seen == [(["new"], ["old"])]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("theirs", ["model.pt", "notes"])
def test_with_force_a_directory_that_came_in_between_is_checked_as_well(theirs, tmp_path, monkeypatch):
    target, rename = tmp_path / "out", atomic.rename_new

    def late(old, new):
        target.mkdir()
        shutil.copy(INPUTS / "views.pt", target / theirs)
        rename(old, new)

    monkeypatch.setattr(atomic, "rename_new", late)
    with AtomicDirectory(
        target, force=True, keep=tmp_path / "x", check=checkpoint_directory(), turn=turn_in_store
    ) as output:
        output.make_directory("mine")
        with nullcontext() if theirs == "model.pt" else pytest.raises(OutputError, match="no part of a checkpoint"):
            output.publish()
    assert (names(tmp_path), names(target)) == (["out"], ["mine" if theirs == "model.pt" else "notes"])


def _can_exchange(folder):
    for name in "ab":
        (folder / name).mkdir()
    try:
        return atomic._renameat2(folder / "a", folder / "b", atomic._EXCHANGE)
    finally:
        for name in "ab":
            (folder / name).rmdir()


RACING = """
import sys
import torch, ckpt8, ckpt8.restoring.restore, ckpt8.checkpoint.sources.live_object, ckpt8.compressing.chunk_encoder
from ckpt8.core.errors import OutputError
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[1])):
    try:
        exec(sys.argv[2])
    except OutputError as exc:
        print(exc, file=sys.stderr)
"""


def race(first, second, times):
    """Run two pieces of code at the same time, so many times each; what they say of failures."""
    command = [sys.executable, "-W", "ignore", "-c", RACING, str(times)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, code], **pipes) for code in (first, second)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    return "".join(said)


@pytest.mark.slow
def test_two_runs_write_one_file(tmp_path):
    source, target = tmp_path / "run.pt", tmp_path / "run.ckpt8"
    shutil.copy(INPUTS / "views.pt", source)
    code = f"ckpt8.compress({str(source)!r}, {str(target)!r}, preset=%r, force=True)"
    whole = set()
    for preset in ("flash", "lossless"):
        ckpt8.compress(source, target, preset=preset, force=True)
        whole.add(digest(target))
    said = race(code % "flash", code % "lossless", 6)
    assert said == ""
    assert digest(target) in whole
    assert ckpt8.verify(target).failures == ()
    assert names(tmp_path) == ["run.ckpt8", "run.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("force", [True, False])
def test_two_runs_write_one_directory(force, tmp_path):
    make_run(tmp_path / "run")
    ckpt8.compress(tmp_path / "run", tmp_path / "a.ckpt8", preset="lossless")
    (tmp_path / "run" / "config.json").write_text("another")
    ckpt8.compress(tmp_path / "run", tmp_path / "b.ckpt8", preset="lossless")
    for name in "ab":
        ckpt8.restore(tmp_path / f"{name}.ckpt8", tmp_path / name)
    whole = {digest(tmp_path / name) for name in "ab"}
    before = names(tmp_path)
    code = f"ckpt8.restore({str(tmp_path)!r} + '/%s.ckpt8', {str(tmp_path / 'out')!r}, force={force})"
    said = race(code % "a", code % "b", 3 if force else 1)
    assert (said == "") if force else said.count("exists; use force=True") == 1, said
    assert digest(tmp_path / "out") in whole
    assert names(tmp_path) == sorted([*before, "out"])


def swap(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[::-1])


CHANGES = {
    "touched": lambda path: os.utime(path, ns=(5, 5)),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "shorter": lambda path: os.truncate(path, path.stat().st_size // 2),
    "other bytes": lambda path: path.write_bytes(path.read_bytes()[::-1]),
    "replaced": swap,
    "removed": Path.unlink,
}


@pytest.fixture
def large(tmp_path):
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "run.pt"
    torch.save({"model": {f"w{k}": torch.randn(1 << 20, generator=generator) for k in range(6)}}, path)
    os.utime(path, ns=(1, 1))
    return path


@pytest.mark.by_default("compress-touched", "compress-shorter", "verify-removed")
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("command", ["compress", "verify"])
def test_a_source_that_changes(command, how, large, tmp_path):
    """A file that took the name of the source is another one: what is read, whole, is the one that had it."""
    target, was = tmp_path / "run.ckpt8", large.read_bytes()
    if command == "verify":
        ckpt8.compress(large, target, preset="lossless", threads=1)
    done = []

    def interfere(nbytes):
        if not done:
            done.append(nbytes)
            CHANGES[how](large)

    def run():
        if command == "compress":
            ckpt8.compress(large, target, preset="lossless", threads=1, progress=interfere)
        else:
            with ContainerReader(target) as reader, Workers(1) as workers:
                assert measure(reader, large, workers, interfere).differing == []

    if how in ("replaced", "removed"):
        run()
        ckpt8.restore(target, tmp_path / "back.pt")
        assert (tmp_path / "back.pt").read_bytes() == was
    else:
        with pytest.raises(InputError, match=r"run\.pt: .*(changed|became shorter|do not match)"):
            run()
        assert target.exists() == (command == "verify")
    assert done
    assert not [name for name in names(tmp_path) if "partial" in name]


def test_read_only(tmp_path):
    """As a user who is not root: a folder, a source and an old target that cannot be written to."""
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(INPUTS / "views.pt", folder / "run.pt")
    (folder / "run.pt").chmod(0o444)
    folder.chmod(0o555)
    child = os.fork()
    if not child:
        code = 9
        try:
            if os.getuid() == 0:
                os.chdir(folder)
                os.setgid(65534)
                os.setuid(65534)
            ckpt8.compress("run.pt", "run.ckpt8", threads=1)
        except OutputError as exc:
            code = 0 if "Permission denied" in str(exc) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    folder.chmod(0o755)
    assert code == 0
    assert names(folder) == ["run.pt"]
    # The name is replaced, not the file: what protects a target is its folder, and the absence of --force.
    ckpt8.compress(folder / "run.pt")
    (folder / "run.ckpt8").chmod(0o444)
    with pytest.raises(OutputError, match="exists"):
        ckpt8.compress(folder / "run.pt")
    ckpt8.compress(folder / "run.pt", preset="lossless", force=True)
    assert ckpt8.verify(folder / "run.ckpt8").failures == ()
