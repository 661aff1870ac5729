"""Where the processes of ``bench`` import from: the working directory may hold a ``torch.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import ckpt8
from ckpt8.cli.bench import probe
from ckpt8.cli.bench.library import survey
from ckpt8.cli.bench.probe import START

WITHOUT = "import sys; sys.path.remove(''); "
"""Leaves the working directory out of the path, as a console script does."""
BENCH = """
import json, sys
from pathlib import Path
from ckpt8.cli.bench.probe import run_child
run_child(Path.cwd())(sys.argv[1], json.loads(sys.argv[2]), False)
"""


@pytest.fixture
def run(tmp_path):
    """Do a job of a module in a process of ``bench``, from ``tmp_path``."""

    def run(program, module, job):
        done = subprocess.run(
            [sys.executable, "-c", program, module, json.dumps(job)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(ckpt8.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    return run


@pytest.mark.slow
def test_nothing_in_the_working_directory_is_imported(run, inputs, tmp_path):
    for name in ("ckpt8", "torch", "numba", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    job = {"source": asdict(survey(inputs / "legacy.pt")), "container": "", "target": str(tmp_path / "out")}
    run(WITHOUT + BENCH, probe.__name__, {**job, "name": START, "threads": 1, "keep": False})
    assert not (tmp_path / "ran").exists()


def test_what_the_command_itself_can_import_its_processes_can(run, tmp_path):
    (tmp_path / "only_here.py").write_text("def work(job):\n    open('ran', 'w').close()\n    return {}\n")
    run(BENCH, "only_here", {})
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["cp", "zstd -1"])
def test_the_memory_of_others_does_not_count_torch(run, inputs, tmp_path, name):
    program = (
        "import json, sys; from ckpt8.cli.bench.probe import work; work(json.loads(sys.argv[2]));"
        "assert not {'torch', 'numba', 'numpy'} & sys.modules.keys()"
    )
    job = {"source": asdict(survey(inputs / "legacy.pt")), "container": "", "target": str(tmp_path / "out")}
    run(program, probe.__name__, {**job, "name": name, "threads": 1, "keep": False})
