"""Runs jobs on many checkpoints: progress over all of them, a line for each, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt8.chaining.jobs import Job, Outcome
from ckpt8.cli.guard import console, print_lines, progress_bar, reported, waited
from ckpt8.cli.show.tables import fallback_phrase, steps_phrase
from ckpt8.core.text import counted, size


class Tally:
    """The outcomes so far, and the exit code: the highest of those that failed, 0 where none did.

    ``dry``: nothing was done, and the outcomes say what would be.
    """

    def __init__(self, *, dry: bool = False) -> None:
        self._dry = dry
        self.outcomes: list[Outcome] = []
        self.exit_code = 0
        self._failures: dict[int, tuple[str, int]] = {}

    def add(self, outcome: Outcome) -> None:
        """Count an outcome, and say what failed."""
        if outcome.error is not None:
            failure = self._failures[len(self.outcomes)] = reported(outcome.error)
            self.exit_code = max(self.exit_code, failure[1])
        self.outcomes.append(outcome)

    def line(self, outcome: Outcome) -> str | None:
        """What became of a checkpoint; None where an error said it."""
        if self._dry:
            return None if outcome.error is not None else preview_line(outcome)
        return None if outcome.stored is None else outcome_line(outcome)

    def show_total(self) -> None:
        """Print a line for all."""
        print_lines(console(), [preview_total(self.outcomes) if self._dry else total_line(self.outcomes, waited())])

    def to_json(self) -> dict[str, Any]:
        """Totals, the facts of every checkpoint, and the ``error`` of the first that failed, if any."""
        facts_of = preview_facts if self._dry else outcome_facts
        rows = [facts_of(outcome, self._failures.get(at)) for at, outcome in enumerate(self.outcomes)]
        facts = {**(preview_totals if self._dry else totals)(self.outcomes), "checkpoints": rows}
        return {**facts, "error": min(self._failures.items())[1][0]} if self._failures else facts


def run_jobs(batches: Iterable[Sequence[Job]], verb: str, *, quiet: bool, dry: bool = False) -> Tally:
    """Run all jobs, one after the other, or preview them. Unless ``quiet`` print a line for each."""
    tally, done = Tally(dry=dry), 0
    screen = console()
    for jobs in batches:
        works = [job.work for job in jobs]
        first, total = len(tally.outcomes) + 1, done + sum(works)
        for number, (job, work) in enumerate(zip(jobs, works, strict=True), first):
            label = f"{verb} {number}/{first - 1 + len(jobs)}"
            with progress_bar(
                f"{label} {job.source.name}", total=total, done=done, enabled=not (quiet or dry)
            ) as progress:
                outcome = job.preview() if dry else job.run(progress)
            done += work
            tally.add(outcome)
            if not quiet and (line := tally.line(outcome)) is not None:
                print_lines(screen, [line])
                sys.stdout.flush()
    return tally


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
