"""A sharded tensor whose parts are no plain tensors, such as those of 8-bit optimizers: each is kept by torch.save."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import ckpt8
from ckpt8.core.errors import UnsupportedError
from ckpt8.integrations.dcp import Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE = torch.arange(12.0).view(4, 3)


class InParts(DefaultSavePlanner):
    """Plans two parts of a tensor; those that begin at a row in ``sparse`` are sparse."""

    sparse = (0, 2)

    def create_local_plan(self):
        items = []
        for row in (0, 2):
            offsets, sizes = torch.Size([row, 0]), torch.Size([2, 3])
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=torch.float32), WHOLE.shape
            )
            items.append(WriteItem(MetadataIndex("q", offsets), WriteItemType.SHARD, tensor_data=data))
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size([0]), torch.Size([3])), TensorProperties(), torch.Size([3])
        )
        items.append(WriteItem(MetadataIndex("w", torch.Size([0])), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={"q": ("q",), "w": ("w",)})
        return self.plan

    def resolve_data(self, write_item):
        if write_item.index.fqn == "w":
            return torch.ones(3)
        row = write_item.index.offset[0]
        part = WHOLE[row : row + 2]
        return part.to_sparse() if row in self.sparse else part


def save(planner, folder):
    dcp.save({}, storage_writer=Ckpt8StorageWriter(folder), planner=planner, no_dist=True)


def test_every_part_is_given_back_and_none_is_taken_for_the_whole(tmp_path):
    save(InParts(), tmp_path / "x")
    with pytest.raises(UnsupportedError, match="'q': is in 2 parts, which only its class can join"):
        ckpt8.load(tmp_path / "x")

    ckpt8.restore(tmp_path / "x", tmp_path / "plain")
    stored = pickle.loads((tmp_path / "plain" / ".metadata").read_bytes()).storage_data
    assert {(index.fqn, *index.offset) for index in stored} == {("q", 0, 0), ("q", 2, 0), ("w", 0)}
    for index, place in stored.items():
        content = (tmp_path / "plain" / place.relative_path).read_bytes()[place.offset :][: place.length]
        part = torch.load(io.BytesIO(content), weights_only=True)
        expected = torch.ones(3) if index.fqn == "w" else WHOLE[index.offset[0] :][:2]
        assert torch.equal(part.to_dense(), expected)

    report = ckpt8.convert(tmp_path / "x", tmp_path / "x.pt")
    assert report.notes == ["left out: 'q': its file is not there, or it is in parts that only its class can join"]
    assert torch.load(tmp_path / "x.pt").keys() == {"w"}


@pytest.mark.parametrize("row", [0, 2])
def test_a_tensor_of_which_some_parts_are_plain_is_refused(tmp_path, row):
    planner = InParts()
    planner.sparse = (row,)
    save(planner, tmp_path / "x")
    for call in (ckpt8.load, lambda path: ckpt8.restore(path, tmp_path / "plain")):
        with pytest.raises(UnsupportedError, match="'q': only some of its parts are plain tensors"):
            call(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
