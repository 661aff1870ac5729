"""Errors in steps of Adafactor, worked out in float64 from what load gives back."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from budget_kit import OPTIONS, SMALL_TILE, as_chain, check_against, each_engine, random_run
from resume_kit import same
from step_kit import energies, second_moment
from torch import nn
from torch.optim import Adafactor

import ckpt8
from ckpt8.compressing import spending
from ckpt8.container.steps import UNPREDICTED

LARGE = (("up.weight", (144, 60)), ("down.weight", (64, 128)), ("experts", (3, 50, 40)))
SETTINGS = {
    "default": {},
    "decayed": {"lr": 3e-3, "weight_decay": 0.1, "beta2_decay": -0.5},
    "hardly clipped": {"d": 3.0, "eps": (1e-9, 0.1)},
    "eps larger than gradients": {"eps": (0.02, 1e-3)},
    "transformers": {"lr": 1e-3, "scale_parameter": False, "relative_step": False},
    "transformers, scaled": {"lr": 1e-2, "clip_threshold": 0.5, "relative_step": False},
    "transformers, relative": {},
    "transformers, warm": {"warmup_init": True},
}


def optimizer_of(settings, params):
    kind = pytest.importorskip("transformers.optimization").Adafactor if "transformers" in settings else Adafactor
    return kind(params, **SETTINGS[settings])


def trained(settings="default", small=0, dtype=torch.float32, steps=12):
    """A checkpoint of random gradients of another size in each tensor; a row and an expert never have any."""
    shapes = (*LARGE, ("bias", (64,)), *((f"small.{k}.weight", (5, 3 + k)) for k in range(small)))
    still = {"up.weight": 5, "experts": 1}
    weights, [optimizer] = random_run(
        shapes, lambda params: [optimizer_of(settings, params)], still, dtype=dtype, steps=steps
    )
    return {"model": {key: weight.detach() for key, weight in weights.items()}, "optimizer": optimizer.state_dict()}


def in_float64(was, there):
    """The error in steps of the matrices."""
    total = [0.0, 0.0, 0.0, 0.0]
    (group,) = was["optimizer"]["param_groups"]
    for state, *pair in zip(
        was["optimizer"]["state"].values(), was["model"].values(), there["model"].values(), strict=True
    ):
        if bool(pair[0].isfinite().all()):
            total = [x + y for x, y in zip(total, energies("adafactor", group, state, state, pair), strict=True)]
    return math.sqrt(total[1] / total[0])


@pytest.mark.by_default(most=5)
@pytest.mark.parametrize("small", [0, 40], ids=["own entries", "packs"])
@pytest.mark.parametrize(
    ("settings", "dtype", "option"),
    [
        *((settings, torch.float32, option) for settings in SETTINGS for option in OPTIONS if "warm" not in settings),
        *(("default", torch.bfloat16, option) for option in OPTIONS),
    ],
    ids=str,
)
def test_figures_are_what_the_decoded_tensors_say(settings, dtype, option, small, tmp_path):
    tree = trained(settings, small, dtype)
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", **OPTIONS[option])
    assert bool(manifest.packs) == bool(small)
    facts = ckpt8.inspect(tmp_path / "run.ckpt8")["steps"]
    if facts is None:  # flash keeps bf16 as it is
        assert (dtype, option) == (torch.bfloat16, "flash")
        return
    back = ckpt8.load(tmp_path / "run.ckpt8")
    (row,) = facts["optimizers"]
    assert row["measure"] == "second moments, its step is estimated"
    assert row["parameters"] == len(LARGE) + small
    assert row["steps"] == facts["steps"] == row["weight"] == manifest.error_in_steps
    assert row["steps"] == pytest.approx(in_float64(tree, back), rel=1e-5)
    assert facts["drift"] is manifest.expected_drift is None
    assert UNPREDICTED in repr(manifest)
    assert facts["outside"] == facts["fallbacks"] == []
    if facts["budget"] is not None:
        codecs = {each.name: each.codec["id"] for each in manifest.storages if each.name.startswith("model.")}
        assert {codecs[f"model.{name}"] for name, _ in LARGE} == {"lattice/1"}
        assert 0.4 * facts["budget"] < row["steps"] <= facts["budget"] or facts["capped"]["elements"]
        assert row["steps"] <= facts["budget"]
    for index, state in tree["optimizer"]["state"].items():
        assert same(state, back["optimizer"]["state"][index])
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt", resume_steps=1).failures
    check_against(tmp_path, tree, manifest, OPTIONS[option])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", ["default", "decayed", *(name for name in SETTINGS if "transformers" in name)])
def test_the_step_is_how_far_the_next_one_moves_the_weights(settings, dtype, tmp_path):
    if "warm" in settings:
        dtype = torch.float32  # its steps are smaller than those of bf16
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(60, 144), nn.Tanh(), nn.Linear(144, 64)).to(dtype)
    matrices, inputs = [model[0].weight, model[2].weight], torch.randn(256, 60)
    targets = inputs @ torch.randn(60, 64)
    optimizer = optimizer_of(settings, model.parameters())
    stated = moved = 0.0
    for number in range(48):
        averages = [second_moment(copy.deepcopy(optimizer.state[p])) for p in matrices] if number else []
        before = [p.detach().clone() for p in matrices]
        if number >= 40:
            tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", budget=5)
            stated += sum(each.steps["step"] for each in manifest.parameters if each.steps)
        rows = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(number))
        (model(inputs[rows].to(dtype)) - targets[rows]).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        if number >= 40:
            moved += sum(
                float((v * (w.detach() - was).double().square()).sum())
                for v, w, was in zip(averages, matrices, before, strict=True)
            )
    assert 0.8 < math.sqrt(moved / stated) < 1.25


def test_engines_threads_and_tiles_choose_one_lattice(tmp_path, monkeypatch):
    """Also where a sample takes the weights for larger than they are, so that a file is encoded anew."""
    tree, generator = trained(), torch.Generator().manual_seed(4)
    state, weight = tree["optimizer"]["state"][0], torch.randn(6000 * 60, generator=generator) / 3
    for window in spending._windows(weight.numel()):
        weight[window.start : window.stop] *= 3
    state["row_var"], state["col_var"] = (torch.rand(shape, generator=generator) for shape in ((6000, 1), (1, 60)))
    tree["model"]["up.weight"] = weight.view(6000, 60)
    torch.save(tree, tmp_path / "run.pt")
    codecs, content, corrected = set(), set(), []
    correct = spending._correct
    monkeypatch.setattr(spending, "_correct", lambda *given: corrected.append(correct(*given)))
    for threads, tile in each_engine(monkeypatch):
        manifest = ckpt8.compress(tmp_path / "run.pt", budget=0.3, threads=threads, force=True)
        assert manifest.error_in_steps == pytest.approx(in_float64(tree, ckpt8.load(tmp_path / "run.ckpt8")), rel=1e-5)
        assert 0.15 < manifest.error_in_steps <= 0.3
        codecs.add(str([each.codec for each in manifest.storages]))
        if tile != SMALL_TILE:  # sums of other tiles have other last digits
            content.add((tmp_path / "run.ckpt8").read_bytes())
    assert len(codecs) == len(content) == 1
    assert len(corrected) == 3


@pytest.mark.parametrize("spoilt", ["NaN", "negative", "zero", "a NaN in the weight", "all zero", "no rate"])
def test_a_tensor_that_cannot_be_counted_leaves_the_budget_to_the_others(spoilt, tmp_path):
    tree = trained()
    states = [state for state in tree["optimizer"]["state"].values() if "row_var" in state]
    match spoilt:
        case "NaN" | "negative":
            states[0]["row_var"][7] = math.nan if spoilt == "NaN" else -1.0
        case "zero":
            states[0]["row_var"].zero_()
        case "a NaN in the weight":
            tree["model"]["up.weight"][7, 9] = math.nan
        case "all zero":
            for state in states:
                state["row_var"].zero_()
        case _:
            del tree["optimizer"]["param_groups"][0]["lr"]
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
    records = {each.name.removeprefix("model."): each for each in manifest.storages}
    if spoilt in ("all zero", "no rate"):
        assert manifest.error_in_steps is None
        reason = "has not moved anything yet" if spoilt == "all zero" else "its learning rate is missing"
        assert reason in records["up.weight"].reason
        return
    assert records["down.weight"].codec["id"] == "lattice/1"
    exact = spoilt != "zero"
    assert records["up.weight"].codec["id"] == ("lossless/1" if exact else "split24/1")
    back = ckpt8.load(tmp_path / "run.ckpt8")
    if spoilt in ("zero", "a NaN in the weight"):
        assert manifest.error_in_steps == pytest.approx(in_float64(tree, back), rel=1e-5)
    assert 0.4 < manifest.error_in_steps <= 1


def test_a_chain_of_folders(tmp_path):
    tree, delta, back = as_chain(lambda step: trained(steps=step), tmp_path)
    lattices = [each for each in delta.storages if each.codec["id"] == "lattice/1"]
    assert len(lattices) == len(LARGE)
    assert all(each.base is not None for each in lattices)
    assert 0.4 < delta.error_in_steps <= 1
    assert delta.error_in_steps == pytest.approx(in_float64(tree, back), rel=1e-5)
    assert not ckpt8.verify(tmp_path / "26.ckpt8", tmp_path / "26").failures


def test_two_weights_for_one_state_say_why_they_have_no_budget(tmp_path):
    tree = trained()
    tree["model"] = {"tied": tree["model"]["up.weight"].clone(), **tree["model"]}
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    reasons = {each.name.removeprefix("model."): each.reason for each in manifest.storages}
    assert reasons["tied"] == reasons["up.weight"]
    assert reasons["tied"].startswith("no budget: the state of its shape: cannot be told apart")
    assert reasons["down.weight"] is None


def test_without_its_weights_no_step_is_counted(tmp_path):
    torch.save(trained()["optimizer"], tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    assert not manifest.parameters
    assert {each.codec["id"] for each in manifest.storages} == {"lossless/1"}


def test_matrices_without_elements_and_a_weight_of_another_order_leave_the_budget_to_the_others(tmp_path):
    tree = trained()
    tree["model"]["empty"] = torch.zeros(0, 5)
    state = {"step": torch.tensor(12.0), "row_var": torch.zeros(0, 1), "col_var": torch.zeros(1, 5)}
    tree["optimizer"]["state"][4] = state
    tree["optimizer"]["param_groups"][0]["params"].append(4)
    tree["model"]["down.weight"] = tree["model"]["down.weight"].T.contiguous().T
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    records = {each.name.removeprefix("model."): each for each in manifest.storages}
    assert records["up.weight"].codec["id"] == records["experts"].codec["id"] == "lattice/1"
    assert records["down.weight"].codec["id"] == "split24/1"
    assert "do not lie as" in records["down.weight"].reason
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
