"""Kernels are compiled anew in each run."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Nothing compiled by another version is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
