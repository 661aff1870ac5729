"""The DCP storage writer and reader in one process: what comes back, what is replaced, what is refused."""

from __future__ import annotations

import argparse
import copy
import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packed_kit import load, names_in, raw, save, save_plain
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.testing import CliRunner

import ckpt8
from ckpt8.checkpoint.sources import snapshot
from ckpt8.cli.app import app
from ckpt8.container.sharded import ShardedIndex
from ckpt8.core.errors import InputError, OutputError, UsageError
from ckpt8.core.files.atomic import partial_path
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter
from ckpt8.integrations.dcp.sharing import compress_share
from ckpt8.integrations.dcp.staging import Staged

pytestmark = pytest.mark.filterwarnings("ignore")


def odd_values():
    """Everything that a state dict may hold and that torch's own writer takes."""
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(40, 50, generator=generator)
    return {
        "model": {"w": big.clone(), "tied": big, "also": big, "b16": big.bfloat16(), "half": big.half()},
        "view": big[10:20],
        "transposed": big.t(),
        "column": big[:, 3],
        "stepped": big[::2, ::5],
        "expanded": torch.tensor([1.5]).expand(4),
        "scalar": torch.tensor(3.25),
        "none": torch.empty(0, 7),
        "count": torch.arange(30).view(5, 6),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(6, dtype=torch.complex64, generator=generator),
        "conj": torch.randn(6, dtype=torch.complex64, generator=generator).conj(),
        "f8": big[:4].to(torch.float8_e4m3fn),
        "f64": big[:3].double(),
        "u16": torch.arange(9).to(torch.uint16),
        "sparse": None,
        "objects": [1, 2.5, "three", None, {"four": (5, 6)}, torch.tensor([7, 8])],
        "text": "as it is",
        "name.with.dots": {"a": 1, 5: torch.ones(3)},
    }


def emptied(tree):
    """The same structure with other values."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape, dtype=tree.dtype)
    if isinstance(tree, dict):
        return {key: emptied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [emptied(value) for value in tree]
    return None


def assert_same(found, expected):
    """Equal to the last bit, with the same keys."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(raw(found), raw(expected))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    else:
        assert found == expected


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def manifest_of(folder):
    with ckpt8.open(folder / "__0_0.ckpt8") as file:
        return file.manifest


def eights(value=1.0):
    """A state of eight elements with one value."""
    return {"w": torch.full((8,), value)}


def loaded(folder):
    """The value of a state of ``eights``."""
    [value] = load(eights(-1.0), folder)["w"].unique().tolist()
    return value


def full(*_):
    raise OutputError("the disk is full")


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(80, 90), torch.nn.Linear(90, 80))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(torch.randn(4, 80, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_everything_comes_back_as_with_torchs_own_files(tmp_path):
    state = odd_values()
    save(state, tmp_path / "ours", preset="lossless")
    save_plain(state, tmp_path / "theirs")
    theirs = emptied(state)
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "theirs"))
    ours = load(emptied(state), tmp_path / "ours")
    assert_same(ours, theirs)
    assert_same(ours, state)
    assert names_in(tmp_path / "ours") == ["__0_0.ckpt8", "ckpt8-dcp.json"]
    assert not ckpt8.verify(tmp_path / "ours" / "__0_0.ckpt8").failures


def test_of_a_view_only_its_part_is_stored_and_tied_tensors_once(tmp_path):
    big = torch.randn(1000, 1000)
    save({"part": big[:10], "again": big[:10], "column": big[:, 1]}, tmp_path / "x", preset="lossless")
    sizes = [record.nbytes for record in manifest_of(tmp_path / "x").storages if record.name != "ckpt8.skeleton"]
    assert sorted(sizes) == [4000, 40000]


