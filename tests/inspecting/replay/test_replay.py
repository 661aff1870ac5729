"""Replayed steps: figures against real optimizers, limits, and what is left out: only for what is true of the original.

Only what compression did makes ``verify`` fail.
"""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise

import optimi
import pytest
import pytorch_optimizer
import torch
from resume_kit import OPTIMIZERS
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning import replayed
from ckpt8.checkpoint.meaning.pairing import saved_parameters
from ckpt8.checkpoint.meaning.replayed import Replayed, find_rule
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.tree import TensorRef, is_setting, read_settings
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, UsageError
from ckpt8.core.tensors import DType, contiguous_stride
from ckpt8.core.workers import Workers
from ckpt8.inspecting import replay

REPLAYED = {
    "torch-adamw": 0.1,
    "torch-adamw-amsgrad": 0.1,
    "torch-adam": 0.01,
    "optimi-stable-adamw": 0.1,
    "optimi-adamw": 0.1,
    "came-pytorch": 0.1,
    "pytorch-optimizer-came": 0.1,
    "pytorch-optimizer-stable-adamw": 0.1,
    "torch-sgd-momentum": 0.01,
    "torch-sgd-dampened": 0.01,
    "lion-pytorch": 0.1,
    "optimi-lion": 0.1,
    "pytorch-optimizer-lion": 0.1,
    "pytorch-optimizer-lion-l2": 0.01,
}
"""Weight decay of every optimizer that is replayed."""

FACTORIES = {
    **OPTIMIZERS,
    "torch-sgd-dampened": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.8, dampening=0.3),
    "pytorch-optimizer-lion-l2": lambda params, lr: pytorch_optimizer.Lion(params, lr=lr, weight_decouple=False),
    "torch-muon": lambda params, lr: torch.optim.Muon([p for p in params if p.dim() == 2], lr=lr),
    "optimi-lion-decoupled": lambda params, lr: optimi.Lion(params, lr=lr, decouple_lr=True, triton=False),
    "torch-sgd-undamped": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=1.0),
}
COUPLED = {"torch-adam", "torch-sgd-momentum", "torch-sgd-dampened", "pytorch-optimizer-lion-l2"}
"""Those whose weight decay is part of the gradient."""

STEPS = 4
FEW_STEPS = 2.0**-22


def model() -> nn.Sequential:
    """A matrix and a vector that are large enough to be compressed, and small ones."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 70_000 // 64))


@pytest.fixture
def make(tmp_path):
    def make(name: str, preset: str = "flash", steps: int = 5):
        net = model()
        optimizer = FACTORIES[name](net.parameters(), 0.01)
        for group in optimizer.param_groups:
            group["weight_decay"] = REPLAYED.get(name, 0.1)
            if name == "optimi-adamw":  # late enough, for this beta, that RAdam would take the same steps
                group["beta2"], steps = 0.75, 60
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


def update_of(params, optimizer, gradients, name) -> list[torch.Tensor]:
    """What the real optimizer takes from weights of zero at a learning rate of one: the update with all its digits."""
    zeros = [nn.Parameter(torch.zeros_like(p)) for p in params]
    twin = FACTORIES[name](zeros, 1.0)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    decay = twin.param_groups[0]["weight_decay"] if name in COUPLED else 0.0
    twin.param_groups[0].update(lr=1.0, weight_decay=0.0)
    for zero, p, grad in zip(zeros, params, gradients, strict=True):
        zero.grad = grad + decay * p.detach()
    twin.step()
    return [-zero.detach() for zero in zeros]


def real_steps(path, name, gradients) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Update and weights of each step of the real optimizer."""
    net = model()
    optimizer = FACTORIES[name](net.parameters(), 0.5)
    ckpt8.resume(path, net, optimizer)
    params = list(net.parameters())
    found = []
    for step in range(STEPS):
        grads = [gradients[number, step].view(p.shape) for number, p in enumerate(params)]
        update = update_of(params, optimizer, grads, name)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        found.append((update, [p.detach().clone() for p in params]))
    return found


