"""A small FSDP2 run in gloo processes that meet in a file; one process where the world has one."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter
from ckpt8.integrations.dcp.sharing import compress_share

WIDTH = 96
STEPS = 4


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 3 * WIDTH + 1), torch.nn.Tanh(), torch.nn.Linear(3 * WIDTH + 1, WIDTH)
    )
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model, optimizer, steps):
    """Every rank sees the same batches, so that losses do not depend on the world size."""
    losses = []
    for step in steps:
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model, optimizer, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": moments, "progress": {"seen": 7, "note": "half way"}}


def put(model, optimizer, state, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )


def _full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def whole_state(model, optimizer):
    """Every tensor in full, by name."""
    state = state_of(model, optimizer)
    found = {f"model.{name}": _full(value).clone() for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        found |= {f"{name}.{key}": _full(value).clone() for key, value in values.items()}
    return found


def save_run(folder, preset="lossless", flat=False, asynchronous=False):
    """Train, save, go on: losses after the save, and the state at the save."""
    model, optimizer = make()
    train(model, optimizer, range(STEPS))
    before = whole_state(model, optimizer)
    state, writer = state_of(model, optimizer, flat), Ckpt8StorageWriter(Path(folder) / "saved", preset=preset)
    if asynchronous:
        # A group of its own: the ranks talk about the save while they train.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        pending = dcp.async_save(state, storage_writer=writer, process_group=group)
    else:
        dcp.save(state, storage_writer=writer)
    losses = train(model, optimizer, range(STEPS, 2 * STEPS))
    if asynchronous:
        pending.result()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(before, Path(folder) / "before.pt")
        (Path(folder) / "losses.json").write_text(json.dumps(losses))


def save_both(folder, presets):
    """Train, and save one state to the plain directory ``plain``, packed with each preset, and by each rank alone."""
    model, optimizer = make()
    train(model, optimizer, range(STEPS))
    state = state_of(model, optimizer)
    state["empty"] = torch.zeros(0, 3)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(Path(folder) / "plain"))
    for preset in presets:
        dcp.save(state, storage_writer=Ckpt8StorageWriter(Path(folder) / preset, preset=preset))
    parts = Ckpt8StorageWriter(Path(folder) / "parts", preset="lossless")
    dcp.save(state, storage_writer=parts, use_collectives=False)
    dist.barrier()


def share(folder):
    """Both ranks pack shares of ``plain``: all is well, then a slice is damaged, without and with an older checkpoint.

    The error of each rank goes into a file.
    """
    folder, rank = Path(folder), dist.get_rank()
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
    train(replica, optimizer, range(STEPS))
    for name, planner, options in (
        ("spread", DefaultSavePlanner(), {"budget": 2}),
        ("together", Ckpt8SavePlanner(), {"budget": 2}),
        ("flash", DefaultSavePlanner(), {}),
        ("lossless", DefaultSavePlanner(), {"preset": "lossless"}),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            writer = Ckpt8StorageWriter(Path(folder) / name, **options)
            dcp.save(state_of(replica, optimizer), storage_writer=writer, planner=planner)
        if dist.get_rank() == 0:
            ours = [str(each.message) for each in said if str(folder) in str(each.message)]
            (Path(folder) / f"{name}.json").write_text(json.dumps(ours))


def load_run(folder, flat=False):
    """Load into a fresh model and optimizer and go on; the same figures beside the others."""
    model, optimizer = make()
    state = state_of(model, optimizer, flat)
    state["progress"] = {"seen": 0, "note": ""}
    dcp.load(state, storage_reader=Ckpt8StorageReader(Path(folder) / "saved"))
    assert state["progress"] == {"seen": 7, "note": "half way"}
    put(model, optimizer, state, flat)
    after = whole_state(model, optimizer)
    losses = train(model, optimizer, range(STEPS, 2 * STEPS))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(after, Path(folder) / "after.pt")
        (Path(folder) / "resumed.json").write_text(json.dumps(losses))


def _call(rank, calls):
    for call, options in calls:
        call(**options)


def run(world, *calls):
    """Run calls, one after the other, in ``world`` processes; in this one where the world has one."""
    if world == 1:
        _call(0, calls)
    else:
        run_ranks(_call, world, calls)
