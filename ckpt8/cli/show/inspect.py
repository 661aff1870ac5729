"""Shows the facts of ``inspect`` in a terminal, and the summary of ``compress``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from ckpt8.checkpoint.meaning.parameter_names import shown
from ckpt8.checkpoint.meaning.quantised_state import line as low_bit_line
from ckpt8.cli.show.overview import (
    base_line,
    optimizer_line,
    say,
    show_flags,
    show_hyperparameters,
    show_layers,
    show_origin,
    show_origins,
    show_roles,
)
from ckpt8.cli.show.steps import healing_line, show_optimizers, show_predictions, step_lines
from ckpt8.cli.show.tables import codec_text, number, shape_text, show_table
from ckpt8.container.manifest import DIRECTORY
from ckpt8.core.text import counted, differing_line, listed, printable, printable_tree, size
from ckpt8.inspecting.manifest_facts import FIGURE_WORDS

_RANKS = 16
"""Files of ranks that are listed; there may be a thousand."""

_ALARMING = 0.5
"""A report warns of a max |Δu| above this part of max |u|."""


def show(console: Console, facts: dict[str, Any]) -> None:
    """Print the facts of ``inspect``; escape unprintable characters of names."""
    facts = printable_tree(facts)
    if facts["kind"] == "ckpt8":
        _show_container(console, facts)
    else:
        _show_checkpoint(console, facts)
    if "readiness" in facts:
        from ckpt8.cli.show.readiness import show_readiness

        show_readiness(console, facts["readiness"], tensors="tensors" in facts)


def _show_container(console: Console, facts: dict[str, Any]) -> None:
    per_weight = f", {facts['bytes_per_weight']:.3f} bytes per weight" if facts["bytes_per_weight"] else ""
    say(console, facts["path"], "bold")
    say(console, f"ckpt8 {facts['format']}, {facts['asked']}")
    say(console, f"from {_origin(facts)}")
    if facts["base"] is not None:
        say(console, base_line(facts))
    show_origins(console, facts["origins"])
    say(console, f"{size(facts['bytes'])} -> {size(facts['stored_bytes'])}, {facts['ratio']:.2f}x{per_weight}")
    columns = ("role", "codec", "storages", "elements", "original", "stored", "ratio")
    rows = [
        (
            row["role"],
            codec_text(row["codec"]),
            f"{row['storages']:,}",
            f"{row['elements']:,}",
            size(row["bytes"]),
            size(row["stored_bytes"]),
            f"{row['bytes'] / row['stored_bytes']:.2f}x" if row["stored_bytes"] else "-",
        )
        for row in facts["roles"]
    ]
    show_table(console, columns, rows)
    for found in facts["low_bit"]:
        say(console, f"optimizer: {low_bit_line(found)}")
    show_layers(console, facts["layers"])
    show_flags(console, facts["flags"], facts["sample"])
    if facts["directory"] is not None:
        first = facts["members"] if facts["ranks"] is None else facts["members"][:_RANKS]
        members = [(m["path"], m["format"], size(m["bytes"]), size(m["stored_bytes"])) for m in first]
        show_table(console, ("member", "format", "original", "stored"), members)
        if len(first) < len(facts["members"]):
            say(console, f"and {len(facts['members']) - len(first):,} more")
    _show_errors(console, facts["errors"], facts["steps"], facts["measured_from"])
    _show_worst(console, facts["worst"])
    _show_kept(console, facts, facts["lossless"])
    _show_unrecognised(console, facts["unrecognised"])
    if "tensors" in facts:
        tensors = [
            (
                t["name"],
                t["role"],
                _shape(t),
                codec_text(t["codec"]),
                size(t["stored_bytes"]),
                _error(t["error"]),
            )
            for t in facts["tensors"]
        ]
        show_table(console, ("tensor", "role", "shape", "codec", "stored", "error"), tensors)
        _show_parameters(console, facts["parameters"])


def _origin(facts: dict[str, Any]) -> str:
    if facts["ranks"] is not None:
        beside = f"; no part of it: {listed(facts['ranks']['strays'])}" if facts["ranks"]["strays"] else ""
        return f"ranks of torch.distributed.checkpoint, {counted(facts['ranks']['files'], 'file')}{beside}"
    if facts["directory"] is not None:
        return f"{facts['directory']}/ ({len(facts['members'])} members)"
    return ", ".join(f"{m['path']} ({m['format']})" for m in facts["members"])


def _show_errors(
    console: Console, errors: dict[str, Any], steps: dict[str, Any] | None, source: dict[str, Any] | None = None
) -> None:
    """Print the errors, also in steps; ``source`` is the original of ``--against``, if there is one."""
    lines = []
    if weight := errors["weight"]:
        lines.append(
            f"weights       max relative error {number(weight['max_relative'])}, "
            f"mean {number(weight['mean_relative'])}, max {weight['max_bf16_ulp']:.5f} bf16 ULP"
        )
    if weight := errors["lattice"]:
        lines.append(f"weights       SNR {number(weight['snr_db'])} dB, max error {number(weight['max_distance'])}")
    lines += [
        f"{role}       NMSE {number(error['nmse'])} (SNR {number(error['snr_db'])} dB){_scaled(error['max_scaled'])}"
        for role in ("moment1", "moment2")
        if (error := errors[role])
    ]
    for kind, words in FIGURE_WORDS.items():
        if update := errors[kind]:
            lines.append(
                f"{words}  NMSE {number(update['nmse'])}, max |Δu| {number(update['max_error'])} "
                f"where max |u| is {number(update['max_update'])}, {counted(update['parameters'], 'parameter')}"
            )
            bounded = steps is not None and steps["steps"] is not None
            if not bounded and update["max_error"] > _ALARMING * update["max_update"]:
                lines.append(
                    "              some updates change as much as they are large; --max-update-error bounds that"
                )
    if heals := healing_line(errors["update"], steps):
        lines.append(f"              {heals}")
    lines += [
        f"update        unknown for {counted(count, 'parameter')}: {reason}"
        for reason, count in errors["update_reasons"].items()
    ]
    lines += step_lines(steps) if steps else []
    if source and source["differing"]:
        lines.append(differing_line(source))
    if lines:
        console.print()
        say(console, f"Measured error, from {source['path']}" if source else "Measured error", "bold")
        for line in lines:
            say(console, line)
        show_optimizers(console, steps)


def _scaled(error: float | None) -> str:
    return "" if error is None else f", max error {number(error)} of the group's scale"


def _show_worst(console: Console, worst: dict[str, list[dict[str, Any]]]) -> None:
    headings = {
        "update": ("largest update error", {"max |Δu|": "max_error", "max |u|": "max_update", "NMSE": "nmse"}),
        "weight": ("largest mean weight error", {"mean relative": "mean_relative", "max relative": "max_relative"}),
        "lattice": ("lowest SNR of weights", {"SNR dB": "snr_db", "max |Δw|": "max_distance"}),
    }
    for kind, (title, columns) in headings.items():
        if rows := worst[kind]:
            cells = [(_with_figure(row), *(number(row[key]) for key in columns.values())) for row in rows]
            show_table(console, (title, *columns), cells)


def _with_figure(row: dict[str, Any]) -> str:
    """The name of a parameter, and what its figure is unless that is in update space."""
    return shown(row) + (f" ({FIGURE_WORDS['replayed']})" if row.get("figure") == "replayed" else "")


def _show_kept(console: Console, facts: dict[str, Any], lossless: list[dict[str, Any]]) -> None:
    """Print why storages are lossless, and why the codecs of a budget do not keep others."""
    kinds = {"kept lossless because": lossless, "under no budget because": (facts["steps"] or {}).get("fallbacks", [])}
    for title, reasons in kinds.items():
        if reasons:
            rows = [(row["reason"], f"{row['count']:,}", row["names"][0]) for row in reasons]
            show_table(console, (title, "storages", "such as"), rows)


def _show_unrecognised(console: Console, found: list[dict[str, Any]]) -> None:
    if found:
        rows = [(f"{row['tensors']:,}", size(row["bytes"]), f"--rule '{row['rule']}'") for row in found]
        show_table(console, ("lossless tensors of unknown role", "original", "compress them with"), rows)


def _show_parameters(console: Console, parameters: Sequence[dict[str, Any]]) -> None:
    rules = [(shown(row), row["rule"] or {"kind": "unknown", "step": 0}) for row in parameters]
    rows = [(name, rule["kind"], f"{rule['step']:,}" if rule["step"] else "-") for name, rule in rules]
    if rows:
        show_table(console, ("parameter", "rule", "step"), rows)


def _shape(tensor: dict[str, Any]) -> str:
    """The shape of a tensor, and of a slice also that of the whole."""
    shape, whole = tensor["shape"], tensor["whole_shape"]
    return shape_text(shape) if shape == whole else f"{shape_text(shape)} of {shape_text(whole)}"


def _error(error: dict[str, Any] | None) -> str:
    if error is None:
        return "-"
    if "max_relative" in error:
        return f"max rel {number(error['max_relative'])}"
    return f"NMSE {number(error['nmse'])}"


def _show_checkpoint(console: Console, facts: dict[str, Any]) -> None:
    say(console, facts["path"], "bold")
    say(
        console,
        f"{facts['format']}, {size(facts['bytes'])}, "
        f"{facts['tensor_count']:,} tensors in {facts['storages']:,} storages",
    )
    show_origin(console, facts)
    for row in facts["optimizer"]:
        say(console, optimizer_line(row))
    show_hyperparameters(console, facts["hyperparameters"])
    for found in facts["low_bit"]:
        say(console, f"optimizer: {low_bit_line(found)}")
    show_roles(console, facts["roles"], facts["bytes"])
    show_layers(console, facts["layers"])
    show_flags(console, facts["flags"], facts["sample"])
    console.print()
    say(console, "What ckpt8 compress would make of it, from a sample", "bold")
    show_predictions(console, facts)
    if facts["format"] == DIRECTORY:
        members = [(m["path"], m["format"], size(m["bytes"]), m["reason"] or "") for m in facts["members"]]
        show_table(console, ("member", "format", "original", "reason"), members)
    _show_unrecognised(console, facts["unrecognised"])
    if "tensors" in facts:
        cells = [
            (t["name"], t["role"], t["dtype"], _shape(t), codec_text(t["codec"]), t["reason"] or "")
            for t in facts["tensors"]
        ]
        show_table(console, ("tensor", "role", "dtype", "shape", "codec", "reason"), cells)
        _show_parameters(console, facts["parameters"])


def summary(console: Console, facts: dict[str, Any], target: str, seconds: float, total_seconds: float) -> None:
    """Print the result of ``compress``: sizes, speed, errors, and the reasons for lossless tensors.

    ``seconds`` took the compression alone; a person waited ``total_seconds``.
    """
    facts, target = printable_tree(facts), printable(target)
    rate = facts["bytes"] / max(seconds, 1e-9)
    console.print(f"[bold]{escape(target)}[/]", soft_wrap=True)
    console.print(
        f"{size(facts['bytes'])} -> {size(facts['stored_bytes'])}, [bold]{facts['ratio']:.2f}x[/] "
        f"in {total_seconds:.2f} s (compressed in {seconds:.2f} s, {size(rate)}/s)"
    )
    _show_errors(console, facts["errors"], facts["steps"])
    refused = [row for row in facts["lossless"] if row["reason"] not in ("small", "buffer")]
    _show_kept(console, facts, refused)
    _show_unrecognised(console, facts["unrecognised"])
