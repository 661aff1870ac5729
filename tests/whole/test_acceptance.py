"""What ckpt8 promises, on a GPT of 10.8 M parameters trained here on real text, measured in float64 from the files.

Nothing is taken from the figures that ckpt8 reports: the original and what ``torch.load`` makes of the restored file
are compared directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_kit import SIZES, train

import ckpt8
from ckpt8.core.tensors import is_small

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture(scope="module")
def trained(scratch: Path) -> Path:
    path = scratch / "gpt10m.pt"
    checkpoint = train(SIZES["10m"], torch.optim.AdamW, STEPS, batch_size=4, warmup=10)
    torch.save(checkpoint, path)
    return path


def scaled(path: Path, factor: float, target: Path) -> Path:
    """The checkpoint as if all gradients had been ``factor`` times as large."""
    checkpoint = torch.load(path, weights_only=True)
    for state in checkpoint["optimizer"]["state"].values():
        state["exp_avg"] *= factor
        state["exp_avg_sq"] *= factor * factor
    torch.save(checkpoint, target)
    return target


def with_dead_rows(path: Path, target: Path) -> Path:
    """Embedding rows where AdamW has decayed the state to the last subnormals."""
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["optimizer"]["state"][0]
    state["exp_avg"][1::3] = 5.6e-45
    state["exp_avg_sq"][1::3] = 1.3e-44
    torch.save(checkpoint, target)
    return target


def round_trip(path: Path, preset: str) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Size ratio, the original, and the restored file, both as torch reads them."""
    container, restored = path.with_suffix(f".{preset}.ckpt8"), path.with_suffix(f".{preset}.pt")
    ckpt8.compress(path, container, preset=preset, force=True)
    ckpt8.restore(container, restored, force=True)
    ratio = path.stat().st_size / container.stat().st_size
    return ratio, torch.load(path, weights_only=True), torch.load(restored, weights_only=True)


def update(state: dict[str, torch.Tensor], group: dict[str, Any]) -> torch.Tensor:
    """AdamW's step per unit of learning rate, in float64."""
    step = float(state["step"])
    beta1, beta2 = group["betas"]
    m_hat = state["exp_avg"].double() / (1 - beta1**step)
    v_hat = state["exp_avg_sq"].double() / (1 - beta2**step)
    return m_hat / (v_hat.sqrt() + group["eps"])


def check_updates(original: dict[str, Any], restored: dict[str, Any], nmse: float, largest: float) -> None:
    """Bound the error in update space over the file; no second moment may have become zero."""
    noise = signal = worst = 0.0
    for group in original["optimizer"]["param_groups"]:
        for index in group["params"]:
            before, after = original["optimizer"]["state"][index], restored["optimizer"]["state"][index]
            assert torch.equal(before["step"], after["step"])
            assert not ((before["exp_avg_sq"] > 0) & (after["exp_avg_sq"] == 0)).any()
            u, v = update(before, group), update(after, group)
            noise += float((u - v).square().sum())
            signal += float(u.square().sum())
            worst = max(worst, float((u - v).abs().max()))
    assert 0 < noise / signal <= nmse
    assert 0 < worst <= largest


def check_weights(original: dict[str, Any], restored: dict[str, Any], bound: float) -> None:
    """Bound the relative error of every weight; small tensors are equal."""
    for name, before in original["model"].items():
        after = restored["model"][name]
        if is_small(tuple(before.shape)):
            assert torch.equal(before, after), name
            continue
        normal = before.abs() >= 2.0**-126
        relative = (after.double() - before.double()).abs() / before.double().abs()
        assert float(relative[normal].max()) <= bound, name


def check_rest(original: dict[str, Any], restored: dict[str, Any]) -> None:
    """Compare everything that is neither a large weight nor a large moment: it must be equal."""
    assert original["optimizer"]["param_groups"] == restored["optimizer"]["param_groups"]
    for key in original.keys() - {"model", "optimizer"}:
        assert original[key] == restored[key], key
    for index, before in original["optimizer"]["state"].items():
        for key, value in before.items():
            if is_small(tuple(value.shape)):
                assert torch.equal(value, restored["optimizer"]["state"][index][key])


def frames(path: Path) -> list[tuple[str, dict[str, list[int]]]]:
    """Checksums of all frames, by storage and part."""
    with ckpt8.open(path) as file:
        return [
            (record.name, {part: table.crcs for part, table in record.parts.items()})
            for record in file.manifest.storages
            if record.name != "ckpt8.skeleton"
        ]


def same(path: Path, _: Path) -> Path:
    return path


@pytest.mark.parametrize(
    "change",
    [
        same,
        lambda path, target: scaled(path, 1e-4, target),
        lambda path, target: scaled(path, 1e-8, target),
        with_dead_rows,
    ],
    ids=["as trained", "gradients 1e-4", "gradients 1e-8", "dead rows"],
)
def test_flash(trained: Path, tmp_path: Path, change: Callable[[Path, Path], Path]) -> None:
    path = change(trained, tmp_path / "changed.pt")
    ratio, original, restored = round_trip(path, "flash")
    assert ratio >= 2.7
    check_weights(original, restored, 1.55e-5)
    check_updates(original, restored, 1e-4, 1.0)
    check_rest(original, restored)
    again = tmp_path / "again.ckpt8"
    ckpt8.compress(path.with_suffix(".flash.pt"), again)
    assert frames(again) == frames(path.with_suffix(".flash.ckpt8"))


def test_dead_rows_stay_compressed(trained: Path, tmp_path: Path) -> None:
    path = with_dead_rows(trained, tmp_path / "dead.pt")
    ckpt8.compress(path, tmp_path / "dead.ckpt8")
    with ckpt8.open(tmp_path / "dead.ckpt8") as file:
        for key in ("exp_avg", "exp_avg_sq"):
            assert file.stats(f"optimizer.state.0.{key}")["codec"].startswith("companded8")


def steps_apart(original: dict[str, Any], restored: dict[str, Any]) -> float:
    """The error in optimizer steps, as ``compressing.budget`` defines it, from the tensors of both."""
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


@pytest.mark.parametrize(
    ("preset", "steps", "ratio", "largest"), [("compact", 0.15, 4.2, 1 / 16), ("archive", 1.0, 6.4, 0.5)]
)
def test_presets_in_steps_of_the_optimizer(
    trained: Path, preset: str, steps: float, ratio: float, largest: float
) -> None:
    found, original, restored = round_trip(trained, preset)
    assert found >= ratio
    assert 0.5 * steps < steps_apart(original, restored) <= 1.1 * steps
    check_updates(original, restored, 1.0, largest * (1 + 1e-6))
    check_rest(original, restored)


def test_lossless(trained: Path) -> None:
    round_trip(trained, "lossless")
    assert trained.read_bytes() == trained.with_suffix(".lossless.pt").read_bytes()


def test_all_bf16(inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "bf16.pt"
    path.write_bytes((inputs / "gpt_bf16.pt").read_bytes())
    ratio, original, restored = round_trip(path, "flash")
    assert ratio >= 1.7
    assert all(torch.equal(value, restored["model"][name]) for name, value in original["model"].items())
    check_updates(original, restored, 1e-4, 1.0)


def test_the_trained_network_learned_something(trained: Path) -> None:
    checkpoint = torch.load(trained, weights_only=True)
    assert float(checkpoint["best_val_loss"]) < 0.75 * math.log(96)
