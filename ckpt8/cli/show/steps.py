"""Shows an error in steps of the optimizer, and the loss drift that it is expected to cost, in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ckpt8.cli.output import print_lines
from ckpt8.cli.show.tables import Table, number, show_table
from ckpt8.core.text import counted, percent, size
from ckpt8.inspecting.step_facts import PARTS

_ROUNDING = 1e-6
"""Steps that sums of floats may exceed a budget by."""

_HEALING = 0.01
"""From this NMSE of the update on, a report says why the loss hardly shows it."""

HEALS = "its error heals: gradients renew the momentum within about ten steps, and the loss drift counts that"


def step_lines(steps: Mapping[str, Any]) -> list[str]:
    """The lines of ``step_facts``."""
    lines = []
    if steps["steps"] is not None:
        whole, *parts = figure_phrases(steps)
        lines.append(f"steps         {whole}: {', '.join(parts)}")
    lines += [f"steps         {phrase}" for phrase in outside_phrases(steps)]
    lines += [f"learning rate {phrase}" for phrase in rate_phrases(steps)]
    lines.append(f"loss drift    {drift_text(steps['drift'])}")
    if capped := steps["capped"]["elements"]:
        share = percent(capped, steps["capped"]["of"])
        lines.append(f"lattice       {share} of the weights have the largest step that their size allows")
    return lines


def steps_phrase(steps: Mapping[str, Any]) -> str:
    """The error in steps beside its budget, for a line about more than that."""
    known = "in steps unknown" if steps["steps"] is None else f"{number(steps['steps'])} steps"
    return f"error {known} ({_budget_phrase(steps)})"


def _budget_phrase(steps: Mapping[str, Any]) -> str:
    """The budget, and by how much the error exceeds it: its three digits may hide that."""
    budget = steps["budget"]
    more = 0 if None in (budget, steps["steps"]) else steps["steps"] - budget
    return f"budget {number(budget)}" + (f", exceeded by {number(more)}" if more > _ROUNDING else "")


def fallback_phrase(steps: Mapping[str, Any]) -> str | None:
    """What is not stored under the budget, and why; None where all is."""
    rows = steps["fallbacks"]
    return (
        "under no budget: " + "; ".join(f"{counted(row['count'], 'storage')}, {row['reason']}" for row in rows)
        if rows
        else None
    )


def measured_lines(steps: Mapping[str, Any]) -> list[str]:
    """The same lines, behind those about weights and updates that ``inspect`` has among others."""
    if steps["steps"] is None:
        return step_lines(steps)
    update = {"nmse": steps["update_nmse"]}
    lines = [f"update space  NMSE {number(steps['update_nmse'])}, max |Δu| {number(steps['max_error'])}"]
    if steps["weight_snr_db"] is not None:
        lines.insert(0, f"weights       SNR {number(steps['weight_snr_db'])} dB")
    if heals := healing_line(update, steps):
        lines.append(f"              {heals}")
    return lines + step_lines(steps)


def drift_text(drift: Mapping[str, float] | None) -> str:
    """The expected loss drift and its interval."""
    if drift is None:
        return "not predicted"
    if not drift["mean"]:
        return "none"
    return f"{number(drift['mean'])} expected, {interval(drift)}"


def healing_line(update: Mapping[str, Any] | None, steps: Mapping[str, Any] | None) -> str | None:
    """Why an update with a large NMSE resumes well; None where there is nothing to explain."""
    nmse = None if update is None or steps is None else update["nmse"]
    return HEALS if nmse is not None and nmse >= _HEALING else None


def figure_phrases(steps: Mapping[str, Any]) -> list[str]:
    """A known error in steps, the budget, over what it is, and its parts."""
    whole = f"{number(steps['steps'])} ({_budget_phrase(steps)})"
    return [f"{whole} over {counted(steps['parameters'], 'parameter')}", *part_phrases(steps)]


def outside_phrases(steps: Mapping[str, Any]) -> list[str]:
    """What is not in an error in steps, or that it is unknown of all that changed."""
    word, of = "without" if steps["steps"] is not None else "unknown for", steps["changed"]["of"]
    return [
        f"{word} {counted(row['count'], 'tensor')}, {percent(row['elements'], of)} of what changed: {row['reason']}"
        for row in steps["outside"]
    ]


def rate_phrases(steps: Mapping[str, Any]) -> list[str]:
    """The learning rates that an error counts with; all that the file states in one phrase."""
    stated = ", ".join(number(each["rate"]) for each in steps["rates"] if each["rate"] == each["stated"])
    others = [
        f"{number(each['rate'])} for {counted(each['parameters'], 'parameter')}, a tenth of the initial rate: the file "
        f"has {number(each['stated'])}"
        for each in steps["rates"]
        if each["rate"] != each["stated"]
    ]
    return [stated, *others] if stated else others


def part_phrases(steps: Mapping[str, Any]) -> list[str]:
    """The three parts of an error in steps, each with its name."""
    return [f"{words} {number(steps[part])}" for part, words in PARTS.items()]


def show_optimizers(console: Console, steps: Mapping[str, Any] | None) -> None:
    """Print the error by optimizer, if there are several."""
    if steps and len(steps["optimizers"]) > 1:
        columns = (
            "optimizer of",
            "steps",
            *PARTS.values(),
            "weights' SNR",
            "max |Δu|",
            "NMSE of u",
            "expected loss drift",
        )
        rows = [
            (
                counted(each["parameters"], "parameter"),
                *(number(each[key]) for key in ("steps", *PARTS, "weight_snr_db", "max_error", "update_nmse")),
                interval(each["drift"]),
            )
            for each in steps["optimizers"]
        ]
        show_table(console, columns, rows)


def show_predictions(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what every preset and some budgets would make of a checkpoint."""
    rows = [
        (
            option_of(name),
            size(each["bytes"]),
            f"{each['ratio']:.2f}x",
            number(each["steps"]),
            interval(each["drift"]),
        )
        for name, each in facts["predicted"].items()
    ]
    console.print(Table(("option", "predicted", "ratio", "error in steps", "expected loss drift"), rows))
    for reason, count in facts["unpredicted"].items():
        print_lines(console, [f"not in steps: {counted(count, 'tensor')}: {reason}"])


def option_of(name: str) -> str:
    """The option of ``compress`` that a prediction is about."""
    return f"--{name}" if name.startswith("budget ") else f"--preset {name}"


def interval(drift: Mapping[str, float] | None) -> str:
    """The interval of an expected loss drift; a dash where nothing is predicted."""
    if drift is None:
        return "-"
    if not drift["mean"]:
        return "0"
    low = f"{number(drift['low'])} to" if drift["low"] else "up to"
    return f"{low} {number(drift['high'])}" + (" or more" if drift["is_open"] else "")
