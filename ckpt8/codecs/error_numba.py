"""Measures as ``error_measures``, on a CPU in one pass over memory: the usual units, and parameters under a budget.

Maxima are the same bit for bit; sums are taken in float64, in 32 lanes. Blocks of 256 elements go through one short
loop after the other, and a compiler turns each loop into vector instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ckpt8.codecs.companded8 import GROUP, Companded8
from ckpt8.codecs.companded8.numba import BLOCK, GROUPS, decode_roots, decode_signed_blocks, square
from ckpt8.codecs.error_measures import Pair
from ckpt8.codecs.error_stats import SMALLEST_NORMAL, LatticeError, MomentError, StepError, UpdateError, WeightError
from ckpt8.codecs.split24 import Split24
from ckpt8.codecs.split24.numba import join
from ckpt8.core.numba import MAGNITUDE, f4, f8, i4, kernel, with_bits
from ckpt8.core.tensors import Parts

_SUMS, _MAXIMA, _ROOM = 6, 4, 8
"""Sums, maxima and blocks of memory that ``_adam_errors`` needs."""
_WEIGHT_ROOM = 2


@kernel
def _add(x, lanes):
    """Add a block to the lanes."""
    for j in range(GROUP):
        low = (f8(x[j]) + f8(x[j + 32])) + (f8(x[j + 64]) + f8(x[j + 96]))
        high = (f8(x[j + 128]) + f8(x[j + 160])) + (f8(x[j + 192]) + f8(x[j + 224]))
        lanes[j] += low + high


@kernel
def _square(x):
    return f8(x) * f8(x)


@kernel
def add_squares(x, lanes):
    """Add the squares of a block to the lanes."""
    for j in range(GROUP):
        low = (_square(x[j]) + _square(x[j + 32])) + (_square(x[j + 64]) + _square(x[j + 96]))
        high = (_square(x[j + 128]) + _square(x[j + 160])) + (_square(x[j + 192]) + _square(x[j + 224]))
        lanes[j] += low + high


@kernel
def subtract(y, x, out):
    """Y - x of a block."""
    for i in range(BLOCK):
        out[i] = y[i] - x[i]


@kernel
def top_bits(bits):
    """The bits of the largest magnitude."""
    largest = i4(0)
    for i in range(bits.size):
        largest = max(largest, i4(bits[i] & i4(MAGNITUDE)))
    return largest


@kernel
def _largest_scaled(bits, scales, cell, cell_bits):
    """The bits of the largest magnitude of a block relative to the scale of its group."""
    largest = i4(0)
    for g in range(GROUPS):
        top = top_bits(bits[g * GROUP : (g + 1) * GROUP])
        cell_bits[0] = i4(scales[g]) << 15
        s = cell[0]
        cell_bits[0] = top
        # A zero group has no scale and no error.
        cell[0] = cell[0] / max(s, f4(SMALLEST_NORMAL)) if s > 0 else cell[0] * s
        largest = max(largest, cell_bits[0])
    return largest


@kernel
def take_roots(x, out):
    """The square roots of a block."""
    for i in range(BLOCK):
        out[i] = np.sqrt(x[i])


@kernel
def divide(m, root, eps, out):
    """The update of a block without its factor."""
    for i in range(BLOCK):
        out[i] = m[i] / (root[i] + eps)


@kernel
def _weight_error(x, x_bits, exponent, mantissa, rho, levels, room, room_bits, total):
    """Add relative errors to the lanes; the bits of the largest, and the largest in fp32 steps."""
    smallest = f4(SMALLEST_NORMAL)
    decoded, decoded_bits, relative, relative_bits = room[0], room_bits[0], room[1], room_bits[1]
    largest, up, down = i4(0), i4(0), i4(0)
    for first in range(0, x.size, BLOCK):
        last = first + BLOCK
        a, bits = x[first:last], x_bits[first:last]
        join(exponent[first:last], mantissa[first:last], rho[first:last], decoded_bits, levels)
        for i in range(BLOCK):
            magnitude = abs(a[i])
            relative[i] = abs(decoded[i] - a[i]) / (max(smallest, magnitude))
        _add(relative, total)
        largest = max(largest, top_bits(relative_bits))
        for i in range(BLOCK):
            up = max(up, i4(decoded_bits[i] - bits[i]))
        for i in range(BLOCK):
            down = min(down, i4(decoded_bits[i] - bits[i]))
    return largest, max(up, i4(-down))


@kernel
def _adam_errors(
    m, m_codes, m_scales, m_levels, v, v_codes, v_scales, v_levels, fourth_root, eps, room, room_bits, sums, maxima
):
    """Add squares to the lanes of ``sums``: of the error and the value of m, v and u.

    ``maxima`` are raised to the bits of the largest errors of m and sqrt(v) relative to scales, of u, and of |u|.
    """
    eps = f4(eps)
    cell, cell_bits, error, error_bits = room[0], room_bits[0], room[1], room_bits[1]
    decoded, m_decoded, root, root_decoded, u, u_decoded = room[2], room[3], room[4], room[5], room[6], room[7]
    for first in range(0, m.size, BLOCK):
        last, group = first + BLOCK, first // GROUP
        block, scales = m[first:last], m_scales[group : group + GROUPS]
        decode_signed_blocks(m_codes[first:last], scales, cell, cell_bits, error, m_decoded, m_levels)
        subtract(m_decoded, block, error)
        add_squares(error, sums[0])
        add_squares(block, sums[1])
        maxima[0] = max(maxima[0], _largest_scaled(error_bits, scales, cell, cell_bits))
        block, scales = v[first:last], v_scales[group : group + GROUPS]
        decode_roots(v_codes[first:last], scales, cell, cell_bits, error, root_decoded, v_levels, fourth_root)
        square(root_decoded, decoded)
        subtract(decoded, block, error)
        add_squares(error, sums[2])
        add_squares(block, sums[3])
        take_roots(block, root)
        if fourth_root:
            # Without the fourth root, ``root_decoded`` is already the rounded root of its rounded square: no code and
            # scale are small enough for a square to lose bits.
            take_roots(decoded, root_decoded)
        subtract(root_decoded, root, error)
        maxima[1] = max(maxima[1], _largest_scaled(error_bits, scales, cell, cell_bits))
        divide(m[first:last], root, eps, u)
        divide(m_decoded, root_decoded, eps, u_decoded)
        subtract(u_decoded, u, error)
        add_squares(error, sums[4])
        add_squares(u, sums[5])
        maxima[2] = max(maxima[2], top_bits(error_bits))
        maxima[3] = max(maxima[3], top_bits(room_bits[6]))


def weight_error(original: torch.Tensor, parts: Parts, codec: Split24) -> WeightError:
    """The error of flat fp32 weights against those that ``codec`` makes of ``parts``: one pass over memory."""
    x, total = original.numpy(), np.zeros(GROUP)
    planes = (parts[name].numpy() for name in ("exponent", "mantissa", "rho"))
    largest, steps = _weight_error(x, x.view(i4), *planes, codec.R, *with_bits(_WEIGHT_ROOM, BLOCK), total)
    return WeightError(original.numel(), float(i4(largest).view(f4)), float(total.sum()), int(steps))


Moment = tuple[torch.Tensor, Parts, Companded8]
"""A flat fp32 tensor, its parts, and the codec that made them."""


def _arguments(original: torch.Tensor, parts: Parts, codec: Companded8) -> tuple[Any, ...]:
    """The arguments of the kernel for one moment."""
    return original.numpy(), parts["codes"].numpy(), parts["scales"].numpy(), codec.Q


def adam_errors(
    first: Moment, second: Moment, eps: float, factor: float
) -> tuple[MomentError, MomentError, UpdateError]:
    """The errors of both moments, and of ``factor * m / (sqrt(v) + eps)``, as ``error_measures`` has them."""
    sums, maxima = np.zeros((_SUMS, GROUP)), np.zeros(_MAXIMA, i4)
    moments = (*_arguments(*first), *_arguments(*second))
    _adam_errors(*moments, second[2].p != 1, eps, *with_bits(_ROOM, BLOCK), sums, maxima)
    total, top = sums.sum(axis=1).tolist(), maxima.view(f4).tolist()
    square = factor * factor
    return (
        MomentError(total[0], total[1], top[0]),
        MomentError(total[2], total[3], top[1]),
        UpdateError(total[4] * square, total[5] * square, top[2] * factor, top[3] * factor),
    )


_BUDGETED_ROOM = 5


@kernel
def _product(x, weight):
    return f8(x) * f8(x) * f8(weight)


@kernel
def _add_weighted_squares(x, weights, lanes):
    """Add the squares of a block, each times its weight, to the lanes."""
    for j in range(GROUP):
        a, b, c = j + 32, j + 64, j + 96
        low = (_product(x[j], weights[j]) + _product(x[a], weights[a])) + (
            _product(x[b], weights[b]) + _product(x[c], weights[c])
        )
        a, b, c, d = j + 128, j + 160, j + 192, j + 224
        high = (_product(x[a], weights[a]) + _product(x[b], weights[b])) + (
            _product(x[c], weights[c]) + _product(x[d], weights[d])
        )
        lanes[j] += low + high


@kernel
def _relative(decoded, root, m, out):
    """The relative error of ``root`` times m; 0 where the root is 0."""
    for i in range(BLOCK):
        error = decoded[i] - root[i] if root[i] > 0 else f4(0)
        out[i] = error / max(root[i], f4(SMALLEST_NORMAL)) * m[i]


# In one loop, all of these would take twice as long.


@kernel
def _add_weighted_errors(x, there, weights, error, lanes):
    """Add the squares of the errors, each times its weight, to the lanes."""
    for first in range(0, x.size, BLOCK):
        last = first + BLOCK
        subtract(there[first:last], x[first:last], error)
        _add_weighted_squares(error, weights[first:last], lanes)


@kernel
def _add_errors(x, there, error, error_bits, sums):
    """Add the squares of errors and values to two rows of lanes; the bits of the largest error."""
    largest = i4(0)
    for first in range(0, x.size, BLOCK):
        last = first + BLOCK
        subtract(there[first:last], x[first:last], error)
        add_squares(error, sums[0])
        add_squares(x[first:last], sums[1])
        largest = max(largest, top_bits(error_bits))
    return largest


@kernel
def _add_updates(m, m_there, v, v_there, eps, room, room_bits, sums, maxima):
    """Add sums of moments, of (e m) of second moments and of updates, and the largest update and its largest error."""
    eps = f4(eps)
    error, error_bits, here, there, u, u_there = room[0], room_bits[0], room[1], room[2], room[3], room[4]
    u_bits = room_bits[3]
    for first in range(0, m.size, BLOCK):
        last = first + BLOCK
        block = m[first:last]
        take_roots(v[first:last], here)
        take_roots(v_there[first:last], there)
        _relative(there, here, block, error)
        add_squares(error, sums[0])
        divide(block, here, eps, u)
        divide(m_there[first:last], there, eps, u_there)
        subtract(u_there, u, error)
        add_squares(error, sums[1])
        add_squares(u, sums[2])
        maxima[0] = max(maxima[0], top_bits(error_bits))
        maxima[1] = max(maxima[1], top_bits(u_bits))


class BudgetedSums:
    """Sums over the blocks of a parameter, which come in turn as flat fp32 tensors of whole blocks."""

    def __init__(self) -> None:
        self._sums, self._maxima = np.zeros((10, GROUP)), np.zeros(3, np.int32)
        self._room = with_bits(_BUDGETED_ROOM, BLOCK)

    def add(self, weight: Pair | None, moment1: Pair, moment2: Pair, eps: float) -> None:
        """Add the blocks that follow."""
        sums, maxima, (room, room_bits) = self._sums, self._maxima, self._room
        m, m_there, v, v_there = (x.numpy() for x in (*moment1, *moment2))
        if weight is not None:
            w, w_there = (x.numpy() for x in weight)
            maxima[0] = max(maxima[0], _add_errors(w, w_there, room[0], room_bits[0], sums[:2]))
            _add_weighted_errors(w, w_there, v, room[0], sums[2])
        _add_errors(m, m_there, room[0], room_bits[0], sums[3:5])
        _add_errors(v, v_there, room[0], room_bits[0], sums[5:7])
        _add_updates(m, m_there, v, v_there, eps, room, room_bits, sums[7:], maxima[1:])

    def errors(self, factor: float) -> tuple[LatticeError, MomentError, MomentError, UpdateError, StepError]:
        """The errors of the parameter, and of ``factor * m / (sqrt(v) + eps)``.

        The last one holds sums without the factors of the parameter, see ``step_sums``.
        """
        total, top = self._sums.sum(axis=1).tolist(), self._maxima.view(f4).tolist()
        square = factor * factor
        return (
            LatticeError(total[0], total[1], top[0]),
            MomentError(total[3], total[4]),
            MomentError(total[5], total[6]),
            UpdateError(total[8] * square, total[9] * square, top[1] * factor, top[2] * factor),
            StepError(total[4], total[2], total[3], total[7]),
        )
