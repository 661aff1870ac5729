"""One bench: runs operations in processes of their own, round after round, and sums up their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ckpt8.cli.bench.child import Run
from ckpt8.cli.bench.jobs import Source
from ckpt8.cli.bench.probe import PEERS, remove
from ckpt8.cli.bench.sizes import free_bytes, in_gigabytes
from ckpt8.core.errors import Ckpt8Error, OutputError

PROBE, SOURCE, TRAINING = (f"ckpt8.cli.bench.{name}" for name in ("probe", "source", "training"))

_ROOM, _TRAINED_ROOM = 2.0, 2.4
"""Files that are on the disk at once, in sizes of the checkpoint: a copy, and a container, which can be as large if
nothing packs. A trained checkpoint packs, but is on the disk itself."""

_SLACK = 1 << 26


@dataclass(slots=True)
class Bench:
    """Where and how to measure: ``work`` is the folder for files, ``run`` does jobs, ``say`` shows each of them.

    ``trained`` describes the last trained checkpoint. ``failed`` are peers that failed, with the reason: they take no
    further part.
    """

    work: Path
    run: Run
    threads: int
    repeat: int
    say: Callable[[str], None] = lambda _: None
    trained: dict[str, Any] | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def survey(self, checkpoint: Path) -> Source:
        """Look at a checkpoint. Raises InputError."""
        return Source(**self.run(SOURCE, {"path": str(checkpoint)}, False))

    @contextmanager
    def training(self, nbytes: int) -> Iterator[Source]:
        """Train a checkpoint of about so many bytes; the context removes it. Raises UsageError, OutputError."""
        check_space(self.work, nbytes, f"a checkpoint of {in_gigabytes(nbytes)} and its copies", trained=True)
        target = self.work / "trained.pt"
        self.say(f"training a checkpoint of {in_gigabytes(nbytes)}")
        try:
            self.trained = self.run(TRAINING, {"size": nbytes, "target": str(target)}, False)
            yield self.survey(target)
        finally:
            target.unlink(missing_ok=True)

    def measure(self, source: Source, operations: Sequence[str], threads: int | None = None) -> list[dict[str, Any]]:
        """One row for each operation: times, sizes and memory. Raises errors of the operations, with their name."""
        container, target = self.work / "container.ckpt8", self.work / "output"
        job = {"source": asdict(source), "container": str(container), "threads": threads or self.threads, "keep": False}
        rows: dict[str, dict[str, Any]] = {name: {"times": []} for name in operations}
        try:
            self._do("compress", {**job, "target": str(container), "keep": True}, "packing the checkpoint")
            for number in range(self.repeat + 1):
                self._round(number, rows, {**job, "target": str(target)})
        finally:
            remove(container)
            remove(target)
        return [_row(name, source, row) for name, row in rows.items() if name not in self.failed]

    def _round(self, number: int, rows: dict[str, dict[str, Any]], job: dict[str, Any]) -> None:
        """Do every operation once; round 0 measures memory."""
        where = f"round {number} of {self.repeat}" if number else "memory"
        for name in [name for name in rows if name not in self.failed]:
            try:
                done = self._do(name, job, where, watch=number == 0)
            except Ckpt8Error as exc:
                if name not in PEERS:
                    raise
                self.failed[name] = str(exc)
                remove(Path(job["target"]))
                continue
            if number:
                rows[name]["times"].append(done["seconds"])
            else:
                rows[name] |= done

    def _do(self, name: str, job: dict[str, Any], where: str, *, watch: bool = False) -> dict[str, Any]:
        self.say(f"{where}: {name}, {job['threads']} threads")
        try:
            return self.run(PROBE, {**job, "name": name}, watch)
        except Ckpt8Error as exc:
            raise type(exc)(f"{name}: {exc}") from exc


def _row(name: str, source: Source, done: dict[str, Any]) -> dict[str, Any]:
    """Figures of one operation; speeds are bytes of the original checkpoint per second."""
    seconds, output = median(done["times"]), done["output_bytes"]
    return {
        "operation": name,
        "seconds": seconds,
        "spread": [min(done["times"]), max(done["times"])],
        "times": done["times"],
        "bytes_per_second": source.nbytes / seconds,
        "output_bytes": output,
        "ratio": source.nbytes / output if output else None,
        "peak_memory": max(done["peak_rss"], done["session_pss"]),
        "peak_rss": done["peak_rss"],
        "session_pss": done["session_pss"],
        "processes": done["processes"],
    }


def check_space(folder: Path, nbytes: int, what: str, *, trained: bool) -> None:
    """Raise OutputError if there is no room for the files made from a checkpoint of ``nbytes`` bytes."""
    needed, free = int(nbytes * (_TRAINED_ROOM if trained else _ROOM)) + _SLACK, free_bytes(folder)
    if free < needed:
        raise OutputError(
            f"{folder}: {what} need {in_gigabytes(needed)} and {in_gigabytes(free)} are free; "
            "give another folder with --scratch"
        )
