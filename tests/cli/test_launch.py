"""The start of the command: what a plain call imports, and that it says what the parser's way to the same says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import ckpt8

HEAVY = {
    "torch",
    "numpy",
    "pydantic",
    "typer",
    "ckpt8.cli.app",
    "ckpt8.compressing.compressor",
    "concurrent.futures",
    "asyncio",
}


def start(*arguments, flags=()):
    """Run ``python -m ckpt8`` as a user does."""
    command = [sys.executable, *flags, "-m", "ckpt8", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def imported(*arguments):
    """Names of the modules that a call imports."""
    result = start(*arguments, flags=("-X", "importtime"))
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines[1:]}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A container with a lossy tensor, and a name that a terminal might show as something else."""
    folder = tmp_path_factory.mktemp("launch")
    torch.save({"model": {"w": torch.randn(80, 80), ":smile:[b]x": torch.randn(80, 80)}}, folder / "run.pt")
    ckpt8.compress(folder / "run.pt")
    return folder / "run.ckpt8"


def test_the_list_of_imports_would_show_a_heavy_one(packed):
    assert imported("inspect", packed.with_suffix(".pt")) >= {"typer", "ckpt8.cli.app"}


def test_the_version_imports_next_to_nothing():
    modules = imported("--version")
    assert "ckpt8.cli.launch" in modules
    assert not modules & {*HEAVY, "rich", "zstandard", "json", "dataclasses"}
    assert sum(name.startswith("ckpt8.") for name in modules) <= 5


@pytest.mark.parametrize("flags", [(), ("--tensors",)])
def test_inspect_of_a_container_needs_neither_the_parser_nor_torch(packed, flags):
    modules = imported("inspect", packed, *flags)
    assert {"ckpt8.inspecting.container", "rich.table"} <= modules
    assert not modules & HEAVY
    assert sum(name.startswith("ckpt8.") for name in modules) <= 45


def test_json_does_not_need_what_draws_tables(packed):
    modules = imported("inspect", packed, "--json")
    assert "ckpt8.inspecting.container" in modules
    assert not [name for name in modules if name.partition(".")[0] == "rich"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("inspect", "PACKED"),
        ("inspect", "--tensors", "PACKED"),
        ("inspect", "PACKED", "--json", "--tensors"),
        ("inspect", "PACKED", "--json", "--json"),
        ("inspect", "PACKED", "PACKED"),
        ("inspect", "PACKED", "--explode"),
        ("inspect", "PLAIN"),
        ("inspect", "CUT"),
        ("inspect", "MISSING"),
        ("inspect",),
        ("--version", "inspect", "PACKED"),
    ],
    ids=" ".join,
)
def test_both_ways_say_the_same(arguments, packed, run_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    cut = packed.with_name("cut.ckpt8")
    cut.write_bytes(packed.read_bytes()[:-5])
    paths = {"PACKED": packed, "PLAIN": packed.with_suffix(".pt"), "CUT": cut, "MISSING": packed.with_name("none")}
    given = [paths.get(argument, argument) for argument in arguments]
    result = start(*given)
    code, out, err = run_command(*given)
    assert (result.returncode, result.stdout) == (code, out)
    # The parser calls the program what it was started as.
    said, expected = (re.sub(r"python -m [\w.]+", "ckpt8", text) for text in (result.stderr, err))
    assert said == expected
