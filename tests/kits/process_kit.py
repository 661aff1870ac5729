"""Saves of torch's background process, as every rank of a gloo job makes them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter


def make():
    """A model and its optimizer after a step; sharded where there are several ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(80, 96), torch.nn.Tanh(), torch.nn.Linear(96, 80))
    if dist.get_world_size() > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 80, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer, seen):
    weights, moments = get_state_dict(model, optimizer)
    scales = torch.arange(64).to(torch.uint16) * seen
    return {"model": weights, "optimizer": moments, "progress": {"seen": seen, "scales": scales}}


def whole(state):
    """Every tensor in full, by name."""
    flat = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        flat |= {f"{name}.{key}": value for key, value in values.items()}
    flat["scales"] = state["progress"]["scales"]
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in flat.items()}


def save(state, writer, **options):
    """A save in torch's background process."""
    return dcp.async_save(
        state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **options
    )


def save_twice(folder):
    """Two saves with one writer, as torchtitan makes them, both read back; then one that is refused."""
    model, optimizer = make()
    writer = Ckpt8StorageWriter(folder / "first", preset="lossless", rules=["model.0.weight=split32"], threads=1)
    for name, seen in (("first", 7), ("second", 8)):
        state = state_of(model, optimizer, seen)
        before = whole(state)
        pending = save(state, writer, checkpoint_id=str(folder / name))
        for parameter in model.parameters():
            parameter.data.mul_(2)
        pending.result()
        found = state_of(*make(), 0)
        dcp.load(found, storage_reader=Ckpt8StorageReader(folder / name))
        assert found["progress"]["seen"] == seen
        after = whole(found)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items())
    refused = Ckpt8StorageWriter(folder / "first", overwrite=False)
    try:
        save(state_of(model, optimizer, 9), refused).result()
    except BaseException as exc:  # torch's CheckpointException is no Exception
        text = str(exc)
    else:
        text = "nothing was refused"
    (folder / f"error-{dist.get_rank()}.txt").write_text(text)


def _save(rank, folder):
    save_twice(folder)


def run(world, folder):
    """``save_twice`` in ``world`` processes."""
    run_ranks(_save, world, folder)
