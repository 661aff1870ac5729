"""The errors of a unit, and those of a chunk that is measured in tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt8.codecs.error_measures import Pair
from ckpt8.codecs.error_stats import ErrorStats, LatticeError, MomentError, StepError, UpdateError, WeightError
from ckpt8.compressing.one_pass import BudgetedTiles, OnePass
from ckpt8.compressing.plan import Unit
from ckpt8.compressing.step_measure import StepScales
from ckpt8.core.tensors import Parts

Moments = Mapping[str, torch.Tensor]
"""Elements of the state of one parameter, by the key of its rule."""


@dataclass(slots=True)
class UnitErrors:
    """The errors of a unit: by stream index, and in update space where a moment is lossy and the rule is known.

    ``steps`` is its error in the measure of a budget, of exact parameters too: their steps count in those of the file.
    Those of a replayed step are known of exact moments too: its figure is that of all parameters, as in a replay.
    Empty where nothing is measured. ``pieces`` wait for ``ErrorMeter.finish`` where a step takes the whole parameter.
    """

    streams: dict[int, ErrorStats] = field(default_factory=dict)
    update: UpdateError | None = None
    steps: StepError | None = None
    pieces: list[tuple[Moments, Moments]] = field(default_factory=list)

    @classmethod
    def for_unit(cls, unit: Unit) -> UnitErrors:
        """New sums for the lossy streams and the rule of ``unit``, all zero."""
        kinds = {"weight": WeightError, "noise": LatticeError, "moment": MomentError}
        streams = {s.index: kinds[s.codec.measured_as]() for s in unit.streams if s.codec.measured_as is not None}
        parameter = unit.parameter
        has_rule = parameter is not None and parameter.rule is not None
        replayed = parameter is not None and parameter.replay is not None
        moved = replayed or bool(streams)
        in_steps = StepScales.of(unit.parameter) is not None
        return cls(streams, UpdateError() if has_rule and moved else None, StepError() if in_steps else None)

    def merge(self, later: UnitErrors) -> None:
        """Add the errors of the chunk that follows."""
        for index, error in later.streams.items():
            self.streams[index].merge(error)
        self.pieces += later.pieces
        if self.update is not None and later.update is not None:
            self.update.merge(later.update)
        if self.steps is not None and later.steps is not None:
            self.steps.merge(later.steps)


def errors_of(found: OnePass) -> UnitErrors:
    """The same errors as those of a unit."""
    return UnitErrors(dict(found.streams), found.update, found.steps)


@dataclass(frozen=True, slots=True)
class TiledErrors:
    """Measures the tiles of a chunk in turn: ``tiles`` its whole blocks, ``measure_rest`` what is behind the last."""

    unit: Unit
    tiles: BudgetedTiles
    rest: UnitErrors
    measure_rest: Callable[[int, Sequence[Pair], Sequence[Parts]], None]

    def add(self, first: int, originals: Sequence[torch.Tensor], decoded: Sequence[torch.Tensor]) -> None:
        """Add the tile whose first element has the index ``first``: the elements of every stream."""
        done = self.tiles.add(self.unit, originals, decoded)
        if done < len(originals[0]):
            pairs = [(x[done:].float(), y[done:].float()) for x, y in zip(originals, decoded, strict=True)]
            self.measure_rest(first + done, pairs, [{}] * len(pairs))

    def result(self) -> UnitErrors:
        """The errors of all tiles."""
        errors = UnitErrors.for_unit(self.unit)
        errors.merge(errors_of(self.tiles.result()))
        errors.merge(self.rest)
        return errors
