"""A small FSDP2 run in gloo processes that meet in a file, and what they save of it."""

from __future__ import annotations

import json
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_kit import WIDTH, batch, loss_of, network
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageWriter
from ckpt8.integrations.dcp.sharing import compress_share

STEPS = 4


def make(seed=0):
    model = network(seed)
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model, optimizer):
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "progress": {"seen": 7, "note": "half way"}}


def whole(state):
    """Every tensor of model and optimizer in full, by the name that a distributed checkpoint has for it."""
    flat = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        flat |= {f"optimizer.state.{name}.{key}": value for key, value in values.items()}
    return {name: getattr(value, "full_tensor", value.clone)().clone() for name, value in flat.items()}


def save_both(folder, presets):
    """Train, and save one state to the plain directory ``plain``, packed with each preset, and by each rank alone."""
    model, optimizer = make()
    train(model, optimizer)
    state = state_of(model, optimizer)
    state["empty"] = torch.zeros(0, 3)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "plain"))
    for preset in presets:
        dcp.save(state, storage_writer=Ckpt8StorageWriter(folder / preset, preset=preset))
    parts = Ckpt8StorageWriter(folder / "parts", preset="lossless")
    dcp.save(state, storage_writer=parts, use_collectives=False)
    dist.barrier()


def share(folder):
    """Both ranks pack shares of ``plain``: all is well, then a slice is damaged, without and with an older checkpoint.

    The error of each rank goes into a file.
    """
    rank = dist.get_rank()
    compress_share(folder / "plain", folder / "shared", {"preset": "lossless"}, rank, 2, overwrite=False)
    if rank == 0:
        shutil.copytree(folder / "plain", folder / "damaged")
        file = folder / "damaged" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        shutil.copytree(folder / "shared", folder / "older")
    dist.barrier()
    for target in ("nothing", "older"):
        try:
            compress_share(folder / "damaged", folder / target, {}, rank, 2, overwrite=True)
        except Exception as exc:
            (folder / f"{target}-{rank}.txt").write_text(f"{type(exc).__name__}: {exc}")
        dist.barrier()


def save_replicas(folder):
    """Save one run that both ranks have whole, with the planner of torch and with that of ckpt8.

    The warnings of each save go into a file beside it.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    train(replica, optimizer)
    for name, planner, options in (
        ("spread", DefaultSavePlanner(), {"budget": 2}),
        ("together", Ckpt8SavePlanner(), {"budget": 2}),
        ("flash", DefaultSavePlanner(), {}),
        ("lossless", DefaultSavePlanner(), {"preset": "lossless"}),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            writer = Ckpt8StorageWriter(folder / name, **options)
            dcp.save(state_of(replica, optimizer), storage_writer=writer, planner=planner)
        if dist.get_rank() == 0:
            ours = [str(each.message) for each in said if str(folder) in str(each.message)]
            (folder / f"{name}.json").write_text(json.dumps(ours))
