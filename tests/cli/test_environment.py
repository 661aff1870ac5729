"""Terminals, locales, streams and limits of any kind: a command shows its result, or one line and a documented code."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

import pytest
import torch
from run_kit import SmallRun

import ckpt8
from ckpt8.cli import guard
from ckpt8.cli.show.tables import wrap

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="streams and limits of POSIX")

SIZES = ("0", "1", "2", "5", "7", "8", "-3", "x", "", "²", str(10**9), "9" * 5000)


@pytest.fixture(scope="module")
def files(scratch):
    """A checkpoint with a name outside ASCII and its container."""
    torch.save(SmallRun(sizes=(80, 80)).advance(1) | {"漢字": torch.randn(80, 80)}, scratch / "run.pt")
    ckpt8.compress(scratch / "run.pt")
    return scratch


def commands(files, out):
    """Every command that shows something, with its exit code."""
    source, packed = files / "run.pt", files / "run.ckpt8"
    return {
        ("inspect", source, "--tensors", "--readiness"): 0,
        ("inspect", packed, "--tensors"): 0,
        ("compress", "-v", source, "-o", out / "x.ckpt8", "--force"): 0,
        ("restore", packed, "-o", out / "x.pt", "--force"): 0,
        ("restore", packed, "--salvage", "-o", out / "y.pt", "--force"): 0,
        ("verify", packed, "--against", source, "--resume-steps", "1"): 0,
        ("diff", source, packed, "--tensors"): 1,
        ("convert", source, out / "x.safetensors", "--force", "--key", "model"): 0,
        ("--help",): 0,
        ("explode",): 2,
    }


def start(*arguments, closed=(), **options):
    """Run ``python -m ckpt8`` as a user does, with these descriptors closed."""

    def close():
        for descriptor in closed:
            os.close(descriptor)

    command = [sys.executable, "-m", "ckpt8", *map(os.fsencode, map(str, arguments))]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(command, timeout=60, check=False, preexec_fn=close if closed else None, **piped)


# The size of the terminal


@pytest.mark.parametrize("width", range(-3, 12))
def test_lines_break_at_any_width_and_lose_nothing(width):
    for text in ("", " ", "a", "model.layers.0/weight:漢字 is long", "x" * 50, "漢" * 9, "a  b"):
        for first in ("", "    "):
            lines = list(wrap(text, width, first=first, more="  "))
            assert "".join("".join(lines).split()) == "".join(text.split())


@pytest.mark.slow
def test_a_name_of_a_million_characters_is_broken_in_time():
    lines = list(wrap("x" * 1_000_000, 50))
    assert len(lines) > 20_000


@pytest.mark.by_default("0")
@pytest.mark.parametrize("size", SIZES)
def test_a_terminal_of_any_size(size, run_command, files, tmp_path, monkeypatch):
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH", "JUPYTER_COLUMNS"):
        monkeypatch.setenv(name, size)
    for command, code in commands(files, tmp_path).items():
        found, out, err = run_command(*command)
        assert found == code, (command, err)
        assert out or command == ("explode",)
        assert len(out) < 1_000_000


# Encodings


@pytest.mark.by_default("ascii", "utf-16")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp037", "utf-16", "utf-8"])
def test_any_encoding_shows_every_name(encoding, run_command, files, tmp_path, monkeypatch):
    for command, code in commands(files, tmp_path).items():
        with (tmp_path / "shown").open("wb") as file:
            shown = guard.text_stream(guard.Stdout(file.fileno(), "w", closefd=False), encoding)
            monkeypatch.setattr(sys, "stdout", shown)
            assert run_command(*command)[0] == code, command
        text = (tmp_path / "shown").read_bytes().decode(encoding)
        if "--tensors" in command:
            assert ("漢字" if encoding.startswith("utf") else r"\u6f22\u5b57") in text
        if command[0] == "compress":
            assert f"max |{'Δ' if encoding.startswith('utf') else 'd'}u|" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii:strict", "TERM": "dumb"},
        {"PYTHONIOENCODING": "latin-1", "NO_COLOR": "1", "COLUMNS": "2"},
    ],
    ids=["C", "ascii", "latin-1"],
)
def test_a_process_in_any_locale(environment, files, tmp_path):
    env = {key: value for key, value in os.environ.items() if key not in ("TERM", "HOME")} | environment
    result = start("inspect", files / "run.ckpt8", "--tensors", env=env)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"split24" in b"".join(result.stdout.split())
    # A name that is no text in this locale, or in any.
    name = os.fsdecode(str(tmp_path).encode() + b"/\xff\n\x1b[2K\xe6\xbc\xa2.pt")
    result = start("inspect", name, env=env)
    assert (result.returncode, result.stdout) == (3, b"")
    said = rb"ckpt8: [ -~]+: cannot be read: No such file or directory\n"
    assert re.fullmatch(said, result.stderr) or environment.get("LC_ALL") is None


# Streams


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_closed_streams(closed, files):
    result = start("inspect", files / "run.ckpt8", closed=closed)
    assert result.returncode == (4 if 1 in closed else 0)
    if 1 in closed:
        said = b"ckpt8: standard output cannot be written: Bad file descriptor\n"
        assert result.stderr == (b"" if 2 in closed else said)
    else:
        assert b"split24" in result.stdout
        assert result.stderr == b""


@pytest.mark.slow
def test_a_file_never_takes_the_number_of_a_closed_stream(files, tmp_path):
    """Whatever a library prints would go into it."""
    result = start("inspect", files / "run.ckpt8", "--html", tmp_path / "r.html", closed=(0, 1, 2))
    assert result.returncode == 4
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--help",), ("inspect", "run.ckpt8")], ids=str)
def test_a_reader_that_goes_away_ends_the_command_quietly(arguments, files):
    """With the code that a shell shows for a program that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        result = start(*arguments, stdout=pipe, cwd=files)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.slow
