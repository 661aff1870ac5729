"""Runs of a tiny model: what a training script leaves on the disk."""

from __future__ import annotations

import torch

import ckpt8


def train(folder, steps, *, compressed=(), every=10, **extra):
    """Save ``step-N.pt`` after each of N x ``every`` steps; of those in ``compressed`` the container alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Linear(80, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = {}
    for step in range(1, max(steps) + 1):
        x = torch.randn(16, 64)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in steps:
            losses[step * every] = loss.item()
            tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step * every}
            path = folder / f"step-{step * every}.pt"
            torch.save({**tree, "loss": loss.item(), **extra}, path)
            if step in compressed:
                ckpt8.compress(path, preset="archive", rules=())
                path.unlink()
    return losses
