"""``ckpt8 bench``: size, time and memory of every operation, as ratios to copying the files in the same run.

Each operation runs in a process of its own, in turn with the others. A first round brings the source into the page
cache and measures memory, which takes time; the rounds that count follow, and medians and ranges of them are reported.
Outputs are flushed to the disk and removed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from ckpt8 import __version__
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.cli.bench.child import Run, run_child
from ckpt8.cli.bench.measuring import Bench, check_space
from ckpt8.cli.bench.probe import IN_MEMORY, OPERATIONS, left_out
from ckpt8.cli.bench.scaling import over_sizes, over_threads
from ckpt8.cli.bench.sizes import available_memory, free_bytes
from ckpt8.cli.bench.source import Source
from ckpt8.core.errors import OutputError
from ckpt8.core.files.temporary import temporary_directory
from ckpt8.core.workers import default_threads


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
        "versions": _versions(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "left_out": missing | here.failed,
        "results": beside_copy(rows),
        "load_to_torch": beside_torch(rows, source.nbytes),
    }
    if sizes:
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
