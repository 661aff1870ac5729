"""One pair of checkpoints for all tests, which none may change."""

from __future__ import annotations

import pytest
import torch
from diff_kit import gpt_steps


@pytest.fixture(scope="session")
def steps(tmp_path_factory):
    """Paths of the checkpoints after three and four steps."""
    return gpt_steps(tmp_path_factory.mktemp("steps"))


@pytest.fixture
def loaded(steps):
    """Both as torch loads them."""
    return [torch.load(path, weights_only=True) for path in steps]
