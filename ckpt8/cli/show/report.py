"""The report of ``inspect --html``: one page that loads nothing, runs nothing and is the same for the same facts.

It also holds its facts as JSON, in the element ``ckpt8-report``: ``facts`` as ``inspect --json`` prints them,
``distributions`` (see ``ckpt8.inspecting.distributions.Gathered``) and the ``replay``, if given.

It begins with the verdict: the sizes, what resuming will notice, where it came from, and a table, of a container the
parts of the checkpoint, of a checkpoint the presets. Red flags follow, then the details: sizes by codec and by layer;
the error of lossy storage by layer; the steps of ``verify --resume-steps``; how values and codes are distributed; the
worst tensors with their histograms.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt8 import __version__
from ckpt8.checkpoint.meaning.parameter_names import shown
from ckpt8.cli.show.charts import (
    TWO_BARS,
    LogAxis,
    Page,
    Row,
    Stack,
    bullets,
    by_step,
    charts,
    code_usage,
    document,
    figure,
    folded,
    legend,
    long_list,
    magnitudes,
    prose,
    row,
    section,
    stacks,
    table,
    terms,
    text,
    tiles,
)
from ckpt8.cli.show.inspect import (
    base_line,
    cautions,
    flags_by_kind,
    looked_at,
    optimizer_line,
    origin_words,
    shown_flags,
)
from ckpt8.cli.show.readiness import COLUMNS, coverage, format_rows, measured_lines
from ckpt8.cli.show.tables import (
    NO_TENSORS,
    codec_text,
    drift_text,
    earlier_phrases,
    figure_phrases,
    healing_line,
    number,
    optimizer_table,
    outside_phrases,
    prediction_rows,
    rate_phrases,
    warnings_of,
)
from ckpt8.container.bases import files_of
from ckpt8.container.joined import Stored
from ckpt8.container.steps import PARTS, error_in_words
from ckpt8.core.errors import InputError, require
from ckpt8.core.files.atomic import refuse_source
from ckpt8.core.files.source_file import reading, refuse_url
from ckpt8.core.grouping import grouped
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.text import counted, differing_line, listed, percent, size
from ckpt8.inspecting.distributions import checkpoint_distributions, container_distributions
from ckpt8.inspecting.facts import FIGURE_WORDS, ROLE_WORDS

_CHARTS = {"weight": "Weights", "moment1": "First moments", "moment2": "Second moments", "update": "Updates u"}


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
        f'<p class="soft">{text(sides)} A chart shows the share of the values in each factor of two of magnitude, on a '
        f"logarithmic axis, which shows the tails.{undrawn if moments > updates else ''}</p>",
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
    items = [f"<code>{text(row['name'])}</code>: {prose(row['reason'])}" for row in refused["first"]]
    more = refused["count"] - len(items)
    return f"<h3>Kept lossless, for what they hold</h3>{bullets([*items, *([f'and {more:,} more'] if more else [])])}"


def histograms(pairs: dict[str, Any]) -> Iterator[str]:
    """A figure for every pair of histograms."""
    for what, pair in pairs.items():
        yield figure(
            what,
            f"{_CHARTS[what]} <span>{pair['after']['total']:,} values</span>",
            magnitudes(pair, what, _CHARTS[what]),
            prose(_outside(pair)),
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
    meaning = "A chart shows the share of the values with each code. " + (
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
            prose(f"{codec_text(row['codec'])}: {_usage(row)}"),
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
    "update_nmse": ("update", "NMSE of the update"),
    "update_max": ("update", "Largest error of an update, max |Δu|"),
    "weight_rms": ("weight", "Distance of the weights, RMS of Δw, relative"),
    "weight_max": ("weight", "Largest distance, max |Δw|, in RMS of its tensor"),
}
"""Every figure of a step: style and title of its chart."""


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
            by_step(values[name], css, title),
            f"after step {len(steps):,}: {number(values[name][-1])}",
        )
        for name, (css, title) in _FIGURES.items()
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


def step_rows(steps: Mapping[str, Any] | None) -> list[Row]:
    """What ``step_facts`` says, in rows; none where every tensor is exact."""
    if steps is None:
        return []
    rows: list[Row] = [
        *([("error in steps", figure_phrases(steps))] if steps["steps"] is not None else []),
        *(("error in steps", (phrase,)) for phrase in (*outside_phrases(steps), *earlier_phrases(steps))),
        *(("learning rate", (phrase,)) for phrase in rate_phrases(steps)),
        ("loss drift", drift_text(steps["drift"]).split(", ")),
    ]
    if capped := steps["capped"]["elements"]:
        share = percent(capped, steps["capped"]["of"])
        rows.append(("lattice", (f"{share} of the weights have the largest step", "that their size allows")))
    rows += [("under no budget", (counted(kept["count"], "storage"), kept["reason"])) for kept in steps["fallbacks"]]
    return rows


MAX_LAYER_ROWS = 80
"""Only this many layers, the largest, get a row of their own. One line sums up the others."""


def size_section(facts: dict[str, Any], layers: list[dict[str, Any]]) -> str:
    """The section as markup, from the facts of ``inspect`` and their ``layers``."""
    columns = ["bytes", "stored_bytes"] if facts["kind"] == "ckpt8" else ["bytes"]
    largest, others = split_largest(layers, lambda layer: sum(layer["bytes"].values()))
    of_layers = [(text(layer["layer"]), [layer[column] for column in columns]) for layer in largest]
    rest = size(sum(sum(other["bytes"].values()) for other in others))
    present = {entry["role"] for entry in facts["roles"]}
    return section(
        "sizes",
        "Where the bytes are",
        f'<p class="soft">{TWO_BARS}</p>' if len(columns) > 1 else "",
        legend([(role, words) for role, words in ROLE_WORDS.items() if role in present]),
        f'<div id="roles">{_size_rows(_by_role(facts["roles"], columns))}</div>',
        f'<h3>By layer</h3><div id="layers">{_size_rows(of_layers)}</div>',
        f'<p class="note">{len(others):,} smaller layers together: {rest}</p>' if others else "",
    )


Sizes = Sequence[Mapping[str, int]]
"""Bytes by role: the original ones, and the stored ones where there are some."""


def _by_role(entries: list[dict[str, Any]], columns: Sequence[str]) -> Iterator[tuple[str, Sizes]]:
    """The roles, each with the codecs or the types of its tensors."""
    of_role = grouped((entry["role"], entry) for entry in entries)
    for role in filter(of_role.__contains__, ROLE_WORDS):
        kinds = [entry.get("codec") or entry["dtype"] for entry in of_role[role]]
        kinds = [kind for kind in kinds if not kind.startswith("lossless/")] or kinds[:1]
        name = f'{text(ROLE_WORDS[role])} <span class="soft">{text(", ".join(map(codec_text, kinds)))}</span>'
        yield name, [{role: sum(entry[column] for entry in of_role[role])} for column in columns]


def _size_rows(rows: Iterable[tuple[str, Sizes]]) -> str:
    """A row of bars for each name, which is markup."""
    rows = list(rows)
    full_bar = max((sum(sizes.values()) for _, sides in rows for sizes in sides), default=1)
    bars = (stacks([_segments(sizes, full_bar) for sizes in sides]) for _, sides in rows)
    values = (" → ".join(size(sum(sizes.values())) for sizes in sides) for _, sides in rows)
    return long_list([row(name, bar, value) for (name, _), bar, value in zip(rows, bars, values, strict=True)])


def _segments(sizes: Mapping[str, int], full_bar: int) -> Stack:
    """Segments of one bar: (role, fraction of the width, tooltip). ``full_bar`` bytes fill the width."""
    return [
        (role, sizes[role] / full_bar, f"{words}: {size(sizes[role])}")
        for role, words in ROLE_WORDS.items()
        if sizes.get(role)
    ]


def split_largest(
    layers: list[dict[str, Any]], measure: Callable[[dict[str, Any]], float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ``MAX_LAYER_ROWS`` layers of the largest ``measure``, and the others; both in their own order."""
    order = sorted(range(len(layers)), key=lambda k: -measure(layers[k]))
    return [layers[k] for k in sorted(order[:MAX_LAYER_ROWS])], [layers[k] for k in sorted(order[MAX_LAYER_ROWS:])]


