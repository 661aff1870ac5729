"""Shows the facts of ``inspect`` in a terminal, and the summary of ``compress``.

Both begin with the verdict: sizes, what a resumed run will notice, and warnings. All else that was measured is shown
with ``--verbose``. The overview then has the sizes, settings and red flags of a checkpoint, in a terminal of any width.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from ckpt8.checkpoint.meaning.optimizer_state import line as low_bit_line
from ckpt8.checkpoint.meaning.parameter_names import shown
from ckpt8.cli.guard import is_verbose, most
from ckpt8.cli.show.tables import (
    HANG,
    NO_TENSORS,
    Share,
    bars,
    codec_text,
    error_line,
    healing_line,
    number,
    say,
    shape_text,
    show_optimizers,
    show_predictions,
    show_table,
    step_lines,
    warnings_of,
)
from ckpt8.container.facts import FILE_ROLE, SKELETON_ROLE
from ckpt8.container.manifest import DIRECTORY
from ckpt8.container.steps import NO_BUDGET
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import SMALL_NUMEL
from ckpt8.core.text import counted, differing_line, listed, percent, printable, printable_tree, size
from ckpt8.inspecting.container import FOREIGN
from ckpt8.inspecting.facts import FIGURE_WORDS, ROLE_WORDS

_MOST_GROUPS = 16
_MOST_ROWS = 4

FLAG_TITLES = {
    FOREIGN: "classes and functions that torch.load(weights_only=True) refuses",
    "nan": "NaN",
    "inf": "Inf",
    "negative_moment2": "second moments below zero",
    "zero_moment": "moments that are all zero",
    "dead_rows": "dead rows: no moment that is not zero",
    "bf16_in_fp32": "fp32 that holds bf16 values",
    "stored_twice": "the same weights stored more than once",
    "moment2_fp16_zero": "second moments that fp16 would flush to zero",
    "fp16_scales": "moments that FlashOptim's fp16 scales would lose",
}
_LOST_IN_FP16 = ("moment2_fp16_zero", "fp16_scales")
"""Kinds that only hurt if somebody stores the checkpoint in fp16: shown with ``--readiness``."""

_ALWAYS_KEPT = ("small", "buffer")
"""Why every preset keeps a storage: no news."""

_TRAINED, _WIDE = ("weight", "moment1", "moment2"), ("float64", "complex64", "complex128")

_SMALL, _SMALL_SHARE = "small tensors", 0.01
"""Rows of lossless tensors with less than this share of the bytes are shown as one, beside lossy ones small tensors."""

_PARTS = {**ROLE_WORDS, SKELETON_ROLE: "structure", FILE_ROLE: "other files"}

_SHOWN_OPTIONS = ("lr", "betas", "momentum", "dampening", "nesterov", "eps", "weight_decay", "amsgrad")
_NUMBER = re.compile(r"(.*?)(\d+)")


def origin_words(facts: Mapping[str, Any], unknown: str, *more: str) -> str:
    """The framework, step and epoch, if known."""
    version = f" {facts['version']}" if facts.get("version") else ""
    words = (
        f"{facts['framework']}{version}" if facts["framework"] else unknown,
        f"step {facts['step']:,}" if facts.get("step") is not None else "",
        f"epoch {facts['epoch']:.4g}" if facts.get("epoch") is not None else "",
    )
    return ", ".join(filter(None, (*words, *more)))


def _show_origins(console: Console, origins: Iterable[Mapping[str, Any]]) -> None:
    """Print the program, step and epoch of every checkpoint in a directory, if they are of several programs."""
    say(console, *(f"{row['path']}: {origin_words(row, 'of unknown origin')}" for row in origins), indent="  ")


def base_line(facts: Mapping[str, Any]) -> str:
    """What a delta says of its base."""
    base, differences = facts["base"], counted(facts["differences"], "storage")
    return f"delta to {base['path']}, {counted(base['links'], 'file')} below it, {differences} stored as differences"


def optimizer_line(row: Mapping[str, Any]) -> str:
    """The parameters of one update rule, and its step."""
    step = f" at step {row['step']:,}" if row["step"] else ""
    return f"optimizer state of {counted(row['parameters'], 'parameter')}, update rule {row['rule']}{step}"


def show_hyperparameters(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the options of every optimizer: first those that all its groups share, then each group's own."""
    optimizers = grouped((row["optimizer"], row) for row in rows)
    for optimizer, groups in optimizers.items():
        first, *others = (group["options"] for group in groups)
        shared = {
            key: first[key]
            for key in _SHOWN_OPTIONS
            if key in first and all(key in option and option[key] == first[key] for option in others)
        }
        lines = [": ".join(filter(None, (optimizer if len(optimizers) > 1 else "", _listed(shared))))] if shared else []
        lines += [
            f"{_listed(own)}: {counted(group['parameters'], 'parameter')}"
            for group in groups[: most(_MOST_ROWS)]
            if (
                own := {key: group["options"][key] for key in _SHOWN_OPTIONS if key in group["options"].keys() - shared}
            )
        ]
        lines += [f"and {len(groups) - _MOST_ROWS:,} more groups"] if len(groups) > most(_MOST_ROWS) else []
        say(console, *lines, indent="  ")


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {_value(value)}" for key, value in options.items() if value is not False and value is not None
    )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_value, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show_layers(console: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    """Print the bytes of each layer as bars. Consecutive layers of equal sizes share a line."""
    joined = list(_joined(groups))
    kept = (
        sorted(joined, key=lambda row: -row["bytes"])[: _MOST_GROUPS - 1]
        if len(joined) > most(_MOST_GROUPS)
        else joined
    )
    rows = [row for row in joined if row in kept]
    if rest := [row["bytes"] for row in joined if row not in kept]:
        rows.append({"label": counted(len(rest), "smaller group"), "bytes": sum(rest)})
    _show_bars(
        console, "Bytes by layer, with the state of its parameters", rows, sum(group["bytes"] for group in groups)
    )


def _show_bars(
    console: Console,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    total: int,
    figures: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda _: (),
) -> None:
    """Print {label, bytes} as bars, each with its ``figures``, size and share of the ``total``."""
    shares = [
        Share(
            row["label"],
            row["bytes"] / max(total, 1),
            (*figures(row), size(row["bytes"]), percent(row["bytes"], max(total, 1))),
        )
        for row in rows
    ]
    if shares:
        console.print()
        say(console, title, style="bold")
        console.print(
            Text("\n".join(bars(shares, console.width, ascii_only=console.options.ascii_only))), soft_wrap=True
        )


def _joined(groups: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows {label, bytes}. Neighbours with consecutive numbers and equal sizes become one."""
    for _, items in groupby(enumerate(groups), key=_stack):
        run = [group for _, group in items]
        label, last = run[0]["group"], _NUMBER.fullmatch(run[-1]["group"])
        if len(run) > 1 and last is not None:
            label = f"{label}-{last[2]} ({len(run)} alike)"
        yield {"label": label, "bytes": sum(group["bytes"] for group in run)}


def _stack(item: tuple[int, Mapping[str, Any]]) -> object:
    """A key that a numbered group shares with the next number of equal sizes in the next place."""
    place, group = item
    name = _NUMBER.fullmatch(group["group"])
    if name is None or len(name[2]) > 9:
        return place
    return name[1], int(name[2]) - place, group["roles"]


def show_flags(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the red flags by kind, the worst tensors of each, and how much was read to find them; else a line."""
    flags = shown_flags(facts)
    seen = looked_at(facts["sample"], flags)
    console.print()
    if not flags:
        say(console, f"Red flags: {seen}")
        return
    say(console, "Red flags", style="bold")
    say(console, seen)
    for kind, title, extent, lines in flags_by_kind(flags, most(3)):
        say(console, f"{title}: {extent}", style="yellow" if kind in _LOST_IN_FP16 else "red", indent="  ")
        say(console, *lines, indent="    ")


def shown_flags(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The red flags of a report: what fp16 would lose is one only where the readiness for it was asked for."""
    return [flag for flag in facts["flags"] if "readiness" in facts or flag["kind"] not in _LOST_IN_FP16]


def flags_by_kind(flags: Sequence[Mapping[str, Any]], most: int) -> Iterator[tuple[str, str, str, list[str]]]:
    """Every kind that occurs, its title, its extent, and lines about its first flags, at most ``most``."""
    for kind, title in FLAG_TITLES.items():
        if of_kind := [flag for flag in flags if flag["kind"] == kind]:
            lines = []
            for flag in of_kind[:most]:
                names = flag.get("tensors") or [flag["tensor"]]
                more = f" and {len(names) - most:,} more" if len(names) > most else ""
                lines.append(f"{' = '.join(names[:most])}{more}: {flag['message']}")
            lines += [f"and {len(of_kind) - most:,} more"] if len(of_kind) > most else []
            yield kind, title, _extent(kind, of_kind), lines


def _extent(kind: str, flags: Sequence[Mapping[str, Any]]) -> str:
    """The number of tensors with flags of this kind, and the share of lost values."""
    where = counted(len(flags), {"stored_twice": "time", FOREIGN: "file", "dead_rows": "parameter"}.get(kind, "tensor"))
    if kind not in _LOST_IN_FP16:
        return where
    share = percent(sum(flag["count"] for flag in flags) / sum(flag["of"] for flag in flags))
    return f"{share} of the {'groups' if kind == 'fp16_scales' else 'values'} in {where}"


def looked_at(sample: Mapping[str, Any], flags: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on how much ``inspect`` read to find ``flags`` and, unless there are some, that there are none."""
    count, total = sample["elements"], sample["of"]
    if not total:
        return "the checkpoint has no floating-point tensors to look at"
    if not count:
        return f"not checked: inspect did not read the {counted(total, 'element')}; --full reads them"
    verb = "looked at" if flags else "none in"
    if sample["full"]:
        return f"{verb} all {counted(total, 'element')}"
    return f"{verb} {percent(count / total)} of {counted(total, 'element')}; --full reads all"


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
    say(console, facts["path"], style="bold")
    say(console, f"{_sizes(facts)}, {facts['asked']}")
    _show_verdict(console, facts)
    say(console, f"made from {_origin(facts)}")
    _show_origins(console, facts["origins"])
    if is_verbose():
        per_weight = f", {facts['bytes_per_weight']:.3f} bytes per weight" if facts["bytes_per_weight"] else ""
        say(console, f"format {facts['format']}{per_weight}")
    _show_roles(console, facts)
    _show_contents(console, facts)
    if facts["directory"] is not None:
        # There may be a thousand files of ranks.
        first = facts["members"] if facts["ranks"] is None else facts["members"][: most(16)]
        show_table(
            console,
            ("member", "format", "original", "stored"),
            [(m["path"], m["format"], size(m["bytes"]), size(m["stored_bytes"])) for m in first],
        )
        if len(first) < len(facts["members"]):
            say(console, f"and {len(facts['members']) - len(first):,} more")
    if is_verbose():
        _show_errors(console, facts)
        _show_worst(console, facts["worst"])
        _show_kept(console, facts)
    _show_tensors(
        console,
        facts,
        {
            "shape": _shape,
            "codec": lambda tensor: _codec(tensor["codec"]),
            "stored": lambda tensor: size(tensor["stored_bytes"]),
            "error": lambda tensor: _error(tensor["error"]),
        },
    )


def _sizes(facts: Mapping[str, Any]) -> str:
    return f"{size(facts['bytes'])} -> {size(facts['stored_bytes'])}, {facts['ratio']:.2f}x"


def _show_verdict(console: Console, facts: dict[str, Any]) -> None:
    """Print what a resumed run will notice, the base of a delta, and what nobody should miss."""
    source = facts["measured_from"]
    measured = f", measured against {source['path']}" if source else ""
    say(console, f"error{measured}: {error_line(facts['steps'])}")
    say(console, *warnings_of(facts["steps"]), indent="  ")
    say(console, *([differing_line(source)] if source and source["differing"] else []), style="red")
    say(console, *([] if facts["base"] is None else [base_line(facts)]))
    say(console, *cautions(facts), style="yellow")


def cautions(facts: Mapping[str, Any]) -> Iterator[str]:
    """Large errors of updates, what is lossless against the preset, and tensors of unknown role."""
    steps = facts["steps"] or {}
    is_bounded = None not in (steps.get("budget"), steps.get("steps"))
    updates = [facts["errors"][kind] for kind in FIGURE_WORDS if facts["errors"][kind]]
    if not is_bounded and any(update["max_error"] > update["max_update"] / 2 for update in updates):
        yield "some updates change as much as they are large; --max-update-error bounds that"
    yield from _first([_kept_line(row) for row in facts["lossless"] if row["reason"] not in _ALWAYS_KEPT])
    yield from _first(_unrecognised(facts))


def _low_bit_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The optimizer state in few bits, which no preset makes smaller."""
    return (f"optimizer: {low_bit_line(state)}" for state in facts["low_bit"])


def _kept_line(row: Mapping[str, Any]) -> str:
    name, reason = row["names"][0], row["reason"].removeprefix(NO_BUDGET)
    which = f"{name} is" if row["count"] == 1 else f"{row['count']:,} storages such as {name} are"
    return f"{which} kept lossless: {reason}"


def _unrecognised(facts: Mapping[str, Any]) -> list[str]:
    """What would compress tensors of unknown role."""
    return [
        f"{counted(row['tensors'], 'tensor')} of unknown role, {size(row['bytes'])}, kept lossless; "
        f"to compress: --rule {shlex.quote(row['rule'])}"
        for row in facts["unrecognised"]
    ]


def _wide_line(facts: Mapping[str, Any]) -> list[str]:
    """Why weights and moments of wide types stay lossless, where they count."""
    wide = [row for row in facts["roles"] if row["role"] in _TRAINED and row["dtype"] in _WIDE]
    nbytes = sum(row["bytes"] for row in wide)
    types = listed(sorted({row["dtype"] for row in wide}))
    line = f"{size(nbytes)} of weights and moments in {types}, kept lossless: presets change float32 and bfloat16 alone"
    return [line] if nbytes > facts["bytes"] / 100 else []


def _first(lines: Sequence[str]) -> list[str]:
    left = len(lines) - most(_MOST_ROWS)
    return [*lines[: most(_MOST_ROWS)], *([f"and {left:,} more"] if left > 0 else [])]


def _show_roles(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the sizes by role and codec; unless ``--verbose``, small lossless tensors in one row."""
    if is_verbose():
        rows = [
            (
                _PARTS[row["role"]],
                codec_text(row["codec"]),
                f"{row['storages']:,}",
                f"{row['elements']:,}",
                *_bytes(row["bytes"], row["stored_bytes"]),
            )
            for row in facts["roles"]
        ]
        show_table(console, ("role", "codec", "storages", "elements", "original", "stored", "ratio"), rows)
        return
    order, sizes = list(_PARTS), dict[tuple[str, str], Counter[str]]()
    lossy = {row["role"] for row in facts["roles"] if _codec(row["codec"]) != _EXACT}
    for row in sorted(facts["roles"], key=lambda row: order.index(row["role"])):
        part, codec = _PARTS[row["role"]], _codec(row["codec"])
        if codec == _EXACT and row["role"] not in (SKELETON_ROLE, FILE_ROLE):
            are_small = row["role"] in lossy and row["elements"] < SMALL_NUMEL * row["storages"]
            part = _SMALL if are_small or row["bytes"] < _SMALL_SHARE * facts["bytes"] else part
        sizes.setdefault((part, codec), Counter()).update({key: row[key] for key in ("bytes", "stored_bytes")})
    last = sorted(sizes.items(), key=lambda item: item[0][0] in (_SMALL, _PARTS[SKELETON_ROLE], _PARTS[FILE_ROLE]))
    show_table(
        console,
        ("role", "codec", "original", "stored", "ratio"),
        [(*key, *_bytes(total["bytes"], total["stored_bytes"])) for key, total in last],
    )


def _bytes(nbytes: int, stored: int) -> tuple[str, str, str]:
    return size(nbytes), size(stored), f"{nbytes / stored:.2f}x" if stored else "-"


_EXACT = "kept exactly"


def _codec(name: str) -> str:
    """A codec in a word; with ``--verbose`` its id and settings."""
    bare = name.partition("/")[0]
    return codec_text(name) if is_verbose() else _EXACT if bare == "lossless" else bare


def _show_contents(console: Console, facts: dict[str, Any]) -> None:
    """Print the low-bit optimizers, the roles of a checkpoint, the layers and the red flags."""
    say(console, *_low_bit_lines(facts))
    if facts["kind"] != "ckpt8":
        rows = [{"label": f"{_PARTS[row['role']]} {row['dtype']}", **row} for row in facts["roles"]]
        _show_bars(console, "Elements and bytes by role", rows, facts["bytes"], lambda row: (f"{row['elements']:,}",))
    show_layers(console, facts["layers"])
    show_flags(console, facts)


def _origin(facts: dict[str, Any]) -> str:
    if facts["ranks"] is not None:
        beside = f"; no part of it: {listed(facts['ranks']['strays'])}" if facts["ranks"]["strays"] else ""
        return f"ranks of torch.distributed.checkpoint, {counted(facts['ranks']['files'], 'file')}{beside}"
    if facts["directory"] is not None:
        return f"{facts['directory']}/ ({len(facts['members'])} members)"
    return ", ".join(f"{m['path']} ({m['format']})" for m in facts["members"])


def _show_errors(console: Console, facts: Mapping[str, Any]) -> None:
    """Print every figure of the error, those in steps as well."""
    errors, steps, lines = facts["errors"], facts["steps"], []
    if weight := errors["weight"]:
        lines.append(
            f"weights       max relative error {number(weight['max_relative'])}, "
            f"mean {number(weight['mean_relative'])}, max {weight['max_bf16_ulp']:.5f} bf16 ULP"
        )
    if weight := errors["lattice"]:
        lines.append(f"weights       SNR {number(weight['snr_db'])} dB, max error {number(weight['max_distance'])}")
    for role, words in (("moment1", "1st moments"), ("moment2", "2nd moments")):
        if error := errors[role]:
            most = error["max_scaled"]
            scaled = "" if most is None else f", max error {number(most)} of the group's scale"
            lines.append(f"{words}   NMSE {number(error['nmse'])} (SNR {number(error['snr_db'])} dB){scaled}")
    for kind, words in FIGURE_WORDS.items():
        if update := errors[kind]:
            lines.append(
                f"{words}  NMSE {number(update['nmse'])}, max |Δu| {number(update['max_error'])} "
                f"where max |u| is {number(update['max_update'])}, {counted(update['parameters'], 'parameter')}"
            )
    heals = healing_line(errors["update"], steps)
    lines += [
        *([f"              {heals}"] if heals else []),
        *(
            f"update        unknown for {counted(count, 'parameter')}: {reason}"
            for reason, count in errors["update_reasons"].items()
        ),
        *(step_lines(steps) if steps else []),
    ]
    if lines:
        console.print()
        say(console, "Measured error, over all elements together", style="bold")
        say(console, *lines, hang=HANG)
        show_optimizers(console, steps)


def _show_worst(console: Console, worst: dict[str, list[dict[str, Any]]]) -> None:
    for kind, (title, columns) in {
        "update": ("largest update error", {"max |Δu|": "max_error", "max |u|": "max_update", "NMSE": "nmse"}),
        "weight": ("largest mean weight error", {"mean relative": "mean_relative", "max relative": "max_relative"}),
        "lattice": ("lowest SNR of weights", {"SNR dB": "snr_db", "max |Δw|": "max_distance"}),
    }.items():
        if rows := worst[kind]:
            # A figure that is not in update space is named.
            kinds = [f" ({FIGURE_WORDS['replayed']})" if row.get("figure") == "replayed" else "" for row in rows]
            cells = [
                (shown(row) + kind, *(number(row[key]) for key in columns.values()))
                for row, kind in zip(rows, kinds, strict=True)
            ]
            show_table(console, (title, *columns), cells)


def _show_kept(console: Console, facts: Mapping[str, Any]) -> None:
    """Print why storages are lossless, and why the codecs of a budget do not keep others."""
    for title, reasons in (
        ("kept lossless because", facts["lossless"]),
        ("under no budget because", (facts["steps"] or {}).get("fallbacks", [])),
    ):
        if rows := [(row["reason"], f"{row['count']:,}", row["names"][0]) for row in reasons]:
            show_table(console, (title, "storages", "such as"), rows)


def _show_tensors(
    console: Console, facts: dict[str, Any], columns: Mapping[str, Callable[[dict[str, Any]], str]]
) -> None:
    """Print every tensor with more ``columns``, and the rule of every parameter, if ``facts`` have them."""
    if "tensors" not in facts:
        return
    cells = (
        (tensor["name"], tensor["role"], *(cell(tensor) for cell in columns.values())) for tensor in facts["tensors"]
    )
    show_table(console, ("tensor", "role", *columns), cells)
    rules = [(shown(row), row["rule"] or {"kind": "unknown", "step": 0}) for row in facts["parameters"]]
    if rows := [(name, rule["kind"], f"{rule['step']:,}" if rule["step"] else "-") for name, rule in rules]:
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
    parameters = sum(group["parameters"] for group in facts["layers"])
    origin = origin_words(facts, "", counted(parameters, "parameter") if parameters else "")
    say(console, facts["path"], style="bold")
    say(console, ", ".join(filter(None, (facts["format"], size(facts["bytes"]), origin))))
    if facts["run"]:
        several = f"the folder of a run ({listed(facts['run'], 3)}), taken as one checkpoint here"
        say(console, f"{several}; ckpt8 runs {facts['path']} lists them, and inspect takes one of them", style="yellow")
    _show_origins(console, facts["origins"])
    console.print()
    if facts["predicted"]:
        say(console, "What ckpt8 compress would make of it: size, error in optimizer steps, loss drift", style="bold")
        show_predictions(console, facts)
    else:
        say(console, NO_TENSORS)
    say(console, *_wide_line(facts), *_first(_unrecognised(facts)), style="yellow")
    if facts["optimizer"] or facts["hyperparameters"]:
        console.print()
        say(console, *(map(optimizer_line, facts["optimizer"]) if facts["optimizer"] else ["optimizer settings"]))
        show_hyperparameters(console, facts["hyperparameters"])
    _show_contents(console, facts)
    if facts["format"] == DIRECTORY:
        rows = [(m["path"], m["format"], size(m["bytes"]), m["reason"] or "") for m in facts["members"]]
        shown = 4 if any(reason for *_, reason in rows) else 3
        show_table(console, ("member", "format", "original", "reason")[:shown], [row[:shown] for row in rows])
    _show_tensors(
        console,
        facts,
        {
            "dtype": lambda tensor: tensor["dtype"],
            "shape": _shape,
            "codec": lambda tensor: _codec(tensor["codec"]),
            "reason": lambda tensor: tensor["reason"] or "",
        },
    )


def summary(
    console: Console, facts: dict[str, Any], source: str, target: str, seconds: float, *, whole: float, kept: bool
) -> None:
    """Print the result of ``compress``: the file, its sizes, what a resumed run will notice, and what to do next.

    ``seconds`` took the compression alone, a person waited the ``whole`` time. ``kept``: the source stays.
    """
    facts, source, target = printable_tree(facts), printable(source), printable(target)
    console.print(Text(target, style="bold"), soft_wrap=True)
    say(console, f"{_sizes(facts)}, {facts['asked']}, in {whole:.2f} s")
    _show_verdict(console, facts)
    say(console, *_low_bit_lines(facts))
    then = f"verify {shlex.quote(target)} --against {shlex.quote(source)}" if kept else f"restore {shlex.quote(target)}"
    console.print(Text(f"next: ckpt8 {then}"), soft_wrap=True)
    if is_verbose():
        speed = facts["bytes"] / max(seconds, 1e-9)
        say(console, f"compressed in {seconds:.2f} s, {size(speed)}/s")
        _show_errors(console, facts)
        _show_kept(console, facts)
