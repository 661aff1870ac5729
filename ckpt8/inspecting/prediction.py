"""Predicts what a container of a raw checkpoint takes and costs, whole or as a delta, from a sample of every storage.

Sizes are good to about a percent for trained weights, errors in steps to some percent, but too large by far where a few
rows of an embedding carry the step and none is in the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs import Codec
from ckpt8.codecs.error_stats import StepError
from ckpt8.compressing.chunk_encoder import ChunkEncoder
from ckpt8.compressing.compressor import steps_record
from ckpt8.compressing.deltas import SAMPLE, continue_base
from ckpt8.compressing.groups import Group, GroupEncoder, share
from ckpt8.compressing.lockstep import Lockstep
from ckpt8.compressing.measure import count_steps, exceeded_share
from ckpt8.compressing.plan import Plan, Refusal, Unit, read_elements
from ckpt8.compressing.planning import plan_policies
from ckpt8.compressing.policy import PRESETS, Budget, Policy
from ckpt8.container import frames, header
from ckpt8.container.facts import SKELETON_ROLE, skeleton_role
from ckpt8.container.packing import difference, packed
from ckpt8.container.steps import NO_BUDGET, NOT_MEASURED, step_figures
from ckpt8.core.arrays import Array, Arrays, empty
from ckpt8.core.backend import Backend
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.workers import Workers
from ckpt8.inspecting.tensors import PER_TENSOR, describe, open_any

BUDGETS = (0.3, 2.0, 5.0)
"""Budgets to predict beside the presets, in steps."""

_STRUCTURE_LEFT = 0.1
"""Stored bytes for each byte of a pickle or a zip directory."""

_ENTRY_BYTES = 160
"""Bytes of header, manifest and seal for every entry, about."""

_ROW_BYTES = 5
"""Bytes of the manifest for every storage that shares entries, about."""

_STEPS_BYTES = 230
"""Bytes of the manifest for every parameter whose error in steps it states, about."""

_UNITS_SAMPLED = 256
"""Units of a group to encode for a prediction."""

_POLICIES = {preset: Policy.of(preset) for preset in PRESETS} | {
    f"budget {steps:g}": Policy.of(budget=steps) for steps in BUDGETS
}


def plans_of(source: Bundle) -> dict[str, Plan]:
    """The plan of every preset, by its name, and of BUDGETS, as ``budget 0.3``."""
    return dict(zip(_POLICIES, plan_policies(source, list(_POLICIES.values())), strict=True))


def predict(source: Bundle, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """``predicted``: by plan the bytes, the ratio, the error in steps and the loss drift that it is expected to cost.

    ``unpredicted`` are the reasons why lossy tensors are not in the error, with their number. Where none is in it,
    there is no error.
    """
    with Workers() as workers:
        predicted = {
            name: Prediction(source, plan).run(workers, _POLICIES[name].budget) for name, plan in plans.items()
        }
    return {"predicted": predicted, "unpredicted": _unpredicted(plans["archive"])}


class PlannedBase:
    """The container that a plan is expected to become, as the base of another one; ``source`` has to stay open."""

    def __init__(self, source: Bundle, plan: Plan) -> None:
        self._source, self._plan = source, plan
        self.manifest = describe(source, plan)
        self._lockstep = Lockstep(source)
        self._units = {stream.index: unit for unit in plan.units for stream in unit.streams}
        self._sizes: dict[int, float] = {}

    @property
    def backend(self) -> Backend:
        """What encodes its parts."""
        return self._lockstep.backend

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""
        return self._plan.by_index[storage].codec

    def whole_bytes(self, storage: int) -> float:
        """What a storage is expected to take where it is no difference."""
        if storage not in self._sizes:
            unit = self._units[storage]
            first, count = _middle(unit.numel, SAMPLE)
            try:
                coded = self._lockstep.encode(unit, first, _read(self._source, unit, first, count))[0]
            except RefusedError:
                return self._plan.by_index[storage].storage.nbytes
            for stream, parts in zip(unit.streams, coded, strict=True):
                self._sizes[stream.index] = _stored_bytes(parts, self.backend) * unit.numel / max(count, 1)
        return self._sizes[storage]

    def parts(self, storage: int, chunk: int, codec: Codec) -> Arrays:
        """What the parts of the first SAMPLE elements of a chunk under ``codec`` count from."""
        count = min(self._plan.by_index[storage].chunk_spec(chunk).numel, SAMPLE)
        return self.sample(storage, chunk * frames.FRAME, count, codec)

    def sample(self, storage: int, first: int, count: int, codec: Codec) -> Arrays:
        """What the parts of ``count`` elements of a storage from ``first`` on, under ``codec``, count from."""
        stream = self._plan.by_index[storage]
        spec = stream.spec._replace(shape=(count,))
        x = read_elements(self._source, stream.storage, spec.dtype, first, count)
        if codec != stream.codec:
            parts = stream.codec.encode_arrays(x, spec, backend=self.backend, first=first)
            x = empty(count, spec.dtype)
            stream.codec.decode_arrays(parts, spec, x, backend=self.backend, first=first)
        return codec.encode_arrays(x, spec, backend=self.backend, first=first)


def _middle(numel: int, most: int) -> tuple[int, int]:
    """The first element of a sample in the middle of ``numel`` elements, and its length."""
    count = min(numel, most)
    return (numel - count) // 2, count


def _read(source: Bundle, unit: Unit, first: int, count: int) -> list[Array]:
    return [read_elements(source, stream.storage, stream.spec.dtype, first, count) for stream in unit.streams]


def _stored_bytes(parts: Arrays, backend: Backend) -> int:
    """The bytes of the frames that parts become."""
    encoded = frames.encode_parts(*packed(parts, backend))
    return sum(len(frame) for stored in encoded.values() for frame, _ in stored)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a container is expected to take, and its error in steps: None where it is unknown.

    ``plan`` is what it is planned to be, for one that is to be a difference to it.
    """

    nbytes: int
    steps: float | None
    plan: Plan


