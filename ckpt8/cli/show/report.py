"""The report of ``inspect --html``: one page that loads nothing, runs nothing and is the same for the same facts.

It also holds its facts as JSON, in the element ``ckpt8-report``: ``facts`` as ``inspect --json`` prints them,
``distributions`` (see ``ckpt8.inspecting.distributions.Gathered``) and the ``replay``, if given.

Its sections: sizes in total, by role and by layer; the error in steps and what is predicted; the error of lossy storage
by layer, and the worst tensors with their histograms; how values and codes are distributed; the steps of ``verify
--resume-steps``.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt8 import __version__
from ckpt8.checkpoint.meaning.parameter_names import shown
from ckpt8.cli.show.charts import (
    TWO_BARS,
    LogAxis,
    Page,
    Stack,
    by_step,
    charts,
    code_usage,
    document,
    figure,
    legend,
    magnitudes,
    row,
    section,
    stacks,
    text,
    tiles,
)
from ckpt8.cli.show.inspect import base_line, flags_by_kind, looked_at, optimizer_line
from ckpt8.cli.show.tables import (
    codec_text,
    drift_text,
    figure_phrases,
    healing_line,
    number,
    option_of,
    outside_phrases,
    part_phrases,
    rate_phrases,
)
from ckpt8.container.bases import files_of
from ckpt8.container.joined import Stored
from ckpt8.container.steps import interval
from ckpt8.core.errors import InputError, require
from ckpt8.core.files.atomic import refuse_source
from ckpt8.core.files.source_file import reading, refuse_url
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.text import counted, differing_line, percent, size
from ckpt8.inspecting.distributions import checkpoint_distributions, container_distributions
from ckpt8.inspecting.facts import FIGURE_WORDS, ROLE_WORDS

_CHARTS = {
    "weight": ("Weights", "magnitude of a weight"),
    "moment1": ("First moments", "magnitude of a first moment"),
    "moment2": ("Second moments", "second moment"),
    "update": ("Updates u", "magnitude of an update u"),
}


def value_section(distributions: dict[str, Any]) -> str:
    """Histograms of weights, moments and updates; empty if there are none."""
    pairs = distributions["histograms"]
    if not pairs:
        return ""
    before, after = distributions["before"], distributions["after"]
    sides = f"Before: {before}. After: {after}." if before else f"The values {after}."
    moments, updates = (pairs[what]["after"]["total"] if what in pairs else 0 for what in ("moment1", "update"))
    undrawn = (
        " Updates are drawn where they follow from moments alone: CAME's and replayed ones do not, nor unknown ones."
    )
    return section(
        "values",
        "Weights, moments and updates",
        f'<p class="soft">{text(sides)} A step of a curve is a factor of two in magnitude. Shares are on a logarithmic '
        f"axis, which shows the tails.{undrawn if moments > updates else ''}</p>",
        sides_legend(distributions),
        charts(histograms(pairs), "charts pairs"),
        _refused(distributions["refused"]),
    )


def sides_legend(distributions: dict[str, Any]) -> str:
    """The colours of the two sides of a histogram, if there are two."""
    return legend([("was", "before"), ("curve", "after")]) if distributions["before"] else ""


def _refused(refused: dict[str, Any]) -> str:
    if not refused["count"]:
        return ""
    items = "".join(f"<li><code>{text(row['name'])}</code>: {text(row['reason'])}</li>" for row in refused["first"])
    more = refused["count"] - len(refused["first"])
    rest = f"<li>and {more:,} more</li>" if more else ""
    return f"<h3>Kept lossless, for what they hold</h3><ul>{items}{rest}</ul>"


def histograms(pairs: dict[str, Any]) -> Iterator[str]:
    """A figure for every pair of histograms."""
    for what, pair in pairs.items():
        title, axis = _CHARTS[what]
        yield figure(
            what,
            f"{title} <span>{pair['after']['total']:,} values</span>",
            magnitudes(pair, what, axis),
            text(_outside(pair)),
        )


def _outside(pair: dict[str, Any]) -> str:
    """In words, the values that a histogram cannot show."""
    phrases = []
    for side, name in ((pair["before"], "before"), (pair["after"], "after")):
        if side is not None:
            words = f"{side['zero']:,} zeros ({percent(side['zero'], side['total'])})"
            if side["not_finite"]:
                words += f", {side['not_finite']:,} NaN or Inf"
            phrases.append(f"{words} {name}" if pair["before"] is not None else words)
    if negative := pair["after"]["negative"]:
        phrases.append(f"{percent(negative, pair['after']['total'])} negative")
    return "; ".join(phrases)


def code_section(distributions: dict[str, Any]) -> str:
    """How often each code is used; empty if nothing is stored in codes."""
    rows = distributions["codes"]
    if not rows:
        return ""
    meaning = (
        "A code that is used as often as any other is worth its 8 bits; the entropy coder saves what is below that."
        if any(row["levels"] for row in rows)
        else "Codes count steps, which a budget makes so large that few bits are left."
    )
    if any(row["part"] == "codes" and row["levels"] for row in rows):
        meaning += " In every group of 32 moments the largest has the last code, which therefore stands out."
    figures = [
        figure(
            "codes",
            text(f"{'Residuals' if row['part'] == 'rho' else 'Codes'} of {ROLE_WORDS[row['role']]}"),
            code_usage(row, row["role"], "residual" if row["part"] == "rho" else "code"),
            f"{text(row['codec'])}: {text(_usage(row))}",
        )
        for row in rows
    ]
    return section("codes", "How the codes are used", f'<p class="soft">{meaning}</p>', charts(figures))


def _usage(row: dict[str, Any]) -> str:
    """In words, how many codes are in use, and what they are worth."""
    if row["levels"] is not None:
        return f"{row['used']:,} of {row['levels']:,} codes used, entropy {number(row['entropy_bits'])} bits of 8"
    beyond = f", {percent(row['outside'], row['total'])} of the values beyond the chart" if row["outside"] else ""
    zeros = f", {row['reserved']:,} exact zeros" if row["reserved"] else ""
    return f"{row['used']:,} codes used, entropy {number(row['entropy_bits'])} bits{beyond}{zeros}"


_FIGURES = {
    "update_nmse": ("update", "Error of the update", "NMSE of the update"),
    "update_max": ("update", "Largest error of an update", "max |Δu|"),
    "weight_rms": ("weight", "Distance of the weights", "RMS of Δw, relative"),
    "weight_max": ("weight", "Largest distance of a weight", "max |Δw|, in RMS of its tensor"),
}
"""Every figure of a step: style, title and axis of its chart."""


def read_replay(path: Path, container: int | None) -> dict[str, Any]:
    """The ``resume`` in the output of ``verify --resume-steps N --json``. Raises InputError.

    ``container`` is the size in bytes of the container of the report; ``verify`` must have checked this one.
    """
    refuse_url(path)
    with reading(path):
        require(path.stat().st_size <= 32 << 20, f"{path}: is too long for the output of verify --json")
        content = path.read_bytes()
    try:
        tree = parse_any_json(content, str(path))
    except InputError as exc:
        raise InputError(f"{path}: is not JSON; give what verify --resume-steps N --json printed") from exc
    resume = tree.get("resume") if isinstance(tree, dict) else None
    if not isinstance(resume, dict) or not _is_replay(resume):
        raise InputError(f"{path}: holds no replayed steps; give what verify --resume-steps N --json printed")
    require(
        tree.get("nbytes") == container,
        f"{path}: is about another container, of {tree.get('nbytes')} bytes; verify this one",
    )
    return resume


def _is_replay(resume: dict[str, Any]) -> bool:
    steps = resume.get("steps")
    return (
        isinstance(steps, list)
        and all(isinstance(step, dict) and all(_is_figure(step.get(key)) for key in _FIGURES) for step in steps)
        and _is_figure(resume.get("replay_error"))
        and type(resume.get("parameters")) is int
    )


def _is_figure(value: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value < 1e300)  # type: ignore[operator]


def replay_section(resume: dict[str, Any] | None) -> str:
    """How far the compressed run is from the original, by step; empty without replayed steps."""
    if resume is None:
        return ""
    steps = resume["steps"]
    values = {name: [step[name] for step in steps] for name in _FIGURES}
    figures = [
        figure(
            "replay",
            title,
            by_step(values[name], css, axis),
            f"after step {len(steps):,}: {number(values[name][-1])}",
        )
        for name, (css, title, axis) in _FIGURES.items()
        if any(value is not None for value in values[name])
    ]
    return section(
        "replay",
        "Resuming from it",
        f"<p>{len(steps):,} optimizer steps of {resume['parameters']:,} parameters were replayed on the original and "
        "on the container, with the same gradients. Replay error, the largest NMSE of a step: "
        f"<b>{text(number(resume['replay_error']))}</b></p>",
        charts(figures, "charts pairs"),
    )


Row = tuple[str, Sequence[str]]
"""The name of a row and its phrases."""


def step_rows(steps: Mapping[str, Any] | None) -> list[Row]:
    """The rows of ``facts``; none without a budget."""
    if steps is None:
        return []
    rows: list[Row] = [
        *([("error in steps", figure_phrases(steps))] if steps["steps"] is not None else []),
        *(("error in steps", (phrase,)) for phrase in outside_phrases(steps)),
        *(("learning rate", (phrase,)) for phrase in rate_phrases(steps)),
        ("loss drift", drift_text(steps["drift"]).split(", ")),
        *(map(_optimizer, steps["optimizers"]) if len(steps["optimizers"]) > 1 else ()),
    ]
    if capped := steps["capped"]["elements"]:
        share = percent(capped, steps["capped"]["of"])
        rows.append(("lattice", (f"{share} of the weights have the largest step", "that their size allows")))
    rows += [("under no budget", (counted(kept["count"], "storage"), kept["reason"])) for kept in steps["fallbacks"]]
    return rows


def _optimizer(optimizer: Mapping[str, Any]) -> Row:
    snr = [] if optimizer["weight_snr_db"] is None else [f"weights' SNR {number(optimizer['weight_snr_db'])} dB"]
    return f"optimizer of {counted(optimizer['parameters'], 'parameter')}", (
        f"{number(optimizer['steps'])} steps",
        *part_phrases(optimizer),
        *snr,
        f"max |Δu| {number(optimizer['max_error'])}",
        f"NMSE of u {number(optimizer['update_nmse'])}",
        f"loss drift {interval(optimizer['drift'])}",
    )


def predictions(facts: Mapping[str, Any]) -> str:
    """What every preset and some budgets would make of a checkpoint, as markup."""
    costs = {
        name: []
        if known["steps"] is None
        else [f"{number(known['steps'])} steps", f"loss drift {interval(known['drift'])}"]
        for name, known in facts["predicted"].items()
    }
    rows: list[Row] = [
        *(
            (option_of(name), (size(known["bytes"]), f"{known['ratio']:.2f}x", *costs[name]))
            for name, known in facts["predicted"].items()
        ),
        *(("not in steps", (f"{counted(count, 'tensor')}: {why}",)) for why, count in facts["unpredicted"].items()),
    ]
    return (
        '<h3>What ckpt8 compress would make of it</h3><p class="soft">Predicted from a sample: size, error in steps of '
        "the optimizer, and the loss drift to expect, the mean |Δloss| of a resumed run on the same batches.</p>"
        f'<table id="predictions"><tbody>{markup(rows)}</tbody></table>'
    )


def markup(rows: list[Row]) -> str:
    """Rows of a table. No line break splits a phrase in a span."""
    return "".join(
        f"<tr><th>{text(name)}</th><td>{', '.join(f'<span>{text(phrase)}</span>' for phrase in phrases)}</td></tr>"
        for name, phrases in rows
    )


MAX_LAYER_ROWS = 80
"""Only this many layers, the largest, get a row of their own. One line sums up the others."""


def size_section(facts: dict[str, Any], layers: list[dict[str, Any]]) -> str:
    """The section as markup, from the facts of ``inspect`` and their ``layers``."""
    is_compressed = facts["kind"] == "ckpt8"
    present = {entry["role"] for entry in facts["roles"]}
    return section(
        "sizes",
        "Where the bytes are",
        f'<p class="soft">{TWO_BARS}</p>' if is_compressed else "",
        legend([(role, words) for role, words in ROLE_WORDS.items() if role in present]),
        _size_totals(facts),
        "" if is_compressed else predictions(facts),
        f'<h3>By role</h3><div id="roles">{_by_role(facts)}</div>',
        f'<h3>By layer</h3><div id="layers">{_sizes_by_layer(layers, is_compressed=is_compressed)}</div>',
    )


def _segments(sizes: Mapping[str, int], full_bar: int) -> Stack:
    """Segments of one bar: (role, fraction of the width, tooltip). ``full_bar`` bytes fill the width."""
    return [
        (role, sizes[role] / full_bar, f"{words}: {size(sizes[role])}")
        for role, words in ROLE_WORDS.items()
        if sizes.get(role)
    ]


def _size_totals(facts: dict[str, Any]) -> str:
    """A row with the original size, then one for the stored size or one for each predicted size."""
    original_bytes, stored_bytes = Counter[str](), Counter[str]()
    for entry in facts["roles"]:
        original_bytes[entry["role"]] += entry["bytes"]
        stored_bytes[entry["role"]] += entry.get("stored_bytes", 0)
    after = (
        [(facts["asked"], facts["stored_bytes"], facts["ratio"], "container", facts["overhead_bytes"])]
        if facts["kind"] == "ckpt8"
        else [
            (
                f"{preset if preset.startswith('budget ') else f'preset {preset}'}, predicted",
                predicted["bytes"],
                predicted["ratio"],
                "predicted",
                predicted["bytes"],
            )
            for preset, predicted in facts["predicted"].items()
        ]
    )
    # The container of a small checkpoint is larger than its original.
    full_bar = max(1, facts["bytes"], *(nbytes for _, nbytes, *_ in after))
    rows = [row("original", stacks([_segments(original_bytes, full_bar)]), size(facts["bytes"]))]
    stored = _segments(stored_bytes, full_bar)
    rows += [
        row(
            text(name),
            stacks([[*stored, ("total", rest / full_bar, f"{what}: {size(rest)}")]]),
            f"{size(nbytes)} <small>{ratio:.2f}x</small>",
        )
        for name, nbytes, ratio, what, rest in after
    ]
    return "".join(rows)


def _by_role(facts: dict[str, Any]) -> str:
    full_bar = max((max(entry["bytes"], entry.get("stored_bytes", 0)) for entry in facts["roles"]), default=1)
    rows = []
    for entry in sorted(facts["roles"], key=lambda entry: list(ROLE_WORDS).index(entry["role"])):
        role, stored = entry["role"], entry.get("stored_bytes")
        bars = [_segments({role: nbytes}, full_bar) for nbytes in (entry["bytes"], stored) if nbytes is not None]
        more = f" <small>{percent(entry['bytes'], facts['bytes'])}</small>" if stored is None else f" → {size(stored)}"
        encoding = text(codec_text(entry.get("codec") or entry["dtype"]))
        name = f'{text(ROLE_WORDS[role])} <span class="soft">{encoding}</span>'
        rows.append(row(name, stacks(bars), size(entry["bytes"]) + more))
    return "".join(rows)


def _sizes_by_layer(layers: list[dict[str, Any]], *, is_compressed: bool) -> str:
    largest, others = split_largest(layers, lambda layer: sum(layer["bytes"].values()))
    columns = ("bytes", "stored_bytes") if is_compressed else ("bytes",)
    full_bar = max((sum(layer[column].values()) for layer in largest for column in columns), default=1)
    rows = []
    for layer in largest:
        value = " → ".join(size(sum(layer[column].values())) for column in columns)
        if layer["weights"] and not is_compressed:
            value += f" <small>{layer['weights']:,} weights</small>"
        bars = [_segments(layer[column], full_bar) for column in columns]
        rows.append(row(text(layer["layer"]), stacks(bars), value))
    if others:
        total = size(sum(sum(other["bytes"].values()) for other in others))
        rows.append(f'<p class="note">{len(others):,} smaller layers together: {total}</p>')
    return "".join(rows)


def split_largest(
    layers: list[dict[str, Any]], measure: Callable[[dict[str, Any]], float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ``MAX_LAYER_ROWS`` layers of the largest ``measure``, and the others; both in their own order."""
    order = sorted(range(len(layers)), key=lambda k: -measure(layers[k]))
    return [layers[k] for k in sorted(order[:MAX_LAYER_ROWS])], [layers[k] for k in sorted(order[MAX_LAYER_ROWS:])]


