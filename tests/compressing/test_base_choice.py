"""Bases that are chosen: which container of a folder continues which, and when a new chain begins."""

from __future__ import annotations

import os
import random
import shutil
import threading

import pytest
import torch
from diff_kit import tensors_of as tensors
from run_kit import SmallRun

import ckpt8
from ckpt8.compressing import chosen_base
from ckpt8.compressing.deltas import OpenBase
from ckpt8.container.bases import KEPT, kept_name, stated_base
from ckpt8.container.kept_bases import KeptBases
from ckpt8.container.reader import ContainerReader
from ckpt8.container.writer import ContainerWriter
from ckpt8.core.errors import InputError


@pytest.fixture(scope="module")
def states():
    """Twenty checkpoints of one run, a step apart, whose steps have settled."""
    run = SmallRun()
    run.advance(150)
    return [run.advance(1) for _ in range(20)]


class Folder:
    """A folder of containers, each newer than the one before."""

    def __init__(self, path):
        self.path = path
        self.count = 0

    def save(self, tree, name=None, **options):
        """Save to the next file; return its manifest."""
        path = self.path / (name or f"step-{self.count}.ckpt8")
        manifest = ckpt8.save(tree, path, **{"budget": 1, "base": "auto", **options})
        self.count += 1
        os.utime(path, (self.count, self.count))
        return manifest

    def lose(self, name):
        """Remove a file, and the links to all."""
        (self.path / name).unlink()
        shutil.rmtree(self.path / KEPT, ignore_errors=True)

    def names(self):
        return sorted(each.name for each in self.path.glob("*.ckpt8"))


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def bases(manifests):
    return [each.base and (each.base.place, each.base.links, each.base.path) for each in manifests]


@pytest.mark.slow
def test_sixteen_files_are_a_chain_of_four_links_at_most(states, folder):
    found = bases([folder.save(tree) for tree in states])
    for k, base in enumerate(found):
        place = k % 16
        expected = (place, place.bit_count(), f"step-{k - place + (place & (place - 1))}.ckpt8")
        assert base == (expected if place else None)
    for k in (14, 15, 19):
        assert not ckpt8.verify(folder.path / f"step-{k}.ckpt8").failures


@pytest.mark.slow
def test_what_is_missing_in_a_chain_is_gone_around(states, folder):
    for tree in states[:4]:
        folder.save(tree)
    folder.lose("step-3.ckpt8")
    assert bases([folder.save(states[4])]) == [(3, 2, "step-2.ckpt8")]
    folder.lose("step-2.ckpt8")
    # Number 3 is there, but what it counts from is gone. Number 4 counts from the key.
    assert bases([folder.save(states[5])]) == [(4, 1, "step-0.ckpt8")]
    folder.lose("step-0.ckpt8")
    assert bases([folder.save(states[6])]) == [None]


@pytest.mark.slow
def test_a_chain_goes_on_from_links_to_what_was_removed(states, folder):
    for tree in states[:3]:
        folder.save(tree)
    seals = [stated_base(folder.path / f"step-{k}.ckpt8").seal for k in range(3)]
    for k in range(2):
        (folder.path / f"step-{k}.ckpt8").unlink()
    # Number 2 needs the key; number 1 was needed by nothing.
    assert bases([folder.save(states[3])]) == [(3, 2, "step-2.ckpt8")]
    (folder.path / "step-2.ckpt8").unlink()
    assert bases([folder.save(states[4])]) == [(4, 1, f"{KEPT}/{kept_name(seals[0])}")]
    assert sorted(path.name for path in (folder.path / KEPT).iterdir()) == sorted(kept_name(seals[k]) for k in (0, 2))
    assert not any(ckpt8.verify(folder.path / f"step-{k}.ckpt8").failures for k in (3, 4))


def test_a_base_that_is_removed_while_it_is_chosen_is_found_as_a_link(folder, monkeypatch):
    """As a framework does that keeps one checkpoint, while the next one is saved in the background."""
    tree, link = {"w": torch.arange(9000.0)}, KeptBases.link
    folder.save(tree, budget=None, preset="lossless")

    def late(kept, container):
        container.unlink()
        link(kept, container)

    monkeypatch.setattr(KeptBases, "link", late)
    pending = ckpt8.save(tree, folder.path / "a.ckpt8", preset="lossless", base="auto", background=True)
    assert pending.result().base.path == "step-0.ckpt8"
    assert [path.name for path in folder.path.iterdir() if path.is_file()] == ["a.ckpt8"]
    assert torch.equal(ckpt8.load(folder.path / "a.ckpt8")["w"], tree["w"])


