"""What sharded runs may come with: every type, empty shards, parts of a checkpoint, groups of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from modes_kit import BEFORE, call_all, state_of
from modes_nets import Run
from packed_kit import load, raw
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

WORLD = 4
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
SHAPES = {"rows": (7, 6), "few": (3,), "none": (0, 4)}


def save(state, path, **options):
    dcp.save(state, storage_writer=Ckpt8StorageWriter(path, preset="lossless"), planner=Ckpt8SavePlanner(), **options)


def value(shape, dtype):
    """Different numbers that every type but bool holds."""
    numel = torch.Size(shape).numel()
    numbers = torch.ones(numel).exp2() if dtype is torch.float8_e8m0fnu else torch.arange(numel) % 8
    return numbers.to(dtype).view(shape)


def sharded(whole, dim, mesh):
    """A DTensor of which this rank has its part, as FSDP2 cuts it."""
    parts = list(whole.view(torch.uint8).chunk(mesh.size(), dim)) if whole.dtype.itemsize == 1 else None
    parts = [part.view(whole.dtype) for part in parts] if parts else list(whole.chunk(mesh.size(), dim))
    rank = mesh.get_local_rank()
    mine = parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)
    return DTensor.from_local(
        mine.clone(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def every_type(dim, mesh, make=value):
    state = {
        f"{name} {dtype}": sharded(make(shape, dtype), min(dim, len(shape) - 1), mesh)
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }
    return state | {"step": torch.tensor(7, dtype=torch.int32), "flag": torch.tensor(True)}


def save_types(folder):
    save({"values": every_type(0, init_device_mesh("cpu", (dist.get_world_size(),)))}, folder / "types")


def load_types(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in (0, 1):
        wanted = every_type(dim, mesh)
        state = {"values": every_type(dim, mesh, lambda shape, dtype: torch.zeros(shape, dtype=dtype))}
        state["values"] |= {"step": torch.tensor(0, dtype=torch.int32), "flag": torch.tensor(False)}
        dcp.load(state, storage_reader=Ckpt8StorageReader(folder / "types"))
        for name, each in state["values"].items():
            mine, theirs = (getattr(one, "_local_tensor", one) for one in (each, wanted[name]))
            assert mine.shape == theirs.shape, name
            assert torch.equal(raw(mine), raw(theirs)), name


def save_groups(folder):
    """Two halves of the ranks that save without each other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(groups[half], "cpu")
    state = {"w": sharded(value((7, 6), torch.float32) + half, 0, mesh)}
    save(state, folder / f"half-{half}", process_group=groups[half])


def save_run(folder):
    run = Run("uneven", "fsdp2", "AdamW")
    run.train(range(BEFORE))
    save(state_of(run, flat=False), folder / "run")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    run_ranks(call_all, WORLD, [(call, folder) for call in (save_types, save_groups, save_run)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_every_type_at_another_world_size(saved, world):
    run_ranks(call_all, world, [(load_types, saved)])


def test_groups_of_ranks_save_without_each_other(saved):
    for half in (0, 1):
        state = load({"w": torch.zeros(7, 6)}, saved / f"half-{half}")
        assert torch.equal(state["w"], value((7, 6), torch.float32) + half)
        assert sorted(path.name for path in (saved / f"half-{half}").glob("*.ckpt8")) == ["__0_0.ckpt8", "__1_0.ckpt8"]


def test_one_process_gathers_what_it_names(saved):
    found = _load_state_dict_from_keys(
        {"model.up.weight", "optimizer.state"}, storage_reader=Ckpt8StorageReader(saved / "run")
    )
    run = Run("uneven", "plain", "AdamW")
    run.train(range(BEFORE))
    assert torch.equal(found["model"]["up.weight"], run.model.up.weight)
    for name, param in run.model.named_parameters():
        for key, each in run.optimizer.state[param].items():
            assert torch.equal(found["optimizer"]["state"][name][key], each), (name, key)
