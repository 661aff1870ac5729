"""Runs jobs on many checkpoints: progress over all of them, a line for each, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from ckpt8.chaining.jobs import Job, Outcome
from ckpt8.cli.guard import reported
from ckpt8.cli.output import console, print_lines, progress_bar, waited
from ckpt8.cli.show.outcomes import outcome_facts, outcome_line, total_line, totals
from ckpt8.core.text import printable


class Tally:
    """The outcomes so far, and the exit code: the highest of those that failed, 0 where none did."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.exit_code = 0
        self._failures: dict[int, tuple[str, int]] = {}

    def add(self, outcome: Outcome) -> None:
        """Count an outcome, and say what failed."""
        if outcome.error is not None:
            failure = self._failures[len(self.outcomes)] = reported(outcome.error)
            self.exit_code = max(self.exit_code, failure[1])
        self.outcomes.append(outcome)

    def show(self, screen: TextIO) -> None:
        """Print the lines that were not printed while ``quiet``."""
        screen.writelines(f"{printable(outcome_line(each))}\n" for each in self.outcomes if each.stored is not None)

    def show_total(self) -> None:
        """Print a line for all."""
        print_lines(console(), [total_line(self.outcomes, waited())])

    def to_json(self) -> dict[str, Any]:
        """Totals, the facts of every checkpoint, and the ``error`` of the first that failed, if any."""
        rows = [outcome_facts(outcome, self._failures.get(at)) for at, outcome in enumerate(self.outcomes)]
        facts = {**totals(self.outcomes), "checkpoints": rows}
        return {**facts, "error": min(self._failures.items())[1][0]} if self._failures else facts


def run_jobs(batches: Iterable[Sequence[Job]], verb: str, *, quiet: bool) -> Tally:
    """Run all jobs, one after the other. Unless ``quiet`` print a line for each."""
    tally, done = Tally(), 0
    screen = console()
    for jobs in batches:
        works = [job.work for job in jobs]
        first, total = len(tally.outcomes) + 1, done + sum(works)
        for number, (job, work) in enumerate(zip(jobs, works, strict=True), first):
            label = f"{verb} {number}/{first - 1 + len(jobs)}"
            with progress_bar(f"{label} {job.source.name}", total=total, done=done, enabled=not quiet) as progress:
                outcome = job.run(progress)
            done += work
            tally.add(outcome)
            if not quiet and outcome.stored is not None:
                print_lines(screen, [outcome_line(outcome)])
                sys.stdout.flush()
    return tally