def error_section(
    errors: dict[str, Any],
    distributions: dict[str, Any],
    source: dict[str, Any] | None = None,
    steps: dict[str, Any] | None = None,
) -> str:
    """The measured errors; ``errors_from`` says on which elements.

    ``source`` is ``measured_from`` of ``inspect``, ``steps`` the error in steps of a container under a budget.
    """
    lines = markup(_error_totals(errors, steps))
    where = f", {source['path']}" if source else ""
    return section(
        "errors",
        "Error of lossy storage",
        f'<p class="soft">Measured on {text(distributions["errors_from"] + where)}. '
        "u is the step that the optimizer would take, per unit of learning rate: in update space as its state alone "
        "determines it, else the first step that verify --resume-steps replays. NMSE is the energy of the error in "
        "it, relative to that of u.</p>",
        f"<table><tbody>{lines}</tbody></table>" if lines else "<p>No error was measured.</p>",
        f"<p><b>{text(differing_line(source))}</b></p>" if source and source["differing"] else "",
        _errors_by_layer(distributions["layers"]),
    )


def _error_totals(errors: dict[str, Any], steps: dict[str, Any] | None) -> list[Row]:
    rows: list[Row] = []
    if weight := errors["weight"]:
        rows.append(
            (
                "weights",
                (f"max relative {number(weight['max_relative'])}", f"mean {number(weight['mean_relative'])}"),
            )
        )
    if weight := errors.get("lattice"):
        rows.append(("weights", (_decibels(weight), f"max error {number(weight['max_distance'])}")))
    for what, name in {"moment1": ROLE_WORDS["moment1"], "moment2": ROLE_WORDS["moment2"], **FIGURE_WORDS}.items():
        if error := errors[what]:
            rows.append((name, (f"NMSE {number(error['nmse'])}", _decibels(error))))
            if what in FIGURE_WORDS:
                largest = f"max |Δu| {number(error['max_error'])}", f"max |u| {number(error['max_update'])}"
                rows.append((f"{name}, largest", largest))
    rows += [
        ("update", (f"unknown for {counted(count, 'parameter')}: {reason}",))
        for reason, count in errors["update_reasons"].items()
    ]
    heals = healing_line(errors["update"], steps)
    return [*rows, *([("update", heals.split(": "))] if heals else []), *step_rows(steps)]


