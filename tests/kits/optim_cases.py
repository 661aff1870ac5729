"""Seeded parameters and gradients, and the registered optimizers with arguments that exercise every term."""

from __future__ import annotations

import torch

import ckpt8.optim

ARGUMENTS = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "weight_decay": 0.01},
    "StableAdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "CAME": {"lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.01},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Adafactor": {"lr": 1e-2, "weight_decay": 0.1},
    "Ema": {"lr": 1e-1, "weight_decay": 0.1},
}
"""Every registered optimizer must stand here, and the one of ``own_optimizer_kit``."""

PLAIN = {"moment1": "lossless", "moment2": "lossless"}
SHAPES = ((70, 97), (100,), (3, 20, 33, 40), (66_000,), ())
"""Ragged groups, small tensors, more than two dimensions, a large vector, a scalar."""


def make_params(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for shape in shapes]


def set_grads(params, step, scale=0.01):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * scale * (1 + step % 3)
        param.grad = grad.to(param.device, param.dtype)


def build(name, params, **more):
    return getattr(ckpt8.optim, name)(params, **{**ARGUMENTS[name], **more})


def advance(optimizer, params, first, last):
    for step in range(first, last):
        set_grads(params, step)
        optimizer.step()


def clones(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def trained(name, steps, dtype=torch.float32, shapes=SHAPES, **more):
    """Parameters and their optimizer after some steps."""
    params = make_params(dtype, shapes)
    optimizer = build(name, params, **more)
    advance(optimizer, params, 0, steps)
    return params, optimizer


def assert_same_state(one, other):
    """Equal bit for bit, element types included."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for identifier, state in one["state"].items():
        assert state.keys() == other["state"][identifier].keys()
        for key, value in state.items():
            found = other["state"][identifier][key]
            assert value.dtype == found.dtype, key
            assert value.shape == found.shape, key
            assert torch.equal(value.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8)), key
