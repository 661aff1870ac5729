"""What the mixin of Lightning's strategies leaves behind when a save fails, without Lightning."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from packed_kit import names_in
from torch.distributed.checkpoint.api import CheckpointException

import ckpt8
from ckpt8.checkpoint.sources import snapshot
from ckpt8.integrations import sharded
from ckpt8.integrations.dcp import Ckpt8StorageWriter
from ckpt8.integrations.sharded import Ckpt8StrategyMixin

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class OneRank:
    """What a strategy has that the mixin needs."""

    global_rank = 0
    _state_dict_type = "sharded"

    def broadcast(self, value):
        return value

    def barrier(self):
        """Nobody to wait for."""

    def remove_checkpoint(self, path):
        shutil.rmtree(path)

    def teardown(self):
        """Nothing to end."""


class Packed(Ckpt8StrategyMixin, OneRank):
    pass


def checkpoint(epoch):
    return {"state_dict": {"w": torch.full((3,), float(epoch))}, "epoch": epoch}


def test_a_save_that_fails_leaves_the_rest_of_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    Packed().save_checkpoint(checkpoint(1), path)
    before = names_in(path)

    def fails(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(sharded, "save_packed", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        Packed().save_checkpoint(checkpoint(2), path)
    assert torch.load(path / "meta.pt")["epoch"] == 1
    assert names_in(path) == before


@pytest.mark.parametrize("names", [["last.ckpt"], ["last.ckpt/meta.pt", "last.ckpt/__0_0.distcp"]])
def test_a_checkpoint_of_another_kind_goes_when_the_new_one_is_written(names, tmp_path, monkeypatch):
    """A file, or the plain slices of Lightning."""
    path = tmp_path / "last.ckpt"
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save(checkpoint(1), tmp_path / name)

    def fails(folder, *_):
        (folder / "__0_0.ckpt8").write_bytes(b"a part")
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(sharded, "save_packed", fails)
        with pytest.raises(OSError, match="the disk is gone"):
            Packed().save_checkpoint(checkpoint(2), path)
    assert sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()) == sorted(names)
    assert all(torch.load(tmp_path / name)["epoch"] == 1 for name in names)
    Packed().save_checkpoint(checkpoint(2), path)
    assert torch.load(path / "meta.pt")["epoch"] == 2
    assert names_in(tmp_path) == ["last.ckpt"]
    assert not (path / "__0_0.distcp").exists()


def test_the_rest_is_written_before_the_weights_are_replaced(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    Packed().save_checkpoint(checkpoint(1), path)
    index = (path / "ckpt8-dcp.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Exception, match="No space left"):
        Packed().save_checkpoint(checkpoint(2), path)
    assert (path / "ckpt8-dcp.json").read_bytes() == index


@pytest.fixture
def go_on(monkeypatch):
    """What every save waits for before its index is written."""
    event, finish = threading.Event(), Ckpt8StorageWriter.finish

    def slow(self, **arguments):
        event.wait()
        finish(self, **arguments)

    monkeypatch.setattr(Ckpt8StorageWriter, "finish", slow)
    return event


def test_what_is_removed_stays_until_a_save_in_the_background_is_whole(go_on, tmp_path):
    strategy, first, second = Packed(background=True), tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    go_on.set()
    strategy.save_checkpoint(checkpoint(1), first)
    strategy.teardown()
    before = names_in(first)
    go_on.clear()
    saved = checkpoint(2)
    weight = saved["state_dict"]["w"]
    strategy.save_checkpoint(saved, second)
    weight.zero_()
    strategy.remove_checkpoint(first)
    assert not (second / "meta.pt").exists()
    assert names_in(first) == before
    go_on.set()
    strategy.save_checkpoint(checkpoint(3), second)
    assert names_in(tmp_path) == ["2.ckpt"]
    assert torch.load(second / "meta.pt")["epoch"] in (2, 3)
    strategy.teardown()
    assert torch.load(second / "meta.pt")["epoch"] == 3
    assert torch.equal(ckpt8.load(second)["state_dict"]["w"], torch.full((3,), 3.0))
    assert snapshot._kept == []


def test_a_save_in_the_background_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    """Also under its own name, if that was a checkpoint of another kind."""
    strategy = Packed(background=True)
    for name in ("1.ckpt", "2.ckpt"):
        torch.save(checkpoint(1), tmp_path / name)

    def fails(*_, **arguments):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Ckpt8StorageWriter, "finish", fails)
    strategy.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
    strategy.remove_checkpoint(tmp_path / "1.ckpt")
    with pytest.warns(RuntimeWarning, match="was not saved"), pytest.raises(CheckpointException, match="is gone"):
        strategy.teardown()
    strategy.teardown()
    assert names_in(tmp_path) == ["1.ckpt", "2.ckpt"]
    assert torch.load(tmp_path / "2.ckpt")["epoch"] == 1
