"""Checkpoints of many small tensors, whose storages share entries."""

from __future__ import annotations

import torch

SIZES = (8, 33, 64, 1, 31, 40)


def adamw_state(count, seed=0, sizes=SIZES):
    """The state dicts of a model with ``count`` small parameters and of AdamW over them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(k, scale):
        return torch.randn(sizes[k % len(sizes)], generator=generator) * scale

    weights = {f"layers.{k}.lora.weight": draw(k, 0.1) for k in range(count)}
    state = {
        k: {"step": torch.tensor(7.0), "exp_avg": draw(k, 1e-3), "exp_avg_sq": draw(k, 1e-3).square()}
        for k in range(count)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    return {"model": weights, "optimizer": {"state": state, "param_groups": [{**group, "params": list(range(count))}]}}


ALL_LOSSY = ("*.exp_avg=companded8", "*.exp_avg_sq=companded8", "model.*=split24")
"""Rules that make everything lossy, however small."""


def mixed(seed=0):
    """Every element type, empty tensors, views, shapes, shared storages and large tensors beside small ones."""
    generator = torch.Generator().manual_seed(seed)
    tree = {}
    for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int16", "uint8", "bool", "complex64"):
        kind = getattr(torch, dtype)
        for k in range(12):
            raw = torch.randint(0, 2, (k * kind.itemsize,), generator=generator, dtype=torch.uint8)
            tree[f"{dtype}.{k}"] = raw.view(kind)
    tree["scalar"] = torch.tensor(3.5)
    tree["matrix"] = torch.randn(7, 9, generator=generator)
    tree["transposed"] = torch.randn(7, 9, generator=generator).t()
    tree["view"] = torch.randn(40, generator=generator)[3:20:2]
    tree["none"] = torch.empty(0, 3)
    tree["conj"] = torch.randn(6, generator=generator, dtype=torch.complex64).conj()
    tree["large"] = torch.randn(300, 256, generator=generator)
    tree["again"] = tree["matrix"]
    return tree
