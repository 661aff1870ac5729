"""A save that fails after its index is published, or just before: a whole checkpoint is there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter
from ckpt8.integrations.dcp.sharing import compress_share

pytestmark = pytest.mark.filterwarnings("ignore")


def loaded(path):
    state = {"w": torch.zeros(8)}
    dcp.load(state, storage_reader=Ckpt8StorageReader(path), no_dist=True)
    return state["w"].unique().tolist()


def test_files_that_the_index_names_stay_where_tidying_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(5, "Input/output error")

    dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    dcp.save({"w": torch.zeros(8)}, storage_writer=Ckpt8StorageWriter(tmp_path / "x"), no_dist=True)
    monkeypatch.setattr(Ckpt8StorageWriter, "_remove_others", full)
    with pytest.raises(OSError, match="Input/output error"):
        compress_share(tmp_path / "plain", tmp_path / "x", {}, 0, 1, overwrite=True)
    assert loaded(tmp_path / "x") == [1.0]


def test_a_warning_that_is_an_error_stops_the_save_before_it_replaces_anything(tmp_path, monkeypatch):
    dcp.save({"w": torch.zeros(8)}, storage_writer=Ckpt8StorageWriter(tmp_path / "x"), no_dist=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    losses = Ckpt8StorageWriter._warn_of_losses

    def strict(*arguments):
        losses(*arguments)
        raise UserWarning("larger")

    monkeypatch.setattr(Ckpt8StorageWriter, "_warn_of_losses", strict)
    with pytest.raises(CheckpointException, match="larger"):
        dcp.save({"w": torch.ones(8)}, storage_writer=Ckpt8StorageWriter(tmp_path / "x"), no_dist=True)
    assert before.items() <= {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}.items()
    assert loaded(tmp_path / "x") == [0.0]
