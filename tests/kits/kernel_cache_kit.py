"""Processes that compile the smallest kernel, or have it from the cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from program_kit import without_caches

START = """
from ckpt8.core import numba as jit
jit.start()
print(sum(jit._nothing.stats.cache_hits.values()))
"""
"""Prints 1 where the kernel was in the cache, 0 where it was compiled."""

FORGED = """
import os
import sys

from numba.core.compiler import CompileResult

class Forged:
    def __reduce__(self):
        return os.system, (f"echo > {sys.argv[1]}",)

CompileResult._reduce = lambda self: (Forged(),)
"""
"""Has the next kernel that is kept run a command when it is read, with every checksum as it should be."""


def start(program, *arguments, **environment):
    """Begin a whole process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=without_caches() | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """What it prints, and what it says beside that. It succeeds."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


def kept(folder):
    """All files below a folder."""
    return sorted(path for path in Path(folder).rglob("*") if not path.is_dir())