def expect(path: Path, policies: Sequence[Policy], threads: int | None = None) -> list[Expected]:
    """What a checkpoint, or a container of one, is expected to become under each of ``policies``, without a base.

    Raises as ``compress`` for a source that is damaged or holds no tensors.
    """
    with without_collection(), open_any(path) as source, Workers(threads) as workers:
        plans = plan_policies(source, policies)
        return [
            _expected(Prediction(source, plan), plan, policy.budget, workers)
            for plan, policy in zip(plans, policies, strict=True)
        ]


def expect_delta(path: Path, policy: Policy, base: Path, planned: Plan, threads: int | None) -> Expected | None:
    """What a checkpoint is expected to become as a difference to that at ``base``, which is ``planned``.

    None where that would hardly be smaller, and where the base has a NaN that its codec refuses. Raises as ``expect``.
    """
    with (
        suppress(RefusedError),
        without_collection(),
        open_any(base) as older,
        open_any(path) as source,
        Workers(threads) as workers,
    ):
        below = PlannedBase(older, planned)
        (whole,) = plan_policies(source, [policy])
        plan, why_new = continue_base(whole, source, below, threads)
        if why_new is not None:
            return None
        return _expected(Prediction(source, plan, below), plan, policy.budget, workers)
    return None


def _expected(prediction: Prediction, plan: Plan, budget: Budget | None, workers: Workers) -> Expected:
    figures = prediction.run(workers, budget)
    return Expected(figures["bytes"], figures["steps"], plan)


def predicted_bytes(path: Path, policy: Policy, threads: int | None) -> tuple[int, int]:
    """The bytes of a checkpoint, and those that its container is expected to take without a base.

    Raises as ``compress`` for a source that is damaged or holds no tensors, and for rules.
    """
    with without_collection(), open_source(path, containers=False) as source:
        if not source.holds_tensors:
            raise InputError(f"{path}: holds no tensors; there is nothing to compress")
        (plan,) = plan_policies(source, [policy])
        policy.check_rules([path for tensor, _ in plan.tensors for path in tensor.paths])
        with Workers(threads) as workers:
            return source.size, Prediction(source, plan).measured(workers)[0]


def _unpredicted(plan: Plan) -> dict[str, int]:
    reasons = Counter[str]()
    for unit in plan.units:
        for stream in unit.streams if not _has_step(unit) else ():
            if stream.codec.measured_as is not None and stream.index not in plan.copies:
                known = unit.parameter and (unit.parameter.reason or unit.parameter.stepless)
                reasons[known or (stream.reason or NOT_MEASURED).removeprefix(NO_BUDGET)] += 1
    return dict(reasons.most_common())