@pytest.mark.parametrize("layout", ["nested", "titan", "raw"])
def test_roles_and_figures_follow_the_names(layout, tmp_path):
    model, optimizer = trained()
    moments = optimizer.state_dict()
    if layout == "raw":
        state, weight, owner = {"model": model.state_dict(), "optimizer": moments}, "model.0.weight", "0"
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=layout == "titan")
        weights, moments = get_state_dict(model, optimizer, options=options)
        owner = "0.weight"
        nested = {"model": weights, "optimizer": moments}
        # torchtitan keeps the weights at the top level of the state dict.
        state = {**weights, "optimizer": moments, "train_state": {"step": 3}} if layout == "titan" else nested
        weight = "weights.0.weight" if layout == "titan" else "model.0.weight"
    save(state, tmp_path / "x")
    manifest = manifest_of(tmp_path / "x")
    roles = {record.name: (record.role.value, record.codec["id"]) for record in manifest.storages}
    assert roles[weight] == ("weight", "split24/1")
    assert roles[f"optimizer.state.{owner}.exp_avg"] == ("moment1", "companded8/1")
    assert roles[f"optimizer.state.{owner}.exp_avg_sq"] == ("moment2", "companded8/1")
    errors = {manifest.storages[record.moments["moment1"]].name: record.error for record in manifest.parameters}
    # The same figures as of the optimizer's own state dict.
    plain = ckpt8.save({"optimizer": optimizer.state_dict()}, tmp_path / "plain.ckpt8")
    assert errors[f"optimizer.state.{owner}.exp_avg"] == plain.parameters[0].error
    assert plain.parameters[0].error["sum_square_error"] > 0
    assert manifest.parameters[0].rule["kind"] == "adam"
    assert manifest.parameters[0].rule["step"] == 3
    back = load(emptied(state), tmp_path / "x")
    original = model.state_dict()["0.weight"]
    loaded = back["0.weight"] if layout == "titan" else back["model"]["0.weight"]
    torch.testing.assert_close(loaded, original, rtol=1.6e-5, atol=0)


def test_a_rule_names_values_as_the_state_dict_does(tmp_path):
    model, _ = trained()
    state = {"model": model.state_dict()}
    save(state, tmp_path / "x", rules=["model.0.weight=lossless"])
    assert_same(load(emptied(state), tmp_path / "x")["model"]["0.weight"], state["model"]["0.weight"])
    with pytest.raises(CheckpointException, match=r"rule 'modle.0.weight=lossless' matches no tensor"):
        save(state, tmp_path / "y", rules=["modle.0.weight=lossless"])
    assert names_in(tmp_path / "y") == []


def test_a_part_of_the_state_can_be_loaded(tmp_path):
    state = odd_values()
    save(state, tmp_path / "x", preset="lossless")
    assert_same(load({"count": torch.zeros(5, 6, dtype=torch.int64)}, tmp_path / "x"), {"count": state["count"]})
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: nowhere"):
        load({"nowhere": torch.zeros(1)}, tmp_path / "x")
    wider = load({"f64": torch.zeros(3, 50), "model": {"b16": torch.zeros(40, 50)}}, tmp_path / "x")
    assert torch.equal(wider["f64"], state["f64"].float())
    assert torch.equal(wider["model"]["b16"], state["model"]["b16"].float())


def test_a_second_save_replaces_the_first(tmp_path):
    writer = Ckpt8StorageWriter(tmp_path / "x", preset="lossless")
    for value in (1.0, 2.0):
        dcp.save(eights(value), storage_writer=writer)
        assert loaded(tmp_path / "x") == value
        assert len(names_in(tmp_path / "x")) == 2
    dcp.save(eights(), storage_writer=writer, checkpoint_id=tmp_path / "y")
    assert loaded(tmp_path / "y") == 1


def test_other_settings_of_the_planner(tmp_path):
    state = {"w": torch.randn(5, 6), "n": torch.arange(4)}
    save(state, tmp_path / "x", dcp.DefaultSavePlanner(flatten_state_dict=False), preset="lossless")
    assert json.loads((tmp_path / "x" / "ckpt8-dcp.json").read_text())["paths"] is None
    flat = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    assert_same(load(emptied(state), tmp_path / "x", flat), state)
    for step in range(3):
        # A planner that remembers the plan of the last save sends no items.
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state["w"] += 1
        save(state, tmp_path / f"step-{step}", planner, preset="lossless", rules=["*w=lossless"])
        assert_same(load(emptied(state), tmp_path / f"step-{step}"), state)


def test_a_save_that_must_not_replace_is_refused(tmp_path):
    save(eights(), tmp_path / "x")
    before = contents(tmp_path / "x")
    with pytest.raises(CheckpointException, match="holds a checkpoint, and overwrite is False"):
        save(eights(0.0), tmp_path / "x", overwrite=False)
    assert contents(tmp_path / "x") == before
    save_plain(eights(), tmp_path / "theirs")
    with pytest.raises(CheckpointException, match="holds a checkpoint of another format"):
        save(eights(0.0), tmp_path / "theirs")


