"""Measures ``cp``, zstd, ZipNN and the start of Python without torch; and how ``bench`` measures all operations.

A job is one operation on a checkpoint: it prepares, then works against the clock. This module imports no torch, whose
memory would count for ``cp`` and zstd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import zstandard

from ckpt8.cli.bench.child import peak_memory, python

_CHUNK = 1 << 22
_PIECE = 1 << 27
"""ZipNN works in memory, on so many bytes at a time."""

_ELEMENT = 4
_LENGTH_BYTES = 8

ZIPNN = "ZipNN"
START = "start of Python, torch, numba"
PEERS = frozenset({ZIPNN})
"""Packages of others, which may fail on a checkpoint that ckpt8 handles."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint. ``nbytes`` is the size of its files.

    ``loaded`` are the members with tensors that ``torch.load(weights_only=True)`` or safetensors open, relative to the
    path; an empty one is the path itself. ``layout`` is the floating type of most of its bytes.
    """

    path: str
    nbytes: int
    directory: bool
    loaded: Sequence[str]
    layout: str

    @property
    def files(self) -> list[Path]:
        """The paths of ``loaded``."""
        return [Path(self.path) / member if member else Path(self.path) for member in self.loaded]


@dataclass(frozen=True, slots=True)
class Job:
    """``container`` holds ``source`` already; an operation writes to ``target``."""

    source: Source
    container: Path
    target: Path
    threads: int


Operation = Callable[[Job], Callable[[], object]]
"""Prepares a job, and returns the function to time."""


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do one of the ``OPERATIONS`` of this module, see ``measured``."""
    return measured(job, OPERATIONS)


def measured(job: dict[str, Any], operations: Mapping[str, Operation]) -> dict[str, Any]:
    """Do the operation ``name``: seconds of wall time, without imports and preparation, and peak memory in bytes.

    ``output_bytes`` is the size of the output, which is removed unless the job says ``keep``; None without output.
    """
    target = Path(job["target"])
    run = operations[job["name"]](Job(Source(**job["source"]), Path(job["container"]), target, job["threads"]))
    start = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - start
    peak = peak_memory()
    del kept
    output = sum(file.stat().st_size for file in _files(target)) if target.exists() else None
    if not job["keep"]:
        remove(target)
    return {"seconds": seconds, "peak_rss": peak, "output_bytes": output}


def remove(path: Path) -> None:
    """Remove a file, a directory or nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(path: Path) -> list[Path]:
    """A file, or all files below a directory, in order."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def flush(path: Path) -> None:
    """Flush ``path`` and all files and directories below it to the disk."""
    for file in (path, *filter(Path.exists, path.rglob("*"))):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _copy(job: Job) -> Callable[[], object]:
    """``cp`` and fsync, the yardstick of all others."""

    def run() -> None:
        subprocess.run(["cp", "-R", "--", job.source.path, str(job.target)], check=True)  # noqa: S603, S607
        flush(job.target)

    return run


def _zstd(level: int, job: Job) -> Callable[[], object]:
    """``zstd -LEVEL -T`` and fsync; the files of a directory one after another."""

    def run() -> None:
        compressor = zstandard.ZstdCompressor(level=level, threads=job.threads)
        with job.target.open("wb") as writer:
            for file in _files(Path(job.source.path)):
                with file.open("rb") as reader:
                    size = file.stat().st_size
                    compressor.copy_stream(reader, writer, size=size, read_size=_CHUNK, write_size=_CHUNK)
        flush(job.target)

    return run


def _zipnn(job: Job) -> Callable[[], object]:
    """ZipNN in the layout of the checkpoint, piece by piece, and fsync."""
    zipnn = import_module("zipnn")

    def run() -> None:
        with job.target.open("wb") as writer:
            for file in _files(Path(job.source.path)):
                with file.open("rb") as reader:
                    while piece := bytearray(reader.read(_PIECE)):
                        # ZipNN 0.5.4 writes beyond its buffers unless this is a multiple of the size of an element.
                        piece += bytes(-len(piece) % _ELEMENT)
                        packed = zipnn.ZipNN(bytearray_dtype=job.source.layout, threads=job.threads).compress(piece)
                        writer.write(len(packed).to_bytes(_LENGTH_BYTES, "little"))
                        writer.write(packed)
        flush(job.target)

    return run


def _start(job: Job) -> Callable[[], object]:  # noqa: ARG001
    """The start of each command on tensors: Python, torch and numba."""
    command = python("from ckpt8.core.workers import settle; settle(kernels=True)")
    return lambda: subprocess.run(command, check=True)  # noqa: S603


OPERATIONS: dict[str, Operation] = {
    "cp": _copy,
    "zstd -1": partial(_zstd, 1),
    "zstd -3": partial(_zstd, 3),
    ZIPNN: _zipnn,
    START: _start,
}
"""The operations of this module by their names in the report."""
