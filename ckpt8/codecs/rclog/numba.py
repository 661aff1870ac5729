"""Second moments in steps of a pseudo-logarithm on a CPU: the arithmetic of ``reference``, to the bit.

Codes and bits are computed in float64, which holds all these integers exactly. floor((x + 1/2) / S) is that of x / S, and
far enough from a whole number that the reciprocal of S may be rounded. A product beyond 2^53 is beyond the clamp, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ckpt8.codecs.rclog import reference
from ckpt8.codecs.symbols import RESERVED
from ckpt8.codecs.symbols_numba import from_zigzag, zigzag
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba_kernels import f4, f8, i4, kernel
from ckpt8.core.tensors import Parts

_UNIT = 1 << reference.UNIT


@kernel
def _mean(total, count):
    unit = np.int64(max(count, 1)) << reference.UNIT
    return (2 * total + unit) // (2 * unit)


@kernel
def _sum_row(v, bits):
    """The sum and number of the bits that are not zero, and whether a value must be refused."""
    total, count, refused = np.int64(0), i4(0), i4(0)
    for j in range(v.size):
        refused |= i4(not (v[j] >= f4(0) and v[j] < f4(np.inf)))
        total += np.int64(i4(0) if v[j] == f4(0) else bits[j])
        count += i4(v[j] != f4(0))
    return total, count, refused


@kernel
def _add_rest(v, bits, p, sums, counts):
    """Add what a row has above its factor to the sums of columns."""
    for j in range(v.size):
        sums[j] += np.int64(i4(0) if v[j] == f4(0) else i4(bits[j] - p))
        counts[j] += i4(v[j] != f4(0))


@kernel
def _encode_row(v, bits, row, columns, with_columns, codes, half, inverse):
    for j in range(v.size):
        factor = i4(row + columns[j]) if with_columns else row
        q = np.floor((f8(bits[j]) - f8(factor) * f8(_UNIT) + half) * inverse)
        codes[j] = i4(RESERVED) if v[j] == f4(0) else zigzag(i4(q))


@kernel
def _decode_row(codes, row, columns, with_columns, out, step, lowest, highest):
    """Fill ``out`` with bits."""
    for j in range(codes.size):
        factor = i4(row + columns[j]) if with_columns else row
        bits = f8(from_zigzag(codes[j])) * step + f8(factor) * f8(_UNIT)
        bits = min(max(bits, lowest), highest)
        out[j] = i4(0) if codes[j] == i4(RESERVED) else i4(bits)


@kernel
def _encode(v, bits, codes, rows, columns, with_columns, S, C, first):  # noqa: N803
    """Fill codes and factors; whether any value must be refused."""
    refused = i4(0)
    rows[:] = 0
    sums, counts = np.zeros(columns.size, np.int64), np.zeros(columns.size, i4)
    begin, row, start = 0, 0, first % C
    while begin < v.size:
        end = min(v.size, begin + C - start)
        total, count, wrong = _sum_row(v[begin:end], bits[begin:end])
        refused |= wrong
        rows[row] = _mean(total, count)
        if with_columns:
            p, at = i4(i4(rows[row]) << i4(reference.UNIT)), start + end - begin
            _add_rest(v[begin:end], bits[begin:end], p, sums[start:at], counts[start:at])
        begin, row, start = end, row + 1, 0
    for j in range(columns.size):
        columns[j] = _mean(sums[j], counts[j])
    half, inverse = f8(S // 2) + f8(0.5), f8(1) / f8(S)
    wide = columns.astype(i4)
    begin, row, start = 0, 0, first % C
    while begin < v.size:
        end = min(v.size, begin + C - start)
        x, found = v[begin:end], codes[begin:end]
        _encode_row(x, bits[begin:end], i4(rows[row]), wide[start:], with_columns, found, half, inverse)
        begin, row, start = end, row + 1, 0
    return refused != 0


@kernel
def _decode(codes, rows, columns, with_columns, out, S, C, first, lowest, highest):  # noqa: N803
    """Fill ``out`` with bits."""
    wide = columns.astype(i4)
    begin, row, start = 0, 0, first % C
    while begin < codes.size:
        end = min(codes.size, begin + C - start)
        x = codes[begin:end]
        _decode_row(x, i4(rows[row]), wide[start:], with_columns, out[begin:end], f8(S), f8(lowest), f8(highest))
        begin, row, start = end, row + 1, 0


def _factors(parts: Parts) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], bool]:
    """The factors of rows and of columns, and whether there are any of columns."""
    rows, columns = parts["rows"], parts.get("columns")
    return rows.numpy(), (rows[:0] if columns is None else columns).numpy(), columns is not None


def encode(x: torch.Tensor, out: Parts, *, S: int, C: int, first: int) -> None:  # noqa: N803
    """As ``reference.encode``."""
    v = x.float().contiguous().numpy()
    if _encode(v, v.view(i4), out["codes"].numpy(), *_factors(out), S, C, first):
        raise RefusedError(reference.REFUSAL)


def decode(parts: Parts, out: torch.Tensor, *, S: int, C: int, first: int) -> None:  # noqa: N803
    """As ``reference.decode``."""
    flat = out if out.dtype is torch.float32 else torch.empty(out.numel())
    codes, limits = parts["codes"].contiguous().numpy(), reference.RANGES[out.dtype]
    _decode(codes, *_factors(parts), flat.view(torch.int32).numpy(), S, C, first, *limits)
    if flat is not out:
        out.copy_(flat)
