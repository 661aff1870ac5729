"""The figures of an error in steps, and what is predicted of containers of a checkpoint, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt8.cli.show.html.text import text
from ckpt8.cli.show.steps import (
    drift_text,
    figure_phrases,
    interval,
    option_of,
    outside_phrases,
    part_phrases,
    rate_phrases,
)
from ckpt8.cli.show.tables import number
from ckpt8.core.text import counted, percent, size

Row = tuple[str, tuple[str, ...]]
"""The name of a row and its phrases."""


def step_rows(steps: Mapping[str, Any] | None) -> list[Row]:
    """The rows of ``step_facts``; none without a budget."""
    if steps is None:
        return []
    rows: list[Row] = []
    if steps["steps"] is not None:
        rows.append(("error in steps", tuple(figure_phrases(steps))))
    rows += [("error in steps", (phrase,)) for phrase in outside_phrases(steps)]
    rows += [("learning rate", (phrase,)) for phrase in rate_phrases(steps)]
    rows.append(("loss drift", tuple(drift_text(steps["drift"]).split(", "))))
    if len(steps["optimizers"]) > 1:
        rows += [_optimizer(each) for each in steps["optimizers"]]
    if capped := steps["capped"]["elements"]:
        share = percent(capped, steps["capped"]["of"])
        rows.append(("lattice", (f"{share} of the weights have the largest step", "that their size allows")))
    rows += [("under no budget", (counted(each["count"], "storage"), each["reason"])) for each in steps["fallbacks"]]
    return rows


def _optimizer(each: Mapping[str, Any]) -> Row:
    snr = [] if each["weight_snr_db"] is None else [f"weights' SNR {number(each['weight_snr_db'])} dB"]
    figures = (
        f"{number(each['steps'])} steps",
        *part_phrases(each),
        *snr,
        f"max |Δu| {number(each['max_error'])}",
        f"NMSE of u {number(each['update_nmse'])}",
        f"loss drift {interval(each['drift'])}",
    )
    return f"optimizer of {counted(each['parameters'], 'parameter')}", figures


def predictions(facts: Mapping[str, Any]) -> str:
    """What every preset and some budgets would make of a checkpoint, as markup."""
    rows: list[Row] = [
        (
            option_of(name),
            (
                size(each["bytes"]),
                f"{each['ratio']:.2f}x",
                *_cost(each),
            ),
        )
        for name, each in facts["predicted"].items()
    ]
    rows += [
        ("not in steps", (f"{counted(count, 'tensor')}: {reason}",)) for reason, count in facts["unpredicted"].items()
    ]
    return (
        '<h3>What ckpt8 compress would make of it</h3><p class="soft">Predicted from a sample: size, error in steps of '
        "the optimizer, and the loss drift to expect, the mean |Δloss| of a resumed run on the same batches.</p>"
        f'<table id="predictions"><tbody>{markup(rows)}</tbody></table>'
    )


def _cost(each: Mapping[str, Any]) -> list[str]:
    if each["steps"] is None:
        return []
    return [f"{number(each['steps'])} steps", f"loss drift {interval(each['drift'])}"]


def markup(rows: list[Row]) -> str:
    """Rows of a table. No line break splits a phrase in a span."""
    return "".join(
        f"<tr><th>{text(name)}</th><td>{', '.join(f'<span>{text(each)}</span>' for each in figures)}</td></tr>"
        for name, figures in rows
    )
