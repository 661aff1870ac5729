"""Schedulers, scalers, averages and random states take their entries with the model, or nothing changes at all."""

from __future__ import annotations

import copy
import faulthandler
import os
import random
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from resume_kit import same
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import ckpt8

LOOP = Path(__file__).parents[3] / "fixtures" / "examples" / "loop.py"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_loop_that_was_killed_has_the_losses_of_one_that_was_not(tmp_path, monkeypatch, capsys):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [str(LOOP), str(tmp_path / name), *arguments])
        runpy.run_path(str(LOOP), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    whole = run("whole.ckpt8")
    if not (child := os.fork()):
        faulthandler.disable()
        sys.stdout = (tmp_path / "printed").open("w", buffering=1)
        run("killed.ckpt8", "--kill-at", "14")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT
    assert (tmp_path / "printed").read_text().splitlines() == whole[:14]
    assert run("killed.ckpt8") == whole[12:]


class Loop:
    """A model with an optimizer and all that may stand beside them, a few steps on."""

    def __init__(self, make=lr_scheduler.CosineAnnealingLR, arguments=(10,), seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(64, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = make(self.optimizer, *arguments)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.ema = AveragedModel(self.model)

    def train(self, steps=3):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(torch.randn(4, 64)).square().sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step(*[1.0] * isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau))
            self.ema.update_parameters(self.model)
        return self

    @property
    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "ema")}

    def state(self):
        return {name: copy.deepcopy(part.state_dict()) for name, part in self.parts.items()}


