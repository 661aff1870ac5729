"""Runs jobs on many checkpoints: progress over all of them, a line for each, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt8.chaining.jobs import Job, Outcome
from ckpt8.cli.guard import console, print_lines, progress_bar, reported, waited
from ckpt8.cli.show.outcomes import (
    outcome_facts,
    outcome_line,
    preview_facts,
    preview_line,
    preview_total,
    preview_totals,
    total_line,
    totals,
)


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
