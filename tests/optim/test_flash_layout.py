"""flashoptim's state dict: pytorch_optimizer's FlashAdamW is the oracle for codes, scales and residuals."""

from __future__ import annotations

import warnings

import pytest
import torch
from optim_cases import PLAIN, advance, make_params

import ckpt8.optim
from ckpt8.core.errors import UsageError
from ckpt8.optim import state_conversion as convert
from ckpt8.optim.flashoptim_layout import dequantize, error_bits, from_flashoptim, master_of, quantize, to_flashoptim

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_optimizer.optimizer import flash_adamw as oracle

SHAPES = ((70, 97), (66_000,), (33,))
BYTES = {torch.int8: 3, torch.int16: 4}


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(70, 97, generator=generator) * torch.exp(torch.randn(70, 97, generator=generator)) * 1e-2


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_codes_and_scales_are_the_oracles(moment):
    x = values().square() if moment == "exp_avg_sq" else values()
    theirs = oracle.quantize_state(x, *oracle._state_spec(moment))
    codes, scales = quantize(moment, x)
    assert torch.equal(scales, theirs[1])
    # Where torch's own root is a step off, a code at a tie may be too.
    assert int((codes.int() - theirs[0].int()).abs().max()) <= 1
    assert float((codes == theirs[0]).double().mean()) > 0.999
    expected = oracle.dequantize_state(codes, scales, *oracle._state_spec(moment))
    torch.testing.assert_close(dequantize(moment, codes, scales), expected, rtol=1e-6, atol=0)
    assert torch.equal(dequantize(moment, codes, scales.view(torch.bfloat16)), dequantize(moment, codes, scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [torch.int8, torch.int16])
def test_residuals_are_the_oracles(bits, dtype):
    master = values(1)
    param = master.to(dtype)
    found = error_bits(master, param, bits)
    assert torch.equal(found, oracle.compute_ecc_bits(master, param, BYTES[bits]))
    assert torch.equal(master_of(param, found, 0), oracle.reconstruct_fp32_param(param, found))


def flash_run(dtype, bits):
    params = make_params(dtype, shapes=SHAPES)
    optimizer = oracle.FlashAdamW(params, lr=1e-2, master_weight_bits=bits, weight_decay=0.1)
    advance(optimizer, params, 0, 4)
    return params, optimizer


def official(saved, params):
    """The official encodings of what the oracle saves: scales viewed, int8 cast by value, int16 by bits."""
    for i, param in enumerate(params):
        state = saved["state"][i]
        if param.dtype == torch.bfloat16:
            for key in ("exp_avg::scales", "exp_avg_sq::scales"):
                state[key] = state[key].view(torch.bfloat16)
        if "error_bits" in state:
            bits = state["error_bits"]
            state["error_bits"] = bits.to(param.dtype) if bits.dtype == torch.int8 else bits.view(param.dtype)
    return saved


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, None), (torch.bfloat16, 24), (torch.bfloat16, 32)])
def test_import(dtype, bits, encoded):
    params, flash = flash_run(dtype, bits)
    saved = flash.state_dict()
    masters = [flash.get_param_fp32(p.detach(), flash.state[p]) for p in params]
    moments = [oracle.materialize_state(flash.state[p], "exp_avg") for p in params]
    if encoded:
        saved = official({"state": {k: dict(v) for k, v in saved["state"].items()}, **_groups(saved)}, params)
    ours = ckpt8.optim.AdamW(params, master="split32", **PLAIN)
    ours.load_state_dict(from_flashoptim(saved, ours))
    group = ours.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-2, 0.1, (0.9, 0.999))
    for param, master, moment in zip(params, masters, moments, strict=True):
        state = ours.state[param]
        assert int(state["step"]) == 4
        torch.testing.assert_close(state["exp_avg"], moment, rtol=1e-6, atol=0)
        codec = ours.codec(group, "master", param)
        # A half that flashoptim rounded to even may be one fp32 step off.
        weight = convert.join_weight(param, state.get("residual"), codec)
        torch.testing.assert_close(weight, master, rtol=1.2e-7, atol=0)


def _groups(saved):
    return {"param_groups": saved["param_groups"]}


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, "split24"), (torch.bfloat16, "split24"), (torch.bfloat16, "split32")]
)
def test_export_and_import(dtype, master, compress):
    params = make_params(dtype, shapes=SHAPES)
    ours = ckpt8.optim.AdamW(params, lr=1e-2, master=master, **PLAIN)
    advance(ours, params, 0, 3)
    flash = to_flashoptim(ours, compress=compress)
    group = flash["param_groups"][0]
    assert group["master_bytewidth"] == (0 if dtype == torch.float32 else 3 if master == "split24" else 4)
    for i, param in enumerate(params):
        state = flash["state"][i]
        assert ("exp_avg::quantized" in state) is compress
        if compress:
            assert state["exp_avg::scales"].dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
        if dtype == torch.bfloat16:
            assert state["error_bits"].dtype == param.dtype
    again = ckpt8.optim.AdamW(params, lr=1e-2, master=master, **PLAIN)
    again.load_state_dict(from_flashoptim(flash, again))
    for param in params:
        one, two = ours.state[param], again.state[param]
        assert int(one["step"]) == int(two["step"])
        error = (one["exp_avg"] - two["exp_avg"]).norm() / one["exp_avg"].norm()
        assert float(error) < (2e-2 if compress else 1e-6)
        if dtype == torch.bfloat16:
            codec = ours.codec(ours.param_groups[0], "master", param)
            was, now = (convert.join_weight(param, state["residual"], codec) for state in (one, two))
            torch.testing.assert_close(now, was, rtol=6e-5, atol=1e-9)


def test_exporting_what_was_imported_gives_the_same_codes():
    params, flash = flash_run(torch.bfloat16, 24)
    ours = ckpt8.optim.AdamW(params, **PLAIN)
    saved = official(
        {"state": {k: dict(v) for k, v in flash.state_dict()["state"].items()}, **_groups(flash.state_dict())}, params
    )
    ours.load_state_dict(from_flashoptim(saved, ours))
    back = to_flashoptim(ours)
    for i, state in saved["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            codes, again = state[f"{name}::quantized"].int(), back["state"][i][f"{name}::quantized"].int()
            assert int((codes - again).abs().max()) <= 1
        assert state["error_bits"].dtype == back["state"][i]["error_bits"].dtype


def test_rules_that_flashoptim_does_not_have():
    params = make_params(shapes=((80, 80),))
    came = ckpt8.optim.CAME(params)
    with pytest.raises(UsageError):
        to_flashoptim(came)
    with pytest.raises(UsageError):
        from_flashoptim({"state": {}, "param_groups": []}, came)
    with pytest.raises(UsageError):
        from_flashoptim({"state": {}, "param_groups": []}, ckpt8.optim.AdamW(params))
