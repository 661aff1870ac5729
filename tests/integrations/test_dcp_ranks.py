"""What two ranks of FSDP2, and two replicas, say and store of what they saved; ``test_dcp_modes`` goes on from such."""

from __future__ import annotations

import json

import pytest
from fsdp_kit import run, save_both, save_replicas

import ckpt8

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "replicas").mkdir()
    saved = {"folder": folder, "presets": ("flash", "archive")}
    run(2, (save_both, saved), (save_replicas, {"folder": folder / "replicas"}))
    return folder


def test_every_rank_measures_its_own_slices(ranks):
    """With the steps and settings that one of them stores."""
    for rank in (0, 1):
        with ckpt8.open(ranks / "flash" / f"__{rank}_0.ckpt8") as file:
            storages = file.manifest.storages
            found = {storages[record.moments["moment1"]].name: record.error for record in file.manifest.parameters}
        assert 0 < found["optimizer.state.0.weight.exp_avg"]["max_error"] < 0.1
        assert 0 < found["optimizer.state.2.weight.exp_avg"]["max_error"] < 0.1


def codecs(folder, rank):
    """The codec and the reason of every matrix in a rank's file."""
    with ckpt8.open(folder / f"__{rank}_0.ckpt8") as file:
        manifest = file.manifest
    records = {tensor.name: manifest.storages[tensor.storage] for tensor in manifest.tensors if len(tensor.shape) == 2}
    return {name: (record.codec["id"], record.reason) for name, record in records.items()}


def test_every_rank_spends_the_budget_on_its_own_slices(ranks):
    for rank in (0, 1):
        found = codecs(ranks / "archive", rank)
        assert {codec for codec, _ in found.values()} == {"lattice/1", "vscaled/1", "rclog/1"}
        assert len(found) == 2 * 3
        with ckpt8.open(ranks / "archive" / f"__{rank}_0.ckpt8") as file:
            steps = [record.steps for record in file.manifest.parameters if record.steps]
        spent = sum(each["weight"] + each["moment1"] + each["moment2"] for each in steps)
        assert 0.3 < (spent / sum(each["step"] for each in steps)) ** 0.5 < 1.3


def test_what_ranks_save_apart_is_counted_and_kept_as_flash_keeps_it(ranks):
    replicas = ranks / "replicas"
    names = ("spread", "together", "flash", "lossless")
    said = {name: json.loads((replicas / f"{name}.json").read_text()) for name in names}
    parted = "4 of 4 parameters have weight and moments in different ranks' files, so"
    kept = "6 of 16 slices are kept as flash keeps them, not within the budget"
    advice = "save with Ckpt8SavePlanner()"
    assert said == {
        "spread": [f"{replicas / 'spread'}: {parted} {kept}; {advice}"],
        "together": [],
        "flash": [f"{replicas / 'flash'}: {parted} the error of their updates is not measured; {advice}"],
        "lossless": [],
    }
    found = codecs(replicas / "spread", 0) | codecs(replicas / "spread", 1)
    assert {codec for codec, _ in found.values()} == {"split24/1", "companded8/1"}
    assert all(reason.startswith("no budget: ") for _, reason in found.values())
    for rank in (0, 1):
        found = codecs(replicas / "together", rank)
        assert {codec for codec, _ in found.values()} == {"lattice/1", "vscaled/1", "rclog/1"}
