"""What the flags of a checkpoint must be, from its tensors as torch loads them, by the definitions alone."""

from __future__ import annotations

import torch

MOMENT1, MOMENT2 = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "max_exp_avg_sq")


def flatten(tree, prefix=""):
    """All tensors of nested dicts and lists by their path."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    found = {}
    for key, value in pairs:
        found.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def role(name):
    """By the last component; what is in no optimizer state is a weight."""
    last = name.rpartition(".")[2]
    if last in MOMENT1:
        return "moment1"
    if last in MOMENT2:
        return "moment2"
    return "other" if ".state." in f".{name}" else "weight"


def expected(tensors):
    """{(kind, tensor): (count, of)} of all flags but those of rows and of copies."""
    found = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        kind = role(name)
        x = tensor.flatten()
        nan, inf = int(x.float().isnan().sum()), int(x.float().isinf().sum())
        if nan:
            found["nan", name] = nan, len(x)
        if inf and not (kind == "other" and len(x) == 1):
            found["inf", name] = inf, len(x)
        if kind == "other":
            continue
        narrow = x.dtype == torch.float32 and torch.equal(x.bfloat16().float().nan_to_num(7.0), x.nan_to_num(7.0))
        if narrow and len(x.unique()) >= 16:
            found["bf16_in_fp32", name] = len(x), len(x)
        if kind == "weight":
            continue
        if not x.any():
            found["zero_moment", name] = len(x), len(x)
        if kind == "moment2" and (flushed := int(((x != 0) & (x.half() == 0)).sum())):
            found["moment2_fp16_zero", name] = flushed, int((x != 0).sum())
        scales = torch.stack([group.abs().max() for group in x.float().split(32)])
        scales = scales.sqrt() if kind == "moment2" else scales
        bad = int(((scales > 0) & (scales.half() < 2.0**-14)).sum())
        if bad:
            found["fp16_scales", name] = bad, int((scales > 0).sum())
    return found


def dead_rows(moments):
    """(dead, all) rows of a parameter from its moments, as one after the other tells."""
    rows = [not any(bool(moment[row].count_nonzero()) for moment in moments) for row in range(len(moments[0]))]
    return sum(rows), len(rows)


def as_pairs(flags):
    """Flags of single tensors in the form of ``expected``."""
    return {(flag["kind"], flag["tensor"]): (flag["count"], flag["of"]) for flag in flags if "tensor" in flag}
