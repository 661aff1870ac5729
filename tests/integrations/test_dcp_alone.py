"""``use_collectives=False``: every rank writes its part of the index on its own, and the reader joins them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_kit import make, state_of, train, whole
from packed_kit import change_index, load, names_in
from ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from ckpt8.container.joined import read_index
from ckpt8.container.sharded import Part, ShardedIndex
from ckpt8.core.errors import InputError, OutputError, UsageError
from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter, storage
from ckpt8.integrations.dcp.rank_file import RankPlan

pytestmark = pytest.mark.filterwarnings("ignore")


def save_alone(state, folder, **options):
    return dcp.save(
        state, storage_writer=Ckpt8StorageWriter(folder, preset="lossless"), use_collectives=False, **options
    )


def refusal(call, *, apart=False):
    """The text of the error that a call raises on this rank; the others wait for it at the end of the save.

    A save ``apart`` waits for no other rank.
    """
    said = None
    try:
        call()
    except (UsageError, OutputError) as exc:
        said = str(exc)
    if apart or said is not None:
        dist.barrier()
    return said


def full(*_):
    raise OutputError("the disk is full")


def work(rank, folder):
    """What the ranks do in one process each; what they find goes into files."""
    model, optimizer = make()
    train(model, optimizer)
    state = state_of(model, optimizer)
    before = whole(state)
    # Each rank has its own of these: torch gives each its own again.
    own = {"random": torch.full((3,), float(rank)), "seed": 100 + rank}
    save_alone(state | {"own": own}, folder / "saved")

    model, optimizer = make(seed=1)
    state = state_of(model, optimizer) | {"own": {"random": torch.zeros(3), "seed": 0}}
    dcp.load(state, storage_reader=Ckpt8StorageReader(folder / "saved"))
    assert state["own"]["random"].eq(rank).all()
    assert state["own"]["seed"] == 100 + rank
    assert all(torch.equal(value, before[name]) for name, value in whole(state).items())

    said = {
        "again": refusal(lambda: save_alone(state, folder / "saved")),
        "lone": refusal(lambda: save_alone(state, folder / "lone", no_dist=True), apart=True),
    }
    first = dist.new_group([0])
    if not rank:
        lone = {"w": torch.ones(3)}
        said["group"] = refusal(lambda: save_alone(lone, folder / "group", process_group=first), apart=True)
    else:
        dist.barrier()
    # The first save fails on one rank, and the second on those that have saved already.
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(RankPlan, "write", full)
        said["full"] = refusal(lambda: save_alone({"w": torch.ones(3)}, folder / "mixed"))
    said["second"] = refusal(lambda: save_alone({"w": torch.ones(3)}, folder / "mixed"))
    # A save of all ranks together replaces the parts.
    shutil.copytree(folder / "saved", folder / "replaced") if not rank else None
    dist.barrier()
    dcp.save(state, storage_writer=Ckpt8StorageWriter(folder / "replaced", preset="lossless"))
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    if not rank:
        torch.save(before, folder / "before.pt")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(work, request.param, folder)
    return folder, request.param


def test_every_rank_publishes_its_part(saved):
    folder, world = saved
    assert {*names_in(folder / "saved")} == {
        each for k in range(world) for each in (f"__{k}_0.ckpt8", f"ckpt8-dcp.{k}.json")
    }
    # One process loads all of them.
    before = torch.load(folder / "before.pt")
    found = load({name: torch.full_like(tensor, -1) for name, tensor in before.items()}, folder / "saved")
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_the_parts_make_the_index_of_a_save_of_all_ranks(saved):
    folder, world = saved
    parts, whole = read_index(folder / "saved"), read_index(folder / "replaced")
    assert parts.joined == world
    assert whole.joined == 0
    assert {*names_in(folder / "replaced")} == {*whole.files, "ckpt8-dcp.json"}
    assert parts.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        joined = parts.tensors[name]
        assert (joined.shape, joined.dtype, joined.is_whole) == (tensor.shape, tensor.dtype, tensor.is_whole)
        assert [box[1:] for box in joined.boxes()] == [box[1:] for box in tensor.boxes()]
    assert parts.objects.keys() == whole.objects.keys()
    assert parts.paths == whole.paths


def said_in(folder, world):
    """What the ranks were told, by rank."""
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(world)]


def test_what_ranks_cannot_do_on_their_own_is_refused(saved):
    folder, world = saved
    for rank, said in enumerate(said_in(folder, world)):
        assert said["again"] == (
            f"{folder / 'saved'}: holds a checkpoint, which ranks cannot replace without collectives; give another "
            "directory"
        )
        part = "use_collectives=False makes one checkpoint of all ranks of the job"
        assert said["lone"].startswith(part)
        assert rank or said["group"].startswith(part)
    assert not any((folder / name).exists() for name in ("lone", "group"))


def test_a_save_does_not_mix_its_parts_with_those_of_another(saved):
    folder, world = saved
    said = said_in(folder, world)
    assert [each["full"] for each in said] == [None, "the disk is full", *[None] * (world - 2)]
    assert all("which ranks cannot replace without collectives" in each["second"] for each in said)
    assert len(list((folder / "mixed").glob("ckpt8-dcp.*.json"))) == world - 1
    with pytest.raises(InputError, match="not those of ranks 1; the save was interrupted"):
        read_index(folder / "mixed")


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved[0] / "saved", tmp_path / "x")
    return tmp_path / "x", saved[1]


def test_an_incomplete_set_is_refused(copied):
    folder, world = copied
    (folder / "ckpt8-dcp.1.json").unlink()
    with pytest.raises(InputError) as caught:
        read_index(folder)
    assert str(caught.value) == (
        f"{folder}: has {world - 1} of {world} parts of its index, not those of ranks 1; the save was interrupted "
        "before it was complete"
    )
    with pytest.raises(CheckpointException, match="parts of its index, not those of ranks 1"):
        load({"progress": {"seen": 0}}, folder)


@pytest.mark.parametrize(("fields", "said"), [
    ({"part": lambda part: part | {"save": "x"}}, "ranks 0, 1 have written parts of different saves"),
    ({"part": lambda part: part | {"world": 9}}, "have written parts of different saves"),
    ({"part": lambda part: part | {"rank": 0}}, "ckpt8-dcp.1.json: is not the part of the index that its name says"),
    ({"part": lambda _: None}, "ckpt8-dcp.1.json: is not the part of the index that its name says"),
    ({"part": lambda part: part | {"rank": part["world"]}}, "malformed at 'rank'"),
    ({"part": lambda part: part | {"rank": True}}, "malformed at 'rank'"),
    ({"files": lambda files: [*files, ["more", "0" * 64]]}, "the part of a rank names 2 files"),
    ({"objects": lambda objects: objects | {"model.0.weight": [0, 0, 1]}, "tensors": lambda _: {}},
     "is a tensor to some ranks"),
    ({"tensors": lambda each: {name: tensor | {"dtype": "int8"} for name, tensor in each.items()}}, "are not alike"),
])  # fmt: skip
def test_parts_that_do_not_belong_together_are_refused(fields, said, copied):
    folder, _ = copied
    change_index(folder, lambda tree: tree | {key: fields[key](tree.get(key)) for key in fields}, "ckpt8-dcp.1.json")
    with pytest.raises(InputError) as caught:
        read_index(folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_faster_rank_does_not_count_as_a_checkpoint_that_must_stay(tmp_path, monkeypatch):
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(storage, "save_of_all_ranks", lambda _: "this")
    ShardedIndex({}, {}, {}, part=Part(0, 2, "this")).write(tmp_path)
    slower = Ckpt8StorageWriter(tmp_path, overwrite=False)
    slower.set_up_storage_writer(False, rank=1, use_collectives=False)
    assert [plan.storage_data for plan in slower.prepare_global_plan([SavePlan([])])] == [1]
