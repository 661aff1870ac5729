"""The command line: exit codes, one line for every failure, nothing left behind, the source untouched.

Most commands run in this process through ``main``; what needs signals, limits or a fresh interpreter is started.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from disk_kit import flip_bit
from members_kit import tampered
from run_kit import SmallRun
from typer.main import get_command

import ckpt8
from ckpt8.cli import commands
from ckpt8.cli.app import EXAMPLES, app
from ckpt8.cli.guard import progress_bar
from ckpt8.compressing.policy import PRESETS
from ckpt8.converting.writers import WRITERS
from ckpt8.inspecting.container import inspect_container

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")
BEYOND = struct.pack("<Q", 2**63) + b'{"__metadata__":{"ckpt8":"1.0"}}'


@pytest.fixture
def run(run_command):
    """The short name here."""
    return run_command


def start(*arguments, **options):
    """Run ``python -m ckpt8`` as a user does."""
    command = [sys.executable, "-m", "ckpt8", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def snapshot(folder):
    """Every file with its content and time."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        )
        for path in folder.rglob("*")
        if path.is_file() or path.is_dir() or path.is_fifo()
    }


def files(folder):
    """As ``snapshot``, without directories, whose time changes while temporary files come and go."""
    return {name: entry for name, entry in snapshot(folder).items() if entry[2] is not None or name == "fifo"}


def assert_refused(result, code):
    exit_code, out, err = result
    assert (exit_code, out) == (code, "")
    assert re.fullmatch(r"ckpt8: [^\n]+\n", err)


@pytest.fixture
def small(tmp_path):
    """A small checkpoint that compresses to every codec."""
    path = tmp_path / "run.pt"
    torch.save(SmallRun(1, (96, 96)).advance(3) | {"step": 3}, path)
    return path


@pytest.fixture
def packed(small):
    """The container of ``small``, beside it."""
    ckpt8.compress(small)
    return small.with_suffix(".ckpt8")


# What cannot be read: 3


def _zip(**records):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records.items():
            archive.writestr(name.replace("__", "/"), content)
    return buffer.getvalue()


def _nested(depth):
    return _zip(a__version=b"3\n", **{"a/data.pkl": b"\x80\x02)" + b"\x85" * depth + b"."})


