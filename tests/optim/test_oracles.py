"""Every rule against its published package, step by step, and packed state against unpacked."""

from __future__ import annotations

import came_pytorch
import lion_pytorch
import optimi
import pytest
import torch
from optim_cases import ARGUMENTS, PLAIN, SHAPES, advance, build, make_params, set_grads, trained
from own_optimizer_kit import PlainEma

from ckpt8.optim.optimizers import adam
from ckpt8.optim.packed_tensor import flat_blocks

ORACLES = {
    "AdamW": lambda params, **kw: torch.optim.AdamW(params, foreach=False, **kw),
    "Adam": lambda params, **kw: torch.optim.Adam(params, foreach=False, **kw),
    "StableAdamW": lambda params, **kw: optimi.StableAdamW(params, triton=False, foreach=False, **kw),
    "CAME": came_pytorch.CAME,
    "SGD": lambda params, **kw: torch.optim.SGD(params, foreach=False, **kw),
    "Lion": lion_pytorch.Lion,
    "Adafactor": lambda params, **kw: torch.optim.Adafactor(params, foreach=False, **kw),
    "Ema": PlainEma,
}

VARIANTS = [
    ("AdamW", {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.0}),
    ("AdamW", {"maximize": True}),
    ("Adam", {"weight_decay": 0.0}),
    ("StableAdamW", {"betas": (0.8, 0.95), "eps": 1e-3}),
    ("CAME", {"clip_threshold": 0.5, "betas": (0.5, 0.9, 0.99), "eps": (1e-8, 1e-6)}),
    ("SGD", {"momentum": 0.0}),
    ("SGD", {"nesterov": True}),
    ("SGD", {"dampening": 0.3, "maximize": True}),
    ("Lion", {"betas": (0.95, 0.98), "weight_decay": 0.0}),
    ("Adafactor", {"beta2_decay": -0.5, "eps": (1e-4, 0.1), "d": 2.0, "weight_decay": 0.0, "maximize": True}),
]

DRIFT = dict.fromkeys(("AdamW", "Adam", "StableAdamW", "Lion"), 0.25)
DRIFT |= {"CAME": 0.2, "SGD": 0.08, "Adafactor": 0.05, "Ema": 0.08}
"""Norm of the difference of the weights over the norm of the way they went, 20 steps of pure noise."""


def check(name, steps=20, **arguments):
    ours, theirs = make_params(), make_params()
    mine = build(name, ours, **PLAIN, **arguments)
    oracle = ORACLES[name](theirs, **{**ARGUMENTS[name], **arguments})
    for step in range(steps):
        for params, optimizer in ((ours, mine), (theirs, oracle)):
            advance(optimizer, params, step, step + 1)
        for p, q in zip(ours, theirs, strict=True):
            assert float((p - q).detach().abs().max()) <= 1e-5, (name, step, tuple(p.shape))


def test_unpacked_equals_the_published_package(name):
    check(name)


@pytest.mark.parametrize(("which", "arguments"), VARIANTS)
def test_other_arguments(which, arguments):
    check(which, steps=8, **arguments)


def test_amsgrad():
    """The rule alone knows it, for replay. The second moment falls, so that the largest is another."""
    [ours] = make_params(shapes=((70, 97),))
    theirs = torch.nn.Parameter(ours.detach().clone())
    settings = {"lr": 1e-2, "betas": (0.8, 0.7), "eps": 1e-8, "weight_decay": 0.1}
    oracle = torch.optim.AdamW([theirs], amsgrad=True, foreach=False, **settings)
    values = {name: torch.zeros(ours.numel()) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    values["param"] = ours.detach().reshape(-1).clone()

    def load(start, stop, shape, names):
        return [values[name][start:stop].clone().view(shape) for name in names]

    for step in range(1, 13):
        set_grads([theirs], step, scale=0.1 / step**2)
        values["grad"] = theirs.grad.reshape(-1).clone()
        oracle.step()
        cuts = flat_blocks(ours.numel(), load, 2048)
        new = adam([block for *_, block in cuts], {}, step=step, decoupled=True, amsgrad=True, **settings)
        for (start, stop, _), results in zip(cuts, new, strict=True):
            for name, value in results.items():
                values[name][start:stop] = value
        state = {**oracle.state[theirs], "param": theirs.detach()}
        for name in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(values[name], state[name].reshape(-1), rtol=1e-6, atol=1e-7)
    assert bool((values["max_exp_avg_sq"] > values["exp_avg_sq"]).float().mean() > 0.9)


@pytest.mark.parametrize("master", ["split24", "split32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_packed_stays_near_unpacked(name, dtype, master):
    """From the same values; a narrow parameter differs from its master by the rounding of its type besides."""
    start = make_params(dtype)
    packed = make_params(dtype)
    exact = [torch.nn.Parameter(p.detach().float().clone()) for p in start]
    one, two = build(name, packed, master=master), build(name, exact, **PLAIN)
    for step in range(20):
        set_grads(packed, step)
        for p, q in zip(packed, exact, strict=True):
            q.grad = p.grad.float()
        one.step()
        two.step()
    start, packed, exact = (torch.cat([p.detach().float().flatten() for p in each]) for each in (start, packed, exact))
    drift = float((packed - exact).norm() / (exact - start).norm())
    assert drift < DRIFT[name]
    assert drift > 0


def test_every_tensor_is_packed_but_small_ones(name):
    _, optimizer = trained(name, 1, torch.bfloat16)
    for shape, state in zip(SHAPES, optimizer.state_dict()["state"].values(), strict=True):
        small = shape in ((100,), ())
        assert state["residual"].dtype == (torch.int16 if small else torch.int8)
        moments = optimizer.moments(optimizer.param_groups[0], shape)
        assert {key for key in state if key.endswith("_codes")} == {f"{name}_codes" for name in moments if not small}
        assert state["step"].dtype == torch.int64
