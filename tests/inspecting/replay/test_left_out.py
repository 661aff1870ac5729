"""What a replay leaves out, and why: only what compression did makes ``verify`` fail, and every reason is true."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning.replayed import Replayed, find_rule
from ckpt8.checkpoint.tree import TensorRef, is_setting, read_settings
from ckpt8.container.reader import ContainerReader
from ckpt8.core.tensors import DType

STEPS = 3


def run_of(optimizer_class=torch.optim.AdamW, steps: int = 4, **settings):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 200))
    optimizer = optimizer_class(net.parameters(), **settings)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def replay(tmp_path, tree, **options):
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt", force=True, threads=1, **options)
    found = ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt", resume_steps=STEPS, threads=1)
    return found.failures, found.resume


WRONG = {"NaN": math.nan, "Inf": math.inf}


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("place", ["weight", "exp_avg", "exp_avg_sq"])
def test_an_original_that_is_not_finite(tmp_path, place, value):
    tree = run_of()
    tensor = tree["model"]["1.weight"] if place == "weight" else tree["optimizer"]["state"][2][place]
    tensor[3, 5] = WRONG[value]
    failures, resume = replay(tmp_path, tree)
    assert failures == ()
    name = "the weight" if place == "weight" else place
    assert resume["skipped"] == {"optimizer.state.2": f"{name} of the original is not finite"}
    assert resume["parameters"] == 3
    assert 0 < resume["replay_error"] < 1e-2


@pytest.mark.parametrize(
    "change",
    [{"weight": 3e38, "lr": -10.0, "weight_decay": 1.0}, {"exp_avg": 3e38, "exp_avg_sq": 0.0, "eps": 1e-30}],
    ids=["weight", "division"],
)
def test_an_original_whose_next_step_is_not_finite(tmp_path, change):
    """The original overflows by itself: compression has not done that."""
    tree = run_of()
    for key, value in change.items():
        if key == "weight":
            tree["model"]["0.weight"][0] = value
        elif key in tree["optimizer"]["state"][0]:
            tree["optimizer"]["state"][0][key][0] = value
        else:
            tree["optimizer"]["param_groups"][0][key] = value
    failures, resume = replay(tmp_path, tree)
    assert failures == ()
    assert "a replayed step of the original is not finite" in resume["skipped"].values()


def test_settings_that_are_no_numbers_stay_as_they_are(tmp_path):
    group = {"params": [0, 1], "lr": "fast", "betas": [0.9, None], "long": list(range(99)), "none": None}
    assert read_settings(None, {}, group) == {**group, "betas": (0.9, None)}


def test_a_list_that_holds_itself_is_no_setting():
    loop = [1.0]
    loop.append(loop)
    assert read_settings(None, {}, {"betas": loop})["betas"][1] is loop
    assert not is_setting(loop)
    assert is_setting([0.9, None])


def test_moments_of_bitsandbytes_in_32_bits(tmp_path):
    """Beside 8-bit states of large tensors, bitsandbytes keeps 32 bits for small ones, and these are compressed."""
    tree = run_of()
    states, [group] = tree["optimizer"]["state"], tree["optimizer"]["param_groups"]
    for number, state in states.items():
        first, second = state.pop("exp_avg"), state.pop("exp_avg_sq")
        state["step"] = 4
        state |= {"state1": first, "state2": second}
        if number == 2:
            codes = torch.randint(0, 256, first.shape, dtype=torch.uint8)
            state |= {"state1": codes, "state2": codes.clone(), "qmap1": torch.rand(256), "absmax1": torch.rand(50)}
    for key in list(group):
        if key not in ("params", "lr", "betas", "eps", "weight_decay"):
            del group[key]
    group |= {"alpha": 0.0, "t_alpha": None}
    failures, resume = replay(tmp_path, tree)
    assert failures == ()
    assert resume["skipped"] == {"optimizer.state.2": "its state is in low precision already, which is not replayed"}
    assert (resume["parameters"], resume["with_weights"]) == (3, 3)
    assert 0 < resume["replay_error"] < 1e-2


REASONS = {
    "second moments alone": (["exp_avg"], {}, "its state has no first moment"),
    "a step of all parameters": (
        [],
        {"d_coef": 1.0},
        "its step depends on all parameters together, and is not replayed",
    ),
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
    failures, resume = replay(tmp_path, tree)
    assert failures == ()
    assert set(resume["skipped"].values()) == {reason}
    with ContainerReader(tmp_path / "run.ckpt8") as reader:
        stored = reader.manifest.storages
    assert any(each.role.value == "moment2" and each.codec["id"] == "companded8/1" for each in stored)


def ref(*shape: int) -> TensorRef:
    return TensorRef("0", DType.FLOAT32, 0, shape, tuple(math.prod(shape[k + 1 :]) for k in range(len(shape))))


def muon(shape: tuple[int, ...], **settings):
    group = {
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
    }
    return {"momentum_buffer": ref(*shape)}, {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "adjust_lr_fn": None,
        **group,
        **settings,
    }


def nadam(**settings):
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3}
    state = {"exp_avg": ref(4, 4), "exp_avg_sq": ref(4, 4), "mu_product": ref(), "step": 7}
    return state, {**group, "decoupled_weight_decay": False, **settings}


def rmsprop(**settings):
    group = {"lr": 1e-3, "momentum": 0.9, "alpha": 0.99, "eps": 1e-8, "centered": True, "weight_decay": 0.0}
    return {"square_avg": ref(4, 4), "momentum_buffer": ref(4, 4), "step": 7}, {**group, **settings}


NO_STEP = "its rule takes no step from such a state with such hyperparameters"
HOSTILE = {
    "a matrix of three dimensions": (muon((3, 4, 4)), NO_STEP),
    "a vector": (muon((4,)), "its step takes a matrix, and its state is a vector"),
    "nothing": (muon((4, 0)), "it has no elements"),
    "endless iterations": (
        muon((4, 4), ns_steps=2**53),
        "hyperparameters are missing from the parameter group, or out of range",
    ),
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
    expected, found = replay(tmp_path, plain), replay(tmp_path, in_tensors)
    assert expected == found
    assert (found[1]["parameters"], found[1]["skipped"]) == (4, {})
    with ContainerReader(tmp_path / "run.ckpt8") as reader:
        rules = [each.rule for each in reader.manifest.parameters]
    assert rules[0] == {"kind": "adam", "step": 4, "beta1": 0.875, "beta2": 0.96875, "eps": 2.0**-14}
