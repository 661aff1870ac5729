"""Command lines in environments that nobody asks for: streams, variables, limits, folders and file names.

A command line runs in a process of its own. It ends with a documented exit code and no traceback, changes no source,
and leaves no output behind that it says it did not write.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fuzz_commands import BrokenError, content_of, kinds

SECONDS = 120
"""Seconds after which a command is killed, which is a finding; long runs give an input up before, see ``fuzz.HANG``."""
LIMITED = resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE
_SIZES = ("0", "1", "2", "7", "8", "9", "20", "80", "500", "100000", "9" * 30, "-1", "x", "", "1.5", "\u0663", " 5 ")
_PLACES = (
    "", "{folder}/none", "{folder}/source", "/dev/null", "relative", "{folder}/home", "\udcff", "x" * 300, "/proc",
)  # fmt: skip
VARIABLES = {
    "COLUMNS": _SIZES, "LINES": _SIZES, "TERMINAL_WIDTH": _SIZES, "HOME": _PLACES, "TMPDIR": _PLACES,
    "XDG_CACHE_HOME": _PLACES, "TERM": ("dumb", "", "xterm-256color", "unknown", "x" * 999, "vt100"),
    "NO_COLOR": ("", "1"), "FORCE_COLOR": ("", "1"), "LANG": ("C", "xx_XX", "de_DE.ISO-8859-1", ""),
    "LC_ALL": ("C", "POSIX", "C.UTF-8", "xx"), "PYTHONIOENCODING": ("ascii", "latin-1", "utf-8:strict", "utf-16"),
    "PYTHONUTF8": ("0", "1"), "PYTHONCOERCECLOCALE": ("0",), "TTY_COMPATIBLE": ("1", "0"), "JUPYTER_COLUMNS": _SIZES,
}  # fmt: skip
_NAMES = (
    "x", "a b", "é", "e\u0301", "😀", "a\nb", "\udcff\udcfe", "-x", "--json", "[red]x[/]", "%s{}", "\x1b[2J", "~",
    "$HOME", "x" * 240, "é" * 120, "*", "?", ".", ".hidden", "\u202ex", "x.pt", "x.safetensors", "a:b", "a\\b", "\t",
    "'", '"', "#",
)  # fmt: skip
_STREAMS = ("file",) * 6 + ("closed", "full", "broken", "unreadable", "terminal")
_NUMBERS = ("0", "1", "2", "-1", "256", "257", "1e9", "nan", "inf", "x", "", "9" * 400, "0x1", "1.5")
_WORDS = (
    "", "x", "flash", "*=lossless", "*=split24(R=0)", "=", "torch", "bfloat16", "é", "\udcff", "model", "/", ".",
    "x" * 5000,
)  # fmt: skip
_COMMANDS = """
inspect {c}; inspect {s}; inspect {c} --tensors; inspect {c} --json; inspect {s} --json --tensors
inspect {c} --against {s}; inspect {s} --full; inspect {c} --html {o}; inspect {s} --readiness; inspect {bad}
inspect {d}; inspect; inspect {c} {c}; inspect https://x/y.pt; inspect {loop}; inspect --help
compress {s} -o {o}; compress {s}; compress {s} -o {o} --json; compress {s} -o {o} --preset {word}
compress {s} -o {o} --rule {word}; compress {bad} -o {o}; compress {s} -o {o} --max-update-error {n}
compress {s} -o {o} --threads {n}; compress -h
restore {c} -o {o}; restore {c}; restore {c} -o {o} --json; restore {c} -o {o} --salvage; restore {bad}
restore {c} -o {word}
verify {c}; verify {c} --json; verify {bad}; verify {c} --against {s}; verify {c} --against {s} --resume-steps {n}
verify {c} --against {bad}; verify --nothing
diff {c} {s}; diff {s} {s}; diff {c} {bad}; diff {c} {s} --json
convert {c} {o} --to torch; convert {s} {o}.safetensors; convert {c} {o} --to dcp; convert {c} {o} --to {word}
convert {s} {o}; convert {s} {o}.pt --dtype {word}; convert {c} {o}.pt --key {word}; convert --help
bench --help; --help; --version; {word};
"""
_COMMANDS = [tuple(line.split()) for line in _COMMANDS.strip().replace("\n", ";").split(";")]


@dataclass(frozen=True)
class Setting:
    """A command line and what surrounds it. ``limits`` are of files' sizes and of open files."""

    command: tuple
    kind: str = "objects"
    name: str = "x"
    variables: tuple = ()
    stdout: str = "file"
    stderr: str = "file"
    limits: tuple = (None, None)
    content: bytes = b""


def mutate(rng):
    """Mostly one thing that is odd, sometimes all of them."""
    odd = [rng.random() < chance for chance in rng.choice(((0.3,) * 4, (0.9,) * 4, (0, 0.5, 0, 0), (0, 0, 1, 0)))]
    number, word = rng.choice(_NUMBERS), rng.choice(_WORDS)
    names = rng.sample(list(VARIABLES), rng.choice((1, 2, 4))) if odd[1] else []
    return Setting(
        tuple(part.replace("{n}", number).replace("{word}", word) for part in rng.choice(_COMMANDS)),
        rng.choice(("safetensors", "objects", "lossless", "file", "dcp 1", "shared", "tied")),
        rng.choice(_NAMES) if odd[0] else "x",
        tuple((name, rng.choice(VARIABLES[name])) for name in names),
        rng.choice(_STREAMS) if odd[2] else "file",
        rng.choice(("file", "file", "closed", "full", "broken")) if odd[2] else "file",
        (rng.choice((None, 0, 1, 100, 5000)), rng.choice((None, 3, 6, 12))) if odd[3] else (None, None),
    )


