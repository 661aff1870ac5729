"""A small real run whose checkpoints form chains: a network that a few steps of AdamW change between two of them."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import nn

SIZES = (96, 160, 80)


class SmallRun:
    """Trains a small network on random data, the same for the same seed."""

    def __init__(self, seed=0, sizes=SIZES, dtype=torch.float32, lr=1e-3, optimizer=torch.optim.AdamW):
        self.data = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.sizes = sizes
        self.model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).to(dtype)
        self.optimizer = optimizer(self.model.parameters(), lr=lr)

    def advance(self, steps):
        """Take steps; return the checkpoint after them."""
        for _ in range(steps):
            x = torch.randn(16, self.sizes[0], generator=self.data).to(next(self.model.parameters()).dtype)
            (self.model(x) - x.roll(1)[:, : self.sizes[-1]]).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.checkpoint()

    def checkpoint(self):
        """The state dicts of model and optimizer, as they are now."""
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, tree):
        """Go on from a checkpoint."""
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])

    def set_rate(self, lr):
        """Change the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
