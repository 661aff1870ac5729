"""Parts of ranks that saved on their own and cut a tensor that all have in different ways; and an index that lies."""

from __future__ import annotations

import packed_kit
import pytest
import torch
import torch.distributed.checkpoint as dcp
from packed_kit import INDEX, change_index, load
from plans_kit import tensor_item
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import ckpt8
from ckpt8.container.joined import read_index
from ckpt8.container.plain_reader import UnreadableError, read
from ckpt8.container.sharded import Part
from ckpt8.core.errors import InputError
from ckpt8.integrations.dcp import Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE = torch.arange(8.0)


class Own(torch.Tensor):
    """A tensor that torch.save keeps."""


class Cut(DefaultSavePlanner):
    """Plans the slices of WHOLE with these offsets and sizes."""

    def __init__(self, cuts, made):
        super().__init__()
        self.cuts, self.made = cuts, made

    def create_local_plan(self):
        items = [tensor_item("w", WHOLE.shape, ((offset,), (size,))) for offset, size in self.cuts]
        self.plan = SavePlan(items, planner_data={"w": ("w",)})
        return self.plan

    def resolve_data(self, write_item):
        (offset,), (size,) = write_item.index.offset, write_item.tensor_data.chunk.sizes
        return self.made(WHOLE[offset : offset + size].clone())


class AsRank(Ckpt8StorageWriter):
    """Writes the part of a rank as with use_collectives=False."""

    def __init__(self, folder, rank, world):
        super().__init__(folder, preset="lossless")
        self.given = Part(rank, world, "one")

    def set_up_storage_writer(self, *args, **kwargs):
        self._part = self.given


def save(folder, *ranks, made=lambda values: values):
    for rank, cuts in enumerate(ranks):
        planner = Cut(cuts, made if rank else lambda values: values)
        dcp.save({}, storage_writer=AsRank(folder, rank, len(ranks)), planner=planner, no_dist=True)


CUTS = {
    "each its own": ([(0, 4), (4, 4)], [(0, 3), (3, 5)]),
    "one whole": ([(0, 8)], [(0, 4), (4, 4)]),
    "the other whole": ([(0, 4), (4, 4)], [(0, 8)]),
    "one a part": ([(0, 2)], [(0, 6), (6, 2)]),
    "together": ([(0, 2), (6, 2)], [(0, 6)]),
    "a part in the middle": ([(3, 2)], [(0, 4), (4, 4)]),
}


@pytest.mark.parametrize("case", CUTS)
def test_copies_that_ranks_have_cut_otherwise_are_one_tensor(tmp_path, case):
    save(tmp_path / "x", *CUTS[case])
    assert torch.equal(load({"w": torch.full((8,), -1.0)}, tmp_path / "x")["w"], WHOLE)
    for rank in (None, 0, 1):
        assert read_index(tmp_path / "x", rank).tensors["w"].layout.is_whole, rank
    assert torch.equal(ckpt8.load(tmp_path / "x")["w"], WHOLE)
    assert read(tmp_path / "x")["w"].tolist() == WHOLE.tolist()
    ckpt8.restore(tmp_path / "x", tmp_path / "plain")
    assert ckpt8.verify(tmp_path / "x", tmp_path / "plain").failures == ()


@pytest.mark.parametrize("case", ["each its own", "one whole", "the other whole"])
def test_of_different_copies_that_of_the_first_rank_counts(tmp_path, case):
    save(tmp_path / "x", *CUTS[case], made=lambda values: values + 100)
    assert torch.equal(ckpt8.load(tmp_path / "x")["w"], WHOLE)
    assert read(tmp_path / "x")["w"].tolist() == WHOLE.tolist()


def test_what_no_cut_makes_whole_is_refused_by_name(tmp_path):
    save(tmp_path / "x", [(0, 2)], [(6, 2)])
    with pytest.raises(CheckpointException, match="'w': slices are missing: 4 of 8 elements"):
        load({"w": torch.full((8,), -1.0)}, tmp_path / "x")
    with pytest.raises(InputError, match="'w': slices are missing: 4 of 8 elements"):
        ckpt8.load(tmp_path / "x")
    with pytest.raises(UnreadableError, match=f"{tmp_path / 'x'}: w: a part of it is missing"):
        read(tmp_path / "x")["w"]
    (tmp_path / "x" / "ckpt8-dcp.1.json").unlink()
    with pytest.raises(UnreadableError, match=f"{tmp_path / 'x'}: does not have the parts of one save"):
        read(tmp_path / "x")


def test_a_copy_that_torch_save_keeps_is_not_looked_for_in_another_file(tmp_path):
    save(tmp_path / "x", [(0, 8)], [(0, 8)], made=lambda values: values.as_subclass(Own))
    assert read_index(tmp_path / "x").tensors["w"].layout.is_whole
    assert torch.equal(ckpt8.load(tmp_path / "x")["w"], WHOLE)
    assert read(tmp_path / "x")["w"].tolist() == WHOLE.tolist()


@pytest.mark.parametrize("boxes", [[[0, [0], [2]], [0, [0], [8]]], [[0, [0], [8]], [0, [0], [2]]]])
def test_boxes_with_the_same_offsets_in_an_index_are_refused_by_name(tmp_path, boxes):
    packed_kit.save({"w": WHOLE}, tmp_path / "x")
    changed = {"w": {"dtype": "float32", "shape": [8], "boxes": boxes}}
    change_index(tmp_path / "x", lambda tree: tree["tensors"].update(changed))
    with pytest.raises(InputError) as caught:
        ckpt8.load(tmp_path / "x")
    assert str(caught.value) == f"{tmp_path / 'x' / INDEX}: 'w' is malformed at 'boxes'"
