"""``ckpt8 bench``: size, time and memory of every operation, as ratios to copying the files in the same run.

Each operation runs in a process of its own, in turn with the others. A first round brings the source into the page
cache and measures memory, which takes time; the rounds that count follow, and medians and ranges of them are reported.
Outputs are flushed to the disk and removed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any

from ckpt8._version import __version__
from ckpt8.bench.child import Run, run_child
from ckpt8.bench.probe import IN_MEMORY, OPERATIONS, PEERS, left_out, remove
from ckpt8.bench.sizes import available_memory, free_bytes, in_gigabytes
from ckpt8.bench.source import Source
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.core.errors import Ckpt8Error, OutputError
from ckpt8.core.files.temporary import temporary_directory
from ckpt8.core.workers import default_threads

PROBE, SOURCE, TRAINING = (f"ckpt8.bench.{name}" for name in ("probe", "source", "training"))

_ROOM, _TRAINED_ROOM = 2.0, 2.4
"""What is on the disk at once, in sizes of the checkpoint: a copy, and a container, which can be as large where nothing
can be packed; of one that was trained it takes less, and the checkpoint itself is there too."""

_SLACK = 1 << 26


@dataclass(slots=True)
class Bench:
    """Where and how to measure: what is written goes to ``work``, ``run`` does jobs, ``say`` is told of each.

    ``trained`` says what was trained last, ``failed`` which peers failed, and how: they are left out from then on.
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
        found = self.run(SOURCE, {"path": str(checkpoint)}, False)
        return Source(**{**found, "loaded": tuple(found["loaded"])})

    @contextmanager
    def training(self, nbytes: int) -> Iterator[Source]:
        """A checkpoint of about so many bytes, for as long as the context lasts. Raises UsageError, OutputError."""
        check_space(self.work, nbytes, f"a checkpoint of {in_gigabytes(nbytes)} and its copies", trained=True)
        target = self.work / "trained.pt"
        self.say(f"training a checkpoint of {in_gigabytes(nbytes)}")
        try:
            self.trained = self.run(TRAINING, {"size": nbytes, "target": str(target)}, False)
            yield self.survey(target)
        finally:
            target.unlink(missing_ok=True)

    def measure(self, source: Source, operations: Sequence[str], threads: int | None = None) -> list[dict[str, Any]]:
        """One row for each operation: times, sizes and memory. Raises what the operations raise, with their name."""
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
        """Every operation once; round 0 is the one that measures memory."""
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


def beside_copy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with ``to_cp``: what it is of ``cp``'s."""
    (copy,) = (row for row in rows if row["operation"] == "cp")
    keys = ("seconds", "bytes_per_second", "output_bytes", "peak_memory")
    return [{**row, "to_cp": {key: None if row[key] is None else row[key] / copy[key] for key in keys}} for row in rows]


def beside_torch(rows: list[dict[str, Any]], nbytes: int) -> dict[str, Any] | None:
    """What ``load`` is of ``torch.load(mmap=False)``: time, memory, and bytes of memory beyond those of the files."""
    found = {row["operation"]: row for row in rows}
    if not {"load", "torch.load"} <= set(found):
        return None
    ours, theirs = found["load"], found["torch.load"]
    return {
        "seconds": ours["seconds"] / theirs["seconds"],
        "peak_memory": ours["peak_memory"] / theirs["peak_memory"],
        "beyond_files": ours["peak_memory"] - nbytes,
        "torch_beyond_files": theirs["peak_memory"] - nbytes,
    }


def check_space(folder: Path, nbytes: int, what: str, *, trained: bool) -> None:
    """Raise OutputError where there is no room for what is made of a checkpoint of ``nbytes`` bytes."""
    needed, free = int(nbytes * (_TRAINED_ROOM if trained else _ROOM)) + _SLACK, free_bytes(folder)
    if free < needed:
        raise OutputError(
            f"{folder}: {what} need {in_gigabytes(needed)} and {in_gigabytes(free)} are free; "
            "give another folder with --scratch"
        )


@contextmanager
def prepared(
    scratch: Path | None, threads: int | None, repeat: int, say: Callable[[str], None], run: Run | None
) -> Iterator[Bench]:
    """A bench in a folder of its own in ``scratch``, which goes with everything in it. Raises OutputError."""
    folder = scratch or Path(gettempdir())
    free_bytes(folder)
    with ExitStack() as stack:
        try:
            work = stack.enter_context(temporary_directory("ckpt8-bench-", folder))
        except OSError as exc:
            raise OutputError(f"{folder}: cannot be written to: {exc.strerror}") from exc
        yield Bench(work, run or run_child(work), threads or default_threads(), repeat, say)


def bench(
    checkpoint: Path | None = None,
    *,
    size: int = 250_000_000,
    sizes: Sequence[int] = (),
    threads: int | None = None,
    repeat: int = 3,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    run: Run | None = None,
) -> dict[str, Any]:
    """Measure every operation on a checkpoint, a file or a directory, or on one that is trained at ``size`` bytes.

    ``sizes``, where there are any, are those over which to measure how operations scale, besides the numbers of
    threads up to ``threads``. Raises InputError for the checkpoint, OutputError where ``scratch`` has too little room,
    UsageError for the sizes.
    """
    with prepared(scratch, threads, repeat, say, run) as here:
        if checkpoint is not None:
            check_space(here.work, size_of(checkpoint), f"the copies of {checkpoint}", trained=False)
            source = here.survey(checkpoint)
            result = _measured(here, source, checkpoint.name, sizes)
        else:
            with here.training(size) as source:
                result = _measured(here, source, "trained.pt", sizes)
        if sizes:
            from ckpt8.bench.scaling import over_sizes

            result["scaling"] |= over_sizes(here, sizes)
        return result


def _measured(here: Bench, source: Source, name: str, sizes: Sequence[int]) -> dict[str, Any]:
    missing = left_out(source, available_memory())
    rows = here.measure(source, [operation for operation in OPERATIONS if operation not in missing])
    result = {
        "checkpoint": name,
        "bytes": source.nbytes,
        "trained": here.trained,
        "threads": here.threads,
        "repeat": here.repeat,
        "versions": _versions(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "left_out": missing | here.failed,
        "results": beside_copy(rows),
        "load_to_torch": beside_torch(rows, source.nbytes),
    }
    if sizes:
        from ckpt8.bench.scaling import over_threads

        result["scaling"] = {"threads": over_threads(here, source, rows, set(missing) | set(IN_MEMORY[1:]))}
    return result


def _versions() -> dict[str, str]:
    found = {"ckpt8": __version__, "python": platform.python_version()}
    for package in ("torch", "zstandard", "zipnn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
