"""FSDP2 runs in two gloo processes: saved, loaded at the same and at another world size, and trained on."""

from __future__ import annotations

import json

import pytest
import torch
from fsdp_kit import load_run, run, save_run

import ckpt8

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes saved and loaded: lossless and nested, flash and flat and in the background."""
    folder = tmp_path_factory.mktemp("ranks")
    exact, small = folder / "exact", folder / "small"
    exact.mkdir()
    small.mkdir()
    calls = [
        (save_run, {"folder": exact}),
        (load_run, {"folder": exact}),
        (save_run, {"folder": small, "preset": "flash", "flat": True, "asynchronous": True}),
        (load_run, {"folder": small, "flat": True}),
    ]
    run(2, *calls)
    return exact, small


def figures(folder):
    losses = [json.loads((folder / name).read_text()) for name in ("losses.json", "resumed.json")]
    states = [torch.load(folder / name) for name in ("before.pt", "after.pt")]
    return *losses, *states


def assert_close(folder):
    losses, resumed, before, after = figures(folder)
    assert max(abs(a - b) for a, b in zip(losses, resumed, strict=True)) < 1e-3
    assert losses != resumed
    for name, tensor in before.items():
        if name.startswith("model."):
            torch.testing.assert_close(after[name], tensor, rtol=1.6e-5, atol=0)
        elif name.endswith("step"):
            assert torch.equal(after[name], tensor)
        else:
            assert (after[name] - tensor).square().sum() <= 1e-4 * tensor.square().sum()


def test_two_ranks_go_on_exactly(ranks):
    losses, resumed, before, after = figures(ranks[0])
    assert resumed == losses
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    files = sorted(path.name for path in (ranks[0] / "saved").iterdir())
    assert files == ["__0_0.ckpt8", "__1_0.ckpt8", "ckpt8-dcp.json"]


def test_two_ranks_go_on_from_packed_slices(ranks):
    assert_close(ranks[1])
    for rank in (0, 1):
        with ckpt8.open(ranks[1] / "saved" / f"__{rank}_0.ckpt8") as file:
            storages = file.manifest.storages
            found = {storages[record.moments["moment1"]].name: record.error for record in file.manifest.parameters}
        # Every rank measures its own slices, with the steps and settings that one of them stores.
        assert 0 < found["optimizer.state.0.weight.exp_avg"]["max_error"] < 0.1
        assert 0 < found["optimizer.state.2.weight.exp_avg"]["max_error"] < 0.1


@pytest.mark.parametrize(("which", "options"), [(0, {}), (1, {"flat": True})])
def test_one_process_goes_on_from_two_ranks(which, options, ranks):
    folder = ranks[which]
    run(1, (load_run, {"folder": folder, **options}))
    if which == 0:
        losses, resumed, before, after = figures(folder)
        assert resumed == pytest.approx(losses, abs=1e-6)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    else:
        assert_close(folder)


@pytest.mark.slow
def test_two_ranks_go_on_from_one_process(tmp_path):
    run(1, (save_run, {"folder": tmp_path}))
    run(2, (load_run, {"folder": tmp_path}))
    losses, resumed, before, after = figures(tmp_path)
    assert resumed == pytest.approx(losses, abs=1e-6)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
