"""GPT-2 of 124 M parameters, six steps of Trainer: what ``fixtures/bench/gpt2.py`` records, asked of ``flash``."""

from __future__ import annotations

import json
import shutil

import pytest
from frameworks_kit import check_goes_on

import ckpt8
from ckpt8.inspecting.container import inspect_container

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def gpt2(inputs, monkeypatch):
    """The script, which imports its neighbour."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.syspath_prepend(str(inputs.parent / "bench"))
    import gpt2

    return gpt2


@pytest.fixture
def work(tmp_path):
    """A folder that is emptied at once: it gets 3.5 GB."""
    yield tmp_path
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_flash(gpt2, work):
    expected = gpt2.train(work)
    checkpoint = work / f"checkpoint-{gpt2.SAVED}"
    container, restored = work / "flash.ckpt8", work / "restored"
    ckpt8.compress(checkpoint, container)
    assert gpt2.directory_bytes(checkpoint) >= 2.7 * container.stat().st_size
    ckpt8.restore(container, restored)
    assert gpt2.weight_error(checkpoint, restored) <= 1.55e-5
    update = gpt2.update_error(checkpoint, restored)
    assert 0 < update["nmse"] <= 1e-4
    assert 0 < update["max_error"] <= 1
    stated = inspect_container(container)["errors"]["update"]
    assert stated["nmse"] == pytest.approx(update["nmse"], rel=0.01)
    assert stated["max_error"] == pytest.approx(update["max_error"], rel=1e-3)
    container.unlink()
    other = gpt2.train(work / "other", seed=1)
    check_goes_on("flash", gpt2.train(work / "resumed", resume_from=restored), expected, other)


def test_the_recorded_figures(inputs):
    """They are of the presets that there are, and hold what is promised."""
    recorded = json.loads((inputs.parent / "bench" / "gpt2.json").read_text())
    presets = recorded["presets"]
    assert set(presets) == {"flash", "compact", "lossless"}
    flash = presets["flash"]
    assert recorded["bytes"] >= 2.7 * flash["bytes"]
    assert flash["update"]["nmse"] <= 1e-4
    assert flash["update"]["max_error"] <= 1
    assert presets["lossless"]["drift"] == presets["lossless"]["weight_error"] == 0
    assert presets["compact"]["drift"] < recorded["drift_of_another_initialisation"] / 100
