"""Links beside deltas: what is linked before a save, and what stays when containers are removed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest
from hostile_kit import container_of

from ckpt8.container.bases import KEPT, kept_name
from ckpt8.container.kept_bases import KeptBases, dependents, drop_unneeded, release, remove_container
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError


class Run:
    """A folder of containers in one chain: ``write`` makes the next, on a base that it links as a save does."""

    def __init__(self, folder):
        self.folder = folder
        self.seals = {}
        self._links = {}

    def write(self, name, base=None, path=None):
        def change(manifest):
            if base is not None:
                key = self.seals[next(iter(self.seals))]
                manifest["base"] = {
                    "seal": self.seals[base],
                    "path": path or f"{KEPT}/{kept_name(self.seals[base])}",
                    "key": key,
                    "place": len(self.seals),
                    "links": self._links[base] + 1,
                }

        target = self.folder / name
        with KeptBases(self.folder) as kept:
            if base is not None:
                kept.link(self.folder / base)
            target.write_bytes(container_of(name.encode(), "opaque", change=change))
        os.utime(target, (len(self.seals), len(self.seals)))
        with ContainerReader(target) as reader:
            self.seals[name] = reader.seal.hex()
        self._links[name] = 0 if base is None else self._links[base] + 1
        drop_unneeded(self.folder)

    def kept(self):
        """The names that the links had."""
        names = {kept_name(seal): name for name, seal in self.seals.items()}
        found = self.folder / KEPT
        return sorted(names[path.name] for path in found.iterdir()) if found.exists() else []

    def below(self, name):
        with ContainerReader(self.folder / name) as reader:
            return [each.seal.hex() for each in reader.links()]


@pytest.fixture
def run(tmp_path):
    """A run in a folder that has the name of the links itself."""
    (tmp_path / KEPT).mkdir()
    made = Run(tmp_path / KEPT)
    for name, base in (("0", None), ("1", "0.ckpt8"), ("2", "0.ckpt8"), ("3", "2.ckpt8")):
        made.write(f"{name}.ckpt8", base)
    return made


def test_a_delta_keeps_what_is_below_it(run):
    assert run.kept() == ["0.ckpt8", "2.ckpt8"]
    assert (run.folder / KEPT / kept_name(run.seals["2.ckpt8"])).samefile(run.folder / "2.ckpt8")
    for name in ("0.ckpt8", "2.ckpt8"):
        (run.folder / name).unlink()
    assert run.below("3.ckpt8") == [run.seals["2.ckpt8"], run.seals["0.ckpt8"]]
    moved = run.folder.with_name("moved")
    run.folder.rename(moved)
    run.folder = moved
    assert run.below("3.ckpt8") == [run.seals["2.ckpt8"], run.seals["0.ckpt8"]]
    assert run.below("1.ckpt8") == [run.seals["0.ckpt8"]]


def test_links_go_with_the_last_delta_that_needs_them(run):
    for name, kept in (("2", "02"), ("3", "0"), ("0", "0"), ("1", "")):
        remove_container(run.folder / f"{name}.ckpt8")
        assert run.kept() == [f"{each}.ckpt8" for each in kept]
    assert list(run.folder.iterdir()) == []


def test_a_base_that_was_not_linked_is_kept_when_it_is_removed(run):
    """As ``compress --base`` makes a delta: beside its base, under the name of that."""
    run.write("4.ckpt8", "3.ckpt8", path="3.ckpt8")
    shutil.rmtree(run.folder / KEPT)
    run.write("5.ckpt8", "4.ckpt8", path="4.ckpt8")
    shutil.rmtree(run.folder / KEPT)
    for name in ("0", "4", "2", "1", "3"):
        remove_container(run.folder / f"{name}.ckpt8")
        assert run.below("5.ckpt8") == [run.seals[f"{each}.ckpt8"] for each in (4, 3, 2, 0)]
    remove_container(run.folder / "5.ckpt8")
    assert list(run.folder.iterdir()) == []


def test_a_link_is_one_to_a_file_and_all_below_it(run):
    """Whatever else is in the folder, and under another name."""
    (run.folder / "note.txt").write_text("no container")
    (run.folder / "last.ckpt8").symlink_to("3.ckpt8")
    (run.folder / "gone.ckpt8").symlink_to("nothing")
    shutil.rmtree(run.folder / KEPT)
    with KeptBases(run.folder) as kept:
        kept.link(run.folder / "last.ckpt8")
        assert run.kept() == ["0.ckpt8", "2.ckpt8", "3.ckpt8"]
    assert not any(path.is_symlink() for path in (run.folder / KEPT).iterdir())
    drop_unneeded(run.folder)
    assert run.kept() == ["0.ckpt8", "2.ckpt8"]
    (run.folder / KEPT / kept_name(run.seals["0.ckpt8"])).unlink()
    with KeptBases(run.folder) as kept:
        kept.link(run.folder / "3.ckpt8")
        assert run.kept() == ["0.ckpt8", "2.ckpt8", "3.ckpt8"]


def test_a_base_that_is_named_by_a_symbolic_link_is_linked_itself(run):
    (run.folder / "last.ckpt8").symlink_to("1.ckpt8")
    run.write("4.ckpt8", "1.ckpt8", path="last.ckpt8")
    shutil.rmtree(run.folder / KEPT)
    remove_container(run.folder / "0.ckpt8")
    run.write("5.ckpt8", "4.ckpt8")
    assert not any(path.is_symlink() for path in (run.folder / KEPT).iterdir())
    for name in ("last", "1", "4"):
        remove_container(run.folder / f"{name}.ckpt8")
        assert run.below("5.ckpt8") == [run.seals[f"{each}.ckpt8"] for each in (4, 1, 0)]


def refuse(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_what_is_needed_stays_where_its_own_base_cannot_be_linked(run, monkeypatch):
    run.write("4.ckpt8", "3.ckpt8", path="3.ckpt8")
    shutil.rmtree(run.folder / KEPT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        with pytest.raises(OSError, match="not permitted"):
            remove_container(run.folder / "3.ckpt8")
        remove_container(run.folder / "0.ckpt8")
    assert run.below("4.ckpt8") == [run.seals[f"{each}.ckpt8"] for each in (3, 2, 0)]


def test_what_a_save_replaces_is_kept_for_those_that_need_it(run):
    (run.folder / KEPT / kept_name(run.seals["2.ckpt8"])).unlink()
    seal = run.seals["2.ckpt8"]
    with KeptBases(run.folder) as kept:
        kept.link_needed()
        assert dependents(run.folder / "2.ckpt8") == []
        (run.folder / "2.ckpt8").unlink()
        (run.folder / "2.ckpt8").write_bytes(container_of(b"another", "opaque"))
    drop_unneeded(run.folder)
    assert run.below("3.ckpt8") == [seal, run.seals["0.ckpt8"]]


@pytest.mark.parametrize("call", ["hold", "link"])
def test_what_replaces_a_file_is_not_linked_under_its_seal(call, run, monkeypatch):
    link, other = os.link, run.folder / "other"

    def late(path, target):
        shutil.copy(run.folder / "1.ckpt8", other)
        other.replace(path)
        link(path, target)

    monkeypatch.setattr(os, "link", late)
    path = run.folder / "3.ckpt8"
    with KeptBases(run.folder) as kept:
        if call == "hold":
            kept.hold(lambda: [path])
        else:
            with pytest.raises(FileNotFoundError):
                kept.link(path)
        assert run.seals["3.ckpt8"] not in kept
        assert run.kept() == ["0.ckpt8", "2.ckpt8"]


def test_nothing_goes_while_a_save_is_under_way(run):
    with KeptBases(run.folder) as kept:
        kept.link(run.folder / "3.ckpt8")
        remove_container(run.folder / "3.ckpt8")
        assert run.kept() == ["0.ckpt8", "2.ckpt8", "3.ckpt8"]
    drop_unneeded(run.folder)
    assert run.kept() == ["0.ckpt8"]


@pytest.mark.parametrize("place", [8, 20, -40])
def test_nothing_goes_where_a_container_cannot_be_read(place, run):
    """It may need any of them, also where only its name says that it is one."""
    damaged = bytearray((run.folder / "3.ckpt8").read_bytes())
    damaged[place] ^= 1
    (run.folder / "3.ckpt8").write_bytes(damaged)
    remove_container(run.folder / "1.ckpt8")
    assert run.kept() == ["0.ckpt8", "1.ckpt8", "2.ckpt8"]
    remove_container(run.folder / "3.ckpt8")
    assert run.kept() == ["0.ckpt8"]


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("call", ["link", "unlink"])
def test_a_kill_leaves_no_link_without_its_base(call, steps, run, monkeypatch):
    """After any number of its steps a save leaves links that are whole, and the next removal takes those too many."""
    real, left = getattr(os, call), [steps]

    def killed(*args, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*args, **options)

    shutil.rmtree(run.folder / KEPT)
    (run.folder / "2.ckpt8").rename(run.folder / "moved.ckpt8")
    (run.folder / "away").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, killed)
        with contextlib.suppress(KeyboardInterrupt):
            with KeptBases(run.folder) as kept:
                kept.link(run.folder / "3.ckpt8")
            (run.folder / "3.ckpt8").rename(run.folder / "away" / "3.ckpt8")
            drop_unneeded(run.folder)
    links = list((run.folder / KEPT).iterdir()) if (run.folder / KEPT).exists() else []
    assert len(links) == (steps if call == "link" and steps < 3 else max(3 - steps, 1))
    for path in links:
        with ContainerReader(path) as reader:
            reader.links()


def test_only_links_are_removed_from_the_folder(run):
    mine = run.folder / KEPT / "mine.ckpt8"
    shutil.copy(run.folder / "0.ckpt8", mine)
    for path in run.folder.glob("*.ckpt8"):
        remove_container(path)
    assert list((run.folder / KEPT).iterdir()) == [mine]


@pytest.mark.parametrize("spoilt", ["the copy", "the file", "both", "another file"])
@pytest.mark.parametrize("act", ["remove", "link"])
def test_a_copy_among_the_links_stands_for_a_file_only_if_its_frames_hold(act, spoilt, run):
    """As ``cp -r`` makes them: what is sound of the two stays, and what may be the last of its bytes."""
    key = run.folder / "0.ckpt8"
    link = run.folder / KEPT / kept_name(run.seals["0.ckpt8"])
    sound = key.read_bytes()
    damaged = sound.replace(b"0.ckpt8", b"x.ckpt8", 1)  # what it holds
    assert damaged != sound
    link.unlink()
    contents = {"the copy": (sound, damaged), "the file": (damaged, sound), "both": (damaged, damaged)}
    for path, content in zip((key, link), contents.get(spoilt, (sound, b"of somebody")), strict=True):
        path.write_bytes(content)
    is_refused = spoilt in ("both", "another file")
    with pytest.raises(FileExistsError) if is_refused else contextlib.nullcontext(), KeptBases(run.folder) as kept:
        remove_container(key) if act == "remove" else kept.link(key)
    if is_refused:
        assert (key.exists(), link.exists()) == (True, True)
        assert link.read_bytes() == contents.get(spoilt, (sound, b"of somebody"))[1]
    else:
        assert link.read_bytes() == sound
        assert key.exists() == (act == "link")


def test_links_that_folders_share_stay(run):
    """``bases`` may itself be a link: what another folder needs is not seen from here."""
    other = run.folder.with_name("other")
    other.mkdir()
    (other / KEPT).symlink_to(run.folder / KEPT)
    for name in ("0.ckpt8", "2.ckpt8"):
        (run.folder / name).unlink()
    drop_unneeded(other)
    with pytest.raises(InputError, match="is a link; containers of other folders may need"):
        release(other)
    assert run.below("3.ckpt8") == [run.seals["2.ckpt8"], run.seals["0.ckpt8"]]


@pytest.mark.parametrize("failing", ["a folder", "a file"])
def test_nothing_goes_where_the_file_system_fails(failing, run, monkeypatch):
    for name in ("1.ckpt8", "2.ckpt8", "3.ckpt8"):
        path = run.folder / name
        path.rename(path.with_suffix(".ckpt"))  # as Lightning calls them

    def failed(path, real, is_failing):
        if is_failing(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real

    real_open, real_list = Path.open, Path.iterdir
    if failing == "a folder":
        monkeypatch.setattr(Path, "iterdir", lambda path: failed(path, real_list, run.folder.__eq__)(path))
    else:
        is_failing = lambda path: path.suffix == ".ckpt"  # noqa: E731
        monkeypatch.setattr(Path, "open", lambda path, *a: failed(path, real_open, is_failing)(path, *a))
    drop_unneeded(run.folder)
    monkeypatch.undo()
    assert run.kept() == ["0.ckpt8", "2.ckpt8"]


def test_a_file_system_without_links_says_so(run, monkeypatch):
    monkeypatch.setattr(os, "link", refuse)
    with KeptBases(run.folder) as kept, pytest.raises(OSError, match="not permitted"):
        kept.link(run.folder / "1.ckpt8")


def test_what_is_no_container_is_told_by_its_first_bytes(run, monkeypatch):
    """To search its end for a manifest takes longer than to compress it."""
    run.write("alone.ckpt8")
    (run.folder / "plain.pt").write_bytes(b"PK\x03\x04" + bytes(5000))

    def search(_):
        raise AssertionError

    monkeypatch.setattr("ckpt8.container.header.frames_at_end", search)
    assert dependents(run.folder / "alone.ckpt8") == []
