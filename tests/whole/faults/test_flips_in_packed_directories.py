"""Flipped bits and changed values in a directory that ranks packed: found, or told in one line, by every command."""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from dcp_kit import save_in_pieces

import ckpt8
from ckpt8 import Ckpt8Error, InputError
from ckpt8.inspecting.container import inspect_container
from ckpt8.integrations.dcp.sharing import compress_share

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

INDEX = "ckpt8-dcp.json"


@pytest.fixture
def folder(tmp_path):
    """Two tensors in four boxes each, and two values that are no tensors."""
    boxes = [((row, column), (4, 8)) for row in (0, 4) for column in (0, 8)]
    tensors = {name: (torch.randn(8, 16), boxes) for name in ("model.w", "optimizer.state.w.exp_avg")}
    save_in_pieces(tensors, tmp_path / "plain", {"epoch": 3, "note": "half way"})
    compress_share(tmp_path / "plain", tmp_path / "x", {"preset": "lossless"}, 0, 1, overwrite=False)
    return tmp_path / "x"


def commands(folder):
    """Run what reads a directory. Each gives a result or one line."""
    for command in (inspect_container, ckpt8.verify, ckpt8.load, lambda path: ckpt8.diff(path, path)):
        try:
            command(folder)
        except Ckpt8Error as exc:
            assert "\n" not in str(exc)  # noqa: PT017 - any other exception fails


def test_flips_in_the_file_of_a_rank_are_noticed(folder):
    file = folder / "__0_0.ckpt8"
    content = file.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(InputError):
            ckpt8.verify(folder)


def test_flips_in_the_index_are_one_line_or_harmless(folder):
    whole = ckpt8.load(folder)
    content = (folder / INDEX).read_bytes()
    rng = random.Random(1)
    for _ in range(80):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (folder / INDEX).write_bytes(flipped)
        commands(folder)
        try:
            found = ckpt8.load(folder)
        except Ckpt8Error:
            continue
        # A flip may change a key, or what nobody reads. The tensors are the same.
        mine, theirs = ([each for each in tree.values() if isinstance(each, torch.Tensor)] for tree in (found, whole))
        assert len(mine) == len(theirs)
        assert all(any(torch.equal(each, other) for other in mine) for each in theirs)


def test_a_file_of_the_directory_that_is_something_else(folder, tmp_path):
    for make in (
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.symlink_to(path),
        lambda path: torch.save({"w": torch.ones(3)}, path),
        lambda path: ckpt8.save({"w": torch.ones(3)}, path),
    ):
        for name in ("__0_0.ckpt8", INDEX):
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            (copy / name).unlink()
            make(copy / name)
            with pytest.raises(InputError):
                ckpt8.verify(copy)
            commands(copy)
            shutil.rmtree(copy)
