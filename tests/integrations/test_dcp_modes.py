"""Sharded runs in every mode: saved by the ranks of one gloo job, loaded by those of another, and trained on.

Each is compared with the run that goes on, and with what torch's own writer and reader make of the same state.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import pytest
import torch
from modes_kit import BEFORE, Case, Save, figures, plain_name, run_table
from modes_nets import Run
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt8
from ckpt8.container.steps import NO_BUDGET
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.integrations.dcp import Ckpt8SavePlanner

pytestmark = pytest.mark.filterwarnings("ignore")

EXACT, ARCHIVE = Save(), Save("archive")
FLAT, FLAT_ARCHIVE = Save(flat=True), Save("archive", flat=True)
BOTH = EXACT, ARCHIVE
STAGED = FLAT, FLAT_ARCHIVE
PRESETS = *BOTH, Save("flash"), Save("compact")
TORCH = Save(planner=DefaultSavePlanner), Save("archive", planner=DefaultSavePlanner)


def by(way, *saves):
    """The same saves, made in another way."""
    return tuple(replace(each, way=way) for each in saves)


# Each setup, net, way to call dcp and optimizer stands here once, and with another world or setup that loads it.
CASES = [
    Case("uneven", "fsdp2", 4, "AdamW", (*PRESETS, FLAT, *by("cached", EXACT)), (("fsdp2", 3), ("plain", 1))),
    Case("uneven", "hsdp", 4, "CAME", (*BOTH, *by("apart", EXACT)), (("fsdp2", 2),)),
    Case("even", "tp_fsdp2", 4, "StableAdamW", by("thread", *BOTH), (("tp_fsdp2", 4),)),
    Case("uneven", "fsdp2", 4, "CAME", (*PRESETS, *TORCH), (("hsdp", 4), ("fsdp2", 1))),
    Case("uneven", "hsdp", 4, "AdamW", (*BOTH, *TORCH), (("hsdp", 4),)),
    Case("even", "tp_fsdp2", 4, "CAME", (*BOTH, *TORCH), (("fsdp2", 3),)),
    Case("uneven", "ddp", 3, "CAME", (*PRESETS, *TORCH), (("ddp", 3), ("plain", 1))),
    Case("uneven", "fsdp1", 3, "AdamW", (*BOTH, FLAT), (("fsdp1", 2),)),
    Case("uneven", "fsdp1", 3, "CAME", BOTH, (("fsdp1", 3),)),
    Case("uneven", "fsdp1_orig", 3, "StableAdamW", BOTH, (("fsdp1_orig", 2),)),
    Case("uneven", "fsdp1_mesh", 4, "CAME", BOTH, (("fsdp1_mesh", 2),)),
    Case("uneven", "fsdp1_mesh", 4, "AdamW", BOTH, (("fsdp2", 3),)),
    Case("uneven", "fsdp1_full", 3, "AdamW", BOTH, (("fsdp1_full", 2),)),
    Case("even", "tp", 2, "AdamW", BOTH, (("tp_fsdp2", 4),)),
    Case("uneven", "fsdp2", 1, "AdamW", BOTH, (("ddp", 2),)),
    Case("uneven", "offload", 4, "AdamW", BOTH, (("fsdp2", 3),)),
    Case("deep", "pipeline", 4, "AdamW", STAGED, (("pipeline", 2), ("plain", 1))),
    Case("tied", "fsdp2", 4, "AdamW", BOTH, (("fsdp2", 3), ("plain", 1))),
    Case("frozen", "fsdp2", 4, "StableAdamW", BOTH, (("fsdp2", 3),)),
    Case("ema", "hsdp", 4, "CAME", BOTH, (("fsdp2", 3),)),
    Case("bf16", "fsdp2", 4, "AdamW", PRESETS, (("plain", 1),)),
    Case("uneven", "ddp", 2, "StableAdamW8", (EXACT,), (("ddp", 3),)),
    Case("uneven", "fsdp2_full", 4, "AdamW", (*BOTH, *by("alone", *BOTH)), (("fsdp2_full", 3),)),
    Case("uneven", "fsdp2", 2, "StableAdamW", by("staged", *BOTH), (("hsdp", 4),)),
    Case("uneven", "ddp", 3, "StableAdamW", by("apart", *BOTH), (("plain", 1),)),
    Case("deep", "pipeline", 4, "CAME", by("apart", *STAGED), (("pipeline", 2),)),
    Case("ema", "fsdp2", 3, "CAME", by("apart_thread", *BOTH), (("fsdp2", 2),)),
    Case("uneven", "fsdp2", 2, "CAME", by("process", *BOTH), (("hsdp", 4),)),
    Case("uneven8", "hsdp", 8, "CAME", BOTH, (("fsdp2", 8), ("hsdp", 4))),
]
assert len({str(case) for case in CASES}) == len(CASES)


@cache
def most_drift(net, optimizer):
    """The most loss drift to expect, by preset: of the same run in one process, as its report predicts it."""
    with torch.random.fork_rng():
        run = Run(net, "plain", optimizer)
        run.train(range(BEFORE))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, path)
        predicted = inspect_checkpoint(path)["predicted"]
    return {preset: predicted[preset]["drift"]["high"] for preset in ("flash", "compact", "archive")}


def drift(losses, others):
    return mean(abs(one - other) for one, other in zip(losses, others, strict=True))


def rounding(case):
    """What losses may differ by where other ranks add up in another order, or number parameters from another one on.

    The second matters to 8-bit moments, which are rounded with random bits.
    """
    return 5e-4 if case.net == "bf16" or case.optimizer.endswith("8") else 1e-5


def same(tensors, others):
    """Whether tensors of the same name are equal; some optimizers write more names."""
    return tensors.keys() & others.keys() and all(
        torch.equal(tensors[name], others[name]) for name in tensors.keys() & others.keys()
    )


def check(folder, case):
    """What every job wrote, beside the run that went on and beside what torch's own files gave."""
    uninterrupted, before = figures(folder, "uninterrupted")
    elsewhere = {}
    for setup, world in case.loads:
        losses, tensors = figures(folder, f"{setup}-{world}")
        for save in case.saves:
            plain = plain_name(flat=save.flat)
            where = f"{case} {save.name} into {setup}-{world}"
            assert tensors[save.name].keys() == tensors[plain].keys(), where
            expected = elsewhere.setdefault(save.name, tensors[save.name])
            assert same(tensors[save.name], expected), where
            if save.preset == "lossless":
                assert same(tensors[save.name], tensors[plain]), where
                assert same(tensors[save.name], before), where
                assert losses[save.name] == losses[plain], where
                if (setup, world) == (case.setup, case.world):
                    assert losses[save.name] == uninterrupted, where
                else:
                    assert losses[save.name] == pytest.approx(uninterrupted, abs=rounding(case)), where
            else:
                most = most_drift(case.net, case.optimizer)[save.preset]
                assert 0 < drift(losses[save.name], losses[plain]) <= most, where
                assert drift(losses[save.name], uninterrupted) <= most + rounding(case), where
    for save in case.saves:
        if save.preset == "archive" and save.planner is Ckpt8SavePlanner:
            assert beyond_budget(folder / save.name) == without_step(case), case


def without_step(case):
    """Parameters that nothing moves, or whose step is not known to any rank: FSDP1 makes vectors of CAME's matrices."""
    came = case.setup if case.optimizer == "CAME" else ""
    if case.net == "frozen" or came.startswith("fsdp1"):
        return {"up.weight", "down.weight"} if came.startswith("fsdp1") else {"up.weight"}
    return {"down.weight"} if came == "tp_fsdp2" else set()


def beyond_budget(folder):
    """Parameters with weights or moments that a save under a budget does not keep within it.

    CAME's are such where a slice has neither all rows nor all columns, and those that no optimizer moves.
    """
    found = set()
    for path in folder.glob("*.ckpt8"):
        with ckpt8.open(path) as file:
            records = file.manifest.storages
        names = [each.name for each in records if (each.reason or "").startswith(NO_BUDGET)]
        found |= {".".join(re.sub(r"@.*|\.exp_avg(_sq)?$", "", name).split(".")[-2:]) for name in names}
    return {name for name in found if not name.endswith("running")}  # a buffer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What all cases wrote, in one gang of ranks for each world that saves and each that loads."""
    folder = tmp_path_factory.mktemp("modes")
    run_table(folder, CASES)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_as_it_would_have(case, folder):
    check(folder / str(case), case)
