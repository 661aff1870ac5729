"""The optimizers inside the loops that people write: accumulation, clipping, compiled models, schedules, groups."""

from __future__ import annotations

import pytest
import torch
from optim_cases import ARGUMENTS, PLAIN, build
from torch import nn
from torch.optim import lr_scheduler

import ckpt8
from ckpt8.optim.state_conversion import moments_of

SCHEDULES = {
    "lambda": lambda optimizer, peak: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one-cycle": lambda optimizer, peak: lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=2 * peak,
        total_steps=12,
        cycle_momentum=bool({"betas", "momentum"} & optimizer.defaults.keys()),
    ),
    "cosine": lambda optimizer, peak: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.1 * peak),
}


def make_model(seed=0, width=72, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)
        return nn.Sequential(*layers).to(dtype)


def loss_of(model, step, rows=slice(None)):
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(32, 72, generator=generator)[rows].to(dtype)
    target = torch.tanh(x[:, :8].float() * 2)
    return nn.functional.mse_loss(model(x)[:, :8].float(), target)


def train(model, optimizer, steps, scheduler=None):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


# --- accumulation and clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradients_equal_one_backward_of_the_mean(name, parts):
    """Gradients differ by the order of their sums alone; where they are nearly 0, a first step may take either sign."""
    whole, split = make_model(), make_model()
    one, two = build(name, whole.parameters(), **PLAIN), build(name, split.parameters(), **PLAIN)
    loss_of(whole, 0).backward()
    one.step()
    size = 32 // parts
    for part in range(parts):
        (loss_of(split, 0, slice(part * size, (part + 1) * size)) / parts).backward()
    before = make_model()
    two.step()
    for p, q, start in zip(whole.parameters(), split.parameters(), before.parameters(), strict=True):
        moved = (p - start).detach().norm()
        assert float(moved) > 0
        assert float((p - q).detach().norm() / moved) < 0.05
    for p, q in zip(whole.parameters(), split.parameters(), strict=True):
        first, second = (moments_of(o.state[x], o.param_groups[0]) for o, x in ((one, p), (two, q)))
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, rtol=1e-3, atol=1e-6)


# --- compiled models ----------------------------------------------------------------------------------------------


# --- schedules ----------------------------------------------------------------------------------------------------


def history(optimizer, scheduler, steps=10):
    """lr and what is cycled with it, before every step."""
    found = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        found.append((float(group["lr"]), group.get("momentum", (group.get("betas") or [None])[0])))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_set_what_they_set_for_torch(name, schedule):
    peak = ARGUMENTS[name]["lr"]
    start = 0.9 if name != "SGD" else {"momentum": 0.9}
    ours = build(name, [nn.Parameter(torch.ones(4))])
    theirs_params = [nn.Parameter(torch.ones(4))]
    if name == "SGD":
        theirs = torch.optim.SGD(theirs_params, lr=peak, **start)
    else:
        theirs = torch.optim.AdamW(theirs_params, lr=peak, betas=(start, 0.999))
    found, expected = (history(o, SCHEDULES[schedule](o, peak)) for o in (ours, theirs))
    assert [lr for lr, _ in found] == [lr for lr, _ in expected]
    assert len({lr for lr, _ in found}) > 5
    if schedule == "one-cycle" and name not in ("Adafactor", "Ema"):  # which have neither momentum nor betas to cycle
        assert [cycled for _, cycled in found] == [cycled for _, cycled in expected]
        assert len({cycled for _, cycled in found}) > 5


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scheduled_run_continues_from_its_state(name, schedule, tmp_path):
    """What a scheduler adds to a group goes through ``ckpt8.save``, and betas in the middle of a cycle load."""
    peak = ARGUMENTS[name]["lr"]
    model = make_model()
    optimizer = build(name, model.parameters())
    scheduler = SCHEDULES[schedule](optimizer, peak)
    train(model, optimizer, 4, scheduler)
    tree = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "model": model.state_dict()}
    if schedule == "lambda":
        assert tree["scheduler"].pop("lr_lambdas") == [None]
    ckpt8.save(tree, tmp_path / "run.ckpt8", preset="lossless", threads=1)
    loaded = ckpt8.load(tmp_path / "run.ckpt8", threads=1)
    again = make_model(seed=1)
    again.load_state_dict(loaded["model"])
    other = build(name, again.parameters())
    resumed = SCHEDULES[schedule](other, peak)
    other.load_state_dict(loaded["optimizer"])
    loaded["scheduler"].setdefault("lr_lambdas", [None])
    resumed.load_state_dict(loaded["scheduler"])
    assert train(again, other, 6, resumed) == train(model, optimizer, 6, scheduler)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


# --- groups -------------------------------------------------------------------------------------------------------


def test_weight_decay_of_each_group(name):
    """Without a gradient's pull, only the group that decays shrinks, and by lr times its decay where decoupled."""
    params = [nn.Parameter(torch.full((80, 80), 0.5)) for _ in range(3)]
    decays = (0.0, 0.1, 0.3)
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(params, decays, strict=True)]
    optimizer = build(name, groups, lr=1e-2)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    still, little, much = (float((0.5 - p.detach()).mean()) for p in params)
    assert still == 0
    if name == "Adam":  # decay is a gradient there, and the first step has length lr
        assert little == pytest.approx(1e-2, rel=1e-3)
        assert much == pytest.approx(1e-2, rel=1e-3)
    else:
        assert little == pytest.approx(0.5 * 1e-2 * 0.1, rel=1e-3)
        assert much == pytest.approx(0.5 * 1e-2 * 0.3, rel=1e-3)
