"""Runs of ckpt8.optim: kept packed in a .pt, unpacked for everyone else, as ``load(unpack=True)`` does it in memory."""

from __future__ import annotations

import pytest
import torch
from converting_kit import assert_trees_equal, checkpoint, trained, trainer_directory
from safetensors.torch import load_file

import ckpt8
from ckpt8.core.errors import InputError, UsageError

OPTIMIZERS = ["AdamW", "StableAdamW", "CAME", "SGD", "Lion", "Adafactor"]
SETTINGS = {"SGD": {"lr": 0.1, "momentum": 0.9}}


@pytest.fixture(params=OPTIMIZERS)
def packed(request, tmp_path):
    run = trained(getattr(ckpt8.optim, request.param), dtype=torch.bfloat16, **SETTINGS.get(request.param, {}))
    torch.save(checkpoint(*run), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    return run


@pytest.mark.by_default("CAME", "SGD", "Lion")
def test_a_pt_keeps_it_packed(packed, tmp_path):
    report = ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "x.pt")
    assert_trees_equal(torch.load(tmp_path / "x.pt", weights_only=True), ckpt8.load(tmp_path / "run.ckpt8"))
    assert not report.dropped


@pytest.mark.by_default("AdamW-run.pt", "CAME-run.pt", "SGD-run.ckpt8", "Lion-run.pt")
@pytest.mark.parametrize("source", ["run.pt", "run.ckpt8"])
def test_float32_unpacks_it(source, packed, tmp_path):
    ckpt8.convert(tmp_path / source, tmp_path / "x.pt", dtype="float32")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    expected = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)
    # What was never completed by a residual is cast; buffers stay.
    expected["model"] = {
        name: tensor.float() if tensor.is_floating_point() and "running" not in name else tensor
        for name, tensor in expected["model"].items()
    }
    found["model"] = dict(found["model"])
    assert_trees_equal(found, expected)


@pytest.mark.by_default("CAME", "SGD", "Lion")
def test_a_trainer_directory_has_it_unpacked(packed, tmp_path):
    ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "out", to="trainer")
    expected = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert_trees_equal(found, expected["optimizer"])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert set(expected["model"]) - set(weights) == {"lm_head.weight"}
    assert all(torch.equal(tensor, expected["model"][name]) for name, tensor in weights.items())


def test_weights_of_a_directory_are_told_by_their_checks(tmp_path):
    """Sorted by name, with three vectors of one shape: order says nothing, the sums over their bits do."""
    run = trained(ckpt8.optim.AdamW, dtype=torch.bfloat16)
    folder = trainer_directory(tmp_path / "checkpoint-3", *run)
    torch.save(checkpoint(*run), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    expected = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)["model"]
    ckpt8.convert(folder, tmp_path / "x.safetensors", dtype="float32")
    found = load_file(tmp_path / "x.safetensors")
    for name, param in run[0].named_parameters():
        assert torch.equal(found[name], expected[name])
        assert torch.equal(found[name].bfloat16(), param.detach())


def test_weights_that_changed_since_are_refused(tmp_path):
    model, optimizer = trained(ckpt8.optim.AdamW, dtype=torch.bfloat16)
    tree = checkpoint(model, optimizer)
    tree["model"]["up.weight"][3, 5] += 1
    torch.save(tree, tmp_path / "run.pt")
    for target in ("x.pt", "x.safetensors"):
        with pytest.raises(UsageError, match="completes no weight"):
            ckpt8.convert(tmp_path / "run.pt", tmp_path / target, dtype="float32")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors")


def test_a_malformed_packed_state_is_refused(tmp_path):
    model, optimizer = trained(ckpt8.optim.AdamW)
    for change in (
        lambda state, group: state.update(exp_avg_scales=torch.zeros(1, dtype=torch.uint16)),
        lambda state, group: state.pop("exp_avg_scales"),
        lambda state, group: state.update(step="x"),
        lambda state, group: state.update(exp_avg_codes=3),
        lambda state, group: group.update(moment1=5),
        lambda state, group: group.update(params=7),
        lambda state, group: group.update(betas=3, rule="stable_adamw"),
    ):
        tree = checkpoint(model, optimizer)
        tree["optimizer"] = {
            "state": {key: dict(value) for key, value in tree["optimizer"]["state"].items()},
            "param_groups": [dict(group) for group in tree["optimizer"]["param_groups"]],
        }
        change(tree["optimizer"]["state"][0], tree["optimizer"]["param_groups"][0])
        torch.save(tree, tmp_path / "run.pt")
        with pytest.raises((InputError, UsageError)) as caught:
            ckpt8.convert(tmp_path / "run.pt", tmp_path / "out", to="trainer")
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
