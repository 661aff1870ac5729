"""Second moments in steps of a pseudo-logarithm on a CPU: the arithmetic of ``reference``, to the bit.

Codes and bits are computed in float64, which holds these integers exactly; beyond 2^53 they are beyond the clamp, too.
(x + 1/2) / S has the same floor as x / S, and is so far from a whole number that the reciprocal of S may be rounded.
"""

from typing import Any

import numpy as np
import torch

from ckpt8.codecs.lattice.numba import from_zigzag, zigzag
from ckpt8.codecs.lattice.reference import RESERVED
from ckpt8.codecs.rclog import reference
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import f4, f8, i4, kernel
from ckpt8.core.tensors import Parts

u8 = np.uint64

_UNIT = 1 << reference.UNIT


@kernel
def _mean(total, count):
    unit = np.int64(max(count, 1)) << reference.UNIT
    return (2 * total + unit) // (2 * unit)


@kernel
def _end_of_row(begin, count, start, C):  # noqa: N803
    """The end of the row that ``begin`` lies in, at column ``start``, and what to take from its places for columns."""
    return u8(min(u8(count), u8(begin + C - start))), u8(begin - start)


@kernel
def _mean_rows(v, bits, rows, columns, sums, counts, with_columns, C, first):  # noqa: N803
    """Fill the factors; whether any value must be refused. ``sums`` and ``counts`` are zeros for each column."""
    refused, begin, row, start = i4(0), u8(0), u8(0), u8(first % C)
    while begin < v.size:
        end, shift = _end_of_row(begin, v.size, start, C)
        total, count = np.int64(0), i4(0)
        for i in range(begin, end):
            refused |= i4(not (v[i] >= f4(0) and v[i] < f4(np.inf)))
            total += np.int64(i4(0) if v[i] == f4(0) else bits[i])
            count += i4(v[i] != f4(0))
        factor = i4(_mean(total, count))
        rows[row] = factor
        if with_columns:
            p = i4(factor << i4(reference.UNIT))
            for i in range(begin, end):
                sums[u8(i - shift)] += np.int64(i4(0) if v[i] == f4(0) else i4(bits[i] - p))
                counts[u8(i - shift)] += i4(v[i] != f4(0))
        begin, row, start = end, u8(row + u8(1)), u8(0)
    rows[row:] = 0
    for j in range(columns.size):
        columns[j] = _mean(sums[j], counts[j])
    return refused != 0


@kernel
def _encode(v, bits, codes, rows, columns, with_columns, S, C, first):  # noqa: N803
    """Fill codes."""
    half, inverse, begin, row, start = f8(S // 2) + f8(0.5), f8(1) / f8(S), u8(0), u8(0), u8(first % C)
    while begin < v.size:
        end, shift = _end_of_row(begin, v.size, start, C)
        factor = i4(rows[row])
        for i in range(begin, end):
            p = i4(factor + i4(columns[u8(i - shift)])) if with_columns else factor
            q = np.floor((f8(bits[i]) - f8(p) * f8(_UNIT) + half) * inverse)
            codes[i] = i4(RESERVED) if v[i] == f4(0) else zigzag(i4(q))
        begin, row, start = end, u8(row + u8(1)), u8(0)


@kernel
def _decode(codes, rows, columns, with_columns, out, S, C, first, lowest, highest):  # noqa: N803
    """Fill ``out`` with bits."""
    step, lowest, highest, begin, row, start = f8(S), f8(lowest), f8(highest), u8(0), u8(0), u8(first % C)
    while begin < codes.size:
        end, shift = _end_of_row(begin, codes.size, start, C)
        factor = i4(rows[row])
        for i in range(begin, end):
            p = i4(factor + i4(columns[u8(i - shift)])) if with_columns else factor
            bits = f8(from_zigzag(codes[i])) * step + f8(p) * f8(_UNIT)
            bits = min(max(bits, lowest), highest)
            out[i] = i4(0) if codes[i] == i4(RESERVED) else i4(bits)
        begin, row, start = end, u8(row + u8(1)), u8(0)


def _factors(parts: Parts) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], bool]:
    """The factors of rows and of columns, and whether there are any of columns."""
    rows, columns = parts["rows"], parts.get("columns")
    return rows.numpy(), (rows[:0] if columns is None else columns).numpy(), columns is not None


def encode(x: torch.Tensor, out: Parts, *, S: int, C: int, first: int, given: bool = False) -> None:  # noqa: N803
    """Fill ``out`` with codes and factors, to the bit those of ``reference``. Raises RefusedError."""
    v = x.float().contiguous().numpy()
    rows, columns, with_columns = _factors(out)
    if given:
        reference.check(x, out)
    else:
        sums = np.zeros(columns.size, np.int64), np.zeros(columns.size, i4)
        if _mean_rows(v, v.view(i4), rows, columns, *sums, with_columns, u8(C), u8(first)):
            raise RefusedError(reference.REFUSAL)
    _encode(v, v.view(i4), out["codes"].numpy(), rows, columns, with_columns, S, u8(C), u8(first))


def decode(parts: Parts, out: torch.Tensor, *, S: int, C: int, first: int) -> None:  # noqa: N803
    """Fill ``out`` with second moments, to the bit those of ``reference``."""
    flat = out if out.dtype is torch.float32 else torch.empty(out.numel())
    codes, limits = parts["codes"].contiguous().numpy(), reference.RANGES[out.dtype]
    _decode(codes, *_factors(parts), flat.view(torch.int32).numpy(), S, u8(C), u8(first), *limits)
    if flat is not out:
        out.copy_(flat)
