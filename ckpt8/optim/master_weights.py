"""Master weights: the fp32 weights that an optimizer updates, stored as a parameter and what it lacks.

    fp32 parameter    the parameter itself
    bf16              ``residual`` int8 (split24/1, R = 127) or int16 (split32/1); the parameter is ``hi``
    fp16              ``master`` fp32; the parameter is its fp16 rounding

The arithmetic is that of split24/1 and split32/1, on the bits of the parameter instead of byte planes. A training step
refuses no value: NaN stays NaN, and a weight that overflows bf16 becomes Inf there. If somebody overwrites a bf16
parameter, its old residual stays, an error under one bf16 step; an fp16 parameter is restored from its master.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckpt8.codecs import Codec
from ckpt8.codecs.companded8.reference import QUIET_NAN
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType
from ckpt8.optim.rounding import weight_noise

_MAGNITUDE = 0x7FFFFFFF
CHECKS = "weight_checks"
"""Key of a saved group: the ``weight_check`` of each parameter; None for one without residual or master."""

_MASK63 = (1 << 63) - 1
_ODD = 0x9E3779B1
_CHECKED = 1 << 20


def master_part(dtype: torch.dtype, codec: Codec) -> tuple[str, torch.dtype] | None:
    """Key and element type of the state that completes a parameter; None for fp32. Raises UsageError."""
    if dtype == torch.float32:
        return None
    if dtype == torch.float16:
        return "master", torch.float32
    if dtype == torch.bfloat16:
        return "residual", residual_dtype(codec)
    name = DType.from_label(str(dtype)).label
    raise UsageError(f"parameters of {name} cannot be trained; use float32, bfloat16 or float16")


def residual_dtype(codec: Codec) -> torch.dtype:
    """Element type of the residual of a bf16 parameter: int8 for split24, int16 for split32."""
    assert codec.residual is not None  # noqa: S101 - as check_group has found
    return codec.residual[1].torch


def weight_check(param: torch.Tensor, first: int = 0) -> int:
    """A checksum over the bits of a 16-bit parameter and their places; it tells to which parameter a residual belongs.

    The checksum of a parameter in pieces is the sum over the pieces, modulo 2^63; ``first`` is the place of a piece.
    """
    bits = param.detach().reshape(-1).view(torch.int16)
    total = 0
    for start in range(0, len(bits), _CHECKED):
        piece = bits[start : start + _CHECKED].to(torch.int64)
        place = first + start
        places = torch.arange(place, place + len(piece), device=bits.device).mul_(_ODD).bitwise_or_(1)
        total += int(piece.mul_(places).sum())
    return total & _MASK63


def exact_residual(state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """``("residual",)`` for a state with a residual of 16 bits, which is exact; else nothing."""
    found = state.get("residual")
    return ("residual",) if found is not None and found.dtype == torch.int16 else ()


def read_master(param: torch.Tensor, part: torch.Tensor | None, codec: Codec) -> torch.Tensor:
    """A new tensor of the fp32 weights of a flat tile."""
    if part is None or part.dtype == torch.float32:
        return (param if part is None else part).clone()
    bits = param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    if codec.codes is not None:
        d = part.float().mul_(32768).div_(codec.codes.highest).round_().clamp_(-32767, 32767).to(torch.int32)
    else:
        d = part.to(torch.int32)
    # A parameter that somebody set to zero may keep a negative residual.
    mag = (bits & _MAGNITUDE).add_(d).clamp_min_(0)
    return mag.bitwise_or_(bits.bitwise_and_(~_MAGNITUDE)).view(torch.float32)


def write_master(
    weight: torch.Tensor, param: torch.Tensor, part: torch.Tensor | None, codec: Codec, bits: torch.Tensor | None
) -> None:
    """Store a flat fp32 tile; ``bits`` are random int32 for split24, or None to round to nearest."""
    if part is None or part.dtype == torch.float32:
        if part is not None:
            part.copy_(weight)
        param.copy_(weight)
        return
    raw = weight.view(torch.int32)
    mag = (raw & _MAGNITUDE).clamp_max_(QUIET_NAN)
    if codec.codes is None:
        hi = (mag + 0x8000).bitwise_right_shift_(16)
        d = mag.sub_(hi << 16)
    else:
        hi = (mag >> 16).bitwise_and_(1).add_(mag).add_(0x7FFF).bitwise_right_shift_(16)
        d = residual_codes(mag.sub_(hi << 16), codec.codes.highest, None if bits is None else weight_noise(bits))
    part.copy_(d)
    sign = (raw >> 16).bitwise_and_(0x8000)
    param.view(torch.int16).copy_(hi.bitwise_or_(sign))


def residual_codes(d: torch.Tensor, levels: int, noise: torch.Tensor | None) -> torch.Tensor:
    """split24's codes of distances in fp32 steps, which it overwrites; without ``noise`` rounded to nearest."""
    noise = (d >> 31).add_(16384) if noise is None else noise
    return d.mul_(levels).add_(noise).bitwise_right_shift_(15).clamp_(-levels, levels)
