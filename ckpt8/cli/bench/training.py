"""The checkpoint that is measured where none is given: a GPT of the size asked for, trained on real text.

It has its full width and depth and takes real steps of AdamW; nothing in it is grown, tiled or drawn. So that it fits
into memory, each parameter is updated as soon as its gradient is known, and the gradient let go: training takes
the 12 bytes per parameter that the checkpoint has, not 16. Only clipping, which needs all gradients at once, is left
out. Larger networks take fewer steps: their weights are then still close to their initial values, while moments are
those of real gradients from the first step on.
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
"""So many bytes of checkpoint are updated in all, where the numbers of steps above allow it."""

_BATCH, _RATE, _WARMUP = 2, 5e-5, 2
_WORKING_MEMORY = 1 << 30
"""For activations, the largest gradients and torch itself."""


def steps_for(nbytes: int) -> int:
    """How many steps a checkpoint of this size is trained."""
    return int(min(MAX_STEPS, max(MIN_STEPS, _STEP_BYTES / nbytes)))


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Train a checkpoint of ``size`` bytes, write it to ``target`` and say what it is. Raises UsageError."""
    return train_checkpoint(Path(job["target"]), int(job["size"]))


def train_checkpoint(target: Path, nbytes: int) -> dict[str, Any]:
    """Write a checkpoint of about ``nbytes`` bytes and say what it is. Raises UsageError."""
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
    """Have every parameter of a ``Run`` updated by an optimizer of its own while gradients are computed.

    The states of these are the state of ``run.optimizer``, whose groups say how the next steps are made.
    """
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            alone = torch.optim.AdamW([{**group, "params": [param]}])
            # The groups stay two objects: what is set in the run's is read before each step.
            run.optimizer.state[param] = alone.state[param]

            def update(_: torch.Tensor, alone: Any = alone, group: dict[str, Any] = group) -> None:
                alone.param_groups[0]["lr"] = group["lr"]
                alone.step()
                alone.zero_grad()

            param.register_post_accumulate_grad_hook(update)
