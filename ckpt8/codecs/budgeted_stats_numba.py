"""Measures parameters under a budget as ``error_measures``, on a CPU in one pass over originals and decoded values.

Maxima are the same bit for bit; sums are taken in float64, in 32 lanes, as in ``error_stats_numba``.
"""

from __future__ import annotations

import numpy as np

from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.numba import BLOCK
from ckpt8.codecs.error_measures import Pair
from ckpt8.codecs.error_stats import SMALLEST_NORMAL, LatticeError, MomentError, StepError, UpdateError
from ckpt8.codecs.error_stats_numba import add_squares, divide, subtract, take_roots, top_bits
from ckpt8.core.numba_kernels import f4, f8, i4, kernel, with_bits

_ROOM = 5


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
    """The same with (e m) of second moments, and with updates, of which the largest counts, too."""
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
        self._room = with_bits(_ROOM, BLOCK)

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
