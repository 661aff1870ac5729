"""Does a job of ``bench`` in a process of its own, and measures it; and the jobs that need no torch.

A process of its own starts without the memory and caches of the one before. There, ``main(MODULE, JOB)`` imports the
module, does one of its ``OPERATIONS`` and prints the figures as JSON. The process begins a session. Whatever ends the
wait for it, an interrupt say, first ends all processes of that session. It imports from where its parent does: with
``-m`` it would take a ``torch.py`` in the working directory for torch.

``peak_memory`` is that of this process, from the kernel's record; ``SessionPeak`` that of a session of processes, from
samples. A session takes the memory of all its processes. Pages that several share, such as those a fork has not written
to, count once: the kernel's proportional set size (PSS) divides each by the number of its users. The kernel keeps no
peak of PSS, hence the samples. Both figures include mapped pages of files that are in memory.

A job is one operation on a checkpoint: it prepares, then works against the clock. Here are ``cp``, zstd, ZipNN and the
start of Python. This module imports no torch, whose memory would count for ``cp`` and zstd.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import zstandard

from ckpt8.core.closing import deferred
from ckpt8.core.errors import Ckpt8Error, InputError, OutputError, UsageError

_PROC = Path("/proc")


def peak_memory() -> int:
    """The peak resident memory of this process, in bytes.

    On Linux ``ru_maxrss`` outlives an exec, and a child of a large process would be as large as that.
    """
    # macOS counts bytes, others kilobytes.
    return _size_in(_PROC / "self" / "status", "VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _size_in(file: Path, name: str) -> int:
    """A size in a table of the kernel, in bytes; 0 where it has none, or the process has ended."""
    with contextlib.suppress(OSError):
        return next((int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if line.startswith(name)), 0)
    return 0


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
        sizes = [size for folder in _members(self.session) if (size := _size_in(folder / "smaps_rollup", "Pss:"))]
        self.nbytes = max(self.nbytes, sum(sizes))
        self.processes = max(self.processes, len(sizes))


def _members(session: int) -> Iterator[Path]:
    """Folders of the processes of a session: all descendants of its first one that did not begin one of their own."""
    for folder in _PROC.glob("[0-9]*"):
        # A process may end in between.
        with contextlib.suppress(OSError):
            # The name of the command, in brackets, may have any characters.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield folder


_ERRORS: dict[int, type[Ckpt8Error]] = {error.exit_code: error for error in (UsageError, InputError, OutputError)}

Run = Callable[[str, dict[str, Any], bool], dict[str, Any]]
"""Does the job of a module; True also measures ``session_pss`` and ``processes``, which slows it down."""


def python(code: str, *arguments: str) -> list[str]:
    """The command that runs ``code`` with this Python and its ``sys.path``."""
    path = [os.fspath(place) for place in sys.path]
    return [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path[:] = {path!r}; {code}", *arguments]


def run_child(folder: Path) -> Run:
    """A function that does jobs in processes, with temporary files in ``folder``.

    It raises errors of ckpt8 again, all others as Ckpt8Error with their last line.
    """

    def run(module: str, job: dict[str, Any], watch: bool) -> dict[str, Any]:
        command = python(f"from {__name__} import main; main(*sys.argv[1:])", module, json.dumps(job))
        with TemporaryFile(dir=folder) as out, TemporaryFile(dir=folder) as err:
            child: subprocess.Popen[bytes] | None = None
            try:
                with deferred():
                    child = subprocess.Popen(  # noqa: S603
                        command,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                        env={**os.environ, "TMPDIR": str(folder)},
                    )
                peak = SessionPeak(child.pid)
                while watch and child.poll() is None:
                    peak.sample()
                    time.sleep(0.01)  # between samples of memory
                child.wait()
            except BaseException:
                if child is not None:
                    _end(child)
                raise
            if child.returncode:
                raise _failure(child.returncode, _text(err))
            result: dict[str, Any] = json.loads(_text(out))
        return result | ({"session_pss": peak.nbytes, "processes": peak.processes} if watch else {})

    return run


def _text(file: IO[bytes]) -> str:
    """All that a process wrote to a file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End all processes of the session."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait(5.0)  # seconds until SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _failure(code: int, said: str) -> Ckpt8Error:
    """The error of a process that ended with ``code`` and wrote ``said``."""
    if code < 0:
        why = "; there may be too little memory" if code == -signal.SIGKILL else ""
        return Ckpt8Error(f"was ended by {signal.Signals(-code).name}{why}")
    lines = said.strip().splitlines() or [f"ended with exit code {code} and no message"]
    return _ERRORS.get(code, Ckpt8Error)(lines[-1])


