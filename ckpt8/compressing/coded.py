"""Errors in steps of Adam whose moments are codes of 8 or 4 bits, which stay as they are.

Weights alone err. One step moves what it does for other moments, and v weighs the error, both decoded on the way:

    M1 = (lr / (1 - b1^t))^2 sum(m^2)      S_W = sum(v dW^2) / (1 - b2^t)      S_W = c^2 M1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ckpt8.checkpoint.meaning.coded_moments import CodedMoment
from ckpt8.codecs.error_stats import StepError
from ckpt8.compressing.momentum import StepSums
from ckpt8.container.steps import Origin

_PIECE = 1 << 12
"""Elements that are added up at once: fewer than torch would share out among threads."""


@dataclass(frozen=True, slots=True)
class CodedStep:
    """How Adam moves one tensor whose ``moments`` are codes: what its rule divides them by."""

    moments: tuple[CodedMoment, CodedMoment]
    bias1: float
    root_bias2: float

    stated: ClassVar[Mapping[str, Origin]] = {}
    by_value: ClassVar[bool] = True
    is_of_stream: ClassVar[bool] = False

    def weighs(self, sums: StepSums) -> float:
        """What the square of an error of a weight counts, on average."""
        return sums.second / sums.count / self.root_bias2**2

    def energies(self, lr: float, sums: StepSums) -> StepError:
        """What one step and the errors move, from sums over a tensor."""
        return StepError((lr / self.bias1) ** 2 * sums.square, sums.weight / self.root_bias2**2)


@dataclass(frozen=True, slots=True)
class Codes:
    """One moment. ``read`` gives the bytes of codes from a first one on, ``scales`` are those of ``block`` elements."""

    read: Callable[[int, int], torch.Tensor]
    scales: torch.Tensor
    table: torch.Tensor | None
    block: int
    packed: int

    def at(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Elements ``start`` to ``stop`` in fp32, on ``device`` or else the CPU. Raises InputError."""
        first = start // self.packed
        codes = self.read(first, -(-stop // self.packed) - first).to(device)
        if self.packed == 2:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).view(-1)[start - 2 * first :][: stop - start]
        values = codes.float() if self.table is None else self.table.to(device)[codes.int()]
        blocks = torch.arange(start, stop, device=device) // self.block
        return values * self.scales.to(device)[blocks]


@dataclass(frozen=True, slots=True)
class CodedMoments:
    """Both moments of a parameter, for a range of elements at a time."""

    first: Codes
    second: Codes

    def followed(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """The first moments of elements ``start`` to ``stop``."""
        return self.first.at(start, stop, device)

    def roots(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Square roots of their second moments; NaN for one below zero."""
        return self.second.at(start, stop, device).sqrt()

    def totals(self, windows: Iterable[range], numel: int) -> StepSums:
        """The sums over a parameter of ``numel`` elements as those of ``windows`` tell them."""
        starts = ((at, window.stop) for window in windows for at in range(window.start, window.stop, _PIECE))
        parts = [range(at, min(at + _PIECE, stop)) for at, stop in starts]
        square, second = (
            math.fsum(float(of(part.start, part.stop).double().square().sum()) for part in parts)
            for of in (self.followed, self.roots)
        )
        share = numel / max(1, sum(map(len, parts)))
        return StepSums(square * share, second * share, count=numel)
