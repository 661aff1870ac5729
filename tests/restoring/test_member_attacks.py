"""Containers that are hostile or damaged, and restores that fail: nothing lands outside the target, nothing stays."""

import os
import random
from pathlib import Path

import pytest
import torch
from members_kit import tampered, tree
from safetensors.torch import save_file

import ckpt8
from ckpt8.checkpoint.readers import entries
from ckpt8.container.checks import link_stays_inside, path_problem
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files import atomic
from ckpt8.inspecting.heads import read_container
from ckpt8.restoring.members import MemberWriter


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def simple(tmp_path_factory):
    """A container of a directory of a checkpoint, two files, two links and an empty directory."""
    root = tmp_path_factory.mktemp("simple") / "run"
    (root / "a" / "b").mkdir(parents=True)
    (root / "hollow").mkdir()
    save_file({"w": torch.randn(80, 80)}, root / "a" / "model.safetensors")
    (root / "a" / "b" / "one.txt").write_text("one")
    (root / "two.txt").write_text("../../etc")
    (root / "a" / "link").symlink_to("../two.txt")
    (root / "a" / "to").symlink_to("b")
    ckpt8.compress(root)
    return root.with_name("run.ckpt8")


def refused(simple, tmp_path, change, match):
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    path = tampered(simple, folder / "x.ckpt8", change)
    for target in (None, folder / "out", tmp_path / "other"):
        with pytest.raises(InputError, match=match) as caught:
            ckpt8.restore(path, target)
        assert "\n" not in str(caught.value)
    assert everything(tmp_path) == ["folder", "folder/x.ckpt8"]


def test_a_tampered_container_without_a_change_is_whole(simple, tmp_path):
    path = tampered(simple, tmp_path / "x.ckpt8", lambda manifest, members: None)
    assert tree(ckpt8.restore(path, tmp_path / "out")).keys() == tree(simple.with_suffix("")).keys()


PATHS = ["../x", "/etc/x", "a/../../x", "a/../x", "..", ".", "", "a//x", "./x", "a/.", "x/", "a\0b", "~/../x", "\ud800"]
TOO_LONG = ["x" * 256, "é" * 128, "a/" + "x" * 256 + "/b"]


@pytest.mark.parametrize("path", [*TOO_LONG, "\ud800", "a\0b"])
def test_every_command_refuses_a_name_that_no_directory_takes(path, simple, tmp_path):
    """``inspect`` and ``verify`` say it before a restore would."""
    bad = tampered(simple, tmp_path / "x.ckpt8", lambda _, members: members["two.txt"].update(path=path))
    for command in (
        lambda: ckpt8.verify(bad),
        lambda: ckpt8.diff(simple.with_suffix(""), bad),
        lambda: ckpt8.convert(bad, tmp_path / "out.pt"),
        lambda: ckpt8.load(bad),
        lambda: ckpt8.open(bad),
        lambda: ckpt8.restore(bad, tmp_path / "out"),
        lambda: ckpt8.restore(bad, tmp_path / "out", salvage=True),
        lambda: read_container(bad),
    ):
        with pytest.raises(InputError) as caught:
            command()
        said = str(caught.value)
        assert said.startswith(f"{bad}: ")
        assert repr(path)[:60].rstrip("'") in said
        assert "longer than 255 bytes" in said or path not in TOO_LONG
    assert everything(tmp_path) == ["x.ckpt8"]


LINKS = ["/etc/passwd", "../../x", "a/../../..", "b/../..", "..//x", "x/../y", "", "\0", "../../run/two.txt"]


@pytest.mark.parametrize("target", LINKS)
def test_links_that_lead_out(target, simple, tmp_path, monkeypatch):
    assert not link_stays_inside("a/link", target)
    if target in ("", "\0"):
        return  # no system makes such links
    root = tmp_path / "elsewhere" / "run"
    (root / "a").mkdir(parents=True)
    save_file({"w": torch.randn(80, 80)}, root / "model.safetensors")
    (root / "a" / "link").symlink_to(target)
    with monkeypatch.context() as patch:
        patch.setattr(entries, "link_stays_inside", lambda *_: True)
        ckpt8.compress(root, tmp_path / "x.ckpt8")
    before = everything(tmp_path)
    with pytest.raises(InputError, match="leads out of its directory; nothing is written"):
        ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "out")
    assert everything(tmp_path) == before


def test_links_that_stay():
    for path, target in zip(
        ("link", "link", "link", "a/link", "a/b/link", "a/l"),
        ("a", "a/b/", "./a", "../x", "../../x", ".."),
        strict=True,
    ):
        assert link_stays_inside(path, target)
        assert path_problem(path) is None


def test_no_chain_of_links_leads_out(tmp_path):
    """Random links that are allowed, resolved by the system: none ends outside."""
    chance = random.Random(3)
    for number in range(150):
        root = tmp_path / str(number) / "root"
        (root / "a" / "c").mkdir(parents=True)
        for name in ("b", "a/d", "a/c/e", "a/c/f"):
            target = "/".join(chance.choices(["..", "a", "b", "c", "d", "e", "f", "."], k=chance.randint(1, 5)))
            if link_stays_inside(name, target):
                (root / name).symlink_to(target)
        for name in ("a", "b", "a/c", "a/d", "a/c/e", "a/c/f"):
            assert str(os.path.realpath(root / name) + "/").startswith(f"{os.path.realpath(root)}/")