def _decibels(error: dict[str, Any]) -> str:
    return "-" if error["snr_db"] is None else f"SNR {number(error['snr_db'])} dB"


def _errors_by_layer(layers: list[dict[str, Any]]) -> str:
    known = [layer for layer in layers if layer["update"] is not None]
    if not known:
        return ""
    largest, others = split_largest(known, lambda layer: float(layer["update"]["max_error"]))
    axis = LogAxis(layer["update"][key] or 0.0 for layer in largest for key in ("nmse", "max_error"))
    rows = []
    for layer in largest:
        update = layer["update"]
        nmse, most = update["nmse"] or 0.0, f"max |Δu| {number(update['max_error'])}"
        dots = axis.dots([("update", nmse, f"NMSE {number(nmse)}"), ("moment2 ring", update["max_error"], most)])
        rows.append(row(text(layer["layer"]), dots, f"{number(update['nmse'])} <small>{most}</small>"))
    title = " and ".join(
        words.capitalize() for kind, words in FIGURE_WORDS.items() if any(kind in layer["figures"] for layer in known)
    )
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
        articles += [f"<h3>{title}</h3>"] if rows else []
        articles += [
            f'<article><h4>{text(shown(tensor))}</h4><p class="soft">{text(figures(tensor))}</p>'
            f"{charts(histograms(tensor['histograms']))}</article>"
            for tensor in rows
        ]
    return section(
        "worst",
        "The worst tensors",
        sides_legend(distributions)
        or '<p class="soft">With <code>--against ORIGINAL</code> they are shown as they were before, too.</p>',
        *articles,
    )


