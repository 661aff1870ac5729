"""Turns the figures of all tensors into a verdict for each number format and role, and a line for each format.

A format suits a tensor, raw or scaled, if

    overflow    is zero
    SNR         is no lower than the floor of the format, see ``number_formats``: rounding alone cannot do worse
    underflow   is at most 5 % of the nonzero elements of a weight or a first moment: an int8 whose SNR is at its floor
                loses 3.3 % of a normal distribution, so more means that small elements have no place in the format;
                is zero for a second moment, since an update divides by its root

A role is *ready* if the format suits all its tensors raw, *ready with scaling* if it suits all scaled, *ready but for a
few* if the tensors that it does not suit scaled have at most 1 % of the elements: a few biases and norms, which cost
next to nothing in 16 bits. Else it is *not ready*. Over several tensors, noise counts in units of the RMS of each, and
every element the same:

    SNR = 10 log10( sum n / sum n NMSE )        n the elements of a tensor, NMSE = sum (x^ - x)^2 / sum x^2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckpt8.core.tensors import Role
from ckpt8.core.text import percent
from ckpt8.inspecting.manifest_facts import ROLE_WORDS
from ckpt8.inspecting.readiness.casting import RAW, SCALED, decibels
from ckpt8.inspecting.readiness.number_formats import FORMATS, NumberFormat

MOST_UNDERFLOW = 0.05
"""The share of the nonzero elements that may become zero."""

FEW = 0.01
"""The share of the elements of a role that may stay in a longer format."""

READY, READY_SCALED, READY_MOSTLY, NOT_READY = "ready", "ready with scaling", "ready but for a few", "not ready"

_FRACTIONS = ("overflow", "underflow", "subnormal")
_REASONS = ("underflow", "snr_db", "overflow")
"""Figures that make a format unsuitable for a tensor, the worst last."""

_BECOME = {"overflow": "overflow", "underflow": "become zero"}


def format_reports(tensors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every format its bounds, the losses and the verdict by role, and all verdicts in one line."""
    return [_format_report(each, [t for t in tensors if t["formats"] is not None]) for each in FORMATS]


def _format_report(each: NumberFormat, tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_role = {role: [tensor for tensor in tensors if tensor["role"] == role] for role in ROLE_WORDS}
    roles = {role: _role_report(each, found) for role, found in by_role.items() if found}
    parts = [f"{ROLE_WORDS[role]} {report['text']}" for role, report in roles.items()]
    return {
        "format": each.id,
        "label": each.label,
        "scaling": each.scaling,
        "ideal_snr_db": each.ideal_snr,
        "floor_snr_db": each.floor_snr,
        "roles": roles,
        "line": f"{each.label}: {'; '.join(parts) or 'nothing to round'}",
    }


def _role_report(each: NumberFormat, tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failing = {kind: [tensor for tensor in tensors if fails(each, tensor, kind)] for kind in (RAW, SCALED)}
    report = {
        "tensors": len(tensors),
        "verdict": _verdict(tensors, failing),
        **{kind: _total(each, tensors, kind) | {"failing": len(failing[kind])} for kind in (RAW, SCALED)},
    }
    return report | {"text": _text(each, report, failing[SCALED])}


def _verdict(tensors: Sequence[dict[str, Any]], failing: dict[str, list[dict[str, Any]]]) -> str:
    if not failing[RAW]:
        return READY
    left, total = (sum(tensor["elements"] for tensor in some) for some in (failing[SCALED], tensors))
    if not left:
        return READY_SCALED
    return READY_MOSTLY if left <= FEW * total else NOT_READY


def fails(each: NumberFormat, tensor: dict[str, Any], kind: str) -> str | None:
    """The figure of a tensor that is out of bounds, ``overflow``, ``snr_db`` or ``underflow``; None if all hold."""
    figures = tensor["formats"][each.id][kind]
    if figures["overflow"]:
        return "overflow"
    if figures["snr_db"] is not None and figures["snr_db"] < each.floor_snr:
        return "snr_db"
    bound = 0.0 if tensor["role"] == Role.MOMENT2.value else MOST_UNDERFLOW
    return "underflow" if figures["underflow"] > bound else None


def _total(each: NumberFormat, tensors: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Figures over several tensors; ``worst`` is the one of the lowest SNR, None if none has noise."""
    figures = [(tensor, tensor["formats"][each.id][kind]) for tensor in tensors]
    # Nonzero elements, estimated from the sample.
    counts = [tensor["elements"] * tensor["nonzero"] for tensor in tensors]
    nonzero = sum(counts)
    fractions = {
        key: sum(n * found[key] for n, (_, found) in zip(counts, figures, strict=True)) / nonzero if nonzero else 0.0
        for key in _FRACTIONS
    }
    return {**fractions, **_snr((tensor, found["snr_db"]) for tensor, found in figures)}


def _snr(snrs: Iterable[tuple[dict[str, Any], float | None]]) -> dict[str, Any]:
    elements, noise, worst = 0, 0.0, None
    for tensor, snr in snrs:
        elements += tensor["elements"]
        if snr is not None:
            noise += tensor["elements"] * 10 ** (-snr / 10)
            if worst is None or snr < worst["snr_db"]:
                worst = {"name": tensor["name"], "label": tensor["label"], "snr_db": snr}
    return {"snr_db": decibels(noise / elements) if elements else None, "worst": worst}


def measured_total(tensors: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By role the measured error against an original, over the tensors that have one."""
    by_role: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        if tensor["measured"] is not None:
            by_role.setdefault(tensor["role"], []).append(tensor)
    return {
        role: {"tensors": len(found), **_snr((tensor, tensor["measured"]["snr_db"]) for tensor in found)}
        for role, found in by_role.items()
    }


def _text(each: NumberFormat, report: dict[str, Any], failing: Sequence[dict[str, Any]]) -> str:
    few = f"{len(failing)} of {report['tensors']} tensors ({_worst_failing(each, failing)})"
    if report["verdict"] == NOT_READY:
        return f"not ready, {few}"
    kind = RAW if report["verdict"] == READY else SCALED
    how = "ready" if kind == RAW else f"ready with {each.scaling} scaling"
    return f"{how} but for {few}" if failing and kind == SCALED else f"{how} ({snr_text(report[kind])})"


def snr_text(total: dict[str, Any]) -> str:
    """The SNR of several tensors and the worst of them in words."""
    if total["worst"] is None:
        return "exact"
    worst = total["worst"]
    return f"SNR {snr(total['snr_db'])} dB, worst {worst['label']} {snr(worst['snr_db'])} dB"


def snr(value: float | None) -> str:
    """An SNR with one decimal, or ``exact`` for None."""
    return "exact" if value is None else f"{round(value, 1) + 0.0:.1f}"


def _worst_failing(each: NumberFormat, failing: Sequence[dict[str, Any]]) -> str:
    """One tensor in words: first comes overflow, then the lowest SNR below the floor, then underflow."""

    def badness(tensor: dict[str, Any]) -> tuple[int, float, str]:
        reason = fails(each, tensor, SCALED) or _REASONS[0]
        figure = float(tensor["formats"][each.id][SCALED][reason])
        return _REASONS.index(reason), -figure if reason == "snr_db" else figure, tensor["label"]

    if not failing:
        return ""
    rank, figure, label = max((badness(tensor) for tensor in failing), key=lambda found: found[:2])
    if _REASONS[rank] == "snr_db":
        return f"worst {label} {snr(-figure)} dB"
    return f"{percent(figure)} of {label} {_BECOME[_REASONS[rank]]}"
