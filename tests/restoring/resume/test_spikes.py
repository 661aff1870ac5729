"""Small gradients of very different sizes: what FlashOptim's layout makes of a resumed run, and what ours does.

There second moments far below their group's largest get code 0 while the first moment does not, so that the next step
divides by eps; scales that vanish in fp16 lose the momentum. ``fixtures/bench/spikes.py`` measures both at length, and
where the loss shows it.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest


@pytest.fixture(scope="module")
def spikes(inputs):
    spec = importlib.util.spec_from_file_location("spikes", inputs.parent / "bench" / "spikes.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["spikes"] = script
    spec.loader.exec_module(script)
    yield script
    del sys.modules["spikes"]


PRESETS = ["ckpt8 flash", "ckpt8 compact"]
SMALL = {"seed": 2, "features": 512, "steps": 1000}


@pytest.fixture(scope="module")
def loss_weight(spikes):
    """What makes spread gradients 1."""
    return spikes.loss_weight(spikes.Setup(1.0, **SMALL))


@pytest.mark.slow
def test_spread_gradients_spike_where_second_moments_become_zero(spikes, loss_weight, tmp_path):
    result = spikes.measure(spikes.Setup(1e-4, **SMALL), tmp_path, 1e-4 * loss_weight)
    assert result["gradient"]["median"] == pytest.approx(1e-4, rel=0.1)
    assert result["gradient"]["sigma"] == pytest.approx(2, abs=0.2)
    rows = result["resumed"]
    assert rows["FlashOptim"]["max"] > 3
    assert rows["FlashOptim"]["update"] > 50
    assert rows["with v > 0"]["max"] < 1.1
    for name in PRESETS:
        assert rows[name]["max"] < 1.1
        assert rows[name]["update"] < 1
