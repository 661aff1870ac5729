"""The error in steps that a container states under any preset: worked out in float64 from what load gives back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from step_kit import errors_in_steps
from torch import nn

import ckpt8
from ckpt8.container.steps import COPY, UNMOVED


def trained(small=0):
    """A model with large tensors and ``small`` small ones, and its optimizer after a few steps."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(80, 96), nn.Linear(96, 80), *(nn.Linear(3, 5) for _ in range(small))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * torch.rand(()) * 1e-2
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("small", [0, 40], ids=["own entries", "packs"])
@pytest.mark.parametrize("preset", ["flash", "archive"])
def test_it_is_what_the_decoded_tensors_say(preset, small, tmp_path):
    model, optimizer = trained(small=small)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset=preset)
    assert bool(manifest.packs) == bool(small)
    assert manifest.error_in_steps == pytest.approx(
        errors_in_steps("adam", tree, ckpt8.load(tmp_path / "run.ckpt8"), [dict(enumerate(tree["model"]))]), rel=1e-5
    )
    assert 0 < manifest.expected_drift[0] < manifest.expected_drift[1]
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
    live = ckpt8.save(tree, tmp_path / "live.ckpt8", preset=preset)
    assert live.error_in_steps == pytest.approx(manifest.error_in_steps, rel=1e-9)


def test_an_average_of_weights_is_named_and_changes_neither_figure(tmp_path):
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    alone = ckpt8.save(tree, tmp_path / "alone.ckpt8")
    ema = {name: w * 0.99 for name, w in model.state_dict().items()}
    both = ckpt8.save({**tree, "ema": ema}, tmp_path / "both.ckpt8")
    assert (both.error_in_steps, both.expected_drift) == (alone.error_in_steps, alone.expected_drift)
    facts = ckpt8.inspect(tmp_path / "both.ckpt8")["steps"]
    assert {row["reason"] for row in facts["outside"]} == {COPY}
    assert facts["drift"] == ckpt8.inspect(tmp_path / "alone.ckpt8")["steps"]["drift"]
    ema["0.weight"][0, 0] = float("nan")
    kept = ckpt8.save({**tree, "ema": ema}, tmp_path / "kept.ckpt8")
    (reason,) = (record.reason for record in kept.storages if record.name == "ema.0.weight")
    assert reason.startswith("holds NaN, Inf")


def test_where_there_is_no_figure_the_line_says_why(tmp_path):
    manifest = ckpt8.save({"model": trained()[0].state_dict()}, tmp_path / "x.ckpt8")
    assert (manifest.error_in_steps, manifest.expected_drift) == (None, None)
    words = f"unknown in steps of the optimizer: {UNMOVED}"
    assert words in repr(manifest)
    assert words in repr(ckpt8.inspect(tmp_path / "x.ckpt8"))


def test_without_a_rate_or_statistics_there_is_no_figure_and_lossless_has_none_to_show(tmp_path):
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert "its error was not measured" in repr(ckpt8.save(tree, tmp_path / "x.ckpt8", stats=False))
    exact = ckpt8.save(tree, tmp_path / "x.ckpt8", preset="lossless")
    assert (exact.error_in_steps, exact.expected_drift) == (0.0, (0.0, 0.0))
    assert "none, every tensor comes back bit for bit" in repr(exact)
    tree["optimizer"]["param_groups"][0]["lr"] = 0.0
    assert "no learning rate above zero" in repr(ckpt8.save(tree, tmp_path / "x.ckpt8"))


def test_what_is_outside_the_figure_is_said_truly(tmp_path):
    """The weight of a parameter without a figure has an optimizer; a file of an earlier version states no steps."""
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tree["optimizer"]["state"][2]["exp_avg"][0, 0] = float("nan")
    ckpt8.save(tree, tmp_path / "nan.ckpt8")
    facts = ckpt8.inspect(tmp_path / "nan.ckpt8")["steps"]
    (row,) = facts["outside"]
    assert (row["names"], facts["drift"]["is_open"]) == (["model.1.weight"], True)
    assert row["reason"] == "no optimizer in the file is known to update these weights, or its step is not stated"
    old = repr(ckpt8.inspect(Path(__file__).parents[2] / "fixtures/golden/gpt_adamw_part.flash.ckpt8"))
    assert "an earlier ckpt8 wrote the file, or " in old
