"""Facts about an error in steps of the optimizer, and the loss drift that it is expected to cost. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt8.codecs import BUDGETED, codec_from_config
from ckpt8.codecs.error_stats import LatticeError, StepError, UpdateError, read_error, read_step_error
from ckpt8.container.facts import CAPPED, NO_BUDGET, NOT_MEASURED
from ckpt8.container.manifest import Manifest, ParameterRecord
from ckpt8.inspecting.expected_drift import expected_drift

PARTS = {"weight": "weights", "moment1": "first moments", "moment2": "second moments"}
"""The parts of an error in steps, in words."""

_ARCHIVED = {codec_id for codec_id, _ in BUDGETED}
_NAMES = 3
_MOST = 1e100

Count = Callable[[Iterable[str]], int]


def step_figures(error: StepError, kinds: Iterable[str] = ()) -> dict[str, Any]:
    """The error in steps with its three parts, and the expected drift; all None where the optimizer moves nothing.

    ``kinds`` are those of the update rules.
    """
    parts = {part: math.sqrt(getattr(error, part) / error.step) if error.step > 0 else math.inf for part in PARTS}
    steps = math.hypot(*parts.values())
    if not steps < _MOST:
        return {"steps": None, **dict.fromkeys(PARTS), "drift": None}
    return {"steps": steps, **parts, "drift": expected_drift(error.energy, error.step, kinds)._asdict()}


def step_facts(manifest: Manifest, count: Count) -> dict[str, Any] | None:
    """The error in steps of a container under a budget: in all and by optimizer; None without a budget.

    ``unknown`` are the reasons why lossy parameters are not in it, with their number, ``fallbacks`` the storages that
    the codecs of the budget do not keep, by reason, and ``capped`` the elements of weights whose steps are the largest
    that the budget allows. ``count`` counts parameters by their names.
    """
    if manifest.budget is None:
        return None
    optimizers = defaultdict[int, list[tuple[ParameterRecord, StepError]]](list)
    for parameter in manifest.parameters:
        if (error := read_step_error(parameter.steps)) is not None:
            optimizers[_stated(parameter, "optimizer") or 0].append((parameter, error))
    every = [each for _, known in sorted(optimizers.items()) for each in known]
    storages = manifest.storages
    weights = [index for index, each in enumerate(storages) if codec_from_config(each.codec).measured_as == "noise"]
    return {
        "budget": manifest.budget.get("steps"),
        **_figures(every),
        "weight_snr_db": _weight_snr(manifest, weights),
        "optimizers": [_optimizer(manifest, each, count) for _, each in sorted(optimizers.items())],
        "unknown": _unknown(manifest, count),
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
    total, update, kinds = StepError(), UpdateError(), set[str]()
    for parameter, error in parameters:
        total.merge(error)
        kinds.add(str((parameter.rule or {}).get("kind")))
        if isinstance(found := read_error(parameter.error), UpdateError):
            update.merge(found)
    return {
        **step_figures(total, kinds),
        "update_nmse": update.nmse if math.isfinite(update.nmse) else None,
        "max_error": update.max_error,
    }


def _unknown(manifest: Manifest, count: Count) -> dict[str, int]:
    """How many parameters with lossy moments have no error in steps, by reason."""
    names = defaultdict[str, list[str]](list)
    for parameter in manifest.parameters:
        records = [manifest.storages[index] for index in parameter.moments.values()]
        if parameter.steps is None and any(_is_lossy(each.codec) for each in records):
            reason = next((_plain(each.reason) for each in records if each.reason), parameter.reason or NOT_MEASURED)
            names[reason].append(parameter.name)
    return dict(Counter({reason: count(each) for reason, each in names.items()}).most_common())


def _fallbacks(manifest: Manifest) -> list[dict[str, Any]]:
    """Lossy storages that codecs without a budget keep: by reason the number, their elements, and a few names."""
    rows: dict[str, dict[str, Any]] = {}
    for record in manifest.storages:
        if record.reason is not None and record.codec["id"] not in _ARCHIVED and _is_lossy(record.codec):
            reason = _plain(record.reason)
            row = rows.setdefault(reason, {"reason": reason, "count": 0, "elements": 0, "names": []})
            row["count"] += 1
            row["elements"] += record.numel
            row["names"] = [*row["names"], record.name][:_NAMES]
    return sorted(rows.values(), key=lambda row: -row["elements"])


def _is_lossy(codec: Mapping[str, Any]) -> bool:
    return codec_from_config(codec).measured_as is not None


def _plain(reason: str) -> str:
    return reason.removeprefix(NO_BUDGET)
