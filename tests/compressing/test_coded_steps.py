"""Errors in steps of Adam whose moments are codes, worked out in float64 from what its programs decode."""

from __future__ import annotations

import math

import pytest
import torch
from budget_kit import OPTIONS, SMALL_TILE, as_chain, check_against, each_engine, random_run
from step_kit import energies, moments, quiet

import ckpt8
from ckpt8.compressing.spending import _windows
from ckpt8.container.steps import UNMOVED

SHAPES = {"up.weight": (128, 64), "down.weight": (96, 80), "small.weight": (5, 40)}
BETAS, RATE = (0.9, 0.95), 3e-3


def optimizer_of(program, weights):
    if program == "bitsandbytes":
        bnb = pytest.importorskip("bitsandbytes.optim")
        bnb.GlobalOptimManager.get_instance().initialize()
        return bnb.AdamW8bit(weights, lr=RATE, betas=BETAS)
    torchao = pytest.importorskip("torchao.optim")
    return getattr(torchao, program)(weights, lr=RATE, betas=BETAS)


def trained(program, dtype=torch.float32, steps=8, more=()):
    """A checkpoint of random gradients of another size in each tensor; a row and some blocks have none.

    ``more`` are names and shapes of further weights.
    """
    shapes, still = (*SHAPES.items(), *more), {"up.weight": slice(5, 16)}
    with quiet():
        weights, [optimizer] = random_run(
            shapes, lambda params: [optimizer_of(program, params)], still, dtype=dtype, steps=steps
        )
        return {"model": {name: x.detach() for name, x in weights.items()}, "optimizer": optimizer.state_dict()}


def in_float64(was, there, *, only_codes=False):
    """The error of weights in steps, of all parameters or of those whose moments are codes."""
    total = [0.0, 0.0, 0.0, 0.0]
    (group,) = was["optimizer"]["param_groups"]
    for state, *pair in zip(
        was["optimizer"]["state"].values(), was["model"].values(), there["model"].values(), strict=True
    ):
        if pair[0].numel() >= 4096 or not only_codes:
            total = [x + y for x, y in zip(total, energies("adam", group, state, state, pair), strict=True)]
    return math.sqrt(total[1] / total[0])


PROGRAMS = ("bitsandbytes", "AdamW8bit", "AdamW4bit", "AdamWFp8")


@pytest.mark.by_default("bitsandbytes-dtype0-archive", "AdamW4bit-dtype0-5")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", PROGRAMS)
def test_figures_are_what_the_decoded_tensors_say(program, dtype, option, tmp_path):
    tree = trained(program, dtype)
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", **OPTIONS[option])
    facts = ckpt8.inspect(tmp_path / "run.ckpt8")["steps"]
    if facts is None:  # flash keeps bf16 as it is
        assert (dtype, option) == (torch.bfloat16, "flash")
        return
    plain, row = facts["optimizers"]
    assert (plain["measure"], plain["parameters"]) == ("second moments", 1)
    assert (row["measure"], row["parameters"]) == ("second moments, its step is known", 2)
    back = ckpt8.load(tmp_path / "run.ckpt8")
    assert (plain["steps"], row["steps"]) == (0, row["weight"])
    assert row["steps"] == pytest.approx(in_float64(tree, back, only_codes=True), rel=1e-5)
    assert facts["steps"] == facts["weight"] == manifest.error_in_steps
    assert facts["steps"] == pytest.approx(in_float64(tree, back), rel=1e-5)
    assert facts["drift"] is manifest.expected_drift is None
    if facts["budget"] is not None:
        codecs = {each.name.removeprefix("model."): each.codec["id"] for each in manifest.storages}
        assert {codecs[name] for name in list(SHAPES)[:2]} == {"lattice/1"}
        assert 0.4 * facts["budget"] < row["steps"] or facts["capped"]["elements"]
        assert row["steps"] <= facts["budget"]
    for index, state in tree["optimizer"]["state"].items():
        for one, other in zip(moments(state), moments(back["optimizer"]["state"][index]), strict=True):
            assert torch.equal(one, other)
    check_against(tmp_path, tree, manifest, OPTIONS[option])


