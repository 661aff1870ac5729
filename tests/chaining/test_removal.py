"""``--remove``: what goes was verified against its container, and everything else stays."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest
import torch
from chain_command_kit import make_run
from failing_calls import CODES, Calls
from faults_kit import digest

import ckpt8
from ckpt8.chaining import removal
from ckpt8.chaining.jobs import Job, Settings
from ckpt8.chaining.removal import finish_removals, remove_verified
from ckpt8.container.header import is_container


@pytest.fixture
def run(tmp_path):
    """A checkpoint and its container."""
    (source,) = make_run(tmp_path / "run", 1)
    ckpt8.compress(source)
    return source, source.with_suffix(".ckpt8")


@pytest.fixture
def directory(tmp_path, inputs):
    """A directory with links and folders, its container, and what its links lead to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(inputs / "views.pt", outside / "shared.pt")
    source = tmp_path / "run" / "checkpoint-5"
    (source / "sub" / "empty").mkdir(parents=True)
    make_run(source / "sub", 1)
    shutil.copy(inputs / "views.pt", source / "model.pt")
    (source / "inside.pt").symlink_to("model.pt")
    (source / "shared.pt").symlink_to(outside / "shared.pt")
    ckpt8.compress(source)
    return source, source.with_name("checkpoint-5.ckpt8"), outside


def test_a_file_goes(run):
    source, container = run
    remove_verified(source, container)
    assert list(source.parent.iterdir()) == [container]


def test_a_directory_goes_and_what_its_links_lead_to_stays(directory):
    source, container, outside = directory
    before = digest(outside)
    remove_verified(source, container)
    assert list(source.parent.iterdir()) == [container]
    assert digest(outside) == before


def change_value(source, container):
    tree = torch.load(source)
    tree["model"]["0.weight"][0, 0] += 1
    torch.save(tree, source)


def other_checkpoint(source, container):
    make_run(source.parent / "other", 1, seed=1)[0].replace(source)


