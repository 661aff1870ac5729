"""The targets ``environment`` and ``process``: command lines in environments that nobody asks for.

A command line runs in a fork of this process, with streams, variables, limits and file names of its own, or, for a few
inputs, in a process of its own. It ends with a documented exit code and no traceback, changes no source, and leaves no
output behind that it says it did not write.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_checks import BrokenError
from fuzz_kinds import Kind, kinds
from fuzz_settings import VARIABLES, Setting
from fuzz_watch import content_of

import ckpt8

SECONDS = 120
"""Seconds after which a command is killed, which is a finding; long runs give an input up before, see ``fuzz.HANG``."""
CRASHED = 99
"""The exit code of a fork whose command raised something."""
_USED = (
    "rich.console",
    "rich.progress",
    "rich.table",
    "rich.markup",
    "typer.rich_utils",
    "typer.main",
    "ckpt8.__main__",
)
_UNUSED = re.compile(r"numba|triton|gpu|bench|kernel|\.(optim|nn|integrations)\b|__main__")


class Place:
    """A folder with a container, its source, and what is neither."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self.folder, self.setting = folder, setting
        kind: Kind = next(each for each in kinds() if each.name == setting.kind)
        self.paths = {
            "c": f"{folder}/{setting.name[:240]}.ckpt8", "s": f"{folder}/source/{setting.name}", "d": f"{folder}/home",
            "o": f"{folder}/out/{setting.name}", "bad": f"{folder}/home/bad", "loop": f"{folder}/home/loop",
        }  # fmt: skip
        for name in ("source", "home", "out", "temporary"):
            (folder / name).mkdir()
        Path(self.paths["c"]).write_bytes(kind.content)
        Path(self.paths["bad"]).write_bytes(kind.content[:-40] + bytes(40))
        Path(self.paths["loop"]).symlink_to("loop")
        source = Path(self.paths["s"])
        kind.write_original(folder.parent).rename(source)  # type: ignore[union-attr]
        self.before = content_of(folder)

    @property
    def argv(self) -> list[str]:
        """The command line."""
        found = list(self.setting.command)
        for key, path in self.paths.items():
            found = [part.replace("{" + key + "}", path) for part in found]
        return found

    @property
    def variables(self) -> dict[str, str]:
        """The environment, without what the caller's says of terminals and languages."""
        kept = {key: value for key, value in os.environ.items() if key not in VARIABLES and not key.startswith("LC_")}
        given = {key: value.replace("{folder}", str(self.folder)) for key, value in self.setting.variables}
        return kept | {"HOME": f"{self.folder}/home", "TMPDIR": f"{self.folder}/temporary"} | given

    def check(self, code: int, out: bytes, err: bytes) -> None:
        """Raise BrokenError for what a command must not do."""
        setting, shown = self.setting, f"{self.setting.command} ends with {code}, {err[-300:]!r}"
        command = next((part for part in setting.command if not part.startswith("-")), "")
        limited = setting.limits != (None, None)
        allowed = {0, 2, 3, 4} | ({1} if command in ("verify", "diff") or "--salvage" in setting.command else set())
        allowed |= {141} if "broken" in (setting.stdout, setting.stderr) else set()
        allowed |= {70} if setting.limits[1] is not None else set()
        if code not in allowed or b"Traceback" in err + out:
            raise BrokenError(shown)
        said = err.replace(b"\0", b"").count(b"ckpt8: ")  # UTF-16 too, which PYTHONIOENCODING may ask for
        if code in (3, 4) and setting.stderr == "file" and not limited and said != 1:
            raise BrokenError(f"no line says why: {shown}")
        if code == 0 and "--json" in setting.command and setting.stdout == "file":
            json.loads(out)
        after: Any = content_of(self.folder)
        if {name: after.get(name) for name in self.before} != self.before:
            raise BrokenError(f"a source is changed: {shown}")
        new = [name for name in after if name not in self.before]
        if any(name.startswith("temporary") or "ckpt8-" in name for name in new):
            raise BrokenError(f"leaves {new}: {shown}")
        if new and code in (1, 2, 3, 4) and setting.stdout == "file" and "--salvage" not in setting.command:
            raise BrokenError(f"fails and leaves {new}: {shown}")


def run(path: Path, rng: random.Random, setting: Setting) -> bool:
    """In a fork; whether the command ends with 0."""
    return _run(path, setting, _forked)


def run_process(path: Path, rng: random.Random, setting: Setting) -> bool:
    """In a process of its own."""
    return _run(path, setting, _spawned)


