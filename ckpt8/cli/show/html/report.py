"""The report of ``inspect --html``: one page that loads nothing, runs nothing and is the same for the same facts.

It also holds its facts as JSON, in the element ``ckpt8-report``: ``facts`` as ``inspect --json`` prints them,
``distributions`` (see ``ckpt8.inspecting.distributions.gathering.Gathered``) and the ``replay``, if given.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckpt8 import __version__
from ckpt8.cli.show.html.distributions import code_section, value_section
from ckpt8.cli.show.html.errors import error_section, worst_section
from ckpt8.cli.show.html.replay import read_replay, replay_section
from ckpt8.cli.show.html.sizes import size_section
from ckpt8.cli.show.html.style import STYLE
from ckpt8.cli.show.html.text import text
from ckpt8.cli.show.overview import flags_by_kind, looked_at, optimizer_line
from ckpt8.cli.show.tables import number
from ckpt8.container.needed import unneeded_file
from ckpt8.container.reader import ContainerReader
from ckpt8.core.files.atomic import AtomicFile, refuse_source
from ckpt8.core.text import percent, size
from ckpt8.inspecting.distributions.checkpoint import checkpoint_distributions
from ckpt8.inspecting.distributions.container import container_distributions
from ckpt8.inspecting.manifest_facts import FIGURE_WORDS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Even if a name got through as markup, the browser would neither run nor load anything."""

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
        AtomicFile(target, force=force, check=unneeded_file).close()
        self._target, self._path, self._original, self._replay = target, path, original, replay
        self._full, self._force = full, force
        self._distributions: dict[str, Any] | None = None

    def visit(self, reader: ContainerReader) -> None:
        """Look into an open container. Raises InputError for damage."""
        self._distributions = container_distributions(reader, self._original, full=self._full)

    def write(self, facts: dict[str, Any]) -> None:
        """Write the report of what ``inspect`` found. Raises InputError, OutputError."""
        distributions = self._distributions
        if distributions is None:
            distributions = checkpoint_distributions(self._path, full=self._full)
        replay = None if self._replay is None else read_replay(self._replay, facts.get("stored_bytes"))
        content = page(facts, distributions, replay).encode()
        with AtomicFile(self._target, force=self._force, check=unneeded_file) as output:
            with output.guard():
                output.file.write(content)
            output.publish()


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
    data = {"facts": facts, "distributions": distributions, "replay": replay}
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(name)} · ckpt8</title><style>{STYLE}</style></head>\n'
        f"<body><main>{''.join(sections)}</main>\n"
        f'<script type="application/json" id="ckpt8-report">{_embedded(data)}</script></body></html>\n'
    )


def _embedded(tree: Any) -> str:
    """JSON in which nothing is markup."""
    plain = json.dumps(tree, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _heading(facts: dict[str, Any], name: str) -> str:
    if facts["kind"] == "ckpt8":
        origin = facts["directory"] or ", ".join(member["path"] for member in facts["members"])
        lines = [f"ckpt8 {facts['format']}, {facts['asked']}, written by {facts['writer']}", f"from {origin}"]
    else:
        lines = [f"{facts['format']}, {facts['tensor_count']:,} tensors in {facts['storages']:,} storages"]
        lines += map(optimizer_line, facts["optimizer"])
    words = "".join(f'<p class="soft name">{text(line)}</p>' for line in lines)
    return f"<header><h1>{text(name)}</h1>{words}</header>"


def _tiles(facts: dict[str, Any], errors: dict[str, Any]) -> str:
    if facts["kind"] == "ckpt8":
        tiles = [
            ("original", size(facts["bytes"])),
            ("stored", size(facts["stored_bytes"])),
            ("ratio", f"{facts['ratio']:.2f}x"),
        ]
        if facts["bytes_per_weight"]:
            tiles.append(("bytes per weight", f"{facts['bytes_per_weight']:.3f}"))
    else:
        flash = facts["predicted"]["flash"]
        tiles = [
            ("size", size(facts["bytes"])),
            ("preset flash, predicted", size(flash["bytes"])),
            ("predicted ratio", f"{flash['ratio']:.2f}x"),
        ]
    if (steps := facts.get("steps")) is not None and steps["steps"] is not None:
        tiles += [("error in steps", number(steps["steps"])), ("loss drift to expect", number(steps["drift"]["mean"]))]
    step = f"the {FIGURE_WORDS['replayed']}"
    names = {"update": ("NMSE of the update", "max |Δu|"), "replayed": (f"NMSE of {step}", f"max |Δu| of {step}")}
    for kind, (nmse, largest) in names.items():
        if update := errors[kind]:
            tiles += [(nmse, number(update["nmse"])), (largest, number(update["max_error"]))]
    items = "".join(f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in tiles)
    return f'<div class="tiles">{items}</div>'


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
