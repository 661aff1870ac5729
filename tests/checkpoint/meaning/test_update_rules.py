"""Update space against the steps that real optimizers take, and recognition of the states that they write."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule, recognise
from ckpt8.checkpoint.meaning.replayed import Confidence
from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.compressing.planning import make_plan
from ckpt8.compressing.policy import Policy
from ckpt8.core.tensors import DType

LR = 1e-2
EXACT = {"moment1": "lossless", "moment2": "lossless"}
SHAPES = ((48, 20), (20,), (3, 5, 7), (2, 3, 4, 5))


def parameters() -> list[nn.Parameter]:
    """Parameters at zero, so that the change of one step is the new value and loses no digits."""
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def gradients(params, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        scale = torch.exp2(torch.randint(-8, 3, p.shape, generator=generator).float())
        p.grad = torch.randn(p.shape, generator=generator) * scale * (1 if step < 3 else 0.05)


def run(make, steps: int):
    """Real steps; gives the optimizer, the parameters, and the change of the last step.

    The gradients of the last step are put back, since some optimizers use their memory.
    """
    params = parameters()
    optimizer = make(params)
    for step in range(steps):
        gradients(params, step)
        with torch.no_grad():
            for p in params:
                p.zero_()
        optimizer.step()
    gradients(params, steps - 1)
    return optimizer, params, [p.detach().clone() for p in params]


def flat(x):
    return None if x is None else x.reshape(-1)


def assert_same_step(change: torch.Tensor, u: torch.Tensor, lr: float = LR, rel: float = 1e-5) -> None:
    expected = -change.reshape(-1).double() / lr
    assert float(expected.abs().max()) > 1e-3
    assert float(((u.double() - expected).abs() / expected.abs().clamp(min=1e-6)).max()) < rel


def rules(tmp_path, optimizer, step):
    """Of every parameter of a checkpoint of this optimizer, as read from disk."""
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "optimizer.pt")
    with open_checkpoint(tmp_path / "optimizer.pt") as checkpoint:
        found = classify(checkpoint.tree).parameters
    return [recognise(parameter.state, parameter.group, step) for parameter in found]


ADAMS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0),
    "AdamW betas": lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.0),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, amsgrad=True, eps=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=LR),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=LR, amsgrad=True),
    "ckpt8 AdamW": lambda p: ckpt8.optim.AdamW(p, lr=LR, weight_decay=0.0, **EXACT),
    "ckpt8 Adam": lambda p: ckpt8.optim.Adam(p, lr=LR, eps=1e-4, **EXACT),
}


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("make", ADAMS.values(), ids=ADAMS.keys())
def test_adam(tmp_path, make, steps):
    optimizer, params, changes = run(make, steps)
    found = rules(tmp_path, optimizer, float(steps))
    group = optimizer.param_groups[0]
    for rule, p, change in zip(found, params, changes, strict=True):
        assert rule == UpdateRule("adam", steps, *group["betas"], group["eps"])
        state = optimizer.state[p]
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        u = rule.apply(flat(state["exp_avg"]), flat(second).sqrt(), None) * rule.factor
        assert_same_step(change, u)
    if group.get("amsgrad") and steps > 3:
        assert any(
            not torch.equal(optimizer.state[p]["max_exp_avg_sq"], optimizer.state[p]["exp_avg_sq"]) for p in params
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("package", ["optimi", "optimi foreach", "ckpt8"])
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_stable_adamw(tmp_path, steps, package):
    optimi = pytest.importorskip("optimi")
    eps = 1e-3

    def make(params):
        if package == "ckpt8":
            return ckpt8.optim.StableAdamW(params, lr=LR, weight_decay=0.0, eps=eps, **EXACT)
        foreach = package.endswith("foreach")
        return optimi.StableAdamW(params, lr=LR, weight_decay=0.0, eps=eps, foreach=foreach, triton=False)

    optimizer, params, changes = run(make, steps)
    found = rules(tmp_path, optimizer, None)
    for rule, p, change in zip(found, params, changes, strict=True):
        assert rule == UpdateRule("stable_adamw", eps=eps)
        assert rule.factor == 1.0
        state = optimizer.state[p]
        # The learning rate of a tensor is divided by the RMS of g / sqrt(v), where that is above one.
        ratio = p.grad.double().square() / state["exp_avg_sq"].double().clamp(min=eps**2)
        u = rule.apply(flat(state["exp_avg"]), flat(state["exp_avg_sq"]).sqrt(), None)
        assert_same_step(change, u, lr=LR / max(1.0, math.sqrt(float(ratio.mean()))))


@pytest.mark.parametrize("package", ["came_pytorch", "ckpt8"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_came(tmp_path, steps, package):
    came_pytorch = pytest.importorskip("came_pytorch")
    make = {"came_pytorch": came_pytorch.CAME, "ckpt8": partial(ckpt8.optim.CAME, moment1="lossless")}[package]
    optimizer, params, changes = run(lambda p: make(p, lr=LR, weight_decay=0.0), steps)
    found = rules(tmp_path, optimizer, None)
    for rule, p, change in zip(found, params, changes, strict=True):
        state = optimizer.state[p]
        assert (rule, rule.factor) == (UpdateRule("came" if p.dim() >= 2 else "momentum"), 1.0)
        factors = None
        if p.dim() >= 2:
            factors = Confidence(state["exp_avg_res_row"], state["exp_avg_res_col"]).at(0, p.numel())
        second = flat(state.get("exp_avg_sq"))
        u = rule.apply(flat(state["exp_avg"]), None if second is None else second.sqrt(), factors)
        assert_same_step(change, u)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_sgd_with_momentum(tmp_path, steps):
    optimizer, params, changes = run(lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), steps)
    for rule, p, change in zip(rules(tmp_path, optimizer, None), params, changes, strict=True):
        assert rule == UpdateRule("momentum")
        assert_same_step(change, rule.apply(flat(optimizer.state[p]["momentum_buffer"]), None, None) * rule.factor)


def test_factor():
    assert UpdateRule("adam", 1, 0.9, 0.999, 1e-8).factor == pytest.approx(10.0 * 0.001**0.5)
    assert UpdateRule("adam", 10**9, 0.9, 0.999, 1e-8).factor == 1.0
    assert UpdateRule("adam", 3, 0.0, 0.0, 1e-8).factor == 1.0
    for kind in ("stable_adamw", "came", "momentum"):
        assert UpdateRule(kind, 1, 0.9, 0.999, 1e-8).factor == 1.0


def dense_confidence(rows, columns) -> torch.Tensor:
    """The outer product as CAME writes it, in float64, and flat."""
    rows, columns = rows.double(), columns.double()
    r = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
    return (r * columns.unsqueeze(-2).rsqrt()).reshape(-1)


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (1, 9), (9, 1), (1, 1), (3, 7, 5), (2, 1, 3), (2, 3, 7, 5)])
def test_confidence_of_any_run(shape):
    generator = torch.Generator().manual_seed(len(shape))
    rows = torch.rand(shape[:-1], generator=generator) + 0.01
    columns = torch.rand(shape[:-2] + shape[-1:], generator=generator) + 0.01
    dense = dense_confidence(rows, columns)
    numel = math.prod(shape)
    assert dense.numel() == numel
    confidence = Confidence(rows, columns)
    before = rows.clone(), columns.clone()
    runs = [(a, b) for a in range(numel) for b in range(a + 1, numel + 1)]
    for a, b in runs if numel <= 60 else [*runs[::37], (0, numel)]:
        got = confidence.at(a, b)
        assert got.shape == (b - a,)
        assert torch.allclose(got.double(), dense[a:b], rtol=1e-6, atol=0), (a, b)
    assert torch.equal(rows, before[0])
    assert torch.equal(columns, before[1])


KINDS = dict.fromkeys(["RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"], "replayed")


@pytest.mark.parametrize(("name", "kind"), [*KINDS.items(), ("Rprop", None), ("ASGD", None)])
def test_other_optimizers_are_unknown_or_their_step_takes_a_gradient(tmp_path, name, kind):
    optimizer, params, _ = run(lambda p: getattr(torch.optim, name)(p, lr=LR), 3)
    found = rules(tmp_path, optimizer, 3.0)
    assert len(found) == len(params)
    assert {None if isinstance(rule, str) else rule.kind for rule in found} == {kind}


def tensor(*shape) -> TensorRef:
    return TensorRef("0", DType.FLOAT32, 0, shape, (1,) * len(shape))


ADAM_STATE = {"exp_avg": tensor(4), "exp_avg_sq": tensor(4)}
ADAM_GROUP = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "lr": 1e-3}
ADAM = UpdateRule("adam", 7, 0.9, 0.999, 1e-8)


def test_groups_that_say_adam():
    assert recognise(ADAM_STATE, ADAM_GROUP, 7) == ADAM
    assert recognise(ADAM_STATE, ADAM_GROUP, 7.0) == ADAM
    assert recognise(ADAM_STATE, {**ADAM_GROUP, "betas": [0.9, 0.999]}, 7) == ADAM
    # apex and DeepSpeed write bias_correction, the old AdamW of transformers wrote correct_bias
    for key, on, off in (("bias_correction", True, False), ("bias_correction", 1, 0), ("correct_bias", True, False)):
        group = {"betas": (0.9, 0.999), "eps": 1e-8}
        assert recognise(ADAM_STATE, {**group, key: on}, 7) == ADAM
        assert recognise(ADAM_STATE, {**group, key: off}, 7) == UpdateRule("stable_adamw", eps=1e-8)


OF_SOAP = {"betas": (0.95, 0.95), "eps": 1e-8, "correct_bias": True, "precondition_frequency": 10}
BETAS = [None, (0.9,), (0.9, 0.99, 0.999), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), ("0.9", "0.99"), (10**400, 0.9)]
UNKNOWN = [
    *((ADAM_STATE, ADAM_GROUP, step) for step in (None, 0, -3, 1.5, 2.0**60, math.nan, math.inf)),
    *((ADAM_STATE, {**ADAM_GROUP, "betas": betas}, 7) for betas in (*BETAS, (tensor(), tensor()))),
    *((ADAM_STATE, {**ADAM_GROUP, "eps": eps}, 7) for eps in (None, "1e-8", True, (1e-30, 1e-16), 10**400)),
    # Without Adam's own keys
    (ADAM_STATE, {key: value for key, value in ADAM_GROUP.items() if key != "amsgrad"}, 7),
    (ADAM_STATE, {}, 7),
    ({}, ADAM_GROUP, 7),
    ({"exp_avg_sq": tensor(4)}, ADAM_GROUP, 7),
    ({"exp_avg": 1.0, "exp_avg_sq": 2.0}, ADAM_GROUP, 7),
    # AdaBelief divides by exp_avg_var, which is not read here.
    ({"exp_avg": tensor(4), "exp_avg_var": tensor(4)}, ADAM_GROUP, 7),
    # SOAP keeps its second moments in the rotated basis of Q.
    ({**ADAM_STATE, "GG": [tensor(4, 4)], "Q": [tensor(4, 4)]}, OF_SOAP, 7),
    # Adan and LaProp
    ({**ADAM_STATE, "exp_avg_diff": tensor(4)}, ADAM_GROUP, 7),
    # AdEMAMix adds a slow average to m.
    ({**ADAM_STATE, "exp_avg_slow": tensor(4)}, {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "eps": 1e-8}, 7),
]


@pytest.mark.parametrize(("state", "group", "step"), UNKNOWN)
def test_incomplete_adam_and_its_relatives_are_unknown(state, group, step):
    assert isinstance(recognise(state, group, step), str)


SGD = {"momentum": 0.9, "dampening": 0, "nesterov": False}
OF_ONE_MOMENTUM = {
    "SGD": ("momentum_buffer", SGD, "momentum"),
    "nesterov": ("momentum_buffer", {**SGD, "nesterov": True}, "replayed"),
    "Lion": ("exp_avg", {"betas": (0.9, 0.99), "lr": 1e-4}, "replayed"),
    "Lion of optimi": ("exp_avg", {"beta1": 0.9, "beta2": 0.99, "lr": 1e-4}, "replayed"),
    "LARS": ("momentum_buffer", {**SGD, "eps": 1e-8}, None),
    "Muon": ("momentum_buffer", {"momentum": 0.9, "nesterov": False}, None),
    "Tiger": ("exp_avg", {"betas": 0.965}, None),
    "three betas": ("exp_avg", {"betas": (0.9, 0.99, 0.999)}, None),
    "no betas": ("exp_avg", {}, None),
}


@pytest.mark.parametrize("name", OF_ONE_MOMENTUM)
def test_optimizers_of_one_momentum(name):
    key, group, kind = OF_ONE_MOMENTUM[name]
    found = recognise({key: tensor(4)}, group, None)
    assert isinstance(found, str) if kind is None else found == UpdateRule(kind)
    assert isinstance(recognise({key: tensor(4), "gain": 1.5}, group, None), str)


def planned(tmp_path, optimizer_state):
    torch.save({"optimizer": optimizer_state}, tmp_path / "step.pt")
    with open_checkpoint(tmp_path / "step.pt") as checkpoint:
        return [unit.parameter for unit in make_plan(checkpoint, Policy()).units if unit.parameter is not None]


def adam_state(step, group_step=None):
    own, of_group = ({} if value is None else {"step": value} for value in (step, group_step))
    state = {"exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4), **own}
    return {"state": {0: state}, "param_groups": [{**ADAM_GROUP, "params": [0], **of_group}]}


DTYPES = {"fp32": torch.float32, "int64": torch.int64, "int32": torch.int32, "fp64": torch.float64}
STEPS = {"int": 7, "float": 7.0, **{name: torch.tensor(7, dtype=dtype) for name, dtype in DTYPES.items()}}
STEPS |= {"1-d": torch.tensor([7.0]), "view": torch.arange(10.0)[7]}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_step_in_the_state_or_in_the_group(tmp_path, step):
    for state in (adam_state(step), adam_state(None, step), adam_state(step, 99)):
        [parameter] = planned(tmp_path, state)
        assert parameter.rule == ADAM
        assert parameter.reason is None


NO_STEPS = [None, "7", *map(torch.tensor, ([7.0, 8.0], 0.0, 7.5, math.nan, math.inf))]


@pytest.mark.parametrize("step", NO_STEPS, ids=str)
def test_no_step_no_rule(tmp_path, step):
    [parameter] = planned(tmp_path, adam_state(step))
    assert parameter.rule is None
    assert "step" in parameter.reason


def test_real_checkpoints_plan_to_their_rules(tmp_path):
    """The step of torch's AdamW is a tensor in the file; the plan reads it from there."""
    optimizer, _, _ = run(ADAMS["AdamW amsgrad"], 7)
    found = planned(tmp_path, optimizer.state_dict())
    assert [parameter.rule for parameter in found] == [UpdateRule("adam", 7, 0.9, 0.999, 1e-4)] * len(SHAPES)
    assert [parameter.shape for parameter in found] == list(SHAPES)
    assert {parameter.denominator for parameter in found} == {"max_moment2"}
    assert {tuple(sorted(parameter.moments)) for parameter in found} == {("max_moment2", "moment1", "moment2")}


def test_came_plans_to_its_factors(tmp_path):
    came_pytorch = pytest.importorskip("came_pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer, _, _ = run(lambda p: came_pytorch.CAME(p, lr=LR), 2)
    found = planned(tmp_path, optimizer.state_dict())
    assert [parameter.rule.kind for parameter in found] == ["came", "momentum", "came", "came"]
    for parameter, shape in zip(found, SHAPES, strict=True):
        if len(shape) < 2:
            assert parameter.confidence == ()
        else:
            (_, rows), (_, columns) = parameter.confidence
            assert (rows.shape, columns.shape) == (shape[:-1], shape[:-2] + shape[-1:])
