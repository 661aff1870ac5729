"""Which name an output has that nobody named: that of the input, never one that a container states."""

from __future__ import annotations

import json

import pytest
import torch
from hostile_kit import container_of
from safetensors.torch import save_file

import ckpt8
from ckpt8.container.header import SEAL
from ckpt8.core.errors import OutputError

TREE = {"model": {"w": torch.arange(6400.0).reshape(80, 80)}}


def packed(folder, stored, container, write=torch.save):
    """A container in ``folder`` of a file that was called ``stored``; nothing else is there."""
    source = folder / "elsewhere" / stored
    source.parent.mkdir(parents=True)
    # torch writes to no name that is all suffix.
    write(TREE["model"] if write is save_file else TREE, source.with_name("new"))
    source.with_name("new").rename(source)
    ckpt8.compress(source, folder / container)
    source.unlink()
    source.parent.rmdir()
    return folder / container


def packed_directory(folder, stored, container):
    """A container of a directory that was called ``stored``."""
    root = folder / "elsewhere" / stored
    root.mkdir(parents=True)
    save_file(TREE["model"], root / "model.safetensors")
    (root / "config.json").write_text("{}")
    ckpt8.compress(root, folder / container)
    (root / "model.safetensors").unlink()
    (root / "config.json").unlink()
    root.rmdir()
    root.parent.rmdir()
    return folder / container


