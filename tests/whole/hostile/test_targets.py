"""Where hostile files write: into their target and nowhere else, and nothing to the terminal but text."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
import zstandard
from hostile_kit import container_of, one_line, outcome, sealed
from rich.console import Console
from safetensors.torch import save_file
from test_outputs import snapshot
from test_salvage import damage

import ckpt8
from ckpt8.cli.show.inspect import show
from ckpt8.core.errors import Ckpt8Error, InputError
from ckpt8.core.text import printable
from ckpt8.inspecting.container import inspect_container

ESCAPE = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e"


def test_reading_leaves_no_trace(run_command, tmp_path, monkeypatch):
    """Inspect, verify and load write nothing at all, compress and restore their target alone."""
    folder, out = tmp_path / "in", tmp_path / "out"
    (folder / "run").mkdir(parents=True)
    out.mkdir()
    save_file({"w": torch.randn(80, 80)}, folder / "run" / "model.safetensors")
    torch.save({"w": torch.randn(80, 80)}, folder / "a.pt")
    ckpt8.compress(folder / "a.pt")
    ckpt8.compress(folder / "run")
    before = snapshot(folder)
    monkeypatch.setenv("TMPDIR", str(out))
    monkeypatch.setenv("HOME", str(out))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(folder)
    for command in (["inspect", "run"], ["verify", "a.ckpt8", "--against", "a.pt"]):
        assert run_command(*command)[0] == 0
    for name in ("a.ckpt8", "run.ckpt8"):
        with ckpt8.open(folder / name) as file:
            for member in file.manifest.members:
                ckpt8.load(folder / name, member=member.path)
    assert snapshot(folder) == before
    assert list(out.iterdir()) == []
    ckpt8.restore(folder / "run.ckpt8", out / "back")
    ckpt8.compress(folder / "a.pt", out / "x.ckpt8")
    assert snapshot(folder) == before
    assert sorted(path.name for path in out.iterdir()) == ["back", "x.ckpt8"]


@pytest.mark.slow
def test_a_restore_that_fails_late_leaves_nothing(tmp_path):
    """Deep directories, links and the first file are written before the last member turns out to be damaged."""
    root = tmp_path / "run"
    (root / ("d/" * 200)).mkdir(parents=True)
    (root / ("d/" * 200) / "file").write_bytes(b"x")
    (root / "a").symlink_to("d")
    save_file({"w": torch.randn(80, 80)}, root / "z.safetensors")
    ckpt8.compress(root, preset="lossless")
    damage(tmp_path / "run.ckpt8", tmp_path / "bad.ckpt8", "z.safetensors:w/plane0")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert "checksum" in outcome(lambda: ckpt8.restore(tmp_path / "bad.ckpt8", tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_damage_met_by_torch_is_named(tmp_path):
    """torch turns what a read raises into errors of its own; the first one is what is reported."""
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        torch.save({"model": {"w": torch.randn(80, 80)}}, tmp_path / "a.pt", **options)
        ckpt8.compress(tmp_path / "a.pt", preset="lossless", force=True)
        damage(tmp_path / "a.ckpt8", tmp_path / "bad.ckpt8", "model.w/plane0")
        assert "model.w: checksum" in outcome(lambda: ckpt8.load(tmp_path / "bad.ckpt8"))


def test_messages_are_one_line_of_text():
    error = InputError(f"a {ESCAPE}b")
    assert "\\x1b]0;owned\\x07" in one_line(error)
    assert "\\x0a" in str(error)
    assert len(str(InputError("x" * 10_000_000))) < 2000
    assert str(InputError("Übung 漢字 🙂.pt: is damaged")) == "Übung 漢字 🙂.pt: is damaged"
    assert printable("a b") == "a b"
    assert issubclass(ckpt8.core.errors.OutputError, Ckpt8Error)


def texts(tree, path=()):
    if isinstance(tree, str):
        yield path
    elif isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from texts(value, (*path, key))


def place(tree, path, text):
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = text


def test_no_text_of_a_manifest_reaches_the_terminal_as_it_is(tmp_path):
    """Every text in it is tried, one after the other: shown escaped, or the file is refused."""
    found = []
    container_of(b"abc", "file", change=lambda manifest: found.append(copy.deepcopy(manifest)))
    manifest = found[0]
    manifest["tensors"] = [
        {"name": "t", "storage": 0, "dtype": "uint8", "offset": 0, "shape": [3], "stride": [1], "flags": []}
    ]
    manifest["storages"][0] |= {"reason": "r", "error": {"kind": "weight"}}
    manifest["parameters"] = [{"name": "p", "moments": {"moment1": 0}, "rule": None, "reason": "r", "error": None}]
    manifest["rules"] = ["rule"]
    manifest["directory"] = "run"
    path, shown = tmp_path / "x.ckpt8", 0
    for where in texts(manifest):
        changed = copy.deepcopy(manifest)
        place(changed, where, ESCAPE)
        name = changed["storages"][0]["name"]
        path.write_bytes(sealed({f"{name}/bytes": b"abc"}, zstandard.compress(json.dumps(changed).encode())))
        stream = io.StringIO()
        try:
            show(Console(file=stream, width=200), inspect_container(path, tensors=True))
        except Ckpt8Error as exc:
            one_line(exc)
        written = stream.getvalue()
        assert all(line.isprintable() for line in written.split("\n")), where
        shown += "\\x1b]0;" in written
    assert shown >= 5


def test_the_command_line_shows_nothing_else(run_command, tmp_path):
    """A name in a checkpoint, and the name of a file, with commands to the terminal in them."""
    folder = tmp_path / "a\x1b[2J\nb"
    folder.mkdir()
    torch.save({"model": {ESCAPE: torch.randn(80, 80)}}, folder / "a.pt")
    (folder / "damaged.pt").write_bytes(b"PK\3\4" + bytes(50))
    ckpt8.compress(folder / "a.pt")
    shown = [["a.pt", "--tensors"], ["a.ckpt8", "--tensors"], ["damaged.pt"]]
    outputs = ["".join(run_command("inspect", folder / name, *options)[1:]) for name, *options in shown]
    assert all(line.isprintable() for output in outputs for line in output.split("\n"))
    assert all("\\x1b[2J" in output for output in outputs)
    assert outputs[2].count("\n") == 1
