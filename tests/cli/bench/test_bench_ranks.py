"""``bench --ranks``: real processes on a tiny state, and one of them that fails. No test looks at times."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ckpt8.cli.bench import child
from ckpt8.cli.bench.child import PeakMemory, run_child
from ckpt8.cli.bench.ranks import GANG, bench_ranks
from ckpt8.cli.show.bench import show_ranks
from ckpt8.core.errors import OutputError

MIB = 1 << 20


@pytest.mark.slow
def test_two_ranks_save_and_load_with_both(scratch, monkeypatch):
    monkeypatch.setattr("ckpt8.cli.bench.training.MAX_STEPS", 4)

    def run(module, job, watch):
        """Ranks in processes, the training here."""
        if module == GANG:
            return run_child(scratch)(module, job, watch)
        return json.loads(json.dumps(importlib.import_module(module).work(job)))

    result = bench_ranks(2, size=1_000_000, threads=None, repeat=2, scratch=scratch, run=run)
    json.dumps(result, allow_nan=False)
    # Weights and moments in fp32, the output layer once more, a step for each tensor in each rank.
    parameters, layers = result["trained"]["parameters"], result["trained"]["n_layer"]
    tied = result["trained"]["n_embd"] * result["trained"]["vocab_size"]
    assert result["bytes"] == 12 * parameters + 4 * tied + 2 * 4 * (12 * layers + 4)
    assert result["bytes"] / 2 <= result["bytes_per_rank"] < 0.51 * result["bytes"]
    assert (result["ranks"], result["repeat"]) == (2, 2)
    assert result["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert [row["operation"] for row in result["results"]] == ["save", "load", "async_save"]
    for row in result["results"]:
        for side in (row["ckpt8"], row["dcp"]):
            assert len(side["times"]) == 2
            assert side["seconds"] == pytest.approx(sum(side["times"]) / 2)
            assert 0 <= side["peak_memory"] < 500 * MIB
        assert row["ratio"] == row["ckpt8"]["seconds"] / row["dcp"]["seconds"]
        assert row["dcp"]["stored_bytes"] > result["bytes"] - 2 * 4 * (12 * layers + 4)
        assert 0 < row["ckpt8"]["stored_bytes"] < row["dcp"]["stored_bytes"]
    text = io.StringIO()
    show_ranks(Console(file=text, width=200, highlight=False), result)
    said = text.getvalue()
    assert "2 ranks, 1." in said
    assert all(f"\n{name}  " in said for name in ("save", "load", "async_save"))


STUB = """
import pathlib, time
from ckpt8.core.errors import OutputError
def work(job):
    pathlib.Path(job["pids"], f"{__import__('os').getpid()}").touch()
    if job["rank"] == 1:
        raise OutputError("no room for rank 1")
    time.sleep(600)
"""


def test_a_rank_that_fails_ends_the_others(tmp_path, scratch, monkeypatch):
    (tmp_path / "stub_rank.py").write_text(STUB)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(child, "_RANK", "stub_rank")
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(OutputError, match=r"^no room for rank 1$"):
        child.work({"folder": str(scratch), "ranks": 3, "pids": str(pids)})
    for path in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_memory_is_counted_from_what_there_is():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak is not reset here")
    first = bytearray(os.urandom(1)) * (64 * MIB)
    del first
    memory = PeakMemory()
    assert memory.taken() < 32 * MIB
    second = bytearray(os.urandom(1)) * (64 * MIB)
    del second
    assert 48 * MIB < memory.taken() < 96 * MIB


@pytest.mark.parametrize("more", [("MISSING.pt",), ("--scaling",), ("--device", "cuda")])
def test_what_ranks_do_not_measure_is_refused(more, run_command):
    code, out, err = run_command("bench", "--ranks", "2", *more)
    assert (code, out) == (2, "")
    assert "leave out" in err
