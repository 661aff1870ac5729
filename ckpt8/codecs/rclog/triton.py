"""Second moments in steps of a pseudo-logarithm as Triton kernels: the integers of ``reference``.

Encoding goes over a chunk once for the sums of its rows, once for those of its columns where they have factors, and
once for the codes. Sums are exact int64, so that their order does not show. ``encode`` and ``decode`` have the
signatures of the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ckpt8.codecs.lattice.triton import SYMBOL_BLOCK, ZERO, elements, floor, from_zigzag, zigzag
from ckpt8.codecs.rclog import ABOVE, MOST_COLUMNS, RANGES, REFUSAL, UNIT, reference
from ckpt8.codecs.triton_blocks import OPTIONS, bits_of, launch, narrow, on_device, raw, refuse_any, widen
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts

ROWS, COLUMNS = 32, 64
"""Rows and columns that one program sums."""

PARTS = ("codes", "rows", "columns")

_UNIT = tl.constexpr(UNIT)
_UNIT_SIZE = tl.constexpr(float(1 << UNIT))
_ABOVE = tl.constexpr(ABOVE)
"""Added to means in units and taken away again: integer division truncates here."""

_INFINITE = tl.constexpr(0x7F800000)
_NEGATIVE_ZERO = tl.constexpr(-(1 << 31))


@triton.jit
def moment_bits(x):
    """The bits, int32, of loaded second moments; -0 is 0."""
    bits = bits_of(widen(x))
    return tl.where(bits == _NEGATIVE_ZERO, 0, bits)


@triton.jit(do_not_specialize=["numbers", "skipped", "length", "count", "across"])
def sums_kernel(
    moments, flags, rows, sums, numbers, skipped, length, count, across, tall: tl.constexpr, wide: tl.constexpr
):
    """Add the bits of a tile of rows and columns to ``sums``, and ``numbers`` places further how many are not zero.

    Without ``rows``, by row; ``flags[0]`` then becomes 1 for what is no second moment. With the factors of all rows, by
    column, and less these factors. Rows have ``length`` elements; the first ``skipped`` ones lie before the chunk.
    """
    program = tl.program_id(0)
    row = program // across * tall + tl.arange(0, tall)
    column = program % across * wide + tl.arange(0, wide)
    at = row.to(tl.int64)[:, None] * length + (column - skipped)[None, :]
    inside = (column < length)[None, :] & (at >= 0) & (at < count)
    bits = moment_bits(tl.load(moments + at, inside, 0))
    present = (bits != 0).to(tl.int32)
    touched = tl.max(inside.to(tl.int32), axis=1) != 0
    if rows is None:
        refuse_any(flags, (bits < 0) | (bits >= _INFINITE))
        tl.atomic_add(sums + row, tl.sum(bits.to(tl.int64), axis=1), touched, sem="relaxed")
        tl.atomic_add(sums + numbers + row, tl.sum(present, axis=1).to(tl.int64), touched, sem="relaxed")
    else:
        factor = tl.load(rows + row, touched, 0).to(tl.int32)
        rest = tl.where(bits != 0, bits - (factor << _UNIT)[:, None], 0)
        tl.atomic_add(sums + column, tl.sum(rest.to(tl.int64), axis=0), column < length, sem="relaxed")
        tl.atomic_add(sums + numbers + column, tl.sum(present, axis=0).to(tl.int64), column < length, sem="relaxed")


@triton.jit(do_not_specialize=["numbers", "first", "count"])
def means_kernel(sums, numbers, factors, first, count, masked: tl.constexpr, block: tl.constexpr):
    """Divide sums by numbers: the factors as int16, rounded to nearest, halves up; 0 where nothing was counted."""
    start, at, mask = elements(first, count, masked, block)
    unit = tl.maximum(tl.load(sums + numbers + start + at, mask, 0 if masked else None), 1) << _UNIT
    doubled = 2 * tl.load(sums + start + at, mask, 0 if masked else None) + unit + 2 * _ABOVE * unit
    tl.store(factors + start + at, (doubled // (2 * unit) - _ABOVE).to(tl.int16), mask)


@triton.jit
def factors_of(rows, columns, start, at, skipped, length, mask, block: tl.constexpr):
    """The sum of its row's and its column's factor, int32, for each of the elements ``start + at``."""
    row, column = (start + skipped) // length, ((start + skipped) % length).to(tl.int32)
    # From the next row on, rows as long as a block give the same places as longer ones.
    left, beyond = length - column, at - (length - column)
    short = tl.minimum(length, block)
    in_row = tl.where(at < left, 0, 1 + tl.maximum(beyond, 0) // short)
    factor = tl.load(rows + row + in_row, mask).to(tl.int32)
    if columns is not None:
        in_column = tl.where(at < left, column + at, tl.maximum(beyond, 0) % short)
        factor += tl.load(columns + in_column, mask).to(tl.int32)
    return factor


@triton.jit(do_not_specialize=["S", "skipped", "length", "first", "count"])
def encode_kernel(
    moments,
    codes,
    rows,
    columns,
    S,  # noqa: N803
    reciprocal,
    skipped,
    length,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Encode second moments, fp32 or the bits of bf16."""
    start, at, mask = elements(first, count, masked, block)
    bits = moment_bits(tl.load(moments + start + at, mask, 0 if masked else None))
    factor = factors_of(rows, columns, start, at, skipped, length, mask, block)
    middle = bits + S // 2
    # At most one off, since |q| is below 2^20. The rest is then known modulo 2^32.
    q = floor((middle.to(tl.float32) - factor.to(tl.float32) * _UNIT_SIZE) * reciprocal).to(tl.int32)
    rest = middle - (factor << _UNIT) - q * S
    q += (rest >= S).to(tl.int32) - (rest < 0).to(tl.int32)
    tl.store(codes + start + at, tl.where(bits == 0, ZERO, zigzag(q)), mask)


