"""``ckpt8 runs s3://BUCKET/run``: what a folder shows, from one list and both ends of each file."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from s3_kit import BUCKET

import ckpt8


@pytest.fixture(scope="module")
def folder(scratch):
    """Three checkpoints: one with its container and a difference to that, one raw, and a directory."""
    run, generator = scratch / "run", torch.Generator().manual_seed(0)
    run.mkdir()
    weight = torch.randn(64, 96, generator=generator)
    for step in (100, 200, 300):
        model = {"embed.weight": weight + step * 1e-4}
        state = {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": weight, "exp_avg_sq": weight**2}}}
        state["param_groups"] = [GROUP]
        torch.save({"model": model, "optimizer": state, "step": step}, run / f"step-{step}.pt")
    ckpt8.compress(run / "step-100.pt")
    ckpt8.compress(run / "step-200.pt", base=run / "step-100.ckpt8")
    (run / "step-200.pt").unlink()
    (run / "checkpoint-400").mkdir()
    shutil.copy(run / "step-300.pt", run / "checkpoint-400" / "optimizer.pt")
    (run / "checkpoint-400" / "trainer_state.json").write_text('{"global_step": 400}')
    return run


GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "params": [0]}


@pytest.fixture
def url(folder, bucket):
    key = os.urandom(4).hex()
    for path in folder.rglob("*"):
        if path.is_file() and "bases" not in path.parts:
            bucket.put(f"{key}/{path.relative_to(folder)}", path)
    return f"s3://{BUCKET}/{key}"


def test_runs(url, bucket, folder, run_command):
    with bucket.counted() as log:
        code, out, _ = run_command("runs", f"{url}/", "--json")
    near = run_command("runs", folder, "--json")
    assert code == near[0] == 0
    far, near = json.loads(out), json.loads(near[1])
    assert [row["name"] for row in far["checkpoints"]] == [
        "step-100.ckpt8",
        "step-200.ckpt8",
        "step-300.pt",
        "checkpoint-400",
    ]
    assert far["path"] == url
    for tree in (far, near):
        for row in tree["checkpoints"]:
            row.pop("time")
    assert far["checkpoints"] == near["checkpoints"]
    assert sum(entry["method"] == "GET" and not entry["range"] for entry in log) == 1
    assert {entry["method"] for entry in log} == {"GET"}
    assert len(log) <= 2 + 3 * 6


def test_what_runs_refuses(url, bucket, run_command):
    assert run_command.refused(3, "runs", f"{url}/step-300.pt").endswith("is a file; give the folder of a run\n")
    assert "holds no checkpoint" in run_command.refused(3, "runs", f"s3://{BUCKET}/nothing")
    code, _, err = run_command("runs", url, "--release")
    assert (code, err.count("\n")) == (2, 1), err
    assert {entry["method"] for entry in bucket.order()} <= {"GET"}
