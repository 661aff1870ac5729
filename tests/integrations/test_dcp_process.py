"""What frameworks pickle and copy: every public object by itself."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_kit import make, state_of, train, whole
from packed_kit import INDEX, names_in
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckpt8
from ckpt8.core.errors import InputError, OutputError, ResumeError, UsageError
from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


def pickled(each):
    return pickle.loads(pickle.dumps(each))


@pytest.mark.parametrize("again", [pickled, copy.deepcopy])
def test_a_copied_writer_and_reader_do_the_same(tmp_path, again):
    state = {"model": {"w": torch.randn(80, 80), "v": torch.randn(80, 80)}}
    options = {"preset": "compact", "rules": ["*v=split24(R=15)", "model.w=lossless"], "threads": 1, "stats": False}
    dcp.save(state, storage_writer=Ckpt8StorageWriter(tmp_path / "x", **options))
    writer = Ckpt8StorageWriter(tmp_path / "y", overwrite=False, **options)
    other = again(writer)
    assert other.storage_meta() == writer.storage_meta()
    dcp.save(state, storage_writer=other)
    found = {"model": {"w": torch.zeros(80, 80), "v": torch.zeros(80, 80)}}
    dcp.load(found, storage_reader=again(Ckpt8StorageReader(tmp_path / "y", threads=1)))
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert (tmp_path / "x" / "__0_0.ckpt8").read_bytes() == (tmp_path / "y" / "__0_0.ckpt8").read_bytes()
    with pytest.raises(BaseException, match="overwrite is False"):
        dcp.save(state, storage_writer=again(writer))


@pytest.mark.parametrize("error", [
    InputError("a"), OutputError("b"), UsageError("c"), ResumeError("d", ("one", "two")),
])  # fmt: skip
def test_errors_keep_their_class_and_text(error):
    other = pickled(error)
    assert (type(other), str(other)) == (type(error), str(error))
    assert getattr(other, "problems", None) == getattr(error, "problems", None)


@pytest.mark.parametrize("again", [pickled, copy.deepcopy])
def test_the_lightning_plugin(tmp_path, again):
    plugin = again(pytest.importorskip("ckpt8.integrations.lightning").Ckpt8CheckpointIO())
    plugin.save_checkpoint({"x": torch.arange(5)}, tmp_path / "a.ckpt")
    assert torch.equal(plugin.load_checkpoint(tmp_path / "a.ckpt")["x"], torch.arange(5))


@pytest.mark.parametrize("again", [pickled, copy.deepcopy])
def test_the_callback_of_trainer(again):
    callback = pytest.importorskip("ckpt8.integrations.transformers").Ckpt8Callback(keep_original=False)
    assert vars(again(callback)).keys() == vars(callback).keys()


def saved_and_loaded(each):
    """By torch.save: pickle alone cannot load tensors of uint16, whatever holds them."""
    content = io.BytesIO()
    torch.save(each, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


@pytest.mark.parametrize("name", ["Adafactor", "Adam", "AdamW", "CAME", "Lion", "SGD", "StableAdamW"])
@pytest.mark.parametrize("again", [saved_and_loaded, copy.deepcopy])
def test_a_copied_optimizer_steps_as_the_original(name, again):
    torch.manual_seed(0)
    model = torch.nn.Linear(80, 80).bfloat16()
    optimizer = getattr(ckpt8.optim, name)(model.parameters(), lr=1e-2, seed=3)

    def step(model, optimizer, seed):
        batch = torch.randn(4, 80, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()

    step(model, optimizer, 0)
    other, twin = again((model, optimizer))
    assert twin.param_groups[0]["params"][0] is other.weight
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(other, twin, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("again", [pickled, copy.deepcopy])
def test_a_copied_int8_layer_gives_the_same(again):
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80))
    assert ckpt8.nn.switchback(model)
    batch = torch.randn(4, 80)
    assert torch.equal(again(model)(batch), model(batch))


def test_what_saves_and_resume_give(tmp_path):
    manifest = ckpt8.save({"w": torch.ones(3), "path": Path("x")}, tmp_path / "a.ckpt8")
    assert pickled(manifest) == manifest
    rest = ckpt8.resume(tmp_path / "a.ckpt8")
    assert pickled(rest)["path"].name == rest["path"].name


def save_twice(rank, folder):
    """Two saves with one writer, as torchtitan makes them, both read back; then one that is refused."""

    save = partial(dcp.async_save, async_checkpointer_type=AsyncCheckpointerType.PROCESS)

    def state_at(seen):
        scales = torch.arange(64).to(torch.uint16) * seen  # which pickle alone cannot hold
        return state_of(model, optimizer) | {"progress": {"seen": seen, "scales": scales}}

    model, optimizer = make()
    train(model, optimizer)
    writer = Ckpt8StorageWriter(folder / "first", preset="lossless", rules=["model.0.weight=split32"], threads=1)
    for name, seen in (("first", 7), ("second", 8)):
        state = state_at(seen)
        before = whole(state)
        pending = save(state, storage_writer=writer, checkpoint_id=str(folder / name))
        for parameter in model.parameters():
            parameter.data.mul_(2)
        pending.result()
        found = state_of(*make(seed=1)) | {"progress": {"seen": 0, "scales": torch.zeros(64, dtype=torch.uint16)}}
        dcp.load(found, storage_reader=Ckpt8StorageReader(folder / name))
        assert found["progress"]["seen"] == seen
        assert torch.equal(found["progress"]["scales"], state["progress"]["scales"])
        after = whole(found)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items())
    refused = Ckpt8StorageWriter(folder / "first", overwrite=False)
    try:
        save(state_at(9), storage_writer=refused).result()
    except BaseException as exc:  # torch's CheckpointException is no Exception
        text = str(exc)
    else:
        text = "nothing was refused"
    (folder / f"error-{dist.get_rank()}.txt").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_background_process_saves(tmp_path, world):
    run_ranks(save_twice, world, tmp_path)
    for name in ("first", "second"):
        assert names_in(tmp_path / name) == [*(f"__{rank}_0.ckpt8" for rank in range(world)), INDEX]
    for rank in range(world):
        error = (tmp_path / f"error-{rank}.txt").read_text()
        assert f"{tmp_path / 'first'}: holds a checkpoint, and overwrite is False; give another directory" in error
