"""Runs every test that takes ``name`` for each registered optimizer."""

from __future__ import annotations

from ckpt8.optim import OPTIMIZERS


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", [name for name, _ in OPTIMIZERS])