def joined(tensors) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors]).double()


@pytest.mark.by_default(most=4)
@pytest.mark.parametrize("name", REPLAYED)
def test_the_figures_are_those_of_the_real_optimizer(make, monkeypatch, name):
    path = make(name)
    gradients, owners = {}, []
    made = replayed.Gradients.at

    def recorded(self, step):
        owners.append(self) if self not in owners else None
        gradients[owners.index(self), step] = found = made(self, step)
        return found.clone()

    monkeypatch.setattr(replayed.Gradients, "at", recorded)
    with ContainerReader(path.with_suffix(".ckpt8")) as reader, Workers(1) as workers:
        result = replay.replay_files(reader, path, STEPS, workers).to_json()
    assert result["parameters"] == result["with_weights"] == 6
    assert result["skipped"] == result["without_weights"] == {}
    sides = [real_steps(each, name, gradients) for each in (path, path.with_suffix(".ckpt8"))]
    for told, (u, w), (v, x) in zip(result["steps"], *sides, strict=True):
        moved, apart = joined(v) - joined(u), joined(x) - joined(w)
        assert told["update_nmse"] == pytest.approx(float(moved.square().sum() / joined(u).square().sum()), rel=1e-5)
        assert told["weight_rms"] == pytest.approx(float(apart.norm() / joined(w).norm()), rel=1e-5)
        assert min(told.values()) > 0
        # The largest difference is one of two fp32 numbers: known to a few of their steps.
        close = float(joined(u).abs().max()) * FEW_STEPS
        assert told["update_max"] == pytest.approx(float(moved.abs().max()), abs=close)
        rms = [t.double().square().mean().sqrt() for t in w]
        units, apart = ([t.double() / size for t, size in zip(tensors, rms, strict=True)] for tensors in (w, x))
        close = float(joined(units).abs().max()) * FEW_STEPS
        assert told["weight_max"] == pytest.approx(float((joined(apart) - joined(units)).abs().max()), abs=close)


@pytest.mark.by_default("optimi-stable-adamw", "lion-pytorch")
@pytest.mark.parametrize("name", REPLAYED)
def test_lossless_steps_do_not_differ(make, name):
    result = steps_of(make(name, "lossless"), max_replay_error=0.0)
    assert result["replay_error"] == 0.0
    assert all(step["update_max"] == step["weight_max"] == 0.0 for step in result["steps"])
    assert result["parameters"] == 6


SKIPPED = {
    "torch-adafactor": "its state has no first moment",
    "optimi-lion-decoupled": "its weight decay does not follow the learning rate, which is not replayed",
    "torch-sgd-undamped": "hyperparameters are missing from the parameter group, or out of range",
}


@pytest.mark.by_default("optimi-lion-decoupled")
@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_not_replayed_is_told(make, run_command, name):
    path = make(name)
    result = steps_of(path)
    assert (result["parameters"], result["replay_error"], result["steps"]) == (0, None, [])
    assert len(result["skipped"]) == 6
    assert set(result["skipped"].values()) == {SKIPPED[name]}
    failures = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=1, max_replay_error=1.0).failures
    assert failures == ("no parameter could be replayed, so that the replay error is unknown",)
    _, out, _ = run_command("verify", path.with_suffix(".ckpt8"), "--against", path, "--resume-steps", 1)
    assert f"not replayed: {len(result['skipped'])} parameters: {SKIPPED[name]}" in " ".join(out.split())


