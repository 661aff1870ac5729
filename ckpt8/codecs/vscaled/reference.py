"""First moments in steps of their second moments in plain torch; every operation is rounded to fp32 once.

With v' the decoded second moment and v the original, a = (1 - 2^-7) u_max and h = (1/2 - 2^-9) u_max:

    D(v)     = (sqrt(v) / root_bias2 + eps) * bias1
    s        = min(k * sqrt(sqrt(v')), a * D(v'))           where v' = 0: a * D(0)
    c        = 1/2 - dither(index, salt)                    where v' = 0: 0
    u        = m / D(v)                                     0 where m = 0
    low      = ceil(((u - h) * D(v')) / s - c)
    high     = floor(((u + h) * D(v')) / s - c)
    q        = min(max(floor(m / s + (1/2 - c)), low), high)
    decode   : m' = (q + c) * s                             rounded to bf16 last, if m is bf16

Where v', s and m are 0, q is 0. All else is refused where s < 2^-126, or s or D(v') is infinite, |u| >= 2^12 u_max or
|q| >= 2^18. Under these conditions no rounding takes away what the margins of a and h give: low <= high, and
|m' / D(v') - u| <= u_max / 2.
"""

from __future__ import annotations

import math

from ckpt8.codecs.companded8.reference import square_root
from ckpt8.codecs.lattice.reference import dither, from_zigzag, zigzag
from ckpt8.codecs.vscaled import CODES, LARGEST_UPDATE, REACH, REFUSAL, SMALLEST_STEP, STEP_SHARE
from ckpt8.core.errors import RefusedError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts


def _divisor(v: torch.Tensor, bias1: float, root_bias2: float, eps: float) -> torch.Tensor:
    # By a Python number CUDA would multiply with a reciprocal, rounded itself.
    return (square_root(v) / v.new_full((), root_bias2)).add_(eps).mul_(bias1)


def _steps(
    second: torch.Tensor, k: float, u_max: float, bias1: float, root_bias2: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divisor and the step of every element."""
    divisor = _divisor(second, bias1, root_bias2, eps)
    largest = divisor * (second.new_full((), u_max) * STEP_SHARE)
    steps = square_root(square_root(second)).mul_(k)
    return divisor, torch.minimum(steps, largest).where(second != 0, largest)


def _offsets(second: torch.Tensor, salt: int, first: int) -> torch.Tensor:
    """How far the lattice points lie from whole steps."""
    return dither(first, second.numel(), salt, second.device).neg_().add_(0.5).masked_fill_(second == 0, 0.0)


def encode(
    x: torch.Tensor,
    out: Parts,
    *,
    second: torch.Tensor,
    original_second: torch.Tensor,
    first: int,
    k: float,
    u_max: float,
    bias1: float,
    root_bias2: float,
    eps: float,
    salt: int,
) -> None:
    """Encode a flat tile (fp32 or bf16) into ``codes``; ``first`` is the index of its first element.

    ``second`` are the decoded second moments, ``original_second`` these as they were. Raises RefusedError on NaN, Inf,
    |q| from 2^18 on, and where an update is not defined or too large.
    """
    m = x.float()
    divisor, steps = _steps(second, k, u_max, bias1, root_bias2, eps)
    offsets = _offsets(second, salt, first)
    u = (m / _divisor(original_second, bias1, root_bias2, eps)).masked_fill_(m == 0, 0.0)
    u_max_fp32 = m.new_full((), u_max)
    reach = u_max_fp32 * REACH
    low = (u - reach).mul_(divisor).div_(steps).sub_(offsets).ceil_()
    high = (u + reach).mul_(divisor).div_(steps).sub_(offsets).floor_()
    q = torch.minimum(torch.maximum((m / steps).add_(0.5 - offsets).floor_(), low), high)
    nothing = (second == 0) & (steps == 0) & (m == 0)
    bounded = (steps >= SMALLEST_STEP) & (steps < math.inf) & (divisor < math.inf)
    bounded &= (u.abs() < u_max_fp32 * LARGEST_UPDATE) & (q.abs() < CODES)
    if not bool((nothing | bounded).all()):
        raise RefusedError(REFUSAL)
    out["codes"].copy_(zigzag(q.masked_fill_(nothing, 0.0).to(torch.int32)))


def decode(
    parts: Parts,
    out: torch.Tensor,
    *,
    second: torch.Tensor,
    first: int,
    k: float,
    u_max: float,
    bias1: float,
    root_bias2: float,
    eps: float,
    salt: int,
) -> None:
    """Decode a tile into ``out`` (fp32 or bf16)."""
    _, steps = _steps(second, k, u_max, bias1, root_bias2, eps)
    out.copy_(from_zigzag(parts["codes"]).float().add_(_offsets(second, salt, first)).mul_(steps))
