"""Per-rank files as verl, SkyRL and accelerate write them, by four processes of gloo."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

WORLD = 4
WIDTH, INNER = 256, 510
MESHES = ("fsdp", "hsdp", "tp")
SHARDED = "fsdp1"
FQN = "accelerate"

WHOLE_SHAPES = ((7, 12), (33, 5), (16, 9), (3, 4), (1, 6))
"""Shapes that are spread in every way: even and uneven, and smaller than the mesh."""


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, INNER), torch.nn.Tanh(), torch.nn.Linear(INNER, WIDTH), torch.nn.LayerNorm(WIDTH)
    )


def _parallel(kind):
    """The model on a mesh: FSDP2, HSDP, or FSDP2 with tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = layers()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model


def _train(model, optimizer):
    for step in range(3):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        (model(batch) - batch.roll(1, dims=1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(value):
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value


def _save_verl(folder, rank, weights, state):
    """The files of verl's FSDPCheckpointManager; SkyRL's have the same names."""
    ending = f"world_size_{WORLD}_rank_{rank}.pt"
    torch.save(weights, folder / f"model_{ending}")
    torch.save(state, folder / f"optim_{ending}")
    extra = {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, folder / f"extra_state_{ending}")
    if rank == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
        (folder / "huggingface").mkdir()
        (folder / "huggingface" / "config.json").write_text("{}")


def _save_mesh(rank, root, kind):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model = _parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _train(model, optimizer)
    weights, state = model.state_dict(), optimizer.state_dict()
    _save_verl(root / kind, rank, weights, state)
    if kind == "fsdp":
        torch.save(get_model_state_dict(model), root / FQN / f"pytorch_model_fsdp_rank{rank}.bin")
        torch.save(get_optimizer_state_dict(model, optimizer), root / FQN / f"optimizer_0_rank{rank}.bin")
    full = {
        "model": {name: _full(value) for name, value in weights.items()},
        "optimizer": {
            "state": {at: {key: _full(value) for key, value in each.items()} for at, each in state["state"].items()},
            "param_groups": state["param_groups"],
        },
    }
    if rank == 0:
        torch.save(full, root / f"{kind}.full.pt")


def _save_fsdp1(rank, root):
    from torch.distributed import fsdp
    from torch.distributed.fsdp import StateDictType as Kind

    plain = layers()
    plain.register_parameter("tail", torch.nn.Parameter(torch.ones(2)))  # two of the ranks have nothing of it
    model = fsdp.FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _train(model, optimizer)
    here = {"offload_to_cpu": False}
    parts = fsdp.ShardedStateDictConfig(**here), fsdp.ShardedOptimStateDictConfig(**here)
    with model.state_dict_type(model, Kind.SHARDED_STATE_DICT, *parts):
        _save_verl(root / SHARDED, rank, model.state_dict(), optimizer.state_dict())
    with model.state_dict_type(model, Kind.FULL_STATE_DICT, fsdp.FullStateDictConfig(**here)):
        full = {"model": model.state_dict()}
    if rank == 0:
        torch.save(full, root / f"{SHARDED}.full.pt")


def _placements():
    """Meshes with placements for tensors of two dimensions."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    one = [(Shard(0),), (Shard(1),), (Replicate(),)]
    two = [(a, b) for a in (Shard(0), Shard(1), Replicate()) for b in (Shard(0), Shard(1), Replicate())]
    strided = [(_StridedShard(dim, split_factor=2), Shard(dim)) for dim in (0, 1)]
    return [((WORLD,), each) for each in one] + [((2, 2), each) for each in (*two, *strided)]


def _save_placed(rank, root):
    """Tensors spread in many ways, and by name where torch says that they begin."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensors, places, whole = {}, {}, {}
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((WORLD,), (2, 2))}
    for number, (mesh, placed) in enumerate(_placements()):
        for shape in WHOLE_SHAPES:
            name = f"{number}_{shape[0]}x{shape[1]}"
            whole[name] = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            sizes, offsets = compute_local_shape_and_global_offset(shape, meshes[mesh], placed)
            box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            local = whole[name][box].clone()
            tensors[name] = DTensor.from_local(
                local, meshes[mesh], placed, run_check=False, shape=whole[name].shape, stride=whole[name].stride()
            )
            places[name] = list(offsets), list(sizes)
    torch.save(tensors, root / "placed" / f"shard-{rank}.pt")
    (root / f"placed-{rank}.json").write_text(json.dumps(places))
    if rank == 0:
        torch.save(whole, root / "placed.full.pt")


def _write(rank, root):
    warnings.simplefilter("ignore")
    root = Path(root)
    for kind in MESHES:
        _save_mesh(rank, root, kind)
    _save_fsdp1(rank, root)
    _save_placed(rank, root)
    dist.barrier()


def write_rank_files(root):
    """All folders below ``root``; beside each ``NAME.full.pt``, the same in full."""
    for name in (*MESHES, SHARDED, FQN, "placed"):
        (root / name).mkdir()
    run_ranks(_write, WORLD, str(root))
