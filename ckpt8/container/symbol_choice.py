"""Chooses the mode of a chunk from a histogram of its symbols: that whose planes zstd should make smallest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice

import torch

from ckpt8.container.frames import SHORT_PLANE, SYMBOLS_WORTH_IT
from ckpt8.container.symbol_modes import DIGITS, LANES, MOST_BITS, MOST_RAW, NO_TOP, PLANES, Mode

_BYTE = 256
_BLOCK, _BLOCK_BYTES, _FRAME_BYTES = 1 << 17, 4.0, 9.0
_TABLE_BYTES = 0.5
"""What a value of a byte takes in the Huffman table of every block."""
_EFFORT = 0.01
"""Bits that a byte counts besides where zstd takes it: of modes that are nearly equal, that with fewer such bytes is
faster, and no larger as measured."""
_LEAST_SHARE = 1 / 127
"""zstd stores bytes as they are unless one of them is more frequent."""
_FEWEST_ABOVE, _BASES_ABOVE = 4, (16, 256)
"""Below bits is no less than that, in digits of these bases: less has no noise below it."""

_SHARES = (
    0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.9925, 0.995, 0.997, 0.998, 0.999, 1.0,
)  # fmt: skip
_EXCESS = (
    0.03, 0.03, 0.05, 0.08, 0.13, 0.28, 0.45, 0.59, 0.60, 0.53, 0.35, 0.236, 0.172, 0.0955, 0.073, 0.0425, 0.018, 0.013,
    0.005, 0.002,
)  # fmt: skip
"""Bits that zstd takes for a byte beyond its entropy, by the share of the most frequent byte, as measured. Huffman
takes one at least, and the matches that zstd finds where a byte repeats cost more than they save until it has 0.9."""

Tabulate = Callable[[torch.Tensor, Sequence[Mode]], torch.Tensor]
"""The counts of the values in each plane of each mode but that of the bits, of digits in the first, a row of 256 for
each: from the counts of what symbols have above the bits."""


def choose(counts: torch.Tensor, numel: int, tabulate: Tabulate | None = None) -> Mode:
    """The mode for ``numel`` symbols. ``counts`` say how often each value from -1 on occurs: int64, on the CPU.

    The first one of equals. Bits are taken for noise.
    """
    tops = (len(counts) - 1, 0) if counts[0] else (NO_TOP,)
    found, tables = list[Mode](), list[torch.Tensor]()
    for top in tops:
        stored = _with_top(counts, top)
        largest = _largest(stored)
        for bits in range(MOST_BITS + 1 if largest >= _FEWEST_ABOVE else 1):
            modes = list(_candidates(largest >> bits, top, bits))
            if modes:
                found += modes
                tables.append((tabulate or _tabulate)(_above_bits(stored, bits), modes))
    planes = [mode.plane_lengths(numel)[: 1 + mode.over + mode.raw] for mode in found]
    lengths = [length for each in planes for length in each]
    digits = [
        each for mode, own in zip(found, planes, strict=True) for each in (DIGITS[mode.base], *[1] * len(own[1:]))
    ]
    sizes = iter(_stored(torch.cat(tables), _numbers(lengths), _numbers(digits)).tolist())
    totals = [
        sum(islice(sizes, len(own)), mode.bits * -(-numel // LANES)) for mode, own in zip(found, planes, strict=True)
    ]
    return found[totals.index(min(totals))]


def _above_bits(counts: torch.Tensor, bits: int) -> torch.Tensor:
    """``counts`` of what symbols have above their lowest bits."""
    width = 1 << bits
    return torch.nn.functional.pad(counts, (0, -len(counts) % width)).view(-1, width).sum(1) if bits else counts


def _with_top(counts: torch.Tensor, top: int) -> torch.Tensor:
    """``counts`` of the stored symbols from 0 on."""
    if top == 0:
        return counts
    return counts[1:] if top == NO_TOP else torch.cat([counts[1:], counts[:1]])


def _numbers(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _candidates(largest: int, top: int, bits: int) -> Iterator[Mode]:
    """The modes of so many bits that hold values up to ``largest`` above them, apart from those that gain nothing."""
    if bits and largest < _FEWEST_ABOVE:
        return
    for raw in range(1 if bits else MOST_RAW + 1):
        rest = largest >> 8 * raw
        if raw and not rest:
            return
        for base in _BASES_ABOVE if bits else DIGITS:
            over = ((rest - (base - 1)).bit_length() + 7) // 8 if rest >= base else 0
            if raw + over + (bits > 0) < PLANES:
                yield Mode(raw, base, over, top, bits)


def _tabulate(counts: torch.Tensor, modes: Sequence[Mode]) -> torch.Tensor:
    """As ``Tabulate``."""
    rests, lowest = [_whole_bytes(counts)], list[torch.Tensor]()
    for _ in range(max(mode.raw for mode in modes)):
        lowest.insert(0, _lowest(rests[-1]))
        rests.append(_whole_bytes(_above(rests[-1])))
    rows: list[torch.Tensor] = []
    for raw, base, over, *_ in modes:
        rest = rests[raw]
        digits = torch.nn.functional.pad(rest[: base - 1], (0, _BYTE - min(base - 1, len(rest))))
        digits[base - 1] = rest[base - 1 :].sum()
        rows += [digits, *_over_planes(rest, base, over), *lowest[len(lowest) - raw :]]
    return torch.stack(rows)


def _over_planes(rest: torch.Tensor, base: int, over: int) -> list[torch.Tensor]:
    above = rest[base - 1 :].clone()
    if over:
        above[0] += rest[: base - 1].sum()
    planes: list[torch.Tensor] = []
    for _ in range(over):
        above = _whole_bytes(above)
        planes.insert(0, _lowest(above))
        above = _above(above)
    return planes


def _whole_bytes(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts, (0, -len(counts) % _BYTE))


def _lowest(counts: torch.Tensor) -> torch.Tensor:
    """The counts of the lowest byte."""
    return counts.view(-1, _BYTE).sum(0)


def _above(counts: torch.Tensor) -> torch.Tensor:
    """The counts of what is above the lowest byte."""
    return counts.view(-1, _BYTE).sum(1)


def _largest(counts: torch.Tensor) -> int:
    found = counts.nonzero()
    return int(found[-1]) if len(found) else 0


def _stored(counts: torch.Tensor, lengths: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """The bytes that planes are expected to take, by row: ``digits`` share a byte, ``lengths`` are in bytes."""
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    most = shares.amax(1) ** digits
    entropy = digits * torch.special.entr(shares).sum(1) / math.log(2)
    bits = entropy + _excess(most) + _EFFORT
    values = ((counts > 0).sum(1).double() ** digits).clamp(max=_BYTE)
    blocks = torch.ceil(lengths / _BLOCK)
    packed = bits * lengths / 8 + blocks * (_BLOCK_BYTES + _TABLE_BYTES * values) + _FRAME_BYTES
    worth = torch.where(lengths < SHORT_PLANE, 1.0, SYMBOLS_WORTH_IT)
    return torch.where((packed < worth * lengths) & (most > _LEAST_SHARE), packed, lengths)


@cache
def _points() -> tuple[torch.Tensor, torch.Tensor]:
    return _numbers(_SHARES), _numbers(_EXCESS)


def _excess(shares: torch.Tensor) -> torch.Tensor:
    """_EXCESS between its points."""
    at, values = _points()
    k = torch.searchsorted(at, shares).clamp(1, len(at) - 1)
    part = (shares - at[k - 1]) / (at[k] - at[k - 1])
    return values[k - 1] + part * (values[k] - values[k - 1])
