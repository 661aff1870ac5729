"""Trains the checkpoint to measure, if the user gives none: a GPT of the given size, on real text.

It has its full width and depth and takes real steps of AdamW; no tensor is tiled or drawn at random. To save memory,
each parameter takes its step as soon as its gradient is known, and frees the gradient: training takes 12 bytes per
parameter, as the checkpoint does, not 16. There is no clipping, which needs all gradients at once. Larger networks take
fewer steps: their weights are then still close to their initial values, while moments are those of real gradients from
the first step on.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ckpt8.cli.bench.gpt import Run, RunConfig, config_for_bytes
from ckpt8.cli.bench.sizes import available_memory, in_gigabytes
from ckpt8.core.errors import UsageError

MIN_STEPS, MAX_STEPS = 4, 100
_STEP_BYTES = 4e9
"""Bytes of checkpoint that all steps together update, within the numbers of steps above."""

_BATCH, _RATE, _WARMUP = 2, 5e-5, 2
_WORKING_MEMORY = 1 << 30
"""For activations, the largest gradients and torch itself."""


def steps_for(nbytes: int) -> int:
    """The number of training steps of a checkpoint of this size."""
    return int(min(MAX_STEPS, max(MIN_STEPS, _STEP_BYTES / nbytes)))


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Train a checkpoint of ``size`` bytes, write it to ``target`` and describe it. Raises UsageError."""
    return train_checkpoint(Path(job["target"]), int(job["size"]))


def train_checkpoint(target: Path, nbytes: int) -> dict[str, Any]:
    """Write a checkpoint of about ``nbytes`` bytes and describe it. Raises UsageError."""
    try:
        config = config_for_bytes(nbytes)
    except ValueError as exc:
        raise UsageError(f"--size {nbytes}: {exc}") from exc
    needed, available = 12 * config.n_params + _WORKING_MEMORY, available_memory()
    if available is not None and available < needed:
        raise UsageError(
            f"--size {nbytes}: to train it takes {in_gigabytes(needed)} of memory and {in_gigabytes(available)} are "
            "available; take a smaller size, or give a checkpoint"
        )
    steps = steps_for(nbytes)
    settings = RunConfig(horizon=steps, batch_size=_BATCH, lr=_RATE, warmup=_WARMUP, eval_batches=1)
    run = Run(config, settings, lambda groups, lr: torch.optim.AdamW(groups, lr=lr))
    update_in_backward(run)
    while run.step < steps:
        for group in run.optimizer.param_groups:
            group["lr"] = settings.lr_at(run.step)
        run.loss(run.step).backward()  # type: ignore[no-untyped-call]
        run.step += 1
    run.validate()
    torch.save(run.checkpoint(), target)
    return {"parameters": config.n_params, "steps": steps, "loss": run.best_val_loss.item(), **asdict(config)}


def update_in_backward(run: Any) -> None:
    """Update every parameter of a ``Run`` with an optimizer of its own, during the backward pass.

    ``run.optimizer`` shares the states of these optimizers; its groups have the settings of the next steps.
    """
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            alone = torch.optim.AdamW([{**group, "params": [param]}])
            # The groups are two objects: the hook reads the run's learning rate before each step.
            run.optimizer.state[param] = alone.state[param]

            def update(_: torch.Tensor, alone: Any = alone, group: dict[str, Any] = group) -> None:
                alone.param_groups[0]["lr"] = group["lr"]
                alone.step()
                alone.zero_grad()

            param.register_post_accumulate_grad_hook(update)
