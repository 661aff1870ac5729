"""Second moments of which a parameter has row and column statistics only: those of CAME."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ckpt8.checkpoint.meaning.confidence import Confidence
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.compressing.parameters import Parameter
from ckpt8.compressing.plan import read_tensor


@dataclass(frozen=True)
class Factored:
    """v = rows / mean(rows) (x) columns of a parameter. ``mean`` is that of v over its elements."""

    mean: float
    squares: Confidence
    confidence: Confidence

    @classmethod
    def of(cls, source: Checkpoint, parameter: Parameter) -> Factored | None:
        """Those of a parameter of CAME; None for other rules. Raises InputError."""
        if not (parameter.squares and parameter.confidence):
            return None
        squares, confidence = (
            Confidence(*(read_tensor(source, *each) for each in pair))
            for pair in (parameter.squares, parameter.confidence)
        )
        columns = squares.columns.flatten().tolist()
        return cls(math.fsum(columns) / len(columns), squares, confidence)

    def weigh(self, elements: range) -> torch.Tensor:
        """What the first moments of these elements count for, as weights that move: sqrt(v) times the confidence."""
        confidence, inverse_roots = (each.at(elements.start, elements.stop) for each in (self.confidence, self.squares))
        return confidence / inverse_roots
