"""Checkpoints that tests of several folders look at, and an inspection without what takes most of its time."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def without_predictions(monkeypatch):
    """``inspect`` of a raw checkpoint predicts no sizes, which costs several times as much as all else."""
    unknown = {"bytes": 1, "ratio": 1.0, "steps": None, "weight": None, "moment1": None, "moment2": None, "drift": None}
    monkeypatch.setattr(
        "ckpt8.inspecting.checkpoint.predict",
        lambda source, plans: {"predicted": dict.fromkeys(plans, unknown), "unpredicted": {}},
    )


@pytest.fixture(scope="session")
def steps(tmp_path_factory):
    """Paths of the checkpoints after three and four steps, which no test may change."""
    from diff_kit import gpt_steps

    return gpt_steps(tmp_path_factory.mktemp("steps"))


@pytest.fixture
def loaded(steps):
    """Both as torch loads them."""
    return [torch.load(path, weights_only=True) for path in steps]
