"""The optimizer, learning rate and weight of every parameter, from files that the optimizers' own packages wrote."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.policy import Policy


def planned(path, **options):
    with open_source(path) as source:
        return plan_bundle(source, Policy.of("archive", **options))


def saved(tree, folder, **options):
    torch.save(tree, folder / "run.pt")
    return planned(folder / "run.pt", **options)


def steps(plan):
    """The step of every parameter, or why it has none, in the order of the optimizers' states."""
    return [p.step or p.stepless for p in sorted(parameters(plan), key=lambda p: p.moments["moment1"])]


def parameters(plan):
    return [unit.parameter for unit in plan.units if unit.parameter is not None]


def pairs(plan):
    """The name of the weight, or why it is unknown, by the name of the parameter."""
    names = {stream.index: stream.spec.name for stream in plan.streams}
    found = [p for p in parameters(plan) if p.step]
    return {p.name: p.step.unpaired if p.step.weight is None else names[p.step.weight] for p in found}


def check_units(plan):
    """Every stream is in one unit; a unit with a weight has all streams of its parameter, of one length."""
    indices = [stream.index for unit in plan.units for stream in unit.streams]
    assert sorted(indices) == list(range(len(indices)))
    offsets = [unit.streams[0].storage.offset for unit in plan.units]
    assert offsets == sorted(offsets)
    for unit in plan.units:
        assert len({stream.spec.numel for stream in unit.streams}) == 1
        if unit.parameter is not None:
            assert {stream.index for stream in unit.streams} == unit.parameter.streams


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64))


def trained(net, kind=torch.optim.AdamW, groups=None, **options):
    optimizer = kind(groups or net.parameters(), **{"lr": 1e-3, **options})
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("named", [False, True])
def test_a_file_of_model_and_optimizer(named, tmp_path):
    net = make_net()
    optimizer = trained(net, groups=list(net.named_parameters()) if named else None, betas=(0.8, 0.95))
    plan = saved({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    check_units(plan)
    assert pairs(plan) == {name: f"model.{name}" for name in net.state_dict()}
    for step in steps(plan):
        assert (step.optimizer, step.lr, step.beta1, step.beta2, step.unpaired) == (0, 1e-3, 0.8, 0.95, None)


def test_without_a_budget_nothing_changes(tmp_path):
    net = make_net()
    torch.save({"model": net.state_dict(), "optimizer": trained(net).state_dict()}, tmp_path / "run.pt")
    with open_source(tmp_path / "run.pt") as source:
        plan = plan_bundle(source, Policy.of("flash"))
    assert {(p.step, p.stepless) for p in parameters(plan)} == {(None, None)}
    assert {len(unit.streams) for unit in plan.units if unit.parameter is not None} == {2}


def test_the_rate_is_that_of_the_group_and_a_tenth_of_the_first_at_least(tmp_path):
    net = make_net()
    groups = [
        {"params": net[0].parameters(), "lr": 1e-3, "initial_lr": 5e-3},
        {"params": net[1].parameters(), "lr": torch.tensor(0.125)},
        {"params": net[2].parameters(), "lr": 0.0, "initial_lr": 2e-3},
        {"params": [net[3].weight], "lr": 0.0},
        {"params": [net[3].bias], "lr": 0.0},
    ]
    state = trained(net, groups=groups).state_dict()
    state["param_groups"][4]["lr"] = math.nan
    plan = saved({"model": net.state_dict(), "optimizer": state}, tmp_path)
    found = [step if isinstance(step, str) else step.lr for step in steps(plan)]
    zero, nan = "its learning rate is zero", "its learning rate is not a finite number"
    assert found == [1e-3, 1e-3, 0.125, 0.125, 2e-4, 2e-4, zero, nan]
