"""Facts about an error in steps of the optimizer, and the loss drift that it is expected to cost. Imports no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt8.codecs import BUDGETED, codec_from_config
from ckpt8.codecs.error_stats import LatticeError, StepError, UpdateError, read_error, read_step_error
from ckpt8.container.facts import CAPPED, NO_BUDGET, NOT_MEASURED
from ckpt8.container.manifest import Manifest, ParameterRecord, StorageRecord
from ckpt8.core.tensors import Role
from ckpt8.inspecting.expected_drift import expected_drift, number

PARTS = {"weight": "weights", "moment1": "first moments", "moment2": "second moments"}
"""The parts of an error in steps, in words."""

COPY = "a copy of weights, which no optimizer updates"
"""Why the error of an average of weights is in no figure in steps."""

_ARCHIVED = {codec_id for codec_id, _ in BUDGETED}
_NAMES = 3
_MOST = 1e100

Count = Callable[[Iterable[str]], int]


def step_figures(error: StepError, records: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The error in steps with its three parts, and the expected drift; all None where the optimizer moves nothing.

    ``records`` are those of ``expected_drift``.
    """
    parts = {part: math.sqrt(getattr(error, part) / error.step) if error.step > 0 else math.inf for part in PARTS}
    steps = math.hypot(*parts.values())
    if not steps < _MOST:
        return {"steps": None, **dict.fromkeys(PARTS), "drift": None}
    return {"steps": steps, **parts, "drift": expected_drift(error, records)._asdict()}


def step_facts(manifest: Manifest, count: Count) -> dict[str, Any] | None:
    """The error in steps of a container under a budget: in all and by optimizer; None without a budget.

    It is over ``parameters``, and ``outside`` are the lossy storages that are not in it, by reason. Where none is in
    it, there is no figure. ``rates`` are the learning rates that it counts with. ``changed`` counts the elements of
    lossy storages: those in it, and all. ``fallbacks`` are the storages that the codecs of the budget do not keep, by
    reason, and ``capped`` the elements of weights whose steps are the largest that the budget allows. ``count`` counts
    parameters by their names.
    """
    if manifest.budget is None:
        return None
    optimizers = defaultdict[int, list[tuple[ParameterRecord, StepError]]](list)
    for parameter in manifest.parameters:
        if (error := read_step_error(parameter.steps)) is not None:
            optimizers[_stated(parameter, "optimizer") or 0].append((parameter, error))
    every = [each for _, known in sorted(optimizers.items()) for each in known]
    storages = manifest.storages
    inside = _inside(parameter for parameter, _ in every)
    lossy = {index for index, each in enumerate(storages) if _is_lossy(each.codec)}
    outside = _rows((storages[index], _why_outside(manifest, index)) for index in sorted(lossy - inside))
    figures = _figures(every)
    if not lossy & inside and lossy:
        figures |= {"steps": None, **dict.fromkeys(PARTS), "drift": None}
    elif figures["drift"] is not None and any(row["reason"] != COPY for row in outside):
        figures["drift"]["is_open"] = True
    weights = [index for index, each in enumerate(storages) if codec_from_config(each.codec).measured_as == "noise"]
    return {
        "budget": manifest.budget.get("steps"),
        **figures,
        "parameters": count(parameter.name for parameter, _ in every),
        "outside": outside,
        "rates": _rates(every, count),
        "changed": {
            "elements": sum(storages[index].numel for index in lossy & inside),
            "of": sum(storages[index].numel for index in lossy),
        },
        "weight_snr_db": _weight_snr(manifest, weights),
        "optimizers": [_optimizer(manifest, each, count) for _, each in sorted(optimizers.items())],
        "capped": {
            "elements": sum(storages[index].numel for index in weights if storages[index].reason == CAPPED),
            "of": sum(storages[index].numel for index in weights),
        },
        "fallbacks": _fallbacks(manifest),
    }


