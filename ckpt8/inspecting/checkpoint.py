"""Facts about a raw checkpoint: structure, roles, sizes, and what each preset and budget would make of it.

What containers take and cost is predicted from a sample of every storage. Sizes are good to about a percent for trained
weights, errors in steps to some percent, but too large by far where a few rows of an embedding carry the step and none
is in the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import check_storages, open_source
from ckpt8.codecs.error_stats import StepError
from ckpt8.compressing.chunk_encoder import ChunkEncoder
from ckpt8.compressing.compressor import steps_record
from ckpt8.compressing.groups import Group, GroupEncoder, share
from ckpt8.compressing.lockstep import Lockstep
from ckpt8.compressing.measure import count_steps, exceeded_share
from ckpt8.compressing.plan import Plan, Refusal, Unit, read_elements
from ckpt8.compressing.planning import plan_policies
from ckpt8.compressing.policy import PRESETS, Budget, Policy
from ckpt8.container import frames, header
from ckpt8.container.facts import FILE_ROLE, SKELETON_ROLE, codec_name
from ckpt8.container.manifest import Manifest
from ckpt8.container.packing import packed
from ckpt8.container.steps import NO_BUDGET, NOT_MEASURED, step_figures
from ckpt8.core.arrays import Array, Arrays
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.grouping import grouped
from ckpt8.core.workers import Workers
from ckpt8.inspecting.container import foreign_flags, names_of, origin_of
from ckpt8.inspecting.facts import (
    layers_of,
    low_bit_state,
    parameter_facts,
    sizes_by,
    skeleton_roles,
    unrecognised,
    whole_shapes,
)
from ckpt8.inspecting.survey import Progress, survey
from ckpt8.inspecting.tensors import PER_TENSOR, describe, open_any


def inspect_checkpoint(
    path: Path, *, tensors: bool = False, full: bool = False, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """The content of a file or directory, and its predicted sizes. Raises InputError for damage or no checkpoint.

    ``flags`` and ``sample`` come from ``survey``, ``layers`` from ``layers_of``. ``full`` reads every element for the
    flags, calls ``progress`` with the bytes that it has read, and checks the checksums that the source states.
    ``tensors`` adds every tensor and every parameter that has moments.
    """
    with without_collection(), open_any(path, containers=False) as source:
        if full:
            for member in source.members:
                check_storages(member.checkpoint, str(path) if source.directory is None else f"{path}: {member.path}")
        plans = plans_of(source)
        plan = plans[Policy().preset]
        manifest = describe(source, plan)
        facts: dict[str, Any] = {
            "path": str(path),
            "kind": "checkpoint",
            "format": source.format,
            "bytes": source.size,
            "members": [
                {
                    "path": member.path,
                    "format": member.format,
                    "bytes": member.size,
                    "reason": manifest.storages[member.skeleton].reason,
                }
                for member in manifest.members
            ],
            "tensor_count": count_whole(tensor.name for tensor in manifest.tensors),
            "storages": len(manifest.storages) - len(manifest.members),
            "roles": _roles(manifest),
            "optimizer": _optimizers(manifest),
            "low_bit": low_bit_state(manifest),
            "unrecognised": unrecognised(manifest),
            **origin_of(source),
            "layers": layers_of(manifest),
            **survey(source, plan, manifest, full=full, progress=progress),
            **(predict(source, skeleton_roles(manifest), plans) if source.holds_tensors else _NOTHING),
        }
        facts["flags"][:0] = foreign_flags(
            names_of_member for member in source.opened for names_of_member in names_of(member)
        )
        if tensors:
            facts["tensors"] = _tensors(manifest, plan)
            facts["parameters"] = parameter_facts(manifest)
        return facts


_NOTHING: dict[str, Any] = {"predicted": {}, "unpredicted": {}}
"""Predictions for what ``compress`` refuses, as it holds no tensors."""


def _roles(manifest: Manifest) -> list[dict[str, Any]]:
    """Sizes by role and type; the bytes outside the storages come last."""
    sizes = sizes_by("dtype", manifest)
    rows = [{key: value for key, value in row.items() if key != "stored_bytes"} for row in sizes]
    outside = [{**row, "storages": 0} for row in rows if row["role"] in (SKELETON_ROLE, FILE_ROLE)]
    return [row for row in rows if row["role"] not in (SKELETON_ROLE, FILE_ROLE)] + outside[::-1]


def _optimizers(manifest: Manifest) -> list[dict[str, Any]]:
    """Parameters by update rule, with the step if the rule counts it."""
    rules = (
        (parameter.rule or {"kind": f"unknown: {parameter.reason}", "step": None}, parameter.name)
        for parameter in manifest.parameters
    )
    rows = grouped(((rule["kind"], rule["step"] or None), name) for rule, name in rules)
    return [{"rule": kind, "step": step, "parameters": count_whole(names)} for (kind, step), names in rows.items()]


def _tensors(manifest: Manifest, plan: Plan) -> list[dict[str, Any]]:
    whole = whole_shapes(manifest)
    return [
        {
            "name": tensor.name,
            "role": tensor.role.value,
            "dtype": tensor.ref.dtype.label,
            "shape": list(tensor.ref.shape),
            "whole_shape": whole.get(tensor.name, list(tensor.ref.shape)),
            "storage": record.name,
            "bytes": record.nbytes,
            "codec": codec_name(record.codec),
            "reason": record.reason,
        }
        for tensor, record in ((tensor, manifest.storages[index]) for tensor, index in plan.tensors)
    ]


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


def predict(source: Bundle, skeletons: Mapping[int, str], plans: Mapping[str, Plan]) -> dict[str, Any]:
    """``predicted``: by plan the bytes, the ratio, the error in steps and the loss drift that it is expected to cost.

    ``unpredicted`` are the reasons why lossy tensors are not in the error, with their number. Where none is in it,
    there is no error.
    """
    with Workers() as workers:
        predicted = {
            name: _Prediction(source, skeletons, plan).run(workers, _POLICIES[name].budget)
            for name, plan in plans.items()
        }
    return {"predicted": predicted, "unpredicted": _unpredicted(plans["archive"])}


def predicted_bytes(path: Path, policy: Policy, threads: int | None = None) -> tuple[int, int]:
    """The bytes of a checkpoint, and those that its container is expected to take without a base.

    Raises as ``compress`` for a source that is damaged or holds no tensors, and for rules.
    """
    with without_collection(), open_source(path, containers=False) as source:
        if not source.holds_tensors:
            raise InputError(f"{path}: holds no tensors; there is nothing to compress")
        (plan,) = plan_policies(source, [policy])
        policy.check_rules([path for tensor, _ in plan.tensors for path in tensor.paths])
        with Workers(threads) as workers:
            return source.size, _Prediction(source, skeleton_roles(describe(source, plan)), plan).measured(workers)[0]


def _unpredicted(plan: Plan) -> dict[str, int]:
    reasons = Counter[str]()
    for unit in plan.units:
        for stream in unit.streams if not _has_step(unit) else ():
            if stream.lossy and stream.index not in plan.copies:
                known = unit.parameter and (unit.parameter.reason or unit.parameter.stepless)
                reasons[known or (stream.reason or NOT_MEASURED).removeprefix(NO_BUDGET)] += 1
    return dict(reasons.most_common())


class _Prediction:
    """The prediction for one plan."""

    def __init__(self, source: Bundle, skeletons: Mapping[int, str], plan: Plan) -> None:
        self._source, self._plan = source, plan
        self._structure = {index for index, role in skeletons.items() if role == SKELETON_ROLE}
        self._lockstep = Lockstep(source)

    def run(self, workers: Workers, budget: Budget | None) -> dict[str, Any]:
        """The figures under a ``budget``."""
        size, errors = self.measured(workers)
        error = StepError() if self._plan.is_lossy else StepError(1.0)
        for part in errors:
            error.merge(part)
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
        count = min(unit.numel, PER_TENSOR)
        first, share_of_all = (unit.numel - count) // 2, unit.numel / count
        originals = [
            read_elements(self._source, stream.storage, stream.spec.dtype, first, count) for stream in unit.streams
        ]
        refusal: Refusal | None
        while True:
            try:
                coded = self._lockstep.encode(unit, first, originals)[0]
                steps = self._steps(unit, first, originals, coded) if _has_step(unit) else None
                error = _scaled(steps, share_of_all)
                refusal = exceeded_share(self._plan.shares, unit, error if steps else None)
            except RefusedError as exc:
                refusal = Refusal(str(exc), exc.storage)
            if refusal is None:
                break
            unit = unit.fallback(refusal)
        lengths = [
            len(frame)
            for parts, packings in (packed(parts, self._lockstep.backend) for parts in coded)
            for stored in frames.encode_parts(parts, packings).values()
            for frame, _ in stored
        ]
        entries = len(header.slab_chunks(unit.numel, header.SLAB)) * sum(map(len, coded))
        return sum(lengths) * share_of_all + _ENTRY_BYTES * entries + _STEPS_BYTES * _has_step(unit), error

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
        error = StepError()
        for member in packed.units:
            error.merge(member.errors.steps or StepError())
        outside = _ENTRY_BYTES * len(lengths) + _ROW_BYTES * len(group.units)
        return sum(lengths) * share_of_all + outside, _scaled(error, share_of_all)


def _has_step(unit: Unit) -> bool:
    return unit.parameter is not None and unit.parameter.step is not None


def _scaled(error: StepError | None, factor: float) -> StepError:
    return StepError(*(value * factor for value in astuple(error or StepError())))
