"""Replayed steps: the rules against the published optimizers, the drift against real optimizers, and its limits."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise

import pytest
import torch
from resume_kit import OPTIMIZERS
from torch import nn

import ckpt8
from ckpt8 import cli, replay
from ckpt8.errors import CheckFailedError, UsageError
from ckpt8.readers import open_checkpoint
from ckpt8.resuming.pairing import saved_parameters

REPLAYED = {
    "torch-adamw": 0.1,
    "torch-adamw-amsgrad": 0.1,
    "torch-adam": 0.01,
    "optimi-stable-adamw": 0.1,
    "optimi-adamw": 0.1,
    "came-pytorch": 0.1,
    "pytorch-optimizer-came": 0.1,
    "pytorch-optimizer-stable-adamw": 0.1,
}
STEPS = 4


def model() -> nn.Sequential:
    """A matrix and a vector that are large enough to be compressed, and small ones."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 70_000 // 64))


@pytest.fixture
def make(tmp_path):
    def make(name: str, preset: str = "flash", steps: int = 5):
        net = model()
        optimizer = OPTIMIZERS[name](net.parameters(), 0.01)
        for group in optimizer.param_groups:
            group["weight_decay"] = REPLAYED.get(name, 0.0)
        for _ in range(steps):
            for p in net.parameters():
                p.grad = torch.randn_like(p) * 10 ** torch.randn(1)
            optimizer.step()
        path = tmp_path / "run.pt"
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
        ckpt8.compress(path, preset=preset, threads=1, force=True)
        return path

    return make


def steps_of(path, **settings):
    return ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=STEPS, **settings).resume


def advance(path, name, gradients) -> list[list[torch.Tensor]]:
    """Weights after each step of the real optimizer."""
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters(), 0.5)
    ckpt8.resume(path, net, optimizer)
    found = []
    for step in range(STEPS):
        for number, p in enumerate(net.parameters()):
            p.grad = gradients[number, step].clone()
        optimizer.step()
        found.append([p.detach().clone() for p in net.parameters()])
    return found


@pytest.mark.parametrize("name", REPLAYED)
def test_the_drift_is_that_of_the_real_optimizer(make, monkeypatch, name):
    path = make(name)
    gradients, weights = {}, {}
    noise, measure = replay._noise, replay._measure

    def recorded(scale, number, step):
        gradients[number, step] = noise(scale, number, step)
        return gradients[number, step]

    def watched(u, v, original, compressed):
        number = len(weights) // STEPS
        weights[number, len(weights) % STEPS] = original.weight.clone(), compressed.weight.clone()
        return measure(u, v, original, compressed)

    monkeypatch.setattr(replay, "_noise", recorded)
    monkeypatch.setattr(replay, "_measure", watched)
    result = steps_of(path, threads=1)
    assert result["parameters"] == result["with_weights"] == 6
    assert result["skipped"] == {}
    sides = [advance(each, name, gradients) for each in (path, path.with_suffix(".ckpt8"))]
    for step in range(STEPS):
        for side in (0, 1):
            for number, real in enumerate(sides[side][step]):
                torch.testing.assert_close(weights[number, step][side], real, rtol=1e-5, atol=1e-6)
        before, after = (torch.cat([w.flatten() for w in side[step]]).double() for side in sides)
        rms = float((after - before).norm() / before.norm())
        assert result["steps"][step]["weight_rms"] == pytest.approx(rms, rel=0.05)
        assert rms > 0


@pytest.mark.parametrize("name", REPLAYED)
def test_lossless_does_not_drift(make, name):
    result = steps_of(make(name, "lossless"), max_drift=0.0)
    assert result["drift"] == 0.0
    assert all(step["update_max"] == step["weight_max"] == 0.0 for step in result["steps"])
    assert result["parameters"] == 6


def test_the_drift_is_small_and_the_same_everywhere(make):
    path = make("torch-adamw")
    one, two = (steps_of(path, threads=threads) for threads in (1, 2))
    assert one == two
    assert 1e-7 < one["drift"] < 5e-3
    assert one["drift"] == max(step["update_nmse"] for step in one["steps"])
    assert all(a["weight_rms"] < b["weight_rms"] for a, b in pairwise(one["steps"]))
    compact = steps_of(make("torch-adamw", "compact"))
    assert compact["drift"] > 3 * one["drift"]


def test_gradients_have_the_scale_of_the_second_moments(make, monkeypatch):
    path = make("torch-adamw", steps=200)
    scales = []
    monkeypatch.setattr(replay, "_noise", lambda scale, *_: scales.append(scale.mean().item()) or scale * 0)
    steps_of(path, threads=1)
    state = torch.load(path, weights_only=True)["optimizer"]["state"]
    for number, entry in state.items():
        expected = (entry["exp_avg_sq"] / (1 - 0.999**200)).sqrt().mean().item()
        assert scales[number * STEPS] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["torch-sgd-momentum", "lion-pytorch", "torch-adafactor"])
