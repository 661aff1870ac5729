"""The error in steps of a container, and the loss drift that it is expected to cost.

Nothing here needs torch.

An error in steps of the optimizer is expected to cost a loss drift: the mean |loss - loss| of a resumed run, on its
batches.

    noise    NOISE sqrt(S)        what a batch sees of an error in any direction; S is the energy of the error
    rise     RISE S / sqrt(M1)    what curvature adds; M1 is the energy of one step, see ``compressing.policy``

The constants are fitted to runs, see ``fixtures/bench/drift.json``. S weighs with v^, the square of gradients as the
optimizer got them; the loss follows gradients before they are clipped. A checkpoint does not state their norm, so the
constants hold for the median of the runs, 1.28 sqrt(sum(v^)), and the expectation is an interval: from mean / WIDTH to
mean * WIDTH.

Second moments and rates do not tell everything in four cases, where the interval is wider:

* A decay of d in each step takes its part of the error. Over HORIZON steps (1 - exp(-HORIZON d)) / (HORIZON d) is left
  of the mean at least.
* In the first YOUNG steps some runs amplify differences: adapters at a large rate drifted 20 times as far, GPT-2 2.4.
* A decay that is part of the gradient is part of v^ too, and the loss does not follow it: the drift may be any smaller.
* A rate of 0 counts as a part of the initial one. While it is 0, errors of moments move nothing; the next is unknown.

Optimizers whose steps are counted by momentum, see ``compressing.momentum``, drift MOMENTUM times as far, by runs of
SGD, Lion and Muon in ``fixtures/bench/momentum.json``. AdamW that steps beside Muon is within that factor.
Fifteen runs of Prodigy drifted as AdamW is expected to.
No drift is predicted where a record states the ``origin`` of its step: of Adafactor, whose steps go with the size of
the weights, see ``compressing.relative``, and of Adam in 8 or 4 bits, whose state is rounded again in every step, see
``compressing.coded``.

CAME amplifies differences: within sixty steps they grow by a factor that depends on the run, and that no checkpoint
states. Two stable runs, stored eight times, drifted 1.8 to 13 times as far as others would, and up to 25 times when
they were stored with other steps. AMPLIFIED is the least factor with which none of them drifts more than 1.5 times the
mean: 25 / 1.5. A run at twice the rate is unstable: any difference grows until the drift is 6e-3, one of 1e-7 in the
weights to 3e-3. No expectation holds there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckpt8.codecs import BUDGETED, codec_from_config
from ckpt8.codecs.error_stats import LatticeError, StepError, UpdateError, read_error, read_step_error
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import Role

if TYPE_CHECKING:
    from ckpt8.container.manifest import Manifest, ParameterRecord, StorageRecord

Origin = Literal["known", "estimate"]
"""What a step is that does not follow from first and second moments."""

COUNTED = ("adam", "stable_adamw", "came")
"""The kinds of update rules with second moments whose steps errors are measured in."""

NOT_MEASURED = "its error was not measured, or is not finite"
NO_PARAMETER = "its moments are not those of one parameter of a known optimizer, in storages of their own"
UNCOUNTED = "ckpt8 cannot count the steps of this optimizer"
UNMOVED = "no optimizer in the file is known to update these weights"
_UNSTEPPED = "no optimizer in the file is known to update these weights, or its step is not stated"
_NO_STEP = "an earlier ckpt8 wrote the file, or its optimizer states no betas or no learning rate above zero"
_NO_STATE = "it is neither a weight nor a moment"
UNPREDICTED = "no loss drift is predicted for this optimizer"
NO_BUDGET = "no budget: "
"""Begins the reason why a storage keeps the codec of the preset under a budget."""

CAPPED = "capped: the budget allows coarser steps than the size of these weights"
"""The reason of weights whose lattice is finer than a budget asks for."""

NOISE = 0.635
RISE = 0.07
WIDTH = 2.0

MOMENTUM = 1.39
"""How many times as far optimizers without second moments drift."""

AMPLIFIED = {"came": 16.5}
"""By the kind of an update rule."""

HORIZON = 60
"""The steps over which drifts were measured."""

YOUNG = 100
"""The steps that a run has taken from which on no interval is open for its age."""

_MOST = 1e100


class ExpectedDrift(NamedTuple):
    """The mean |Δloss| that is expected, and the ends of its interval; where it ``is_open``, some runs exceed it."""

    mean: float
    low: float
    high: float
    is_open: bool = False


def expected_drift(error: StepError, steps: Iterable[Mapping[str, Any]] = ()) -> ExpectedDrift:
    """What an ``error`` is expected to cost in the loss.

    ``steps`` are the records of parameters as a manifest has them, each with the ``kind`` of its update rule and its
    ``age``: how many steps that has taken, 0 for unknown.
    """
    steps = list(steps)
    factor = max((AMPLIFIED.get(str(step.get("kind")), 1.0) for step in steps), default=1.0)
    is_idle = any(step.get("stated_rate") == 0 for step in steps)
    usual = MOMENTUM if any("momentum" in step for step in steps) else 1.0
    mean = usual * _drift(error.energy, error.step)
    low = usual * _drift(error.weight, error.step) if is_idle else mean
    if any(step.get("coupled_decay") for step in steps):
        low = 0.0
    if (decay := max([number(step, "rate") * number(step, "decay") * HORIZON for step in steps], default=0.0)) > 0:
        low *= -math.expm1(-decay) / decay
    is_young = any(0 < number(step, "age") < YOUNG for step in steps)
    return ExpectedDrift(mean * factor, low / WIDTH, mean * factor * WIDTH, factor > 1 or is_idle or is_young)


def _drift(energy: float, step: float) -> float:
    return NOISE * math.sqrt(energy) + RISE * energy / math.sqrt(step)


def interval(drift: Mapping[str, float] | None) -> str:
    """The interval of an expected loss drift; a dash where nothing is predicted."""
    if drift is None:
        return "-"
    if not drift["mean"]:
        return "0"
    low = f"{drift['low']:.3g} to" if drift["low"] else "up to"
    return f"{low} {drift['high']:.3g}" + (" or more" if drift["is_open"] else "")


def error_in_words(figures: Mapping[str, Any] | None) -> str:
    """The error in steps and the loss drift to expect, in a line, or why there is no figure."""
    earlier = None if figures is None else figures.get("earlier")
    if figures is None or not (figures["changed"]["of"] or earlier):
        return "none, every tensor comes back bit for bit"
    own = figures["steps"] if figures["changed"]["of"] else 0.0
    if earlier and own is not None:
        return f"{own:.3g} steps of the optimizer, after {earlier_in_words(own, earlier)}"
    if figures["steps"] is not None:
        predicted = f"expected loss drift {interval(figures['drift'])}" if figures["drift"] else UNPREDICTED
        return f"{figures['steps']:.3g} steps of the optimizer, {predicted}"
    reasons = [row["reason"] for row in figures["outside"]]
    # What updates the weights says more than that nothing is known to.
    vague = (UNMOVED, _UNSTEPPED)
    reason = next((reason for reason in reasons if reason not in vague), (reasons or [NOT_MEASURED])[0])
    return f"unknown in steps of the optimizer: {reason}"


def added(steps: float | None, earlier: Mapping[str, float | None] | None) -> float | None:
    """An error in steps with that of earlier compressions, at most; None where one is unknown."""
    before = 0.0 if earlier is None else earlier["steps"]
    return None if steps is None or before is None else steps + before


def earlier_in_words(steps: float | None, earlier: Mapping[str, float | None]) -> str:
    """What a container says of earlier compressions, whose error adds to its own error in steps."""
    total = added(steps, earlier)
    if total is None:
        return "an earlier compression whose error is unknown"
    return f"an earlier compression with {earlier['steps']:.3g}: {total:.3g} at most in all"


def number(record: Mapping[str, Any], key: str) -> float:
    """A number from 0 on that a record states; 0 for anything else."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < _MOST else 0.0