SCHEDULERS = {
    "cosine": (lr_scheduler.CosineAnnealingLR, (10,)),
    "milestones": (lr_scheduler.MultiStepLR, ([2, 5],)),
    "lambda": (lr_scheduler.LambdaLR, (lambda step: 0.9**step,)),
    "one cycle": (lr_scheduler.OneCycleLR, (0.1, 20)),
    "plateau": (lr_scheduler.ReduceLROnPlateau, ()),
    "warm-up": (
        lambda of: lr_scheduler.SequentialLR(
            of, [lr_scheduler.ConstantLR(of), lr_scheduler.ExponentialLR(of, 0.9)], [2]
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("packed", [False, True])
def test_everything_is_as_it_was_saved_and_trains_on_alike(name, packed, tmp_path):
    loop, other = Loop(*SCHEDULERS[name]).train(), Loop(*SCHEDULERS[name], seed=1)
    torch.save({**loop.state(), "step": 3}, tmp_path / "a.pt")
    if packed:
        ckpt8.compress(tmp_path / "a.pt", tmp_path / "a.ckpt8", preset="lossless")
    rest = ckpt8.resume(tmp_path / ("a.ckpt8" if packed else "a.pt"), **other.parts)
    assert rest == {"step": 3}
    assert same(other.state(), loop.state())
    for one in (loop, other):
        torch.manual_seed(5)
        one.train(4)
    assert same(other.state(), loop.state())


KEYS = {
    "of Lightning": {"scheduler": ("lr_schedulers", 0), "model": ("state_dict",), "optimizer": ("optimizer_states", 0)},
    "other words": {"scheduler": ("sched",), "scaler": ("amp", "grad_scaler"), "ema": ("averaged_model",)},
    "no words": {"scheduler": ("a",), "scaler": ("b",), "ema": ("c",)},
}


@pytest.mark.parametrize("name", KEYS)
def test_an_entry_is_found_by_its_keys_and_its_name(name, tmp_path):
    loop, other = Loop().train(), Loop(seed=1)
    tree = {}
    for part, state in loop.state().items():
        first, *more = KEYS[name].get(part, (part,))
        tree[first] = ([state] if more == [0] else {more[0]: state}) if more else state
    torch.save(tree, tmp_path / "a.pt")
    ckpt8.resume(tmp_path / "a.pt", **other.parts)
    assert same(other.state(), loop.state())


def test_the_model_is_the_one_that_is_no_average_and_a_path_chooses_another(tmp_path):
    loop, other = Loop().train(), Loop(seed=1)
    average = copy.deepcopy(loop.model.state_dict())
    average["weight"] += 1
    torch.save({"model": loop.model.state_dict(), "model_ema": average, "step": 3}, tmp_path / "a.pt")
    copied = copy.deepcopy(other.model)
    assert ckpt8.resume(tmp_path / "a.pt", model=other.model, ema=copied) == {"step": 3}
    assert torch.equal(other.model.weight, loop.model.weight)
    assert torch.equal(copied.weight, average["weight"])
    ckpt8.resume(tmp_path / "a.pt", model=other.model, model_at="model_ema")
    assert torch.equal(other.model.weight, average["weight"])


def test_a_scaler_that_is_off_needs_no_entry(tmp_path):
    loop = Loop().train()
    torch.save({"model": loop.model.state_dict()}, tmp_path / "a.pt")
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert ckpt8.resume(tmp_path / "a.pt", model=loop.model, scaler=off) == {}


def _torch_state(left, upcoming):
    """The state of torch's generator with these counts, which stand at bytes 8 and 16."""
    raw = bytearray(torch.get_rng_state().numpy().tobytes())
    raw[8:12], raw[16:24] = left.to_bytes(4, sys.byteorder), upcoming.to_bytes(8, sys.byteorder)
    return torch.frombuffer(raw, dtype=torch.uint8)


def misfits(state):
    """By what is wrong: what is in the file, further arguments, and words of the message."""
    shifted = {**state["scaler"], "growth_interval": 1}
    torn = {**state, "ema": {"n_averaged": state["ema"]["n_averaged"], "module.weight": torch.ones(3)}}
    return {
        "nothing": ({**state, "scaler": 5}, {}, "scaler has no entry in the file; choose with scaler_at="),
        "two": ({**state, "scaler": 5, "scalers": [state["scaler"], shifted]}, {}, "scaler may be any of"),
        "an average of another shape": (torn, {}, "ema refuses its entry: Error"),
        "a class": ({**state, "scheduler": {"last_epoch": Path("x")}}, {}, "holds a pathlib"),
        "no random states": (state, {"rng": True}, "holds no state of random numbers"),
        "two random states": (
            {**state, "rng": [torch.get_rng_state(), torch.get_rng_state()]},
            {"rng": True},
            "holds 2 states of torch's random numbers",
        ),
        "a random state that is none": (
            {**state, "rng": (3, (1 << 40,) * 625, None)}, {"rng": True}, "random numbers is not valid"
        ),
        "a position outside of numpy's state": (
            {**state, "rng": ("MT19937", np.random.get_state()[1], 10**8, 0, 0.0)}, {"rng": True},
            "numpy's random numbers is not valid",
        ),
        "zeros, of which numpy draws normal numbers for ever": (
            {**state, "rng": ("MT19937", np.zeros(624, "u4"), 5, 0, 0.0)}, {"rng": True},
            "numpy's random numbers is not valid",
        ),
        "zeros for Python": (
            {**state, "rng": (3, (0,) * 625, None)}, {"rng": True}, "python's random numbers is not valid"
        ),
        "numbers that are left outside of torch's state": (
            {**state, "rng": _torch_state(left=624, upcoming=624)}, {"rng": True}, "torch's random numbers is not valid"
        ),
        "a text for the next of Python's numbers": (
            {**state, "rng": (3, random.getstate()[1], "x")}, {"rng": True}, "python's random numbers is not valid"
        ),
        "a generator of its own": (
            {**state, "numpy": np.random.Generator(np.random.MT19937(1)).bit_generator.state}, {"rng": True},
            "holds no state of random numbers;",
        ),
        "only the state of a sampler": (
            {**state, "sampler": {"generator": torch.get_rng_state()}}, {"rng": True},
            "no state of random numbers under a name such as rng or torch_rng, only sampler.generator;",
        ),
        "schedulers by name": (
            {**state, "scheduler": {"a": state["scheduler"], "b": {**state["scheduler"], "T_max": 5}}}, {},
            "scheduler may be any of scheduler.a, scheduler.b",
        ),
        "a method in a scheduler": (
            {**state, "scheduler": {**state["scheduler"], "step": 5}}, {}, "a CosineAnnealingLR: it has 'step'"
        ),
        "an optimizer in a scheduler": (
            {**state, "scheduler": {**state["scheduler"], "optimizer": 5}}, {}, "CosineAnnealingLR: it has 'optimizer'"
        ),
        "a model of another shape": (
            {**state, "model": {"weight": torch.ones(2), "bias": torch.ones(8)}}, {}, "weight"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", misfits(Loop().state()))
def test_where_something_does_not_fit_nothing_changes(name, tmp_path):
    tree, more, message = misfits(Loop().train().state())[name]
    torch.save(tree, tmp_path / "a.pt")
    other = Loop(seed=1).train(1)
    before, numbers = other.state(), (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    with pytest.raises(ckpt8.ResumeError, match=message):
        ckpt8.resume(tmp_path / "a.pt", **other.parts, **more)
    assert same(other.state(), before)
    after = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    assert same(after, numbers)


class Setting:
    """A schedule of somebody's own that sets the learning rate as it is loaded, and has two more attributes then."""

    def __init__(self, optimizer, fails=False):
        self.optimizer, self.fails, self.steps = optimizer, fails, 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps, self.more = state["steps"], True
        self.optimizer.param_groups[0]["lr"] = 1.0 / self.steps
        if self.fails:
            raise RuntimeError("no more")


class Refusing(torch.optim.Optimizer):
    """An optimizer that changes, then refuses its state."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def load_state_dict(self, state):
        super().load_state_dict(state)
        raise RuntimeError("not this one")


@pytest.mark.parametrize("refuses", ["the optimizer", "the next companion"])
def test_what_a_companion_does_to_an_optimizer_is_undone_with_it(refuses, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = (Refusing if refuses == "the optimizer" else torch.optim.SGD)(model.parameters(), lr=0.5)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    # The average fails again as it gets back its old state; the schedule gets its own all the same.
    schedule, average = Setting(optimizer), Setting(optimizer, fails=refuses != "the optimizer")
    torch.save({"optimizer": saved, "schedule": {"steps": 7}, "ema": {"steps": 9}}, tmp_path / "a.pt")
    with pytest.raises(ckpt8.ResumeError, match=r"does not take the saved state|ema refuses its entry: no more"):
        ckpt8.resume(tmp_path / "a.pt", optimizer=optimizer, scheduler=schedule, ema=average, scheduler_at="schedule")
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert vars(schedule) == {"optimizer": optimizer, "fails": False, "steps": 1}
    assert vars(average).keys() == {"optimizer", "fails", "steps"}


class Counting(torch.nn.Module):
    """A module whose extra state is a number; above ten it refuses it, after it has taken it."""

    def __init__(self, count):
        super().__init__()
        self.weight, self.count = torch.nn.Parameter(torch.full((2,), float(count))), count

    def get_extra_state(self):
        return {"count": self.count, "sum": self.weight.detach().sum()}

    def set_extra_state(self, state):
        self.count = state.pop("count")  # the second call needs a state that is whole
        self.fits = torch.equal(state["sum"], self.weight.sum())
        if self.count > 10:
            raise RuntimeError("too many")


@pytest.mark.parametrize("refuses", ["the scheduler", "the next module", "the optimizer"])
def test_an_extra_state_is_given_back_with_the_rest(refuses, tmp_path):
    last = 30 if refuses == "the next module" else 3
    model = torch.nn.Sequential(Counting(1), Counting(2))
    optimizer = (Refusing if refuses == "the optimizer" else torch.optim.SGD)(model.parameters(), lr=0.5)
    tree = {"model": torch.nn.Sequential(Counting(5), Counting(last)).state_dict(), "schedule": {"steps": 7}}
    torch.save({**tree, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    schedule = Setting(optimizer, fails=refuses == "the scheduler")
    before = copy.deepcopy(model.state_dict())
    reasons = "scheduler refuses its entry|model refuses 1._extra_state: too many|does not take the saved state"
    with pytest.raises(ckpt8.ResumeError, match=reasons):
        ckpt8.resume(tmp_path / "a.pt", model, optimizer, scheduler=schedule, scheduler_at="schedule")
    assert same(model.state_dict(), before)
    torch.save(tree, tmp_path / "b.pt")
    if refuses != "the next module":
        ckpt8.resume(tmp_path / "b.pt", model)
        assert [(module.count, module.fits) for module in model] == [(5, True), (3, True)]


def test_without_strict_what_does_not_fit_stays(tmp_path):
    loop, other = Loop().train(), Loop(seed=1)
    torch.save({**loop.state(), "scaler": None}, tmp_path / "a.pt")
    before = copy.deepcopy(other.scaler.state_dict())
    with pytest.warns(ckpt8.ResumeWarning, match="scaler has no entry"):
        ckpt8.resume(tmp_path / "a.pt", **other.parts, strict=False)
    assert other.scaler.state_dict() == before
    assert same(other.scheduler.state_dict(), loop.scheduler.state_dict())


def test_random_states_go_on_where_they_stopped(tmp_path):
    loop = Loop()
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    generator = torch.Generator().get_state()
    ckpt8.save({"model": loop.model.state_dict(), "rng": state, "sampler": generator}, tmp_path / "a.ckpt8")
    drawn = (random.random(), np.random.random(), torch.rand(3))
    rest = ckpt8.resume(tmp_path / "a.ckpt8", model=loop.model, rng=True)
    assert same((random.random(), np.random.random(), torch.rand(3)), drawn)
    assert rest.keys() == {"sampler"}


GLOBAL = [
    ("rng",), ("rng_state",), ("torch_rng",), ("cpu_rng_state",), ("rngs", "cpu"), ("states", "torch"), ("cpu",),
    ("torch_manual_seed",), ("RNGState",),
]  # fmt: skip
OTHERS = [
    ("sampler", "generator"), ("dataloader", "rng_state"), ("trainDataLoader", "torch_rng"), ("generator",),
    ("data", "sampler_rng"), ("loader", "cpu"), ("mask",), ("model", "table"),
]  # fmt: skip


@pytest.mark.parametrize("path", [*GLOBAL, *OTHERS], ids=".".join)
@pytest.mark.parametrize("python", [False, True])
def test_a_state_is_torch_s_only_where_its_name_says_so(path, python, tmp_path):
    """With Python's state there is no error: then what was left is in the result."""
    state = torch.Generator().manual_seed(3).get_state()
    tree = {"python": random.getstate()} if python else {}
    torch.save(tree | ({path[0]: {path[1]: state}} if len(path) > 1 else {path[0]: state}), tmp_path / "a.pt")
    torch.manual_seed(4)
    before = torch.get_rng_state()
    if path in OTHERS and not python:
        with pytest.raises(ckpt8.ResumeError, match=f"only {'.'.join(path)}; nothing"):
            ckpt8.resume(tmp_path / "a.pt", rng=True)
    else:
        rest = ckpt8.resume(tmp_path / "a.pt", rng=True)
        assert list(rest) == ([path[0]] if path in OTHERS else [])
    assert torch.equal(torch.get_rng_state(), before if path in OTHERS else state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheduler": 5}, "scheduler is 5; give an object with state_dict"),
        ({"ema": AveragedModel}, "ema is the class AveragedModel; give an object"),
        ({"scaler_at": "scaler"}, "scaler_at is given, and scaler is not"),
        ({"scaler": torch.amp.GradScaler("cpu"), "scaler_at": "no"}, "scaler_at='no' leads to no dictionary"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message, tmp_path):
    loop = Loop()
    torch.save(loop.state(), tmp_path / "a.pt")
    with pytest.raises(ckpt8.UsageError, match=message):
        ckpt8.resume(tmp_path / "a.pt", model=loop.model, **arguments)
