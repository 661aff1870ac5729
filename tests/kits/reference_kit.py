"""Mixed-precision checkpoints of one file in the layouts of several trainers. The layouts are imitations."""

from __future__ import annotations

import torch

import ckpt8

SHAPES = {
    "embed.weight": (300, 128),
    "layers.0.up.weight": (257, 128),
    "layers.0.up.bias": (257,),
    "layers.0.norm.weight": (128,),
    "layers.1.up.weight": (257, 128),
    "layers.1.up.bias": (257,),
    "layers.1.norm.weight": (128,),
}
GROUP = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
VECTORS = [name for name, shape in SHAPES.items() if len(shape) == 1]
MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]


def masters(seed=0, shapes=SHAPES):
    """fp32 weights by name; norms are ones, as in a run that has only begun."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.05
        for name, shape in shapes.items()
    }


def moments(weights, seed=1):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for k, w in enumerate(weights):
        m = torch.randn(w.shape, generator=generator) * 1e-3
        found[k] = {"step": torch.tensor(5.0), "exp_avg": m, "exp_avg_sq": m * m + 1e-12}
    return found


def adamw(weights, **each):
    """The state dict of an AdamW over ``weights``, with further state by key."""
    state = moments(weights)
    for key, values in each.items():
        for k, value in enumerate(values):
            state[k][key] = value
    return {"state": state, "param_groups": [{**GROUP, "params": list(range(len(state)))}]}


def rounded(weights):
    return {name: w.bfloat16() for name, w in weights.items()}


def flat_views(weights, padding=9):
    """The bf16 copies as views of one buffer that ends in padding."""
    buffer = torch.cat([*(w.bfloat16().flatten() for w in weights.values()), torch.zeros(padding).bfloat16()])
    views, at = {}, 0
    for name, w in weights.items():
        views[name] = buffer[at : at + w.numel()].view(w.shape)
        at += w.numel()
    return views


def in_state(key):
    def make(weights):
        return {"model": rounded(weights), "optimizer": adamw(list(weights.values()), **{key: weights.values()})}

    return make


def megatron(weights):
    groups = [[weights[name] for name in MATRICES], [weights[name] for name in VECTORS]]
    inner = adamw([*groups[0], *groups[1]])
    return {"model": rounded(weights), "optimizer": {"optimizer": inner, "fp32_from_fp16_params": groups}}


def apex(weights):
    inner = adamw(list(weights.values()))
    state = {"optimizer_state_dict": inner, "fp32_from_fp16": [list(weights.values())], "overflow": False}
    return {"model": rounded(weights), "optimizer": state}


def flat(weights):
    whole = torch.cat([w.flatten() for w in weights.values()])
    inner = adamw([whole])
    return {"module": rounded(weights), "optimizer": {"optimizer_state_dict": inner, "fp32_groups_flat": [whole]}}


def flat_buffer(weights):
    return {**flat(weights), "module": flat_views(weights)}


def flat_groups(weights):
    """Matrices and vectors in flat groups of their own, each ending in padding."""
    groups = [
        torch.cat([*(weights[name].flatten() for name in names), torch.zeros(7)]) for names in (MATRICES, VECTORS)
    ]
    inner = adamw(groups)
    return {"module": rounded(weights), "optimizer": {"optimizer_state_dict": inner, "fp32_groups_flat": groups}}


LAYOUTS = {
    "master_param": in_state("master_param"),
    "master_weight": in_state("master_weight"),
    "megatron": megatron,
    "apex": apex,
    "flat": flat,
    "flat buffer": flat_buffer,
    "flat groups": flat_groups,
}


def copies(tree):
    return tree.get("model") or tree["module"]


def codecs(manifest):
    """Id of the codec and the reason by the name of the storage."""
    return {record.name: (record.codec["id"], record.reason) for record in manifest.storages}


def same(one, other):
    """Whether tensors of 16-bit floats have the same bits."""
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def written(tree, folder, **options):
    """The manifest of the compressed checkpoint, and its path."""
    torch.save(tree, folder / "run.pt")
    return ckpt8.compress(folder / "run.pt", folder / "run.ckpt8", force=True, **options), folder / "run.ckpt8"