def _stated(parameter: ParameterRecord, key: str) -> int | None:
    """A number that the record of an error in steps states; None for anything else."""
    value = (parameter.steps or {}).get(key)
    return value if type(value) is int and value >= 0 else None


def _weight_snr(manifest: Manifest, storages: Iterable[int]) -> float | None:
    """The SNR of weights on lattices, in dB."""
    total = LatticeError()
    for index in storages:
        record = manifest.storages[index] if index < len(manifest.storages) else None
        if record is not None and isinstance(error := read_error(record.error), LatticeError):
            total.merge(error)
    return total.snr_db


def _optimizer(manifest: Manifest, parameters: list[tuple[ParameterRecord, StepError]], count: Count) -> dict[str, Any]:
    weights = [index for parameter, _ in parameters if (index := _stated(parameter, "weight_storage")) is not None]
    return {
        "parameters": count(parameter.name for parameter, _ in parameters),
        **_figures(parameters),
        "weight_snr_db": _weight_snr(manifest, weights),
    }


def _figures(parameters: Iterable[tuple[ParameterRecord, StepError]]) -> dict[str, Any]:
    """The figures of several parameters together, with those of their updates."""
    total, update, records = StepError(), UpdateError(), list[dict[str, Any]]()
    for parameter, error in parameters:
        total.merge(error)
        rule = parameter.rule or {}
        records.append({**(parameter.steps or {}), "kind": rule.get("kind"), "age": rule.get("step")})
        if isinstance(found := read_error(parameter.error), UpdateError):
            update.merge(found)
    return {
        **step_figures(total, records),
        "update_nmse": update.nmse if math.isfinite(update.nmse) else None,
        "max_error": update.max_error,
    }


def _rates(every: Iterable[tuple[ParameterRecord, StepError]], count: Count) -> list[dict[str, Any]]:
    """The learning rates that an error counts with, and what the file states where that is less."""
    names = defaultdict[tuple[float, float], list[str]](list)
    for parameter, _ in every:
        record = parameter.steps or {}
        if rate := number(record, "rate"):
            names[rate, number(record, "stated_rate") if "stated_rate" in record else rate].append(parameter.name)
    return [{"rate": rate, "stated": stated, "parameters": count(each)} for (rate, stated), each in names.items()]


def _inside(parameters: Iterable[ParameterRecord]) -> set[int]:
    """The storages whose error is that of these parameters."""
    found = set[int]()
    for parameter in parameters:
        weight = _stated(parameter, "weight_storage")
        found |= {*parameter.moments.values(), *(() if weight is None else (weight,))}
    return found


def _why_outside(manifest: Manifest, index: int) -> str:
    """Why the error of a lossy storage is not in the figure."""
    record = manifest.storages[index]
    if record.role is Role.WEIGHT and record.codec["id"] in _ARCHIVED:
        return COPY
    owner = next((each for each in manifest.parameters if index in each.moments.values()), None)
    return _plain(record.reason or (owner.reason if owner else None) or NOT_MEASURED)


def _fallbacks(manifest: Manifest) -> list[dict[str, Any]]:
    """Lossy storages that codecs without a budget keep."""
    lossy = (each for each in manifest.storages if each.codec["id"] not in _ARCHIVED and _is_lossy(each.codec))
    return _rows((record, _plain(record.reason)) for record in lossy if record.reason is not None)


def _rows(found: Iterable[tuple[StorageRecord, str]]) -> list[dict[str, Any]]:
    """Storages by reason: how many, their elements, and a few names."""
    rows: dict[str, dict[str, Any]] = {}
    for record, reason in found:
        row = rows.setdefault(reason, {"reason": reason, "count": 0, "elements": 0, "names": []})
        row["count"] += 1
        row["elements"] += record.numel
        row["names"] = [*row["names"], record.name][:_NAMES]
    return sorted(rows.values(), key=lambda row: -row["elements"])


def _is_lossy(codec: Mapping[str, Any]) -> bool:
    return codec_from_config(codec).measured_as is not None


def _plain(reason: str) -> str:
    return reason.removeprefix(NO_BUDGET)
