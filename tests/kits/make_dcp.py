"""Distributed checkpoints made by the ranks of a gloo job, and training resumed from them: see ``work``.

Every rank sees all data, so that losses do not depend on their number.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

WIDTH, HIDDEN = 64, 257
BEFORE, AFTER = 4, 6


class Net(torch.nn.Module):
    """Two large matrices, of which the first has rows that two ranks cannot share evenly."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("running_mean", torch.zeros(80, 80))

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu())


def make(sharded=False):
    """A model and its optimizer, before the first step."""
    torch.manual_seed(0)
    net = Net()
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (net.up, net.down):
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
    groups = [{"params": [net.up.weight, net.down.weight]}, {"params": [net.up.bias, net.down.bias]}]
    groups.append({"params": list(net.norm.parameters()), "weight_decay": 0.0})
    return net, torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.99))


def step(net, optimizer, number):
    """One step of training; its loss."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(32, WIDTH, generator=generator)
    optimizer.zero_grad()
    loss = (net(x) - x.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def states(net, optimizer, *, flat=False):
    """Everything that a training run keeps."""
    model, state = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model, "optimizer": state, "iteration": BEFORE, "history": {"losses": [1.5, torch.ones(3)]}}


def save(saved, path, **options):
    """``dcp.save`` without its warnings, by all ranks or in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=not dist.is_initialized())
    return path


def save_all(net, optimizer, root):
    """Every layout: nested, flattened, compressed, several files for each rank, and as torchtitan does (imitation)."""
    nested, flat = states(net, optimizer), states(net, optimizer, flat=True)
    save(nested, root / "nested")
    save(flat, root / "flat")
    save(nested, root / "zstd", _extensions=[ZStandard()])
    save(nested, root / "threads", thread_count=3)
    save({**flat["model"], "optimizer": flat["optimizer"], "train_state": {"step": torch.tensor(4)}}, root / "titan")


def load(path, net, optimizer, *, flat=False):
    """``dcp.load`` into a model and its optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = states(net, optimizer, flat=flat)
        dcp.load(loaded, checkpoint_id=path, no_dist=not dist.is_initialized())
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_state_dict(
            net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
        )
    return loaded


def _train(root):
    net, optimizer = make(sharded=True)
    for number in range(BEFORE):
        step(net, optimizer, number)
    save_all(net, optimizer, root)
    torch.save(get_state_dict(net, optimizer)[0], root / f"rank{dist.get_rank()}.pt")
    return [step(net, optimizer, BEFORE + number) for number in range(AFTER)]


def _resume(directories):
    found = {}
    for directory in directories:
        net, optimizer = make(sharded=True)
        loaded = load(directory, net, optimizer, flat="flat" in directory)
        assert loaded["iteration"] == BEFORE
        found[directory] = [step(net, optimizer, BEFORE + number) for number in range(AFTER)]
    return found


def work(rank, action, root, arguments):
    """Train, save on the way in every layout, train on; or load each directory of ``arguments`` and train on.

    Losses go to ``root``/ACTION.json.
    """
    found = _train(Path(root)) if action == "train" else _resume(arguments)
    if rank == 0:
        Path(root, f"{action}.json").write_text(json.dumps(found))
