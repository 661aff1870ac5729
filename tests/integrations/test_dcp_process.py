"""What frameworks pickle and copy: every public object by itself."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt8
from ckpt8.core.errors import InputError, OutputError, ResumeError, UsageError
from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
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
    files = [(tmp_path / name / "__0_0.ckpt8").read_bytes() for name in ("x", "y")]
    assert files[0] == files[1]
    with pytest.raises(BaseException, match="overwrite is False"):
        dcp.save(state, storage_writer=again(writer))


@pytest.mark.parametrize("error", [
    InputError("a"), OutputError("b"), UsageError("c"), ResumeError("d", ("one", "two")),
])  # fmt: skip
def test_errors_keep_their_class_and_text(error):
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert getattr(other, "problems", None) == getattr(error, "problems", None)


def test_the_lightning_plugin(tmp_path):
    lightning = pytest.importorskip("ckpt8.integrations.lightning")
    plugin = lightning.Ckpt8CheckpointIO()
    for again in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        again.save_checkpoint({"x": torch.arange(5)}, tmp_path / "a.ckpt")
        assert torch.equal(again.load_checkpoint(tmp_path / "a.ckpt")["x"], torch.arange(5))


def test_the_callback_of_trainer():
    transformers = pytest.importorskip("ckpt8.integrations.transformers")
    callback = transformers.Ckpt8Callback(keep_original=False)
    for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert vars(other).keys() == vars(callback).keys()


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


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_a_copied_int8_layer_gives_the_same(again):
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80))
    assert ckpt8.nn.switchback(model)
    batch = torch.randn(4, 80)
    assert torch.equal(again(model)(batch), model(batch))


def test_what_saves_and_resume_give(tmp_path):
    manifest = ckpt8.save({"w": torch.ones(3), "path": Path("x")}, tmp_path / "a.ckpt8")
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    rest = ckpt8.resume(tmp_path / "a.ckpt8")
    assert pickle.loads(pickle.dumps(rest))["path"].name == rest["path"].name
