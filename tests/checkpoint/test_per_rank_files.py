"""Folders of per-rank files that four real processes wrote: read, compressed, joined, compared."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache

import pytest
import torch
from dcp_kit import load_all
from members_kit import tree
from rank_files_kit import FQN, MESHES, SHARDED, WORLD, write_rank_files
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.core.errors import InputError, UnsupportedError, UsageError
from ckpt8.inspecting.checkpoint import inspect_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

FOLDERS = [*MESHES, SHARDED, FQN]
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folders, and in files beside them the same in full. No test may change them."""
    root = tmp_path_factory.mktemp("ranks")
    write_rank_files(root)
    return root


def full(root, kind):
    """What the ranks held together."""
    return torch.load(root / f"{'fsdp' if kind == FQN else kind}.full.pt")


def copied(written, kind, tmp_path):
    return shutil.copytree(written / kind, tmp_path / kind)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# Places


def test_every_part_begins_where_torch_says(written):
    with open_source(written / "placed") as source:
        assert len(source.opened) == WORLD
        for member in source.opened:
            assert member.reason is None
            rank = member.path.removeprefix("shard-").removesuffix(".pt")
            places = json.loads((written / f"placed-{rank}.json").read_text())
            assert member.checkpoint.tree.keys() == places.keys()
            for name, (offsets, sizes) in places.items():
                ref = member.checkpoint.tree[name]
                assert ref.shape == tuple(sizes), name
                assert 0 in sizes or ref.share.offsets == tuple(offsets), name


