"""Runs of small checkpoints, and the processes that compress them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from run_kit import SmallRun


def make_run(folder: Path, count: int, *, width: int = 64, seed: int = 0, every: int = 5) -> list[Path]:
    """Checkpoints ``step-5.pt``, ``step-10.pt``, ... of a model that trains with AdamW; long ago, by their times."""
    folder.mkdir(parents=True, exist_ok=True)
    run = SmallRun(seed, (width, 2 * width, width))
    found = [folder / f"step-{step}.pt" for step in range(every, count * every + 1, every)]
    for number, path in enumerate(found, 1):
        torch.save(run.advance(every) | {"step": number * every}, path)
        age(path)
    return found


def age(path: Path, seconds: float = 3600) -> None:
    """Make a file, or all in a directory, look as if nobody had touched it for a while."""
    for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
        if not each.is_symlink():
            then = each.stat().st_mtime - seconds
            os.utime(each, (then, then))


def command(*arguments: object, **options) -> subprocess.Popen:
    """A process of the command line."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "ckpt8", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them, and so the command, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        **options,
    )


def until(condition, seconds: float = 60) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
