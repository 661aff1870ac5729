"""Reads and writes the state dict of flashoptim (arXiv 2602.23349; package version 0.1.4).

    NAME::quantized   int8 (softsign) or, for exp_avg_sq, uint8 (square root); NAME::scales fp16, groups of 32,
                      viewed as bf16 where the parameter is bf16; or NAME alone, not compressed
    error_bits        e / (ulp/2) in 127ths or 32767ths, e = master - parameter, ulp = distance to the next larger
                      value: int8, cast to the type of the parameter by value, or int16, viewed as it by bits
    step              int64;    group: initial_lr, master_bytewidth (0, 3 or 4), quantize

    scale = max(max|x|, 1e-12) as fp16;   code = rint(Q * phi(x / max|x|)),  phi(n) = 2n/(1+|n|), or n of sqrt(v)

Scales are fp16, so small moments are lost: export rounds them, import reads what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt8.codecs import codec_from_config
from ckpt8.codecs.companded8.reference import as_groups, square_root
from ckpt8.core.errors import UsageError
from ckpt8.optim.known_optimizers import MOMENT_SLOTS, TENSORS
from ckpt8.optim.packed import PackedOptimizer
from ckpt8.optim.packed_tensor import residual_dtype
from ckpt8.optim.state_conversion import StateDict, join_weight, moments_of, pack, step_of

_SMALLEST_SCALE = 1e-12
_LEVELS = {torch.int8: 127.0, torch.int16: 32767.0}


def quantize(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes shaped as ``x`` and fp16 scales of a moment."""
    squared = TENSORS[name].slot == "moment2"
    flat = x.detach().float().reshape(-1)
    groups = as_groups(square_root(flat) if squared else flat)
    scales = groups.abs().amax(1).clamp_min(_SMALLEST_SCALE)
    n = groups / scales.unsqueeze(1)
    t = n * 255 if squared else (2 * n / (1 + n.abs())) * 127
    codes = t.round_().clamp_(0 if squared else -127, 255 if squared else 127).to(torch.int32)
    flat_codes = codes.view(-1)[: x.numel()].to(torch.uint8 if squared else torch.int8)
    return flat_codes.view(x.shape), scales.half()


def dequantize(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The fp32 moment of codes and scales (fp16, or fp16 bits viewed as bf16)."""
    scales = scales.view(torch.float16) if scales.dtype == torch.bfloat16 else scales
    squared = TENSORS[name].slot == "moment2"
    y = as_groups(codes.reshape(-1).float()) / (255 if squared else 127)
    x = (y if squared else y / (2 - y.abs())) * scales.float().unsqueeze(1)
    x = x.view(-1)[: codes.numel()].view(codes.shape)
    return x * x if squared else x


def _half_ulp(param: torch.Tensor) -> torch.Tensor:
    size = param.detach().abs()
    gap = torch.nextafter(size, torch.full_like(size, float("inf"))).sub(size).float()
    return gap.mul_(0.5).clamp_min_(torch.finfo(torch.float32).tiny)


def error_bits(master: torch.Tensor, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The residual of fp32 master weights over a bf16 or fp16 parameter, as int8 or int16."""
    error = (master - param.detach().float()) / _half_ulp(param)
    return error.clamp_(-1, 1).mul_(_LEVELS[dtype]).round_().to(dtype)


def master_of(param: torch.Tensor, bits: torch.Tensor | None, bytewidth: int) -> torch.Tensor:
    """The fp32 master weights of a parameter and its ``error_bits`` in any encoding."""
    if bits is None:
        return param.detach().float()
    if bits.is_floating_point():
        bits = bits.view(torch.int16) if bytewidth == 4 else bits.to(torch.int8)
    return bits.float().div_(_LEVELS[bits.dtype]).mul_(_half_ulp(param)).add_(param.detach().float())


def to_flashoptim(optimizer: PackedOptimizer, *, compress: bool = True) -> StateDict:
    """The state of a packed AdamW, Adam, SGD or Lion as flashoptim saves it. Raises UsageError for other rules."""
    if not optimizer.card.flashoptim:
        raise UsageError(f"flashoptim has no {optimizer.rule_id}")
    packed = optimizer.state_dict()
    groups: list[dict[str, Any]] = []
    states: dict[Any, Any] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        residual = residual_dtype(codec_from_config(group["master"]))
        made = {
            i: _flash_state(optimizer, group, param, packed["state"][i], residual, compress)
            for param, i in zip(group["params"], saved["params"], strict=True)
            if packed["state"].get(i)
        }
        states |= made
        width = 2 + residual.itemsize if any("error_bits" in state for state in made.values()) else 0
        arguments = {key: saved[key] for key in ("params", "maximize", *optimizer.rule_arguments)}
        initial = float(saved.get("initial_lr", saved["lr"]))
        groups.append(arguments | {"initial_lr": initial, "master_bytewidth": width, "quantize": True})
    return {"state": states, "param_groups": groups}


def _flash_state(
    optimizer: PackedOptimizer,
    group: dict[str, Any],
    param: torch.Tensor,
    state: Mapping[str, Any],
    residual: torch.dtype,
    compress: bool,
) -> dict[str, Any]:
    """The state of one parameter, whose ``error_bits`` have the element type ``residual``."""
    flash: dict[str, Any] = {"step": state["step"].clone()}
    for name, values in moments_of(state, group).items():
        if compress:
            codes, scales = quantize(name, values)
            flash[f"{name}::quantized"] = codes
            flash[f"{name}::scales"] = scales.view(torch.bfloat16) if param.dtype == torch.bfloat16 else scales
        else:
            flash[name] = values
    if param.dtype != torch.float32:
        part = state["residual"] if "residual" in state else state["master"]
        master = join_weight(param, part, optimizer.codec(group, "master", param))
        bits = error_bits(master, param, residual)
        flash["error_bits"] = bits.to(param.dtype) if residual == torch.int8 else bits.view(param.dtype)
    return flash


def from_flashoptim(flash: Mapping[str, Any], optimizer: PackedOptimizer) -> StateDict:
    """A flashoptim state dict in the packed layout of ``optimizer``, which must have the parameters saved with it.

    Reads every encoding. Raises UsageError where rule, keys or shapes do not match.
    """
    if not optimizer.card.flashoptim:
        raise UsageError(f"flashoptim has no {optimizer.rule_id}")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [(i, group) for group in flash["param_groups"] for i in group["params"]]
    if len(params) != len(ids):
        raise UsageError(f"has {len(ids)} parameters, the optimizer {len(params)}")
    state, masters = {}, {}
    for param, (i, group) in zip(params, ids, strict=True):
        if given := flash["state"].get(i):
            state[i] = {"step": step_of(given, group)} | _plain_moments(given)
            # The second spelling is pytorch_optimizer's.
            width = group.get("master_bytewidth", group.get("master_byte_width", 0))
            masters[i] = master_of(param, given.get("error_bits"), int(width))
    return pack({"state": state, "param_groups": flash["param_groups"]}, optimizer, masters)


def _plain_moments(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name in MOMENT_SLOTS:
        if f"{name}::quantized" in given:
            found[name] = dequantize(name, given[f"{name}::quantized"], given[f"{name}::scales"])
        elif name in given:
            found[name] = given[name].float()
    return found
