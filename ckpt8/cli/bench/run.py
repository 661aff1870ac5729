"""``ckpt8 bench``: size, time and memory of every operation, as ratios to a copy of the files in the same run.

Each operation runs in a process of its own, in turn with the others. A first round brings the source into the page
cache and measures memory, which takes time; the report has medians and ranges of the rounds that follow. Each operation
flushes its output to the disk, and removes it afterwards. ``--scaling`` also measures operations over threads on one
checkpoint, and over sizes, where time should be linear and memory flat.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from ckpt8 import __version__
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.cli.bench.child import Run, run_child
from ckpt8.cli.bench.jobs import Source
from ckpt8.cli.bench.measuring import Bench, check_space
from ckpt8.cli.bench.probe import IN_MEMORY, OPERATIONS, left_out
from ckpt8.cli.bench.sizes import available_memory, free_bytes, in_gigabytes
from ckpt8.core.errors import OutputError, UsageError
from ckpt8.core.files.temporary import temporary_directory
from ckpt8.core.workers import default_threads

_OPERATIONS = ("compress", "compress --no-stats", "restore", "verify", "load")
_YARDSTICKS = ("cp", "zstd -3", "torch.load")


def compare_with_copy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with ``to_cp``: its ratios to ``cp``."""
    (copy,) = (row for row in rows if row["operation"] == "cp")
    keys = ("seconds", "bytes_per_second", "output_bytes", "peak_memory")
    return [{**row, "to_cp": {key: None if row[key] is None else row[key] / copy[key] for key in keys}} for row in rows]


def compare_with_torch(rows: list[dict[str, Any]], nbytes: int) -> dict[str, Any] | None:
    """Ratios of ``load`` to ``torch.load(mmap=False)``, and the memory of both beyond the bytes of the files."""
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
    """Measure every operation on a checkpoint, a file or a directory; without one, train one of ``size`` bytes.

    With ``sizes``, measure how operations scale over these, and over numbers of threads up to ``threads``. Raises
    InputError for the checkpoint, OutputError if ``scratch`` has too little room, UsageError for the sizes.
    """
    folder = scratch or Path(gettempdir())
    free_bytes(folder)
    with ExitStack() as stack:
        try:
            work = stack.enter_context(temporary_directory("ckpt8-bench-", folder))
        except OSError as exc:
            raise OutputError(f"{folder}: cannot be written to: {exc.strerror}") from exc
        here = Bench(work, run or run_child(work), threads or default_threads(), repeat, say)
        if checkpoint is not None:
            check_space(here.work, size_of(checkpoint), f"the copies of {checkpoint}", trained=False)
            result = _measured(here, here.survey(checkpoint), checkpoint.name, sizes)
        else:
            with here.training(size) as source:
                result = _measured(here, source, "trained.pt", sizes)
        if sizes:
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
        "versions": versions(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "left_out": missing | here.failed,
        "results": compare_with_copy(rows),
        "load_to_torch": compare_with_torch(rows, source.nbytes),
    }
    if sizes:
        result["scaling"] = {"threads": over_threads(here, source, rows, set(missing) | set(IN_MEMORY[1:]))}
    return result


def versions() -> dict[str, str]:
    """Of ckpt8, Python, and the packages that are compared."""
    found = {"ckpt8": __version__, "python": platform.python_version()}
    for package in ("torch", "zstandard", "zipnn"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({1 << k for k in range(most.bit_length()) if 1 << k <= most} | {most})


def over_threads(
    here: Bench, source: Source, measured: list[dict[str, Any]], missing: Collection[str]
) -> list[dict[str, Any]]:
    """A row for each number of threads and operation; ``measured`` has the rows of all threads.

    ``speedup`` is the time with one thread divided by the time with these.
    """
    operations = [name for name in ("zstd -3", *_OPERATIONS) if name not in missing]
    rows = []
    for threads in thread_counts(here.threads):
        done = measured if threads == here.threads else here.measure(source, operations, threads)
        rows += [{"threads": threads, **row} for row in done if row["operation"] in operations]
    alone = {row["operation"]: row["seconds"] for row in rows if row["threads"] == 1}
    return [{**row, "speedup": alone[row["operation"]] / row["seconds"]} for row in rows]


def over_sizes(here: Bench, sizes: Sequence[int]) -> dict[str, Any]:
    """``sizes``: rows for each size and operation; ``skipped``: sizes that do not fit here, and why; ``laws``.

    ``bench`` trains each checkpoint once and removes it before the next.
    """
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for nbytes in sorted(set(sizes)):
        try:
            with here.training(nbytes) as source:
                missing = left_out(source, available_memory())
                done = here.measure(source, [name for name in (*_YARDSTICKS, *_OPERATIONS) if name not in missing])
                rows += [{"bytes": source.nbytes, **row} for row in done]
        except (OutputError, UsageError) as exc:
            skipped[in_gigabytes(nbytes)] = str(exc)
    if not rows:
        raise UsageError(f"--sizes: {next(iter(skipped.values()), 'names none')}")
    names = [name for name in (*_YARDSTICKS, *_OPERATIONS) if any(row["operation"] == name for row in rows)]
    laws = [law(name, [row for row in rows if row["operation"] == name]) for name in names]
    return {"sizes": rows, "skipped": skipped, "laws": laws}


def law(operation: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The growth of time and memory with the size, from rows of one operation in the order of their sizes.

    ``exponent`` is b of seconds ≈ a · bytes^b, by least squares of the logarithms: 1 is linear; None for a single size.
    ``seconds_per_gb`` and ``peak_memory`` have the smallest and the largest size; the memory of operations that hold
    all tensors excludes the bytes of the files.
    """
    held = operation in IN_MEMORY
    ends = [rows[0], rows[-1]]
    return {
        "operation": operation,
        "exponent": slope([(math.log(row["bytes"]), math.log(row["seconds"])) for row in rows]),
        "seconds_per_gb": [1e9 * row["seconds"] / row["bytes"] for row in ends],
        "peak_memory": [row["peak_memory"] - (row["bytes"] if held else 0) for row in ends],
        "beyond_files": held,
    }


def slope(points: list[tuple[float, float]]) -> float | None:
    """The slope of the least-squares line through points; None if they have one x."""
    mean = sum(x for x, _ in points) / len(points)
    spread = sum((x - mean) ** 2 for x, _ in points)
    return sum((x - mean) * y for x, y in points) / spread if spread else None
