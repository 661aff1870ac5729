"""The header has room for the codecs that are tried first; where they refuse, the data is moved. It is read again."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckpt8
from ckpt8.container import header, writer
from ckpt8.container.header import LENGTH_BYTES
from ckpt8.container.manifest_json import manifest_json
from ckpt8.core.errors import OutputError
from ckpt8.integrations.dcp import Ckpt8StorageWriter

SHAPE = (70, 64)


def tree_of(count, refused):
    """Weights with their moments; no lossy codec takes those of ``refused``."""
    generator = torch.Generator().manual_seed(0)
    model = {f"h.{k}.weight": torch.randn(SHAPE, generator=generator) for k in range(count)}
    state = {}
    for k, w in enumerate(model.values()):
        if k in refused:
            w[0, :3] = torch.tensor([float("nan"), float("inf"), 1.0])
        m = torch.randn(SHAPE, generator=generator) * (float("nan") if k in refused else 1e-3)
        state[k] = {"step": torch.tensor(9.0), "exp_avg": m, "exp_avg_sq": m.square() + 1e-9}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(range(count))}
    return {"model": model, "optimizer": {"state": state, "param_groups": [group]}}


def header_of(path):
    """The bytes of the header, and how many of them are used."""
    with path.open("rb") as file:
        content = file.read(int.from_bytes(file.read(LENGTH_BYTES), "little"))
    return len(content), len(content.rstrip(b" "))


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.by_default("{'preset': 'archive'}-True")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("options", [{"preset": "flash"}, {"preset": "archive"}], ids=str)
def test_data_is_moved_where_codecs_refuse(options, background, tmp_path, monkeypatch):
    """All weights and moments are refused: their entries need more room than the header has. All else is as it was."""
    monkeypatch.setattr("ckpt8.compressing.groups._ROOM", 1 << 20)
    monkeypatch.setattr("ckpt8.container.writer.PIECE", 5000)
    tree, found = tree_of(12, range(12)), []
    reserved = header.reserved_size
    for add in (0, 100_000):
        monkeypatch.setattr(header, "reserved_size", lambda names, add=add: add + reserved(names))
        path = tmp_path / str(add) / "a.ckpt8"
        path.parent.mkdir()
        saved = ckpt8.save(tree, path, background=background, **options)
        manifest = saved.result() if background else saved
        assert sum(storage.codec["id"] == "lossless/1" for storage in manifest.storages) >= 12
        size, used = header_of(path)
        assert (size - used > 90_000) == bool(add)
        assert not ckpt8.verify(path).failures
        found.append(path.read_bytes()[LENGTH_BYTES + size : -header.SEAL_BYTES])
    assert found[0] == found[1]
    assert header_of(tmp_path / "0" / "a.ckpt8")[0] - header_of(tmp_path / "0" / "a.ckpt8")[1] < 8
    loaded = ckpt8.load(tmp_path / "0" / "a.ckpt8")
    assert all(same(loaded["model"][name], w) for name, w in tree["model"].items())


@pytest.mark.parametrize("options", [{"preset": "flash"}, {"preset": "compact"}, {"preset": "lossless"}], ids=str)
def test_little_of_the_header_is_not_used(options, tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt8.compressing.groups._ROOM", 1 << 20)
    ckpt8.save(tree_of(20, ()), tmp_path / "a.ckpt8", **options)
    size, used = header_of(tmp_path / "a.ckpt8")
    assert used > 0.7 * size


def test_a_disk_that_is_full_while_data_is_moved(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt8.compressing.groups._ROOM", 1 << 20)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pread", full)
    with pytest.raises(ckpt8.OutputError, match="No space left"):
        ckpt8.save(tree_of(12, range(12)), tmp_path / "a.ckpt8", preset="flash")
    assert list(tmp_path.iterdir()) == []


# What no reader would take


def _delta(folder):
    tree = {"w": torch.randn(96, 96, generator=torch.Generator().manual_seed(0))}
    ckpt8.save(tree, folder / "a.ckpt8")
    tree["w"][0] = 2
    ckpt8.save(tree, folder / "b.ckpt8", base=folder / "a.ckpt8")
    ckpt8.save(tree, folder / "c.ckpt8")
    torch.save(tree, folder / "c.pt")


WRITE = {
    "save": lambda folder: ckpt8.save({"w": torch.ones(96, 96)}, folder / "c.ckpt8"),
    "background": lambda folder: ckpt8.save({"w": torch.ones(96, 96)}, folder / "c.ckpt8", background=True).result(),
    "compress": lambda folder: ckpt8.compress(folder / "c.pt", force=True),
    "convert": lambda folder: ckpt8.convert(folder / "c.pt", folder / "new.ckpt8"),
    "rebase": lambda folder: ckpt8.rebase(folder / "b.ckpt8"),
    "ranks": lambda folder: dcp.save({"w": torch.ones(96, 96)}, storage_writer=Ckpt8StorageWriter(folder / "ranks")),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("write", WRITE)
def test_a_container_that_the_reader_refuses_never_gets_its_name(write, tmp_path, monkeypatch):
    """Whatever a writer states by mistake: the file that is there stays, and no temporary does."""
    _delta(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(writer, "manifest_json", lambda manifest: {**manifest_json(manifest), "preset": 7})
    with pytest.raises((OutputError, CheckpointException), match=r"would not be readable: .*malformed at 'preset'"):
        WRITE[write](tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