@pytest.mark.by_default("torch-sgd-dampened", "optimi-lion")
@pytest.mark.parametrize("name", ["torch-sgd-momentum", "torch-sgd-dampened", "lion-pytorch", "optimi-lion"])
def test_independent_gradients_of_the_scale_give_the_momentum(name):
    """At the scale found from a momentum, noise brings forth a momentum of the same RMS."""
    p = nn.Parameter(torch.zeros(20_000))
    optimizer = FACTORIES[name]([p], 0.1)
    for step in range(600):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) * 0.3
        optimizer.step()
    saved = optimizer.state_dict()
    [(key, momentum)] = [(k, t) for k, t in saved["state"][0].items() if isinstance(t, torch.Tensor)]
    ref = TensorRef("0", DType.FLOAT32, 0, tuple(momentum.shape), (1,))
    rule = find_rule({key: ref}, saved["param_groups"][0], None)
    scale = rule.gradient_scale({key: momentum})
    assert scale.shape == p.shape
    assert float(scale[0]) == pytest.approx(0.3, rel=0.02)


def test_a_state_that_is_not_finite(make, monkeypatch):
    """Lion's sign hides it from the update: it must be told all the same."""
    path = make("lion-pytorch")
    read = replay.Replayable.read
    sides = []

    def spoiled(*arguments):
        side = read(*arguments)
        sides.append(side)
        if len(sides) == 2:
            side.state["exp_avg"][0] = math.nan
        return side

    monkeypatch.setattr(replay.Replayable, "read", spoiled)
    found = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=1, threads=1)
    assert found.failures == ("optimizer.state.0: a replayed step is not finite",)
    assert found.resume["parameters"] == 5


def test_arguments_that_ask_for_nothing_and_another_original(make, tmp_path):
    path = make("torch-adamw")
    with pytest.raises(UsageError, match="give --against"):
        ckpt8.verify(path.with_suffix(".ckpt8"), resume_steps=1)
    with pytest.raises(UsageError, match="give --resume-steps"):
        ckpt8.verify(path.with_suffix(".ckpt8"), path, max_replay_error=1.0)
    container = path.with_suffix(".ckpt8").rename(tmp_path / "other.ckpt8")
    other = make("came-pytorch")
    with pytest.raises(CheckFailedError):
        ckpt8.verify(container, other, resume_steps=1)


def pairs(tmp_path, tree) -> tuple[list[str], list[str | None], list[str | None]]:
    """Names of the parameters, and of the weights they are paired with; why others have none."""
    torch.save(tree, tmp_path / "pairs.pt")
    with open_checkpoint(tmp_path / "pairs.pt") as checkpoint:
        weights = {id(ref): name for name, ref in checkpoint.tree["model"].items()}
        saved = saved_parameters(checkpoint.tree)
        return [p.name for p in saved], [p.weight and weights[id(p.weight)] for p in saved], [p.unpaired for p in saved]


