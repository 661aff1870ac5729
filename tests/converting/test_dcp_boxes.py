"""Tensors that lie in boxes of several slices, however they were cut, and slices that make no tensor."""

from __future__ import annotations

import random

import pytest
import torch
from converting_kit import converted, refused
from dcp_kit import change_metadata, load_all, save_in_pieces, save_small

import ckpt8
from ckpt8.converting.sources import open_content

pytestmark = pytest.mark.filterwarnings("ignore")


def halves(shape, dim, at):
    sizes = [*shape]
    first, second = [*sizes], [*sizes]
    first[dim], second[dim] = at, sizes[dim] - at
    offsets = [0] * len(sizes)
    offsets[dim] = at
    return [([0] * len(sizes), first), (offsets, second)]


BOXES = {
    "rows": ((11, 7), halves((11, 7), 0, 6)),
    "columns": ((11, 7), halves((11, 7), 1, 3)),
    "inner": ((5, 4, 6), halves((5, 4, 6), 2, 5)),
    "middle": ((5, 4, 6), halves((5, 4, 6), 1, 1)),
    "grid": ((9, 8), [((r, c), (h, w)) for r, h in ((0, 5), (5, 4)) for c, w in ((0, 3), (3, 3), (6, 2))]),
    "pinwheel": ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),
    "with an empty one": ((6, 4), [((0, 0), (6, 4)), ((6, 0), (0, 4))]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("case", BOXES)
def test_boxes_become_the_tensor_that_torch_loads(case, dtype, tmp_path):
    shape, boxes = BOXES[case]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    root = save_in_pieces({"w.x": (tensor, boxes)}, tmp_path / "run")
    expected = load_all(root)["w.x"]
    assert torch.equal(expected, tensor)
    assert torch.equal(converted(root, tmp_path)["w.x"], expected)
    ckpt8.compress(root, tmp_path / "run.ckpt8", preset="lossless")
    assert torch.equal(converted(tmp_path / "run.ckpt8", tmp_path)["w.x"], expected)


@pytest.mark.parametrize("case", ["grid", "inner", "pinwheel"])
def test_any_stretch_of_a_tensor_in_boxes(case, tmp_path):
    shape, boxes = BOXES[case]
    tensor = torch.randn(shape)
    root = save_in_pieces({"w.x": (tensor, boxes)}, tmp_path / "run")
    chance = random.Random(5)
    with open_content(root) as content:
        for _ in range(200):
            start, stop = sorted(chance.choices(range(tensor.numel() + 1), k=2))
            found = content.data.elements(content.data.tree["w.x"], start, stop)
            assert torch.equal(found, tensor.flatten()[start:stop])


def drop(name, number):
    """Take one slice out of the metadata."""

    def change(metadata):
        index = [each for each in metadata.storage_data if each.fqn == name][number]
        del metadata.storage_data[index]
        chunks = metadata.state_dict_metadata[name].chunks
        metadata.state_dict_metadata[name].chunks = [each for each in chunks if each.offsets != index.offset]

    return change


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_slice_that_is_missing(number, tmp_path):
    shape, boxes = BOXES["grid"]
    root = save_in_pieces(
        {"w.x": (torch.randn(shape), boxes), "w.y": (torch.ones(2), [((0,), (2,))])}, tmp_path / "run"
    )
    change_metadata(root, drop("w.x", number))
    there = 72 - [15, 15, 10, 12, 12, 8][number]
    refused(root, tmp_path, rf"'w\.x': slices are missing: {there} of 72 elements are there")


def test_a_tensor_without_slices(distributed, tmp_path):
    root = save_small({"model": {"w": torch.ones(4), "b": torch.ones(2)}}, tmp_path / "run")
    change_metadata(root, drop("model.w", 0))
    refused(root, tmp_path, r"'model\.w': slices are missing: 0 of 4")


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([((0, 0), (4, 4)), ((3, 0), (3, 4))], "overlap"),
        ([((0, 0), (6, 4)), ((2, 2), (1, 1))], "overlap"),
        ([((0, 0), (3, 4)), ((2, 0), (3, 4))], "overlap"),  # as many elements as there are, with a gap
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "missing"),
    ],
)
def test_slices_that_overlap(boxes, match, tmp_path):
    root = save_in_pieces({"w.x": (torch.randn(6, 4), boxes)}, tmp_path / "run")
    refused(root, tmp_path, rf"'w\.x': .*{match}")
