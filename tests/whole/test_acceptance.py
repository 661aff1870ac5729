"""Sizes and errors that ckpt8 promises, on a GPT of 1.6 M parameters trained here on real text.

Errors are measured in float64 from the original and what ``torch.load`` makes of the restored file, not taken from the
figures that ckpt8 reports.
"""

from __future__ import annotations

import math

import pytest
import torch
from gpt_kit import GPTConfig, train
from updates_kit import update_errors

import ckpt8
from ckpt8.core.tensors import is_small


@pytest.fixture(scope="module")
def trained(scratch):
    path = scratch / "gpt.pt"
    config = GPTConfig(n_layer=2, n_head=4, n_embd=256, block_size=128)
    checkpoint = train(config, torch.optim.AdamW, 60, batch_size=4, warmup=10)
    assert float(checkpoint["best_val_loss"]) < 0.75 * math.log(96)  # it has learned something
    torch.save(checkpoint, path)
    return path


def round_trip(path, folder, preset):
    """Size ratio, the original, and the restored file, both as torch reads them."""
    ckpt8.compress(path, folder / "x.ckpt8", preset=preset)
    ckpt8.restore(folder / "x.ckpt8", folder / "back.pt")
    ratio = path.stat().st_size / (folder / "x.ckpt8").stat().st_size
    return ratio, *(torch.load(each, weights_only=True) for each in (path, folder / "back.pt"))


def weight_error(original, restored):
    """The largest relative error of a weight; small tensors are equal."""
    worst = 0.0
    for name, before in original["model"].items():
        after = restored["model"][name]
        if is_small(tuple(before.shape)):
            assert torch.equal(before, after), name
            continue
        normal = before.abs() >= 2.0**-126
        relative = (after.double() - before.double()).abs() / before.double().abs()
        worst = max(worst, float(relative[normal].max()))
    return worst


def steps_apart(original, restored):
    """The error in optimizer steps, as ``compressing.policy`` defines it, from the tensors of both."""
    names = [name for name, weight in original["model"].items() if name != "lm_head.weight"]
    order = [name for dims in (2, 1) for name in names if (original["model"][name].dim() >= 2) == (dims == 2)]
    spent = step = 0.0
    for group in original["optimizer"]["param_groups"]:
        beta1, beta2 = group["betas"]
        both = beta1 * beta2
        carried = 0.576**2 * (1 + both) / ((1 - beta2**2) * (1 - both))
        for index in group["params"]:
            sides = [tree["optimizer"]["state"][index] for tree in (original, restored)]
            bias1, bias2 = (1 - beta ** float(sides[0]["step"]) for beta in (beta1, beta2))
            m, after = (side["exp_avg"].double() / bias1 for side in sides)
            v, decoded = (side["exp_avg_sq"].double() / bias2 for side in sides)
            weight, moved = (tree["model"][order[index]].double() for tree in (original, restored))
            relative = ((decoded / v).sqrt() - 1).nan_to_num()
            spent += float((v * (moved - weight).square()).sum())
            spent += (group["lr"] * beta1 / (1 - beta1)) ** 2 * float((after - m).square().sum())
            spent += carried * group["lr"] ** 2 * float((relative * m).square().sum())
            step += group["lr"] ** 2 * float(m.square().sum())
    return math.sqrt(spent / step)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "steps", "ratio", "largest"), [
    ("flash", None, 2.7, 1.0), ("compact", 0.15, 3.7, 1 / 16), ("archive", 1.0, 5.5, 0.5),
])  # fmt: skip
def test_a_trained_network(preset, steps, ratio, largest, trained, tmp_path):
    found, original, restored = round_trip(trained, tmp_path, preset)
    assert found >= ratio
    nmse, worst, _ = update_errors(original["optimizer"], restored["optimizer"])
    assert 0 < worst <= largest * (1 + 1e-6)
    if steps is None:
        assert weight_error(original, restored) <= 1.55e-5
        assert 0 < nmse <= 1e-4
    else:
        assert 0.5 * steps < steps_apart(original, restored) <= 1.1 * steps


@pytest.mark.slow
def test_all_bf16(inputs, tmp_path):
    ratio, original, restored = round_trip(inputs / "gpt_bf16.pt", tmp_path, "flash")
    assert ratio >= 1.7
    assert all(torch.equal(value, restored["model"][name]) for name, value in original["model"].items())
    nmse, worst, _ = update_errors(original["optimizer"], restored["optimizer"])
    assert 0 < nmse <= 1e-4
    assert 0 < worst <= 1