def with_state(net, params, **settings):
    optimizer = torch.optim.Adam(params, **settings)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def test_pairing_without_a_guess(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both = [{"params": list(layer.parameters())} for layer in net]
    alike = "cannot be told apart: the same shape in several groups"
    assert pairs(tmp_path, with_state(net, both))[1:] == (4 * [None], 4 * [alike])
    # One of two weights of a shape is not in the optimizer: which one?
    some = with_state(net, [net[0].weight, net[0].bias, net[1].bias])
    unequal = "cannot be told apart: there are not as many weights of the shape as parameters"
    assert pairs(tmp_path, some)[1:] == ([None, "0.bias", "1.bias"], [unequal, None, None])
    tree = with_state(net, list(net.named_parameters()))
    del tree["model"]["0.weight"]
    tree["model"]["1.bias"] = torch.zeros(5)
    why = ["no weight has its name", None, None, "the weight of its name has another shape"]
    assert pairs(tmp_path, tree)[1:] == ([None, "0.bias", "1.weight", None], why)
    tree["model"] = {"elsewhere": torch.zeros(3)}
    tree["optimizer"] = with_state(net, net.parameters())["optimizer"]
    assert pairs(tmp_path, tree)[1:] == (4 * [None], 4 * ["no weight has its shape"])
    tree["optimizer"]["param_groups"] *= 2
    assert pairs(tmp_path, tree)[1:] == (4 * [None], 4 * ["its parameter groups list a parameter twice"])


def test_pairing_by_name_and_by_place(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert pairs(tmp_path, with_state(net, net.parameters()))[1] == names
    named = with_state(net, list(net.named_parameters())[::-1])
    assert pairs(tmp_path, named)[:2] == (names[::-1], names[::-1])
    split = [[net[0].weight, net[1].weight], [net[0].bias, net[1].bias]]
    by_group = pairs(tmp_path, with_state(net, [{"params": p} for p in split]))
    assert by_group[1] == ["0.weight", "1.weight", "0.bias", "1.bias"]


def test_a_penalty_needs_the_weight(tmp_path):
    net = model()
    path = tmp_path / "run.pt"
    for decay, skipped in ((0.01, 6), (0.0, 0)):
        state = with_state(net, net.parameters(), weight_decay=decay)
        torch.save({"optimizer": state["optimizer"]}, path)
        ckpt8.compress(path, threads=1, force=True)
        result = steps_of(path)
        assert list(result["skipped"].values()) == skipped * ["its weight, which its step needs, was not found"]
        assert result["parameters"] == 6 - skipped
        assert [step["weight_rms"] for step in result["steps"]] == [None] * (0 if skipped else STEPS)
        assert list(result["without_weights"].values()) == (6 - skipped) * ["the file has no state dict of a model"]


def test_weights_that_are_not_found_are_told(make, run_command):
    path = make("torch-adamw")
    tree = torch.load(path, weights_only=True)
    tree["model"]["another"] = torch.zeros(64)  # a fourth vector of this shape, for three parameters
    torch.save(tree, path)
    ckpt8.compress(path, threads=1, force=True)
    result = steps_of(path)
    assert (result["parameters"], result["with_weights"]) == (6, 3)
    assert list(result["without_weights"]) == [f"optimizer.state.{k}" for k in (1, 2, 3)]
    [reason] = set(result["without_weights"].values())
    _, out, _ = run_command("verify", path.with_suffix(".ckpt8"), "--against", path, "--resume-steps", 1)
    assert f"weights: 3 of 6 parameters (3: {reason})" in " ".join(out.split())


@pytest.mark.slow
def test_the_replay_error_is_small_and_the_same_everywhere(make):
    path = make("torch-adamw")
    one, two = (steps_of(path, threads=threads) for threads in (1, 2))
    assert one == two
    assert 1e-7 < one["replay_error"] < 5e-3
    assert one["replay_error"] == max(step["update_nmse"] for step in one["steps"])
    assert all(a["weight_rms"] < b["weight_rms"] for a, b in pairwise(one["steps"]))
    coarser = steps_of(make("torch-adamw", "archive"))
    assert coarser["replay_error"] > 3 * one["replay_error"]


@pytest.mark.slow
def test_the_command_line(make, run_command):
    path = make("torch-adamw")
    arguments = ["verify", path.with_suffix(".ckpt8"), "--against", path, "--resume-steps", 3]
    worst = steps_of(path)["replay_error"]
    code, out, _ = run_command(*arguments, "--max-replay-error", worst)
    assert code == 0
    assert "replayed 3 steps of 6 parameters; replay error" in out
    code, out, err = run_command(*arguments, "--max-replay-error", "1e-9", "--json")
    assert code == 1
    result = json.loads(out)["resume"]
    assert len(result["steps"]) == 3
    assert set(result["steps"][0]) == {"update_nmse", "update_max", "weight_rms", "weight_max"}
    assert "above 1e-09" in err
    assert math.isclose(result["replay_error"], max(step["update_nmse"] for step in result["steps"]))


@pytest.mark.slow
def test_the_update_does_not_need_the_weight(make):
    """Without decay into the gradient, updates are the same whether the weight is known or not."""
    for name in ("came-pytorch", "lion-pytorch"):
        path = make(name)
        known = steps_of(path)
        torch.save({"optimizer": torch.load(path, weights_only=False)["optimizer"]}, path)
        ckpt8.compress(path, threads=1, force=True)
        unknown = steps_of(path)
        assert unknown["with_weights"] == 0
        assert unknown["replay_error"] == known["replay_error"] > 0


# What is left out, and why


def run_of(**settings):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 200))
    optimizer = torch.optim.AdamW(net.parameters(), **settings)
    for _ in range(4):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def replayed_run(tmp_path, tree):
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt", force=True, threads=1)
    found = ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt", resume_steps=3, threads=1)
    return found.failures, found.resume


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["NaN", "Inf"])
@pytest.mark.parametrize("place", ["weight", "exp_avg", "exp_avg_sq"])
def test_an_original_that_is_not_finite(tmp_path, place, value):
    tree = run_of()
    tensor = tree["model"]["1.weight"] if place == "weight" else tree["optimizer"]["state"][2][place]
    tensor[3, 5] = value
    failures, resume = replayed_run(tmp_path, tree)
    assert failures == ()
    name = "the weight" if place == "weight" else place
    assert resume["skipped"] == {"optimizer.state.2": f"{name} of the original is not finite"}
    assert resume["parameters"] == 3
    assert 0 < resume["replay_error"] < 1e-2


