"""``ckpt8 bench --ranks``: a sharded state saved and loaded by ranks of one gloo job, beside torch's own storage.

The ranks are processes of this machine. They hold the state of a trained GPT as FSDP2 does, each a part of the rows of
every tensor, and do every operation with ckpt8 and with torch in turn. A first round brings code and caches in place;
its times are reported apart. The figures are medians of the rounds that follow, and their ratios.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any

from ckpt8.cli.bench.child import Run, run_child
from ckpt8.cli.bench.jobs import OWN, PLAIN, RANKS_DO
from ckpt8.cli.bench.measuring import Bench
from ckpt8.cli.bench.run import versions
from ckpt8.cli.bench.sizes import free_bytes
from ckpt8.core.errors import OutputError
from ckpt8.core.files.temporary import temporary_directory

GANG = "ckpt8.cli.bench.gang"


def bench_ranks(
    ranks: int,
    *,
    size: int,
    threads: int | None,
    repeat: int,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    run: Run | None = None,
) -> dict[str, Any]:
    """Measure saves and loads of a state of ``size`` bytes by so many ranks, each with ``threads`` threads.

    Raises OutputError if ``scratch`` has too little room, UsageError for the size.
    """
    folder = scratch or Path(gettempdir())
    free_bytes(folder)
    try:
        context = temporary_directory("ckpt8-bench-", folder)
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be written to: {exc.strerror}") from exc
    with context as work:
        here = Bench(work, run or run_child(work), threads or 0, repeat, say)
        with here.training(size) as source:
            say(f"{ranks} ranks save and load, {repeat + 1} rounds")
            job = {"source": source.path, "folder": str(work), "ranks": ranks, "threads": threads, "repeat": repeat}
            done = here.run(GANG, job, False)["ranks"]
        return {
            "ranks": ranks,
            "bytes": sum(each["state_bytes"] for each in done),
            "bytes_per_rank": max(each["state_bytes"] for each in done),
            "trained": here.trained,
            "threads": done[0]["threads"],
            "repeat": repeat,
            "versions": versions(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "results": [_row(name, done) for name in RANKS_DO],
        }


def _row(name: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One operation: the figures of both sides, and ratios of ckpt8 to torch.

    All ranks wait for the last one, so that the times of the first are those of all. Memory is that of the rank with
    the highest peak.
    """
    row: dict[str, Any] = {"operation": name}
    for side in (OWN, PLAIN):
        rounds = [each["rounds"][name][side] for each in ranks]
        times = [each["seconds"] for each in rounds[0][1:]]
        processor = [[each["processor_seconds"] for each in rank[1:]] for rank in rounds]
        row[side] = {
            "seconds": median(times),
            "times": times,
            "first": rounds[0][0]["seconds"],
            "processor_seconds": median(sum(each) for each in zip(*processor, strict=True)),
            "peak_memory": max(each["peak_memory"] for rank in rounds for each in rank[1:]),
            "stored_bytes": rounds[0][-1]["stored_bytes"],
        }
    return {**row, "ratio": row[OWN]["seconds"] / row[PLAIN]["seconds"]}