@pytest.mark.parametrize("moment", ["opened", "linked"])
def test_a_base_that_another_save_replaces_while_it_is_chosen_is_none(moment, folder, tmp_path_factory, monkeypatch):
    tree, other, link = {"w": torch.arange(9000.0)}, tmp_path_factory.mktemp("other") / "step-3.ckpt8", KeptBases.link
    for _ in range(4 if moment == "opened" else 1):
        folder.save(tree, budget=None, preset="lossless")
    if moment == "opened":  # by one that has more links than the next number
        (folder.path / "step-3.ckpt8").rename(other)
        (folder.path / "step-2.ckpt8").unlink()
    else:
        ckpt8.save(tree, other, preset="lossless")

    def replace():
        if other.exists():
            other.replace(folder.path / "step-0.ckpt8")

    class Late(OpenBase):
        def __init__(self, path, place):
            replace()
            super().__init__(path, place)

    def late(kept, container):
        replace()
        link(kept, container)

    if moment == "opened":
        monkeypatch.setattr(chosen_base, "OpenBase", Late)
    else:
        monkeypatch.setattr(KeptBases, "link", late)
    target = folder.path / "step-4.ckpt8"
    ckpt8.save(tree, target, preset="lossless", base="auto", background=True, snapshot="packed").result()
    assert torch.equal(ckpt8.load(target)["w"], tree["w"])
    assert not other.exists()


@pytest.mark.slow
def test_what_is_written_again_and_again_is_no_base(states, folder):
    """Who saves ``last.ckpt8`` would be refused, as another file needs what is there."""
    folder.save(states[0])
    for tree in states[1:3]:
        assert folder.save(tree, "last.ckpt8").base.path == "step-0.ckpt8"
        assert folder.save(tree, "best.ckpt8").base.path == "step-0.ckpt8"
    (folder.path / "step-0.ckpt8").rename(folder.path / "begun.ckpt8")
    assert folder.save(states[3], "last.ckpt8").base.path == "begun.ckpt8"
    folder.lose("begun.ckpt8")
    for name in ("last.ckpt8", "best.ckpt8", "last.ckpt8"):
        assert folder.save(states[4], name).base is None


@pytest.mark.slow
def test_the_newest_counts_where_times_are_equal_by_the_numbers_in_names(states, folder):
    for k in (9, 10):
        folder.save(states[k], f"run-{k}.ckpt8", base=None)
    for path in folder.path.iterdir():
        os.utime(path, (5, 5))
    assert folder.save(states[11], "run-11.ckpt8").base.path == "run-10.ckpt8"


def widened(tree):
    run = SmallRun(sizes=(96, 168, 80))
    return run.advance(3)


def renamed(tree):
    return {"model": {f"net.{name}": x for name, x in tree["model"].items()}, "optimizer": tree["optimizer"]}


def with_rate(factor):
    def change(tree):
        run = SmallRun()
        run.load(tree)
        run.set_rate(1e-3 * factor)
        return run.advance(1)

    return change


@pytest.mark.parametrize("factor", [4, 0.25])
def test_another_rate_goes_on_with_lattices_of_its_own(factor, states, folder):
    folder.save(states[0])
    found = folder.save(with_rate(factor)(states[1]))
    own = [each for each in found.storages if each.codec["id"] == "lattice/1" and each.base is not None]
    with ContainerReader(folder.path / "step-0.ckpt8") as reader:
        steps = [(each.codec["k"], reader.codec(each.base).k) for each in own]
    assert own
    assert all(abs(k - below) > 2 for k, below in steps)


@pytest.mark.slow
@pytest.mark.parametrize("change", [widened, renamed])
def test_another_network_begins_a_chain(change, states, folder):
    folder.save(states[0])
    assert folder.save(states[1]).base is not None
    assert folder.save(change(states[2])).base is None


@pytest.mark.by_default("options0")
@pytest.mark.parametrize(
    "options", [{"budget": 2}, {"budget": None, "preset": "archive"}, {"rules": ["*.bias=lossless"]}]
)
def test_another_budget_preset_or_rule_begins_a_chain(options, states, folder):
    folder.save(states[0])
    assert folder.save(states[1], **options).base is None
    assert folder.save(states[2], **options).base.path == "step-1.ckpt8"
    assert folder.save(states[3]).base.path == "step-0.ckpt8"


@pytest.mark.slow
def test_unrelated_weights_begin_a_chain(states, folder):
    folder.save(states[0])
    assert folder.save(SmallRun(seed=5).advance(150)).base is None