@triton.jit(do_not_specialize=["S", "skipped", "length", "lowest", "highest", "first", "count"])
def decode_kernel(
    moments,
    codes,
    rows,
    columns,
    S,  # noqa: N803
    skipped,
    length,
    lowest,
    highest,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Decode second moments, to fp32 or the bits of bf16."""
    start, at, mask = elements(first, count, masked, block)
    symbol = tl.load(codes + start + at, mask, 0 if masked else None)
    factor = factors_of(rows, columns, start, at, skipped, length, mask, block)
    bits = from_zigzag(symbol).to(tl.int64) * S + (factor.to(tl.int64) << _UNIT)
    bits = tl.minimum(tl.maximum(bits, lowest), highest).to(tl.int32)
    v = tl.where(symbol == ZERO, 0, bits).to(tl.float32, bitcast=True)
    tl.store(moments + start + at, narrow(v, moments.dtype.element_ty), mask)


def _places(count: int, first: int, C: int) -> tuple[int, int]:  # noqa: N803
    """The elements of the first row that lie before the chunk, and the length of a row.

    Rows longer than the chunk become shorter, with the same elements of the chunk in each: so both numbers are small.
    """
    length = C if C <= MOST_COLUMNS else min(C, max(count, 1))
    return max(first % C - (C - length), 0), length


def _write_factors(
    factors: torch.Tensor, x: torch.Tensor, flags: torch.Tensor, rows: torch.Tensor | None, *at: int
) -> None:
    """Fill in the factors of rows, or of columns if those of ``rows`` are given. ``at`` is what ``_places`` returns."""
    skipped, length = at
    sums = torch.zeros(2 * factors.numel(), dtype=torch.int64, device=x.device)
    across = triton.cdiv(length, COLUMNS)
    programs = triton.cdiv(triton.cdiv(skipped + x.numel(), length), ROWS) * across
    numbers = (factors.numel(), skipped, length, x.numel(), across)
    with on_device(x.device):
        sums_kernel[(programs,)](x, flags, rows, sums, *numbers, tall=ROWS, wide=COLUMNS, **OPTIONS)
    launch(means_kernel, factors.numel(), x.device, sums, factors.numel(), factors, block=SYMBOL_BLOCK)


def encode(x: torch.Tensor, out: Parts, *, S: int, C: int, first: int, given: bool = False) -> None:  # noqa: N803
    """Fill ``out`` with codes and factors, to the bit those of ``reference``. Raises RefusedError."""
    if not x.numel():
        return
    flags, bits = torch.zeros(1, dtype=torch.int32, device=x.device), raw(x.contiguous())
    places = _places(x.numel(), first, C)
    rows, columns = out["rows"], out.get("columns")
    if given:
        reference.check(x, out)
    else:
        _write_factors(rows, bits, flags, None, *places)
    if columns is not None and not given:
        _write_factors(columns, bits, flags, rows, *places)
    launch(encode_kernel, x.numel(), x.device, bits, out["codes"], rows, columns, S, 1 / S, *places, block=SYMBOL_BLOCK)
    if flags.item():
        raise RefusedError(REFUSAL)


def decode(parts: Parts, out: torch.Tensor, *, S: int, C: int, first: int) -> None:  # noqa: N803
    """Fill ``out`` with second moments, to the bit those of ``reference``."""
    codes, rows, columns = (None if part is None else part.contiguous() for part in map(parts.get, PARTS))
    numbers = (S, *_places(out.numel(), first, C), *RANGES[out.dtype is torch.float32])
    launch(decode_kernel, out.numel(), out.device, raw(out), codes, rows, columns, *numbers, block=SYMBOL_BLOCK)
