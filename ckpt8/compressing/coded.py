"""Errors in steps of Adam whose moments are codes of 8 or 4 bits, which stay as they are.

Weights alone err. One step moves what it does for other moments, and v weighs the error, both decoded on the way:

    M1 = (lr / (1 - b1^t))^2 sum(m^2)      S_W = sum(v dW^2) / (1 - b2^t)      S_W = c^2 M1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt8.checkpoint.meaning.coded_moments import CodedMoment, coded_moments
from ckpt8.checkpoint.meaning.optimizer_state import adam_rule, finite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.companded8.reference import root_of_tile
from ckpt8.codecs.error_stats import StepError
from ckpt8.compressing.momentum import StepSums
from ckpt8.container.steps import Origin
from ckpt8.core.lazy import torch

_PIECE = 1 << 12
"""Elements that are added up at once: fewer than torch would share out among threads."""


@dataclass(frozen=True, slots=True)
class CodedStep:
    """How Adam moves one tensor whose ``moments`` are codes: what its rule divides them by."""

    moments: tuple[CodedMoment, CodedMoment]
    bias1: float
    root_bias2: float

    stated: ClassVar[Mapping[str, Origin]] = {"origin": "known"}
    by_value: ClassVar[bool] = True
    is_of_stream: ClassVar[bool] = False
    unreplayed: ClassVar[str] = "its moments are codes of few bits"

    def weighs(self, sums: StepSums) -> float:
        """What the square of an error of a weight counts, on average."""
        return sums.second / sums.count / self.root_bias2**2

    def energies(self, lr: float, sums: StepSums) -> StepError:
        """What one step and the errors move, from sums over a tensor."""
        return StepError((lr / self.bias1) ** 2 * sums.square, sums.weight / self.root_bias2**2)

    @classmethod
    def of(
        cls, state: Mapping[Any, Any], group: Mapping[Any, Any]
    ) -> tuple[tuple[int, ...], list[TensorRef], CodedStep] | None:
        """That of a parameter with its shape and the tensors of its moments; None for other states and settings."""
        found, rule = coded_moments(state), adam_rule("adam", state, group, finite(state.get("step")))
        if found is None or isinstance(rule, str):
            return None
        shape, *moments = found
        return shape, [ref for moment in moments for ref in moment.tensors], cls(found[1:], rule.bias1, rule.root_bias2)


@dataclass(frozen=True, slots=True)
class Codes:
    """One moment. ``read`` gives the bytes of ranges of codes, ``scales`` are those of ``block`` elements each.

    ``packed`` codes share a byte.
    """

    read: Callable[[Sequence[range]], torch.Tensor]
    scales: torch.Tensor
    table: torch.Tensor | None
    block: int
    packed: int

    def at(self, windows: Sequence[range], device: torch.device | None = None) -> torch.Tensor:
        """The elements of windows in fp32, one behind the other, on ``device`` or else the CPU. Raises InputError.

        Windows begin at multiples of two, and have even lengths where two codes share a byte.
        """
        codes = self.read([range(x.start // self.packed, x.stop // self.packed) for x in windows]).to(device)
        if self.packed == 2:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).view(-1)
        values = codes.float() if self.table is None else self.table.to(device)[codes.int()]
        elements = torch.cat([torch.arange(x.start, x.stop) for x in windows]).to(device)
        return values * self.scales.to(device)[elements // self.block]


@dataclass(frozen=True, slots=True)
class CodedMoments:
    """Both moments of a parameter, for a range of elements at a time."""

    first: Codes
    second: Codes

    def followed(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """The first moments of elements ``start`` to ``stop``."""
        return self.first.at([range(start, stop)], device)

    def roots(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Square roots of their second moments; NaN for one below zero."""
        return root_of_tile(self.second.at([range(start, stop)], device))

    def totals(self, windows: Sequence[range], numel: int) -> StepSums:
        """The sums over a parameter of ``numel`` elements, as those of ``windows`` tell them."""
        even = [range(x.start - x.start % 2, x.stop - x.start % 2) for x in windows]
        share = numel / max(1, sum(map(len, even)))
        square, second = _square_sum(self.first.at(even)), _square_sum(root_of_tile(self.second.at(even)))
        return StepSums(square * share, second * share, count=numel)


def _square_sum(x: torch.Tensor) -> float:
    """The sum of squares, the same with any number of threads."""
    pieces = (x[start : start + _PIECE] for start in range(0, len(x), _PIECE))
    return math.fsum(float(piece.double().square().sum()) for piece in pieces)
