"""The sections about bytes: original and stored sizes of the checkpoint, by role and by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ckpt8.cli.show.html.bars import Stack, key, row, stacks
from ckpt8.cli.show.html.text import text
from ckpt8.core.text import percent, size
from ckpt8.inspecting.manifest_facts import ROLE_WORDS

MOST_LAYERS = 80
"""So many layers have a row of their own."""


def size_sections(facts: dict[str, Any], layers: list[dict[str, Any]]) -> str:
    """The sections about bytes, as markup."""
    stored = facts["kind"] == "ckpt8"
    present = {each["role"] for each in facts["roles"]}
    colours = key([(role, words) for role, words in ROLE_WORDS.items() if role in present])
    both = '<p class="soft">Of two bars the faint one is the original, the other what is stored.</p>' if stored else ""
    return (
        f'<section id="sizes"><h2>Where the bytes are</h2>{both}{colours}{_whole(facts)}'
        f'<h3>By role</h3><div id="roles">{_by_role(facts)}</div>'
        f'<h3>By layer</h3><div id="layers">{_by_layer(layers, stored)}</div></section>'
    )


def _stack(sizes: Mapping[str, int], whole: int) -> Stack:
    return [
        (role, sizes[role] / max(whole, 1), f"{words}: {size(sizes[role])}")
        for role, words in ROLE_WORDS.items()
        if sizes.get(role)
    ]


def _whole(facts: dict[str, Any]) -> str:
    """The checkpoint as a bar, and its compressed or predicted sizes."""
    original, stored = Counter[str](), Counter[str]()
    for each in facts["roles"]:
        original[each["role"]] += each["bytes"]
        stored[each["role"]] += each.get("stored_bytes", 0)
    whole = max(facts["bytes"], sum(original.values()))
    rows = [row("original", stacks([_stack(original, whole)]), size(facts["bytes"]))]
    if facts["kind"] == "ckpt8":
        overhead = facts["overhead_bytes"]
        stack = [*_stack(stored, whole), ("total", max(overhead, 0) / max(whole, 1), f"container: {size(overhead)}")]
        figures = f"{size(facts['stored_bytes'])} <small>{facts['ratio']:.2f}x</small>"
        rows.append(row(f"preset {text(facts['preset'])}", stacks([stack]), figures))
    else:
        for preset, predicted in facts["predicted"].items():
            stack = [("total", min(1.0, predicted["bytes"] / max(whole, 1)), f"predicted: {size(predicted['bytes'])}")]
            figures = f"{size(predicted['bytes'])} <small>{predicted['ratio']:.2f}x</small>"
            rows.append(row(f"preset {text(preset)}, predicted", stacks([stack]), figures))
    return "".join(rows)


def _by_role(facts: dict[str, Any]) -> str:
    whole = max((each["bytes"] for each in facts["roles"]), default=1)
    rows = []
    for each in sorted(facts["roles"], key=lambda each: list(ROLE_WORDS).index(each["role"])):
        role = each["role"]
        what = (each.get("codec") or each["dtype"]).replace("signed=False, ", "")
        name = f'{text(ROLE_WORDS[role])} <span class="soft">{text(what)}</span>'
        bars = [_stack({role: each["bytes"]}, whole)]
        value = f"{size(each['bytes'])} <small>{percent(each['bytes'], facts['bytes'])}</small>"
        if "stored_bytes" in each:
            bars.append(_stack({role: each["stored_bytes"]}, whole))
            value = f"{size(each['bytes'])} → {size(each['stored_bytes'])}"
        rows.append(row(name, stacks(bars, faint_first=len(bars) > 1), value))
    return "".join(rows)


def _by_layer(layers: list[dict[str, Any]], stored: bool) -> str:
    rows = []
    shown, others = largest(layers, lambda each: sum(each["bytes"].values()))
    whole = max((sum(each["bytes"].values()) for each in shown), default=1)
    for each in shown:
        bars = [_stack(each["bytes"], whole)]
        total = sum(each["bytes"].values())
        value = f"{size(total)} <small>{each['weights']:,} weights</small>" if each["weights"] else size(total)
        if stored:
            bars.append(_stack(each["stored_bytes"], whole))
            value = f"{size(total)} → {size(sum(each['stored_bytes'].values()))}"
        rows.append(row(text(each["layer"]), stacks(bars, faint_first=stored), value))
    if others:
        total = sum(sum(each["bytes"].values()) for each in others)
        rows.append(f'<p class="note">{len(others):,} smaller layers together: {size(total)}</p>')
    return "".join(rows)


def largest(
    layers: list[dict[str, Any]], measure: Callable[[dict[str, Any]], float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ``MOST_LAYERS`` layers of the largest ``measure``, and the others; both in their own order."""
    order = sorted(range(len(layers)), key=lambda k: -measure(layers[k]))
    return [layers[k] for k in sorted(order[:MOST_LAYERS])], [layers[k] for k in sorted(order[MOST_LAYERS:])]
