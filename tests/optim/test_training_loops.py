"""The optimizers inside the loops that people write: accumulation, clipping, compiled models, schedules, groups."""

from __future__ import annotations

import shutil

import pytest
import torch
from optim_cases import ARGUMENTS, PLAIN, build
from torch import nn
from torch.optim import lr_scheduler

import ckpt8
from ckpt8.optim.state_conversion import moments_of

TORCHS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD}
"""The optimizers that torch has too."""


def one_cycle(optimizer, peak):
    cycled = bool({"betas", "momentum"} & optimizer.defaults.keys())
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2 * peak, total_steps=12, cycle_momentum=cycled)


SCHEDULES = {
    "lambda": lambda optimizer, peak: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one-cycle": one_cycle,
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


def assert_close(one, other, atol=1e-5):
    for (key, p), q in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


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
    two.step()
    for p, q, start in zip(whole.parameters(), split.parameters(), make_model().parameters(), strict=True):
        moved = (p - start).detach().norm()
        assert float(moved) > 0
        assert float((p - q).detach().norm() / moved) < 0.05
        first, second = (moments_of(o.state[x], o.param_groups[0]) for o, x in ((one, p), (two, q)))
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_before_the_step_equals_clipped_gradients(name, dtype):
    """The optimizer reads the gradient that clipping left, in its place and element type."""
    clipped, expected = make_model(dtype=dtype), make_model(dtype=dtype)
    one, two = build(name, clipped.parameters()), build(name, expected.parameters())
    bound = 0.05
    for step in range(3):
        for model, optimizer in ((clipped, one), (expected, two)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(clipped.parameters(), bound)
        assert float(norm) > bound
        after = torch.stack([p.grad.float().norm() for p in clipped.parameters()]).norm()
        assert float(after) == pytest.approx(bound, rel=0.02)
        factor = (bound / (norm + 1e-6)).clamp(max=1.0)
        for p in expected.parameters():
            p.grad = p.grad * factor.to(p.grad.dtype)
        one.step()
        two.step()
    for p, q in zip(clipped.parameters(), expected.parameters(), strict=True):
        assert p.dtype == dtype
        assert torch.equal(p, q)


def test_clipping_changes_the_step_where_it_should():
    free, clipped = make_model(), make_model()
    for model, bound in ((free, 1e9), (clipped, 1e-3)):
        optimizer = build("SGD", model.parameters(), weight_decay=0.0)
        loss_of(model, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
    start = list(make_model().parameters())
    pairs = [zip(model.parameters(), start, strict=True) for model in (free, clipped)]
    far, near = (torch.stack([(p - s).detach().norm() for p, s in each]).norm() for each in pairs)
    assert float(near) == pytest.approx(ARGUMENTS["SGD"]["lr"] * 1e-3, rel=1e-2)
    assert float(far) > 10 * float(near)


# --- compiled models ----------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_trains_as_it_does_uncompiled(name):
    plain, other = make_model(), make_model()
    compiled = torch.compile(other, backend="aot_eager")
    usual = train(plain, build(name, plain.parameters()), 6)
    losses = train(compiled, build(name, compiled.parameters()), 6)
    assert losses == pytest.approx(usual, rel=1e-3)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor():
    plain, other = make_model()[:2], make_model()[:2]
    compiled = torch.compile(other, backend="inductor")
    usual = train(plain, build("AdamW", plain.parameters()), 4)
    assert train(compiled, build("AdamW", compiled.parameters()), 4) == pytest.approx(usual, rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("into", ["plain", "compiled"])
def test_names_of_a_compiled_model_resume(into, tmp_path):
    """Saved as ``_orig_mod.0.weight`` with torch's AdamW, resumed into either kind of model."""
    model = torch.compile(make_model(), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, 3)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    assert all(key.startswith("_orig_mod.") for key in tree["model"])
    ckpt8.save(tree, tmp_path / "run.ckpt8", preset="lossless", threads=1)
    again = make_model(seed=1)
    again = torch.compile(again, backend="aot_eager") if into == "compiled" else again
    other = torch.optim.AdamW(again.named_parameters(), lr=1.0)
    assert ckpt8.resume(tmp_path / "run.ckpt8", model=again, optimizer=other, threads=1) == {"step": 3}
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])
    assert other.param_groups[0]["lr"] == 1e-2
    assert train(again, other, 3) == pytest.approx(train(model, optimizer, 3), rel=1e-4)


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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("which", TORCHS)
def test_scheduled_steps_equal_torchs(which, schedule):
    """What the scheduler sets takes effect: the path of the weights is torch's."""
    ours, theirs = make_model(), make_model()
    one = build(which, ours.parameters(), **PLAIN)
    two = TORCHS[which](theirs.parameters(), **ARGUMENTS[which])
    for model, optimizer in ((ours, one), (theirs, two)):
        train(model, optimizer, 10, SCHEDULES[schedule](optimizer, ARGUMENTS[which]["lr"]))
    assert_close(ours, theirs, atol=1e-4)
    constant = make_model()
    train(constant, build(which, constant.parameters(), **PLAIN), 10)
    pairs = zip(ours.parameters(), constant.parameters(), strict=True)
    assert max(float((p - q).detach().abs().max()) for p, q in pairs) > 1e-3


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
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(params, (0.0, 0.1, 0.3), strict=True)]
    optimizer = build(name, groups, lr=1e-2)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    still, little, much = (float((0.5 - p.detach()).mean()) for p in params)
    assert still == 0
    # For Adam decay is a gradient, and the first step has length lr.
    expected = (1e-2, 1e-2) if name == "Adam" else (0.5 * 1e-2 * 0.1, 0.5 * 1e-2 * 0.3)
    assert (little, much) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("which", TORCHS)
def test_groups_equal_torchs(which):
    """Matrices decay at one rate of learning, vectors do not at another."""

    def groups(model):
        matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
        return [
            {"params": matrices, "weight_decay": 0.2},
            {"params": vectors, "weight_decay": 0.0, "lr": 0.2 * ARGUMENTS[which]["lr"]},
        ]

    ours, theirs = make_model(), make_model()
    train(ours, build(which, groups(ours), **PLAIN), 5)
    train(theirs, TORCHS[which](groups(theirs), **ARGUMENTS[which]), 5)
    assert_close(ours, theirs, atol=2e-5)
