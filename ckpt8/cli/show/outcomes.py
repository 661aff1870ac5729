"""Shows what became of many checkpoints, and the results of ``convert`` and ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ckpt8.chaining.jobs import Outcome
from ckpt8.cli.guard import print_lines
from ckpt8.cli.show.tables import Table, fallback_phrase, measured_lines, number, show_optimizers, steps_phrase
from ckpt8.converting.quantizing import lines as quantized
from ckpt8.converting.request import Report
from ckpt8.core.text import counted, listed, size
from ckpt8.inspecting.replay import left_out
from ckpt8.inspecting.verify import Verification


def outcome_line(outcome: Outcome) -> str:
    """Sizes, base, error in steps, seconds, what is under no budget, what was replaced, whether the source is gone.

    Of an outcome that has a container.
    """
    sizes = _sizes(outcome.bytes, outcome.stored or 0)
    kind = "" if outcome.base is None else f", delta to {outcome.base}"
    how = ", was there already" if outcome.present else f" in {outcome.seconds:.2f} s"
    steps = f", {steps_phrase(outcome.steps)}" if outcome.steps else ""
    fallback = f"; {phrase}" if outcome.steps and (phrase := fallback_phrase(outcome.steps)) else ""
    gone = f"; {outcome.source.name} removed" if outcome.removed else ""
    old = f"; replaced {outcome.replaced}" if outcome.replaced else ""
    return f"{outcome.target}: {sizes}{kind}{steps}{how}{fallback}{old}{gone}"


def preview_line(outcome: Outcome) -> str:
    """What would become of a checkpoint."""
    if outcome.predicted is None:
        what = f"{_sizes(outcome.bytes, outcome.stored or 0)}, is there already"
    else:
        what = f"would be written, {_predicted(outcome.bytes, outcome.predicted)}"
        what += "" if outcome.base is None else f", less as a delta to {outcome.base}"
        what += f"; would replace {outcome.replaced}" if outcome.replaced else ""
    gone = f"; {outcome.source} would be removed once it is verified" if outcome.would_remove else ""
    return f"{outcome.target}: {what}{gone}"


def preview_total(outcomes: Sequence[Outcome]) -> str:
    """The totals of all containers that would be written."""
    facts = preview_totals(outcomes)
    count = sum(outcome.predicted is not None for outcome in outcomes)
    sizes = f": {_predicted(facts['bytes'], facts['predicted_bytes'])}" if count else ""
    failed = f"; {facts['failed']} would fail" if facts["failed"] else ""
    return f"{counted(count, 'container')} to write{sizes}{failed}; nothing was written or removed"


def preview_totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Bytes of what would be compressed, and of its containers as whole files; counts."""
    predicted = [(outcome.bytes, outcome.predicted) for outcome in outcomes if outcome.predicted is not None]
    removed = sum(outcome.would_remove for outcome in outcomes)
    return {"dry_run": True, **_totals(outcomes, "predicted_bytes", predicted), "would_remove": removed}


def preview_facts(outcome: Outcome, failure: tuple[str, int] | None) -> dict[str, Any]:
    """What would become of a checkpoint, for a program; ``failure`` as in ``outcome_facts``."""
    stored = outcome.stored if outcome.predicted is None else outcome.predicted
    return {
        "source": str(outcome.source),
        "target": str(outcome.target),
        "bytes": outcome.bytes,
        "predicted_bytes": outcome.predicted,
        "stored_bytes": outcome.stored,
        "ratio": None if stored is None else _ratio(outcome.bytes, stored),
        "base": outcome.base,
        "present": outcome.present,
        "would_replace": outcome.replaced,
        "would_remove": outcome.would_remove,
        **_failure(failure),
    }


def total_line(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The totals of all outcomes, for which a person waited ``seconds``; a checkpoint that has two counts once."""
    facts = totals(outcomes)
    sizes = _sizes(facts["bytes"], facts["stored_bytes"]) if facts["stored_bytes"] else "nothing was compressed"
    failed = f"; {facts['failed']} failed" if facts["failed"] else ""
    return f"{counted(len({outcome.source for outcome in outcomes}), 'checkpoint')}: {sizes} in {seconds:.2f} s{failed}"


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Bytes of all that have a container, and of their containers; counts and seconds."""
    stored = [(outcome.bytes, outcome.stored) for outcome in outcomes if outcome.stored is not None]
    return {
        **_totals(outcomes, "stored_bytes", stored),
        "seconds": sum(outcome.seconds for outcome in outcomes),
        "removed": sum(outcome.removed for outcome in outcomes),
    }


def _totals(outcomes: Sequence[Outcome], key: str, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Sums of ``sizes`` before and after, the latter as ``key``, and the number of sources that failed."""
    before, after = sum(size for size, _ in sizes), sum(size for _, size in sizes)
    failed = len({outcome.source for outcome in outcomes if outcome.error is not None})
    return {"bytes": before, key: after, "ratio": _ratio(before, after), "failed": failed}


def outcome_facts(outcome: Outcome, failure: tuple[str, int] | None) -> dict[str, Any]:
    """One source and its container, for ``--json``; ``failure`` is what was said of it, and its exit code."""
    return {
        "source": str(outcome.source),
        "target": str(outcome.target),
        "bytes": outcome.bytes,
        "stored_bytes": outcome.stored,
        "ratio": None if outcome.stored is None else _ratio(outcome.bytes, outcome.stored),
        "seconds": outcome.seconds,
        "base": outcome.base,
        "steps": outcome.steps,
        "present": outcome.present,
        "removed": outcome.removed,
        "replaced": outcome.replaced,
        **_failure(failure),
    }


def _failure(failure: tuple[str, int] | None) -> dict[str, Any]:
    return {"error": failure and failure[0], "exit_code": failure[1] if failure else 0}


def _predicted(nbytes: int, predicted: int) -> str:
    return f"{size(nbytes)} -> about {size(predicted)}, {nbytes / max(predicted, 1):.1f}x"


def _sizes(nbytes: int, stored: int) -> str:
    return f"{size(nbytes)} -> {size(stored)}, {nbytes / max(stored, 1):.2f}x"


def _ratio(nbytes: int, stored: int) -> float | None:
    return nbytes / stored if stored else None


_SHOWN = 20


def show(console: Console, report: Report, seconds: float) -> None:
    """Print the target, the casts, and everything that the target lacks."""
    lines = [
        f"{report.target}: {report.format} of {report.tensors:,} tensors, {size(report.bytes)} in {seconds:.2f} s",
        *(f"cast        {count:,} tensors {cast}" for cast, count in report.casts.items()),
    ]
    if report.quantized is not None:
        lines += quantized(report.quantized)
    if report.aliases:
        lines.append(f"tied        left out: {listed(report.aliases, _SHOWN)}")
    lines += [f"left out    {line}" for line in report.dropped]
    lines += [f"note        {line}" for line in report.notes]
    print_lines(console, lines)


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