@pytest.mark.slow
def test_what_is_no_container_does_not_matter(states, folder):
    folder.save(states[0])
    (folder.path / "text.ckpt8").write_text("no container")
    (folder.path / "folder.ckpt8").mkdir()
    (folder.path / "cut.ckpt8").write_bytes((folder.path / "step-0.ckpt8").read_bytes()[:3000])
    (folder.path / "link.ckpt8").symlink_to("nothing")
    assert folder.save(states[1], "next.ckpt8").base.path == "step-0.ckpt8"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_to_a_folder_new_files_are_sound(seed, states, folder):
    """Files are lost, copied, renamed and touched between saves of various kinds; every new one reads back."""
    rng, whole = random.Random(seed), {}
    for k in range(12):
        tree = states[k % 20 if rng.random() < 0.7 else rng.randrange(20)]
        options = rng.choice([{}, {}, {}, {"budget": 2}, {"budget": None, "preset": "lossless"}])
        name = f"f{k}.ckpt8"
        manifest = folder.save(tree, name, **options)
        assert manifest.base is None or (manifest.base.links <= 4 and manifest.base.place <= 15)
        found = tensors(ckpt8.load(folder.path / name))
        if options.get("preset") == "lossless":
            assert all(torch.equal(x, tensors(tree)[path]) for path, x in found.items())
        assert not ckpt8.verify(folder.path / name).failures
        whole[name] = found
        each = folder.path / rng.choice(folder.names())
        match rng.randrange(6):
            case 0:
                each.unlink()
            case 1:
                shutil.copy2(each, folder.path / f"copy{k}.ckpt8")
            case 2:
                os.utime(each, (rng.randrange(100), rng.randrange(100)))
            case 3:
                each.rename(folder.path / f"moved{k}.ckpt8")
    sound, lost = 0, []
    for name, expected in whole.items():
        path = folder.path / name
        if path.exists():
            try:
                found = tensors(ckpt8.load(path))
            except InputError as exc:
                lost.append(str(exc))
                continue
            sound += 1
            assert all(torch.equal(x, found[key]) for key, x in expected.items())
            with ContainerReader(path) as reader:
                assert len(reader.links()) == (reader.manifest.base.links if reader.manifest.base else 0)
    assert sound >= 3
    assert all("its base" in line and "\n" not in line for line in lost)


def test_the_folder_of_a_step_does_not_make_other_names(states, tmp_path):
    for k in (0, 1):
        source = tmp_path / f"checkpoint-{k}" / f"global_step{10 + k}"
        source.mkdir(parents=True)
        torch.save(states[k], source / "state.pt")
    key, delta = (ckpt8.compress(tmp_path / f"checkpoint-{k}", budget=1, base="auto") for k in (0, 1))
    assert delta.base.seal == delta.base.key
    assert {each.codec["id"] for each in delta.storages if each.base is not None} >= {"lattice/1", "rclog/1"}
    assert {each.name for each in key.storages}.isdisjoint(each.name for each in delta.storages)


def test_the_manifest_says_why_a_chain_begins(states, folder):
    folder.save(states[0])
    run = SmallRun()
    run.load(ckpt8.load(folder.path / "step-0.ckpt8"))
    assert "resumed" in folder.save(run.checkpoint()).key_reason
    assert "no container" in folder.save(widened(states[0])).key_reason
    assert folder.save(states[2]).key_reason is None
    assert folder.save(states[3], base=None).key_reason is None


@pytest.mark.by_default("named")
@pytest.mark.parametrize("how", ["auto", "named", "background"])
def test_a_base_that_goes_while_the_next_one_is_written(how, states, folder, monkeypatch):
    """A chosen one is linked. What needs a named one fails before it has its name."""
    folder.save(states[0])
    base, finish = folder.path / "step-0.ckpt8", ContainerWriter.finish

    def finish_without_base(self, *args):
        base.unlink(missing_ok=True)
        return finish(self, *args)

    monkeypatch.setattr(ContainerWriter, "finish", finish_without_base)
    options = {"base": base} if how == "named" else {"background": how == "background"}
    if how == "named":
        with pytest.raises(InputError, match=r"its base step-0\.ckpt8 .* is missing"):
            folder.save(states[1], **options)
        assert list(folder.path.iterdir()) == []
        return
    saved = ckpt8.save(states[1], folder.path / "step-1.ckpt8", **{"budget": 1, "base": "auto", **options})
    assert (saved if how == "auto" else saved.result()).base.path == "step-0.ckpt8"
    assert not ckpt8.verify(folder.path / "step-1.ckpt8").failures


@pytest.mark.slow
def test_a_base_may_be_replaced_while_its_difference_is_written_in_the_background(states, folder, monkeypatch):
    folder.save(states[0])
    asked, finish = threading.Event(), ContainerWriter.finish

    def finish_late(self, *args):
        asked.wait(1)
        return finish(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ContainerWriter, "finish", finish_late)
        pending = ckpt8.save(states[1], folder.path / "step-1.ckpt8", budget=1, base="auto", background=True)
        ckpt8.save(states[2], folder.path / "step-0.ckpt8", budget=1)
    assert pending.result().base.path == "step-0.ckpt8"
    assert not ckpt8.verify(folder.path / "step-1.ckpt8").failures


@pytest.mark.slow
def test_a_target_that_is_a_symbolic_link_finds_its_base_from_where_it_lies(states, folder, tmp_path_factory):
    folder.save(states[0])
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "last.ckpt8").touch()
    (folder.path / "last.ckpt8").symlink_to(elsewhere / "last.ckpt8")
    assert folder.save(states[1], "last.ckpt8").base
    for path in (folder.path / "last.ckpt8", elsewhere / "last.ckpt8"):
        assert not ckpt8.verify(path).failures