@pytest.mark.parametrize("budget", [0.3, 1])
def test_moments_in_fp32_beside_codes_spend_no_more_than_the_budget(budget, tmp_path):
    """No block of torchao's divides these weights, so that it keeps their moments in fp32."""
    torch.save(trained("AdamW8bit", more=[("odd.weight", (65, 100))]), tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", budget=budget)
    plain, coded = ckpt8.inspect(tmp_path / "run.ckpt8")["steps"]["optimizers"]
    assert [each.codec["id"] for each in manifest.storages if "exp_avg" in each.name and each.numel == 6500] == [
        "vscaled/1",
        "rclog/1",
    ]
    for row in (plain, coded):
        assert 0.4 * budget < row["steps"] <= budget


def test_the_last_block_of_bitsandbytes_may_be_short(tmp_path):
    tree = trained("bitsandbytes", more=[("odd.weight", (65, 101))])
    assert tree["optimizer"]["state"][3]["__bnb_optimizer_quant_state__"]["absmax1"].numel() == 26
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", budget=1)
    assert {each.name: each.codec["id"] for each in manifest.storages}["model.odd.weight"] == "lattice/1"
    assert manifest.error_in_steps == pytest.approx(in_float64(tree, ckpt8.load(tmp_path / "run.ckpt8")), rel=1e-5)


def test_a_tensor_that_is_only_sampled_is_measured_in_full(tmp_path):
    """A sample tells what the budget allows; a scale that it does not see and that is NaN leaves the weights exact."""
    tree = trained("AdamW4bit", more=[("large.weight", (640, 512))])
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", budget=1)
    assert manifest.error_in_steps == pytest.approx(in_float64(tree, ckpt8.load(tmp_path / "run.ckpt8")), rel=1e-5)
    assert 0.4 < manifest.error_in_steps <= 1
    scales = tree["optimizer"]["state"][3]["exp_avg_sq"].scale
    sampled = {at // 128 for window in _windows(640 * 512) for at in window}
    scales[min(set(range(len(scales))) - sampled)] = math.nan
    torch.save(tree, tmp_path / "bad.pt")
    manifest = ckpt8.compress(tmp_path / "bad.pt", budget=1)
    (record,) = (each for each in manifest.storages if each.name == "model.large.weight")
    assert (record.codec["id"], record.reason) == ("lossless/1", "its error in steps is unknown")
    assert 0 < manifest.error_in_steps <= 1


def test_engines_threads_and_tiles_choose_one_lattice(tmp_path, monkeypatch):
    tree, codecs, content = trained("bitsandbytes"), set(), set()
    torch.save(tree, tmp_path / "run.pt")
    for threads, tile in each_engine(monkeypatch):
        manifest = ckpt8.compress(tmp_path / "run.pt", budget=0.3, threads=threads, force=True)
        assert manifest.error_in_steps == pytest.approx(in_float64(tree, ckpt8.load(tmp_path / "run.ckpt8")), rel=1e-5)
        codecs.add(str([each.codec for each in manifest.storages]))
        if tile != SMALL_TILE:  # sums of other tiles have other last digits
            content.add((tmp_path / "run.ckpt8").read_bytes())
    assert len(codecs) == len(content) == 1


def spoil(tree, how):
    """Make the state of the first weight one that cannot be counted."""
    state = tree["optimizer"]["state"][0]
    nested = state["__bnb_optimizer_quant_state__"]
    match how:
        case "a NaN scale":
            nested["absmax2"][3] = math.nan
        case "second moments below zero":
            nested["qmap2"] = -nested["qmap2"]
        case "another block":
            nested["absmax2"] = nested["absmax2"][:-1].clone()
        case "a table of 16":
            nested["qmap1"] = nested["qmap1"][:16].clone()
        case "codes of int8":
            nested["state2"] = nested["state2"].view(torch.int8)
        case "codes in another order":
            nested["state1"] = nested["state1"].T.contiguous().T
        case "a trust ratio":
            nested["unorm_vec"] = torch.ones(1)
        case "no step":
            del state["step"]
        case "three betas":
            tree["optimizer"]["param_groups"][0]["betas"] = (0.9, 0.95, 0.999)
        case _:
            nested["absmax1"], nested["qmap2"] = None, "none"


ODD = (
    *("a NaN scale", "second moments below zero", "another block", "a table of 16", "codes of int8"),
    *("codes in another order", "a trust ratio", "no step", "three betas", "no tensors"),
)


@pytest.mark.parametrize("how", ODD)
def test_codes_that_do_not_tell_a_step_leave_the_budget_to_the_others(how, tmp_path):
    tree = trained("bitsandbytes")
    spoil(tree, how)
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
    records = {each.name.removeprefix("model."): each for each in manifest.storages}
    is_counted = how in ("a NaN scale", "second moments below zero")
    assert records["up.weight"].codec["id"] == ("lossless/1" if is_counted else "split24/1")
    assert records["down.weight"].codec["id"] == ("split24/1" if how == "three betas" else "lattice/1")
    if not is_counted:
        assert UNMOVED in records["up.weight"].reason


def test_a_chain_of_folders(tmp_path):
    tree, delta, back = as_chain(lambda step: trained("AdamW8bit", steps=step), tmp_path)
    lattices = [each for each in delta.storages if each.codec["id"] == "lattice/1"]
    assert len(lattices) == 2
    assert all(each.base is not None for each in lattices)
    assert delta.error_in_steps == pytest.approx(in_float64(tree, back), rel=1e-5)
