"""The start of the command: what a plain call imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import ckpt8
from ckpt8.converting.writers import WRITERS

HEAVY = {
    "torch",
    "numpy",
    "numba",
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
    assert imported("inspect", packed.with_suffix(".pt")) >= {"torch", "ckpt8.cli.app"}


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("compress", "--help"), ("inspect", "--help")])
def test_help_and_version_need_nothing_that_is_heavy(arguments):
    modules = imported(*arguments)
    assert "ckpt8.cli.app" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize("flags", [(), ("--tensors",)])
def test_inspect_of_a_container_needs_nothing_that_is_heavy(packed, flags):
    modules = imported("inspect", packed, *flags)
    assert {"ckpt8.inspecting.container", "rich.console"} <= modules
    assert not modules & HEAVY


def test_the_overview_of_a_run_needs_nothing_that_is_heavy(packed):
    modules = imported("runs", packed.parent)
    assert {"ckpt8.inspecting.runs", "rich.console"} <= modules
    assert not modules & HEAVY


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


def test_no_command_on_a_plain_file_imports_more_of_torch_distributed_than_torch_does(run_program, tmp_path):
    """torch.distributed.checkpoint alone takes as long as torch, and brings sympy."""
    model = torch.nn.Linear(80, 80)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 80)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    modules = run_program(ALL_COMMANDS, folder=tmp_path)[1].splitlines()[-1].split()
    assert {"ckpt8.restoring.restore", "ckpt8.restoring.resume.optimizer"} <= set(modules)
    assert [name for name in modules if name.startswith(("torch.distributed", "sympy", "mpmath"))] == []


def test_the_help_of_convert_names_every_format_that_is_written():
    shown = start("convert", "--help").stdout
    assert [
        name for name in WRITERS if name not in shown.split("--dtype")[0].replace("│", " ").replace(",", " ").split()
    ] == []
