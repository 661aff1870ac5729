"""The measurements of ``stats`` on a CPU in one pass over memory, for the units that most bytes are in.

Maxima are the same bit for bit; sums are taken in float64, in 32 lanes. Blocks of 256 elements go through one short
loop after the other, each of which a compiler turns into vector instructions. Maxima are of the bits of magnitudes,
which are ordered as the magnitudes are, with NaN above all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt8.codecs.companded8 import GROUP, Companded8
from ckpt8.jit import kernel
from ckpt8.stats import SMALLEST_NORMAL, MomentError, UpdateError, WeightError
from ckpt8.tensors import Parts

Array = np.ndarray[Any, Any]

BLOCK = 8 * GROUP
"""Elements that all of these functions take a multiple of."""

_i4 = np.int32
_f4 = np.float32
_f8 = np.float64

_MAGNITUDE = 0x7FFFFFFF
_SUMS = 6
_MAXIMA = 4
_WORK = 8
"""Blocks of memory that ``_adam_errors`` works in."""


@kernel
def _add(x, lanes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add a block to the lanes."""
    for j in range(GROUP):
        low = (_f8(x[j]) + _f8(x[j + 32])) + (_f8(x[j + 64]) + _f8(x[j + 96]))
        high = (_f8(x[j + 128]) + _f8(x[j + 160])) + (_f8(x[j + 192]) + _f8(x[j + 224]))
        lanes[j] += low + high