PARTS = {"weight": "weights", "moment1": "first moments", "moment2": "second moments"}
"""The parts of an error in steps, in words."""

COPY = "a copy of weights, which no optimizer updates"
"""Why the error of an average of weights is in no figure in steps."""

_ARCHIVED = {codec_id for codec_id, _ in BUDGETED}
_NAMES = 3
Count = Callable[[Iterable[str]], int]


def step_figures(error: StepError, records: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The error in steps with its three parts, and the expected drift; all None where the optimizer moves nothing.

    ``records`` are those of ``expected_drift``. The drift is None where one states the ``origin`` of its step.
    """
    records = list(records)
    parts = {part: math.sqrt(getattr(error, part) / error.step) if error.step > 0 else math.inf for part in PARTS}
    steps = math.hypot(*parts.values())
    if not steps < _MOST:
        return {"steps": None, **dict.fromkeys(PARTS), "drift": None}
    is_known = not any("origin" in record for record in records)
    return {"steps": steps, **parts, "drift": expected_drift(error, records)._asdict() if is_known else None}


def step_facts(manifest: Manifest, count: Count) -> dict[str, Any] | None:
    """The error in steps of a container: in all and by optimizer; None where every tensor is exact.

    It is over ``parameters``, and ``outside`` are the lossy storages that are not in it, by reason. Where none is in
    it, there is no figure. ``budget`` is what it was asked to be, None without a budget. ``rates`` are the learning
    rates that it counts with. ``changed`` counts the elements of lossy storages: those in it, and all. ``fallbacks``
    are the storages that the codecs of a budget do not keep, by reason, and ``capped`` the elements of weights whose
    steps are the largest that the budget allows. ``count`` counts parameters by their names.

    ``earlier`` is there where the source came from another lossy container, see ``Manifest``. No drift is predicted
    then.
    """
    storages = manifest.storages
    kinds = [codec_from_config(storage.codec).measured_as for storage in storages]
    lossy = {index for index, kind in enumerate(kinds) if kind is not None}
    if not lossy and manifest.budget is None and manifest.earlier is None:
        return None
    optimizers = grouped(
        (_stated(parameter, "optimizer") or 0, (parameter, error))
        for parameter in manifest.parameters
        if (error := read_step_error(parameter.steps)) is not None
    )
    every = [step for _, known in sorted(optimizers.items()) for step in known]
    inside = {index for parameter, _ in every for index in (*parameter.moments.values(), *_weights([parameter]))}
    owners = {index: parameter for parameter in reversed(manifest.parameters) for index in parameter.moments.values()}
    unpaired = UNMOVED if len(every) == len(manifest.parameters) else _UNSTEPPED
    outside = _rows(
        (storages[index], _why_outside(storages[index], owners.get(index), unpaired))
        for index in sorted(lossy - inside)
    )
    figures = _figures(every)
    if not lossy & inside and lossy:
        figures |= {"steps": None, **dict.fromkeys(PARTS), "drift": None}
    elif figures["drift"] is not None and any(row["reason"] != COPY for row in outside):
        figures["drift"]["is_open"] = True
    if manifest.earlier is not None:
        figures |= {"drift": None, "earlier": manifest.earlier}
    weights = [index for index, kind in enumerate(kinds) if kind == "lattice"]
    unbudgeted = [storages[index] for index in sorted(lossy) if storages[index].codec["id"] not in _ARCHIVED]
    return {
        "budget": manifest.budget.get("steps") if manifest.budget else None,
        **figures,
        "parameters": count(parameter.name for parameter, _ in every),
        "outside": outside,
        "rates": _rates(every, count),
        "changed": {
            "elements": sum(storages[index].numel for index in lossy & inside),
            "of": sum(storages[index].numel for index in lossy),
        },
        "weight_snr_db": _weight_snr(manifest, weights),
        "optimizers": [
            {
                "parameters": count(parameter.name for parameter, _ in members),
                **_figures(members),
                "measure": _measure(members[0][0]),
                "weight_snr_db": _weight_snr(manifest, _weights(parameter for parameter, _ in members)),
            }
            for _, members in sorted(optimizers.items())
        ],
        "capped": {
            "elements": sum(storages[index].numel for index in weights if storages[index].reason == CAPPED),
            "of": sum(storages[index].numel for index in weights),
        },
        "fallbacks": _rows((record, record.reason) for record in unbudgeted if record.reason and manifest.budget),
    }


def _measure(parameter: ParameterRecord) -> str:
    """What an error in steps of an optimizer is measured by."""
    steps = parameter.steps or {}
    measure, key = ("momentum", "momentum") if "momentum" in steps else ("second moments", "origin")
    return f"{measure}, its step is {'known' if steps[key] == 'known' else 'estimated'}" if key in steps else measure


def _stated(parameter: ParameterRecord, key: str) -> int | None:
    """A number that the record of an error in steps states; None for anything else."""
    value = (parameter.steps or {}).get(key)
    return value if type(value) is int and value >= 0 else None


def _weights(parameters: Iterable[ParameterRecord]) -> list[int]:
    """The storages of the weights of parameters, as far as these state them."""
    return [index for parameter in parameters if (index := _stated(parameter, "weight_storage")) is not None]


def _weight_snr(manifest: Manifest, storages: Iterable[int]) -> float | None:
    """The SNR of weights on lattices, in dB."""
    known = manifest.storages
    errors = (read_error(known[index].error) for index in storages if index < len(known))
    return LatticeError.total(error for error in errors if isinstance(error, LatticeError)).snr_db


def _figures(parameters: Iterable[tuple[ParameterRecord, StepError]]) -> dict[str, Any]:
    """The figures of several parameters together, with those of their updates."""
    total, update, records = StepError(), UpdateError(), list[dict[str, Any]]()
    for parameter, error in parameters:
        total.merge(error)
        rule = parameter.rule or {}
        records.append({**(parameter.steps or {}), "kind": rule.get("kind"), "age": rule.get("step")})
        if isinstance(moved := read_error(parameter.error), UpdateError):
            update.merge(moved)
    return {
        **step_figures(total, records),
        "update_nmse": update.nmse if math.isfinite(update.nmse) else None,
        "max_error": update.max_error,
    }


def _rates(every: Iterable[tuple[ParameterRecord, StepError]], count: Count) -> list[dict[str, Any]]:
    """The learning rates that an error counts with, and what the file states where that is less."""
    records = ((parameter.steps or {}, parameter.name) for parameter, _ in every)
    names = grouped(
        ((rate, number(record, "stated_rate") if "stated_rate" in record else rate), name)
        for record, name in records
        if (rate := number(record, "rate"))
    )
    return [{"rate": rate, "stated": stated, "parameters": count(name)} for (rate, stated), name in names.items()]


def _why_outside(record: StorageRecord, owner: ParameterRecord | None, unpaired: str) -> str:
    """Why the error of a lossy storage is not in the figure.

    ``owner`` is the parameter whose moment it is. Parameters name their weights only where their steps are stated:
    ``unpaired`` says what is true of the others.
    """
    if record.role is Role.WEIGHT and record.codec["id"] in _ARCHIVED:
        return COPY
    if record.reason is not None:
        return record.reason
    if owner is None:
        return {Role.WEIGHT: unpaired, Role.OTHER: _NO_STATE}.get(record.role, NO_PARAMETER)
    if owner.rule is None:
        return owner.reason or NOT_MEASURED
    if owner.rule.get("kind") not in COUNTED:
        return UNCOUNTED
    return _NO_STEP if owner.error is not None else NOT_MEASURED


def _rows(reasons: Iterable[tuple[StorageRecord, str]]) -> list[dict[str, Any]]:
    """Storages by reason: how many, their elements, and a few names."""
    rows = [
        {
            "reason": reason,
            "count": len(records),
            "elements": sum(record.numel for record in records),
            "names": [record.name for record in records[:_NAMES]],
        }
        for reason, records in grouped((stated.removeprefix(NO_BUDGET), record) for record, stated in reasons).items()
    ]
    return sorted(rows, key=lambda row: -row["elements"])
