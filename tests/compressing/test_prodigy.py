"""Prodigy: steps at the distance that it estimates, against steps of its package from the checkpoint, in float64.

Without a gradient its next step follows from the state alone: m and v decay, and d stays.
"""

from __future__ import annotations

import copy
import math

import every_optimizer_kit as kit
import pytest
import torch
from torch import nn

import ckpt8
from ckpt8.inspecting.container import inspect_container

optimizers = pytest.importorskip("pytorch_optimizer")
BETAS, STEPS = (0.8, 0.95), 12
WAYS = {
    "as it is": {},
    "without bias": {"bias_correction": True},
    "decoupled decay": {"weight_decay": 0.1, "safeguard_warmup": True},
    "slow growth": {"growth_rate": 1.3, "weight_decay": 0.1, "weight_decouple": False},
}


def run(*, lr=0.7, **settings):
    """A trained network and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64))
    with kit.quiet():
        optimizer = optimizers.Prodigy(net.parameters(), lr=lr, betas=BETAS, d0=1e-4, **settings)
        for seed in range(STEPS):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            (net(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
    return net, optimizer


def tree_of(net, optimizer):
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def packed(tree, folder, **options):
    torch.save(tree, folder / "run.pt")
    return ckpt8.compress(folder / "run.pt", folder / "x.ckpt8", **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_moves_weights_by_what_the_container_states(way, tmp_path):
    net, optimizer = run(**WAYS[way])
    tree = tree_of(net, optimizer)
    manifest = packed(tree, tmp_path, budget=1.0)
    restored = ckpt8.load(tmp_path / "x.ckpt8")
    stated = inspect_container(tmp_path / "x.ckpt8")["steps"]

    (group,) = tree["optimizer"]["param_groups"]
    assert group["d"] > 2e-4, "d has grown, and averages hold several"
    wide = copy.deepcopy(net).double()
    with kit.quiet():
        again = optimizers.Prodigy(wide.parameters(), lr=0.7, betas=BETAS, **WAYS[way])
        again.load_state_dict(tree["optimizer"])
        before = [p.detach().clone() for p in wide.parameters()]
        for p in wide.parameters():
            p.grad = torch.zeros_like(p)
        again.param_groups[0]["weight_decay"] = 0.0
        again.step()

    beta1, beta2 = BETAS
    now, then = ([1 - beta**t for beta in BETAS] if way == "without bias" else [1.0, 1.0] for t in (STEPS, STEPS + 1))
    later = (beta1 / then[0] * now[0]) ** 2 / beta2 * then[1] / now[1]
    moved = weight = 0.0
    for number, (p, start) in enumerate(zip(wide.parameters(), before, strict=True)):
        v = tree["optimizer"]["state"][number]["exp_avg_sq"].double() / group["d"] ** 2 / (1 - beta2**STEPS)
        moved += float((v * (p.detach() - start).square()).sum()) / later
        name = list(tree["model"])[number]
        weight += float((v * (restored["model"][name].double() - tree["model"][name].double()).square()).sum())
    assert sum(record.steps["step"] for record in manifest.parameters) == pytest.approx(moved, rel=1e-5)
    assert stated["weight"] == pytest.approx(math.sqrt(weight / moved), rel=1e-4)
    assert 0.5 < stated["steps"] <= 1.0
    assert stated["drift"]["is_open"], "the run is young"
    assert torch.equal(restored["optimizer"]["state"][1]["p0"], tree["optimizer"]["state"][1]["p0"])
    resume = ckpt8.verify(tmp_path / "x.ckpt8", tmp_path / "run.pt", resume_steps=1)
    assert resume.failures == ()
    assert len(resume.resume["skipped"]) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("corrected", [False, True])
def test_both_packages_state_the_same_step(corrected, tmp_path):
    """prodigyopt has other names, and counts steps from zero."""
    tree = tree_of(*run(bias_correction=corrected))
    ours = packed(tree, tmp_path, budget=1.0)
    (group,) = tree["optimizer"]["param_groups"]
    assert group.pop("step") == STEPS + 1
    del group["bias_correction"], group["weight_decouple"], group["fixed_decay"], group["foreach"]
    group |= {"k": STEPS, "use_bias_correction": corrected, "decouple": True, "fsdp_in_use": False, "slice_p": 1}
    for state in tree["optimizer"]["state"].values():
        state["step"] = STEPS
    (tmp_path / "x.ckpt8").unlink()
    theirs = packed(tree, tmp_path, budget=1.0)
    assert [(p.steps, p.rule) for p in theirs.parameters] == [(p.steps, p.rule) for p in ours.parameters]


def two_groups(tree, **other):
    """The same with its vectors in a second group."""
    (group,) = tree["optimizer"]["param_groups"]
    tree["optimizer"]["param_groups"] = [{**group, "params": [0, 2]}, {**group, "params": [1, 3], **other}]


ODD = {
    "NaN": {"d": math.nan},
    "Inf": {"d": math.inf},
    "zero": {"d": 0.0},
    "negative": {"d": -1e-3},
    "a bool": {"d": True},
    "a text": {"d": "1"},
    "a list": {"d": [1e-3]},
    "none": {"d": None},
    "atan2": {"eps": None},
    "no rate": {"lr": math.nan},
    "no count": {"bias_correction": True, "step": None},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*ODD, "no d", "two rates", "two d"])
def test_what_says_too_little_of_a_step_makes_it_unknown(case, tmp_path):
    tree = tree_of(*run())
    (group,) = tree["optimizer"]["param_groups"]
    group |= ODD.get(case, {})
    if case == "no d":
        del group["d"]
    elif case.startswith("two"):
        two_groups(tree, **({"lr": 0.5} if case == "two rates" else {"d": 2 * group["d"]}))
    packed(tree, tmp_path, budget=1.0)
    assert inspect_container(tmp_path / "x.ckpt8")["steps"]["steps"] is None
    assert ckpt8.verify(tmp_path / "x.ckpt8", tmp_path / "run.pt", resume_steps=1).failures == ()


@pytest.mark.filterwarnings("ignore")
def test_equal_groups_are_as_one(tmp_path):
    tree = tree_of(*run())
    one = packed(tree, tmp_path, budget=1.0)
    two_groups(tree, weight_decay=0.0)
    (tmp_path / "x.ckpt8").unlink()
    two = packed(tree, tmp_path, budget=1.0)
    assert sorted(p.steps["step"] for p in one.parameters) == sorted(p.steps["step"] for p in two.parameters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["DAdaptAdam", "DAdaptAdan", "DAdaptLion"])
def test_other_optimizers_that_estimate_a_distance_stay_unknown(name, tmp_path):
    model, optimizer = kit.trained(getattr(optimizers, name), 0, 3)
    packed(tree_of(model, optimizer), tmp_path, budget=1.0)
    assert inspect_container(tmp_path / "x.ckpt8")["steps"]["steps"] is None
