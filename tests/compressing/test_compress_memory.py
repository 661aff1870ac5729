"""Compressing, saving and restoring hold at most 115 MB beyond their libraries with two threads, lossless 160 MB."""

from __future__ import annotations

import pytest
from memory_kit import run_measured, save_trained

import ckpt8
from ckpt8.compressing.policy import PRESETS

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 2560, 4
BOUND = 135e6
LOSSLESS_BOUND = 160e6
"""zstd at its usual level takes more memory for each thread than what lossy codecs need."""

SETUP = """import ckpt8.compressing.compress, ckpt8.restoring.restore
source, target, preset = sys.argv[1:]
obj = torch.load(source) if preset.startswith("live ") else None
"""
CODES = {
    "compress": "manifest = ckpt8.compress(source, target, preset=preset, threads=2)",
    "save": "manifest = ckpt8.save(obj, target, preset=preset.removeprefix('live '), threads=2)",
    "restore": "ckpt8.restore(source, target, threads=2)",
}
FOUND = """
import os
found = {"bytes": os.path.getsize(target)}
"""


@pytest.fixture(scope="module")
def containers(scratch):
    """315 MB of weights and state, enough for numba, and its container under every preset; all kernels are compiled."""
    source = scratch / "run.pt"
    save_trained(source, WIDTH, LAYERS)
    assert source.stat().st_size > 1 << 28
    found = {"": source}
    for preset in PRESETS:
        found[preset] = scratch / f"{preset}.ckpt8"
        manifest = ckpt8.compress(source, found[preset], preset=preset)
        if manifest.budget is not None:
            assert {"lattice/1", "vscaled/1", "rclog/1"} <= {record.codec["id"] for record in manifest.storages}
        ckpt8.restore(found[preset], scratch / "back.pt", force=True)
    return found


CASES = [
    *(("compress", preset) for preset in PRESETS),
    *(("save", preset) for preset in ("compact", "lossless")),
    *(("restore", preset) for preset in ("flash", "archive")),
]
"""Presets that are a budget have the same code, and a restored file takes no more where it is lossless."""


@pytest.mark.parametrize(("what", "preset"), CASES)
def test_memory_is_bounded(what, preset, containers, tmp_path):
    source = containers[preset if what == "restore" else ""]
    target = tmp_path / ("out.pt" if what == "restore" else "out.ckpt8")
    found = run_measured(SETUP, CODES[what] + FOUND, source, target, f"live {preset}" if what == "save" else preset)
    assert found["bytes"] > (3e8 if what == "restore" else 2e7)
    assert found["extra"] < (LOSSLESS_BOUND if preset == "lossless" else BOUND)
