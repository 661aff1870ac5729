"""Processes that train under rules and a room, killed in the middle of saving and thinning: both hold."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chain_command_kit import age
from killed_frameworks import KEEP, LAST, ROOM

import ckpt8
from ckpt8.chaining.thin import upkeep

HERE = Path(__file__).parent


def run(framework, place, number):
    """The exit code of a process that dies before its change of this number, and the number of all it made."""
    script = HERE.parent / "kits" / "killed_frameworks.py"
    paths = os.pathsep.join([str(script.parent), str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), framework, str(place), str(number)],
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, int(done.stdout.rpartition("changes: ")[2] or 0) if not done.returncode else 0


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["trainer", "lightning"])
def test_rules_and_room_hold_after_kills(framework, tmp_path):
    pytest.importorskip({"trainer": "transformers"}.get(framework, framework))
    (tmp_path / "whole").mkdir()
    code, changes = run(framework, tmp_path / "whole", 0)
    assert code == 0
    draw, kills = random.Random(1), 0
    for _ in range(4):
        code, _ = run(framework, tmp_path, draw.randint(changes // 8, changes // 2))
        kills += code == -signal.SIGKILL
        for path in (tmp_path / "run").iterdir():
            age(path)  # nobody starts again at once; what is young stays as it is
        for record in ckpt8.runs(tmp_path / "run"):
            if record.kind in ("key", "delta"):
                assert ckpt8.verify(tmp_path / "run" / record.name).failures == ()
    assert kills >= 3
    assert run(framework, tmp_path, 0)[0] == 0
    folder = tmp_path / "run"
    for path in folder.iterdir():
        age(path)
    upkeep(KEEP, ROOM[framework])(folder)  # as the next save does
    assert [record.step for record in ckpt8.runs(folder)] == [3, 6, LAST - 1, LAST]
    sizes = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= ROOM[framework]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    for record in ckpt8.runs(folder):
        assert ckpt8.verify(folder / record.name).failures == ()
