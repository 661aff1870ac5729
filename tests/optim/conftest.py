"""Runs every test that takes ``name`` for each registered optimizer, on one thread."""

from __future__ import annotations

import pytest
import torch

from ckpt8.optim import OPTIMIZERS


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", [name for name, _ in OPTIMIZERS])


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
