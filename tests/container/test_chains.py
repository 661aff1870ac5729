"""Chains: a delta is the container that it was made from, as long as its base can be found."""

from __future__ import annotations

import shutil

import pytest
import torch
from chain_kit import chain, delta, elements, key_of, moved
from strict_reader import Strict

import ckpt8
from ckpt8.container import bases
from ckpt8.container.bases import KEPT, kept_name
from ckpt8.container.header import stated_seal
from ckpt8.container.kept_bases import dependents
from ckpt8.container.reader import ContainerReader
from ckpt8.container.writer import ContainerWriter
from ckpt8.core.errors import InputError, OutputError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A key and three deltas, and the same containers whole."""
    return chain(tmp_path_factory.mktemp("chain"), 4)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    """Lossless containers of bf16 weights."""
    return chain(tmp_path_factory.mktemp("bf16"), 3, preset="lossless", dtype=torch.bfloat16)


@pytest.mark.slow
def test_a_rebased_delta_is_the_whole_file(files, bf16, tmp_path):
    for path, whole in (*zip(*files, strict=True), *zip(*bf16, strict=True)):
        if path.name == "key.ckpt8":
            continue
        target = tmp_path / path.name
        assert ckpt8.rebase(path, target, force=True) == target
        assert target.read_bytes() == whole.read_bytes()


def test_rebase_replaces_no_newer_container(files, tmp_path, monkeypatch):
    """A run that goes on may write its checkpoint again meanwhile."""
    path = shutil.copy(files[0][1], tmp_path / "step-1.ckpt8")
    shutil.copy(files[0][0], tmp_path / files[0][0].name)
    newer = files[1][2].read_bytes()
    finish = ContainerWriter.finish

    def replaced_before(*arguments):
        (tmp_path / "newer").write_bytes(newer)
        (tmp_path / "newer").replace(path)
        return finish(*arguments)

    monkeypatch.setattr(ContainerWriter, "finish", replaced_before)
    with pytest.raises(InputError, match="changed while it was read; nothing was written"):
        ckpt8.rebase(path)
    assert path.read_bytes() == newer


def test_a_delta_read_from_the_specification_alone(files, bf16, tmp_path):
    for path in (*files[0][1:], *bf16[0][1:]):
        plain = Strict(path)
        assert len(plain.differences) >= 4
        assert plain.original() == ckpt8.restore(path, tmp_path / "back.pt", force=True).read_bytes()


def test_a_delta_opens_without_its_base(files, tmp_path):
    path = tmp_path / "alone.ckpt8"
    path.write_bytes(files[0][2].read_bytes())
    with ContainerReader(path) as reader:
        assert reader.manifest.version in ("1.5", "1.6")
        assert reader.manifest.base.links == 2
    with pytest.raises(InputError, match=rf"{path}: its base step-1.ckpt8 \(seal [0-9a-f]{{12}}\) is missing; looked"):
        ckpt8.load(path)
    (tmp_path / "step-1.ckpt8").write_bytes(files[0][3].read_bytes())
    with pytest.raises(InputError, match=r"is changed: another file is at .*step-1\.ckpt8; looked for"):
        ckpt8.load(path)
    with bases.looked_for_in([tmp_path / "none", files[0][0].parent]):
        found = ckpt8.load(path)
    for name, x in elements(files[1][2]).items():
        if name.startswith("model."):
            assert torch.equal(found["model"][name.removeprefix("model.")], x)


def test_a_base_that_is_replaced_between_a_look_at_its_seal_and_its_opening(tmp_path, monkeypatch):
    """By one with the same place in the chain: only the seal tells."""
    key = key_of(tmp_path)
    wholes = [moved(key, tmp_path / f"whole-{seed}.ckpt8", seed) for seed in (1, 2, 3)]
    first, other = (delta(whole, key, tmp_path / f"{k}.ckpt8") for k, whole in enumerate(wholes[:2]))
    path = delta(wholes[2], first, tmp_path / "last.ckpt8")
    monkeypatch.setattr(bases, "find_base", lambda container, *_, **__: other if container == path else key)
    with pytest.raises(InputError, match=f"its base {other} was replaced"):
        ckpt8.verify(path)


@pytest.mark.slow
def test_the_environment_names_folders_of_bases(files, tmp_path, monkeypatch):
    path = tmp_path / "alone.ckpt8"
    path.write_bytes(files[0][2].read_bytes())
    with pytest.raises(InputError, match="with --base-dir or CKPT8_BASE_DIR"):
        ckpt8.verify(path)
    monkeypatch.setenv("CKPT8_BASE_DIR", f"{tmp_path / 'none'}:{files[0][0].parent}:")
    assert not ckpt8.verify(path).failures
    assert len(ckpt8.load(path)) == len(ckpt8.load(files[0][2]))


def test_a_base_that_a_delta_needs_is_not_replaced(files, tmp_path):
    folder = files[0][0].parent
    torch.save({"w": torch.zeros(3)}, tmp_path / "other.pt")
    for index, path in enumerate(files[0][:-1]):
        assert dependents(path) == [files[0][index + 1]]
        before = path.read_bytes()
        for replace in (
            lambda path=path: ckpt8.compress(tmp_path / "other.pt", path, force=True),
            lambda path=path: ckpt8.save({"w": torch.zeros(3)}, path, force=True),
            lambda path=path: ckpt8.restore(files[1][0], path, force=True),
            lambda path=path: ckpt8.rebase(files[1][0], path, force=True),
            lambda path=path: ckpt8.convert(tmp_path / "other.pt", path, to="safetensors", force=True),
        ):
            with pytest.raises(OutputError, match=f"{path}: is the base of step-{index + 1}.ckpt8; rebase"):
                replace()
        assert path.read_bytes() == before
    assert dependents(files[0][-1]) == []
    with pytest.raises(OutputError, match="is the base of"):
        ckpt8.rebase(files[0][1])
    last = tmp_path / "last.ckpt8"
    last.write_bytes(files[0][-1].read_bytes())
    with bases.looked_for_in([folder]):
        assert ckpt8.rebase(last) == last
    assert last.read_bytes() == files[1][-1].read_bytes()


@pytest.fixture
def pair(tmp_path):
    """A key and its delta."""
    key = key_of(tmp_path)
    return key, delta(moved(key, tmp_path / "whole.ckpt8", 1), key, tmp_path / "delta.ckpt8")


def flipped(source, target, place):
    """A copy with another byte: in the frames, which begin at a third of a container, or in the manifest at its end."""
    target.parent.mkdir(exist_ok=True)
    content = bytearray(source.read_bytes())
    content[len(content) // 3 if place == "frames" else -100] ^= 1
    target.write_bytes(content)
    return target


def test_a_base_that_stands_elsewhere_too_may_go(pair):
    key, path = pair
    assert dependents(key) == [path]
    link = key.parent / KEPT / kept_name(stated_seal(key))
    link.parent.mkdir()
    link.hardlink_to(key)
    assert dependents(key) == []
    key.unlink()
    assert ckpt8.verify(path).failures == ()


@pytest.mark.parametrize("place", ["frames", "manifest"])
def test_a_damaged_copy_is_no_base_elsewhere(place, pair):
    key, path = pair
    for name in ("another.ckpt8", f"{KEPT}/{kept_name(stated_seal(key))}"):
        copy = flipped(key, key.parent / name, place)
        assert dependents(key) == [path]
        with pytest.raises(OutputError, match=r"key\.ckpt8: is the base of delta\.ckpt8; rebase"):
            ckpt8.save({"w": torch.zeros(3)}, key)
        shutil.copy(key, copy)
        assert dependents(key) == []
        copy.unlink()


@pytest.mark.slow
def test_what_only_states_the_seal_of_a_base_is_passed_over(pair):
    """A fake of a hundred bytes and a copy whose manifest is damaged, first by name and where the base should be."""
    key, path = pair
    seal = bytes.fromhex(stated_seal(key))
    renamed = key.rename(key.with_name("z.ckpt8"))
    key.with_name("a.ckpt8").write_bytes(b'\x30\0\0\0\0\0\0\0{"ckpt8":'.ljust(68) + seal)
    flipped(renamed, key, "manifest")
    assert ckpt8.verify(path).failures == ()
    assert dependents(renamed) == [path]
    renamed.unlink()
    with pytest.raises(InputError, match=r"damaged: header or manifest of .*key\.ckpt8 does not match the seal; "):
        ckpt8.verify(path)


def test_a_base_that_is_needed_from_another_folder_is_not_replaced(pair, tmp_path, monkeypatch):
    """The delta above ``bases/``, or in the current folder where that of its base is given."""
    key, path = pair
    for folder, dirs in ((KEPT, []), ("keys", [tmp_path / "keys"]), (f"keys/{KEPT}", [tmp_path / "keys"])):
        away = tmp_path / folder / key.name
        away.parent.mkdir(parents=True, exist_ok=True)
        key = key.rename(away)
        monkeypatch.chdir(tmp_path)
        with bases.looked_for_in(dirs):
            assert dependents(away) == [path]
            with pytest.raises(OutputError, match=rf"is the base of {path}; rebase"):
                ckpt8.save({"w": torch.zeros(3)}, away)
            assert ckpt8.verify(path).failures == ()
