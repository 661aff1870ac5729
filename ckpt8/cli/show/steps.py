"""Lines about an error in steps of the optimizer, and the loss drift that it is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt8.cli.show.tables import number
from ckpt8.core.text import counted, percent
from ckpt8.inspecting.step_facts import PARTS

_HEALING = 0.01
"""From this NMSE of the update on, a report says why the loss hardly shows it."""

HEALS = "its error heals: gradients renew the momentum within about ten steps, and the loss drift counts that"


def step_lines(steps: Mapping[str, Any]) -> list[str]:
    """The lines of ``step_facts``."""
    is_known, lines = steps["steps"] is not None, []
    if is_known:
        lines.append(f"steps         {number(steps['steps'])} (budget {number(steps['budget'])}): {_parts(steps)}")
    word = "without" if is_known else "unknown for"
    lines += [
        f"steps         {word} {counted(count, 'parameter')}: {reason}" for reason, count in steps["unknown"].items()
    ]
    if len(steps["optimizers"]) > 1:
        lines += [_optimizer_line(which, each) for which, each in enumerate(steps["optimizers"], 1)]
    lines.append(f"loss drift    {drift_text(steps['drift'])}")
    if capped := steps["capped"]["elements"]:
        share = percent(capped, steps["capped"]["of"])
        lines.append(f"lattice       {share} of the weights have the largest step that their size allows")
    return lines


def drift_text(drift: Mapping[str, float] | None) -> str:
    """The expected loss drift and its interval."""
    if drift is None:
        return "not predicted"
    if not drift["mean"]:
        return "none"
    return f"{number(drift['mean'])} expected, {number(drift['low'])} to {number(drift['high'])}"


def healing_line(update: Mapping[str, Any] | None, steps: Mapping[str, Any] | None) -> str | None:
    """Why an update with a large NMSE resumes well; None where there is nothing to explain."""
    nmse = None if update is None or steps is None else update["nmse"]
    return HEALS if nmse is not None and nmse >= _HEALING else None


def _parts(steps: Mapping[str, Any]) -> str:
    return ", ".join(f"{words} {number(steps[part])}" for part, words in PARTS.items())


def _optimizer_line(which: int, each: Mapping[str, Any]) -> str:
    snr = "" if each["weight_snr_db"] is None else f"weights {number(each['weight_snr_db'])} dB, "
    return (
        f"optimizer {which}   {number(each['steps'])}: {_parts(each)}; {snr}max |Δu| {number(each['max_error'])}, "
        f"NMSE {number(each['update_nmse'])}, loss drift {drift_text(each['drift'])}; "
        f"{counted(each['parameters'], 'parameter')}"
    )
