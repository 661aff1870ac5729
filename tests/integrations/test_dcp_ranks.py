"""FSDP2 runs in two gloo processes: saved, loaded at the same and at another world size, and trained on."""

from __future__ import annotations

import json

import pytest
import torch
from fsdp_kit import load_run, run, save_replicas, save_run

import ckpt8

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes saved and loaded: lossless and nested, flash and flat and in the background, archive."""
    folder = tmp_path_factory.mktemp("ranks")
    exact, small, archive, replicas = (folder / name for name in ("exact", "small", "archive", "replicas"))
    for each in (exact, small, archive, replicas):
        each.mkdir()
    calls = [
        (save_run, {"folder": exact}),
        (load_run, {"folder": exact}),
        (save_run, {"folder": small, "preset": "flash", "flat": True, "asynchronous": True}),
        (load_run, {"folder": small, "flat": True}),
        (save_run, {"folder": archive, "preset": "archive"}),
        (load_run, {"folder": archive}),
        (save_replicas, {"folder": replicas}),
    ]
    run(2, *calls)
    return exact, small, archive, replicas


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


def codecs(folder, rank):
    """The codec and the reason of every matrix in a rank's file."""
    with ckpt8.open(folder / f"__{rank}_0.ckpt8") as file:
        manifest = file.manifest
    records = {tensor.name: manifest.storages[tensor.storage] for tensor in manifest.tensors if len(tensor.shape) == 2}
    return {name: (record.codec["id"], record.reason) for name, record in records.items()}


def test_every_rank_spends_the_budget_on_its_own_slices(ranks):
    losses, resumed, before, after = figures(ranks[2])
    assert 0 < max(abs(a - b) for a, b in zip(losses, resumed, strict=True)) < 3e-2
    for rank in (0, 1):
        found = codecs(ranks[2] / "saved", rank)
        assert {codec for codec, _ in found.values()} == {"lattice/1", "vscaled/1", "rclog/1"}
        assert len(found) == 2 * 3
        with ckpt8.open(ranks[2] / "saved" / f"__{rank}_0.ckpt8") as file:
            steps = [record.steps for record in file.manifest.parameters if record.steps]
        spent = sum(each["weight"] + each["moment1"] + each["moment2"] for each in steps)
        assert 0.3 < (spent / sum(each["step"] for each in steps)) ** 0.5 < 1.3
    for name, tensor in before.items():
        if name.endswith("step"):
            assert torch.equal(after[name], tensor)


def test_what_ranks_save_apart_is_counted_and_kept_as_flash_keeps_it(ranks):
    names = ("spread", "together", "flash", "lossless")
    said = {name: json.loads((ranks[3] / f"{name}.json").read_text()) for name in names}
    parted = "4 of 4 parameters have weight and moments in different ranks' files, so"
    kept = "6 of 16 slices are kept as flash keeps them, not within the budget"
    advice = "save with Ckpt8SavePlanner()"
    assert said == {
        "spread": [f"{ranks[3] / 'spread'}: {parted} {kept}; {advice}"],
        "together": [],
        "flash": [f"{ranks[3] / 'flash'}: {parted} the error of their updates is not measured; {advice}"],
        "lossless": [],
    }
    found = codecs(ranks[3] / "spread", 0) | codecs(ranks[3] / "spread", 1)
    assert {codec for codec, _ in found.values()} == {"split24/1", "companded8/1"}
    assert all(reason.startswith("no budget: ") for _, reason in found.values())
    for rank in (0, 1):
        found = codecs(ranks[3] / "together", rank)
        assert {codec for codec, _ in found.values()} == {"lattice/1", "vscaled/1", "rclog/1"}


@pytest.mark.parametrize(("which", "options"), [(0, {}), (1, {"flat": True}), (2, {})])
def test_one_process_goes_on_from_two_ranks(which, options, ranks):
    folder = ranks[which]
    by_two = figures(folder)[3]
    run(1, (load_run, {"folder": folder, **options}))
    if which == 0:
        losses, resumed, before, after = figures(folder)
        assert resumed == pytest.approx(losses, abs=1e-6)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    elif which == 1:
        assert_close(folder)
    else:
        after = figures(folder)[3]
        assert all(torch.equal(after[name], tensor) for name, tensor in by_two.items())
