"""The figures of replayed steps: by step, over all parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt8.codecs.error_stats import ErrorStats


@dataclass(slots=True)
class StepFigures(ErrorStats):
    """Sums over parameters after one step; ``max_*`` are maxima."""

    update_error: float = 0.0
    update: float = 0.0
    max_update: float = 0.0
    weight_error: float = 0.0
    weight: float = 0.0
    max_weight: float = 0.0

    @property
    def nmse(self) -> float:
        """Sum (du)^2 / sum u^2; 0 if nothing moves and nothing differs."""
        return self.update_error / self.update if self.update else (math.inf if self.update_error else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain figures; None for unknown weights, and for an error without any update."""
        known = self.weight > 0
        return {
            "update_nmse": self.nmse if math.isfinite(self.nmse) else None,
            "update_max": self.max_update,
            "weight_rms": math.sqrt(self.weight_error / self.weight) if known else None,
            "weight_max": self.max_weight if known else None,
        }


@dataclass(slots=True)
class ReplayFigures:
    """Figures by step, numbers of parameters, and by name the reason why others, or their weights, are left out.

    ``first`` is the first step of the parameters, ``with_gradient`` in number, whose step needs a gradient: the figure
    that a container states of them.
    """

    steps: list[StepFigures]
    first: StepFigures = field(default_factory=StepFigures)
    with_gradient: int = 0
    parameters: int = 0
    with_weights: int = 0
    without_weights: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def add(self, name: str, steps: list[StepFigures] | str, unpaired: str | None, *, needs_gradient: bool) -> None:
        """Add a parameter: its figures by step, or why there are none; ``unpaired`` says why it has no weight."""
        if isinstance(steps, str):
            self.skipped[name] = steps
        elif not all(step.finite for step in steps):
            self.broken.append(name)
        else:
            self.parameters += 1
            if unpaired is None:
                self.with_weights += 1
            else:
                self.without_weights[name] = unpaired
            for total, step in zip(self.steps, steps, strict=True):
                total.merge(step)
            if needs_gradient:
                self.with_gradient += 1
                self.first.merge(steps[0])

    @property
    def worst(self) -> float:
        """The replay error: the largest NMSE of the updates."""
        return max((step.nmse for step in self.steps), default=0.0)

    def failures(self, limit: float | None) -> list[str]:
        """Lines about steps that broke, and about a replay error above ``limit``."""
        found = [f"{name}: a replayed step is not finite" for name in self.broken]
        if limit is not None and not self.parameters:
            found.append("no parameter could be replayed, so that the replay error is unknown")
        elif limit is not None and self.worst > limit:
            found.append(f"the replay error of {len(self.steps)} steps is {self.worst:.3g}, above {limit:.3g}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "replay_error": self.worst if math.isfinite(self.worst) else None,
            "parameters": self.parameters,
            "with_weights": self.with_weights,
            "without_weights": self.without_weights,
            "skipped": self.skipped,
            "steps": [step.to_json() for step in self.steps],
            "first_of_gradient_rules": {"parameters": self.with_gradient, **self.first.to_json()}
            if self.with_gradient
            else None,
        }


def left_out(resume: Mapping[str, Any]) -> list[str]:
    """Lines about weights and parameters that the figures of ``ReplayFigures.to_json`` leave out."""
    lines = []
    weights, skipped = (sorted(Counter(resume[key].values()).items()) for key in ("without_weights", "skipped"))
    if weights:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in weights)
        lines.append(f"weights: {resume['with_weights']} of {resume['parameters']} parameters ({reasons})")
    return lines + [f"not replayed: {count} parameters: {reason}" for reason, count in skipped]
