"""How operations scale: over threads on one checkpoint, and over sizes, where time should be linear and memory flat."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from ckpt8.cli.bench.measuring import Bench
from ckpt8.cli.bench.probe import IN_MEMORY, left_out
from ckpt8.cli.bench.sizes import available_memory, in_gigabytes
from ckpt8.cli.bench.source import Source
from ckpt8.core.errors import OutputError, UsageError

_OPERATIONS = ("compress", "compress --no-stats", "restore", "verify", "load")
_BESIDE = ("cp", "zstd -3", "torch.load")


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({1 << k for k in range(most.bit_length()) if 1 << k <= most} | {most})


def over_threads(
    here: Bench, source: Source, measured: list[dict[str, Any]], missing: Collection[str]
) -> list[dict[str, Any]]:
    """A row for each number of threads and operation; ``measured`` are those with all threads.

    ``speedup`` is the time with one thread by the time with these.
    """
    operations = [name for name in ("zstd -3", *_OPERATIONS) if name not in missing]
    rows = []
    for threads in thread_counts(here.threads):
        done = measured if threads == here.threads else here.measure(source, operations, threads)
        rows += [{"threads": threads, **row} for row in done if row["operation"] in operations]
    alone = {row["operation"]: row["seconds"] for row in rows if row["threads"] == 1}
    return [{**row, "speedup": alone[row["operation"]] / row["seconds"]} for row in rows]


def over_sizes(here: Bench, sizes: Sequence[int]) -> dict[str, Any]:
    """``sizes``: rows for each size and operation; ``skipped``: sizes that cannot be had here, and why; ``laws``.

    Each checkpoint is trained once and removed before the next.
    """
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for nbytes in sorted(set(sizes)):
        try:
            with here.training(nbytes) as source:
                missing = left_out(source, available_memory())
                done = here.measure(source, [name for name in (*_BESIDE, *_OPERATIONS) if name not in missing])
                rows += [{"bytes": source.nbytes, **row} for row in done]
        except (OutputError, UsageError) as exc:
            skipped[in_gigabytes(nbytes)] = str(exc)
    if not rows:
        raise UsageError(f"--sizes: {next(iter(skipped.values()), 'names none')}")
    names = [name for name in (*_BESIDE, *_OPERATIONS) if any(row["operation"] == name for row in rows)]
    laws = [law(name, [row for row in rows if row["operation"] == name]) for name in names]
    return {"sizes": rows, "skipped": skipped, "laws": laws}


def law(operation: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How time and memory grow with the size, of rows of one operation in the order of their sizes.

    ``exponent`` is b of seconds ≈ a · bytes^b, by least squares of the logarithms: 1 is linear; None of a single size.
    ``seconds_per_gb`` and ``peak_memory`` are those of the smallest and of the largest size; of operations that
    hold all tensors the bytes of the files are taken off the memory.
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
    """Of the line through points that has the least squares; None where they have one x."""
    mean = sum(x for x, _ in points) / len(points)
    spread = sum((x - mean) ** 2 for x, _ in points)
    return sum((x - mean) * y for x, y in points) / spread if spread else None