def _run(path: Path, setting: Setting, start: Any) -> bool:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="env") as name:
        folder = Path(name) / "place"
        folder.mkdir()
        try:
            place = Place(folder, setting)
        except (OSError, ValueError):
            return False  # a name that no file can have
        report, streams = folder.parent / "report", {}
        with contextlib.ExitStack() as stack:
            for number, kind in ((1, setting.stdout), (2, setting.stderr)):
                streams[number] = stack.enter_context(_stream(kind, folder.parent / str(number)))
            code, took = start(place, {number: ends[0] for number, ends in streams.items()}, report, streams[1][1])
        out, err = (_read(folder.parent / str(number)) for number in (1, 2))
        if report.exists() and report.stat().st_size:
            raise BrokenError(f"{setting.command} raises {report.read_text()[-400:]}")
        if took > SECONDS:
            raise BrokenError(f"{setting.command} takes {took:.0f} s")
        place.check(code, out, err)
        return code == 0


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@contextlib.contextmanager
def _stream(kind: str, path: Path) -> Iterator[tuple[int | None, int | None]]:
    """The descriptor of a stream, None for a closed one, and for a terminal the one that reads what is shown."""
    other = None
    if kind == "closed":
        yield None, None
        return
    if kind == "broken":
        reading, end = os.pipe()
        os.close(reading)
    elif kind == "terminal":
        other, end = os.openpty()
    else:
        flags = {"file": os.O_WRONLY | os.O_CREAT, "full": os.O_WRONLY, "unreadable": os.O_RDONLY}[kind]
        end = os.open(path if kind == "file" else "/dev/full" if kind == "full" else "/dev/null", flags)
    try:
        yield end, other
    finally:
        os.close(end)
        if other is not None:
            os.close(other)


def _wait(child: int, terminal: int | None) -> tuple[int, float]:
    """The exit code of a child, and its seconds; it is killed after SECONDS."""
    started = time.monotonic()
    while True:
        if terminal is not None and select.select([terminal], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                os.read(terminal, 1 << 16)
        found, status = os.waitpid(child, os.WNOHANG)
        took = time.monotonic() - started
        if found:
            return os.waitstatus_to_exitcode(status), took
        if took > SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _limit(limits: tuple[int | None, int | None]) -> None:
    for number, limit in zip((resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE), limits, strict=True):
        if limit is not None:
            used = (
                max(int(each.name) for each in Path("/proc/self/fd").iterdir())
                if number == resource.RLIMIT_NOFILE
                else 0
            )
            resource.setrlimit(number, (limit + used, limit + used))


@cache
def _import_all() -> None:
    """What commands import when they run, once for all forks."""
    modules = [each.name for each in pkgutil.walk_packages(ckpt8.__path__, "ckpt8.") if not _UNUSED.search(each.name)]
    for name in (*_USED, *modules):
        importlib.import_module(name)


def _forked(place: Place, streams: dict[int, int | None], report: Path, terminal: int | None) -> tuple[int, float]:
    _import_all()
    child = os.fork()
    if child:
        return _wait(child, terminal)
    code = CRASHED
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        told = os.open(report, os.O_WRONLY | os.O_CREAT)
        code = _in_child(place, streams, told)
    finally:
        os._exit(code)


def _in_child(place: Place, streams: dict[int, int | None], told: int) -> int:
    from ckpt8.__main__ import main

    os.chdir(place.folder / "home")
    os.environ.clear()
    os.environ.update(place.variables)
    tempfile.tempdir = None
    sys.argv = ["ckpt8", *place.argv]
    for number, end in streams.items():
        os.close(number)
        if end is not None:
            os.dup2(end, number)
        made = None
        if end is not None:
            encoding, errors = place.setting.encoding
            raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False)) if number == 1 else None
            made = io.TextIOWrapper(
                raw or io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
                encoding,
                errors if number == 1 else "backslashreplace",
                line_buffering=number == 2,
            )
        setattr(sys, {1: "stdout", 2: "stderr"}[number], made)
        setattr(sys, {1: "__stdout__", 2: "__stderr__"}[number], made)
    _limit(place.setting.limits)
    code = 0
    try:
        main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        os.write(told, traceback.format_exc().encode("utf-8", "backslashreplace"))
        return CRASHED
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except Exception:
        return 120  # as the interpreter ends then
    return code


def _spawned(place: Place, streams: dict[int, int | None], report: Path, terminal: int | None) -> tuple[int, float]:
    def prepare() -> None:
        for number, end in streams.items():
            os.close(number) if end is None else os.dup2(end, number)
        _limit(place.setting.limits)

    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "ignore", "-m", "ckpt8", *place.argv]
    variables = place.variables | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    child = subprocess.Popen(
        command,
        env=variables,
        cwd=place.folder / "home",
        preexec_fn=prepare,  # noqa: PLW1509 (nothing else runs in this process)
        stdin=subprocess.DEVNULL,
        close_fds=False,
    )
    code, took = _wait(child.pid, terminal)
    child.returncode = code
    return code, took
