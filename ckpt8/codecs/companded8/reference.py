"""Companded 8-bit moments in plain torch, groups of 32 along the flat storage.

    moment1 (signed)    x = m          phi(n) = 2n / (1 + |n|)     phi^-1(y) = y / (2 - |y|)
    moment2 (unsigned)  x = sqrt(v)    phi(n) = n, or sqrt(n)      phi^-1(y) = y, or y*y
    scale16  = max|x| of the group, rounded to nearest even to 8 exponent and 8 mantissa bits; s is its fp32 value
    code     = clamp(floor(Q*phi(x/s) + 0.5), -Q or 0, Q);  moment2: at least 1 where v > 0
    decode   : x = s * phi^-1(code / Q);  v = x*x

The companding is FlashOptim's (arXiv 2602.23349, section 3); its fp16 scales are not, since real moments lie below
fp16's range. Every operation is rounded to fp32 once, in the order written, so that all backends give the same bytes.
"""

from __future__ import annotations

import numpy as np

from ckpt8.codecs.companded8 import GROUP, INFINITE_SCALE, QUIET_NAN, REFUSAL_ROOT, REFUSAL_SIGNED, REFUSAL_UNSIGNED
from ckpt8.core.errors import RefusedError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts

_SMALLEST_MOMENT1 = 2.0**-100
"""A signed group whose largest magnitude lies below is stored as zeros; no intermediate is then subnormal."""

SMALLEST_ROOT2 = 2.0**-50
"""An unsigned group with any v > 0 has at least this scale: next to eps, so small a v makes no difference."""


def scale_value(scale16: torch.Tensor) -> torch.Tensor:
    """The fp32 value of 16-bit scales given as int32."""
    return (scale16 << 15).view(torch.float32)


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """The fp32 value of stored scales (uint16, which is storage only: arithmetic is in int32)."""
    return scale_value(scales.to(torch.int32))


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp32 square root.

    On a CPU torch may use MKL's, which is one step off for a sixth of all inputs. A float64 root with an error of one
    step rounds to the right fp32 number, since no fp32 root lies that near to a midpoint.
    """
    return x.double().sqrt_().float()


def root_of_tile(x: torch.Tensor) -> torch.Tensor:
    """``square_root`` of a tile whose values are at hand, which no graph records.

    numpy's takes an eighth of the time on a CPU; a GPU rounds correctly by itself.
    """
    if x.device.type != "cpu":
        return x.float().sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.detach().float().numpy()))


def _round_scale(largest: torch.Tensor) -> torch.Tensor:
    # Some devices make NaN of all ones, which would round to a scale of zero.
    bits = largest.view(torch.int32).clamp_max(QUIET_NAN)
    return (bits >> 15).bitwise_and_(1).add_(bits).add_(0x3FFF).bitwise_right_shift_(15)


def divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """``x / by`` in place, rounded once: by a Python number CUDA multiplies with a reciprocal, rounded itself."""
    return x.div_(x.new_full((), by))


def as_groups(x: torch.Tensor) -> torch.Tensor:
    """The flat tensor as rows of 32, a short last group filled up with zeros."""
    short = -x.numel() % GROUP
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.view(-1, GROUP)


def _store(out: Parts, codes: torch.Tensor, scale16: torch.Tensor) -> None:
    out["codes"].copy_(codes.view(-1)[: out["codes"].numel()])
    out["scales"].copy_(scale16)


def _normalise(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16-bit scales of the groups of ``x`` and x/s; a zero group is divided by one."""
    scale16 = _round_scale(largest)
    divisor = scale_value(scale16)
    divisor[scale16 == 0] = 1.0
    return scale16, x / divisor.unsqueeze(1)


def encode(x: torch.Tensor, out: Parts, *, signed: bool, levels: int, fourth_root: bool) -> None:
    """Encode a flat tile (fp32 or bf16) into ``codes``, int8 if signed and else uint8, and ``scales`` uint16.

    Raises RefusedError on NaN, Inf, a negative second moment and a group whose scale or decoded maximum would be
    infinite.
    """
    if not signed:
        encode_unsigned(x, out, levels, fourth_root)
    elif not int(compand_signed(x, out, levels).amax()) < INFINITE_SCALE:
        raise RefusedError(REFUSAL_SIGNED)


def compand_signed(x: torch.Tensor, out: Parts, levels: int) -> torch.Tensor:
    """Encode moment1; return the scales as int32. A NaN or Inf makes its group meaningless and raises nothing."""
    groups = as_groups(x.float())
    largest = groups.abs().amax(1)
    largest[largest < _SMALLEST_MOMENT1] = 0.0
    scale16, n = _normalise(groups, largest)
    t = (2 * n).div_(n.abs_().add_(1))
    _store(out, t.mul_(levels).add_(0.5).floor_().clamp_(-levels, levels), scale16)
    return scale16


def encode_unsigned(v: torch.Tensor, out: Parts, levels: int, fourth_root: bool) -> None:
    """Encode a flat tile of moment2 into ``codes`` uint8 and ``scales`` uint16; v > 0 never becomes 0.

    Raises RefusedError on NaN, Inf, a negative value and a group whose decoded maximum would be infinite.
    """
    root = as_groups(root_of_tile(v))
    largest = root.amax(1)
    if bool(largest.isnan().any()):
        raise RefusedError(REFUSAL_ROOT)
    largest = torch.maximum(largest, largest.sign().mul_(SMALLEST_ROOT2))
    scale16, n = _normalise(root, largest)
    if not bool(scale_value(scale16).square_().isfinite().all()):
        raise RefusedError(REFUSAL_UNSIGNED)
    t = square_root(n) if fourth_root else n
    codes = t.mul_(levels).add_(0.5).floor_().clamp_(0, levels)
    # sign(root) is 1 where v > 0. Through int32, since torch converts float to uint8 element by element.
    _store(out, torch.maximum(codes, root.sign_()).to(torch.int32), scale16)


def decode(parts: Parts, out: torch.Tensor, *, signed: bool, levels: int, fourth_root: bool) -> None:
    """Decode a tile into ``out`` (fp32 or bf16)."""
    y = divide(as_groups(parts["codes"]).float(), levels)
    if signed:
        y.div_(y.abs().neg_().add_(2))
    elif fourth_root:
        y.square_()
    # A second moment is squared in fp32 before it is rounded to bf16.
    x = out if signed or out.dtype is torch.float32 else torch.empty(out.numel(), device=out.device)
    s = decode_scales(parts["scales"]).unsqueeze(1)
    if x.numel() == y.numel() and x.dtype is torch.float32:
        torch.mul(y, s, out=x.view(y.shape))
    else:
        x.copy_(y.mul_(s).view(-1)[: x.numel()])
    if not signed:
        x.square_()
    if x is not out:
        out.copy_(x)