def flip_in_container(source, container):
    content = bytearray(container.read_bytes())
    content[len(content) // 2] ^= 1
    container.write_bytes(content)


def without_statistics(source, container):
    ckpt8.compress(source, container, stats=False, force=True)


def no_container(source, container):
    container.unlink()


def flip_in_source(source, container):
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 1
    source.write_bytes(content)


@pytest.mark.parametrize(
    "spoil", [change_value, other_checkpoint, flip_in_container, without_statistics, no_container, flip_in_source]
)
def test_what_does_not_agree_stays(spoil, run):
    source, container = run
    spoil(source, container)
    before = digest(source)
    with pytest.raises(ckpt8.Ckpt8Error):
        remove_verified(source, container)
    assert digest(source) == before
    assert not [path for path in source.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("moment", ["while it is verified", "as it is renamed"])
def test_a_directory_that_changes_stays(moment, directory, monkeypatch):
    """A file that another process adds at the last moment is not lost."""
    source, container, _ = directory
    add = (source / "rng_state_1.pth").write_text
    verify, rename = removal.verify, removal.rename_new

    def verify_then_add(*args, **options):
        result = verify(*args, **options)
        add("late")
        return result

    def add_then_rename(old, new):
        if old == source:
            add("late")
        rename(old, new)

    if moment == "while it is verified":
        monkeypatch.setattr(removal, "verify", verify_then_add)
    else:
        monkeypatch.setattr(removal, "rename_new", add_then_rename)
    with pytest.raises(ckpt8.InputError, match="it changed after"):
        remove_verified(source, container)
    assert sorted(path.name for path in source.parent.iterdir()) == ["checkpoint-5", "checkpoint-5.ckpt8"]
    assert (source / "rng_state_1.pth").read_text() == "late"
    assert (source / "model.pt").is_file()


@pytest.mark.parametrize("changed", ["container", "base"])
def test_a_source_stays_where_what_was_verified_is_replaced(changed, tmp_path, monkeypatch):
    *_, source = make_run(tmp_path / "run", 2)
    key, container = (source.with_name(f"step-{step}.ckpt8") for step in (5, 10))
    ckpt8.compress(source.with_name("step-5.pt"), preset="archive")
    ckpt8.compress(source, preset="archive", base=key)

    def verify_then_replace(*args, **options):
        result = verify(*args, **options)
        shutil.copy(path, path.with_suffix(".copy"))
        path.with_suffix(".copy").replace(path)
        return result

    path, verify = {"container": container, "base": key}[changed], removal.verify
    monkeypatch.setattr(removal, "verify", verify_then_replace)
    with pytest.raises(ckpt8.InputError, match=f"is kept: {path} changed"):
        remove_verified(source, container)
    assert source.is_file()


def test_a_source_that_holds_the_base_of_its_container_stays(tmp_path):
    first, second = make_run(tmp_path / "run", 2)
    source = tmp_path / "checkpoint-10"
    source.mkdir()
    second.rename(source / "model.pt")
    other = tmp_path / "checkpoint-5"
    other.mkdir()
    first.rename(other / "model.pt")
    ckpt8.compress(other, source / "base.ckpt8", preset="archive")
    container = tmp_path / "checkpoint-10.ckpt8"
    ckpt8.compress(source, preset="archive", base=source / "base.ckpt8")
    before = digest(source)
    with pytest.raises(ckpt8.UsageError, match=r"base\.ckpt8 in it"):
        remove_verified(source, container)
    assert digest(source) == before


def test_what_a_kill_left_stays_where_its_container_needs_a_base_that_is_gone(tmp_path, monkeypatch):
    first, source = make_run(tmp_path / "run", 2)
    key, container = (path.with_suffix(".ckpt8") for path in (first, source))
    ckpt8.compress(first, preset="archive")
    ckpt8.compress(source, preset="archive", base=key)
    with monkeypatch.context() as patch:
        patch.setattr(removal, "remove", lambda _: None)
        with pytest.raises(ckpt8.OutputError, match="remove it yourself"):
            remove_verified(source, container)
    (aside,) = (path for path in source.parent.iterdir() if path.name.startswith("."))
    hidden = key.rename(tmp_path / "elsewhere")
    finish_removals(source.parent, source.parent)
    assert aside.is_file()
    hidden.rename(key)
    finish_removals(source.parent, source.parent)
    assert not aside.exists()


def test_links_homes_and_mount_points_stay(run, monkeypatch):
    source, container = run
    link = source.with_name("link.pt")
    link.symlink_to(source.name)
    with pytest.raises(ckpt8.UsageError, match="is a link"):
        remove_verified(link, container)
    for setting in ("here", "home"):
        with monkeypatch.context() as patch:
            if setting == "here":
                patch.chdir(source.parent)
            else:
                patch.setenv("HOME", str(source.parent / "me"))
                (source.parent / "me").mkdir()
            with pytest.raises(ckpt8.UsageError, match="current or the home"):
                remove_verified(source.parent, container)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: str(path).endswith("me"))
        with pytest.raises(ckpt8.OutputError, match="another file system"):
            remove_verified(source.parent, container)
    assert link.is_symlink()
    assert source.is_file()


def test_a_folder_that_cannot_be_written(directory, monkeypatch):
    """Root may write anywhere, so the system's answer is changed."""
    source, container, _ = directory
    for folder in (source / "sub", source.parent):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode, folder=folder: path != folder)
            with pytest.raises(ckpt8.OutputError, match="cannot be written"):
                remove_verified(source, container)
        assert (source / "model.pt").is_file()


def test_a_rename_that_fails(run, monkeypatch):
    source, container = run

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(removal, "rename_new", refuse)
    with pytest.raises(ckpt8.OutputError, match="cannot be removed: Operation not permitted"):
        remove_verified(source, container)
    assert source.is_file()


def test_the_next_run_finishes_what_a_killed_one_began(run):
    source, container = run
    seal = container.read_bytes()[-32:].hex()[:16]
    aside = source.with_name(f".{source.name}.{seal}.ckpt8-removed")
    source.rename(aside)
    other = source.with_name(f".other.pt.{'0' * 16}.ckpt8-removed")
    other.write_text("its container is not here")
    finish_removals(source.parent, source.parent)
    assert sorted(source.parent.iterdir()) == sorted([container, other])
    assert is_container(container)


def test_every_call_of_the_system_fails_once(tmp_path, monkeypatch):
    """Compress, verify and remove: after each failure the original is there, or a container that holds against it."""
    kept = make_run(tmp_path / "kept", 1)[0]
    folder = tmp_path / "run"
    for turn in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        source = shutil.copytree(kept.parent, folder) / kept.name
        calls = Calls(turn, CODES[turn % 2])
        with monkeypatch.context() as patch:
            calls.writes(patch)
            outcome = Job(source, source.with_suffix(".ckpt8"), Settings(remove=True)).run()
        if len(calls.seen) < turn:
            assert outcome.error is None
            assert outcome.removed
            break
        assert isinstance(outcome.error, ckpt8.OutputError)
        assert digest(source) == digest(kept)
        if outcome.target.exists():
            assert not ckpt8.verify(outcome.target, kept).failures
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert turn > 5
