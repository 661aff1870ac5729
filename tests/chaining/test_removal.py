"""``--remove``: what goes was verified against its container, and everything else stays."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import warnings

import pytest
import torch
from chain_command_kit import make_run
from disk_kit import flip_bit
from failing_calls import Calls
from faults_kit import digest

import ckpt8
from ckpt8.chaining import jobs as removal
from ckpt8.chaining.chain import collected
from ckpt8.chaining.jobs import Settings, finishing, remove_verified
from ckpt8.compressing import chosen_base
from ckpt8.container.reader import ContainerReader


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


@pytest.mark.slow
def test_a_directory_goes_and_what_its_links_lead_to_stays(directory):
    source, container, outside = directory
    before = digest(outside)
    remove_verified(source, container)
    assert list(source.parent.iterdir()) == [container]
    assert digest(outside) == before


def change_value(source, _):
    tree = torch.load(source)
    tree["model"]["0.weight"][0, 0] += 1
    torch.save(tree, source)


SPOILS = {
    "another value": change_value,
    "another checkpoint": lambda source, _: make_run(source.parent / "other", 1, seed=1)[0].replace(source),
    "a bit of the container": lambda _, container: flip_bit(container),
    "no statistics": lambda source, container: ckpt8.compress(source, container, stats=False, force=True),
    "no container": lambda _, container: container.unlink(),
    "a bit of the source": lambda source, _: flip_bit(source),
}


@pytest.mark.parametrize("spoiled", SPOILS)
def test_what_does_not_agree_stays(spoiled, run):
    source, container = run
    SPOILS[spoiled](source, container)
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


@pytest.mark.slow
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


def set_aside(source, container, monkeypatch):
    """What a kill between the rename and the removal leaves."""
    with monkeypatch.context() as patch:
        patch.setattr(removal, "_remove", lambda _: None)
        patch.setattr(removal, "_going", lambda aside: aside)
        remove_verified(source, container)
    (aside,) = (path for path in source.parent.iterdir() if path.name.startswith("."))
    return aside


def finish(folder, *homes, preset=None):
    """The outcomes of finishing what is in a folder, by default with the preset that was asked for before."""
    preset = preset or ("archive" if folder.name == "chain" else None)
    return [job.run() for job in finishing(folder, homes, Settings({"preset": preset}, remove=True))]


@pytest.fixture(params=["file", "directory", "long name", "delta"])
def aside(request, run, directory, tmp_path, monkeypatch):
    """A source that a kill left, its container, the files to damage, and where the original was."""
    if request.param == "directory":
        source, container, _ = directory
    elif request.param == "delta":
        source = make_run(tmp_path / "chain", 2)[1]
        key, container = (source.with_name(f"step-{step}.ckpt8") for step in (5, 10))
        ckpt8.compress(source.with_name("step-5.pt"), preset="archive")
        ckpt8.compress(source, preset="archive", base=key)
    else:
        source, container = run
    if request.param == "long name":
        source, container = (path.rename(path.with_name("é" * 110 + path.suffix)) for path in run)
        ckpt8.compress(source, container, force=True)
    whole = digest(source)
    return source, whole, container, set_aside(source, container, monkeypatch)


@pytest.mark.by_default("delta")
def test_the_next_run_finishes_what_a_killed_one_began(aside):
    source, _, container, left = aside
    assert not source.exists()
    (outcome,) = finish(source.parent)
    assert (outcome.source, outcome.target, outcome.present, outcome.removed) == (source, container, True, True)
    assert not left.exists()
    assert not ckpt8.verify(container).failures


@pytest.mark.parametrize(
    ("aside", "what"),
    [
        *(("file", what) for what in ("a frame", "the seal", "gone", "another one is there", "the original")),
        ("directory", "a frame"),
        ("long name", "a frame"),
        ("long name", "gone"),
        ("delta", "the base"),
        ("delta", "other settings"),
    ],
    indirect=["aside"],
)
def test_what_does_not_hold_any_more_comes_back(what, aside, tmp_path):
    source, whole, container, left = aside
    if what == "the base":
        flip_bit(container.with_name("step-5.ckpt8"), 0.5)
    elif what == "gone":
        container.rename(tmp_path / "elsewhere")
    elif what == "the original":
        flip_bit(next(left.rglob("step-5.pt")) if left.is_dir() else left, 0.5)
        whole = digest(left)
    elif what != "other settings":
        flip_bit(container, 0.999999 if what == "the seal" else 0.5)
    if what == "another one is there":
        source.write_text("new")
    (outcome,) = finish(source.parent, preset="lossless" if what == "other settings" else None)
    assert isinstance(outcome.error, (ckpt8.InputError, ckpt8.CheckFailedError))
    assert not outcome.removed
    assert ": its removal was interrupted, and is not finished: " in str(outcome.error)
    if what == "another one is there":
        assert digest(left) == whole
        assert source.read_text() == "new"
        assert str(outcome.error).endswith(f"it stays at {left}")
    elif source.name.startswith("é") and what == "gone":
        assert digest(left) == whole
        assert str(outcome.error).endswith(f"it stays at {left}, since its whole name is not known")
    else:
        assert digest(source) == whole
        assert not left.exists()
        assert str(outcome.error).endswith(" is back")


def test_of_a_directory_half_gone_the_rest_goes_or_is_named(directory, monkeypatch):
    """It never gets its name back."""
    source, container, _ = directory

    def remove_some(path):
        (path / "model.pt").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(removal, "remove", remove_some)
        with pytest.raises(KeyboardInterrupt):
            remove_verified(source, container)
    (left,) = (path for path in source.parent.iterdir() if path.name.startswith("."))
    content = container.read_bytes()
    flip_bit(container, 0.5)
    (outcome,) = finish(source.parent)
    assert str(outcome.error).endswith(f"what is left of it is {left}, with files missing")
    assert left.is_dir()
    assert not source.exists()
    container.write_bytes(content)
    (outcome,) = finish(source.parent)
    assert (outcome.removed, outcome.error) == (True, None)
    assert list(source.parent.iterdir()) == [container]


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


def test_a_file_goes_where_its_rename_does_not_fail(run, monkeypatch):
    source, container = run

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(removal, "rename_new", refuse)
    with pytest.raises(ckpt8.OutputError, match="cannot be removed: Operation not permitted"):
        remove_verified(source, container)
    assert source.is_file()
    monkeypatch.undo()
    remove_verified(source, container)
    assert list(source.parent.iterdir()) == [container]


def chain_of(folder):
    outcomes = ckpt8.chain(folder, preset="archive", remove=True, rest=0)
    return next((outcome.error for outcome in outcomes if outcome.error), None)


def several_of(folder):
    sources = sorted(folder.glob("*.pt"))
    options = {"preset": "archive", "budget": None, "rules": (), "device": "auto", "threads": 1}
    settings = Settings({**options, "stats": True, "max_update_error": None, "base": "auto"}, remove=True)
    with collected(sources, None, settings, force=False) as batches:
        return next((error for jobs in batches for job in jobs if (error := job.run().error)), None)


def rebase_of(folder):
    try:
        ckpt8.rebase(folder / "step-10.ckpt8", threads=1)
    except ckpt8.OutputError as error:
        return error
    return None


ACTS = {"chain --remove": chain_of, "compress A B --remove": several_of, "rebase": rebase_of}


@pytest.mark.by_default("rebase")
@pytest.mark.parametrize(
    "act", [pytest.param("chain --remove", marks=pytest.mark.slow), "compress A B --remove", "rebase"]
)
def test_every_call_of_the_system_fails_once(act, tmp_path, monkeypatch):
    """Each original is there after each failure, or a container that holds against it, and the line names the room."""
    kept, folder = tmp_path / "kept", tmp_path / "run"
    make_run(kept, 2, width=64 if act == "rebase" else 32)
    originals = tmp_path / "originals"
    shutil.copytree(kept, originals)
    if act == "rebase":
        ckpt8.chain(kept, preset="archive", remove=True)
        with ContainerReader(kept / "step-10.ckpt8") as reader:
            assert reader.manifest.base is not None
    for turn in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)
        calls = Calls(turn, (errno.ENOSPC, errno.EDQUOT, errno.EIO)[turn % 3])
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            calls.writes(patch)
            patch.setattr(chosen_base, "_unlinked", set())  # the warning comes once for a folder
            error = ACTS[act](folder)
        if len(calls.seen) < turn:
            assert error is None
            break
        text = str(said[0].message if error is None else error)
        assert os.strerror(calls.code) in text
        assert isinstance(error, ckpt8.OutputError) or "files cannot be linked there" in text
        if calls.code != errno.EIO and "cannot be written" in text:
            # What is free is not said: the temporary still counts as used, and then goes.
            assert re.search(r"; it needs (at most|about) [0-9.]+ kB$", text)
        for original in originals.iterdir():
            source, container = folder / original.name, folder / f"{original.stem}.ckpt8"
            if source.exists():
                assert digest(source) == digest(original)
            if container.exists() or not source.exists():
                assert not ckpt8.verify(container, original).failures
        assert not [path.name for path in folder.rglob("*") if path.name.startswith(".")]
    assert turn > 5
