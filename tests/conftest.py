"""Shared fixtures: the committed checkpoints, and torch imported once with its numpy warning out of the way."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    # torch warns once when numpy is missing, which it may be.
    warnings.simplefilter("ignore")
    import torch

    torch.zeros(1).sum().item()

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def inputs() -> Path:
    """The folder of real checkpoints."""
    return FIXTURES / "inputs"
