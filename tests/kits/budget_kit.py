"""Checkpoints whose moments are as a run makes them, for containers under a budget."""

from __future__ import annotations

import torch

GROUP = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}


def run_of(shapes, seed=0, dtype=torch.float32):
    """A checkpoint of AdamW over random weights of these shapes, with zeros in all three."""
    generator = torch.Generator().manual_seed(seed)
    weights, state = {}, {}
    for k, shape in enumerate(shapes):
        rows = torch.randn(shape[0], generator=generator).exp().view(-1, *[1] * (len(shape) - 1))
        w, m, g = (torch.randn(shape, generator=generator) for _ in range(3))
        w, m, v = w * 0.05, m * rows * 1e-4, ((g.abs() + 0.05) * rows * 1e-3).square()
        unused = torch.rand(shape, generator=generator) < 0.02
        for x in (w, m, v):
            x[unused] = 0
        weights[f"layers.{k}.weight"] = w.to(dtype)
        state[k] = {"step": torch.tensor(90.0), "exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}
    names = list(range(len(shapes)))
    return {"model": weights, "optimizer": {"state": state, "param_groups": [{**GROUP, "params": names}]}}