def test_an_interrupted_save_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    save(eights(), tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(ShardedIndex, "write", full)
        for _ in range(2):
            with pytest.raises(CheckpointException, match="the disk is full"):
                save(eights(0.0), tmp_path / "x")
            # The file of a save that failed is there until the next one begins: there is room for one, not for many.
            assert names_in(tmp_path / "x") == ["__0_0.ckpt8", "__0_1.ckpt8", "ckpt8-dcp.json"]
        with pytest.raises(CheckpointException, match="the disk is full"):
            save(eights(0.0), tmp_path / "y")
    assert loaded(tmp_path / "x") == 1
    with pytest.raises(CheckpointException, match=r"has no ckpt8-dcp.json; the save was interrupted"):
        loaded(tmp_path / "y")
    save(eights(3.0), tmp_path / "x")
    assert loaded(tmp_path / "x") == 3
    assert names_in(tmp_path / "x") == ["__0_1.ckpt8", "ckpt8-dcp.json"]
    save(eights(4.0), tmp_path / "y")
    assert names_in(tmp_path / "y") == ["__0_0.ckpt8", "ckpt8-dcp.json"]


def test_objects_of_other_classes_are_not_made(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    save({"args": argparse.Namespace(lr=1), "w": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(CheckpointException, match=r"args: holds argparse.Namespace, which torch does not allow"):
        load({"args": None, "w": torch.zeros(2)}, tmp_path / "x")
    assert load({"w": torch.zeros(2)}, tmp_path / "x")["w"].eq(1).all()
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert load({"args": None}, tmp_path / "x")["args"] == argparse.Namespace(lr=1)
    save({"trap": Trap()}, tmp_path / "trap")
    with pytest.raises(CheckpointException, match=r"trap: holds posix.mkdir"):
        load({"trap": None}, tmp_path / "trap")
    assert not (tmp_path / "executed").exists()


def test_files_of_two_saves_are_told_apart(tmp_path):
    for name, value in (("x", 1.0), ("y", 2.0)):
        save(eights(value), tmp_path / name)
    (tmp_path / "x" / "__0_0.ckpt8").write_bytes((tmp_path / "y" / "__0_0.ckpt8").read_bytes())
    with pytest.raises(CheckpointException, match=r"belongs to another save than the ckpt8-dcp.json beside it"):
        loaded(tmp_path / "x")
    (tmp_path / "y" / "__0_0.ckpt8").unlink()
    with pytest.raises(CheckpointException, match=r"__0_0.ckpt8: cannot be read: No such file"):
        loaded(tmp_path / "y")


def test_the_name_of_the_directory_is_on_the_disk_before_its_index(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        "ckpt8.container.sharded.sync_directory",
        lambda path: flushed.append((path, (path / "step-5" / "ckpt8-dcp.json").exists())),
    )
    save(eights(), tmp_path / "step-5")
    assert flushed == [(tmp_path, False)]


def test_ranks_that_find_different_saves_load_none(tmp_path):
    reader, plans = Ckpt8StorageReader(tmp_path / "x"), []
    for _ in range(2):  # the second save takes place while ranks read the index
        save(eights(), tmp_path / "x")
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    assert reader.prepare_global_plan(plans[:1] * 2) == plans[:1] * 2
    with pytest.raises(InputError, match=r"x: ranks have found different saves; .*, load it again$"):
        reader.prepare_global_plan(plans)


def test_a_rank_saves_and_loads_its_own_slices_alone(tmp_path):
    """The other half is in no file: only what a rank asks for must be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh, own = DeviceMesh("cpu", [0, 1]), torch.randn(40, 100)
        save({"w": DTensor.from_local(own, mesh, [Shard(0)])}, tmp_path / "x", preset="lossless")
        mine = DTensor.from_local(torch.zeros(40, 100), mesh, [Shard(0)])
        load({"w": mine}, tmp_path / "x")
        assert torch.equal(mine.to_local(), own)
        columns = DTensor.from_local(torch.zeros(80, 50), mesh, [Shard(1)])
        with pytest.raises(CheckpointException, match=r"w.*: slices are missing: 2000 of 4000 elements"):
            load({"w": columns}, tmp_path / "x")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("command", ["inspect", "verify", "restore", "compress", "convert", "diff"])
def test_commands_name_a_save_that_was_interrupted(tmp_path, command):
    save({"w": torch.ones(3)}, tmp_path / "x")
    (tmp_path / "x" / "ckpt8-dcp.json").unlink()
    others = {"restore": ["-o", tmp_path / "back"], "convert": [tmp_path / "x.pt"], "diff": [tmp_path / "x"]}
    arguments = [command, tmp_path / "x", *others.get(command, ())]
    found = CliRunner().invoke(app, [*map(str, arguments)]).exception
    assert str(found) == f"{tmp_path / 'x'}: has no ckpt8-dcp.json; the save was interrupted before it was complete"
    assert isinstance(found, InputError)
    assert names_in(tmp_path) == ["x"]


def test_directories_that_hold_none(tmp_path):
    with pytest.raises(CheckpointException, match="holds no checkpoint of Ckpt8StorageWriter"):
        loaded(tmp_path)
    save_plain(eights(), tmp_path / "theirs")
    with pytest.raises(CheckpointException, match="was written by torch's own FileSystemWriter"):
        loaded(tmp_path / "theirs")
    with pytest.raises(UsageError, match="is not a path of the file system"):
        Ckpt8StorageWriter("gs://bucket/run")
    with pytest.raises(UsageError, match="is on the Hub, which is read here"):
        Ckpt8StorageWriter("hf://owner/name/run")
    with pytest.raises(UsageError, match=r"a budget is a number of steps from 0\.01 to 10, not 11"):
        Ckpt8StorageWriter(tmp_path, budget=11)


def test_a_save_removes_what_killed_ones_have_left(tmp_path):
    save(eights(), tmp_path / "x")
    for name in ("__7_3.ckpt8", "ckpt8-dcp.json", "ckpt8-dcp.7.json"):
        partial_path(tmp_path / "x" / name).write_bytes(b"half")
    save(eights(), tmp_path / "x")
    assert names_in(tmp_path / "x") == ["__0_1.ckpt8", "ckpt8-dcp.json"]


def test_a_file_that_the_coordinator_does_not_see_stops_the_save(tmp_path):
    writer, planner = Ckpt8StorageWriter(tmp_path / "x"), dcp.DefaultSavePlanner()
    save(eights(), tmp_path / "x")
    planner.set_up_planner(eights(0.0), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan([plan])
    results = writer.write_data(plan, planner).value()
    # As where each node has a directory of this name for itself.
    (tmp_path / "x" / "__0_1.ckpt8").unlink()
    with pytest.raises(OutputError) as caught:
        writer.finish(metadata, [results])
    assert str(caught.value) == (
        f"{tmp_path / 'x'}: ranks have written __0_1.ckpt8 elsewhere; give a directory that every rank can reach, "
        "nothing was replaced"
    )
    assert loaded(tmp_path / "x") == 1


# A save that fails after its index is published, or just before: a whole checkpoint is there


def test_files_that_the_index_names_stay_where_tidying_fails(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    save_plain(eights(), tmp_path / "plain")
    save(eights(0.0), tmp_path / "x")
    monkeypatch.setattr("ckpt8.integrations.dcp.storage._remove_others", broken)
    with pytest.raises(OSError, match="Input/output error"):
        compress_share(tmp_path / "plain", tmp_path / "x", {}, 0, 1, overwrite=True)
    assert loaded(tmp_path / "x") == 1


def test_a_warning_that_is_an_error_stops_the_save_before_it_replaces_anything(tmp_path, monkeypatch):
    save(eights(0.0), tmp_path / "x")
    before = contents(tmp_path / "x")
    losses = Ckpt8StorageWriter._warn_of_losses

    def strict(*arguments):
        losses(*arguments)
        raise UserWarning("larger")

    monkeypatch.setattr(Ckpt8StorageWriter, "_warn_of_losses", strict)
    with pytest.raises(CheckpointException, match="larger"):
        save(eights(), tmp_path / "x")
    assert before.items() <= contents(tmp_path / "x").items()
    assert loaded(tmp_path / "x") == 0


# Values that are unlike others: each is given back, or refused before anything is written


@pytest.mark.parametrize(("state", "said"), [
    ({"x\ud800": torch.ones(3)}, r"'x\\ud800': is no valid Unicode"),
    ({"x": torch.empty([1] * 65)}, r"'x': has 65 dimensions, more than 64"),
    ({"x": torch.empty(3, device="meta")}, r"'x': is on the device meta and has no values; initialise it first"),
])  # fmt: skip
def test_what_no_container_holds_is_refused_before_anything_is_written(tmp_path, state, said):
    with pytest.raises(CheckpointException, match=said):
        save(state | {"y": torch.ones(2)}, tmp_path / "x", preset="lossless")
    assert not [*tmp_path.glob("x/*")]


def test_any_other_name_is_kept(tmp_path):
    names = ["", "a", "a@1", "a@0x0", "a.b@1", "a/b", "../x", "é\0\n", "objects", "objects#", "other", "x" * 5000]
    names += ["state.a@1.exp_avg", "state.a.exp_avg", "param_groups.a.lr"]
    state = {name: torch.full((3, 4), float(number)) for number, name in enumerate(names)}
    save(state, tmp_path / "x", preset="lossless")
    found = load(emptied(state), tmp_path / "x")
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(("flag", "dtype"), [(torch._neg_view, torch.float32), (torch.conj, torch.complex64)])
def test_a_tensor_with_a_bit_that_changes_its_values_is_filled_with_what_was_saved(tmp_path, flag, dtype):
    state = {"x": torch.randn(5000, dtype=dtype)}
    save(state, tmp_path / "x", preset="lossless")
    found = {"x": flag(torch.zeros(5000, dtype=dtype))}
    load(found, tmp_path / "x")
    assert torch.equal(found["x"].resolve_conj().resolve_neg(), state["x"])


class Casting(Ckpt8SavePlanner):
    """Writes another type than it has planned."""

    def transform_object(self, write_item, object):  # noqa: A002 - its name in torch
        found = super().transform_object(write_item, object)
        return found.double() if isinstance(found, torch.Tensor) else found


def test_a_value_that_is_not_as_planned_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(CheckpointException, match=r"'w': the planner gives torch.float64 of \(3, 2\) for"):
        save({"w": torch.ones(3, 2)}, tmp_path / "x", Casting(), preset="lossless")
    assert not [*tmp_path.glob("x/*")]


class FewPlanner(dcp.DefaultLoadPlanner):
    """Leaves out what ends in ``kept``."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if not item.dest_index.fqn.endswith("kept")])


def test_a_tensor_that_is_no_plain_one_is_kept_as_torch_saves_it(tmp_path):
    sparse = torch.eye(4).to_sparse()
    save({"x": sparse, "y": torch.ones(2)}, tmp_path / "x")
    stored = json.loads((tmp_path / "x" / "ckpt8-dcp.json").read_text())["tensors"]["x"]
    assert stored["boxes"] == [[0, [0, 0], [4, 4]]]
    (place,) = stored["pickled"]
    assert place[1] > 0
    assert [each.name for each in manifest_of(tmp_path / "x").slices] == ["y"]
    assert load({"x": torch.zeros(4, 4).to_sparse(), "y": torch.zeros(2)}, tmp_path / "x")["x"].to_dense().trace() == 4


def test_saves_in_the_background_have_the_values_of_their_beginning(tmp_path):
    """Two at once share no memory."""
    weight = torch.arange(20_000.0).view(100, 200)
    state = {"model": {"w": weight, "tied": weight.t()}, "list": [weight[3], {"n": 2}], "step": 7}
    writers = [Ckpt8StorageWriter(tmp_path / name, preset="lossless") for name in "xy"]
    expected, pending = [], []
    for writer in writers:
        expected.append(copy.deepcopy(state))
        pending.append(dcp.async_save(state, storage_writer=writer))
        weight += 1
    for name, values, save_of_it in zip("xy", expected, pending, strict=True):
        save_of_it.result()
        assert_same(load(emptied(state), tmp_path / name), values)
    writers[0].close()
    assert snapshot._kept == []


def test_a_staged_state_is_a_copy_whatever_it_holds():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, own = DeviceMesh("cpu", [0, 1]), torch.randn(40, 100)
        shard = DTensor.from_local(own, mesh, [Shard(0)])
        weight = torch.randn(6, 7)
        state = {
            "w": weight,
            "views": (weight.t(), [weight[2]]),
            "shard": shard,
            "trained": torch.nn.Parameter(shard),
            "own": own,
        }
        state |= {"conj": torch.randn(3, dtype=torch.complex64).conj(), "s": torch.eye(4).to_sparse()}
        state |= {"bits": weight.view(torch.int32), "args": argparse.Namespace(seeds=[1, 2]), "again": [weight]}
        places = [ShardMetadata([at, 0], [40, 100], f"rank:{rank}/cpu") for rank, at in enumerate((0, 40))]
        whole = ShardedTensorMetadata(places, torch.Size([80, 100]), TensorProperties(dtype=own.dtype))
        held = ShardedTensorBase._init_from_local_shards_and_global_metadata([LocalShard(own, places[0])], whole)
        before, copied = copy.deepcopy(state), Staged({**state, "fsdp1": held}).state()
        for tensor in (own, weight, state["conj"], state["s"]._values()):
            tensor.zero_()
        state["args"].seeds.clear()
        assert copied["args"] == before["args"]
        assert torch.equal(copied["s"].to_dense(), torch.eye(4))
        for key in ("shard", "trained"):
            assert type(copied[key]) is DTensor
            assert (copied[key].placements, copied[key].shape) == (before["shard"].placements, (80, 100))
            assert torch.equal(copied[key].to_local(), before["shard"].to_local())
        (held,) = copied["fsdp1"].local_shards()
        assert copied["fsdp1"].metadata() == whole
        assert (held.metadata, held.tensor.data_ptr()) == (places[0], copied["own"].data_ptr())
        assert_same(
            [copied[key] for key in ("w", "views", "conj", "bits", "own")],
            [before[key] for key in ("w", "views", "conj", "bits", "own")],
        )
        assert copied["views"][0].data_ptr() == copied["w"].data_ptr() == copied["again"][0].data_ptr()
    finally:
        dist.destroy_process_group()


def test_a_planner_may_leave_tensors_out(tmp_path):
    save({"w": torch.ones(8), "kept": torch.ones(8)}, tmp_path / "x")
    state = load({"w": torch.zeros(8), "kept": torch.zeros(8)}, tmp_path / "x", FewPlanner())
    assert (state["w"].sum(), state["kept"].sum()) == (8, 0)


def test_damage_is_found(tmp_path):
    save({"w": torch.randn(5000)}, tmp_path / "x", preset="lossless")
    file = tmp_path / "x" / "__0_0.ckpt8"
    content = bytearray(file.read_bytes())
    with ckpt8.open(file) as opened:
        start = opened._reader.places[0]["plane3"].offsets[0]
    content[start] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointException, match="DamagedError"):
        load({"w": torch.zeros(5000)}, tmp_path / "x")


def test_compressing_it_again_says_what_to_give(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "x")
    for read in (ckpt8.compress, inspect_checkpoint, partial(ckpt8.verify, tmp_path / "x")):
        with pytest.raises(InputError, match=r"compressed already, by Ckpt8StorageWriter; restore it to a plain dire"):
            read(tmp_path / "x")
    assert names_in(tmp_path) == ["x"]


def test_one_process_is_all_ranks_without_collectives(tmp_path):
    state = {"w": torch.ones(8), "note": "x"}
    for _ in range(2):  # it replaces its own, as with them
        dcp.save(state, storage_writer=Ckpt8StorageWriter(tmp_path / "x"), use_collectives=False)
    assert names_in(tmp_path / "x") == ["__0_1.ckpt8", "ckpt8-dcp.json"]
    assert_same(load(emptied(state), tmp_path / "x"), state)


def test_a_save_with_the_plan_before_it_has_metadata_of_its_own_files(tmp_path):
    for step in range(3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = "test"
        writer = Ckpt8StorageWriter(tmp_path / "x", preset="lossless")
        saved = dcp.save(eights(float(step)), storage_writer=writer, planner=planner)
        # The file before is gone when the next one is named.
        assert list(saved.storage_data.files) == [f"__0_{step % 2}.ckpt8"]
        assert saved.storage_meta.save_id == writer.storage_meta().save_id
        assert loaded(tmp_path / "x") == step


def test_values_of_several_types_in_one_place(tmp_path):
    real = torch.arange(64.0)
    state = {
        "real": real,
        "complex": torch.view_as_complex(real.view(32, 2)),
        "bits": real.view(torch.int32),
        "half": real[:8].view(torch.bfloat16),
        "again": real.view(8, 8),
    }
    save(state, tmp_path / "x", preset="lossless")
    found = load(emptied(state), tmp_path / "x")
    assert all(torch.equal(found[name], value) for name, value in state.items())
