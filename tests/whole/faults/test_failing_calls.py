"""Every call that writes, flushes, makes or renames fails once, and so does every read: one error, nothing is left."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from functools import partial

import pytest
import torch
from budget_kit import run_of
from failing_calls import CODES, Calls
from faults_kit import digest, remove
from flips_kit import make_sample, places
from test_salvage import damage

import ckpt8
from ckpt8.core.errors import InputError, OutputError

tree = partial(run_of, [(70, 80)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Sources by name."""
    folder = tmp_path_factory.mktemp("made")
    torch.save(tree(), folder / "run.pt")
    ckpt8.compress(folder / "run.pt")
    make_sample(folder, "directory")
    name = next(name for name, _, _ in places((folder / "run.ckpt8").read_bytes()) if name.endswith("/bytes"))
    damage(folder / "run.ckpt8", folder / "damaged.ckpt8", name)
    return folder


OPERATIONS = {
    "compress": ("run.pt", "out.ckpt8", lambda source, target: ckpt8.compress(source, target, force=True)),
    "archive": ("run.pt", "out.ckpt8", lambda source, target: ckpt8.compress(source, target, budget=1, force=True)),
    "save": ("run.pt", "out.ckpt8", lambda source, target: ckpt8.save(tree(), target)),
    "background": ("run.pt", "out.ckpt8", lambda source, target: ckpt8.save(tree(), target, background=True).result()),
    "restore": ("run.ckpt8", "out.pt", lambda source, target: ckpt8.restore(source, target, force=True)),
    "directory": ("directory.ckpt8", "out", lambda source, target: ckpt8.restore(source, target, force=True)),
    "salvage": ("damaged.ckpt8", "out", lambda source, target: ckpt8.restore(source, target, force=True, salvage=True)),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_write_fails_once(name, old, made, tmp_path, monkeypatch):
    source, target, run = OPERATIONS[name]
    source, folder = made / source, tmp_path / "here"
    (tmp_path / "tmp").mkdir()
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    before = digest(source)
    run(source, folder / target)
    target = next(folder.iterdir())
    expected = digest(target)
    if not old:
        remove(target)
    present = digest(target) if old else None
    kinds = set()
    for turn in itertools.count(1):
        calls = Calls(turn, CODES[turn % 2])
        with monkeypatch.context() as patch:
            calls.writes(patch)
            try:
                run(source, folder / OPERATIONS[name][1])
                failed = None
            except OutputError as exc:
                failed = str(exc)
        assert digest(source) == before
        assert not list((tmp_path / "tmp").iterdir())
        if len(calls.seen) < turn:
            assert failed is None
            break
        kinds.add(calls.seen[-1])
        assert failed is not None
        assert os.strerror(calls.code) in failed
        left = {each.name: digest(each) for each in folder.iterdir()}
        whole = {target.name: expected}
        # Only what comes after the rename may leave the new target: the flush of its directory.
        assert left in (({target.name: present} if old else {}), whole)
        if left == whole and not old:
            assert calls.seen[-1] == "fsync"
            remove(target)
    assert turn > 5
    assert {"fsync", "renameat2" if name == "directory" else "fsync"} <= kinds


READS = {
    "compress": lambda folder, target: ckpt8.compress(folder / "run.pt", target),
    "compress directory": lambda folder, target: ckpt8.compress(folder / "run", target),
    "restore": lambda folder, target: ckpt8.restore(folder / "run.ckpt8", target),
    "restore directory": lambda folder, target: ckpt8.restore(folder / "directory.ckpt8", target),
    "verify": lambda folder, target: ckpt8.verify(folder / "run.ckpt8", folder / "run.pt"),
    "load": lambda folder, target: ckpt8.load(folder / "run.ckpt8"),
}


@pytest.mark.by_default("restore", "restore directory", "load")
@pytest.mark.parametrize("name", READS)
def test_every_read_fails_once(name, made, tmp_path, monkeypatch):
    """Recognising a file may fail to read and leave it to opening it to read, and complain, again."""
    before, complaints = digest(made), 0
    READS[name](made, tmp_path / "whole")
    writes = (tmp_path / "whole").exists()
    for turn in itertools.count(1):
        calls = Calls(turn, errno.EIO)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", calls.wrap("preadv", os.preadv))
            try:
                READS[name](made, tmp_path / "out")
                failed = None
            except (InputError, OutputError) as exc:
                failed = str(exc)
                # What was written is read before it gets its name.
                is_own = isinstance(exc, OutputError)
        assert digest(made) == before
        if failed is None:
            assert {each.name for each in tmp_path.iterdir()} == ({"whole", "out"} if writes else set())
            if writes:
                assert digest(tmp_path / "out") == digest(tmp_path / "whole")
                remove(tmp_path / "out")
        else:
            complaints += 1
            assert "read failed" in failed
            assert ("would not be readable" in failed) == is_own
            assert "Input/output error" in failed
            assert [each.name for each in tmp_path.iterdir()] == ["whole"] * writes
        if len(calls.seen) < turn:
            break
    assert complaints > max(5, 0.8 * turn)
