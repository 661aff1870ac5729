"""A small model with everything that is awkward, the table of optimizers, and bit-exact comparisons."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Factory = Callable[[Any, float], torch.optim.Optimizer]


class Net(nn.Module):
    """A tied matrix, a convolution, a norm with buffers, a frozen and a never-used parameter."""

    def __init__(self, seed: int = 0, width: int = 72, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(64, width)
            self.conv = nn.Conv1d(width, width, 3, padding=1)
            self.norm = nn.BatchNorm1d(width)
            self.body = nn.Linear(width, width)
            self.head = nn.Linear(width, 64, bias=False)
            self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(7))
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(self.embed(tokens).transpose(1, 2))
        hidden = self.norm(hidden).transpose(1, 2)
        logits = self.head(torch.tanh(self.body(hidden))).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _of(module: str, name: str, **settings: Any) -> Factory:
    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(module), name)(params, lr=lr, **settings)

    return make


OPTIMIZERS: dict[str, Factory] = {
    "torch-adamw": _of("torch.optim", "AdamW"),
    "torch-adamw-amsgrad": _of("torch.optim", "AdamW", amsgrad=True),
    "torch-adam": _of("torch.optim", "Adam", weight_decay=0.01),
    "torch-sgd": _of("torch.optim", "SGD"),
    "torch-sgd-momentum": _of("torch.optim", "SGD", momentum=0.9, nesterov=True),
    "torch-adafactor": _of("torch.optim", "Adafactor"),
    "optimi-stable-adamw": _of("optimi", "StableAdamW", triton=False),
    "optimi-adamw": _of("optimi", "AdamW", triton=False),
    "optimi-lion": _of("optimi", "Lion", triton=False),
    "came-pytorch": _of("came_pytorch", "CAME"),
    "pytorch-optimizer-came": _of("pytorch_optimizer", "CAME"),
    "pytorch-optimizer-stable-adamw": _of("pytorch_optimizer", "StableAdamW"),
    "pytorch-optimizer-lion": _of("pytorch_optimizer", "Lion"),
    "lion-pytorch": _of("lion_pytorch", "Lion"),
}


def groups(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; frozen parameters are left out."""
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    pick = (lambda name, p: (name, p)) if named else (lambda _, p: p)
    return [
        {"params": [pick(name, p) for name, p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [pick(name, p) for name, p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps on batches that are a function of the step alone."""
    model.train()
    for step in range(first, first + steps):
        tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(step))
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Factory, steps: int = 3, **settings: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(**settings)
    optimizer = make(groups(model), 0.004)
    train(model, optimizer, 0, steps)
    return model, optimizer


def snapshot(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> tuple[Any, ...]:
    """A deep copy of everything that resume could change."""
    weights = None if model is None else {name: t.detach().clone() for name, t in model.state_dict().items()}
    return weights, None if optimizer is None else copy.deepcopy(optimizer.state_dict())


def same(one: Any, other: Any) -> bool:
    """Equal in type, structure, element type, layout and every bit: tensors, arrays of numpy, trees of them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        meta = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return meta and _bits(one, other)
    if isinstance(one, np.ndarray):
        # The strides of an array without elements mean nothing.
        flags = ("c_contiguous", "f_contiguous", "writeable")
        alike = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return alike and all(getattr(one.flags, flag) == getattr(other.flags, flag) for flag in flags)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg()):
        return False
    plain = (t.resolve_conj().resolve_neg().contiguous() for t in (one, other))
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in plain))
