"""Sums over a checkpoint for the report: distributions, also of the worst tensors; sizes and errors by layer."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole, in_model_order, layer_of, plain_path
from ckpt8.codecs.error_stats import ErrorStats, LatticeError, UpdateError, WeightError
from ckpt8.compressing.plan import Unit
from ckpt8.compressing.unit_errors import UnitErrors
from ckpt8.container.facts import error_facts, figure_of, unknown_updates
from ckpt8.container.manifest import Manifest
from ckpt8.core.tensors import Role
from ckpt8.core.workers import Workers
from ckpt8.inspecting.distributions.counts import CHARTED, Drawn
from ckpt8.inspecting.manifest_facts import shown_names, skeleton_roles
from ckpt8.inspecting.sampling import EVERY_ELEMENT, ChunkSampling

WORST = 5
"""How many of the worst tensors have histograms of their own; as many as ``inspect`` lists."""

OUTSIDE_LAYERS = "everything else"
"""Steps, random states and the structure of files: these bytes belong to no layer."""

_REFUSED = 20

Work = tuple[Unit, int, list[slice]]
"""A unit, the number of one of its chunks, and the windows of that chunk to look at."""


@dataclass(slots=True)
class Seen:
    """Counts and errors of some elements of a unit; ``refused`` is the reason why a codec does not take them."""

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
    """Every unit with what ``look`` finds in its sample."""
    places = [(unit, sampling(unit.numel)) for unit in units]
    results = workers.map(look, ((unit, *place) for unit, chosen in places for place in chosen))
    for unit, chosen in places:
        seen = next(results)
        for _ in chosen[1:]:
            seen.merge(next(results))
        yield unit, seen


@dataclass(slots=True)
class _Layer:
    weights: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[str] = field(default_factory=Counter)
    parameters: list[str] = field(default_factory=list)
    update: UpdateError = field(default_factory=UpdateError)
    figures: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Gathered:
    """Sums over all units, which ``add`` adds. ``counted`` are the storages whose values are counted.

    ``before`` and ``after`` name the two sides of a histogram in words; ``stored`` says whether the manifest
    knows sizes in a container.
    """

    manifest: Manifest
    counted: Collection[int]
    sampling: ChunkSampling
    stored: bool
    before: str | None
    after: str
    errors_from: str
    total: int = 0
    drawn: Drawn = field(default_factory=Drawn)
    worst: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"update": [], "weight": [], "lattice": []})
    refused: dict[str, str] = field(default_factory=dict)
    totals: dict[str, ErrorStats] = field(default_factory=dict)
    measured: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unknown: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _shown: dict[str, dict[str, Any]] = field(init=False)
    _figures: dict[str, str] = field(init=False)
    _layers: dict[str, _Layer] = field(default_factory=lambda: defaultdict(_Layer))

    def __post_init__(self) -> None:
        manifest, owners = self.manifest, dict[int, str]()
        shown = list(zip(manifest.parameters, shown_names(manifest), strict=True))
        self._shown = {parameter.name: row for parameter, row in shown}
        self._figures = {parameter.name: figure_of(parameter) for parameter in manifest.parameters}
        for parameter, row in shown:
            owners.update(dict.fromkeys(parameter.moments.values(), row["name"]))
        skeletons = skeleton_roles(manifest)
        for index, record in enumerate(manifest.storages):
            has_layer = index not in skeletons and record.role is not Role.OTHER
            name = owners.get(index, record.name if has_layer else None)
            layer = self._layers[OUTSIDE_LAYERS if name is None else layer_of(plain_path(name))]
            role = skeletons.get(index, record.role.value)
            layer.weights += record.numel if index in self.counted and record.role is Role.WEIGHT else 0
            layer.bytes[role] += record.nbytes
            layer.stored_bytes[role] += record.stored_bytes

    def figure(self, unit: Unit) -> str:
        """What the error of the update of a unit is, see ``figure_of``."""
        return self._figures[unit.parameter.name] if unit.parameter else "update"

    def measure(self, what: str, error: ErrorStats, parameter: str | None = None) -> None:
        """Add an error to the total of ``weight``, ``moment1``, ``moment2``, ``update`` or ``replayed``.

        The last two are those of a ``parameter``.
        """
        self.totals.setdefault(what, type(error)()).merge(error)
        self.measured[what] += [] if parameter is None else [parameter]

    def add(self, unit: Unit, seen: Seen) -> None:
        """Add the sample of a unit; ``seen.errors`` decide whether it is among the worst."""
        self.drawn.merge(seen.drawn)
        stream, update = unit.streams[0], seen.errors.update
        error = seen.errors.streams.get(stream.index)
        if unit.parameter is None and isinstance(error, WeightError):
            self._keep_worst("weight", "mean_relative", {"name": stream.spec.name}, error, seen.drawn)
        if unit.parameter is None and isinstance(error, LatticeError):
            self._keep_worst("lattice", "nmse", {"name": stream.spec.name}, error, seen.drawn)
        if unit.parameter is not None and update is not None:
            shown = self._shown[unit.parameter.name]
            layer = self._layers[layer_of(plain_path(shown["name"]))]
            layer.parameters.append(unit.parameter.name)
            layer.update.merge(update)
            layer.figures.add(self.figure(unit))
            self._keep_worst("update", "max_error", {**shown, "figure": self.figure(unit)}, update, seen.drawn)

    def _keep_worst(self, kind: str, figure: str, name: Mapping[str, Any], error: ErrorStats, drawn: Drawn) -> None:
        """Keep the tensors of the largest figure, largest first; of equal ones the earlier."""
        rows, facts = self.worst[kind], error_facts(error.to_json())
        if facts is not None:
            rows.append({**name, **facts, "elements": drawn.elements, "histograms": drawn.pairs_json()})
            rows.sort(key=lambda row: -math.inf if row[figure] is None else -row[figure])
            del rows[WORST:]

    def to_json(self) -> dict[str, Any]:
        """The ``distributions`` of the report: plain values. ``errors`` has the keys that ``inspect`` gives it."""
        kinds = (*CHARTED, "replayed", "lattice")
        errors = {what: error_facts(self.totals[what].to_json()) if what in self.totals else None for what in kinds}
        for kind in ("update", "replayed"):
            if (facts := errors[kind]) is not None:
                facts["parameters"] = count_whole(self.measured[kind])
        refused = [{"name": name, "reason": reason} for name, reason in self.refused.items()]
        full = self.drawn.elements == self.total
        return {
            "sample": {
                "elements": self.drawn.elements,
                "of": self.total,
                "full": full,
                "rule": EVERY_ELEMENT if full else self.sampling.text,
            },
            "before": self.before,
            "after": self.after,
            "errors_from": self.errors_from,
            "errors": {**errors, **unknown_updates(self.unknown, count_whole)},
            "histograms": self.drawn.pairs_json(),
            "codes": self.drawn.codes_json(),
            "layers": [
                self._layer_json(name)
                for name in sorted(in_model_order(self._layers), key=lambda name: name == OUTSIDE_LAYERS)
            ],
            "worst": self.worst,
            "refused": {"count": len(refused), "first": refused[:_REFUSED]},
        }

    def _layer_json(self, name: str) -> dict[str, Any]:
        layer = self._layers[name]
        update = error_facts(layer.update.to_json()) if layer.parameters else None
        return {
            "layer": name,
            "weights": layer.weights,
            "bytes": dict(sorted(layer.bytes.items())),
            "stored_bytes": dict(sorted(layer.stored_bytes.items())) if self.stored else None,
            "update": None if update is None else {**update, "parameters": count_whole(layer.parameters)},
            "figures": sorted(layer.figures),
        }