def _update_figures(error: dict[str, Any]) -> str:
    kind = f"{FIGURE_WORDS['replayed']}: " if error["figure"] == "replayed" else ""
    return (
        f"{kind}max |Δu| {number(error['max_error'])} "
        f"where max |u| is {number(error['max_update'])}, NMSE {number(error['nmse'])}, {_decibels(error)}"
    )


def _lattice_figures(error: dict[str, Any]) -> str:
    return f"{_decibels(error)}, max |Δw| {number(error['max_distance'])}"


def _weight_figures(error: dict[str, Any]) -> str:
    return f"mean relative error {number(error['mean_relative'])}, max {number(error['max_relative'])}"


class Report:
    """The report about the checkpoint or container ``path``, to write to ``target``.

    ``original`` is the checkpoint that a container was made from; ``replay`` is a file with the output of ``verify
    --resume-steps N --json``; ``full`` reads every element instead of a sample. Raises OutputError, before it reads
    anything, if ``target`` cannot be written, or exists without ``force``.
    """

    def __init__(
        self,
        target: Path,
        path: Path,
        *,
        original: Path | None = None,
        replay: Path | None = None,
        full: bool = False,
        force: bool = False,
    ) -> None:
        for source in filter(None, (path, original, replay)):
            refuse_source(target, source)
        self._page = Page(target, force=force)
        self._path, self._original, self._replay, self._full = path, original, replay, full
        self._distributions: dict[str, Any] | None = None

    def visit(self, reader: Stored) -> None:
        """Look into an open container. Raises InputError for damage."""
        self._distributions = container_distributions(reader, self._original, full=self._full)

    def write(self, facts: dict[str, Any]) -> None:
        """Write the report of what ``inspect`` found. Raises InputError, OutputError."""
        distributions = self._distributions or checkpoint_distributions(self._path, full=self._full)
        replay = None if self._replay is None else read_replay(self._replay, facts.get("stored_bytes"))
        self._page.write(
            page(facts, distributions, replay),
            [*files_of(self._path, damaged_too=True), *filter(None, (self._original, self._replay))],
        )


