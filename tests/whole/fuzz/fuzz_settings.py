"""What is odd about the environment of a command line: its grammar."""

from __future__ import annotations

import random
from dataclasses import dataclass

_SIZES = ("0", "1", "2", "7", "8", "9", "20", "80", "500", "100000", "9" * 30, "-1", "x", "", "1.5", "\u0663", " 5 ")
_PLACES = (
    "",
    "{folder}/none",
    "{folder}/source",
    "/dev/null",
    "relative",
    "{folder}/home",
    "\udcff",
    "x" * 300,
    "/proc",
)
VARIABLES: dict[str, tuple[str, ...]] = {
    "COLUMNS": _SIZES, "LINES": _SIZES, "TERMINAL_WIDTH": _SIZES, "HOME": _PLACES, "TMPDIR": _PLACES,
    "XDG_CACHE_HOME": _PLACES, "TERM": ("dumb", "", "xterm-256color", "unknown", "x" * 999, "vt100"),
    "NO_COLOR": ("", "1"), "FORCE_COLOR": ("", "1"), "LANG": ("C", "xx_XX", "de_DE.ISO-8859-1", ""),
    "LC_ALL": ("C", "POSIX", "C.UTF-8", "xx"), "PYTHONIOENCODING": ("ascii", "latin-1", "utf-8:strict", "utf-16"),
    "PYTHONUTF8": ("0", "1"), "PYTHONCOERCECLOCALE": ("0",), "TTY_COMPATIBLE": ("1", "0"), "JUPYTER_COLUMNS": _SIZES,
}  # fmt: skip
_ENCODINGS = (
    ("utf-8", "strict"), ("utf-8", "surrogateescape"), ("ascii", "strict"), ("ascii", "surrogateescape"),
    ("latin-1", "strict"), ("cp1252", "strict"), ("utf-16", "strict"),
)  # fmt: skip
_NAMES = (
    "x", "a b", "é", "e\u0301", "😀", "a\nb", "\udcff\udcfe", "-x", "--json", "[red]x[/]", "%s{}", "\x1b[2J", "~",
    "$HOME", "x" * 240, "é" * 120, "*", "?", ".", ".hidden", "\u202ex", "x.pt", "x.safetensors", "a:b", "a\\b", "\t",
    "'", '"', "#",
)  # fmt: skip
_STREAMS = ("file",) * 6 + ("closed", "full", "broken", "unreadable", "terminal")
_NUMBERS = ("0", "1", "2", "-1", "256", "257", "1e9", "nan", "inf", "x", "", "9" * 400, "0x1", "1.5")
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("inspect", "{c}"), ("inspect", "{s}"), ("inspect", "{c}", "--tensors"), ("inspect", "{c}", "--json"),
    ("inspect", "{s}", "--json", "--tensors"), ("inspect", "{c}", "--against", "{s}"), ("inspect", "{s}", "--full"),
    ("inspect", "{c}", "--html", "{o}"), ("inspect", "{s}", "--readiness"), ("inspect", "{bad}"), ("inspect", "{d}"),
    ("compress", "{s}", "-o", "{o}"), ("compress", "{s}"), ("compress", "{s}", "-o", "{o}", "--json"),
    ("compress", "{s}", "-o", "{o}", "--preset", "{word}"), ("compress", "{s}", "-o", "{o}", "--rule", "{word}"),
    ("compress", "{bad}", "-o", "{o}"), ("compress", "{s}", "-o", "{o}", "--max-update-error", "{n}"),
    ("compress", "{s}", "-o", "{o}", "--threads", "{n}"), ("restore", "{c}", "-o", "{o}"), ("restore", "{c}"),
    ("restore", "{c}", "-o", "{o}", "--json"), ("restore", "{c}", "-o", "{o}", "--salvage"), ("restore", "{bad}"),
    ("restore", "{c}", "-o", "{word}"), ("verify", "{c}"), ("verify", "{c}", "--json"), ("verify", "{bad}"),
    ("verify", "{c}", "--against", "{s}"), ("verify", "{c}", "--against", "{s}", "--resume-steps", "{n}"),
    ("verify", "{c}", "--against", "{bad}"), ("diff", "{c}", "{s}"), ("diff", "{s}", "{s}"), ("diff", "{c}", "{bad}"),
    ("diff", "{c}", "{s}", "--json"), ("convert", "{c}", "{o}", "--to", "torch"), ("convert", "{s}", "{o}.safetensors"),
    ("convert", "{c}", "{o}", "--to", "dcp"), ("convert", "{c}", "{o}", "--to", "{word}"), ("convert", "{s}", "{o}"),
    ("convert", "{s}", "{o}.pt", "--dtype", "{word}"), ("convert", "{c}", "{o}.pt", "--key", "{word}"), (), ("--help",),
    ("--version",), ("{word}",), ("inspect", "--help"), ("compress", "-h"), ("convert", "--help"), ("bench", "--help"),
    ("verify", "--nothing"), ("inspect",), ("inspect", "{c}", "{c}"), ("inspect", "https://x/y.pt"),
    ("inspect", "{loop}"),
)  # fmt: skip
_WORDS = (
    "",
    "x",
    "flash",
    "*=lossless",
    "*=split24(R=0)",
    "=",
    "torch",
    "bfloat16",
    "é",
    "\udcff",
    "model",
    "/",
    ".",
    "x" * 5000,
)


@dataclass(frozen=True)
class Setting:
    """A command line and what surrounds it. ``limits`` are of files' sizes and of open files."""

    command: tuple[str, ...]
    kind: str
    name: str
    variables: tuple[tuple[str, str], ...]
    stdout: str
    stderr: str
    encoding: tuple[str, str]
    limits: tuple[int | None, int | None]
    content: bytes = b""


def mutate(rng: random.Random) -> Setting:
    """Mostly one thing that is odd, sometimes all of them."""
    odd = [rng.random() < chance for chance in rng.choice(((0.3,) * 5, (0.9,) * 5, (0, 0.5, 0, 0, 0), (0, 0, 1, 0, 0)))]
    command = tuple(
        part.replace("{n}", rng.choice(_NUMBERS)).replace("{word}", rng.choice(_WORDS))
        for part in rng.choice(_COMMANDS)
    )
    names = rng.sample(list(VARIABLES), rng.choice((1, 2, 4))) if odd[1] else []
    return Setting(
        command,
        rng.choice(("safetensors", "objects", "lossless", "file", "dcp 1", "shared", "tied")),
        rng.choice(_NAMES) if odd[0] else "x",
        tuple((name, rng.choice(VARIABLES[name])) for name in names),
        rng.choice(_STREAMS) if odd[2] else "file",
        rng.choice(("file", "file", "closed", "full", "broken")) if odd[2] else "file",
        rng.choice(_ENCODINGS) if odd[3] else _ENCODINGS[0],
        (rng.choice((None, 0, 1, 100, 5000)), rng.choice((None, 3, 6, 12))) if odd[4] else (None, None),
    )
