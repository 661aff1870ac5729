"""inspect of a distributed checkpoint: parameters and tensors are counted whole, with their step."""

from __future__ import annotations

import pytest
import torch
from dcp_kit import load_all, run_processes, save_small
from survey_kit import as_pairs, expected

import ckpt8
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container
from ckpt8.inspecting.readiness import inspect_readiness

pytestmark = pytest.mark.usefixtures("without_predictions")

PARAMETERS = 6
"""Of the model of make_dcp: three layers with weight and bias."""


@pytest.fixture(scope="module")
def ranks(scratch):
    """The checkpoints of two ranks in every layout of make_dcp."""
    run_processes("train", scratch)
    return scratch


@pytest.mark.slow
def test_flags_of_two_ranks_are_those_of_whole_tensors(ranks):
    for layout in ("nested", "flat", "zstd"):
        tensors = {name: x for name, x in load_all(ranks / layout).items() if isinstance(x, torch.Tensor)}
        pairs = as_pairs(inspect_checkpoint(ranks / layout, full=True)["flags"])
        found = {(kind, name.rpartition(":")[2]): flag for (kind, name), flag in pairs.items()}
        # Groups of 32 begin anew in every shard: which are lost depends on where it was cut.
        found, wanted = (
            {key: flag for key, flag in flags.items() if key[0] != "fp16_scales"}
            for flags in (found, expected(tensors))
        )
        assert found == wanted
        assert any(key[0] == "moment2_fp16_zero" for key in found)


@pytest.mark.slow
def test_two_ranks_count_as_one(ranks, tmp_path, run_command):
    for layout in ("nested", "flat", "titan", "threads", "zstd"):
        facts = inspect_checkpoint(ranks / layout, tensors=True)
        assert facts["step"] == 4
        assert [(row["parameters"], row["step"]) for row in facts["optimizer"]] == [(PARAMETERS, 4)]
        # weights and three values of state for each parameter, a buffer, and a list's tensor or the step of training
        assert facts["tensor_count"] == 4 * PARAMETERS + 2
        weights = [each for each in facts["tensors"] if "up.weight" in each["name"] and each["role"] != "other"]
        assert {tuple(each["whole_shape"]) for each in weights} == {(257, 64)}
        assert {tuple(each["shape"]) for each in weights} == {(129, 64), (128, 64)}
    ckpt8.compress(ranks / "nested", tmp_path / "nested.ckpt8", threads=1)
    facts = inspect_container(tmp_path / "nested.ckpt8", tensors=True)
    assert facts["errors"]["update"]["parameters"] == 2
    assert {tuple(each["whole_shape"]) for each in facts["tensors"] if "down.weight[" in each["name"]} == {(64, 257)}
    readiness = inspect_readiness(ranks / "nested", full=True)
    assert "[" not in "".join(each["name"] for each in readiness.get("tensors", []))
    code, out, _ = run_command("inspect", ranks / "nested", "--tensors", "--html", tmp_path / "x.html")
    assert code == 0
    assert "optimizer state of 6 parameters, update rule adam at step 4" in out
    assert "129x64 of 257x64" in out
    assert "26 tensors in 44 storages" in (tmp_path / "x.html").read_text()


def test_the_step_of_the_optimizers_where_nothing_else_counts(tmp_path):
    weights = {name: torch.ones(70, 70) for name in "ab"}
    state = {name: {"step": torch.tensor(9.0), "exp_avg": w, "exp_avg_sq": w} for name, w in weights.items()}
    save_small({"model": weights, "optimizer": {"state": state}}, tmp_path / "same")
    assert inspect_checkpoint(tmp_path / "same")["step"] == 9
    state["b"]["step"] = torch.tensor(8.0)
    save_small({"model": weights, "optimizer": {"state": state}}, tmp_path / "other")
    assert inspect_checkpoint(tmp_path / "other")["step"] is None


def test_plain_values_count(tmp_path):
    for name, tree in {
        "top": {"global_step": 5, "epoch": 2, "w": torch.ones(70, 70)},
        "inside": {"trainer": {"iteration": torch.tensor(5), "epoch": 2.0}, "w": torch.ones(70, 70)},
        "both": {"step": 5, "epoch": 2, "data": {"global_step": 7, "epoch": 9}, "w": torch.ones(70, 70)},
        "no number": {"step": 5, "epoch": 2, "data": {"global_step": "x"}, "w": torch.ones(70, 70)},
    }.items():
        save_small(tree, tmp_path / name)
        facts = inspect_checkpoint(tmp_path / name)
        assert (facts["step"], facts["epoch"]) == (5, 2), name
