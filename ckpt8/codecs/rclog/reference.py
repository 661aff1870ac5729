"""Second moments in steps of a pseudo-logarithm, in plain torch, in integer arithmetic on the bits of fp32.

    r        = round(mean of bits / 2^20)                   over the elements of a row of the chunk that are not zero
    c        = round(mean of (bits - r 2^20) / 2^20)        over those of a column; rounded to nearest, halves up
    p        = (r + c) 2^20                                 r and c are 0 where there are none
    q        = floordiv(bits - p + S // 2, S)
    decode   : bits' = clamp(q S + p, 1, 0x7f7fffff)        the reserved symbol: 0

Means are of exact sums. For bf16 the clamp is to the smallest and the largest number of bf16, so that no rounding makes
zero or infinity of a second moment.
"""

from __future__ import annotations

from ckpt8.codecs.lattice import RESERVED
from ckpt8.codecs.lattice.reference import from_zigzag, zigzag
from ckpt8.codecs.rclog import ABOVE, RANGES, REFUSAL, STRANGE_FACTORS, UNIT, RowColumnLog
from ckpt8.core.errors import RefusedError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts


def _mean(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The quotient total / count in units of 2^20, rounded to nearest, halves up; 0 where nothing is counted."""
    unit = count.clamp_min(1) << UNIT
    doubled = 2 * total + unit + 2 * ABOVE * unit
    return torch.div(doubled, 2 * unit, rounding_mode="floor").sub_(ABOVE)


def _factors(x: torch.Tensor, index: torch.Tensor, count: int, present: torch.Tensor) -> torch.Tensor:
    """The means of ``x`` over the elements of each of ``count`` rows or columns; it is zero where not ``present``."""
    sums = torch.zeros(2, count, dtype=torch.int64, device=x.device)
    return _mean(sums[0].index_add_(0, index, x), sums[1].index_add_(0, index, present.long()))


def _places(count: int, first: int, C: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
    """The row in the chunk and the column of every element."""
    column = torch.arange(first % C, first % C + count, device=device)
    row = torch.div(column, C, rounding_mode="floor")
    return row, column.sub_(row * C)


def check(x: torch.Tensor, given: Parts) -> None:
    """Raise RefusedError on NaN, Inf and a value below zero, and where ``given`` factors are beyond those of means."""
    if not bool(((x >= 0) & (x < torch.inf)).all()):
        raise RefusedError(REFUSAL)
    for name in RowColumnLog.inherited:
        if name in given and not bool((given[name].int().abs() <= ABOVE).all()):
            raise RefusedError(STRANGE_FACTORS)


def encode(x: torch.Tensor, out: Parts, *, S: int, C: int, first: int, given: bool = False) -> None:  # noqa: N803
    """Encode a flat chunk (fp32 or bf16) into ``codes``, ``rows`` and maybe ``columns``, unless these are ``given``.

    Raises RefusedError on NaN, Inf and a value below zero.
    """
    check(x, out if given else {})
    # -0 becomes 0.
    bits = x.float().add(0.0).view(torch.int32).long()
    row, column = _places(x.numel(), first, C, x.device)
    present = bits != 0
    if not given:
        out["rows"].copy_(_factors(bits, row, out["rows"].numel(), present))
    bits.sub_(out["rows"].long().bitwise_left_shift_(UNIT)[row])
    if "columns" in out:
        if not given:
            out["columns"].copy_(_factors(bits.masked_fill(~present, 0), column, C, present))
        bits.sub_(out["columns"].long().bitwise_left_shift_(UNIT)[column])
    # Factors reach from -4096 to 4096.
    above = ((2 * ABOVE) << UNIT) // S + 1
    q = bits.add_(S // 2 + above * S).div_(S, rounding_mode="floor").sub_(above)
    out["codes"].copy_(zigzag(q.to(torch.int32)).masked_fill_(~present, RESERVED))


def decode(parts: Parts, out: torch.Tensor, *, S: int, C: int, first: int) -> None:  # noqa: N803
    """Decode a chunk into ``out`` (fp32 or bf16)."""
    codes = parts["codes"]
    row, column = _places(codes.numel(), first, C, codes.device)
    p = parts["rows"].long()[row]
    if "columns" in parts:
        p += parts["columns"].long()[column]
    bits = (
        from_zigzag(codes)
        .long()
        .mul_(S)
        .add_(p.bitwise_left_shift_(UNIT))
        .clamp_(*RANGES[out.dtype is torch.float32])
        .to(torch.int32)
    )
    out.copy_(bits.masked_fill_(codes == RESERVED, 0).view(torch.float32))
