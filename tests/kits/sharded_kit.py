"""What the tests of frameworks share that shard a run over gloo processes: the run, and how it may go on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from frameworks_kit import check_goes_on
from ranks import run_ranks

WIDTH = 96
SAVED, LAST = 4, 8
PRESETS = ["lossless", "flash", "archive"]


def network(seed=0):
    """Two layers whose rows do not divide evenly."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 3 * WIDTH + 1), torch.nn.Tanh(), torch.nn.Linear(3 * WIDTH + 1, WIDTH)
    )


def batch(step):
    """The data of a step, the same on every rank, so that losses do not depend on their number."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model, data):
    return (model(data) - data.roll(1, dims=1)).square().mean()


def keep(folder, name, losses):
    """Write the losses of a run down, on one rank."""
    if dist.get_rank() == 0:
        (Path(folder) / f"{name}.json").write_text(json.dumps(losses))


def kept(folder, name):
    return json.loads((Path(folder) / f"{name}.json").read_text())


def ranks_of(framework):
    """A call of ``framework`` in so many processes, with the environment that torchrun gives them."""

    def call(world, *arguments):
        run_ranks(_with_environment, world, framework, arguments)

    return call


def _with_environment(rank, framework, arguments):
    world = str(dist.get_world_size())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": "29500"}
    os.environ |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": "1"}
    framework(*arguments)


def shard_on_cpu():
    """Let accelerate run FSDP in the processes of this gang, which it otherwise does on accelerators alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}

    PartialState.__init__ = init


def check_resumed(preset, folder, name, *, expected, other, moved):
    """A run that went on from a checkpoint has the losses of the uninterrupted one.

    ``moved`` says that there are more or fewer ranks now, which add up in another order.
    """
    losses, expected, other = (kept(folder, each) for each in (name, expected, other))
    assert len(losses) == len(expected) == LAST - SAVED
    if moved and preset == "lossless":
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
    else:
        check_goes_on(preset, losses, expected, other)
