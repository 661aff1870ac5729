"""One measured operation in a process of its own: ``python -m ckpt8.bench.probe NAME SOURCE TARGET THREADS``.

Prints one JSON object: seconds of wall time without the start of the interpreter and the import of torch, and the
peak resident memory of the process in bytes, mapped pages included.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zstandard

_CHUNK = 1 << 22


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(source: Path, target: Path, threads: int) -> None:  # noqa: ARG001
    """Copy with ``cp`` and flush to the disk: what everything else is compared with."""
    subprocess.run(["cp", "--", str(source), str(target)], check=True)  # noqa: S603, S607
    _sync(target)


def zstd(source: Path, target: Path, threads: int, level: int) -> None:
    """Compress as ``zstd -LEVEL -T`` does, and flush to the disk."""
    compressor = zstandard.ZstdCompressor(level=level, threads=threads)
    with source.open("rb") as reader, target.open("wb") as writer:
        compressor.copy_stream(reader, writer, size=source.stat().st_size, read_size=_CHUNK, write_size=_CHUNK)
    _sync(target)


def compress(source: Path, target: Path, threads: int, *, preset: str = "flash", stats: bool = True) -> None:
    """``ckpt8 compress``."""
    import ckpt8

    ckpt8.compress(source, target, preset=preset, threads=threads, stats=stats, force=True)


def restore(source: Path, target: Path, threads: int) -> None:
    """``ckpt8 restore``."""
    import ckpt8

    ckpt8.restore(source, target, force=True, threads=threads)


def verify(source: Path, target: Path, threads: int) -> None:  # noqa: ARG001
    """``ckpt8 verify``."""
    import ckpt8

    ckpt8.verify(source, threads=threads)


def load(source: Path, target: Path, threads: int) -> None:  # noqa: ARG001
    """``ckpt8.load``."""
    import ckpt8

    ckpt8.load(source, threads=threads)


def torch_load(source: Path, target: Path, threads: int) -> None:  # noqa: ARG001
    """``torch.load`` of the original."""
    import torch

    torch.load(source, weights_only=True)


OPERATIONS: dict[str, Callable[[Path, Path, int], None]] = {
    "cp": copy,
    "zstd -1": lambda source, target, threads: zstd(source, target, threads, 1),
    "zstd -3": lambda source, target, threads: zstd(source, target, threads, 3),
    "compress": compress,
    "compress --no-stats": lambda source, target, threads: compress(source, target, threads, stats=False),
    "compress --preset compact": lambda source, target, threads: compress(source, target, threads, preset="compact"),
    "restore": restore,
    "verify": verify,
    "load": load,
    "torch.load": torch_load,
}
"""Every operation by the name under which it is reported."""

NEEDS_TORCH = frozenset(name for name in OPERATIONS if not name.startswith(("cp", "zstd")))


def peak_memory() -> int:
    """The peak resident memory of this process, in bytes.

    On Linux ``ru_maxrss`` outlives an exec, and a child of a large process would be as large as that.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak) * 1024
    # macOS counts bytes, others kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(name: str, source: str, target: str, threads: str) -> None:
    """Run one operation and print what it took."""
    if name in NEEDS_TORCH:
        import torch  # noqa: F401

        import ckpt8.api  # noqa: F401
    start = time.perf_counter()
    OPERATIONS[name](Path(source), Path(target), int(threads))
    seconds = time.perf_counter() - start
    sys.stdout.write(json.dumps({"seconds": seconds, "peak_rss": peak_memory()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
