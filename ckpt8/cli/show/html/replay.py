"""The section about ``verify --resume-steps``: reads its JSON output and draws its figures by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt8.cli.show.html.plots import by_step
from ckpt8.cli.show.html.text import text
from ckpt8.cli.show.tables import number
from ckpt8.core.errors import InputError
from ckpt8.core.files.urls import refuse_url
from ckpt8.core.json_text import parse_any_json

_MOST_BYTES = 32 << 20
_LARGEST = 1e300
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
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path}: is too long for the output of verify --json")
        content = path.read_bytes()
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        tree = parse_any_json(content, str(path))
    except InputError as exc:
        raise InputError(f"{path}: is not JSON; give what verify --resume-steps N --json printed") from exc
    resume = tree.get("resume") if isinstance(tree, dict) else None
    if not isinstance(resume, dict) or not _is_replay(resume):
        raise InputError(f"{path}: holds no replayed steps; give what verify --resume-steps N --json printed")
    if tree.get("nbytes") != container:
        raise InputError(f"{path}: is about another container, of {tree.get('nbytes')} bytes; verify this one")
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
    return value is None or (type(value) in (int, float) and 0 <= value < _LARGEST)  # type: ignore[operator]


def replay_section(resume: dict[str, Any] | None) -> str:
    """How far the compressed run is from the original, by step; empty without replayed steps."""
    if resume is None:
        return ""
    steps = resume["steps"]
    values = {figure: [step[figure] for step in steps] for figure in _FIGURES}
    charts = [
        f'<figure data-chart="replay"><figcaption>{title}</figcaption>{by_step(values[figure], css, axis)}'
        f'<p class="note">after step {len(steps):,}: {number(values[figure][-1])}</p></figure>'
        for figure, (css, title, axis) in _FIGURES.items()
        if any(value is not None for value in values[figure])
    ]
    return (
        f'<section id="replay"><h2>Resuming from it</h2><p>{len(steps):,} optimizer steps of '
        f"{resume['parameters']:,} parameters were replayed on the original and on the container, with the same "
        f"gradients. Replay error, the largest NMSE of a step: <b>{text(number(resume['replay_error']))}</b></p>"
        f'<div class="charts pairs">{"".join(charts)}</div></section>'
    )
