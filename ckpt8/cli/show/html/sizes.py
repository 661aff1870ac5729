"""The report section on sizes: original and stored (or predicted) bytes, in total, by role and by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ckpt8.cli.show.html.bars import Stack, legend, row, stacks
from ckpt8.cli.show.html.steps import predictions
from ckpt8.cli.show.html.text import text
from ckpt8.cli.show.tables import codec_text
from ckpt8.core.text import percent, size
from ckpt8.inspecting.manifest_facts import ROLE_WORDS

MAX_LAYER_ROWS = 80
"""Only this many layers, the largest, get a row of their own. One line sums up the others."""

_NO_ROLE = "total"
"""The style of a segment that belongs to no single role."""


def size_section(facts: dict[str, Any], layers: list[dict[str, Any]]) -> str:
    """The section as markup, from the facts of ``inspect`` and their ``layers``."""
    is_compressed = facts["kind"] == "ckpt8"
    present = {each["role"] for each in facts["roles"]}
    colours = legend([(role, words) for role, words in ROLE_WORDS.items() if role in present])
    note = (
        '<p class="soft">Where a row has two bars, the faint one is the original size and the other the stored size.'
        "</p>"
        if is_compressed
        else ""
    )
    return (
        f'<section id="sizes"><h2>Where the bytes are</h2>{note}{colours}{_totals(facts)}'
        f"{'' if is_compressed else predictions(facts)}"
        f'<h3>By role</h3><div id="roles">{_by_role(facts)}</div>'
        f'<h3>By layer</h3><div id="layers">{_by_layer(layers, is_compressed=is_compressed)}</div></section>'
    )


def _segments(sizes: Mapping[str, int], full_bar: int) -> Stack:
    """Segments of one bar: (role, fraction of the width, tooltip). ``full_bar`` bytes fill the width."""
    return [
        (role, sizes[role] / full_bar, f"{words}: {size(sizes[role])}")
        for role, words in ROLE_WORDS.items()
        if sizes.get(role)
    ]


def _totals(facts: dict[str, Any]) -> str:
    """A row with the original size, then one for the stored size or one for each predicted size."""
    original_bytes, stored_bytes = Counter[str](), Counter[str]()
    for each in facts["roles"]:
        original_bytes[each["role"]] += each["bytes"]
        stored_bytes[each["role"]] += each.get("stored_bytes", 0)
    is_compressed = facts["kind"] == "ckpt8"
    after = [facts["stored_bytes"]] if is_compressed else [each["bytes"] for each in facts["predicted"].values()]
    # The container of a small checkpoint is larger than its original.
    full_bar = max(1, facts["bytes"], *after)
    rows = [row("original", stacks([_segments(original_bytes, full_bar)]), size(facts["bytes"]))]
    if is_compressed:
        overhead = facts["overhead_bytes"]
        stack = [*_segments(stored_bytes, full_bar), (_NO_ROLE, overhead / full_bar, f"container: {size(overhead)}")]
        figures = f"{size(facts['stored_bytes'])} <small>{facts['ratio']:.2f}x</small>"
        rows.append(row(text(facts["asked"]), stacks([stack]), figures))
    else:
        for preset, predicted in facts["predicted"].items():
            stack = [(_NO_ROLE, predicted["bytes"] / full_bar, f"predicted: {size(predicted['bytes'])}")]
            figures = f"{size(predicted['bytes'])} <small>{predicted['ratio']:.2f}x</small>"
            name = preset if preset.startswith("budget ") else f"preset {preset}"
            rows.append(row(f"{text(name)}, predicted", stacks([stack]), figures))
    return "".join(rows)


def _by_role(facts: dict[str, Any]) -> str:
    full_bar = max((max(each["bytes"], each.get("stored_bytes", 0)) for each in facts["roles"]), default=1)
    rows = []
    for each in sorted(facts["roles"], key=lambda each: list(ROLE_WORDS).index(each["role"])):
        role = each["role"]
        encoding = codec_text(each.get("codec") or each["dtype"])
        name = f'{text(ROLE_WORDS[role])} <span class="soft">{text(encoding)}</span>'
        bars = [_segments({role: each["bytes"]}, full_bar)]
        if "stored_bytes" in each:
            bars.append(_segments({role: each["stored_bytes"]}, full_bar))
            value = f"{size(each['bytes'])} → {size(each['stored_bytes'])}"
        else:
            value = f"{size(each['bytes'])} <small>{percent(each['bytes'], facts['bytes'])}</small>"
        rows.append(row(name, stacks(bars), value))
    return "".join(rows)


def _by_layer(layers: list[dict[str, Any]], *, is_compressed: bool) -> str:
    largest, others = split_largest(layers, lambda each: sum(each["bytes"].values()))
    columns = ("bytes", "stored_bytes") if is_compressed else ("bytes",)
    full_bar = max((sum(each[column].values()) for each in largest for column in columns), default=1)
    rows = []
    for each in largest:
        total = sum(each["bytes"].values())
        if is_compressed:
            value = f"{size(total)} → {size(sum(each['stored_bytes'].values()))}"
        else:
            value = size(total) + (f" <small>{each['weights']:,} weights</small>" if each["weights"] else "")
        rows.append(row(text(each["layer"]), stacks([_segments(each[column], full_bar) for column in columns]), value))
    if others:
        total = sum(sum(each["bytes"].values()) for each in others)
        rows.append(f'<p class="note">{len(others):,} smaller layers together: {size(total)}</p>')
    return "".join(rows)


def split_largest(
    layers: list[dict[str, Any]], measure: Callable[[dict[str, Any]], float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ``MAX_LAYER_ROWS`` layers of the largest ``measure``, and the others; both in their own order."""
    order = sorted(range(len(layers)), key=lambda k: -measure(layers[k]))
    return [layers[k] for k in sorted(order[:MAX_LAYER_ROWS])], [layers[k] for k in sorted(order[MAX_LAYER_ROWS:])]
