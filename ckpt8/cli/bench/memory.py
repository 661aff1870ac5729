"""Peak memory: of this process, from the kernel's record, and of a session of processes, from samples.

The memory of a session is that of all its processes. Pages that several share, such as those a fork has not written to,
count once: the kernel's proportional set size (PSS) divides each by the number of its users. The kernel keeps no peak
of PSS, hence the samples. Both figures include mapped pages of files that are in memory.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


def peak_memory() -> int:
    """The peak resident memory of this process, in bytes.

    On Linux ``ru_maxrss`` outlives an exec, and a child of a large process would be as large as that.
    """
    # macOS counts bytes, others kilobytes.
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


class PeakMemory:
    """The peak memory of this process beyond what it has now; where the system keeps one peak for all time, of that."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            (_PROC / "self" / "clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def taken(self) -> int:
        """Bytes beyond those of the beginning."""
        return max(peak_memory() - self._before, 0)


def _status(name: str) -> int:
    """A size from the kernel's record of this process; 0 where it keeps none."""
    status = _PROC / "self" / "status"
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


@dataclass(slots=True)
class SessionPeak:
    """The largest memory of all processes of a session in any sample.

    ``session`` is the process that began it. ``nbytes`` stays 0 if the system has no PSS.
    """

    session: int
    nbytes: int = 0
    processes: int = 0

    def sample(self) -> None:
        """Take one sample."""
        sizes = [size for pid in _members(self.session) if (size := _pss(pid))]
        self.nbytes = max(self.nbytes, sum(sizes))
        self.processes = max(self.processes, len(sizes))


def _members(session: int) -> list[int]:
    """Processes of a session: all descendants of its first one that did not begin a session of their own."""
    found = []
    for folder in _PROC.glob("[0-9]*"):
        # A process may end in between.
        with contextlib.suppress(OSError):
            # The name of the command, in brackets, may have any characters.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append(int(folder.name))
    return found


def _pss(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 when it ended."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
