"""Second moments in steps of a pseudo-logarithm on a CPU: the arithmetic of ``reference``, to the bit.

Codes and bits are computed in float64, which holds these integers exactly; beyond 2^53 they are beyond the clamp, too.
(x + 1/2) / S has the same floor as x / S, and is so far from a whole number that the reciprocal of S may be rounded.
"""

import numpy as np

from ckpt8.codecs.lattice import RESERVED
from ckpt8.codecs.lattice.numba import from_zigzag, zigzag
from ckpt8.codecs.rclog import ABOVE, RANGES, REFUSAL, STRANGE_FACTORS, UNIT
from ckpt8.core.arrays import Array, Arrays, give, room_for, widened
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import f4, f8, i4, kernel

u8 = np.uint64

_UNIT = 1 << UNIT


@kernel
def _mean(total, count):
    unit = np.int64(max(count, 1)) << UNIT
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
            p = i4(factor << i4(UNIT))
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


def _factors(parts: Arrays) -> tuple[Array, Array, bool]:
    """The factors of rows and of columns, and whether there are any of columns."""
    rows = parts["rows"]
    return rows, parts.get("columns", rows[:0]), "columns" in parts


def encode(x: Array, out: Arrays, *, S: int, C: int, first: int, given: bool = False) -> None:  # noqa: N803
    """Fill ``out`` with codes and factors, to the bit those of ``reference``. Raises RefusedError."""
    v, (rows, columns, with_columns) = widened(x), _factors(out)
    if given:
        if not ((v >= 0) & (v < np.inf)).all():
            raise RefusedError(REFUSAL)
        if any((np.abs(factors.astype(i4)) > ABOVE).any() for factors in (rows, columns)):
            raise RefusedError(STRANGE_FACTORS)
    else:
        sums = np.zeros(columns.size, np.int64), np.zeros(columns.size, i4)
        if _mean_rows(v, v.view(i4), rows, columns, *sums, with_columns, u8(C), u8(first)):
            raise RefusedError(REFUSAL)
    _encode(v, v.view(i4), out["codes"], rows, columns, with_columns, S, u8(C), u8(first))


def decode(parts: Arrays, out: Array, *, S: int, C: int, first: int) -> None:  # noqa: N803
    """Fill ``out`` with second moments, to the bit those of ``reference``."""
    flat, limits = room_for(out), RANGES[out.dtype == np.float32]
    _decode(parts["codes"], *_factors(parts), flat.view(i4), S, u8(C), u8(first), *limits)
    give(flat, out)
