"""The sections about the error of lossy storage: totals, errors by layer, the worst tensors with their histograms."""

from __future__ import annotations

from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import shown
from ckpt8.cli.show.html.bars import LogAxis, legend, row
from ckpt8.cli.show.html.distributions import histograms, sides_legend
from ckpt8.cli.show.html.sizes import split_largest
from ckpt8.cli.show.html.steps import Row, markup, step_rows
from ckpt8.cli.show.html.text import text
from ckpt8.cli.show.steps import healing_line
from ckpt8.cli.show.tables import number
from ckpt8.core.text import counted, differing_line
from ckpt8.inspecting.manifest_facts import FIGURE_WORDS, ROLE_WORDS


def error_section(
    errors: dict[str, Any],
    distributions: dict[str, Any],
    source: dict[str, Any] | None = None,
    steps: dict[str, Any] | None = None,
) -> str:
    """The measured errors; ``errors_from`` says on which elements.

    ``source`` is ``measured_from`` of ``inspect``, ``steps`` the error in steps of a container under a budget.
    """
    lines = markup(_totals(errors, steps))
    body = f"<table><tbody>{lines}</tbody></table>" if lines else "<p>No error was measured.</p>"
    where = f", {source['path']}" if source else ""
    if source and source["differing"]:
        body += f"<p><b>{text(differing_line(source))}</b></p>"
    return (
        f'<section id="errors"><h2>Error of lossy storage</h2>'
        f'<p class="soft">Measured on {text(distributions["errors_from"] + where)}. '
        f"u is the step that the optimizer would take, per unit of learning rate: in update space as its state alone "
        f"determines it, else the first step that verify --resume-steps replays. NMSE is the energy of the error in "
        f"it, relative to that of u.</p>{body}{_by_layer(distributions['layers'])}</section>"
    )


def _totals(errors: dict[str, Any], steps: dict[str, Any] | None) -> list[Row]:
    rows: list[Row] = []
    if weight := errors["weight"]:
        mean = f"mean {number(weight['mean_relative'])}"
        rows.append(("weights", (f"max relative {number(weight['max_relative'])}", mean)))
    if weight := errors.get("lattice"):
        rows.append(("weights", (_decibels(weight), f"max error {number(weight['max_distance'])}")))
    noise = {"moment1": ROLE_WORDS["moment1"], "moment2": ROLE_WORDS["moment2"], **FIGURE_WORDS}
    for what, name in noise.items():
        if error := errors[what]:
            rows += [(name, (f"NMSE {number(error['nmse'])}", _decibels(error)))]
            if what in FIGURE_WORDS:
                largest = f"max |Δu| {number(error['max_error'])}", f"max |u| {number(error['max_update'])}"
                rows.append((f"{name}, largest", largest))
    rows += [
        ("update", (f"unknown for {counted(count, 'parameter')}: {reason}",))
        for reason, count in errors["update_reasons"].items()
    ]
    if heals := healing_line(errors["update"], steps):
        rows.append(("update", tuple(heals.split(": "))))
    return rows + step_rows(steps)


def _decibels(error: dict[str, Any]) -> str:
    return "-" if error["snr_db"] is None else f"SNR {number(error['snr_db'])} dB"


def _by_layer(layers: list[dict[str, Any]]) -> str:
    known = [each for each in layers if each["update"] is not None]
    if not known:
        return ""
    shown, others = split_largest(known, lambda each: float(each["update"]["max_error"]))
    axis = LogAxis(each["update"][figure] or 0.0 for each in shown for figure in ("nmse", "max_error"))
    rows = []
    for each in shown:
        update = each["update"]
        nmse = update["nmse"] or 0.0
        dots = [
            ("update", nmse, f"NMSE {number(nmse)}"),
            ("moment2 ring", update["max_error"], f"max |Δu| {number(update['max_error'])}"),
        ]
        figures = f"{number(update['nmse'])} <small>max |Δu| {number(update['max_error'])}</small>"
        rows.append(row(text(each["layer"]), axis.dots(dots), figures))
    figures_here = {figure for each in known for figure in each["figures"]}
    title = " and ".join(words.capitalize() for kind, words in FIGURE_WORDS.items() if kind in figures_here)
    more = f'<p class="note">{len(others):,} layers with a smaller max |Δu| are left out.</p>' if others else ""
    colours = legend([("dot update", "NMSE of the update"), ("dot moment2 ring", "max |Δu|, the largest single error")])
    return f'<h3>{title}, by layer</h3>{colours}<div id="layer-errors">{"".join(rows)}{axis.labels()}</div>{more}'


def worst_section(distributions: dict[str, Any]) -> str:
    """The worst parameters and weights; empty without any measured error."""
    worst = distributions["worst"]
    if not any(worst.values()):
        return ""
    articles = []
    for title, rows, figures in (
        ("Largest error of an update", worst["update"], _update_figures),
        ("Largest mean error of weights", worst["weight"], _weight_figures),
        ("Lowest SNR of weights", worst["lattice"], _lattice_figures),
    ):
        if rows:
            articles.append(f"<h3>{title}</h3>")
        articles += [
            f"<article><h4>{text(shown(each))}</h4>"
            f'<p class="soft">{text(figures(each))}</p>'
            f'<div class="charts">{histograms(each["histograms"])}</div></article>'
            for each in rows
        ]
    hint = '<p class="soft">With <code>--against ORIGINAL</code> they are shown as they were before, too.</p>'
    sides = sides_legend(distributions) if distributions["before"] else hint
    return f'<section id="worst"><h2>The worst tensors</h2>{sides}{"".join(articles)}</section>'


def _update_figures(each: dict[str, Any]) -> str:
    kind = f"{FIGURE_WORDS['replayed']}: " if each["figure"] == "replayed" else ""
    return (
        f"{kind}max |Δu| {number(each['max_error'])} "
        f"where max |u| is {number(each['max_update'])}, NMSE {number(each['nmse'])}, {_decibels(each)}"
    )


def _lattice_figures(each: dict[str, Any]) -> str:
    return f"{_decibels(each)}, max |Δw| {number(each['max_distance'])}"


def _weight_figures(each: dict[str, Any]) -> str:
    return f"mean relative error {number(each['mean_relative'])}, max {number(each['max_relative'])}"