def page(facts: dict[str, Any], distributions: dict[str, Any], replay: dict[str, Any] | None) -> str:
    """The whole document."""
    errors = facts["errors"] if facts["kind"] == "ckpt8" else distributions["errors"]
    name = facts["path"].rstrip("/").rpartition("/")[2] or facts["path"]
    sections = [
        _heading(facts, name),
        _tiles(facts, errors),
        _flags(facts),
        size_section(facts, distributions["layers"]),
        error_section(errors, distributions, facts.get("measured_from"), facts.get("steps")),
        replay_section(replay),
        value_section(distributions),
        code_section(distributions),
        worst_section(distributions),
        _footer(distributions["sample"]),
    ]
    return document(name, sections, {"facts": facts, "distributions": distributions, "replay": replay})


def _heading(facts: dict[str, Any], name: str) -> str:
    if facts["kind"] == "ckpt8":
        origin = facts["directory"] or ", ".join(member["path"] for member in facts["members"])
        lines = [f"ckpt8 {facts['format']}, {facts['asked']}, written by {facts['writer']}", f"from {origin}"]
        lines += [base_line(facts)] if facts["base"] else []
    else:
        lines = [f"{facts['format']}, {facts['tensor_count']:,} tensors in {facts['storages']:,} storages"]
        lines += map(optimizer_line, facts["optimizer"])
    words = "".join(f'<p class="soft name">{text(line)}</p>' for line in lines)
    return f"<header><h1>{text(name)}</h1>{words}</header>"


