"""Distributed checkpoints as a source: slices become the tensors that torch itself puts together of them."""

from __future__ import annotations

import functools

import make_dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converting_kit import assert_trees_equal, converted, refused, trained
from dcp_kit import adam_state, load_all, save_small
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckpt8
from ckpt8.core.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS = ["nested", "flat", "threads", "zstd", "titan"]
GROUPS = [["up.weight", "down.weight"], ["up.bias", "down.bias"], ["norm.weight", "norm.bias"]]
ALIKE = [GROUPS[0] + GROUPS[1], GROUPS[2]]
"""Groups of equal settings are one where every parameter has its own."""


# What processes wrote


@pytest.mark.by_default("nested-raw", "zstd-raw")
@pytest.mark.parametrize("form", ["raw", "lossless", "flash"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors_by_name(layout, form, distributed, tmp_path):
    source = original = distributed[0] / layout
    if form != "raw":
        source = tmp_path / "run.ckpt8"
        ckpt8.compress(original, source, preset=form)
        original = ckpt8.restore(source, tmp_path / "back")
    expected = load_all(original)
    found = converted(source, tmp_path)
    prefix = "" if layout == "titan" else "model."
    assert sorted(found["model"]) == sorted(make_dcp.Net().state_dict())
    for name, value in found["model"].items():
        assert torch.equal(value, expected[prefix + name])
    groups = found["optimizer"]["param_groups"]
    flat = layout in ("flat", "titan")
    assert [group["param_names"] for group in groups] == (ALIKE if flat else GROUPS)
    assert [group["weight_decay"] for group in groups] == [*([0.01] * (len(groups) - 1)), 0.0]
    assert all((group["lr"], group["betas"]) == (2e-3, (0.9, 0.99)) for group in groups)
    names = {k: name for group in groups for k, name in zip(group["params"], group["param_names"], strict=True)}
    assert sorted(found["optimizer"]["state"]) == sorted(names) == list(range(6))
    for number, state in found["optimizer"]["state"].items():
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        for key, value in state.items():
            assert torch.equal(value, expected[f"optimizer.state.{names[number]}.{key}"])
    if layout == "titan":
        assert found["train_state"] == {"step": torch.tensor(4)}
    else:
        assert found["iteration"] == make_dcp.BEFORE
        assert_trees_equal(found["history"], {"losses": [1.5, torch.ones(3)]})


def test_training_goes_on_in_one_process_without_distributed_checkpoints(distributed, tmp_path):
    for layout, same_groups in (("nested", True), ("flat", False)):
        found = converted(distributed[0] / layout, tmp_path)
        net, optimizer = make_dcp.make()
        net.load_state_dict(found["model"])
        if not same_groups:
            groups = optimizer.param_groups
            merged = [p for group in groups[:2] for p in group["params"]]
            optimizer = torch.optim.AdamW([{"params": merged}, {"params": groups[2]["params"]}])
        optimizer.load_state_dict(found["optimizer"])
        losses = [make_dcp.step(net, optimizer, make_dcp.BEFORE + k) for k in range(make_dcp.AFTER)]
        assert losses == pytest.approx(distributed[1], rel=1e-6)


OPTIMIZERS = {
    "adafactor": torch.optim.Adafactor,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "lr in a tensor": functools.partial(torch.optim.AdamW, lr=torch.tensor(2e-3)),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "no state": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_torch(kind, flat, tmp_path):
    model, optimizer = trained(OPTIMIZERS[kind])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    found = converted(save_small(saved, tmp_path / "run"), tmp_path)
    again = OPTIMIZERS[kind](model.parameters())
    again.load_state_dict(found["optimizer"])
    groups = again.state_dict()["param_groups"]
    names = [name for name, _ in model.named_parameters()]
    assert [group.pop("param_names") for group in groups] == [names]
    assert_trees_equal([dict(sorted(group.items())) for group in groups], sorted_groups(optimizer))
    assert_trees_equal(again.state_dict()["state"], optimizer.state_dict()["state"])


def sorted_groups(optimizer):
    return [dict(sorted(group.items())) for group in optimizer.state_dict()["param_groups"]]


def test_a_bare_state_dict(tmp_path):
    saved = {
        "a.weight": torch.randn(7, 3).T,
        "b": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "c": torch.ones(2).cfloat(),
    }
    found = converted(save_small(saved, tmp_path / "run"), tmp_path)
    assert_trees_equal(found, saved)
    ckpt8.convert(tmp_path / "run", tmp_path / "x.safetensors", dtype="float32")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a.weight"], saved["a.weight"])


def test_names_without_paths(tmp_path):
    """A planner that does not flatten keeps no paths."""
    weights = {"up.weight": torch.randn(4, 3)}
    state = adam_state(weights)
    flat = {f"model.{name}": value for name, value in weights.items()}
    flat |= {f"optimizer.state.up.weight.{key}": value for key, value in state["state"]["up.weight"].items()}
    flat |= {f"optimizer.param_groups.0.{key}": value for key, value in state["param_groups"][0].items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(flat, checkpoint_id=tmp_path / "run", planner=planner, no_dist=True)
    found = converted(tmp_path / "run", tmp_path)
    assert_trees_equal(found["model"], weights)
    assert found["optimizer"]["param_groups"][0]["param_names"] == ["up.weight"]
    assert_trees_equal(found["optimizer"]["state"], {0: state["state"]["up.weight"]})


def test_tied_weights_are_one_again(run, tmp_path):
    saved = {"model": run[0].state_dict(), "optimizer": run[1].state_dict()}
    found = converted(save_small(saved, tmp_path / "run"), tmp_path)
    assert found["model"]["lm_head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    assert ckpt8.convert(tmp_path / "run", tmp_path / "x.safetensors").aliases == ["lm_head.weight"]
    for k, value in ((0, 1.0), (-1, 1.0), (slice(None), 0.0)):
        untied = saved["model"] | {"lm_head.weight": saved["model"]["embed.weight"].clone()}
        untied["lm_head.weight"].view(-1)[k] = value
        untied["embed.weight"] = torch.zeros(64, 96) if value == 0 else untied["embed.weight"]
        found = converted(save_small({"model": untied}, tmp_path / "run", overwrite=True), tmp_path)
        assert_trees_equal(found["model"], dict(untied))
        assert found["model"]["lm_head.weight"].data_ptr() != found["model"]["embed.weight"].data_ptr()


# Values, folders, what cannot be converted


class Odd:
    """An object that holds a tensor."""

    def __init__(self):
        self.tensor = torch.ones(3)


def test_an_object_with_tensors_is_left_out_with_a_note(tmp_path):
    saved = {
        "model": {"w": torch.ones(4)},
        "odd": Odd(),
        "pair": (torch.arange(3), [torch.ones(2)]),
        "n": {"k": {1, 2}},
    }
    root = save_small(saved, tmp_path / "run")
    report = ckpt8.convert(root, tmp_path / "x.pt")
    assert [note for note in report.notes if "'odd'" in note and "left out" in note]
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_trees_equal(found, {key: saved[key] for key in ("model", "pair", "n")})


def test_a_model_and_an_optimizer_in_folders(tmp_path):
    """As Trainer and accelerate lay out FSDP."""
    weights = {"embed.weight": torch.randn(9, 7), "head.weight": torch.randn(7, 9)}
    state = adam_state(weights)
    root = tmp_path / "checkpoint-5"
    save_small({"model": weights}, root / "pytorch_model_fsdp_0")
    save_small({"optimizer": state}, root / "optimizer_0")
    (root / "trainer_state.json").write_text("{}")
    ckpt8.compress(root, tmp_path / "run.ckpt8", preset="lossless")
    for source in (root, tmp_path / "run.ckpt8"):
        found = converted(source, tmp_path)
        assert_trees_equal(found["model"], weights)
        assert_trees_equal(list(found["optimizer"]["state"].values()), list(state["state"].values()))
        report = ckpt8.convert(source, tmp_path / "trainer", to="trainer", force=True)
        assert not [note for note in report.notes if "trainer_state" in note]
        assert torch.equal(load_file(tmp_path / "trainer" / "model.safetensors")["head.weight"], weights["head.weight"])


def test_two_checkpoints_of_the_same_names(tmp_path):
    for number in (1, 2):
        save_small({"model": {"w.x": torch.full((3,), number)}}, tmp_path / "runs" / f"step-{number}")
    ckpt8.compress(tmp_path / "runs", tmp_path / "runs.ckpt8")
    for source in (tmp_path / "runs", tmp_path / "runs.ckpt8"):
        refused(source, tmp_path, r"several .*'model'.*--member: step-1, step-2$", UsageError)
        refused(source, tmp_path, r"is not one of step-1, step-2$", UsageError, member="step-3")
        for number in (1, 2):
            assert converted(source, tmp_path, member=f"step-{number}")["model"]["w.x"].tolist() == [number] * 3
