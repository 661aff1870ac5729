"""Sums over a checkpoint for the report: distributions, the worst tensors with their own, sizes and errors by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt8.codecs.error_stats import ErrorStats, UpdateError, WeightError, read_error
from ckpt8.container.facts import error_facts
from ckpt8.inspecting.distributions.counts import CHARTED, Drawn
from ckpt8.inspecting.distributions.layer_sizes import LayerSizes
from ckpt8.inspecting.sampling import EVERYTHING, Sampling

WORST = 5
"""How many of the worst are shown with their distributions; as many as ``inspect`` lists."""

_REFUSED = 20


@dataclass(slots=True)
class Worst:
    """The rows of the largest figure, largest first; of equal ones the earlier."""

    figure: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def offer(self, name: Mapping[str, Any], error: ErrorStats, drawn: Drawn) -> None:
        """Keep a row if it is among the worst. ``name`` is what it is called by."""
        facts = error_facts(error.to_json())
        if facts is None or (len(self.rows) == WORST and facts[self.figure] <= self.rows[-1][self.figure]):
            return
        self.rows.append({**name, **facts, "elements": drawn.elements, "histograms": drawn.pairs_json()})
        self.rows.sort(key=lambda row: -row[self.figure])
        del self.rows[WORST:]


@dataclass(slots=True)
class Gathered:
    """What all units add to. ``before`` and ``after`` say in words what the two sides of a histogram are."""

    sampling: Sampling
    layers: LayerSizes
    before: str | None
    after: str
    errors_from: str
    total: int = 0
    drawn: Drawn = field(default_factory=Drawn)
    update: Worst = field(default_factory=lambda: Worst("max_error"))
    weight: Worst = field(default_factory=lambda: Worst("mean_relative"))
    refused: dict[str, str] = field(default_factory=dict)
    totals: dict[str, ErrorStats] = field(default_factory=dict)
    measured: int = 0
    unknown: int = 0

    def measure(self, what: str, error: ErrorStats) -> None:
        """Add an error to the total of ``weight``, ``moment1``, ``moment2`` or ``update``."""
        self.totals.setdefault(what, type(error)()).merge(error)
        self.measured += isinstance(error, UpdateError)

    def add_weight(self, name: str, error: ErrorStats | None, drawn: Drawn) -> None:
        """A unit that is one storage."""
        self.drawn.merge(drawn)
        if isinstance(error, WeightError):
            self.weight.offer({"name": name}, error, drawn)

    def add_parameter(self, name: Mapping[str, Any], error: UpdateError | None, drawn: Drawn) -> None:
        """A unit that is the moments of a parameter; its error is one in update space."""
        self.drawn.merge(drawn)
        if error is not None:
            self.layers.add_error(str(name["name"]), error)
            self.update.offer(name, error, drawn)

    def _errors(self) -> dict[str, Any]:
        """As ``inspect`` has them of a container."""
        facts = {what: error_facts(self.totals[what].to_json()) if what in self.totals else None for what in CHARTED}
        if facts["update"] is not None:
            facts["update"]["parameters"] = self.measured
        return {**facts, "update_unknown": self.unknown}

    def to_json(self) -> dict[str, Any]:
        """The ``distributions`` of the report: plain values."""
        refused = [{"name": name, "reason": reason} for name, reason in self.refused.items()]
        return {
            "sample": {
                "elements": self.drawn.elements,
                "of": self.total,
                "full": self.drawn.elements == self.total,
                "rule": EVERYTHING if self.drawn.elements == self.total else self.sampling.text,
            },
            "before": self.before,
            "after": self.after,
            "errors_from": self.errors_from,
            "errors": self._errors(),
            "histograms": self.drawn.pairs_json(),
            "codes": self.drawn.codes_json(),
            "layers": self.layers.to_json(),
            "worst": {"update": self.update.rows, "weight": self.weight.rows},
            "refused": {"count": len(refused), "first": refused[:_REFUSED]},
        }


def stored_update_error(stored: Mapping[str, Any] | None) -> UpdateError | None:
    """The accumulator in update space that a container states, if it states one."""
    error = read_error(stored)
    return error if isinstance(error, UpdateError) else None
