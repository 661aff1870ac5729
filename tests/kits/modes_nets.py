"""Small models and optimizers for every way to shard them: see SETUPS.

Every rank sees the same batches, so that losses depend on the world size by rounding alone.
"""

from __future__ import annotations

import came_pytorch
import optimi
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt8.optim

WIDTH = 96
DEPTH = 4
CPU = torch.device("cpu")


class Net(nn.Module):
    """Two matrices, a norm, three gains, which four ranks cannot share, and a large buffer."""

    def __init__(self, hidden=257, *, tied=False, frozen=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.gains = nn.Parameter(torch.rand(3))
        self.register_buffer("running", torch.randn(80, 80))
        self.mirror = nn.Linear(WIDTH, hidden, bias=False) if tied else None
        if tied:
            self.mirror.weight = self.up.weight
        if frozen:
            self.up.weight.requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, x):
        x = self.norm(x.to(self.gains.dtype)) * self.gains.sum()
        hidden = self.up(x).tanh()
        if self.mirror is not None:
            hidden = hidden + self.mirror(x).sin()
        return self.down(hidden).float()


class Deep(nn.Module):
    """Layers of which a stage of a pipeline has some, under the names that the whole model gives them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(DEPTH)})

    def forward(self, x):
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return x


NETS = {
    "uneven": Net,
    "even": lambda: Net(256),
    "uneven8": lambda: Net(521),  # shards of eight ranks that are large enough to be packed
    "tied": lambda: Net(tied=True),
    "frozen": lambda: Net(frozen=True),
    "bf16": lambda: Net().bfloat16(),
    "ema": Net,
    "deep": Deep,
}


class ShardedCAME(came_pytorch.CAME):
    """came-pytorch's, whose state begins as DTensors where parameters are: the published one mixes in plain tensors."""

    def _rms(self, tensor):
        return _whole(super()._rms(tensor))

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.state[param]:
                    self.state[param] = self._zeros(param)
        return super().step(closure)

    @staticmethod
    def _zeros(param):
        zeros = {"step": 0, "RMS": torch.zeros(()), "exp_avg": torch.zeros_like(param)}
        if param.dim() < 2:
            return zeros | {"exp_avg_sq": torch.zeros_like(param)}
        for kind in ("sq", "res"):
            for axis, dim in (("row", -1), ("col", -2)):
                mean = torch.zeros_like(param).mean(dim)
                if isinstance(mean, DTensor):
                    # An average over what ranks have cut is the same on all; some versions of torch would cut it anew.
                    over = param.dim() + dim
                    mean = mean.redistribute(
                        placements=[
                            Replicate() if each.is_partial() or getattr(own, "dim", None) == over else each
                            for each, own in zip(mean.placements, param.placements, strict=True)
                        ]
                    )
                zeros[f"exp_avg_{kind}_{axis}"] = mean
        return zeros


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_matrix(name):
    return name.endswith("weight") and "norm" not in name


def make_optimizer(name, model):
    """AdamW, StableAdamW or CAME. ``ckpt8.optim`` has the latter two; it steps on plain tensors, not on DTensors."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    # By name: FSDP1 makes every parameter a vector.
    groups = [
        {"params": [each for name, each in trained if _is_matrix(name) is matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    spread = any(isinstance(each, DTensor) for _, each in trained)
    exact = {"moment1": "lossless", "moment2": "lossless"}
    match name:
        case "AdamW":
            return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.99), foreach=False)
        case "StableAdamW" if spread:
            return optimi.StableAdamW(groups, lr=2e-3, triton=False, foreach=False)
        case "StableAdamW":
            return ckpt8.optim.StableAdamW(groups, lr=2e-3, **exact)
        case "StableAdamW8":
            return ckpt8.optim.StableAdamW(groups, lr=2e-3)
        case "CAME" if spread:
            return ShardedCAME(groups, lr=2e-4)
        case "CAME":
            return ckpt8.optim.CAME(groups, lr=2e-4, moment1="lossless")
    raise ValueError(name)


def _mesh(*names):
    world = dist.get_world_size()
    shape = (world,) if len(names) == 1 else (2, world // 2) if world > 1 else (1, 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _tensor_parallel(net, mesh):
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp_fsdp2(net):
    mesh = _mesh("shard", "tensor")
    _tensor_parallel(net, mesh["tensor"])
    return fully_shard(net, mesh=mesh["shard"])


def _fsdp1(net, **options):
    return FullyShardedDataParallel(net, device_id=CPU, **options)


def _stage(net):
    """The layers of this rank's stage, in a model that has the others' no more."""
    per_stage = DEPTH // dist.get_world_size()
    first = per_stage * dist.get_rank()
    for number in set(range(DEPTH)) - set(range(first, first + per_stage)):
        del net.layers[str(number)]
    return net


SETUPS = {
    "plain": lambda net: net,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp2": lambda net: fully_shard(net, mesh=_mesh("shard")),
    "hsdp": lambda net: fully_shard(net, mesh=_mesh("replicate", "shard")),
    "tp": lambda net: _tensor_parallel(net, _mesh("tensor")),
    "tp_fsdp2": _tp_fsdp2,
    "offload": lambda net: fully_shard(net, mesh=_mesh("shard"), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp1": _fsdp1,
    "fsdp1_orig": lambda net: _fsdp1(net, use_orig_params=True),
    "fsdp1_mesh": lambda net: _fsdp1(net, use_orig_params=True, device_mesh=_mesh("shard")),
    "pipeline": _stage,
}
"""How a model is shared among ranks, by name: ``plain`` has all of it on every rank."""

FULL = "_full"
"""After the name of a setup: its state dicts are full ones, on rank 0."""


class Run:
    """A model and its optimizer, in training; ``average`` is an EMA copy, where the run has one."""

    def __init__(self, net, setup, optimizer, seed=0):
        torch.manual_seed(seed)
        self.staged = setup == "pipeline"
        self.full = setup.endswith(FULL)
        shard = SETUPS[setup.removesuffix(FULL)]
        self.model = shard(NETS[net]())
        self.optimizer = make_optimizer(optimizer, self.model)
        self.average = None
        if net == "ema":
            self.average = shard(NETS[net]()).requires_grad_(requires_grad=False)

    def train(self, steps):
        """The loss of every step."""
        return [self._step(number) for number in steps]

    def _step(self, number):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))
        target = x.roll(1, dims=1)
        self.optimizer.zero_grad()
        loss = self._staged(x, target) if self.staged else self._whole(x, target)
        self.optimizer.step()
        if self.average is not None:
            with torch.no_grad():
                for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
        return loss

    def _whole(self, x, target):
        loss = (self.model(x) - target).square().mean()
        loss.backward()
        return loss.item()

    def _staged(self, x, target):
        rank, world = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(self.model, rank, world, CPU)
        schedule = ScheduleGPipe(stage, 1, loss_fn=lambda found, wanted: (found - wanted).square().mean())
        losses = []
        schedule.step(
            *([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank == world - 1 else {})
        )
        loss = losses[0].detach() if losses else torch.zeros(())
        dist.broadcast(loss, world - 1)
        return loss.item()
