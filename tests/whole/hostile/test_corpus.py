"""Inputs that once found something, see ``fixtures/hostile/README.md``: what reads them is done soon, with one line.

A file put into that folder is tested from then on.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hostile_kit import bounded, outcome
from rich.console import Console

import ckpt8
from ckpt8.cli.show.inspect import show
from ckpt8.container.header import is_container
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

FOLDER = Path(__file__).parents[3] / "fixtures" / "hostile"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".md")


def shown(facts):
    stream = io.StringIO()
    show(Console(file=stream, width=200), facts)
    assert all(line.isprintable() for line in stream.getvalue().split("\n"))


def actions(path, out):
    yield lambda: ckpt8.resume(path, model=torch.nn.Linear(8, 5, bias=False))
    yield lambda: ckpt8.verify(path, threads=1)
    if not is_container(path):
        yield lambda: shown(inspect_checkpoint(path, tensors=True))
        yield lambda: ckpt8.compress(path, out / "x.ckpt8", threads=1)
        return
    yield lambda: shown(inspect_container(path, tensors=True))
    yield lambda: ckpt8.restore(path, out / "back", threads=1)
    for unpack in (False, True):
        yield lambda unpack=unpack: ckpt8.load(path, threads=1, unpack=unpack)


def test_there_are_files_and_each_is_described():
    text = (FOLDER / "README.md").read_text()
    assert len(FILES) > 20
    assert [path.name for path in FILES if f"`{path.name}`" not in text] == []
    assert sum(path.stat().st_size for path in FILES) < 1 << 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_hostile_file(path, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    refusals = []
    for action in actions(path, out):
        before = list(out.iterdir())
        with bounded():
            message = outcome(action)
        refusals.append(message)
        if message is not None:
            assert list(out.iterdir()) == before
    assert any(refusals) or path.name.startswith(("names-", "commands-"))
