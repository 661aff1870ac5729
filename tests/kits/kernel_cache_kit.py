"""Processes that compile the smallest kernel, or have it from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

START = """
from ckpt8.core import numba_kernels as jit
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

_FORK = """
import json, os, sys, traceback
import numba

def begin(job):
    for number, file in ((1, job["out"]), (2, job["err"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ |= job["environment"]
    sys.argv = ["-c", *job["arguments"]]
    code = 1
    try:
        exec(job["program"], {"__name__": "__main__"})
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if not child:
        begin(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _environment():
    """Nothing says where a cache is, but HOME."""
    return {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}


class Forks:
    """Runs each program in a process of its own that has imported numba before. A context manager."""

    def __init__(self, folder):
        self._out, self._err = folder / "out", folder / "err"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORK], env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def run(self, program, *arguments, **environment):
        """What a program prints, and what it says beside that. It succeeds."""
        job = {
            "program": program,
            "arguments": [*map(str, arguments)],
            "environment": {name: str(value) for name, value in environment.items()},
            "out": str(self._out),
            "err": str(self._err),
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline()
        out, err = self._out.read_text().strip(), self._err.read_text().strip()
        assert code == "0\n", err
        return out, err


def start(program, *arguments, **environment):
    """Begin a whole process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=_environment() | {name: str(value) for name, value in environment.items()},
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
