"""An optimizer of one's own, a rule and a card, is packed, compressed, replayed and resumed like those of ckpt8."""

from __future__ import annotations

import pytest
import torch
from own_optimizer_kit import Ema, PlainEma, registered
from resume_kit import same

import ckpt8
from ckpt8.core.errors import ResumeError
from ckpt8.inspecting.container import inspect_container


@pytest.fixture(autouse=True)
def _known():
    with registered():
        yield


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 1100))


def advance(net, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(tmp_path, kind=PlainEma, preset="flash", **settings):
    """A run of four steps, saved and compressed: model, optimizer, path of the file."""
    net = model()
    optimizer = kind(net.parameters(), lr=0.05, weight_decay=0.1, **settings)
    advance(net, optimizer, 0, 4)
    path = tmp_path / "run.pt"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    ckpt8.compress(path, preset=preset, threads=1)
    return net, optimizer, path


def close(net, other):
    return all(torch.allclose(p, q, atol=1e-6) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_packed_steps_are_the_plain_ones():
    nets = model(), model()
    for net, kind, packing in zip(nets, (PlainEma, Ema), ({}, {"moment1": "lossless"}), strict=True):
        advance(net, kind(net.parameters(), lr=0.05, weight_decay=0.1, **packing), 0, 5)
    assert close(*nets)
    assert not close(nets[0], model())


def test_its_momentum_is_compressed_and_the_error_of_the_update_is_measured(tmp_path):
    _, _, path = run(tmp_path)
    with ckpt8.open(path.with_suffix(".ckpt8")) as file:
        assert {each.rule["kind"] for each in file.manifest.parameters} == {"momentum"}
    shown = inspect_container(path.with_suffix(".ckpt8"), tensors=True)
    [row] = [each for each in shown["tensors"] if each["name"] == "optimizer.state.4.velocity"]
    assert row["role"] == "moment1"
    assert "companded8" in row["codec"]
    assert 0 < shown["errors"]["update"]["nmse"] < 1e-2


@pytest.mark.parametrize("preset", ["lossless", "flash"])
def test_it_is_restored(tmp_path, preset):
    _, optimizer, path = run(tmp_path, preset=preset)
    ckpt8.restore(path.with_suffix(".ckpt8"), tmp_path / "again.pt", threads=1)
    again = torch.load(tmp_path / "again.pt", weights_only=True)["optimizer"]
    saved = optimizer.state_dict()
    assert same(again, saved) == (preset == "lossless")
    for key, state in saved["state"].items():
        found = again["state"][key]["velocity"]
        assert torch.allclose(found, state["velocity"], rtol=0.02, atol=float(state["velocity"].abs().max()) * 0.02)


def test_its_steps_are_replayed(tmp_path):
    _, _, path = run(tmp_path)
    result = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=3).resume
    assert result["parameters"] == result["with_weights"] == 6
    assert result["skipped"] == {}
    assert 0 < result["replay_error"] < 1e-2
    failures = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=3, max_replay_error=0.0).failures
    assert len(failures) == 1


@pytest.mark.parametrize("kind", [PlainEma, Ema])
def test_a_run_goes_on(tmp_path, kind):
    net, optimizer, path = run(tmp_path, preset="lossless")
    other = model(1)
    resumed = kind(other.parameters(), lr=1.0, **({} if kind is PlainEma else {"moment1": "lossless"}))
    ckpt8.resume(path.with_suffix(".ckpt8"), model=other, optimizer=resumed)
    assert resumed.param_groups[0]["lr"] == 0.05
    advance(net, optimizer, 4, 7)
    advance(other, resumed, 4, 7)
    assert close(net, other)


def test_a_packed_run_is_unpacked_for_the_plain_class(tmp_path):
    net, _, path = run(tmp_path, Ema)
    tree = ckpt8.load(path.with_suffix(".ckpt8"), unpack=True)
    plain = PlainEma(net.parameters())
    plain.load_state_dict(tree["optimizer"])
    assert {key for state in tree["optimizer"]["state"].values() for key in state} == {"velocity"}


def test_a_run_of_another_class_is_refused(tmp_path):
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    advance(net, sgd, 0, 2)
    torch.save({"model": net.state_dict(), "optimizer": sgd.state_dict()}, tmp_path / "sgd.pt")
    with pytest.raises(ResumeError, match="is of another optimizer than PlainEma: its parameter groups lack beta"):
        ckpt8.resume(tmp_path / "sgd.pt", model=model(), optimizer=PlainEma(model().parameters()))
