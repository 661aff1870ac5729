"""Programs in fresh processes, forked from one that has imported what takes long and nothing of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_FORK = """
import importlib, json, os, sys, traceback

for name in sys.argv[1:]:
    importlib.import_module(name)

def begin(job):
    for number, file in ((1, job["out"]), (2, job["err"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ |= job["environment"]
    os.chdir(job["folder"])
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


def without_caches():
    """Nothing says where a cache is, but HOME."""
    return {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}


class Server:
    """A Python process that answers every line of JSON with another, and ends with its input. A context manager."""

    def __init__(self, *arguments, environment):
        command = [sys.executable, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def ask(self, job):
        """The answer to a job."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Forks(Server):
    """Runs each program in a process of its own that has imported some modules before."""

    def __init__(self, folder, *modules):
        self._folder, self._out, self._err = folder, folder / "out", folder / "err"
        super().__init__("-c", _FORK, *modules, environment=without_caches())

    def run(self, program, *arguments, folder=None, **environment):
        """What a program prints, and what it says beside that. It succeeds."""
        job = {
            "program": program,
            "arguments": [*map(str, arguments)],
            "environment": {name: str(value) for name, value in environment.items()},
            "out": str(self._out),
            "err": str(self._err),
            "folder": str(folder or self._folder),
        }
        code = self.ask(job)
        out, err = self._out.read_text().strip(), self._err.read_text().strip()
        assert code == 0, err
        return out, err
