"""The report of ``inspect --html``: one page that loads nothing, runs nothing and is the same for the same facts.

It also holds its facts as JSON, in the element ``ckpt8-report``: ``facts`` as ``inspect --json`` prints them,
``distributions`` (see ``ckpt8.inspecting.distributions.gathering.Gathered``) and the ``replay``, if given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt8 import __version__
from ckpt8.cli.show.html.distributions import code_section, value_section
from ckpt8.cli.show.html.errors import error_section, worst_section
from ckpt8.cli.show.html.page import check_target, document, tiles, write_page
from ckpt8.cli.show.html.replay import read_replay, replay_section
from ckpt8.cli.show.html.sizes import size_section
from ckpt8.cli.show.html.text import text
from ckpt8.cli.show.overview import base_line, flags_by_kind, looked_at, optimizer_line
from ckpt8.cli.show.tables import number
from ckpt8.container.bases import files_of
from ckpt8.container.opening import Stored
from ckpt8.core.files.atomic import refuse_source
from ckpt8.core.text import percent, size
from ckpt8.inspecting.distributions.checkpoint import checkpoint_distributions
from ckpt8.inspecting.distributions.container import container_distributions
from ckpt8.inspecting.manifest_facts import FIGURE_WORDS

_FLAGS = 10
"""So many tensors are listed under one red flag; the JSON has all."""


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
        for source in (path, original, replay):
            if source is not None:
                refuse_source(target, source)
        check_target(target, force=force)
        self._target, self._path, self._original, self._replay = target, path, original, replay
        self._full, self._force = full, force
        self._distributions: dict[str, Any] | None = None

    def visit(self, reader: Stored) -> None:
        """Look into an open container. Raises InputError for damage."""
        self._distributions = container_distributions(reader, self._original, full=self._full)

    def write(self, facts: dict[str, Any]) -> None:
        """Write the report of what ``inspect`` found. Raises InputError, OutputError."""
        distributions = self._distributions
        if distributions is None:
            distributions = checkpoint_distributions(self._path, full=self._full)
        replay = None if self._replay is None else read_replay(self._replay, facts.get("stored_bytes"))
        sources = [*files_of(self._path, damaged_too=True), *filter(None, (self._original, self._replay))]
        write_page(self._target, page(facts, distributions, replay), sources, force=self._force)


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
        shown = [
            ("original", size(facts["bytes"])),
            ("stored", size(facts["stored_bytes"])),
            ("ratio", f"{facts['ratio']:.2f}x"),
        ]
        if facts["bytes_per_weight"]:
            shown.append(("bytes per weight", f"{facts['bytes_per_weight']:.3f}"))
    else:
        flash = facts["predicted"]["flash"]
        shown = [
            ("size", size(facts["bytes"])),
            ("preset flash, predicted", size(flash["bytes"])),
            ("predicted ratio", f"{flash['ratio']:.2f}x"),
        ]
    if (steps := facts.get("steps")) is not None and steps["steps"] is not None:
        shown += [("error in steps", number(steps["steps"])), ("loss drift to expect", number(steps["drift"]["mean"]))]
    step = f"the {FIGURE_WORDS['replayed']}"
    names = {"update": ("NMSE of the update", "max |Δu|"), "replayed": (f"NMSE of {step}", f"max |Δu| of {step}")}
    for kind, (nmse, largest) in names.items():
        if update := errors[kind]:
            shown += [(nmse, number(update["nmse"])), (largest, number(update["max_error"]))]
    return tiles(shown)


def _flags(facts: dict[str, Any]) -> str:
    """The red flags; empty if ``facts`` have none of that key."""
    if "flags" not in facts:
        return ""
    items = "".join(
        f"<li><b>{text(title)}</b>: {text(extent)}<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul></li>"
        for _, title, extent, lines in flags_by_kind(facts["flags"], _FLAGS)
    )
    seen = text(looked_at(facts["sample"], facts["flags"]))
    alarm = ' class="alarm"' if items else ""
    return f'<section id="flags"><h2{alarm}>Red flags</h2><p>{seen}</p>{items and f"<ul>{items}</ul>"}</section>'


def _footer(sample: dict[str, Any]) -> str:
    share = percent(sample["elements"], sample["of"])
    words = f"{sample['elements']:,} of {sample['of']:,} values of weights and moments ({share}): {sample['rule']}."
    return (
        f'<footer id="sample"><p>Histograms and codes were counted over {text(words)}</p>'
        f"<p>ckpt8 {text(__version__)}</p></footer>"
    )
