"""The sections about how values and codes are distributed."""

from __future__ import annotations

from typing import Any

from ckpt8.cli.show.html.bars import legend
from ckpt8.cli.show.html.plots import code_usage, magnitudes
from ckpt8.cli.show.html.text import text
from ckpt8.cli.show.tables import number
from ckpt8.core.text import percent
from ckpt8.inspecting.manifest_facts import ROLE_WORDS

_CHARTS = {
    "weight": ("Weights", "magnitude of a weight"),
    "moment1": ("First moments", "magnitude of a first moment"),
    "moment2": ("Second moments", "second moment"),
    "update": ("Updates u", "magnitude of an update u"),
}


def value_section(distributions: dict[str, Any]) -> str:
    """Histograms of weights, moments and updates; empty if there are none."""
    charts = histograms(distributions["histograms"])
    if not charts:
        return ""
    before, after = distributions["before"], distributions["after"]
    sides = f"Before: {before}. After: {after}." if before else f"The values {after}."
    return (
        f'<section id="values"><h2>Weights, moments and updates</h2><p class="soft">{text(sides)} '
        f"A step of a curve is a factor of two in magnitude. Shares are on a logarithmic axis, which shows the "
        f"tails.{_without_updates(distributions['histograms'])}</p>"
        f'{sides_legend(distributions)}<div class="charts pairs">{charts}</div>'
        f"{_refused(distributions['refused'])}</section>"
    )


def sides_legend(distributions: dict[str, Any]) -> str:
    """The colours of the two sides of a histogram, if there are two."""
    return legend([("was", "before"), ("curve", "after")]) if distributions["before"] else ""


def _without_updates(pairs: dict[str, Any]) -> str:
    """A sentence on parameters whose updates are not drawn."""
    moments, updates = (pairs[what]["after"]["total"] if what in pairs else 0 for what in ("moment1", "update"))
    if moments <= updates:
        return ""
    return " Updates are drawn where they follow from moments alone: CAME's and replayed ones do not, nor unknown ones."


def _refused(refused: dict[str, Any]) -> str:
    if not refused["count"]:
        return ""
    items = "".join(f"<li><code>{text(row['name'])}</code>: {text(row['reason'])}</li>" for row in refused["first"])
    more = refused["count"] - len(refused["first"])
    rest = f"<li>and {more:,} more</li>" if more else ""
    return f"<h3>Kept lossless, for what they hold</h3><ul>{items}{rest}</ul>"


def histograms(pairs: dict[str, Any]) -> str:
    """A figure for every pair of histograms."""
    return "".join(_figure(what, pair) for what, pair in pairs.items())


def _figure(what: str, pair: dict[str, Any]) -> str:
    title, axis = _CHARTS[what]
    after = pair["after"]
    return (
        f'<figure data-chart="{what}"><figcaption>{title} <span>{after["total"]:,} values</span></figcaption>'
        f'{magnitudes(pair, what, axis)}<p class="note">{text(_outside(pair))}</p></figure>'
    )


def _outside(pair: dict[str, Any]) -> str:
    """In words, the values that a histogram cannot show."""
    found = []
    for side, name in ((pair["before"], "before"), (pair["after"], "after")):
        if side is not None:
            words = f"{side['zero']:,} zeros ({percent(side['zero'], side['total'])})"
            if side["not_finite"]:
                words += f", {side['not_finite']:,} NaN or Inf"
            found.append(f"{words} {name}" if pair["before"] is not None else words)
    if negative := pair["after"]["negative"]:
        found.append(f"{percent(negative, pair['after']['total'])} negative")
    return "; ".join(found)


def code_section(distributions: dict[str, Any]) -> str:
    """How often each code is used; empty if nothing is stored in codes."""
    rows = distributions["codes"]
    if not rows:
        return ""
    ends = ""
    meaning = (
        "A code that is used as often as any other is worth its 8 bits; the entropy coder saves what is below that."
        if any(row["levels"] for row in rows)
        else "Codes count steps, which a budget makes so large that few bits are left."
    )
    if any(row["part"] == "codes" and row["levels"] for row in rows):
        ends = " In every group of 32 moments the largest has the last code, which therefore stands out."
    figures = "".join(
        f'<figure data-chart="codes"><figcaption>{text(_part_words(row))}</figcaption>'
        f"{code_usage(row, row['role'], 'residual' if row['part'] == 'rho' else 'code')}"
        f'<p class="note">{text(row["codec"])}: {text(_usage(row))}</p></figure>'
        for row in rows
    )
    return (
        f'<section id="codes"><h2>How the codes are used</h2><p class="soft">{meaning}{ends}</p>'
        f'<div class="charts">{figures}</div></section>'
    )


def _usage(row: dict[str, Any]) -> str:
    """In words, how many codes are in use, and what they are worth."""
    if row["levels"] is not None:
        return f"{row['used']:,} of {row['levels']:,} codes used, entropy {number(row['entropy_bits'])} bits of 8"
    beyond = f", {percent(row['outside'], row['total'])} of the values beyond the chart" if row["outside"] else ""
    zeros = f", {row['reserved']:,} exact zeros" if row["reserved"] else ""
    return f"{row['used']:,} codes used, entropy {number(row['entropy_bits'])} bits{beyond}{zeros}"


def _part_words(row: dict[str, Any]) -> str:
    return f"{'Residuals' if row['part'] == 'rho' else 'Codes'} of {ROLE_WORDS[row['role']]}"
