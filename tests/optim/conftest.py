"""Runs every test that takes ``name`` for each registered optimizer, and for one that only the tests have."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from own_optimizer_kit import registered

from ckpt8.optim import OPTIMIZERS


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", [*(name for name, _ in OPTIMIZERS), "Ema"])


@pytest.fixture(autouse=True)
def _registered(request):
    call = getattr(request.node, "callspec", None)
    with registered() if call is not None and call.params.get("name") == "Ema" else nullcontext():
        yield
