"""Chooses the mode of a chunk from a histogram of its symbols: that whose planes zstd should make smallest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

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
_FEWEST_ABOVE = 4
"""The largest that is above the bits is not below it: the lowest bits of smaller symbols are no noise."""

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


class _Plane(NamedTuple):
    """The bytes of a plane, and how many of the values that are counted share one."""

    length: int
    digits: float = 1


class _Cut(NamedTuple):
    """Modes of one number of bits; the counts of what symbols have above these, and of the bits, a row of 256."""

    modes: list[Mode]
    above: torch.Tensor
    low: torch.Tensor


def choose(counts: torch.Tensor, numel: int, tabulate: Tabulate | None = None) -> Mode:
    """The mode for ``numel`` symbols. ``counts`` say how often each value from -1 on occurs: int64, on the CPU.

    The first one of equals.
    """
    tops = (len(counts) - 1, 0) if counts[0] else (NO_TOP,)
    cuts = [cut for top in tops for cut in _cuts(_with_top(counts, top), top)]
    rows = [row for cut in cuts for row in ((tabulate or _tabulate)(cut.above, cut.modes), cut.low[None])]
    planes = [each for cut in cuts for each in _planes(cut.modes, numel)]
    sizes = iter(
        _stored(torch.cat(rows), _numbers([p.length for p in planes]), _numbers([p.digits for p in planes])).tolist()
    )
    totals = dict[Mode, float]()
    for cut in cuts:
        own = {mode: sum(islice(sizes, 1 + mode.over + mode.raw)) for mode in cut.modes}
        low = next(sizes)
        totals |= {mode: size + low for mode, size in own.items()}
    return min(totals, key=totals.__getitem__)


def _planes(modes: Sequence[Mode], numel: int) -> Iterator[_Plane]:
    """The planes of each of the modes of a cut but that of the bits, which comes last."""
    for mode in modes:
        digits, *others = mode.plane_lengths(numel)[: 1 + mode.over + mode.raw]
        yield _Plane(digits, DIGITS[mode.base])
        yield from map(_Plane, others)
    bits = modes[0].bits
    yield _Plane(bits * -(-numel // LANES), LANES / max(bits, 1))


def _cuts(counts: torch.Tensor, top: int) -> Iterator[_Cut]:
    """Every number of bits, with all modes that hold the stored symbols."""
    largest = _largest(counts)
    for bits in range(MOST_BITS + 1):
        if bits and largest >> bits < _FEWEST_ABOVE:
            return
        modes = list(_candidates(largest >> bits, top, bits))
        if modes:
            split = torch.nn.functional.pad(counts, (0, -len(counts) % (1 << bits))).view(-1, 1 << bits)
            yield _Cut(modes, split.sum(1), torch.nn.functional.pad(split.sum(0), (0, _BYTE - (1 << bits))))


def _with_top(counts: torch.Tensor, top: int) -> torch.Tensor:
    """``counts`` of the stored symbols from 0 on."""
    if top == 0:
        return counts
    return counts[1:] if top == NO_TOP else torch.cat([counts[1:], counts[:1]])


def _numbers(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _candidates(largest: int, top: int, bits: int) -> Iterator[Mode]:
    """Every mode of so many bits that holds values up to ``largest`` above them."""
    for raw in range(1 if bits else MOST_RAW + 1):
        rest = largest >> 8 * raw
        if raw and not rest:
            return
        for base in DIGITS:
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
    entropy = digits * torch.special.entr(shares).sum(1) / math.log(2)
    bits = entropy + _excess(shares.amax(1) ** digits) + _EFFORT
    values = ((counts > 0).sum(1).double() ** digits).clamp(max=_BYTE)
    blocks = torch.ceil(lengths / _BLOCK)
    packed = bits * lengths / 8 + blocks * (_BLOCK_BYTES + _TABLE_BYTES * values) + _FRAME_BYTES
    worth = torch.where(lengths < SHORT_PLANE, 1.0, SYMBOLS_WORTH_IT)
    return torch.where(packed < worth * lengths, packed, lengths)


@cache
def _points() -> tuple[torch.Tensor, torch.Tensor]:
    return _numbers(_SHARES), _numbers(_EXCESS)


def _excess(shares: torch.Tensor) -> torch.Tensor:
    """_EXCESS between its points."""
    at, values = _points()
    k = torch.searchsorted(at, shares).clamp(1, len(at) - 1)
    part = (shares - at[k - 1]) / (at[k] - at[k - 1])
    return values[k - 1] + part * (values[k] - values[k - 1])