def error_section(
    errors: dict[str, Any],
    distributions: dict[str, Any],
    source: dict[str, Any] | None,
    steps: dict[str, Any] | None,
) -> str:
    """The measured errors; ``errors_from`` says on which elements.

    ``source`` is ``measured_from`` of ``inspect``, ``steps`` the error in steps of a container.
    """
    where = f", {source['path']}" if source else ""
    return section(
        "errors",
        "Error of lossy storage",
        f'<p class="soft">Measured on {text(distributions["errors_from"] + where)}. NMSE is the energy of an error, '
        "relative to that of the values. u is the step that the optimizer would take, per unit of learning rate: in "
        f"update space as its state alone determines it, else the first step that {prose('verify --resume-steps')} "
        "replays.</p>",
        terms(_error_totals(errors, steps)) or "<p>No error was measured.</p>",
        table("optimizers", *by_optimizer) if (by_optimizer := optimizer_table(steps))[1] else "",
        _errors_by_layer(distributions["layers"]),
    )


def _error_totals(errors: dict[str, Any], steps: dict[str, Any] | None) -> list[Row]:
    weights = (_weight_figures, errors["weight"]), (_lattice_figures, errors.get("lattice"))
    rows: list[Row] = [("weights", figures(error)) for figures, error in weights if error]
    moments = ((ROLE_WORDS[what], errors[what]) for what in ("moment1", "moment2"))
    rows += [(words, (f"NMSE {number(error['nmse'])}", _snr(error))) for words, error in moments if error]
    rows += [(words, _update_figures(errors[what])) for what, words in FIGURE_WORDS.items() if errors[what]]
    rows += [
        ("update", (f"unknown for {counted(count, 'parameter')}: {reason}",))
        for reason, count in errors["update_reasons"].items()
    ]
    heals = healing_line(errors["update"], steps)
    return [*rows, *([("update", (heals,))] if heals else []), *step_rows(steps)]


