from __future__ import annotations

import pytest
from members_kit import make_directory

import ckpt8


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory):
    """A checkpoint directory that no test may change."""
    return make_directory(tmp_path_factory.mktemp("members") / "checkpoint-1.5")


@pytest.fixture(scope="session")
def containers(run_directory, tmp_path_factory):
    """The directory compressed with two presets."""
    folder = tmp_path_factory.mktemp("containers")
    found = {preset: folder / f"{preset}.ckpt8" for preset in ("flash", "lossless")}
    for preset, target in found.items():
        ckpt8.compress(run_directory, target, preset=preset)
    return found
