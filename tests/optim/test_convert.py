"""Packed state to the published packages, and parts of codecs straight into packed state."""

from __future__ import annotations

import pytest
import torch
from optim_cases import ARGUMENTS, PLAIN, advance, clones, make_params, trained
from test_oracles import ORACLES

from ckpt8.codecs.split24 import Split24, Split32
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.optim import state_conversion as convert


def test_the_published_package_goes_on_from_unpacked_state(name):
    """With fp32 moments the next step is the same; torch's own load_state_dict takes what ``unpack`` gives."""
    params, optimizer = trained(name, 3, **PLAIN)
    theirs = clones(params)
    oracle = ORACLES[name](theirs, **ARGUMENTS[name])
    oracle.load_state_dict(convert.unpack(optimizer.state_dict()))
    for step in (3, 4):
        for each, stepped in ((params, optimizer), (theirs, oracle)):
            advance(stepped, each, step, step + 1)
        for p, q in zip(params, theirs, strict=True):
            assert float((p - q).detach().abs().max()) <= 1e-5


# --- the two conventions of bias ------------------------------------------------------------------------------------

UNBIASED = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def step_by(optimizer, params, gradient):
    for param in params:
        param.grad = torch.full_like(param, gradient)
    optimizer.step()


def test_adamw_and_stable_adamw_are_the_same_run():
    """With gradients that keep RMS <= 1 their steps are equal, so converted state takes the same next step."""
    params = make_params()
    adamw = torch.optim.AdamW(params, foreach=False, **UNBIASED)
    for _ in range(4):
        step_by(adamw, params, 0.01)
    others = clones(params)
    stable = ORACLES["StableAdamW"](others, **UNBIASED)
    stable.load_state_dict(convert.adamw_to_stable_adamw(adamw.state_dict()))
    step_by(adamw, params, 0.005)
    step_by(stable, others, 0.005)
    for p, q in zip(params, others, strict=True):
        assert float((p - q).detach().abs().max()) <= 1e-6
    back = convert.stable_adamw_to_adamw(stable.state_dict())
    for i, state in adamw.state_dict()["state"].items():
        assert float(back["state"][i]["step"]) == float(state["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(back["state"][i][key], state[key], rtol=1e-5, atol=1e-12)


def test_a_state_before_its_first_step_has_no_moments_to_convert():
    """torch keeps step 0 where a GradScaler skipped the first step. Both conventions start from zeros."""
    params = make_params()[:1]
    conversions = {"AdamW": convert.adamw_to_stable_adamw, "StableAdamW": convert.stable_adamw_to_adamw}
    for name, other in (("AdamW", "StableAdamW"), ("StableAdamW", "AdamW")):
        optimizer = ORACLES[name](params, **UNBIASED)
        advance(optimizer, params, 0, 1)
        saved = optimizer.state_dict()
        (state,), (group,) = saved["state"].values(), saved["param_groups"]
        state.update({key: torch.zeros_like(value) for key, value in state.items() if torch.is_tensor(value)})
        group.update({key: torch.zeros_like(value) for key, value in group.items() if key == "step"})
        fresh, resumed = clones(params), clones(params)
        one, two = (ORACLES[other](each, **UNBIASED) for each in (fresh, resumed))
        two.load_state_dict(conversions[name](saved))
        advance(one, fresh, 1, 2)
        advance(two, resumed, 1, 2)
        assert torch.equal(fresh[0], resumed[0])


def test_conventions_are_never_mixed_up():
    (_, adamw), (_, stable) = trained("AdamW", 3), trained("StableAdamW", 3)
    for optimizer, rule in ((adamw, "stable_adamw"), (stable, "adamw")):
        (group,) = convert.unpack(optimizer.state_dict())["param_groups"]
        with pytest.raises(UsageError, match="convention"):
            convert.packed_group(group, rule, optimizer.rule_arguments)
    with pytest.raises(UsageError):
        stable.load_state_dict(adamw.state_dict())


def test_a_long_step_is_exact():
    _, optimizer = trained("AdamW", 3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = torch.tensor((1 << 24) + 1)
    plain = convert.unpack(saved)
    assert {int(state["step"]) for state in plain["state"].values()} == {(1 << 24) + 1}


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Split24(), Split24(R=7), Split32()], ids=repr)
def test_planes_are_weights_without_decoding(codec):
    weight = make_params()[0].detach()
    spec = TensorSpec("w", Role.WEIGHT, DType.FLOAT32, tuple(weight.shape))
    parts = codec.encode(weight)
    param = convert.bf16_from_planes(parts)
    residual = parts["rho" if "rho" in parts else "residual"]
    assert param.dtype == torch.bfloat16
    assert torch.equal(convert.join_weight(param, residual, codec), codec.decode(parts, spec))