def _snr(error: Mapping[str, Any], what: str = "") -> str:
    """The SNR, and ``what`` it is of: a tensor has one, and the update that it makes another."""
    return f"SNR{what} " + ("-" if error["snr_db"] is None else f"{number(error['snr_db'])} dB")


def _weight_figures(error: Mapping[str, Any]) -> Sequence[str]:
    return f"mean relative error {number(error['mean_relative'])}", f"max {number(error['max_relative'])}"


def _lattice_figures(error: Mapping[str, Any]) -> Sequence[str]:
    return _snr(error, " of the weights"), f"max |Δw| {number(error['max_distance'])}"


def _update_figures(error: Mapping[str, Any]) -> Sequence[str]:
    kind = [FIGURE_WORDS["replayed"]] if error.get("figure") == "replayed" else []
    return (
        *kind,
        f"NMSE of u {number(error['nmse'])}",
        _snr(error, " of u"),
        f"max |Δu| {number(error['max_error'])}",
        f"max |u| {number(error['max_update'])}",
    )


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
    return f'<h3>{title}, by layer</h3>{colours}<div id="layer-errors">{axis.labels()}{long_list(rows)}</div>{more}'


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
            folded(
                f'<b class="name">{text(shown(tensor))}</b> '
                f'<span class="soft">{prose(", ".join(figures(tensor)))}</span>',
                charts(histograms(tensor["histograms"])),
            )
            for tensor in rows
        ]
    return section(
        "worst",
        "The worst tensors",
        sides_legend(distributions)
        or '<p class="soft">With <code>--against ORIGINAL</code> they are shown as they were before, too.</p>',
        *articles,
    )


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
    name, sample = facts["path"].rstrip("/").rpartition("/")[2] or facts["path"], distributions["sample"]
    sections = [
        f"<header><h1>{text(name)}</h1></header>",
        _verdict(facts),
        _flags(facts),
        _readiness(facts),
        size_section(facts, distributions["layers"]),
        error_section(errors, distributions, facts.get("measured_from"), facts.get("steps")),
        replay_section(replay),
        value_section(distributions),
        code_section(distributions),
        worst_section(distributions),
        f'<footer id="sample"><p>Histograms and codes were counted over {sample["elements"]:,} of {sample["of"]:,} '
        f"values of weights and moments ({percent(sample['elements'], sample['of'])}): {text(sample['rule'])}.</p>"
        f"<p>ckpt8 {text(__version__)}</p></footer>",
    ]
    return document(name, sections, {"facts": facts, "distributions": distributions, "replay": replay})