@kernel
def _square(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return _f8(x) * _f8(x)


@kernel
def _add_squares(x, lanes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add the squares of a block to the lanes."""
    for j in range(GROUP):
        low = (_square(x[j]) + _square(x[j + 32])) + (_square(x[j + 64]) + _square(x[j + 96]))
        high = (_square(x[j + 128]) + _square(x[j + 160])) + (_square(x[j + 192]) + _square(x[j + 224]))
        lanes[j] += low + high


@kernel
def _subtract(y, x, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for i in range(BLOCK):
        out[i] = y[i] - x[i]


@kernel
def _largest(bits):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The bits of the largest magnitude."""
    largest = _i4(0)
    for i in range(bits.size):
        largest = max(largest, _i4(bits[i] & _i4(_MAGNITUDE)))
    return largest


@kernel
def _largest_scaled(bits, scales, cell, cell_bits):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The bits of the largest magnitude relative to the scale of its group."""
    largest = _i4(0)
    for g in range(BLOCK // GROUP):
        top = _largest(bits[g * GROUP : (g + 1) * GROUP])
        cell_bits[0] = _i4(scales[g]) << 15
        s = cell[0]
        cell_bits[0] = top
        cell[0] = cell[0] / max(s, _f4(SMALLEST_NORMAL)) if s > 0 else cell[0] * s
        largest = max(largest, cell_bits[0])
    return largest


@kernel
def _root(x, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for i in range(BLOCK):
        out[i] = _f4(1) / (_f4(1) / np.sqrt(x[i]))


@kernel
def _decode(codes, scales, signed, fourth, levels, cell, cell_bits, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913
    """A block of first moments, or of second moments, as ``codecs.companded8.reference`` decodes it."""
    top = _f4(levels)
    for g in range(BLOCK // GROUP):
        cell_bits[0] = _i4(scales[g]) << 15
        s = cell[0]
        c, x = codes[g * GROUP : (g + 1) * GROUP], out[g * GROUP : (g + 1) * GROUP]
        if signed:
            for j in range(GROUP):
                y = _f4(_i4(c[j])) / top
                x[j] = (y / (_f4(2) - abs(y))) * s
        elif fourth:
            for j in range(GROUP):
                y = _f4(_i4(c[j])) / top
                y = (y * y) * s
                x[j] = y * y
        else:
            for j in range(GROUP):
                y = (_f4(_i4(c[j])) / top) * s
                x[j] = y * y


@kernel
def _weight_error(x, y, x_bits, y_bits, relative, bits, total):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913
    smallest = _f4(SMALLEST_NORMAL)
    largest, up, down = _i4(0), _i4(0), _i4(0)
    for first in range(0, x.size, BLOCK):
        a, b = x[first : first + BLOCK], y[first : first + BLOCK]
        a_bits, b_bits = x_bits[first : first + BLOCK], y_bits[first : first + BLOCK]
        for i in range(BLOCK):
            magnitude = abs(a[i])
            relative[i] = abs(b[i] - a[i]) / (magnitude if magnitude > smallest else smallest)
        _add(relative, total)
        largest = max(largest, _largest(bits))
        for i in range(BLOCK):
            up = max(up, _i4(b_bits[i] - a_bits[i]))
        for i in range(BLOCK):
            down = min(down, _i4(b_bits[i] - a_bits[i]))
    return largest, max(up, _i4(-down))


@kernel
def _adam_errors(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913
    m,  # noqa: ANN001
    m_codes,  # noqa: ANN001
    m_scales,  # noqa: ANN001
    m_levels,  # noqa: ANN001
    v,  # noqa: ANN001
    v_codes,  # noqa: ANN001
    v_scales,  # noqa: ANN001
    v_levels,  # noqa: ANN001
    fourth,  # noqa: ANN001
    eps,  # noqa: ANN001
    work,  # noqa: ANN001
    work_bits,  # noqa: ANN001
    sums,  # noqa: ANN001
    maxima,  # noqa: ANN001
):
    eps = _f4(eps)
    cell, cell_bits = work[0], work_bits[0]
    error, error_bits = work[1], work_bits[1]
    m_there, v_there, r, r_there = work[2], work[3], work[4], work[5]
    u, u_bits, u_there = work[6], work_bits[6], work[7]
    for first in range(0, m.size, BLOCK):
        group = first // GROUP
        m_here, v_here = m[first : first + BLOCK], v[first : first + BLOCK]
        m_scale, v_scale = m_scales[group : group + 8], v_scales[group : group + 8]
        _decode(m_codes[first : first + BLOCK], m_scale, True, False, m_levels, cell, cell_bits, m_there)
        _subtract(m_there, m_here, error)
        _add_squares(error, sums[0])
        _add_squares(m_here, sums[1])
        maxima[0] = max(maxima[0], _largest_scaled(error_bits, m_scale, cell, cell_bits))
        _decode(v_codes[first : first + BLOCK], v_scale, False, fourth, v_levels, cell, cell_bits, v_there)
        _subtract(v_there, v_here, error)
        _add_squares(error, sums[2])
        _add_squares(v_here, sums[3])
        _root(v_here, r)
        _root(v_there, r_there)
        _subtract(r_there, r, error)
        maxima[1] = max(maxima[1], _largest_scaled(error_bits, v_scale, cell, cell_bits))
        for i in range(BLOCK):
            u[i] = m_here[i] / (r[i] + eps)
        for i in range(BLOCK):
            u_there[i] = m_there[i] / (r_there[i] + eps)
        _subtract(u_there, u, error)
        _add_squares(error, sums[4])
        _add_squares(u, sums[5])
        maxima[2] = max(maxima[2], _largest(error_bits))
        maxima[3] = max(maxima[3], _largest(u_bits))


def _both(*shape: int) -> tuple[Array, Array]:
    """The same memory as fp32 and as its bits."""
    memory = np.empty(shape, np.float32)
    return memory, memory.view(np.int32)


def weight_error(original: torch.Tensor, decoded: torch.Tensor) -> WeightError:
    """As ``stats.weight_error``."""
    x, y, total = original.numpy(), decoded.numpy(), np.zeros(GROUP)
    largest, steps = _weight_error(x, y, x.view(np.int32), y.view(np.int32), *_both(BLOCK), total)
    return WeightError(original.numel(), float(np.int32(largest).view(np.float32)), float(total.sum()), int(steps))


@dataclass(frozen=True, slots=True)
class Moment:
    """A flat fp32 tensor, its parts, and the codec that made them."""

    original: torch.Tensor
    parts: Parts
    codec: Companded8

    def arrays(self) -> tuple[Any, ...]:
        """What the kernel takes of it."""
        return (
            self.original.numpy(),
            self.parts["codes"].numpy(),
            self.parts["scales"].numpy(),
            self.codec.Q,
            self.codec.p != 1,
        )


def adam_errors(
    first: Moment, second: Moment, eps: float, factor: float
) -> tuple[MomentError, MomentError, UpdateError]:
    """The errors of both moments, and of ``factor * m / (sqrt(v) + eps)``, as ``stats`` has them."""
    sums, maxima = np.zeros((_SUMS, GROUP)), np.zeros(_MAXIMA, np.int32)
    _adam_errors(*first.arrays()[:-1], *second.arrays(), eps, *_both(_WORK, BLOCK), sums, maxima)
    total, top = sums.sum(axis=1).tolist(), maxima.view(np.float32).tolist()
    square = factor * factor
    return (
        MomentError(total[0], total[1], top[0]),
        MomentError(total[2], total[3], top[1]),
        UpdateError(total[4] * square, total[5] * square, top[2] * factor, top[3] * factor),
    )
