"""Reads sizes as people write them, and finds free room on disks and in memory."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

from ckpt8.core.errors import OutputError, UsageError
from ckpt8.core.files.urls import refuse_url

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**k for k, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**k for k, prefix in enumerate("kmgt", 1)},
}
MOUNTS = Path("/proc/mounts")
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)")


def parse_size(text: str, option: str) -> int:
    """Bytes of ``1.5GB``, ``250 MB``, ``8GiB`` or ``2.5e8``. Raises UsageError that names the option."""
    found = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(found[2]) if found else None
    try:
        count = float(found[1]) * unit if found and unit else math.nan
    except ValueError:
        count = math.nan
    if not 1 <= count < 1 << 62:
        raise UsageError(f"{option} {text}: expected a number of bytes, as in 1.5GB or 2.5e8")
    return int(count)


def in_gigabytes(count: float) -> str:
    """``1.50 GB``."""
    return f"{count / 1e9:.2f} GB"


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder; of a disk in memory, half of the free memory. Raises OutputError for no folder."""
    refuse_url(folder)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be written to: {exc.strerror}") from exc
    memory = available_memory()
    return free if memory is None or not _is_memory(folder) else min(free, memory // 2)


def _is_memory(folder: Path) -> bool:
    """Whether the files of a folder take memory, if the system tells."""
    if not MOUNTS.exists():
        return False
    mounts = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()]
    places = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(places, key=lambda found: len(found[0]), default=("", ""))[1] in ("tmpfs", "ramfs")


def available_memory() -> int | None:
    """Free bytes of memory, or None if the system does not say."""
    table = Path("/proc/meminfo")
    if not table.exists():
        return None
    lines = dict(line.split(":") for line in table.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
