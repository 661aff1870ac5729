"""Starts the ranks of one gloo job for ``bench --ranks``, as torchrun does, and collects what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from ckpt8.cli.bench.child import failure_of, python, text_of

Process = subprocess.Popen[bytes]

_RANK = "ckpt8.cli.bench.rank"
_INTERVAL = 0.05
"""Seconds between looks at the ranks."""


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What each rank of the job measured, in ``ranks``. Raises Ckpt8Error if one fails."""
    folder, world = Path(job["folder"]), job["ranks"]
    with ExitStack() as stack:
        outputs = [[stack.enter_context(TemporaryFile(dir=folder)) for _ in range(2)] for _ in range(world)]
        ranks = [_start(job, rank, _environment(rank, world), *files) for rank, files in enumerate(outputs)]
        try:
            failed = _wait(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [[text_of(file) for file in files] for files in outputs]
        if failed is not None:
            raise failure_of(ranks[failed].returncode, texts[failed][1])
        return {"ranks": [json.loads(said) for said, _ in texts]}


def _start(job: dict[str, Any], rank: int, environment: dict[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
    code = "from ckpt8.cli.bench.child import main; main(*sys.argv[1:])"
    command = python(code, _RANK, json.dumps({**job, "rank": rank}))
    return subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **environment})  # noqa: S603


def _wait(processes: list[Process]) -> int | None:
    """Wait for all; the number of the first that fails, at once, since the others wait for it."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(_INTERVAL)


def _environment(rank: int, world: int) -> dict[str, str]:
    """What torchrun sets for the ranks of one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    return {name: str(number) for name, number in numbers.items()}