def _verdict(facts: dict[str, Any]) -> str:
    """Sizes in large type, what resuming will notice, the origin, and a table: of the parts, or of the presets."""
    sizes = [("original", size(facts["bytes"]))]
    if facts["kind"] == "ckpt8":
        source = facts["measured_from"]
        sizes += [("stored", size(facts["stored_bytes"])), ("times smaller", f"{facts['ratio']:.2f}x")]
        body = [
            f'<p class="lead">Error when resuming: <b>{prose(error_in_words(facts["steps"]))}</b></p>',
            f'<p class="alarm">{text(differing_line(source))}</p>' if source and source["differing"] else "",
            *(f'<p class="soft">{prose(line)}</p>' for line in (*warnings_of(facts["steps"]), *cautions(facts))),
            terms(_container_rows(facts)),
            _parts(facts),
        ]
    elif not facts["predicted"]:
        body = [terms(_checkpoint_rows(facts)), f'<p class="note">{NO_TENSORS}.</p>']
    else:
        default, cells = facts["predicted"]["flash"], prediction_rows(facts)
        rows = [(option.removeprefix("--").removeprefix("preset "), *others) for option, *others in cells]
        sizes += [("flash, predicted", size(default["bytes"])), ("times smaller", f"{default['ratio']:.2f}x")]
        body = [
            terms(_checkpoint_rows(facts)),
            '<h3>What <span class="whole">ckpt8 compress</span> would make of it</h3>',
            table("predictions", ("preset", "predicted", "ratio", "error in steps", "expected loss drift"), rows),
            '<p class="note">Predicted from a sample. The error is in steps of the optimizer, the drift is the mean '
            "|Δloss| of a resumed run on the same batches.</p>",
            terms(("not in steps", (f"{counted(n, 'tensor')}: {why}",)) for why, n in facts["unpredicted"].items()),
        ]
    return f'<section id="verdict">{tiles(sizes)}{"".join(body)}</section>'


def _container_rows(facts: dict[str, Any]) -> Iterator[Row]:
    per_weight = [f"{facts['bytes_per_weight']:.3f} bytes per weight"] if facts["bytes_per_weight"] else []
    yield "made with", (facts["asked"], *per_weight, f"written by {facts['writer']}", f"format {facts['format']}")
    yield "from", (facts["directory"] or listed(member["path"] for member in facts["members"]),)
    if facts["base"]:
        yield "base", (base_line(facts),)


def _checkpoint_rows(facts: dict[str, Any]) -> Iterator[Row]:
    yield "format", (facts["format"], f"{facts['tensor_count']:,} tensors in {facts['storages']:,} storages")
    several = [f"{row['path']}: {origin_words(row, 'of unknown origin')}" for row in facts["origins"]]
    yield from (("written by", (line,)) for line in filter(None, several or [origin_words(facts, "")]))
    yield from (("optimizer", (optimizer_line(state),)) for state in facts["optimizer"])


def _parts(facts: dict[str, Any]) -> str:
    """The table of what is in a container: its kinds of tensors, the rest, and all."""
    original, stored = Counter[str](), Counter[str]()
    for entry in facts["roles"]:
        part = ROLE_WORDS[entry["role"]] if entry["role"] in PARTS else "everything else"
        original[part] += entry["bytes"]
        stored[part] += entry["stored_bytes"]
    stored["everything else"] += facts["stored_bytes"] - stored.total()
    names = [name for name in (*PARTS.values(), "everything else") if name in stored]
    rows = [
        *((name, original[name], stored[name]) for name in names),
        ("whole checkpoint", facts["bytes"], facts["stored_bytes"]),
    ]
    return table(
        "parts",
        ("part", "original", "stored", "times smaller"),
        [(name, size(before), size(after), f"{before / after:.2f}x" if after else "-") for name, before, after in rows],
        total=True,
    )


_OPEN_FLAGS = 5


def _flags(facts: dict[str, Any]) -> str:
    """The red flags by kind: of the first kinds the worst tensor is open, all others are folded."""
    flags, kinds = shown_flags(facts), []
    for _, title, extent, (worst, *others) in flags_by_kind(flags, 10):
        more = others and folded("more of them", bullets(map(prose, others)))
        kinds.append(f"<b>{text(title)}</b>: {prose(extent)}<br>{prose(worst)}{more or ''}")
    first, rest = kinds[:_OPEN_FLAGS], kinds[_OPEN_FLAGS:]
    return section(
        "flags",
        '<span class="alarm">Red flags</span>' if kinds else "Red flags",
        f"<p>{prose(looked_at(facts['sample'], flags))}</p>",
        bullets(first),
        folded(f"{counted(len(rest), 'more kind')}", bullets(rest)) if rest else "",
    )


def _readiness(facts: dict[str, Any]) -> str:
    """What other formats would lose; empty unless it was asked for."""
    if (readiness := facts.get("readiness")) is None:
        return ""
    title, *measured = measured_lines(readiness["against"]) if "against" in readiness else [""]
    return section(
        "readiness",
        "Low-precision readiness",
        f'<p class="soft">The SNR of rounding to each format: {prose("; ".join(coverage(readiness)))}</p>',
        terms((row["label"], (row["line"].removeprefix(f"{row['label']}: "),)) for row in readiness["formats"]),
        table("formats", COLUMNS, [*format_rows(readiness["formats"])], words=("role",)),
        title and f"<h3>{text(title)}</h3>{bullets(map(prose, measured))}",
    )