def test_tensors_spread_in_every_way_are_put_together(written, tmp_path):
    ckpt8.convert(written / "placed", tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt")["model"], torch.load(written / "placed.full.pt"))


# One checkpoint


@pytest.fixture(scope="module")
def facts_of(written):
    """What ``inspect`` says of a folder."""
    return cache(lambda kind: inspect_checkpoint(written / kind, tensors=True))


@pytest.mark.by_default("fsdp1")
@pytest.mark.parametrize("kind", ["hsdp", "tp", SHARDED, FQN])
def test_inspect_shows_whole_tensors(kind, written, facts_of):
    shapes = {name: list(tensor.shape) for name, tensor in full(written, kind)["model"].items()}
    found = {}
    for row in facts_of(kind)["tensors"]:
        member, _, name = row["name"].partition(":")
        if member.startswith(("model", "pytorch_model")):
            found[name.partition("[")[0]] = row["whole_shape"]
            assert row["role"] == "weight"
    assert found == shapes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hsdp", "tp", FQN])
def test_state_is_recognised_and_its_parameters_are_named(kind, facts_of):
    facts = facts_of(kind)
    assert facts["optimizer"] == [{"rule": "adam", "step": 3, "parameters": len(NAMES)}]
    named = {row["name"].partition(":")[2].partition("[")[0] for row in facts["parameters"] if row["named"]}
    assert named == set(NAMES)
    assert [row["options"]["lr"] for row in facts["hyperparameters"]] == [1e-3]
    assert facts["framework"] == (None if kind == FQN else "verl")


@pytest.mark.parametrize("kind", FOLDERS)
def test_files_come_back(kind, written, tmp_path):
    ckpt8.compress(written / kind, tmp_path / "run.ckpt8", preset="lossless")
    assert tree(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")) == tree(written / kind)


# Joined


@pytest.mark.parametrize("kind", FOLDERS)
def test_convert_to_safetensors(kind, written, tmp_path):
    ckpt8.convert(written / kind, tmp_path / "model.safetensors", dtype="float32")
    assert_same(load_file(tmp_path / "model.safetensors"), full(written, kind)["model"])


@pytest.mark.parametrize("kind", MESHES)
def test_convert_to_a_file_of_torch(kind, written, tmp_path):
    report = ckpt8.convert(written / kind, tmp_path / "whole.pt")
    assert (report.layout, report.notes) == ("per-rank", [])
    found, expected = torch.load(tmp_path / "whole.pt"), full(written, kind)
    assert_same(found["model"], expected["model"])
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for key, state in expected["optimizer"]["state"].items():
        assert_same(found["optimizer"]["state"][key], state)


def test_convert_to_a_distributed_checkpoint(written, tmp_path):
    ckpt8.convert(written / FQN, tmp_path / "dcp", to="dcp")
    loaded, expected = load_all(tmp_path / "dcp"), full(written, FQN)
    for name, tensor in expected["model"].items():
        assert torch.equal(loaded[f"model.{name}"], tensor)
    for number, name in enumerate(NAMES):
        for key in ("exp_avg", "exp_avg_sq"):
            saved = expected["optimizer"]["state"][number][key]
            assert torch.equal(loaded[f"optimizer.state.{name}.{key}"], saved)


def test_state_without_places_is_left_out_with_a_note(written, tmp_path):
    report = ckpt8.convert(written / SHARDED, tmp_path / "whole.pt")
    assert [note for note in report.notes if "left out: optim_world_size_4_rank_*.pt" in note]
    assert torch.load(tmp_path / "whole.pt").keys() == {"model"}


def test_saves_on_other_meshes_are_compared_as_wholes(written):
    for other in (written / "fsdp.full.pt", written / FQN):
        found = ckpt8.diff(written / "fsdp", other)
        assert len(found.tensors) == 4 * len(NAMES)
        assert not found.changed
    close = ckpt8.diff(written / "fsdp", written / "tp")
    assert all(row.a.ref.shape == row.b.ref.shape for row in close.tensors)
    assert max(row.change.largest for row in close.changed) < 1e-5


# Alone, and incomplete


@pytest.mark.slow
def test_one_file_alone_is_refused(written, tmp_path):
    name = f"model_world_size_{WORLD}_rank_1.pt"
    ckpt8.compress(written / "fsdp", tmp_path / "run.ckpt8")
    for refused in (
        lambda: ckpt8.compress(written / "fsdp" / name, tmp_path / "x.ckpt8"),
        lambda: ckpt8.convert(written / "fsdp" / name, tmp_path / "x.safetensors"),
        lambda: ckpt8.convert(written / "fsdp", tmp_path / "x.safetensors", member=name),
        lambda: ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "x.safetensors", member=name),
        lambda: ckpt8.resume(tmp_path / "run.ckpt8", torch.nn.Linear(2, 2), member=name),
    ):
        with pytest.raises(UnsupportedError, match=r"the file of one rank.*give the folder") as caught:
            refused()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "rank"),
    [
        ("fsdp", "model_world_size_4_rank_*.pt", 2),
        ("fsdp", "optim_world_size_4_rank_*.pt", 2),
        (FQN, "pytorch_model_fsdp_rank*.bin", 3),
    ],
)
def test_a_missing_rank_is_one_line(kind, name, rank, written, tmp_path):
    folder = copied(written, kind, tmp_path)
    (folder / name.replace("*", str(rank))).unlink()
    with pytest.raises(InputError, match=f"{re.escape(name)}: the file of rank {rank} of 4 is not there"):
        ckpt8.convert(folder, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    ckpt8.compress(folder, tmp_path / "run.ckpt8")
    assert tree(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")).keys() == tree(folder).keys()


def test_a_copy_stands_in_for_a_missing_rank(written, tmp_path):
    folder = copied(written, "hsdp", tmp_path)
    for part in ("model", "optim"):
        (folder / f"{part}_world_size_{WORLD}_rank_0.pt").unlink()
    report = ckpt8.convert(folder, tmp_path / "model.safetensors", dtype="float32")
    assert_same(load_file(tmp_path / "model.safetensors"), full(written, "hsdp")["model"])
    assert len([note for note in report.notes if "the file of rank 0 of 4 is not there" in note]) == 2


def test_two_models_in_folders_of_one(written, tmp_path):
    for name in ("actor", "critic"):
        shutil.copytree(written / "fsdp", tmp_path / "step" / name)
    with pytest.raises(UsageError, match=r"choose a folder with --member: actor, critic"):
        ckpt8.convert(tmp_path / "step", tmp_path / "model.safetensors")
    ckpt8.convert(tmp_path / "step", tmp_path / "model.safetensors", member="critic", dtype="float32")
    assert_same(load_file(tmp_path / "model.safetensors"), full(written, "fsdp")["model"])


def test_weights_in_one_file_beside_the_state_of_ranks(written, tmp_path):
    folder = copied(written, FQN, tmp_path)
    for file in folder.glob("pytorch_model*"):
        file.unlink()
    weights = full(written, FQN)["model"]
    save_file(weights, folder / "model.safetensors")
    report = ckpt8.convert(folder, tmp_path / "whole.pt")
    assert report.layout == "model-directory"
    assert len([note for note in report.notes if "the file of one rank" in note]) == WORLD
    found = torch.load(tmp_path / "whole.pt")
    assert found.keys() == {"model"}
    assert_same(found["model"], weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hsdp", FQN])
def test_the_step_of_a_parameter_moves_the_weight_of_its_own_rank(kind, written, tmp_path):
    manifest = ckpt8.compress(written / kind, tmp_path / "run.ckpt8", preset="archive")
    assert len(manifest.parameters) == WORLD * len(NAMES)
    for parameter in manifest.parameters:
        if kind == FQN and parameter.name.startswith(
            ("optimizer_0_rank3.bin:0.weight", "optimizer_0_rank3.bin:0.bias")
        ):
            continue  # FSDP2 pads the weights of a rank that has fewer rows than the others, and not their moments
        weight = manifest.storages[parameter.steps["weight_storage"]].name
        its, own = (re.search(r"rank_?(\d+).*:(.*)", name).groups() for name in (weight, parameter.name))
        assert its == own
    assert len({parameter.steps["optimizer"] for parameter in manifest.parameters}) == 1


@pytest.mark.slow
def test_a_restored_file_loads_as_torch_saved_it(written, tmp_path):
    ckpt8.compress(written / "tp", tmp_path / "run.ckpt8")
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    for rank in range(WORLD):
        name = f"model_world_size_{WORLD}_rank_{rank}.pt"
        before, after = (torch.load(folder / name, weights_only=False) for folder in (written / "tp", back))
        for key, tensor in before.items():
            assert after[key].placements == tensor.placements
            assert after[key].shape == tensor.shape
            torch.testing.assert_close(after[key]._local_tensor, tensor._local_tensor, rtol=2e-5, atol=0)
