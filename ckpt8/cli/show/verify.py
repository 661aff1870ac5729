"""Shows the result of ``verify`` in a terminal, and the figures of replayed steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ckpt8.cli.output import print_lines
from ckpt8.cli.show.steps import measured_lines, show_optimizers
from ckpt8.cli.show.tables import Table, number
from ckpt8.core.text import counted, size
from ckpt8.inspecting.replay.figures import left_out
from ckpt8.inspecting.verify import Verification


def show_verified(console: Console, src: Path, against: Path | None, result: Verification) -> None:
    """Print the result, and the figures of replayed steps."""
    text = f"{src}: seal and {result.frames:,} frames hold ({size(result.nbytes)})"
    if result.against and not result.failures:
        text += f"; {result.statistics} statistics and all lossless tensors agree with {against}"
        if result.unmeasured:
            text += f"; {result.unmeasured} lossy tensors carry no statistics to check"
    links = [f"with what it needs of {', '.join(result.links)}"] if result.links else []
    print_lines(console, [text, *links, *(measured_lines(result.steps) if result.steps else [])])
    show_optimizers(console, result.steps)
    if result.resume is not None:
        _show_replay(console, result.resume)


def _show_replay(console: Console, resume: dict[str, Any]) -> None:
    """Print how far the compressed run is from the original after every replayed step."""
    if resume["parameters"]:
        console.print(
            f"replayed {counted(len(resume['steps']), 'step')} of {counted(resume['parameters'], 'parameter')}; "
            f"replay error {number(resume['replay_error'])}"
        )
        columns = ("step", "update NMSE", "max |Δu|", "weights RMS", "weights max")
        keys = ("update_nmse", "update_max", "weight_rms", "weight_max")
        rows = [(str(k), *(number(step[key]) for key in keys)) for k, step in enumerate(resume["steps"], 1)]
        console.print(Table(columns, rows))
        first = resume["first_of_gradient_rules"]
        if first and first["parameters"] < resume["parameters"]:
            console.print(
                f"first step of the {counted(first['parameters'], 'parameter')} whose step needs a gradient: "
                f"NMSE {number(first['update_nmse'])}, max |Δu| {number(first['update_max'])}"
            )
    else:
        console.print("nothing could be replayed: the replay error is unknown")
    print_lines(console, left_out(resume))