def legacy(tree, path):
    torch.save(tree, path, _use_new_zipfile_serialization=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


FILES = {
    # stored name, name of the container: name of the target
    "the same": ("run.pt", "run.ckpt8", "run.pt"),
    "renamed": ("run.pt", "best.ckpt8", "best.pt"),
    "renamed, another suffix": ("run.ckpt", "best.ckpt8", "best.ckpt"),
    "every suffix": ("pytorch_model.bin", "pytorch_model.ckpt8", "pytorch_model.bin"),
    "upper case": ("RUN.PTH", "RUN.CKPT8", "RUN.PTH"),
    "dots": ("epoch=1-loss=0.5.pt", "epoch=1-loss=0.5.ckpt8", "epoch=1-loss=0.5.pt"),
    "no suffix": ("weights", "weights.ckpt8", "weights.pt"),
    "another suffix": ("weights.model", "weights.ckpt8", "weights.pt"),
    "a module": ("torch.py", "run.ckpt8", "run.pt"),
    "a start-up file": (".bashrc", "run.ckpt8", "run.pt"),
    "hidden, with a suffix": (".profile.pt", "run.ckpt8", "run.pt"),
    "a container": ("run.ckpt8", "x.ckpt8", "x.pt"),
    "as Lightning names it": ("last.pt", "last.ckpt", "last.pt"),
    "no suffix of its own": ("run.pt", "downloaded", "downloaded.pt"),
    "both suffixes": ("last.ckpt", "last.ckpt.ckpt8", "last.ckpt"),
    "both suffixes, renamed": ("last.ckpt", "best.pt.ckpt8", "best.pt"),
    "a suffix of another kind": ("run.pt", "a.safetensors.ckpt8", "a.safetensors.pt"),
    "a suffix that is none": ("run.pt", "run.v2", "run.v2.pt"),
    "only a suffix": ("run.pt", ".ckpt8", ".ckpt8.pt"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("case", FILES)
def test_a_file_has_the_name_of_its_container(case, force, tmp_path):
    stored, container, target = FILES[case]
    path = packed(tmp_path, stored, container)
    assert ckpt8.restore(path, force=force) == tmp_path / target
    assert names(tmp_path) == sorted([container, target])
    restored = torch.load(tmp_path / target, weights_only=True)["model"]["w"]
    assert torch.allclose(restored, TREE["model"]["w"], rtol=1e-4)


@pytest.mark.parametrize(("write", "suffix"), [(torch.save, ".pt"), (legacy, ".pt"), (save_file, ".safetensors")])
def test_the_suffix_says_what_the_file_is(write, suffix, tmp_path):
    assert ckpt8.restore(packed(tmp_path, "weights.model", "x.ckpt8", write)) == tmp_path / f"x{suffix}"


def test_bytes_of_no_known_format(tmp_path):
    (tmp_path / "x.ckpt8").write_bytes(container_of(b"import os", "file", name="torch.py"))
    assert ckpt8.restore(tmp_path / "x.ckpt8") == tmp_path / "x.bin"
    assert names(tmp_path) == ["x.bin", "x.ckpt8"]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", ".", "..", "a\0b", "x/", "./x"])
def test_a_stored_name_that_is_a_path_is_not_used(name, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x.ckpt8").write_bytes(container_of(b"abc", "file", name=name))
    assert ckpt8.restore(folder / "x.ckpt8") == folder / "x.bin"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "x.bin", "x.ckpt8"]


@pytest.mark.parametrize(
    ("stored", "container", "target"),
    [
        ("checkpoint-500", "checkpoint-500.ckpt8", "checkpoint-500"),
        ("checkpoint-1.5", "checkpoint-1.5.ckpt8", "checkpoint-1.5"),
        ("Documents", "run.ckpt8", "run"),
        (".ssh", "run.ckpt8", "run"),
        ("run", "best.CKPT8", "best"),
        ("torch", "run.v2.ckpt8", "run.v2"),
    ],
)
def test_a_directory_has_the_name_of_its_container(stored, container, target, tmp_path):
    path = packed_directory(tmp_path, stored, container)
    assert ckpt8.restore(path) == tmp_path / target
    assert names(tmp_path) == sorted([container, target])
    assert names(tmp_path / target) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("container", ["..ckpt8", "...ckpt8", "run"])
def test_a_container_whose_name_is_no_name_for_a_directory(container, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = packed_directory(folder, "Documents", container)
    monkeypatch.chdir(tmp_path)
    for force in (False, True):
        with pytest.raises(OutputError, match="give"):
            ckpt8.restore(path, force=force)
    assert names(folder) == [container]
    assert ckpt8.restore(path, folder / "given") == folder / "given"


def damaged(path, entry):
    """The container with one byte of an entry changed."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + length])[entry]["data_offsets"]
    data[8 + length + start] ^= 1
    path.write_bytes(data)
    return path


def test_what_is_salvaged_has_the_same_name(tmp_path):
    for folder in "abc":
        (tmp_path / folder).mkdir()
    path = damaged(packed(tmp_path / "a", "torch.py", "best.ckpt8"), SEAL)
    found = ckpt8.restore(path, salvage=True)
    assert (found.path, found.original) == (tmp_path / "a" / "best.pt", "torch.py")
    path = damaged(packed_directory(tmp_path / "b", "Documents", "best.ckpt8"), SEAL)
    assert ckpt8.restore(path, salvage=True).path == tmp_path / "b" / "best"
    path = damaged(packed(tmp_path / "c", ".bashrc", "best.ckpt8"), "ckpt8.skeleton/bytes")
    assert ckpt8.restore(path, salvage=True).path == tmp_path / "c" / "best.pt.safetensors"
    assert [names(tmp_path / each) for each in "abc"] == [
        ["best.ckpt8", "best.pt"],
        ["best", "best.ckpt8"],
        ["best.ckpt8", "best.pt.safetensors"],
    ]


def test_the_command_says_what_the_original_was_called(run_command, tmp_path):
    path = packed(tmp_path, "run.pt", "best.ckpt8")
    code, out, err = run_command("restore", path)
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'best.pt'}: ")
    assert "the original was called 'run.pt'" in out
    code, out, err = run_command("restore", path, "--force", "--json")
    facts = json.loads(out)
    assert (facts["target"], facts["original"]) == (str(tmp_path / "best.pt"), "run.pt")
    path.rename(tmp_path / "run.ckpt8")
    code, out, err = run_command("restore", tmp_path / "run.ckpt8")
    assert "called" not in out
    code, out, err = run_command("restore", tmp_path / "run.ckpt8", "--salvage", "-o", tmp_path / "other.pt")
    assert "called" not in out


def test_a_stored_name_is_shown_as_text(run_command, tmp_path):
    (tmp_path / "x.ckpt8").write_bytes(container_of(b"abc", "file", name="\x1b[2J\n" + "x" * 5000))
    for option in ((), ("--salvage",)):
        code, out, _ = run_command("restore", tmp_path / "x.ckpt8", *option)
        assert code == 0
        assert "the original was called '\\x1b[2J" in out
        assert all(line.isprintable() and len(line) < 500 for line in out.split("\n"))
        (tmp_path / "x.bin").unlink()
