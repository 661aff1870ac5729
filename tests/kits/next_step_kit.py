"""The next step of a saved run as ckpt8 replays it from the file, against the step that its optimizer then takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import every_optimizer_kit as kit
import torch
from torch import nn

from ckpt8.checkpoint.meaning.pairing import saved_parameters
from ckpt8.checkpoint.meaning.replayed import find_rule
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources.composite import Streamer
from ckpt8.checkpoint.tree import TensorRef, read_settings

INNER = ("optimizer", "base_optimizer")
"""Where wrappers keep the optimizer that takes the step, on gradients of their own."""


@dataclass
class NextStep:
    """Of one parameter: the card, or why there is no replay, and ours against theirs.

    ``error`` is the distance between the weights over the length of the step, ``ulps`` the largest difference in units
    in the last place of the largest weight.
    """

    found: str
    ndim: int
    error: float = 0.0
    ulps: float = 0.0


def next_steps(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, seed: int = 3) -> list[NextStep]:
    """Save the run, let the optimizer step once more, and replay that step from the file with its gradients."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "run.pt")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    grads: list[Any] = []

    def keep(*_: object) -> None:
        grads[:] = [None if p.grad is None else p.grad.detach().clone() for p in params]

    for each in (optimizer, *(getattr(optimizer, name, None) for name in INNER)):
        if isinstance(each, torch.optim.Optimizer):
            each.register_step_pre_hook(keep)
    kit.step(model, optimizer, seed)
    found = []
    with open_checkpoint(folder / "run.pt") as checkpoint:
        storages = {storage.key: storage for storage in checkpoint.storages}
        streamer = Streamer(checkpoint)
        for saved in saved_parameters(checkpoint.tree, as_torch=True):
            param, start, grad = (each[saved.identifier] for each in (params, before, grads))
            group = read_settings(checkpoint, storages, saved.group)
            step = read_settings(checkpoint, storages, {"step": saved.state.get("step", group.get("step"))})["step"]
            rule = find_rule(saved.state, group, step)
            problem = rule if isinstance(rule, str) else rule.misfit(tuple(param.shape))
            if problem is not None:
                found.append(NextStep(problem, param.ndim))
                continue
            state = {}
            for each in rule.form.tensors:
                if isinstance(ref := saved.state.get(each.key), TensorRef):
                    values = torch.empty(ref.shape, dtype=ref.dtype.torch)
                    streamer.copy(ref, values)
                    state[each.key] = values.float().reshape(-1) if each.is_moment else values.float()
            weight = start.reshape(-1).clone()
            rule.advance(state, weight, grad.reshape(-1), tuple(param.shape), rule.step + 1)
            off, moved = weight - param.detach().reshape(-1), (param.detach() - start).norm()
            ulp = torch.finfo(torch.float32).eps * float(param.detach().abs().max())
            error = float(off.norm() / moved.clamp(min=1e-30))
            found.append(NextStep(rule.card.rule_id, param.ndim, error, float(off.abs().max()) / ulp))
    return found