def test_a_device_that_is_full(files):
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        result = start("inspect", files / "run.ckpt8", "--json", stdout=full)
        assert result.returncode == 4
        assert result.stderr == b"ckpt8: standard output cannot be written: No space left on device\n"
        result = start("inspect", files / "none.ckpt8", stderr=full)
        assert result.returncode == 3


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_a_stdout_that_fails_in_any_command(code, run_command, files, tmp_path, monkeypatch):
    for command in commands(files, tmp_path):
        reader, writer = os.pipe()
        os.close(reader)
        target = writer if code == errno.EPIPE else os.open("/dev/full", os.O_WRONLY)
        raw = guard.Stdout(target, "w", closefd=False)
        monkeypatch.setattr(sys, "stdout", guard.text_stream(raw, "utf-8"))
        found, _, err = run_command(*command)
        if command != ("explode",):
            assert found == (141 if code == errno.EPIPE else 4), command
            assert err.count("\n") == (0 if code == errno.EPIPE else 1)
        for descriptor in {writer, target}:
            os.close(descriptor)


def test_a_stdout_that_does_not_block(files):
    """As a program sets it that reads from several pipes: what is written waits for room."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = guard.text_stream(guard.Stdout(writer, "w", closefd=False), "utf-8")
    child = os.fork()
    if not child:
        os.close(writer)
        total = 0
        while got := os.read(reader, 65536):
            total += len(got)
        os._exit(total == 3_000_000)
    os.close(reader)
    stream.write("x" * 3_000_000)
    stream.flush()
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


# Errors that nobody expects


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "not enough memory"),
        (OSError(errno.EMFILE, "Too many open files"), "not enough open files"),
        (RuntimeError("can't start new thread"), "not enough threads"),
        (ModuleNotFoundError("No module named 'torch'"), "package that is not installed: No module named 'torch'"),
        (RecursionError("maximum recursion depth exceeded"), "a defect of ckpt8: RecursionError"),
        (EOFError("end of file"), "a defect of ckpt8: EOFError: end of file; please report it"),
        (OverflowError("int too large\nto convert"), "a defect of ckpt8: OverflowError"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "a defect of ckpt8: BrokenPipeError"),
        (ValueError("x" * 100_000), "a defect of ckpt8: ValueError: x"),
        (TypeError("\x1b[2K\ud800"), "a defect of ckpt8: TypeError"),
        (AssertionError(), "a defect of ckpt8: AssertionError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_unexpected_error_is_one_line_and_its_own_code(error, said, run_command, files, tmp_path, monkeypatch):
    """1 means that a check fails, and nothing else."""

    def fail(*_, **__):
        raise error

    for function in (
        "ckpt8.inspecting.container.inspect_container",
        "ckpt8.compressing.compress",
        "ckpt8.restoring.restore.restore_original",
        "ckpt8.inspecting.verify.verify",
        "ckpt8.inspecting.diff.diff",
        "ckpt8.converting.convert.convert",
    ):
        monkeypatch.setattr(function, fail)
    for command in commands(files, tmp_path):
        if command[0] in ("--help", "explode") or "--salvage" in command or files / "run.pt" in command[:2]:
            continue
        code, out, err = run_command(*command)
        assert (code, out) == (guard.INTERNAL, ""), command
        assert re.fullmatch(rf"ckpt8: [^\n]*{re.escape(said)}[^\n]*\n", err)
        assert len(err) < 1000
        assert err.isprintable() or err[:-1].isprintable()
    monkeypatch.setenv(guard.TRACEBACK, "1")
    assert "in fail\n    raise error" in run_command("inspect", files / "run.ckpt8")[2]


LIMITED = """
import resource, sys
import ckpt8.__main__, ckpt8.cli.app, ckpt8.inspecting.container, ckpt8.cli.show.inspect

resource.setrlimit(getattr(resource, sys.argv.pop(1)), (int(sys.argv.pop(1)),) * 2)
ckpt8.__main__.main()
"""
"""Limits what is left to the command once Python and its modules are there: their needs differ between machines."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "room", "name", "said"),
    [
        ("RLIMIT_AS", 300 << 20, "run.pt", b"not enough memory"),
        ("RLIMIT_NOFILE", 3, "run.ckpt8", b"not enough open files"),
    ],
)
def test_a_process_without_memory_or_files(limit, room, name, said, files):
    command = [sys.executable, "-c", LIMITED, limit, str(room), "inspect", str(files / name)]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert result.returncode == guard.INTERNAL
    assert re.fullmatch(rb"ckpt8: %b [^\n]+\n" % said, result.stderr), result.stderr


@pytest.mark.slow
def test_a_process_without_a_place_for_temporary_files(files, tmp_path):
    env = os.environ | {"TMPDIR": "/nonexistent", "HOME": "/nonexistent"}
    result = start("restore", files / "run.ckpt8", "-o", tmp_path / "x.pt", env=env)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_user_without_a_home(run_command, inputs, tmp_path, monkeypatch):
    """A number that no list of users has, as in a container."""
    ckpt8.compress(inputs / "accelerate", tmp_path / "run.ckpt8")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    for _ in range(2):
        run_command.said(0, "restore", tmp_path / "run.ckpt8", "-o", tmp_path / "out", "--force")