def test_what_is_not_replayed_is_told(make, name):
    path = make(name)
    result = steps_of(path)
    assert result["parameters"] == 0
    assert len(result["skipped"]) == (0 if name != "lion-pytorch" else 6)
    failures = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=1, max_drift=1.0).failures
    assert failures == ("no parameter could be replayed, so that the drift is unknown",)


def test_a_limit_that_is_passed(make):
    path = make("came-pytorch")
    worst = steps_of(path)["drift"]
    failures = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=STEPS, max_drift=worst * 0.99).failures
    assert len(failures) == 1
    assert "the drift of the update over 4 steps" in failures[0]
    assert not ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=STEPS, max_drift=worst).failures


def test_arguments_that_ask_for_nothing(make):
    path = make("torch-adamw", steps=1)
    with pytest.raises(UsageError, match="give --against"):
        ckpt8.verify(path.with_suffix(".ckpt8"), resume_steps=1)
    with pytest.raises(UsageError, match="give --resume-steps"):
        ckpt8.verify(path.with_suffix(".ckpt8"), path, max_drift=1.0)


def test_another_original(make, tmp_path):
    path = make("torch-adamw")
    container = path.with_suffix(".ckpt8").rename(tmp_path / "other.ckpt8")
    other = make("came-pytorch")
    with pytest.raises(CheckFailedError):
        ckpt8.verify(container, other, resume_steps=1)


def run_cli(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ckpt8", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return caught.value.code or 0, out, err


def test_the_command_line(make, monkeypatch, capsys):
    path = make("torch-adamw")
    arguments = ["verify", path.with_suffix(".ckpt8"), "--against", path, "--resume-steps", 3]
    code, out, _ = run_cli(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "replayed 3 steps of 6 parameters (6 with their weights)" in out
    code, out, err = run_cli(monkeypatch, capsys, *arguments, "--max-drift", "1e-9", "--json")
    assert code == 1
    result = json.loads(out)["resume"]
    assert len(result["steps"]) == 3
    assert set(result["steps"][0]) == {"update_nmse", "update_max", "weight_rms", "weight_max"}
    assert "above 1e-09" in err
    assert math.isclose(result["drift"], max(step["update_nmse"] for step in result["steps"]))


def pairs(tmp_path, tree) -> dict[str, str | None]:
    """Names of the parameters and of the weights they are paired with."""
    torch.save(tree, tmp_path / "pairs.pt")
    with open_checkpoint(tmp_path / "pairs.pt") as checkpoint:
        weights = {id(ref): name for name, ref in checkpoint.tree["model"].items()}
        return {p.name: p.weight and weights[id(p.weight)] for p in saved_parameters(checkpoint.tree)}


def with_state(net, params, **settings):
    optimizer = torch.optim.Adam(params, **settings)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def test_pairing_by_name_and_by_place(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(pairs(tmp_path, with_state(net, net.parameters())).values()) == names
    named = with_state(net, list(net.named_parameters())[::-1])
    assert pairs(tmp_path, named) == {name: name for name in names[::-1]}
    split = [[net[0].weight, net[1].weight], [net[0].bias, net[1].bias]]
    assert list(pairs(tmp_path, with_state(net, [{"params": p} for p in split])).values()) == [
        "0.weight", "1.weight", "0.bias", "1.bias",
    ]  # fmt: skip


def test_pairing_without_a_guess(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both = [{"params": list(layer.parameters())} for layer in net]
    assert set(pairs(tmp_path, with_state(net, both)).values()) == {None}
    # One of two weights of a shape is not in the optimizer: which one?
    some = pairs(tmp_path, with_state(net, [net[0].weight, net[0].bias, net[1].bias]))
    assert list(some.values()) == [None, "0.bias", "1.bias"]


def test_a_penalty_needs_the_weight(tmp_path):
    net = model()
    path = tmp_path / "run.pt"
    for decay, skipped in ((0.01, 6), (0.0, 0)):
        state = with_state(net, net.parameters(), weight_decay=decay)
        torch.save({"optimizer": state["optimizer"]}, path)
        ckpt8.compress(path, threads=1, force=True)
        result = steps_of(path)
        assert list(result["skipped"].values()) == skipped * ["its weight, which an L2 penalty needs, was not found"]
        assert result["parameters"] == 6 - skipped
        assert result["steps"][0]["weight_rms"] is None
