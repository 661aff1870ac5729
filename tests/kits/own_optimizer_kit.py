"""An optimizer that ckpt8 does not have: a rule, a class and a card, and the plain optimizer it stands for.

velocity = beta velocity + (1-beta) g;     theta = theta (1 - lr wd) - lr velocity
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ckpt8.optim import known_optimizers as known
from ckpt8.optim.cards import Card, Form, Published, StateTensor
from ckpt8.optim.packed import PackedOptimizer


def ema(blocks, whole, *, step, lr, beta, weight_decay):
    for block in blocks:
        param, grad, velocity = block.load("param", "grad", "velocity")
        velocity.mul_(beta).add_(grad.mul_(1 - beta))
        param.mul_(1 - lr * weight_decay).sub_(velocity * lr)
        yield {"param": param, "velocity": velocity}


class Ema(PackedOptimizer):
    """On packed state."""

    rule_id = "ema"

    def __init__(self, params, lr=0.01, beta=0.9, weight_decay=0.0, **packing):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay}, **packing)


class PlainEma(torch.optim.Optimizer):
    """The same steps on tensors, written for itself."""

    def __init__(self, params, lr=0.01, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                velocity = state.setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["beta"])
                p.sub_(group["lr"] * (group["weight_decay"] * p + velocity))


CARD = Card(
    rule_id="ema",
    name="Ema",
    cls="own_optimizer_kit:Ema",
    settings={"lr": 1, "beta": 1, "weight_decay": 1},
    matrix=Form("own_optimizer_kit:ema", (StateTensor("velocity", "moment1"),), "momentum"),
    needs=("beta",),
    average=lambda given: (given["beta"], 1 - given["beta"]),
    published=(Published("own_optimizer_kit", "PlainEma"),),
)


@contextmanager
def registered(*cards: Card) -> Iterator[None]:
    """With ``cards``, or the one of this file, among those that ckpt8 knows; without them again afterwards."""
    tables = known.CARDS, known.TENSORS, known.MOMENT_SLOTS, known.STATE_ROLES
    before = [dict(table) for table in tables]
    for card in cards or (CARD,):
        known.register(card)
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
