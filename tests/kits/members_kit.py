"""A small directory of real checkpoints, snapshots of trees, and containers whose manifest was tampered with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from hostile_kit import pack, unpack
from safetensors.torch import save_file

GROUP = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "lr": 1e-3, "weight_decay": 0.0}
LAYERS = 11


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layers.{k}.up.weight": torch.randn(96, 64, generator=generator) for k in range(LAYERS)}
    weights["embed.weight"] = torch.randn(128, 64, generator=generator)
    weights["norm.weight"] = torch.ones(64)
    weights["norm.bias"] = torch.zeros(64)
    return weights


def optimizer(weights, step=7):
    """The state dict of an AdamW in the layout of Trainer: what decays, in the order of the model, then the rest."""
    generator = torch.Generator().manual_seed(9)
    order = ["embed.weight", *(f"layers.{k}.up.weight" for k in range(LAYERS))]
    rest = ["norm.weight", "norm.bias"]
    state = {}
    for k, name in enumerate([*order, *rest]):
        m = torch.randn(weights[name].shape, generator=generator) * 1e-3
        state[k] = {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": m * m}
    groups = [{**GROUP, "params": list(range(len(order)))}]
    groups.append({**GROUP, "params": list(range(len(order), len(state)))})
    return {"state": state, "param_groups": groups}


def make_directory(root):
    """Sharded safetensors with their index, torch checkpoints, plain files, links, and what is empty."""
    (root / "extra" / "deep").mkdir(parents=True)
    (root / "hollow" / "inner").mkdir(parents=True)
    weights = model()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, chosen in shards.items():
        save_file({name: weights[name] for name in chosen}, root / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in shards.items() for name in chosen}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    torch.save(optimizer(weights), root / "optimizer.pt")
    torch.save({"last_epoch": 3, "seen": torch.arange(10)}, root / "extra" / "scheduler.bin")
    torch.save({"ema": {"w": torch.randn(80, 80)}}, root / "extra" / "old.pt", _use_new_zipfile_serialization=False)
    (root / "config.json").write_text('{"hidden": 64}')
    (root / "extra" / "tokens.txt").write_text("a b c\n" * 1000)
    (root / "extra" / "deep" / "nothing").touch()
    (root / "ünïcode name\n.txt").write_text("x")
    (root / "latest").symlink_to("extra/deep")
    (root / "extra" / "config").symlink_to("../config.json")
    (root / "dangling").symlink_to("not/there")
    return root


def tree(root):
    """Everything below a directory: path to bytes, link target or None for a directory."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = ("link", str(path.readlink()))
            else:
                found[key] = None if path.is_dir() else path.read_bytes()
    return found


def named_tensors(value, path=()):
    """Every tensor in dicts, lists and tuples with its dotted path."""
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value.detach()
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(part, (*path, str(key)))


def tampered(path, target, change):
    """Write ``target``: the container at ``path`` after ``change(manifest, member by path)``."""
    metadata, entries, manifest = unpack(path.read_bytes())
    change(manifest, {member["path"]: member for member in manifest["members"]})
    target.write_bytes(pack(manifest, entries, metadata))
    return target
