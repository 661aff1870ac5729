"""What the flags of a checkpoint must be, from its tensors as torch loads them, and one with a fault of each kind."""

from __future__ import annotations

import torch

from ckpt8.inspecting import tensors

ROWS, WIDTH = 700, 96
MOMENT1, MOMENT2 = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "max_exp_avg_sq")


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
        if kind == "moment2" and (negative := sum(value < 0 for value in x.tolist())):
            found["negative_moment2", name] = negative, len(x)
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
    """Flags of values of single tensors in the form of ``expected``."""
    return {
        (flag["kind"], flag["tensor"]): (flag["count"], flag["of"])
        for flag in flags
        if "tensor" in flag and flag["kind"] != "foreign_globals"
    }


def healthy():
    """A checkpoint with numbers that fp16 holds, all of them different, of tensors that are larger than a sample."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape):
        return torch.rand(shape, generator=generator) + 0.5

    shapes = {"embed.weight": (ROWS, WIDTH), "layers.0.weight": (500, 130), "head.weight": (ROWS, WIDTH), "bias": (40,)}
    model = {name: numbers(*shape) for name, shape in shapes.items()}
    state = {
        k: {"step": torch.tensor(9.0), "exp_avg": numbers(*shape), "exp_avg_sq": numbers(*shape)}
        for k, shape in enumerate(shapes.values())
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False, "params": [0, 1, 2, 3]}
    return {"model": model, "optimizer": {"state": state, "param_groups": [group]}}


def unseen(shape):
    """An element that a sample leaves out, first in its row."""
    row = shape[1]
    seen = set()
    for start, count in [
        *tensors.windows(shape[0] * row, tensors.PER_TENSOR),
        *tensors.windows(shape[0] * row, tensors.PER_TENSOR, row),
    ]:
        seen.update(range(start, start + count))
    return next(at for at in range(0, shape[0] * row, row) if not seen & set(range(at, at + row)))


def plant(tree):
    """Every fault; the flags that they must raise beside those of ``expected``."""
    model, state = tree["model"], tree["optimizer"]["state"]
    layer, embed = model["layers.0.weight"], model["embed.weight"]
    layer.view(-1)[unseen(layer.shape)] = float("nan")
    model["bias"][7] = float("-inf")
    model["head.weight"] = embed.clone()
    model["extra"] = (torch.rand(30, 20) + 0.5).bfloat16().float()
    state[2]["exp_avg"].zero_()
    state[0]["exp_avg"][3:8] = 0
    state[0]["exp_avg_sq"][3:8] = 0
    state[0]["exp_avg"][400] = 0  # its second moment is there: not dead
    state[1]["exp_avg_sq"].view(-1)[64:100] = 1e-9
    state[1]["exp_avg_sq"].view(-1)[100] = 2.0**-25
    state[1]["exp_avg_sq"].view(-1)[101] = 2.0**-25 * (1 + 2.0**-20)
    state[1]["exp_avg"].view(-1)[320:384] = 1e-9
    state[3]["exp_avg_sq"][5:7] = torch.tensor([-0.5, -0.25])
    state[3]["exp_avg_sq"][7] = -0.0
    state[3]["exp_avg"][5] = -0.5
    state[1]["exp_avg"].view(-1)[384:416] = -3e-5
    return {("dead_rows", "embed.weight"): (5, ROWS)}
