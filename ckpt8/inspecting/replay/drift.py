"""Figures of replayed steps: sums over parameters, and lines about them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ckpt8.codecs.cutting import TILE
from ckpt8.codecs.error_stats import ErrorStats


@dataclass(slots=True)
class StepDrift(ErrorStats):
    """Sums over parameters after one step; ``max_*`` are maxima."""

    update_error: float = 0.0
    update: float = 0.0
    max_update: float = 0.0
    weight_error: float = 0.0
    weight: float = 0.0
    max_weight: float = 0.0

    @property
    def nmse(self) -> float:
        """Sum (du)^2 / sum u^2; 0 where nothing moves and nothing differs."""
        return self.update_error / self.update if self.update else (math.inf if self.update_error else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain figures; None for weights that were not found, and for an error where there is no update."""
        known = self.weight > 0
        return {
            "update_nmse": self.nmse if math.isfinite(self.nmse) else None,
            "update_max": self.max_update,
            "weight_rms": math.sqrt(self.weight_error / self.weight) if known else None,
            "weight_max": self.max_weight if known else None,
        }


@dataclass(slots=True)
class Drift:
    """Figures by step, numbers of parameters, and by name why others, or their weights, were not replayed."""

    steps: list[StepDrift]
    parameters: int = 0
    with_weights: int = 0
    without_weights: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def merge(self, other: Drift, prefix: str) -> None:
        """Add another file of the same steps; ``prefix`` stands before its names."""
        for mine, theirs in zip(self.steps, other.steps, strict=True):
            mine.merge(theirs)
        self.parameters += other.parameters
        self.with_weights += other.with_weights
        self.without_weights.update({prefix + name: reason for name, reason in other.without_weights.items()})
        self.skipped.update({prefix + name: reason for name, reason in other.skipped.items()})
        self.broken += [prefix + name for name in other.broken]

    @property
    def worst(self) -> float:
        """The drift: the largest NMSE of the updates."""
        return max((step.nmse for step in self.steps), default=0.0)

    def failures(self, limit: float | None) -> list[str]:
        """Lines about steps that broke, and about a drift above ``limit``."""
        found = [f"{name}: a replayed step is not finite" for name in self.broken]
        if limit is not None and not self.parameters:
            found.append("no parameter could be replayed, so that the drift is unknown")
        elif limit is not None and self.worst > limit:
            found.append(f"the drift of the update over {len(self.steps)} steps is {self.worst:.3g}, above {limit:.3g}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "drift": self.worst if math.isfinite(self.worst) else None,
            "parameters": self.parameters,
            "with_weights": self.with_weights,
            "without_weights": self.without_weights,
            "skipped": self.skipped,
            "steps": [step.to_json() for step in self.steps],
        }


def left_out(resume: Mapping[str, Any]) -> list[str]:
    """Lines on what the figures of ``Drift.to_json`` leave out: weights, and parameters that were skipped."""
    lines = []
    if resume["without_weights"]:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in _counted(resume["without_weights"]))
        lines.append(f"weights: {resume['with_weights']} of {resume['parameters']} parameters ({reasons})")
    return lines + [f"not replayed: {count} parameters: {reason}" for reason, count in _counted(resume["skipped"])]


def _counted(reasons: Mapping[str, str]) -> list[tuple[str, int]]:
    return sorted(Counter(reasons.values()).items())


def difference(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Sum (y - x)^2, sum x^2 and max |y - x|, in float64, block by block."""
    error = total = largest = 0.0
    a, b = x.reshape(-1), y.reshape(-1)
    for start in range(0, len(a), TILE):
        wide = a[start : start + TILE].double()
        apart = b[start : start + TILE].double() - wide
        error += float(apart.square().sum())
        total += float(wide.square().sum())
        largest = max(largest, float(apart.abs().max()))
    return error, total, largest