def two(**changes):
    """The file two.txt as another member."""
    return lambda _, members: members["two.txt"].update(changes)


def model(**changes):
    return lambda _, members: members["a/model.safetensors"].update(changes)


def as_one(_, members):
    members["two.txt"].update({key: members["a/b/one.txt"][key] for key in ("skeleton", "size")})


MANIFESTS = {
    "no directory": (lambda manifest, _: manifest.pop("directory"), "malformed"),
    "no members": (lambda manifest, _: manifest.update(members=[]), "malformed"),
    "a directory that is no text": (lambda manifest, _: manifest.update(directory=3), "malformed"),
    "a directory with content": (two(format="directory"), "malformed"),
    "a file with storages": (model(format="file"), "malformed"),
    "a link with storages": (model(format="symlink"), "malformed"),
    "an empty link": (lambda _, members: members["hollow"].update(format="symlink"), "malformed"),
    "a storage twice": (as_one, "malformed"),
    "another size": (two(size=10), "malformed"),
    "a member twice": (lambda manifest, members: manifest["members"].append(members["two.txt"]), "malformed"),
    # The content of two.txt is ../../etc: as a link at the top it leads out.
    "a link with the content of a hostile file": (two(format="symlink"), "leads out of its directory"),
    "a path of a link": (two(path="a/to"), "two members"),
    **{path: (two(path=path), "path leaves|malformed") for path in PATHS},
    **{
        path: (two(path=path), "lies below another member")
        for path in ("a/link/x", "a/to/x", "a/b/one.txt/x", "hollow/x")
    },
}
"""Those that contradict themselves, and paths that leave the directory or lead through a link or a file."""


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests_that_cannot_be(kind, simple, tmp_path):
    refused(simple, tmp_path, *MANIFESTS[kind])


def test_names_that_differ_in_case_are_two_files_or_none(simple, tmp_path, monkeypatch):
    path = tampered(simple, tmp_path / "x.ckpt8", lambda _, members: members["two.txt"].update(path="a/B/ONE.txt"))
    found = tree(ckpt8.restore(path, tmp_path / "out"))
    assert (found["a/b/one.txt"], found["a/B/ONE.txt"]) == (b"one", b"../../etc")
    # A file system that does not tell them apart: the second is an error, and the first is not overwritten.
    mkdir, listed = Path.mkdir, {}

    def folding(self, *args, **kwargs):
        if str(self).lower() in listed:
            raise FileExistsError(17, "File exists")
        listed[str(self).lower()] = 1
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", folding)
    with pytest.raises(OutputError, match="File exists"):
        ckpt8.restore(path, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.ckpt8"]


# Targets


def test_existing_targets(simple, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("x")
    for existing, said in ((target, r"holds 'mine\.txt'"), (tmp_path / "file", "is not a directory")):
        with pytest.raises(OutputError, match="exists"):
            ckpt8.restore(simple, existing)
        with pytest.raises(OutputError, match=said):
            ckpt8.restore(simple, existing, force=True)
    assert (target / "mine.txt").read_text() == "mine"
    (target / "mine.txt").unlink()
    torch.save({}, target / "optimizer.pt")
    ckpt8.restore(simple, target, force=True)
    assert "optimizer.pt" not in tree(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_force_never_replaces_what_holds_the_container_or_the_current_directory(simple, tmp_path, monkeypatch):
    (tmp_path / "home" / "here").mkdir(parents=True)
    path = tmp_path / "home" / "x.ckpt8"
    path.write_bytes(simple.read_bytes())
    monkeypatch.chdir(tmp_path / "home" / "here")
    for target in (tmp_path / "home", tmp_path, Path()):
        with pytest.raises(OutputError, match="holds the file that is read, or the current directory"):
            ckpt8.restore(path, target, force=True)
    assert everything(tmp_path) == ["home", "home/here", "home/x.ckpt8"]


def test_a_link_in_place_of_the_target_is_followed_to_a_directory(simple, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    ckpt8.restore(simple, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert "two.txt" in tree(tmp_path / "real")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_no_output_and_what_was_there(error, force, simple, tmp_path, monkeypatch):
    target = tmp_path / "out"
    if force:
        target.mkdir()
        torch.save({}, target / "optimizer.pt")
    before = everything(tmp_path)
    write, calls = MemberWriter.write, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise error("no")
        write(*args)

    def failed(*_):
        raise OSError(5, "no")

    rename = Path.rename

    def refusing(self, other):
        if self.name.endswith("partial") and Path(other).name == "out" and "optimizer.pt" not in tree(self):
            raise OSError(5, "no")
        return rename(self, other)

    # At the last moment the names cannot be exchanged; or the system cannot do that, and a step of two fails.
    for place, name, broken, expected in (
        (MemberWriter, "write", failing, error),
        (atomic, "_renameat2", failed, OutputError),
        (Path, "rename", refusing, OutputError),
    ):
        with monkeypatch.context() as patch:
            if place is Path:
                patch.setattr(atomic, "_renameat2", lambda *_: False)
            patch.setattr(place, name, broken)
            with pytest.raises(expected):
                ckpt8.restore(simple, target, force=force)
        assert everything(tmp_path) == before