def main(module: str, job: str) -> None:
    """Do one job and print its result. Errors of ckpt8 end it with their exit code and one line."""
    try:
        result = measured(module, json.loads(job))
    except Ckpt8Error as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(exc.exit_code)
    sys.stdout.write(json.dumps(result))


ZIPNN = "ZipNN"
START = "start of Python and torch"
DCP = "dcp.async_save"
PEERS = frozenset({ZIPNN, DCP})
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


def measured(module: str, job: dict[str, Any]) -> dict[str, Any]:
    """Do one of the ``OPERATIONS`` of a module: seconds of wall time, without imports and preparation, and peak memory.

    The ``name`` of the job is that of the operation; memory is in bytes.

    The time of a save in the background, which returns a handle, is how long its caller waits.
    ``output_bytes`` is the size of the output, which is removed unless the job says ``keep``; None without output.
    """
    operations: dict[str, Operation] = import_module(module).OPERATIONS
    target = Path(job["target"])
    run = operations[job["name"]](Job(Source(**job["source"]), Path(job["container"]), target, job["threads"]))
    start = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - start
    if hasattr(kept, "result"):
        kept.result()
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


def _packed(pack: Callable[[Job, IO[bytes], IO[bytes], int], object], job: Job) -> Callable[[], object]:
    """``pack`` of every file, one after another, into one, and fsync. It gets both files and the size of the first."""

    def run() -> None:
        with job.target.open("wb") as writer:
            for file in _files(Path(job.source.path)):
                with file.open("rb") as reader:
                    pack(job, reader, writer, file.stat().st_size)
        flush(job.target)

    return run


def _zstd(level: int, job: Job, reader: IO[bytes], writer: IO[bytes], size: int) -> None:
    """``zstd -LEVEL -T``."""
    zstandard.ZstdCompressor(level=level, threads=job.threads).copy_stream(
        reader, writer, size=size, read_size=1 << 22, write_size=1 << 22
    )


def _zipnn(job: Job) -> Callable[[], object]:
    """ZipNN in the layout of the checkpoint, piece by piece."""
    zipnn = import_module("zipnn")

    def pack(job: Job, reader: IO[bytes], writer: IO[bytes], _: int) -> None:
        # It works in memory, on so many bytes at a time.
        while piece := bytearray(reader.read(1 << 27)):
            # ZipNN 0.5.4 writes beyond its buffers unless this is a multiple of the 4 bytes of an element.
            piece += bytes(-len(piece) % 4)
            packed = zipnn.ZipNN(bytearray_dtype=job.source.layout, threads=job.threads).compress(piece)
            writer.write(len(packed).to_bytes(8, "little"))
            writer.write(packed)

    return _packed(pack, job)


# What every command on tensors starts, but restore.
_IMPORTS = python("import torch")
OPERATIONS: dict[str, Operation] = {
    "cp": _copy,
    "zstd -1": partial(_packed, partial(_zstd, 1)),
    "zstd -3": partial(_packed, partial(_zstd, 3)),
    ZIPNN: _zipnn,
    START: lambda _: partial(subprocess.run, _IMPORTS, check=True),
}
"""The operations of this module by their names in the report."""
