"""Runs jobs on many checkpoints: progress over all of them, a line for each, and an exit code."""

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
        self._said: list[tuple[str | None, int]] = []

    def add(self, outcome: Outcome) -> str | None:
        """Count an outcome, and say what failed; or return a line on what became of the checkpoint."""
        self.outcomes.append(outcome)
        self._said.append((None, 0) if outcome.error is None else reported(outcome.error))
        self.exit_code = max(self.exit_code, self._said[-1][1])
        if self._dry:
            return None if outcome.error is not None else _preview_line(outcome)
        return None if outcome.stored is None else _outcome_line(outcome)

    def show_total(self) -> None:
        """Print a line for all."""
        facts = self._totals()
        failed = f"; {facts['failed']} {'would fail' if self._dry else 'failed'}" if facts["failed"] else ""
        if self._dry:
            count = sum(outcome.predicted is not None for outcome in self.outcomes)
            sizes = f": {_predicted(facts['bytes'], facts['predicted_bytes'])}" if count else ""
            line = f"{counted(count, 'container')} to write{sizes}{failed}; nothing was written or removed"
        else:
            # A checkpoint that has two outcomes counts once.
            count = len({outcome.source for outcome in self.outcomes})
            sizes = _sizes(facts["bytes"], facts["stored_bytes"]) if facts["stored_bytes"] else "nothing was compressed"
            line = f"{counted(count, 'checkpoint')}: {sizes} in {waited():.2f} s{failed}"
        print_lines(console(), [line])

    def to_json(self) -> dict[str, Any]:
        """Totals, the facts of every checkpoint, and the ``error`` of the first that failed, if any."""
        rows = [self._facts(outcome, *said) for outcome, said in zip(self.outcomes, self._said, strict=True)]
        errors = [error for error, _ in self._said if error is not None]
        return {**self._totals(), "checkpoints": rows, **({"error": errors[0]} if errors else {})}

    def _totals(self) -> dict[str, Any]:
        """Bytes of all that have a container, or would get one, and of their containers; counts and seconds."""
        name = "predicted" if self._dry else "stored"
        pairs = [(outcome.bytes, after) for outcome in self.outcomes if (after := getattr(outcome, name)) is not None]
        total, packed = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
        failed = len({outcome.source for outcome in self.outcomes if outcome.error is not None})
        facts = {"bytes": total, f"{name}_bytes": packed, "ratio": _ratio(total, packed), "failed": failed}
        if self._dry:
            return {"dry_run": True, **facts, "would_remove": sum(outcome.would_remove for outcome in self.outcomes)}
        return {
            **facts,
            "seconds": sum(outcome.seconds for outcome in self.outcomes),
            "removed": sum(outcome.removed for outcome in self.outcomes),
        }

    def _facts(self, outcome: Outcome, error: str | None, exit_code: int) -> dict[str, Any]:
        """One source and its container; ``error`` is what was said of it."""
        known = {"source": str(outcome.source), "target": str(outcome.target), "bytes": outcome.bytes}
        stored = outcome.stored if outcome.predicted is None else outcome.predicted
        sizes = {"stored_bytes": outcome.stored, "ratio": None if stored is None else _ratio(outcome.bytes, stored)}
        previewed = {
            "predicted_bytes": outcome.predicted,
            **sizes,
            "base": outcome.base,
            "present": outcome.present,
            "would_replace": outcome.replaced,
            "would_remove": outcome.would_remove,
        }
        done = {
            **sizes,
            "seconds": outcome.seconds,
            "base": outcome.base,
            "steps": outcome.steps,
            "present": outcome.present,
            "removed": outcome.removed,
            "replaced": outcome.replaced,
        }
        return {**known, **(previewed if self._dry else done), "error": error, "exit_code": exit_code}


def run_jobs(batches: Iterable[Sequence[Job]], verb: str, *, quiet: bool, dry: bool = False) -> Tally:
    """Run all jobs, one after the other, or preview them. Unless ``quiet`` print a line for each."""
    tally, done, screen = Tally(dry=dry), 0, console()
    for jobs in batches:
        works = [job.work for job in jobs]
        last, total = len(tally.outcomes) + len(jobs), done + sum(works)
        for job, work in zip(jobs, works, strict=True):
            label = f"{verb} {len(tally.outcomes) + 1}/{last} {job.source.name}"
            with progress_bar(label, total=total, done=done, enabled=not (quiet or dry)) as progress:
                outcome = job.run(progress, dry=dry)
            done += work
            line = tally.add(outcome)
            if not quiet and line is not None:
                print_lines(screen, [line])
                sys.stdout.flush()
    return tally


def _outcome_line(outcome: Outcome) -> str:
    """Sizes, base, error in steps, seconds, what is under no budget, what was replaced, whether the source is gone."""
    kind = "" if outcome.base is None else f", delta to {outcome.base}"
    how = ", was there already" if outcome.present else f" in {outcome.seconds:.2f} s"
    steps = f", {steps_phrase(outcome.steps)}" if outcome.steps else ""
    fallback = f"; {phrase}" if outcome.steps and (phrase := fallback_phrase(outcome.steps)) else ""
    gone = f"; {outcome.source.name} removed" if outcome.removed else ""
    old = f"; replaced {outcome.replaced}" if outcome.replaced else ""
    return f"{outcome.target}: {_sizes(outcome.bytes, outcome.stored or 0)}{kind}{steps}{how}{fallback}{old}{gone}"


def _preview_line(outcome: Outcome) -> str:
    """What would become of a checkpoint."""
    if outcome.predicted is None:
        what = f"{_sizes(outcome.bytes, outcome.stored or 0)}, is there already"
    else:
        what = f"would be written, {_predicted(outcome.bytes, outcome.predicted)}"
        what += "" if outcome.base is None else f", less as a delta to {outcome.base}"
        what += f"; would replace {outcome.replaced}" if outcome.replaced else ""
    gone = f"; {outcome.source} would be removed once it is verified" if outcome.would_remove else ""
    return f"{outcome.target}: {what}{gone}"


def _predicted(nbytes: int, predicted: int) -> str:
    return f"{size(nbytes)} -> about {size(predicted)}, {nbytes / max(predicted, 1):.1f}x"


def _sizes(nbytes: int, stored: int) -> str:
    return f"{size(nbytes)} -> {size(stored)}, {nbytes / max(stored, 1):.2f}x"


def _ratio(nbytes: int, stored: int) -> float | None:
    return nbytes / stored if stored else None