def _tiles(facts: dict[str, Any], errors: dict[str, Any]) -> str:
    if facts["kind"] == "ckpt8":
        pairs = [
            ("original", size(facts["bytes"])),
            ("stored", size(facts["stored_bytes"])),
            ("ratio", f"{facts['ratio']:.2f}x"),
        ]
        pairs += [("bytes per weight", f"{per:.3f}")] if (per := facts["bytes_per_weight"]) else []
    else:
        flash = facts["predicted"]["flash"]
        pairs = [
            ("size", size(facts["bytes"])),
            ("preset flash, predicted", size(flash["bytes"])),
            ("predicted ratio", f"{flash['ratio']:.2f}x"),
        ]
    if (steps := facts.get("steps")) is not None and steps["steps"] is not None:
        pairs += [("error in steps", number(steps["steps"])), ("loss drift to expect", number(steps["drift"]["mean"]))]
    step = f"the {FIGURE_WORDS['replayed']}"
    for kind, nmse, largest in (
        ("update", "NMSE of the update", "max |Δu|"),
        ("replayed", f"NMSE of {step}", f"max |Δu| of {step}"),
    ):
        if update := errors[kind]:
            pairs += [(nmse, number(update["nmse"])), (largest, number(update["max_error"]))]
    return tiles(pairs)


def _flags(facts: dict[str, Any]) -> str:
    """The red flags, ten tensors of each; empty if ``facts`` have none of that key."""
    if "flags" not in facts:
        return ""
    items = "".join(
        f"<li><b>{text(title)}</b>: {text(extent)}<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul></li>"
        for _, title, extent, lines in flags_by_kind(facts["flags"], 10)
    )
    seen = text(looked_at(facts["sample"], facts["flags"]))
    alarm = ' class="alarm"' if items else ""
    return f'<section id="flags"><h2{alarm}>Red flags</h2><p>{seen}</p>{items and f"<ul>{items}</ul>"}</section>'


def _footer(sample: dict[str, Any]) -> str:
    return (
        f'<footer id="sample"><p>Histograms and codes were counted over {sample["elements"]:,} of {sample["of"]:,} '
        f"values of weights and moments ({percent(sample['elements'], sample['of'])}): {text(sample['rule'])}.</p>"
        f"<p>ckpt8 {text(__version__)}</p></footer>"
    )
