"""Measures on a CPU with numba, as ``measure`` does in torch.

What the codecs of flash make of fp32 is decoded block by block in the cache of the core, and nowhere else.
Maxima are the same bit for bit; sums are taken in float64, in 32 lanes. Blocks of 256 elements go through one short
loop after the other, and a compiler turns each loop into vector instructions. One loop would take twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ckpt8.codecs.companded8 import GROUP, Companded8
from ckpt8.codecs.companded8.numba import (
    BLOCK,
    GROUPS,
    decode_block,
    encode_first,
    encode_second,
    refuse_first,
    refuse_second,
    square,
    table_of,
)
from ckpt8.codecs.error_stats import (
    SMALLEST_NORMAL,
    ErrorStats,
    LatticeError,
    MomentError,
    StepError,
    UpdateError,
    WeightError,
)
from ckpt8.codecs.split24 import Split24
from ckpt8.codecs.split24.numba import join, refuse, split
from ckpt8.compressing.measure import UnitErrors, measure_of, scaled_steps
from ckpt8.compressing.plan import Stream, Unit
from ckpt8.core.arrays import Array, Arrays, floats
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import MAGNITUDE, f4, f8, i4, kernel, with_bits
from ckpt8.core.tensors import DType, Role

_ROOM = 8
"""Blocks of memory that kernels need."""

_TILE = 1 << 15
"""So many elements are packed before they are measured: few enough to be in the cache of a core then."""

_NO_WEIGHT = np.zeros(0, f4), np.zeros(0, i4), *np.zeros((2, 0), np.uint8), np.zeros(0, np.int8), 1
_NO_MOMENTS = tuple(
    (np.zeros(0, f4), np.zeros(0, i4), np.zeros(0, dtype), np.zeros(0, np.uint16), 1, np.zeros(256, f4))
    for dtype in (np.int8, np.uint8)
)


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
        s = scales[g]
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
def _add_weighed(x, there, root, error, lanes):
    """Add the squares of the errors of a block, each times its root, to the lanes."""
    for i in range(BLOCK):
        error[i] = (there[i] - x[i]) * root[i]
    add_squares(error, lanes)


@kernel
def _add_moved(error, root, m, lanes):
    """Add the squares of (e m) of a block to the lanes: e is the relative error of ``root``; 0 where the root is 0.

    ``error`` is that of the root, and is overwritten.
    """
    for i in range(BLOCK):
        e = error[i] if root[i] > 0 else f4(0)
        error[i] = e / max(root[i], f4(SMALLEST_NORMAL)) * m[i]
    add_squares(error, lanes)


@kernel
def _add_relative_block(x, bits, there, there_bits, relative, relative_bits, lanes, tops):
    """Add the relative errors of a block to the lanes; raise ``tops``: the bits of the largest, and in fp32 steps."""
    smallest = f4(SMALLEST_NORMAL)
    for i in range(BLOCK):
        relative[i] = abs(there[i] - x[i]) / (max(smallest, abs(x[i])))
    _add(relative, lanes)
    tops[0] = max(tops[0], top_bits(relative_bits))
    up, down = i4(0), i4(0)
    for i in range(BLOCK):
        up = max(up, i4(there_bits[i] - bits[i]))
    for i in range(BLOCK):
        down = min(down, i4(there_bits[i] - bits[i]))
    tops[1] = max(tops[1], up, i4(-down))


@kernel
def _add_relative(x, x_bits, there, there_bits, room, room_bits, lanes, tops):
    """Measure blocks as ``_add_relative_block``."""
    for first in range(0, x.size, BLOCK):
        last = first + BLOCK
        pair = x[first:last], x_bits[first:last], there[first:last], there_bits[first:last]
        _add_relative_block(*pair, room[0], room_bits[0], lanes, tops)


@kernel
def _add_weighed_errors(x, there, v, room, lanes):
    """Measure blocks as ``_add_weighed`` with the roots of ``v``."""
    for first in range(0, x.size, BLOCK):
        last = first + BLOCK
        take_roots(v[first:last], room[1])
        _add_weighed(x[first:last], there[first:last], room[1], room[0], lanes)


@kernel
def _add_difference(x, there, error, sums):
    """Fill ``error`` with ``there`` less ``x``; add its squares and those of ``x`` to two rows of lanes."""
    subtract(there, x, error)
    add_squares(error, sums[0])
    add_squares(x, sums[1])


@kernel
def _add_errors(x, there, error, error_bits, sums):
    """Add the squares of errors and values to two rows of lanes; the bits of the largest error."""
    largest = i4(0)
    for first in range(0, x.size, BLOCK):
        last = first + BLOCK
        _add_difference(x[first:last], there[first:last], error, sums)
        largest = max(largest, top_bits(error_bits))
    return largest


@kernel
def _add_moments(x, there, scales, of_roots, room, room_bits, sums):
    """Add the squares of errors and values to two rows of lanes.

    Returns the bits of the largest error, or error of the square roots, relative to the scale of its group, if any.
    """
    largest = i4(0)
    error, error_bits, cell, cell_bits = room[0], room_bits[0], room[3], room_bits[3]
    for first in range(0, x.size, BLOCK):
        last, group = first + BLOCK, first // GROUP
        _add_difference(x[first:last], there[first:last], error, sums)
        if scales.size:
            if of_roots:
                take_roots(x[first:last], room[1])
                take_roots(there[first:last], room[2])
                subtract(room[2], room[1], error)
            largest = max(largest, _largest_scaled(error_bits, scales[group : group + GROUPS], cell, cell_bits))
    return largest


@kernel
def _add_update(m, m_there, root, root_there, eps, room, room_bits, sums, maxima):
    """Add the squares of the errors and values of the updates of a block; raise the last two ``maxima``."""
    error, error_bits, u, u_bits, u_there = room[0], room_bits[0], room[3], room_bits[3], room[4]
    divide(m, root, eps, u)
    divide(m_there, root_there, eps, u_there)
    _add_difference(u, u_there, error, sums[2:4])
    maxima[1] = max(maxima[1], top_bits(error_bits))
    maxima[2] = max(maxima[2], top_bits(u_bits))


@kernel
def _add_updates(m, m_there, v, v_there, scales, eps, in_steps, room, room_bits, sums, maxima):
    """Measure second moments as ``_add_moments``, and the updates that both moments make, with the same square roots.

    Rows of ``sums``: squares of errors and values of v, of errors and values of updates, and of (e m). ``maxima`` are
    the bits of the largest error of a root, of the largest error of an update and of the largest update.
    """
    eps = f4(eps)
    error, error_bits, here, there, cell, cell_bits = room[0], room_bits[0], room[1], room[2], room[3], room_bits[3]
    for first in range(0, m.size, BLOCK):
        last, group = first + BLOCK, first // GROUP
        block = m[first:last]
        _add_difference(v[first:last], v_there[first:last], error, sums)
        take_roots(v[first:last], here)
        take_roots(v_there[first:last], there)
        subtract(there, here, error)
        if scales.size:
            maxima[0] = max(maxima[0], _largest_scaled(error_bits, scales[group : group + GROUPS], cell, cell_bits))
        if in_steps:
            _add_moved(error, here, block, sums[4])
        _add_update(block, m_there[first:last], here, there, eps, room, room_bits, sums, maxima)


@kernel
def _widen(scales, bits):
    """Fill ``bits`` with those of fp32 scales."""
    for g in range(GROUPS):
        bits[g] = i4(scales[g]) << 15


@kernel
def _add_packed_moments(
    m, m_codes, m_scales, m_table, v, v_codes, v_scales, v_table, fourth_root, eps, room, room_bits, sums, maxima
):
    """Decode a block of both moments; measure first ones as ``_add_moments``, second ones and updates as above.

    ``sums`` and ``maxima`` begin with those of the first moments. Square roots of v are then in the second block of
    ``room``, their errors in the first.
    """
    error, error_bits, here, there, cell, cell_bits = room[0], room_bits[0], room[1], room[2], room[3], room_bits[3]
    m_there, v_there, wide, wide_bits = room[5], room[6], room[7], room_bits[7]
    decode_block(m_codes, m_scales, cell, cell_bits, m_table, m_there)
    _add_difference(m, m_there, error, sums)
    _widen(m_scales, wide_bits)
    maxima[0] = max(maxima[0], _largest_scaled(error_bits, wide, cell, cell_bits))
    decode_block(v_codes, v_scales, cell, cell_bits, v_table, there)
    square(there, v_there)
    _add_difference(v, v_there, error, sums[2:])
    take_roots(v, here)
    if fourth_root:
        # Without the fourth root, ``there`` is already the rounded root of its rounded square: no code and scale
        # are small enough for a square to lose bits.
        take_roots(v_there, there)
    _add_update(m, m_there, here, there, eps, room, room_bits, sums[2:], maxima[1:])
    subtract(there, here, error)
    _widen(v_scales, wide_bits)
    maxima[1] = max(maxima[1], _largest_scaled(error_bits, wide, cell, cell_bits))


@kernel
def _add_packed(
    weight, moment1, moment2, fourth_root, eps, in_steps, fills, room, room_bits, weight_sums, sums, tops, maxima
):
    """Measure whole blocks of weights, of both moments, or of all three, from their parts.

    With ``fills`` these are filled before, tile by tile. Rows of ``weight_sums`` are relative errors and weighed
    squares; those of ``sums`` squares of errors and values of m, then as in ``_add_updates``. Returns the bits of the
    largest weight, the largest scale of m, whether any v is NaN or negative, and whether a decoded maximum overflows.
    """
    x, x_bits, exponent, mantissa, rho, levels = weight
    m, m_bits, m_codes, m_scales, m_levels, m_table = moment1
    v, v_bits, v_codes, v_scales, v_levels, v_table = moment2
    eps = f4(eps)
    largest, highest, is_wrong, overflows = i4(0), np.int64(0), False, False
    for start in range(0, max(x.size, m.size), _TILE):
        stop = min(start + _TILE, max(x.size, m.size))
        groups = slice(start // GROUP, stop // GROUP)
        if fills and x.size:
            planes = exponent[start:stop], mantissa[start:stop], rho[start:stop]
            largest = max(largest, split(x_bits[start:stop], *planes, levels))
        if fills and m.size:
            one, other = m_codes[start:stop], v_codes[start:stop]
            cells = room[0], room_bits[0]
            high = encode_first(m[start:stop], m_bits[start:stop], one, m_scales[groups], *cells, m_levels)
            highest = max(highest, high)
            into = other, v_scales[groups], *cells, room[1], room_bits[1]
            wrong, overflow = encode_second(v[start:stop], v_bits[start:stop], *into, v_levels, fourth_root)
            is_wrong, overflows = is_wrong or wrong, overflows or overflow
        for first in range(start, stop, BLOCK):
            last, group = first + BLOCK, first // GROUP
            if m.size:
                scales = slice(group, group + GROUPS)
                one = m[first:last], m_codes[first:last], m_scales[scales], m_table
                other = v[first:last], v_codes[first:last], v_scales[scales], v_table
                _add_packed_moments(*one, *other, fourth_root, eps, room, room_bits, sums, maxima)
                if in_steps:
                    _add_moved(room[0], room[1], m[first:last], sums[6])
            if x.size:
                planes, there = (exponent[first:last], mantissa[first:last], rho[first:last]), room[5]
                join(*planes, room_bits[5], levels)
                pair = x[first:last], x_bits[first:last], there, room_bits[5]
                _add_relative_block(*pair, room[0], room_bits[0], weight_sums[0], tops)
                if in_steps:
                    _add_weighed(x[first:last], there, room[1], room[0], weight_sums[1])
    return largest, highest, is_wrong, overflows


class BlockSums:
    """Sums over a chunk of one unit, whose tiles come in turn."""

    by_torch: ClassVar[bool] = False

    def __init__(self, unit: Unit) -> None:
        self._unit, self._count, self._room = unit, 0, with_bits(_ROOM, BLOCK)
        # By stream: squares of errors and of values, or relative errors alone.
        self._sums, self._maxima = np.zeros((len(unit.streams), 2, GROUP)), np.zeros((len(unit.streams), 2), i4)
        self._updates, self._tops, self._weight = np.zeros((5, GROUP)), np.zeros(3, i4), np.zeros(GROUP)
        self._place = {stream.index: k for k, stream in enumerate(unit.streams)}
        self._rule = unit.parameter.rule if unit.parameter else None
        self._step = unit.parameter.step if unit.parameter else None
        self._first = self._second = -1
        if unit.parameter is not None and unit.parameter.denominator is not None and self._rule is not None:
            moments = unit.parameter.moments
            self._first = self._place[moments["moment1"]]
            self._second = self._place[moments[unit.parameter.denominator]]

    @staticmethod
    def fits(unit: Unit) -> bool:
        """Whether the update of a unit, if it has one, divides by second moments and more than zero.

        No steps are counted otherwise.
        """
        parameter = unit.parameter
        if parameter is None or parameter.rule is None:
            return measure_of(parameter) is None
        return bool(parameter.rule.divisor_eps) and parameter.denominator is not None

    def add_packed(self, originals: Sequence[Array], parts: Sequence[Arrays], *, fills: bool) -> int:
        """Measure a chunk from its parts; return how many elements these are.

        With ``fills`` the parts of lossy streams are filled first. 0 where there is no kernel for the codecs of the
        unit. Raises RefusedError.
        """
        streams = self._unit.streams
        lossy = [k for k, stream in enumerate(streams) if stream.lossy]
        weights = [k for k in lossy if isinstance(streams[k].codec, Split24)]
        signs = {k: codec.signed for k in lossy if isinstance(codec := streams[k].codec, Companded8)}
        known = {} if self._rule is None else {self._first: True, self._second: False}
        if signs != known or len(weights) + len(signs) < len(lossy) or len(weights) > 1:
            return 0
        if any(streams[k].spec.dtype is not DType.FLOAT32 for k in lossy):
            return 0
        numel = len(originals[0])
        whole = numel // BLOCK * BLOCK
        into = np.zeros((2, GROUP)), np.zeros((7, GROUP)), np.zeros(2, i4), np.zeros(4, i4)
        if whole:
            self._add_blocks(dict(enumerate(originals)), dict(enumerate(parts)), weights, whole, into, fills=fills)
        if whole < numel:
            run = slice(whole, numel)
            rest = {k: streams[k].codec.tile(parts[k], DType.FLOAT32, 0, run) for k in lossy}
            padded = {k: {name: _block(part) for name, part in rest[k].items()} for k in lossy}
            self._add_blocks({k: _block(originals[k][run]) for k in lossy}, padded, weights, BLOCK, into, fills=fills)
            for k in lossy if fills else ():
                for name, part in rest[k].items():
                    part[:] = padded[k][name][: part.size]
        weight_sums, sums, tops, maxima = into
        for k in weights:
            self._sums[k, 0], self._maxima[k], self._weight = weight_sums[0], tops, weight_sums[1]
        if self._rule is not None:
            self._sums[self._first], self._updates = sums[:2], sums[2:]
            self._maxima[self._first, 0], self._tops = maxima[0], maxima[1:]
        self._count += numel
        return numel

    def _add_blocks(
        self,
        originals: Mapping[int, Array],
        parts: Mapping[int, Arrays],
        weights: Sequence[int],
        numel: int,
        into: tuple[Array, ...],
        *,
        fills: bool,
    ) -> None:
        """Measure whole blocks, and fill their parts before. Raises RefusedError."""
        streams, first, second = self._unit.streams, self._first, self._second
        weight, (moment1, moment2) = _NO_WEIGHT, _NO_MOMENTS
        for k in weights:
            planes = (parts[k][name][:numel] for name in ("exponent", "mantissa", "rho"))
            x, codec = originals[k][:numel], streams[k].codec
            assert isinstance(codec, Split24)  # noqa: S101 - the caller looked
            weight = x, x.view(i4), *planes, codec.R
        fourth_root, eps = False, 0.0
        if self._rule is not None:
            eps, of_second = self._rule.divisor_eps or 0.0, streams[second].codec
            fourth_root = isinstance(of_second, Companded8) and of_second.p != 1
            moment1, moment2 = (_moment_arrays(originals[k], parts[k], streams[k], numel) for k in (first, second))
        how = fourth_root, eps, self._step is not None, fills
        largest, highest, *wrong = _add_packed(weight, moment1, moment2, *how, *self._room, *into)
        for k, stream in enumerate(streams):
            try:
                if k in weights:
                    refuse(largest)
                elif k == first and self._rule is not None:
                    refuse_first(highest)
                elif k == second and self._rule is not None:
                    refuse_second(*wrong)
            except RefusedError as exc:
                exc.storage = stream.index
                raise

    def add(
        self,
        first: int,  # noqa: ARG002 - no sum depends on it
        originals: Sequence[Array],
        decoded: Sequence[Array],
        parts: Sequence[Arrays],
    ) -> None:
        """Measure a tile."""
        self._count += len(originals[0])
        streams, (room, room_bits) = self._unit.streams, self._room
        pairs = {
            k: (self._whole(k, originals[k]), self._whole(k, decoded[k]))
            for k, stream in enumerate(streams)
            if stream.lossy or k in (self._first, self._second)
        }
        scales = {k: _block(_scales(streams[k], parts[k])) for k in pairs}
        for k, (x, y) in pairs.items():
            stream, sums, maxima = streams[k], self._sums[k], self._maxima[k]
            if stream.codec.measured_as == "weight":
                _add_relative(x, x.view(i4), y, y.view(i4), room, room_bits, sums[0], maxima)
            elif stream.codec.measured_as == "lattice":
                maxima[0] = max(maxima[0], _add_errors(x, y, room[0], room_bits[0], sums))
            elif k != self._second:
                of_roots = stream.spec.role is Role.MOMENT2 or stream.codec.stores_roots
                maxima[0] = max(maxima[0], _add_moments(x, y, scales[k], of_roots, room, room_bits, sums))
        if self._rule is not None:
            both, in_steps = (*pairs[self._first], *pairs[self._second]), self._step is not None
            of_second, eps = scales[self._second], self._rule.divisor_eps
            _add_updates(*both, of_second, eps, in_steps, room, room_bits, self._updates, self._tops)
            weight = None if self._step is None else self._step.weight
            if weight is not None and self._place[weight] in pairs:
                _add_weighed_errors(*pairs[self._place[weight]], pairs[self._second][0], room, self._weight)

    def _whole(self, k: int, x: Array) -> Array:
        """A tile of a stream in fp32, in whole blocks."""
        x = floats(x, self._unit.streams[k].spec.dtype)
        return _block(x) if x.size % BLOCK else x

    def result(self) -> UnitErrors:
        """The errors of all tiles."""
        updates, tops = self._updates.sum(axis=1).tolist(), self._tops.view(f4).tolist()
        sums, maxima = self._sums.sum(axis=2).tolist(), self._maxima.view(f4)[:, 0].tolist()
        if self._rule is not None:
            sums[self._second], maxima[self._second] = updates[:2], tops[0]
        errors: dict[int, ErrorStats] = {}
        for k, stream in enumerate(self._unit.streams):
            if stream.codec.measured_as == "weight":
                errors[stream.index] = WeightError(self._count, maxima[k], sums[k][0], int(self._maxima[k, 1]))
            elif stream.codec.measured_as == "lattice":
                errors[stream.index] = LatticeError(sums[k][0], sums[k][1], maxima[k])
            elif stream.codec.measured_as == "moment":
                errors[stream.index] = MomentError(sums[k][0], sums[k][1], maxima[k])
        if self._rule is None:
            return UnitErrors(errors)
        factor, square, update = self._rule.factor, self._rule.factor * self._rule.factor, None
        if errors:
            update = UpdateError(updates[2] * square, updates[3] * square, tops[1] * factor, tops[2] * factor)
        if self._step is None:
            return UnitErrors(errors, update)
        error, moved = sums[self._first]
        steps = StepError(moved, float(self._weight.sum()), error, updates[4])
        return UnitErrors(errors, update, scaled_steps(self._unit, steps))


def _moment_arrays(x: Array, parts: Arrays, stream: Stream, numel: int) -> tuple[Any, ...]:
    """What ``_add_packed`` takes of the first ``numel`` moments of ``x`` and their parts."""
    codec = stream.codec
    assert isinstance(codec, Companded8)  # noqa: S101 - the caller looked
    table, codes = table_of(codec.signed, codec.Q, codec.p != 1), parts["codes"][:numel]
    return x[:numel], x[:numel].view(i4), codes, parts["scales"][: numel // GROUP], codec.Q, table


def _scales(stream: Stream, parts: Arrays) -> Array:
    """The fp32 scales of the groups of a tile; none of them for a codec without scales."""
    return (parts["scales"].astype(i4) << 15).view(f4) if isinstance(stream.codec, Companded8) else np.zeros(0, f4)


def _block(x: Array) -> Array:
    """The last elements, or parts, with zeros behind them, which make a whole block and count for nothing."""
    block = np.zeros(-(-x.size // BLOCK) * BLOCK, x.dtype)
    block[: x.size] = x
    return block