GARBAGE = {
    "empty": lambda: b"",
    "text": lambda: b"learning_rate: 0.1\n" * 100,
    "zeros": lambda: bytes(5000),
    "noise": lambda: random.Random(5).randbytes(5000),
    "a zip file of something else": lambda: _zip(readme__txt=b"hello", a__b=b"x" * 500),
    "an empty zip file": _zip,
    "a checkpoint without its storages": lambda: _zip(
        **{"a/data.pkl": b"\x80\x02X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ."}
    ),
    "two million nested tuples": lambda: _nested(2_000_000),
    "a million nested tuples in the old format": lambda: (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2)
        + pickle.dumps(1001, 2)
        + pickle.dumps({"little_endian": True}, 2)
        + b"\x80\x02)"
        + b"\x85" * 1_000_000
        + b"."
    ),
    "another magic number": lambda: pickle.dumps(0x1950A86A20F9469CFC6D, 2) + bytes(1000),
    "a header of 2^63 bytes": lambda: BEYOND,
    "a header of 100 million bytes": lambda: struct.pack("<Q", 99_999_999) + BEYOND[8:],
    "a pickle": lambda: pickle.dumps({"a": 1}),
}
COMMANDS = ("compress", "inspect", "restore", "verify")


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_no_checkpoint_is_refused_by_every_command(kind, run, tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(GARBAGE[kind]())
    before = files(tmp_path)
    for command in COMMANDS:
        assert_refused(run(command, path), 3)
        assert files(tmp_path) == before


@pytest.mark.parametrize("command", [*COMMANDS, "chain", "runs", "rebase", "diff", "convert"])
def test_missing_files_and_directories_are_refused(command, run, tmp_path):
    missing = tmp_path / "missing.pt"
    missing.with_suffix(".ckpt8").write_bytes(b"x")  # as after compress --remove
    more = {"diff": [missing], "convert": [tmp_path / "x.safetensors"]}.get(command, [])
    said = f"ckpt8: {missing}: cannot be read: No such file or directory\n"
    assert run(command, missing, *more) == (3, "", said)
    if command not in COMMANDS:
        return
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("x")
    before = snapshot(tmp_path)
    for path in ("missing/x.pt", "full/a.txt/x.pt", "empty", "full", "x" * 300):
        assert_refused(run(command, tmp_path / path), 3)
    assert snapshot(tmp_path) == before


def test_a_container_is_not_compressed_again_nor_a_source_with_its_suffix_lost(run, packed, tmp_path, small):
    before = files(tmp_path)
    assert_refused(run("compress", packed, "-o", tmp_path / "again.ckpt8"), 3)
    assert files(tmp_path) == before
    source = small.rename(tmp_path / "odd.ckpt8")
    before = files(tmp_path)
    assert_refused(run("compress", source), 4)
    assert files(tmp_path) == before


# What cannot be written: 4


def test_existing_targets_are_kept_without_force(run, packed, small, tmp_path):
    before = files(tmp_path)
    assert_refused(run("compress", small), 4)
    assert_refused(run("restore", packed), 4)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert_refused(run("restore", packed, "-o", tmp_path / "dangling"), 4)
    assert files(tmp_path) == before
    assert run("compress", small, "--force", "--preset", "lossless")[0] == 0
    assert run("restore", packed, "--force")[0] == 0
    assert files(tmp_path)["run.pt"][2] == before["run.pt"][2]


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    "target",
    ["run.pt/x", "missing/x", "folder", "x" * 300, "fifo"],
    ids=["under a file", "no folder", "folder", "long", "fifo"],
)
def test_targets_that_cannot_be_written(target, force, run, packed, small, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = files(tmp_path)
    # compress collects containers in a folder that is there.
    for command in (("compress", small), ("restore", packed))[target == "folder" :]:
        assert_refused(run(*command, "-o", tmp_path / target, *force), 4)
        assert files(tmp_path) == before
    assert (tmp_path / "fifo").is_fifo()


def test_any_name_that_the_file_system_takes_will_do(run, small, tmp_path):
    """Also one that is long in bytes: 80 characters of 3 bytes each."""
    target = tmp_path / ("漢" * 80 + ".ckpt8")
    run.shown("compress", small, "-o", target)
    assert target.exists()


# What is asked for cannot be meant: 2

USAGE = {
    "no such command": "explode",
    "no source": "compress",
    "an unknown option": "compress SRC --explode",
    "an unknown preset": "compress SRC --preset tiny",
    "a budget beside a preset": "compress SRC --preset flash --budget 1",
    "a budget beside lossless": "compress SRC --preset lossless --budget 1",
    "a budget too small": "compress SRC --budget 0.009",
    "a budget too large": "compress SRC --budget 10.1",
    "a negative budget": "compress SRC --budget -1",
    "a budget that is no number": "compress SRC --budget nan",
    "a budget without end": "compress SRC --budget inf",
    "a budget of text": "compress SRC --budget few",
    "a rule without a codec": "compress SRC --rule *",
    "a rule of an unknown codec": "compress SRC --rule *=zip",
    "a rule of a parameter that is none": "compress SRC --rule *=split24(Q=7)",
    "a rule of a value out of range": "compress SRC --rule *=split24(R=200)",
    "a rule of code": "compress SRC --rule *=split24(R=__import__('os').getpid())",
    "an unknown device": "compress SRC --device tpu",
    "a device that is not there": "compress SRC --device cuda",
    "no threads": "compress SRC --threads 0",
    "a thread count that is none": "compress SRC --threads x",
    "a negative bound": "compress SRC --max-update-error -1",
    "a bound that is no number": "compress SRC --max-update-error nan",
    "a replay error that is no number": "verify SRC --against SRC --resume-steps 1 --max-replay-error nan",
    "a bound without statistics": "compress SRC --max-update-error 1 --no-stats",
    "an original of an original": "inspect SRC --against SRC",
    "a benchmark of a size that is none": "bench --size big",
}


@pytest.mark.parametrize("kind", USAGE)
def test_usage_errors(kind, run, small, tmp_path):
    before = files(tmp_path)
    err = run.refused(2, *(small if word == "SRC" else word for word in USAGE[kind].split()))
    assert err
    assert "Traceback" not in err
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "option"),
    {
        "restore SRC b.pt": "-o b.pt",
        "rebase SRC b.ckpt8": "-o b.ckpt8",
        "verify SRC run.pt": "--against run.pt",
        "inspect SRC run.pt": "--against run.pt",
        "compress SRC new.ckpt8": "-o new.ckpt8",
        "restore SRC b.pt -o c.pt": "--help",
        "restore SRC b.pt c.pt": "--help",
        "chain . more": "--help",
    }.items(),
)
def test_an_argument_too_many_is_told_its_option(command, option, run, packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    words = [packed.name if word == "SRC" else word for word in command.split()]
    err = run.refused(2, *words)
    assert re.fullmatch(r"ckpt8: [^\n]+\n", err)
    assert option in err
    assert files(tmp_path) == before
    # What it says to do is what the command takes.
    if not option.startswith("--help") and words[0] in ("restore", "verify"):
        assert run(*words[:2], *option.split())[0] == 0


# What does not hold: 1


@pytest.mark.parametrize(("records", "figure"), [("storages", "max_relative"), ("parameters", "sum_square_error")])
def test_a_statistic_that_does_not_hold(records, figure, run, packed, small):
    def change(manifest, _):
        next(record["error"] for record in manifest[records] if record["error"])[figure] *= 1.0001

    tampered(packed, packed, change)
    assert run("verify", packed)[0] == 0
    code, out, err = run("verify", packed, "--against", small)
    assert code == 1
    assert re.fullmatch(r"ckpt8: [^\n]*measured[^\n]*\n", err)
    assert "agree" not in out
    code, out, _ = run("verify", packed, "--against", small, "--json")
    assert code == 1
    assert json.loads(out)["failures"]


def test_another_original(run, packed, small, tmp_path):
    tree = torch.load(small, weights_only=True)
    tree["model"]["0.bias"][3] += 1
    torch.save(tree, tmp_path / "run2.pt")
    assert run("verify", packed, "--against", small)[0] == 0
    # Another name makes another archive, so the structure differs as well.
    assert_refused(run("verify", packed, "--against", tmp_path / "run2.pt"), 1)
    (tmp_path / "other").mkdir()
    torch.save(tree, tmp_path / "other" / "run.pt")
    assert "model.0.bias" in run.said(1, "verify", packed, "--against", tmp_path / "other" / "run.pt")


def unwrapped(text):
    """Without white space: a long path is broken where it does not fit."""
    return "".join(text.split())


def test_inspect_says_what_it_measured_from_and_what_differs(run, packed, small, tmp_path):
    out = run.shown("inspect", packed, "--against", small)
    assert unwrapped(f"\nerror, measured against {small}: ") in unwrapped(out)
    assert "differ" not in out
    assert "\nerror: " in run("inspect", packed)[1]
    tree = torch.load(small, weights_only=True)
    tree["model"]["0.bias"][3] += 1
    other = tmp_path / "other" / "run.pt"
    other.parent.mkdir()
    torch.save(tree, other)
    out = run.shown("inspect", packed, "--against", other)
    assert unwrapped(f"\nerror, measured against {other}: ") in unwrapped(out)
    said = f"not made from {other}: 2 lossless storages differ, such as model.0.bias"
    assert unwrapped(said) in unwrapped(out)
    tree["optimizer"]["state"][1]["exp_avg"] += 1
    torch.save(tree, other)
    names = ["model.0.bias", "optimizer.state.1.exp_avg", "ckpt8.skeleton"]  # which has checksums
    _, out, _ = run("inspect", packed, "--against", other, "--html", tmp_path / "r.html")
    said = f"not made from {other}: 3 lossless storages differ, such as model.0.bias"
    assert unwrapped(said) in unwrapped(out)
    assert f"against the original, {other}. " in (tmp_path / "r.html").read_text()
    assert said in (tmp_path / "r.html").read_text()
    facts = json.loads(run("inspect", packed, "--against", other, "--json")[1])
    assert facts["measured_from"] == {"path": str(other), "differing": names}
    assert json.loads(run("inspect", packed, "--json")[1])["measured_from"] is None
    # Where all is lossless there is no error, and what differs is said all the same.
    ckpt8.compress(small, packed, preset="lossless", force=True)
    assert unwrapped(said) in unwrapped(run("inspect", packed, "--against", other)[1])
    # Of a checkpoint it begins with the path, then the format.
    first, second, *_ = run("inspect", small)[1].splitlines()
    assert (first, second.partition(",")[0]) == (str(small), "torch-zip")


# JSON, help, and what works


def _one_object(text):
    value, end = json.JSONDecoder().raw_decode(text)
    assert text[end:] == "\n"
    assert isinstance(value, dict)
    return value


def test_json_is_one_object_that_says_which_schema_it_follows(run, small, tmp_path, monkeypatch):
    """First of its keys, and the same in all commands: a program that reads one knows what to expect."""
    packed = tmp_path / "run.ckpt8"
    monkeypatch.setattr("ckpt8.cli.bench.run.bench", lambda *_, **__: {"rows": []})
    for code, *command in (
        (0, "compress", small),
        (0, "inspect", packed, "--tensors"),
        (0, "inspect", packed, "--against", small),
        (0, "inspect", small, "--readiness", "--tensors"),
        (0, "verify", packed),
        (0, "verify", packed, "--against", small),
        (1, "diff", packed, small),
        (0, "convert", packed, tmp_path / "out.safetensors"),
        (0, "restore", packed, "-o", tmp_path / "back.pt"),
        (0, "restore", packed, "-o", tmp_path / "saved.pt", "--salvage"),
        (0, "bench", small),
    ):
        found, out, err = run(*command, "--json")
        assert (found, err) == (code, ""), command
        assert next(iter(_one_object(out).items())) == ("schema", 1), command


FAILING = {
    "usage": (2, "compress"),
    "an option": (2, "verify", "run.ckpt8", "--jsn"),
    "a command": (2, "compres", "run.pt"),
    "arguments": (2, "compress", "run.pt", "--preset", "best"),
    "input": (3, "inspect", "missing.pt"),
    "a statistic": (3, "verify", "other.ckpt8"),
    "output": (4, "restore", "run.ckpt8"),
    "one of several": (3, "compress", "run.pt", "missing.pt", "-o", "out"),
    "a run": (3, "runs", "."),
}


@pytest.mark.parametrize("what", FAILING)
def test_json_is_one_object_also_on_failure(what, run, packed, tmp_path, monkeypatch):
    """With the line of stderr and the exit code, whatever it has stated before it failed."""
    monkeypatch.chdir(tmp_path)
    cut = packed.read_bytes()
    (tmp_path / "other.ckpt8").write_bytes(cut[:200] + bytes(8) + cut[208:])
    expected, *command = FAILING[what]
    code, out, err = run(*command, "--json")
    facts = _one_object(out)
    assert code == facts["exit_code"] == expected
    assert " ".join(facts["error"].split()) in _unboxed(err)


def _unboxed(text):
    """What typer says, without the lines around it."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, "terminated"),
        (MemoryError(), 70, "not enough memory"),
        (OSError(28, "No space left on device"), 4, "cannot be written"),
        (ZeroDivisionError("x"), 70, "a defect of ckpt8: ZeroDivisionError: x"),
    ],
)
def test_json_when_a_command_is_ended(error, code, said, run, packed, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("ckpt8.inspecting.verify.verify", fail)
    found, out, _ = run("verify", packed, "--json")
    facts = _one_object(out)
    assert (found, facts["exit_code"]) == (code, code)
    assert said in facts["error"]


WRITING = {
    "compress": ("compress", "run.pt"),
    "several": ("compress", "run.pt", "next.pt"),
    "chain": ("chain", "step", "--preset", "archive"),
    "restore": ("restore", "run.ckpt8"),
    "rebase": ("rebase", "run.ckpt8", "-o", "whole.ckpt8"),
    "convert": ("convert", "run.ckpt8", "run.safetensors"),
    "inspect": ("inspect", "run.pt", "--html", "page.html"),
    "runs": ("runs", "step", "--html", "page.html"),
}


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("what", WRITING)
def test_a_command_says_what_it_replaced_and_how_long_one_waited(what, run, packed, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step").mkdir()
    for path in (tmp_path / "next.pt", tmp_path / "step" / "step-1.pt"):
        shutil.copyfile(small, path)
        os.utime(path, (0, 0))
    outputs = ("run.pt", "run.ckpt8", "step/step-1.ckpt8", "whole.ckpt8", "run.safetensors", "page.html")
    for name in outputs:
        if not (tmp_path / name).exists():
            shutil.copyfile(packed, name) if name.endswith("ckpt8") else (tmp_path / name).write_text("before")
    ckpt8.compress("step/step-1.pt", force=True)
    before = {name: (tmp_path / name).stat().st_size for name in outputs}
    monkeypatch.setattr("ckpt8.core.workers.settle", lambda **_: time.sleep(0.05))  # as an import takes long
    code, out, _ = run(*WRITING[what], "--force", "--json")
    facts = _one_object(out)
    rows = facts["checkpoints"] if what in ("several", "chain") else [facts]
    replaced = re.fullmatch(r".*/(.+): a file of ([\d,]+) bytes", rows[0]["replaced"])
    (name,) = (name for name in outputs if name.rpartition("/")[2] == replaced[1])
    assert (code, int(replaced[2].replace(",", ""))) == (0, before[name])
    if what not in ("inspect", "runs"):
        assert facts["total_seconds"] >= facts["seconds"] + 0.05
    again = [{"archive": "lossless"}.get(word, word) for word in WRITING[what]]
    code, out, _ = run(*again, "--force")
    assert (code, len(re.findall(r"replaced \S+: a file of", out))) == (0, 2 if what == "several" else 1)
    if what not in ("inspect", "runs"):
        assert float(re.findall(r"in ([\d.]+) s", out)[-1 if what in ("several", "chain") else 0]) >= 0.05


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("key", ["\ud800", "[bold]x[/]", ":smile:", "\x1b[31mred", "a\nb", "é漢"])
def test_odd_names_are_shown_as_they_are(key, run, tmp_path):
    torch.save({"model": {key: torch.randn(70, 70)}}, tmp_path / "a.pt")
    for command in (("compress", tmp_path / "a.pt"), ("inspect", tmp_path / "a.ckpt8"), ("inspect", tmp_path / "a.pt")):
        flags = () if command[0] == "compress" else ("--tensors",)
        code, out, err = run(*command, *flags)
        assert (code, err) == (0, ""), command
        assert "\x1b" not in out
        if flags and key in ("[bold]x[/]", ":smile:"):
            assert key in out
        code, out, err = run(*command, *flags, "--json", *(("--force",) if not flags else ()))
        assert (code, err) == (0, ""), command
        _one_object(out)


def test_a_progress_bar_shows_its_label_escaped(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("compress [b]a\x1b[2K\n.pt", total=10) as progress:
        progress(10)
    assert r"compress [b]a\x1b[2K\x0a.pt" in sys.stderr.getvalue()


def test_round_trip_as_a_user_types_it(run, inputs, tmp_path):
    """In a terminal's place, with pipes: silence on stderr, exit code 0, the file back."""
    source = tmp_path / "run.pt"
    source.write_bytes((inputs / "legacy.pt").read_bytes())
    stamp = files(tmp_path)
    result = start("compress", source, "--preset", "lossless")
    assert (result.returncode, result.stderr) == (0, "")
    assert str(tmp_path) in result.stdout.replace("\n", "")
    assert run("restore", tmp_path / "run.ckpt8", "-o", tmp_path / "back.pt")[::2] == (0, "")
    assert (tmp_path / "back.pt").read_bytes() == source.read_bytes()
    assert files(tmp_path)["run.pt"] == stamp["run.pt"]
    assert_refused(run("restore", tmp_path / "none.ckpt8"), 3)


def test_every_command_has_help_and_the_version_is_the_packages(run):
    code, out, err = run("--version")
    assert (code, out, err) == (0, f"ckpt8 {ckpt8.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    for command in (*COMMANDS, "bench"):
        assert command in out
        assert run(command, "--help")[0] == 0
    # That of convert names every format that is written.
    shown = run("convert", "--help")[1].partition("--dtype")[0]
    assert set(WRITERS) <= set(shown.replace("│", " ").replace(",", " ").replace(".", " ").split())


def test_quiet_prints_errors_alone_and_verbose_all_rows_and_what_falls_back(run, small, packed, tmp_path):
    logger = logging.getLogger("ckpt8")
    before = logger.level, list(logger.handlers)
    for words in (("inspect", packed), ("verify", packed), ("compress", small, "--force"), ("diff", small, small)):
        assert run(*words)[1]
        assert run(*words, "-q") == run("-q", *words) == (0, "", "")
    assert json.loads(run.shown("verify", packed, "-q", "--json"))["failures"] == []
    assert_refused(run("verify", tmp_path / "none.ckpt8", "--quiet"), 3)
    assert run.shown("-V") == run.shown("--version")
    # Rows that a report folds.
    a, b = ({f"{name}.x": torch.full((2, 2), value) for name in "abcdefghijklmnop"} for value in (0.0, 1.0))
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    assert "p.x" not in run("diff", tmp_path / "a.pt", tmp_path / "b.pt")[1]
    out = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "-v")[1]
    assert all(f"{name}.x" in out for name in "abcdefghijklmnop")
    assert run("-v", "diff", tmp_path / "a.pt", tmp_path / "b.pt")[1] == out
    # A second moment below zero is none, so that its codec refuses it.
    state = torch.load(small)
    state["optimizer"]["state"][0]["exp_avg_sq"].fill_(-1.0)
    torch.save(state, small)
    code, _, err = run("compress", small, "--force", "-v")
    assert code == 0
    assert re.search(r"^ckpt8: storage \S+: \S+ in place of \S+: \S", err, re.MULTILINE)
    assert run("compress", small, "--force")[2] == ""
    assert (logger.level, logger.handlers) == before


def test_every_help_ends_with_two_examples_that_parse(run):
    group = get_command(app)
    for name, command in group.commands.items():
        out = run.shown(name, "--help")
        tail = [line.strip() for line in out.strip().splitlines()][-3:]
        assert tail[0] == "Examples:"
        assert tail[1:] == list(EXAMPLES[name])
        for line in tail[1:]:
            program, first, *words = shlex.split(line)
            assert (program, first) == ("ckpt8", name)
            with command.make_context(name, words):  # raises where it does not parse
                pass
    assert EXAMPLES.keys() == group.commands.keys()


def test_values_are_completed():
    def complete(line):
        words = {"_CKPT8_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        program = "import sys; sys.argv = ['ckpt8']; from ckpt8.cli.app import main; main()"
        command = [sys.executable, "-c", program]
        result = subprocess.run(
            command, env=os.environ | words, capture_output=True, text=True, timeout=60, check=False
        )
        return result.stdout.split()

    assert set(complete("ckpt8 compress --preset ")) == set(PRESETS)
    assert complete("ckpt8 convert run.pt x --to saf") == ["safetensors"]
    assert "bfloat16" in complete("ckpt8 convert run.pt x --dtype ")
    # What is completed is what there is.
    assert set(commands.PRESETS) == set(PRESETS)
    assert set(commands.FORMATS) == set(WRITERS)


def test_what_commands_import(packed, tmp_path):
    """Help, runs and inspect of a container import nothing heavy, and commands between files no torch."""
    program = """
import importlib.util, os, shutil, sys
import ckpt8.integrations, ckpt8.nn, ckpt8.optim
from ckpt8.cli.app import main
from ckpt8.core import backend
backend.LEAST_FOR_NUMBA = 0  # as where kernels are compiled already
source, folder, target = sys.argv[1:]
helps = ("compress", "convert", "chain", "rebase", "runs", "bench")
heavy = {"torch", "numpy", "numba", "triton", "ckpt8.compressing.compressor", "concurrent.futures", "asyncio"}
stores = {"ckpt8.core.files.stores", "boto3", "botocore"}

def run(*arguments):
    sys.argv = ["ckpt8", *arguments]
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code or arguments[0] == "diff", arguments
    return heavy & set(sys.modules)

for arguments in (["--help"], ["--version"], *([command, "--help"] for command in helps), ["inspect", source],
                  ["inspect", source, "--tensors"], ["inspect", source, "--json"], ["runs", folder]):
    assert not run(*arguments), arguments

original, made = source.replace(".ckpt8", ".pt"), target + "/made.ckpt8"
os.mkdir(f"{target}/run")
for name in ("1.pt", "2.pt"):
    shutil.copy(original, f"{target}/run/step-{name}")
    os.utime(f"{target}/run/step-{name}", (0, 0))
between_files = (
    ["restore", source, "-o", f"{target}/back.pt"],
    *(["compress", original, "-o", made, "--preset", preset, "--force"] for preset in ("flash", "archive", "lossless")),
    ["compress", original, "-o", f"{target}/delta.ckpt8", "--base", made],
    ["verify", f"{target}/delta.ckpt8"], ["verify", made, "--against", original], ["verify", original],
    ["diff", original, original], ["diff", original, source],
    ["chain", f"{target}/run", "--budget", "1"],
    ["convert", original, f"{target}/model.safetensors"],
)
for arguments in between_files:
    # Without numba torch is the engine.
    assert "torch" not in run(*arguments) or importlib.util.find_spec("numba") is None, arguments
assert not stores & set(sys.modules)
# What is heavy would show.
assert run("inspect", original) >= {"torch", "ckpt8.compressing.compressor"}
"""
    command = [sys.executable, "-c", program, str(packed), str(packed.parent), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "split24/1" in result.stdout


def test_where_torch_steps_in_for_numba_restore_gives_the_same_bytes_and_each_thread_one_of_torch(packed, tmp_path):
    program = """
import sys
import ckpt8
from ckpt8.container.reader import ContainerReader

fill, seen = ContainerReader.fill_chunk, []

def note(*given):
    seen.append(sys.modules["torch"].get_num_threads())
    fill(*given)

ContainerReader.fill_chunk = note
ckpt8.restore(*sys.argv[1:])
assert set(seen) == {1}, seen
"""
    command = [sys.executable, "-c", program, str(packed), str(tmp_path / "back.pt")]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "3"}
    subprocess.run(command, env=environment, timeout=300, check=True)
    assert (tmp_path / "back.pt").read_bytes() == ckpt8.restore(packed, tmp_path / "usual.pt").read_bytes()


ALL_COMMANDS = """
import sys, torch
at_start = set(sys.modules)
import ckpt8
from ckpt8.cli.app import app

def run(*arguments):
    app(arguments, standalone_mode=False)

run("compress", "run.pt", "--budget", "1", "-o", "small.ckpt8")
for preset in ("lossless", "flash"):
    run("compress", "run.pt", "--preset", preset, "--force")
run("restore", "run.ckpt8", "-o", "back.pt")
run("verify", "run.ckpt8", "--against", "run.pt", "--resume-steps", "1")
run("diff", "run.pt", "run.pt")
run("inspect", "run.pt")
run("convert", "run.ckpt8", "run.safetensors")
run("runs", ".")
ckpt8.load("run.ckpt8")
model = torch.nn.Linear(80, 80)
for path in ("run.ckpt8", "run.pt"):
    ckpt8.resume(path, model=model)
found = set(sys.modules) - at_start
optimizer = torch.optim.AdamW(model.parameters())  # torch itself imports a lot for it
at_start = set(sys.modules)
for path in ("run.ckpt8", "run.pt"):
    ckpt8.resume(path, model=model, optimizer=optimizer)
print(*sorted(found | set(sys.modules) - at_start), file=sys.stderr)
"""


@pytest.mark.slow
def test_no_command_on_a_plain_file_imports_more_of_torch_distributed_than_torch_does(run_program, tmp_path):
    """torch.distributed.checkpoint alone takes as long as torch, and brings sympy."""
    checkpoint = SmallRun(sizes=(80, 80)).advance(1)
    checkpoint["model"] = {name.removeprefix("0."): weight for name, weight in checkpoint["model"].items()}
    torch.save(checkpoint, tmp_path / "run.pt")
    modules = run_program(ALL_COMMANDS, folder=tmp_path)[1].splitlines()[-1].split()
    assert {"ckpt8.restoring.restore", "ckpt8.restoring.resume.optimizer"} <= set(modules)
    assert [name for name in modules if name.startswith(("torch.distributed", "sympy", "mpmath"))] == []


def test_an_update_error_as_large_as_the_update_is_pointed_out(run, small, tmp_path):
    """One step from zero moves every weight alike, whatever its gradient: a small first moment takes code 0."""
    torch.save(SmallRun(sizes=(300, 300)).advance(1), tmp_path / "first.pt")
    assert "--max-update-error" in run("compress", tmp_path / "first.pt", "-o", tmp_path / "first.ckpt8")[1]
    assert "--max-update-error" not in run("compress", small, "-o", tmp_path / "small.ckpt8")[1]


def test_a_checkpoint_without_tensors_and_a_rule_that_matches_nothing_are_refused(run, tmp_path, small):
    torch.save({"step": 1}, tmp_path / "a.pt")
    before = snapshot(tmp_path)
    assert_refused(run("compress", tmp_path / "a.pt"), 3)
    assert snapshot(tmp_path) == before
    before = files(tmp_path)
    assert_refused(run("compress", small, "--rule", "no.such.*=lossless", "-o", tmp_path / "x.ckpt8"), 2)
    assert files(tmp_path) == before


@pytest.mark.slow
def test_names_of_files_reach_the_terminal_escaped(run, small, tmp_path):
    """One that erases the line and starts another, in whatever prints a path."""
    source = tmp_path / "a\x1b[2Kred\nsealed.pt"
    shutil.copyfile(small, source)
    packed = source.with_suffix(".ckpt8")
    other = tmp_path / "b\x1b[2Kred\nb.safetensors"
    for command in (
        ("compress", source),
        ("verify", packed),
        ("verify", packed, "--against", source),
        ("verify", packed, "--against", source, "--resume-steps", "1"),
        ("restore", packed, "-o", tmp_path / "c\x1b[2Kred\nc.pt"),
        ("convert", source, other),
        ("inspect", packed, "--against", source),
        ("diff", source, packed),
    ):
        code, out, err = run(*command)
        assert (code, err) == (1 if command[0] == "diff" else 0, ""), command
        assert "\x1b" not in out
        assert r"\x1b[2Kred\x0a" in out, command
    content = packed.read_bytes()
    packed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # a seal may end in any byte
    code, out, err = run("restore", packed, "--salvage", "-o", tmp_path / "d\x1b[2K\nd.pt")
    assert code == 1
    assert r"d\x1b[2K\x0ad.pt: " in out
    assert "\x1b" not in out + err


def test_integers_are_counted_as_they_are_and_need_no_reason(run, tmp_path):
    torch.save({"model": {"w": torch.randn(100, 100), "n": torch.arange(9000)}}, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt")
    facts = inspect_container(tmp_path / "a.ckpt8", tensors=True)
    assert facts["weights"] == 100 * 100
    assert {t["name"]: (t["elements"], t["dtype"], t["reason"]) for t in facts["tensors"]} == {
        "model.w": (10_000, "float32", None),
        "model.n": (9000, "int64", None),
    }


def test_verify_blames_an_original_that_is_damaged(run, tmp_path):
    torch.save({"model": {"w": torch.randn(100, 100)}}, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt")
    flip_bit(tmp_path / "a.pt", 20_000)
    result = run("verify", tmp_path / "a.ckpt8", "--against", tmp_path / "a.pt")
    assert_refused(result, 3)