class Prediction:
    """The prediction for one plan, whose differences are to ``base``."""

    def __init__(self, source: Bundle, plan: Plan, base: PlannedBase | None = None) -> None:
        self._source, self._plan, self._base = source, plan, base
        self._structure = {
            member.skeleton for member in source.members if skeleton_role(member.checkpoint.format) == SKELETON_ROLE
        }
        self._lockstep = Lockstep(source)

    def run(self, workers: Workers, budget: Budget | None) -> dict[str, Any]:
        """The figures under a ``budget``."""
        size, errors = self.measured(workers)
        error = StepError.total([StepError(0.0 if self._plan.is_lossy else 1.0), *errors])
        if budget is not None and error.energy > (most := budget.steps**2 * error.step):
            # Such a file is encoded again.
            error = replace(_scaled(error, most / error.energy), step=error.step)
        return {"bytes": size, "ratio": self._source.size / max(size, 1), **self._figures(error)}

    def _figures(self, error: StepError) -> dict[str, Any]:
        """The figures of an error; none where all lossy tensors are outside, and a drift of some of them is open."""
        records = [
            (steps_record(parameter.step, error) or {})
            | ({"kind": parameter.rule.kind, "age": parameter.rule.step} if parameter.rule else {})
            for unit in self._plan.units
            if (parameter := unit.parameter) is not None
        ]
        figures, outside = step_figures(error, records), bool(_unpredicted(self._plan))
        if outside and not error.energy:
            return dict.fromkeys(figures)
        if outside and figures["drift"] is not None:
            figures["drift"]["is_open"] = True
        return figures

    def measured(self, workers: Workers) -> tuple[int, list[StepError]]:
        """The bytes of the container, and the errors of its units and groups."""
        units = [unit for unit in self._plan.units if unit.streams[0].index not in self._structure]
        own, groups = share(units, self._source.size, header.SLAB)
        sizes = [*workers.map(self._of_unit, own), *workers.map(self._of_group, groups)]
        outside = sum(stream.storage.nbytes for stream in self._plan.streams if stream.index in self._structure)
        return int(sum(stored for stored, _ in sizes) + outside * _STRUCTURE_LEFT), [steps for _, steps in sizes]

    def _of_unit(self, unit: Unit) -> tuple[float, StepError]:
        """Bytes and error of a unit with entries of its own, from PER_TENSOR elements in its middle. Thread-safe."""
        if unit.numel == 0:
            return 0.0, StepError()
        first, count = _middle(unit.numel, PER_TENSOR)
        share_of_all = unit.numel / count
        originals = _read(self._source, unit, first, count)
        refusal: Refusal | None
        while True:
            try:
                bases = [
                    None
                    if stream.base is None or self._base is None
                    else self._base.sample(stream.base, first, count, stream.codec)
                    for stream in unit.streams
                ]
                coded = self._lockstep.encode(unit, first, originals, bases)[0]
                steps = self._steps(unit, first, originals, coded) if _has_step(unit) else None
                error = _scaled(steps, share_of_all)
                refusal = exceeded_share(self._plan.shares, unit, error if steps else None)
            except RefusedError as exc:
                refusal = Refusal(str(exc), exc.storage)
            if refusal is None:
                break
            unit = unit.fallback(refusal)
        backend = self._lockstep.backend
        stored = sum(
            _stored_bytes(parts if below is None else difference(parts, below, backend), backend)
            for parts, below in zip(coded, bases, strict=True)
        )
        entries = len(header.slab_chunks(unit.numel, header.SLAB)) * sum(map(len, coded))
        return stored * share_of_all + _ENTRY_BYTES * entries + _STEPS_BYTES * _has_step(unit), error

    def _steps(self, unit: Unit, first: int, originals: Sequence[Array], coded: Sequence[Arrays]) -> StepError | None:
        errors = self._lockstep.measure(unit, first, originals, coded)
        count_steps(unit, errors)
        return errors.steps

    def _of_group(self, group: Group) -> tuple[float, StepError]:
        """Bytes and error of small units with common entries, from some of them. Thread-safe."""
        units = group.units[:: -(-len(group.units) // _UNITS_SAMPLED)]
        encoder = GroupEncoder(
            self._source,
            ChunkEncoder(self._source, measure=True),
            lambda unit, errors: exceeded_share(self._plan.shares, unit, errors.steps),
        )
        packed = encoder.stored(Group(units))
        lengths = [len(frame) for _, parts, _ in packed.packs for planes in parts.values() for frame, _ in planes]
        numel = sum(unit.numel for unit in units)
        share_of_all = sum(unit.numel for unit in group.units) / numel if numel else 0
        error = StepError.total(member.errors.steps or StepError() for member in packed.units)
        outside = _ENTRY_BYTES * len(lengths) + _ROW_BYTES * len(group.units)
        return sum(lengths) * share_of_all + outside, _scaled(error, share_of_all)


def _has_step(unit: Unit) -> bool:
    return unit.parameter is not None and unit.parameter.step is not None


def _scaled(error: StepError | None, factor: float) -> StepError:
    return StepError(*(value * factor for value in astuple(error or StepError())))
