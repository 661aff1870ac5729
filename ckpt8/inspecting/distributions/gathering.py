"""Sums over a checkpoint for the report: distributions, of the worst tensors too, and sizes and errors by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt8.codecs.error_stats import ErrorStats, UpdateError, WeightError
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Unit
from ckpt8.container.facts import error_facts
from ckpt8.container.manifest import Manifest
from ckpt8.core.workers import Workers
from ckpt8.inspecting.distributions.counts import CHARTED, Drawn
from ckpt8.inspecting.distributions.layer_sizes import LayerSizes
from ckpt8.inspecting.manifest_facts import shown_names
from ckpt8.inspecting.sampling import EVERY_ELEMENT, ChunkSampling

WORST = 5
"""How many of the worst tensors have distributions of their own; as many as ``inspect`` lists."""

_REFUSED = 20

Work = tuple[Unit, int, list[slice]]
"""A unit, one of its chunks, and the windows of that chunk to look at."""


@dataclass(slots=True)
class Seen:
    """What was counted and measured of some elements of a unit; ``refused`` is why a codec does not take them."""

    errors: UnitErrors
    drawn: Drawn = field(default_factory=Drawn)
    refused: str | None = None

    def merge(self, later: Seen) -> None:
        """Add the elements that follow."""
        self.errors.merge(later.errors)
        self.drawn.merge(later.drawn)
        self.refused = self.refused or later.refused


def look_at(
    units: Sequence[Unit], sampling: ChunkSampling, look: Callable[[Work], Seen], workers: Workers
) -> Iterator[tuple[Unit, Seen]]:
    """Every unit with what ``look`` found in its sample."""
    places = [(unit, sampling(unit.numel)) for unit in units]
    results = workers.map(look, ((unit, *place) for unit, chosen in places for place in chosen))
    for unit, chosen in places:
        seen = next(results)
        for _ in chosen[1:]:
            seen.merge(next(results))
        yield unit, seen


@dataclass(slots=True)
class Worst:
    """The rows of the largest figure, largest first; of equal ones the earlier."""

    figure: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def offer(self, name: Mapping[str, Any], error: ErrorStats, drawn: Drawn) -> None:
        """Keep a row if it is among the worst; ``name`` goes into it."""
        facts = error_facts(error.to_json())
        if facts is not None:
            self.rows.append({**name, **facts, "elements": drawn.elements, "histograms": drawn.pairs_json()})
            self.rows.sort(key=lambda row: -row[self.figure])
            del self.rows[WORST:]


@dataclass(slots=True)
class Gathered:
    """What all units add to. ``before`` and ``after`` say in words what the two sides of a histogram are."""

    manifest: Manifest
    sampling: ChunkSampling
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
    _shown: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        names = (parameter.name for parameter in self.manifest.parameters)
        self._shown = dict(zip(names, shown_names(self.manifest), strict=True))

    def measure(self, what: str, error: ErrorStats) -> None:
        """Add an error to the total of ``weight``, ``moment1``, ``moment2`` or ``update``."""
        self.totals.setdefault(what, type(error)()).merge(error)
        self.measured += isinstance(error, UpdateError)

    def add(self, unit: Unit, seen: Seen) -> None:
        """Add what was seen of a unit; ``seen.errors`` decide whether it is among the worst."""
        self.drawn.merge(seen.drawn)
        stream = unit.streams[0]
        error = seen.errors.streams.get(stream.index)
        if unit.parameter is None and isinstance(error, WeightError):
            self.weight.offer({"name": stream.spec.name}, error, seen.drawn)
        if unit.parameter is not None and seen.errors.update is not None:
            name = self._shown[unit.parameter.name]
            self.layers.add_error(name["name"], seen.errors.update)
            self.update.offer(name, seen.errors.update, seen.drawn)

    def to_json(self) -> dict[str, Any]:
        """The ``distributions`` of the report: plain values. ``errors`` has the keys that ``inspect`` gives it."""
        errors = {what: error_facts(self.totals[what].to_json()) if what in self.totals else None for what in CHARTED}
        if errors["update"] is not None:
            errors["update"]["parameters"] = self.measured
        refused = [{"name": name, "reason": reason} for name, reason in self.refused.items()]
        return {
            "sample": {
                "elements": self.drawn.elements,
                "of": self.total,
                "full": self.drawn.elements == self.total,
                "rule": EVERY_ELEMENT if self.drawn.elements == self.total else self.sampling.text,
            },
            "before": self.before,
            "after": self.after,
            "errors_from": self.errors_from,
            "errors": {**errors, "update_unknown": self.unknown},
            "histograms": self.drawn.pairs_json(),
            "codes": self.drawn.codes_json(),
            "layers": self.layers.to_json(),
            "worst": {"update": self.update.rows, "weight": self.weight.rows},
            "refused": {"count": len(refused), "first": refused[:_REFUSED]},
        }
