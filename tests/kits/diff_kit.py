"""Runs of which two checkpoints are compared, and the figures of ``diff`` computed again with torch in float64."""

from __future__ import annotations

import copy
import json

import torch
from gpt_kit import GPTConfig, Run, RunConfig
from safetensors.torch import save_file

LAYERS = {f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "ln_f")}
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=48, block_size=16)


def gpt_steps(folder, steps=(3, 4)):
    """Checkpoints of a GPT after so many steps of AdamW, in nanoGPT's layout."""

    def adamw(groups, lr):
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))

    run = Run(SMALL, RunConfig(horizon=10, batch_size=2, warmup=6, eval_batches=1), adamw)
    paths = []
    for step in steps:
        while run.step < step:
            run.advance()
        paths.append(folder / f"step-{step}.pt")
        torch.save(run.checkpoint(), paths[-1])
    return paths


def parameter_names(checkpoint):
    """Names of the optimizer's parameters by number: those that decay, then the rest, as the run has them."""
    weights = {name: w for name, w in checkpoint["model"].items() if name != "lm_head.weight"}
    names = [name for name, w in weights.items() if w.dim() >= 2] + [name for name, w in weights.items() if w.dim() < 2]
    return dict(enumerate(names))


def tensors_of(tree, path=""):
    """All tensors of plain containers by path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    found = {}
    for key, value in items:
        found |= tensors_of(value, f"{path}.{key}" if path else str(key))
    return found


def expected(a, b):
    """The figures of two finite tensors, in float64 and all at once."""
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    d = y - x
    norm = float(x.norm())
    return {
        "elements": x.numel(),
        "differ": int((x != y).sum()),
        "max_change": float(d.abs().max()),
        "relative": float(d.norm()) / norm if norm else 0.0,
        "rms_change": float(d.square().mean().sqrt()),
        "rms": float(x.square().mean().sqrt()),
    }


def by_name(facts):
    """The tensors that both have, by the path in the first."""
    return {each["name"]: each for each in facts["tensors"]["both"]}


def saved(path, tree, **options):
    """``torch.save``, and the path."""
    torch.save(tree, path, **options)
    return path


def trainer_directory(root, checkpoint, step):
    """A checkpoint of a GPT in the files that the Trainer of transformers writes."""
    root.mkdir()
    weights = {name: w.clone() for name, w in checkpoint["model"].items() if name != "lm_head.weight"}
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    torch.save(checkpoint["optimizer"], root / "optimizer.pt")
    torch.save({"last_epoch": step}, root / "scheduler.pt")
    (root / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [{"loss": 2.5}]}))
    (root / "config.json").write_text('{"hidden": 48}')
    return root


def named(checkpoint, order=None):
    """The checkpoint with ``param_names`` in its groups, its parameters numbered in ``order``."""
    names = parameter_names(checkpoint)
    old = {name: number for number, name in names.items()}
    numbers = {name: k for k, name in enumerate(order or names.values())}
    optimizer = copy.deepcopy(checkpoint["optimizer"])
    for group in optimizer["param_groups"]:
        group["param_names"] = [names[number] for number in group["params"]]
        group["params"] = [numbers[name] for name in group["param_names"]]
    optimizer["state"] = {numbers[name]: optimizer["state"][old[name]] for name in numbers}
    return {**checkpoint, "optimizer": optimizer}