OVERFLOWS = {
    "weight": {"weight": 3e38, "lr": -10.0, "weight_decay": 1.0},
    "division": {"exp_avg": 3e38, "exp_avg_sq": 0.0, "eps": 1e-30},
}


@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_original_whose_next_step_is_not_finite(tmp_path, case):
    """The original overflows by itself: compression has not done that."""
    tree = run_of()
    for key, value in OVERFLOWS[case].items():
        if key == "weight":
            tree["model"]["0.weight"][0] = value
        elif key in tree["optimizer"]["state"][0]:
            tree["optimizer"]["state"][0][key][0] = value
        else:
            tree["optimizer"]["param_groups"][0][key] = value
    failures, resume = replayed_run(tmp_path, tree)
    assert failures == ()
    assert "a replayed step of the original is not finite" in resume["skipped"].values()


def test_settings_that_are_no_numbers_stay_as_they_are():
    """A list that holds itself is none."""
    group = {"params": [0, 1], "lr": "fast", "betas": [0.9, None], "long": list(range(99)), "none": None}
    assert read_settings(None, {}, group) == {**group, "betas": (0.9, None)}
    loop = [1.0]
    loop.append(loop)
    assert read_settings(None, {}, {"betas": loop})["betas"][1] is loop
    assert not is_setting(loop)
    assert is_setting([0.9, None, (3.4445, -4.775)])


def test_moments_of_bitsandbytes_in_32_bits(tmp_path):
    """Beside 8-bit states of large tensors, bitsandbytes keeps 32 bits for small ones, and these are compressed."""
    tree = run_of()
    states, (group,) = tree["optimizer"]["state"], tree["optimizer"]["param_groups"]
    for number, state in states.items():
        first, second = state.pop("exp_avg"), state.pop("exp_avg_sq")
        state["step"] = 4
        state |= {"state1": first, "state2": second}
        if number == 2:
            codes = torch.randint(0, 256, first.shape, dtype=torch.uint8)
            state |= {"state1": codes, "state2": codes.clone(), "qmap1": torch.rand(256), "absmax1": torch.rand(50)}
    for key in group.keys() - {"params", "lr", "betas", "eps", "weight_decay"}:
        del group[key]
    group |= {"alpha": 0.0, "t_alpha": None}
    failures, resume = replayed_run(tmp_path, tree)
    assert failures == ()
    assert resume["skipped"] == {"optimizer.state.2": "its state is in low precision already, which is not replayed"}
    assert (resume["parameters"], resume["with_weights"]) == (3, 3)
    assert 0 < resume["replay_error"] < 1e-2


TOGETHER = "its step depends on all parameters together, and is not replayed"
REASONS = {
    "second moments alone": (["exp_avg"], {}, "its state has no first moment"),
    "a step of all parameters": ([], {"d_coef": 1.0}, TOGETHER),
}