class Place:
    """A folder with a container, its source, and what is neither. Raises OSError for a name that no file can have."""

    def __init__(self, folder, setting):
        self.folder, self.setting = folder, setting
        kind = next(kind for kind in kinds() if kind.name == setting.kind)
        self.paths = {
            "c": f"{folder}/{setting.name[:240]}.ckpt8", "s": f"{folder}/source/{setting.name}", "d": f"{folder}/home",
            "o": f"{folder}/out/{setting.name}", "bad": f"{folder}/home/bad", "loop": f"{folder}/home/loop",
        }  # fmt: skip
        for name in ("source", "home", "out", "temporary"):
            (folder / name).mkdir()
        Path(self.paths["c"]).write_bytes(kind.content)
        Path(self.paths["bad"]).write_bytes(kind.content[:-40] + bytes(40))
        Path(self.paths["loop"]).symlink_to("loop")
        kind.write_original(folder.parent).rename(self.paths["s"])
        self.before = content_of(folder)

    @property
    def argv(self):
        """The command line."""
        found = list(self.setting.command)
        for key, path in self.paths.items():
            found = [part.replace("{" + key + "}", path) for part in found]
        return found

    @property
    def variables(self):
        """The environment, without what the caller's says of terminals and languages."""
        kept = {key: value for key, value in os.environ.items() if key not in VARIABLES and not key.startswith("LC_")}
        given = {key: value.replace("{folder}", str(self.folder)) for key, value in self.setting.variables}
        return kept | {"HOME": f"{self.folder}/home", "TMPDIR": f"{self.folder}/temporary"} | given

    def check(self, code, out, err):
        """Raise BrokenError for what a command must not do."""
        setting, shown = self.setting, f"{self.setting.command} ends with {code}, {err[-300:]!r}"
        salvages = "--salvage" in setting.command
        allowed = {0, 2, 3, 4} | ({1} if salvages or {"verify", "diff"} & set(setting.command) else set())
        allowed |= {141} if "broken" in (setting.stdout, setting.stderr) else set()
        allowed |= {70} if setting.limits[1] is not None else set()
        if code not in allowed or b"Traceback" in err + out:
            raise BrokenError(shown)
        said = err.replace(b"\0", b"").count(b"ckpt8: ")  # UTF-16 too, which PYTHONIOENCODING may ask for
        if code in (3, 4) and setting.stderr == "file" and setting.limits == (None, None) and said != 1:
            raise BrokenError(f"no line says why: {shown}")
        if code == 0 and "--json" in setting.command and setting.stdout == "file":
            json.loads(out)
        after = content_of(self.folder)
        if {name: after.get(name) for name in self.before} != self.before:
            raise BrokenError(f"a source is changed: {shown}")
        new = [name for name in after if name not in self.before]
        if any(name.startswith("temporary") or "ckpt8-" in name for name in new):
            raise BrokenError(f"leaves {new}: {shown}")
        if new and code in (1, 2, 3, 4) and setting.stdout == "file" and not salvages:
            raise BrokenError(f"fails and leaves {new}: {shown}")


def run(path, rng, setting):
    """Whether the command ends with 0."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="env") as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "place"
        folder.mkdir()
        try:
            place = Place(folder, setting)
        except (OSError, ValueError):
            return False
        texts = [folder.parent / name for name in ("out", "err")]
        out, terminal = stack.enter_context(_stream(setting.stdout, texts[0]))
        err, _ = stack.enter_context(_stream(setting.stderr, texts[1]))
        code, took = _wait(_start(place, {1: out, 2: err}), terminal)
        if took > SECONDS:
            raise BrokenError(f"{setting.command} takes {took:.0f} s")
        place.check(code, *(text.read_bytes() if text.exists() else b"" for text in texts))
        return code == 0


@contextlib.contextmanager
def _stream(kind, path):
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
        end = os.open({"file": path, "full": "/dev/full", "unreadable": "/dev/null"}[kind], flags)
    try:
        yield end, other
    finally:
        for descriptor in (end, *([] if other is None else [other])):
            os.close(descriptor)


def _wait(child, terminal):
    """The exit code of a child, and its seconds; it is killed after SECONDS."""
    started = time.monotonic()
    while True:
        if terminal is not None and select.select([terminal], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                os.read(terminal, 1 << 16)
        ended, status = os.waitpid(child, os.WNOHANG)
        took = time.monotonic() - started
        if ended:
            return os.waitstatus_to_exitcode(status), took
        if took > SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _start(place, streams):
    """The number of a process that runs the command."""

    def prepare():
        for number, end in streams.items():
            os.close(number) if end is None else os.dup2(end, number)
        used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        for kind, limit, more in zip(LIMITED, place.setting.limits, (0, used), strict=True):
            if limit is not None:
                resource.setrlimit(kind, (limit + more, limit + more))

    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "ckpt8", *place.argv],
        env=place.variables | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))},
        cwd=place.folder / "home",
        preexec_fn=prepare,  # noqa: PLW1509 (nothing else runs in this process)
        stdin=subprocess.DEVNULL,
        close_fds=False,
    )
    process.returncode = 0  # it is waited for elsewhere
    return process.pid
