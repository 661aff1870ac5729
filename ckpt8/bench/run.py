"""``ckpt8 bench``: size, time and memory of every operation, as ratios to copying the file in the same run.

Each operation runs in a process of its own, in turn with the others, several times; medians are reported. The source
stays in the page cache throughout, outputs are flushed to the disk.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from ckpt8._version import __version__
from ckpt8.bench.probe import OPERATIONS
from ckpt8.errors import InputError, UsageError
from ckpt8.readers.directory import is_directory
from ckpt8.workers import default_threads

_READ_CONTAINER = frozenset({"restore", "verify", "load"})
_TRAINING_STEPS = 4


def train_checkpoint(target: Path, size: float) -> None:
    """Write a checkpoint of about ``size`` bytes of a GPT that was trained for a few steps. Raises UsageError."""
    import torch

    from ckpt8.bench.gpt import config_for_bytes, train

    try:
        config = config_for_bytes(int(size))
    except ValueError as exc:
        raise UsageError(f"--size {size:g}: {exc}") from exc
    checkpoint = train(config, torch.optim.AdamW, _TRAINING_STEPS, batch_size=2, lr=5e-5, warmup=2)
    torch.save(checkpoint, target)


def _probe(name: str, source: Path, target: Path, threads: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "ckpt8.bench.probe", name, str(source), str(target), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{source}: {name} failed: {last}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def bench(
    checkpoint: Path | None = None, *, size: float = 2.5e8, threads: int | None = None, repeat: int = 3
) -> dict[str, Any]:
    """Measure every operation on a checkpoint, or on one trained at ``size`` bytes.

    Figures are medians of ``repeat`` rounds. Raises InputError when the checkpoint cannot be read.
    """
    if checkpoint is not None and is_directory(checkpoint):
        raise InputError(f"{checkpoint}: a directory; the benchmark takes one of the checkpoint files inside it")
    threads = threads or default_threads()
    with tempfile.TemporaryDirectory(prefix="ckpt8-bench-") as directory:
        work = Path(directory)
        source = checkpoint
        if source is None:
            source = work / "trained.pt"
            train_checkpoint(source, size)
        container = work / "container.ckpt8"
        seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        peaks: dict[str, float] = {}
        sizes: dict[str, int] = {}
        for round_number in range(repeat):
            for name in OPERATIONS:
                if not round_number and name == "restore":
                    _probe("compress", source, container, threads)
                given = container if name in _READ_CONTAINER else source
                target = work / "output"
                result = _probe(name, given, target, threads)
                seconds[name].append(result["seconds"])
                peaks[name] = max(peaks.get(name, 0), result["peak_rss"])
                if target.exists():
                    sizes[name] = target.stat().st_size
                    target.unlink()
        return _report(source.name, source.stat().st_size, threads, repeat, seconds, peaks, sizes)


def _report(
    name: str,
    size: int,
    threads: int,
    repeat: int,
    seconds: dict[str, list[float]],
    peaks: dict[str, float],
    sizes: dict[str, int],
) -> dict[str, Any]:
    import torch

    reference = median(seconds["cp"])
    rows = [
        {
            "operation": operation,
            "seconds": median(times),
            "spread": [min(times), max(times)],
            "to_cp": median(times) / reference,
            "bytes_per_second": size / median(times),
            "output_bytes": sizes.get(operation),
            "ratio": size / sizes[operation] if sizes.get(operation) else None,
            "peak_rss": int(peaks[operation]),
        }
        for operation, times in seconds.items()
    ]
    return {
        "checkpoint": name,
        "bytes": size,
        "threads": threads,
        "repeat": repeat,
        "versions": {"ckpt8": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.machine(),
        "results": rows,
    }
