"""Modules and optimizers that were pickled as objects count as their state dicts, and nothing of them is imported."""

from __future__ import annotations

import zipfile
from collections import OrderedDict

import pytest
import torch
from resume_kit import same
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.core.tensors import Role


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.Sequential(nn.ReLU(), nn.Linear(300, 200)))


def trained(kind=torch.optim.AdamW, **options):
    model = network()
    optimizer = kind(model.parameters(), **{"lr": 1e-3, **options})
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(9, 200)).square().mean().backward()
        optimizer.step()
    return model, optimizer


class Thing:
    """A stand-in with any attributes: those of a trainer, or of a module."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


NAMES = [name for name, _ in network().named_parameters()]
CASES = {
    "both": lambda m, o: {"model": m, "optimizer": o, "epoch": 3},
    "other keys": lambda m, o: {"gen": m, "opt": o},
    "a tuple": lambda m, o: (o, m),
    "wrapped": lambda m, o: {"model": nn.Sequential(OrderedDict(module=m)), "optimizer": o},
    "a state dict of the model": lambda m, o: {"model": m.state_dict(), "optimizer": o},
    "a state dict of the optimizer": lambda m, o: {"net": m, "optimizer": o.state_dict()},
    "behind a scheduler": lambda m, o: {"s": torch.optim.lr_scheduler.StepLR(o, 3), "model": m, "optimizer": o},
    "in a list": lambda m, o: [[m, [o]]],
    "in an object": lambda m, o: Thing(network=m, optimizer=o, history=[1.5]),
    "two names": lambda m, o: {"model": m, "same": m, "optimizer": o, "weight": m[0].weight},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_live_objects_are_compressed_as_their_state_dicts(case, tmp_path):
    model, optimizer = trained()
    path, plain = tmp_path / "live.pt", tmp_path / "plain.pt"
    torch.save(CASES[case](model, optimizer), path)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, plain)
    manifest, expected = map(ckpt8.compress, (path, plain))
    prefix = "module." if case == "wrapped" else ""
    assert [each.name for each in manifest.parameters] == [prefix + name for name in NAMES]
    assert [each.rule for each in manifest.parameters] == [each.rule for each in expected.parameters]
    size, other = (each.with_suffix(".ckpt8").stat().st_size for each in (path, plain))
    assert size < 1.06 * other
    found = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=1)
    assert not found.failures
    assert found.resume["with_weights"] == found.resume["parameters"] == len(NAMES)


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("case", ["both", "other keys", "a tuple", "wrapped", "behind a scheduler", "in an object"])
def test_resume_and_convert_take_them(case, tmp_path):
    model, optimizer = trained()
    torch.save(CASES[case](model, optimizer), tmp_path / "live.pt")
    ckpt8.compress(tmp_path / "live.pt", preset="lossless")
    fresh = network()
    again = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    rest = ckpt8.resume(tmp_path / "live.ckpt8", fresh, again)
    assert same(fresh.state_dict(), model.state_dict())
    assert same(again.state_dict()["state"], optimizer.state_dict()["state"])
    assert again.param_groups[0]["lr"] == 1e-3
    if case == "both":
        assert rest == {"epoch": 3}
        report = ckpt8.convert(tmp_path / "live.pt", tmp_path / "live-dcp", to="dcp")
        assert not any("needs this name" in line for line in report.dropped)
    ckpt8.convert(tmp_path / "live.ckpt8", tmp_path / "live.safetensors", to="safetensors", dtype="float32")
    fresh = network()
    ckpt8.resume(tmp_path / "live.safetensors", fresh)
    assert same(fresh.state_dict(), model.state_dict())


def test_what_comes_back_is_the_same_pickle(tmp_path):
    """The structure is kept byte for byte; Python's own unpickler then makes the objects."""
    model, optimizer = trained()
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "live.pt")
    ckpt8.compress(tmp_path / "live.pt")
    ckpt8.restore(tmp_path / "live.ckpt8", tmp_path / "back.pt")
    with zipfile.ZipFile(tmp_path / "live.pt") as one, zipfile.ZipFile(tmp_path / "back.pt") as other:
        for record in one.infolist():
            if "/data/" not in record.filename:
                assert one.read(record) == other.read(record.filename)
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert type(back["optimizer"]) is torch.optim.AdamW
    torch.testing.assert_close(back["model"].state_dict(), model.state_dict(), rtol=2e-4, atol=1e-6)
    assert back["optimizer"].param_groups[0]["params"][0] is back["model"][0].weight


def test_buffers_and_other_attributes_stay_exact(tmp_path):
    model, _ = trained()
    model.register_buffer("table", torch.randn(300, 300))
    model.attribute = torch.randn(300, 300)
    torch.save({"model": model}, tmp_path / "live.pt")
    with open_checkpoint(tmp_path / "live.pt") as checkpoint:
        roles = {each.name: each.role for each in classify(checkpoint.tree).tensors}
    assert roles["model.table"] is roles["model.attribute"] is Role.OTHER
    assert roles["model.0.weight"] is roles["model.2.1.weight"] is Role.WEIGHT


def test_odd_forms_and_shared_parts_take_no_time(tmp_path):
    deep = Thing(_parameters={"x": 1, 2: torch.ones(3), "t": torch.ones(3)}, _modules={}, _buffers=None)
    for _ in range(60):
        deep = Thing(_parameters={}, _modules={"m" * 200: deep, "again": deep, 3: None, "odd": 4})
    big = Thing(_parameters={f"p{k}": torch.ones(2) for k in range(500)}, _modules={})
    many = [Thing(_parameters={}, _modules={"big": big}) for _ in range(500)]
    state = {torch.ones(2): {"exp_avg": torch.ones(2)}, "text": 3}
    optimizers = [Thing(state=state, param_groups=[{"params": list(state)}, {"params": 3}, 4]) for _ in range(100)]
    odd = [Thing(_parameters=1, _modules=2), Thing(state={}, param_groups=[])]
    torch.save([deep, many, optimizers, *odd], tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert len(classify(checkpoint.tree).tensors) < 9000
        models, found = find(checkpoint.tree)
        assert sum(len(each.node) for each in models) < 5000
        assert found