@pytest.mark.parametrize("case", REASONS)
def test_no_reason_claims_what_is_stored(tmp_path, case):
    """These moments are compressed: 'the presets keep all of it lossless' was false."""
    without, settings, reason = REASONS[case]
    tree = run_of()
    for state in tree["optimizer"]["state"].values():
        for key in without:
            del state[key]
    tree["optimizer"]["param_groups"][0] |= settings
    failures, resume = replayed_run(tmp_path, tree)
    assert failures == ()
    assert set(resume["skipped"].values()) == {reason}
    with ContainerReader(tmp_path / "run.ckpt8") as reader:
        stored = reader.manifest.storages
    assert any(each.role.value == "moment2" and each.codec["id"] == "companded8/1" for each in stored)


def ref(*shape: int) -> TensorRef:
    return TensorRef("0", DType.FLOAT32, 0, shape, contiguous_stride(shape))


def muon(shape: tuple[int, ...], **settings):
    group = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": None, "eps": 1e-7}
    steps = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5}
    return {"momentum_buffer": ref(*shape)}, {**group, **steps, **settings}


def nadam(**settings):
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3}
    state = {"exp_avg": ref(4, 4), "exp_avg_sq": ref(4, 4), "mu_product": ref(), "step": 7}
    return state, {**group, "decoupled_weight_decay": False, **settings}


def rmsprop(**settings):
    group = {"lr": 1e-3, "momentum": 0.9, "alpha": 0.99, "eps": 1e-8, "centered": True, "weight_decay": 0.0}
    return {"square_avg": ref(4, 4), "momentum_buffer": ref(4, 4), "step": 7}, {**group, **settings}


NO_STEP = "its rule takes no step from such a state with such hyperparameters"
MISSING = "hyperparameters are missing from the parameter group, or out of range"
HOSTILE = {
    "a matrix of three dimensions": (muon((3, 4, 4)), NO_STEP),
    "a vector": (muon((4,)), "its step takes a matrix, and its state is a vector"),
    "nothing": (muon((4, 0)), "it has no elements"),
    "endless iterations": (muon((4, 4), ns_steps=2**53), MISSING),
    "powers beyond floats": (nadam(momentum_decay=-1e308), NO_STEP),
    "a tensor too few": (rmsprop(), "its state lacks a tensor that its hyperparameters ask for"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_settings_that_no_rule_survives(case):
    """``compress`` calls the rule, too: it must not raise, and not take for ever."""
    (state, group), reason = HOSTILE[case]
    assert find_rule(state, group, state.get("step")) == reason


def test_endless_steps():
    """The product over all steps so far: a file may say that they are 2^53, and that beta is almost one."""
    state, group = nadam(betas=(1 - 2.0**-53, 0.99))
    assert isinstance(find_rule(state, group, 2**53), Replayed)
    assert isinstance(find_rule(*nadam(), 7), Replayed)
    assert isinstance(find_rule(*muon((4, 4)), None), Replayed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_settings_in_tensors(tmp_path, dtype):
    """torch keeps what the caller gave, a learning rate as a tensor for instance."""
    numbers = {"lr": 0.0078125, "betas": (0.875, 0.96875), "eps": 2.0**-14, "weight_decay": 0.0625}
    plain = run_of(**numbers)
    in_tensors = run_of(**numbers)
    for name, value in numbers.items():
        several = [torch.tensor(x, dtype=dtype) for x in (value if name == "betas" else [value])]
        in_tensors["optimizer"]["param_groups"][0][name] = tuple(several) if name == "betas" else several[0]
    expected, found = replayed_run(tmp_path, plain), replayed_run(tmp_path, in_tensors)
    assert expected == found
    assert (found[1]["parameters"], found[1]["skipped"]) == (4, {})
    with ContainerReader(tmp_path / "run.ckpt8") as reader:
        rules = [each.rule for each in reader.manifest.parameters]
    assert rules[0] == {"kind": "adam", "step": 4, "beta1": 0.875, "beta2": 0.96875, "eps": 2.0**-14}
