"""``verify`` notices every flipped bit, and where that is in a tensor it names it.

Of flips and other values in a directory that ranks packed every command gives a result, or one line.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from contextlib import suppress

import pytest
import torch
from dcp_kit import save_in_pieces
from flips_kit import SAMPLES, flip, make_sample, places
from fuzz_mutations import slots

import ckpt8
from ckpt8 import Ckpt8Error, InputError
from ckpt8.inspecting.container import inspect_container
from ckpt8.integrations.dcp.sharing import compress_share


@pytest.mark.by_default("directory", "chain")
@pytest.mark.parametrize("kind", [*SAMPLES, "chain"])
def test_flips_all_over_the_file_are_noticed_and_named(kind, tmp_path):
    path, rng = make_sample(tmp_path, kind), random.Random(1)
    size = path.stat().st_size
    wanted = [(place, rng.randrange(8)) for place in range(rng.randrange(5), size, max(5, size // 200))]
    found = flip(path, wanted)
    assert found.faults == []
    assert {"in ckpt8.manifest", "in ckpt8.seal", "in header", "in padding", "in planes"} <= found.counts.keys()


def test_flips_in_the_base_of_a_delta_are_noticed_where_it_needs_them(tmp_path):
    """It needs all but first moments and the skeleton."""
    path, rng = make_sample(tmp_path, "chain"), random.Random(1)
    base = tmp_path / "budget.ckpt8"
    needed = [
        (start, stop)
        for name, start, stop in places(base.read_bytes())
        if "exp_avg/" not in name and not name.startswith("ckpt8.skeleton")
    ]
    bytes_ = [place for start, stop in needed for place in range(start, stop)]
    found = flip(base, [(place, rng.randrange(8)) for place in bytes_[:: len(bytes_) // 200]], path)
    assert found.faults == []
    assert {"in ckpt8.manifest", "in ckpt8.seal", "in header", "in padding", "in planes"} <= found.counts.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every"), [("file", 1), ("directory", 1), ("budget", 3), ("chain", 3)])
def test_a_flipped_bit_in_any_byte_is_noticed_and_named(kind, every, tmp_path):
    """``fixtures/bench/faults.py`` flips every bit."""
    path, rng = make_sample(tmp_path, kind), random.Random(2)
    found = flip(path, [(place, rng.randrange(8)) for place in range(0, path.stat().st_size, every)])
    assert found.faults == []


INDEX = "ckpt8-dcp.json"
ODD = (None, True, -1, 1 << 63, 1.5, "", "x", [], [0], [[1, 1]], {}, "__0_0.ckpt8", "\0")


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flips_in_the_index_are_noticed_or_harmless(folder):
    whole = repr(ckpt8.load(folder))
    content = (folder / INDEX).read_bytes()
    rng = random.Random(1)
    for place in (*range(0, len(content), 20), *range(len(content) - 20, len(content))):
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        (folder / INDEX).write_bytes(flipped)
        commands(folder)
        with suppress(Ckpt8Error):
            assert repr(ckpt8.load(folder)) == whole  # it changed the name of the checksum


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_any_value_in_the_index_may_be_another(folder):
    tree, rng = json.loads((folder / INDEX).read_text()), random.Random(2)
    for number in range(len(list(slots(tree)))):
        changed = copy.deepcopy(tree)
        _, node, key = list(slots(changed))[number]
        node[key] = rng.choice(ODD)
        (folder / INDEX).write_text(json.dumps(changed))
        commands(folder)
