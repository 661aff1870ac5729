"""Trains the GPT of ``ckpt8 bench``: whole runs, runs in two parts, runs on other optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ckpt8.cli.bench import training
from ckpt8.cli.bench.training import GPTConfig, OptimizerFactory, RunConfig

SIZES = {
    "mini": GPTConfig(n_layer=2, n_head=4, n_embd=88, block_size=64),
    "tiny": GPTConfig(n_layer=2, n_head=4, n_embd=112),
    "10m": GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256),
}


class Run(training.Run):
    """A run that takes steps of its optimizer, and continues from a checkpoint."""

    def advance(self) -> float:
        """Take one step; return the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr_at(self.step)
        loss = self.loss(self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.run.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint, through the model's and the optimizer's own ``load_state_dict``."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step, self.best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]


def train(
    config: GPTConfig,
    optimizer_factory: OptimizerFactory,
    steps: int,
    seed: int = 0,
    *,
    start: dict[str, Any] | None = None,
    on_step: Callable[[int, float], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train until ``steps`` updates are done, from nothing or from ``start``; return the checkpoint.

    ``settings`` are fields of RunConfig. For a run in two parts, give both calls the same ``horizon``.
    """
    run = Run(config, RunConfig(**{"horizon": steps, "seed": seed, **settings}), optimizer_factory)
    if start is not None:
        run.load(start)
    while run.step < steps:
        loss = run.advance()
        if on_step is not None:
            on_step(run.step, loss)
    run.validate()
    return run.checkpoint()
