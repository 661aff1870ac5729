"""Optimizers whose steps are counted, on a small network, and their errors in steps in float64, from trees alone.

The classes are those that the cards name as published, and ``MORE``; a card that is added brings its classes along.
"""

from __future__ import annotations

import importlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import every_optimizer_kit as kit
import torch
from torch import Tensor, nn

from ckpt8.optim.cards import TRAINED

Energies = tuple[float, float, float, float]
"""What one step moves; what errors of weights, of first and of second moments do."""

MORE = {
    ("torch.optim", "Muon"): "muon",
    ("pytorch_optimizer", "Muon"): "muon",
    ("muon", "SingleDeviceMuonWithAuxAdam"): "muon",
    ("pytorch_optimizer", "Prodigy"): "prodigy",
    ("prodigyopt", "Prodigy"): "prodigy",
    ("bitsandbytes.optim", "AdamW"): "adam",
    ("bitsandbytes.optim", "AdamW8bit"): "adam",
    ("bitsandbytes.optim", "Lion"): "lion",
    ("bitsandbytes.optim", "Lion8bit"): "",
    ("torchao.optim", "AdamW8bit"): "adam",
    ("torchao.optim", "AdamW4bit"): "adam",
    ("torchao.optim", "AdamWFp8"): "adam",
    ("transformers.optimization", "Adafactor"): "adafactor",
}
"""The rule of other classes by package and name; none where steps are not counted."""

MAY_BE_ABSENT = ("muon", "prodigyopt")

PUBLISHED = {
    card.rule_id: {
        ("torch.optim" if each.package == "torch" else each.package, each.name): (
            card.rule_id if card.rule_id in ("sgd", "lion", "adafactor") else card.matrix.update or card.rule_id
        )
        for each in card.published
    }
    for card in TRAINED
}
"""The rule of every class that a card publishes, by the id of the card."""

_ALL = {**{key: rule for classes in PUBLISHED.values() for key, rule in classes.items()}, **MORE}
RULES = {key: rule for key, rule in _ALL.items() if key[0] not in MAY_BE_ABSENT or find_spec(key[0])}

USUAL = [next(iter(classes)) for classes in PUBLISHED.values()]
USUAL += [("torch.optim", "Muon"), ("pytorch_optimizer", "Prodigy"), ("bitsandbytes.optim", "AdamW8bit")]
USUAL += [("transformers.optimization", "Adafactor")]
"""One class of each rule, the first of each card among them."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, and with torch.compile doing nothing: torchao asks for it in every step."""
    torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.set_stance("default")


class Run:
    """A network of three matrices, and the optimizer of a class of ``RULES``; torch's Muon gets AdamW for the rest."""

    def __init__(self, key: tuple[str, str], seed: int = 0, shard: Callable[[nn.Module], Any] = lambda model: model):
        self.rule = RULES[key]
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(64, 144), nn.Tanh(), nn.Linear(144, 64), nn.LayerNorm(64), nn.Linear(64, 4)
        )
        shard(self.model)
        if key[0] == "bitsandbytes.optim":
            importlib.import_module(key[0]).GlobalOptimManager.get_instance().initialize()
        kind, params = getattr(importlib.import_module(key[0]), key[1]), list(self.model.parameters())
        with quiet():
            if key == ("torch.optim", "Muon"):
                matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim < 2]
                self.optimizers = [kind(matrices, lr=1e-2), torch.optim.AdamW(others)]
            elif key[1] in ("Muon", "SingleDeviceMuonWithAuxAdam"):
                split = [
                    {"params": [p for p in params if (p.ndim == 2) == use], "use_muon": use} for use in (True, False)
                ]
                self.optimizers = [kind(split)]
            else:
                with mock.patch.dict(
                    kit.SETTINGS, {"Lion": {"lr": 1e-3}, "Adafactor": {"lr": 1e-2, "relative_step": False}}
                ):
                    self.optimizers = [kit.build(kind, self.model)]

    @property
    def optimizer(self) -> Any:
        """The optimizer, or a list of them, as a user has it."""
        return self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]

    def train(self, first: int, last: int) -> list[float]:
        """Losses of steps on batches that are a function of the step alone."""
        losses = []
        with quiet():
            for number in range(first, last):
                batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
                loss = (self.model(batch) - batch[:, :4].sin()).square().mean()
                loss.backward()
                losses.append(float(loss.detach()))
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return losses

    def tree(self) -> dict[str, Any]:
        """A copy of what a user saves."""
        file = io.BytesIO()
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizer": states if len(states) > 1 else states[0]}, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def group_of(self, name: str) -> dict[str, Any]:
        """The parameter group of a weight."""
        param = self.model.get_parameter(name)
        groups = (group for each in self.optimizers for group in each.param_groups)
        return next(group for group in groups if any(p is param for p in group["params"]))

    def names(self) -> list[dict[Any, str]]:
        """The name of the weight of every state, for each optimizer."""
        known = {id(p): name for name, p in self.model.named_parameters()}
        lists = ([p for group in each.param_groups for p in group["params"]] for each in self.optimizers)
        return [{number: known[id(p)] for number, p in enumerate(params)} for params in lists]


def moments(state: Mapping[str, Any]) -> list[Tensor]:
    """Both moments of Adam, as the program that wrote them decodes them; one of Lion's, SGD's and Muon's."""
    nested = state.get("__bnb_optimizer_quant_state__", state)
    if "qmap1" in nested:
        from bitsandbytes.functional import dequantize_blockwise as decoded

        parts = [(nested[f"state{k}"], nested[f"absmax{k}"], nested[f"qmap{k}"]) for k in (1, 2)]
        return [decoded(codes, absmax=scales, code=table, blocksize=256).double() for codes, scales, table in parts]
    keys = ("exp_avg", "momentum_buffer", "state1", "exp_avg_sq", "state2")
    found = [nested[key] for key in keys if nested.get(key) is not None]
    return [(x if type(x) is Tensor else x.dequantize()).double() for x in found]


def errors_in_steps(
    rule: str, was: Mapping[str, Any], there: Mapping[str, Any], names: list[dict[Any, str]]
) -> float | None:
    """The error of one tree against another in steps of its optimizers; None where no step is counted."""
    total = [0.0, 0.0, 0.0, 0.0]
    trees = [each["optimizer"] if isinstance(each["optimizer"], list) else [each["optimizer"]] for each in (was, there)]
    for optimizer, other, named in zip(*trees, names, strict=True):
        for group in optimizer["param_groups"]:
            for key in group["params"]:
                pair = was["model"][named[key]], there["model"][named[key]]
                own = energies(rule, group, optimizer["state"][key], other["state"][key], pair)
                total = [a + b for a, b in zip(total, own, strict=True)]
    return math.sqrt(sum(total[1:]) / total[0]) if total[0] else None


def energies(
    rule: str,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    back: Mapping[str, Any],
    weights: tuple[Tensor, Tensor],
    whole: tuple[int, ...] | None = None,
) -> Energies:
    """The energies of one parameter, or of a slice of one of the shape ``whole``; zeros where none are counted."""
    w, restored = (each.double() for each in weights)
    own = _RULES.get("adam" if rule == "muon" and "exp_avg" in state else rule)
    return (0.0, 0.0, 0.0, 0.0) if own is None else own(group, state, back, w, restored - w, whole or tuple(w.shape))


def second_moment(state: Mapping[str, Any], name: str = "exp_avg_sq") -> Tensor:
    """What averages over columns and rows of squares stand for."""
    torchs = "row_var" in state
    rows = state["row_var"] if torchs else state[f"{name}_row"].unsqueeze(-1)
    columns = state["col_var"] if torchs else state[f"{name}_col"].unsqueeze(-2)
    return rows.double() @ columns.double() / rows.double().mean(-2, keepdim=True).clamp_min(1e-300)


def _adam(group, state, back, w, dw, whole, *, debiased=True, scale=1.0, rate=1.0) -> Energies:
    """``debiased``: moments are divided by 1 - b^t. All are those of gradients times ``scale``."""
    b1, b2 = group["betas"][:2] if "betas" in group else (group["beta1"], group["beta2"])
    lr, both = float(group["lr"]) * rate, b1 * b2
    step = float(state.get("step", group.get("step", 1)))
    bias1, bias2 = (scale * (1 - b1**step), scale**2 * (1 - b2**step)) if debiased else (scale, scale**2)
    (m, v), (again, root) = moments(state), moments(back)
    if "max_exp_avg_sq" in state:
        v, root = state["max_exp_avg_sq"].double(), back["max_exp_avg_sq"].double()
    relative = torch.where(v > 0, root.sqrt() / v.clamp_min(1e-300).sqrt() - 1, 0.0)
    carried = 0.576**2 * (1 + both) / ((1 - b2**2) * (1 - both))
    return (
        float((lr * m / bias1).square().sum()),
        float((v / bias2 * dw.square()).sum()),
        float((lr * b1 / (1 - b1) * (again - m) / bias1).square().sum()),
        carried * float((lr * relative * m / bias1).square().sum()),
    )


def _prodigy(group, state, back, w, dw, whole) -> Energies:
    """Moments are those of gradients times d, and steps those at the rate lr d; no bias is corrected by default."""
    step = group["k"] if "k" in group else group["step"] - 1
    root = math.sqrt(1 - group["betas"][1] ** step)
    return _adam(group, state, back, w, dw, whole, debiased=False, scale=group["d"] * root, rate=group["d"])


def _came(group, state, back, w, dw, whole) -> Energies:
    if "exp_avg_sq_row" not in state:
        return 0.0, 0.0, 0.0, 0.0
    v, confidence = (second_moment(state, name) for name in ("exp_avg_sq", "exp_avg_res"))
    (m, *_), (again, *_) = moments(state), moments(back)
    lr, b1 = group["lr"], group["betas"][0]
    return (
        float((v / confidence * (lr * m).square()).sum()),
        float((v * dw.square()).sum()),
        float((v / confidence * (lr * b1 / (1 - b1) * (again - m)).square()).sum()),
        0.0,
    )


def _adafactor(group, state, back, w, dw, whole) -> Energies:
    """Of a matrix: it moves by the size of its weights, that of transformers if it scales parameters."""
    if not {"row_var", "exp_avg_sq_row"} & state.keys():
        return 0.0, 0.0, 0.0, 0.0
    clip, size, step = (
        group.get("clip_threshold", group.get("d")),
        float(w.square().mean().sqrt()),
        float(state["step"]),
    )
    rate = float(group["lr"] or min(1e-6 * step if group["warmup_init"] else 1e-2, 1 / math.sqrt(step)))
    size, v = max(group["eps"][1], size) if group.get("scale_parameter", True) else 1.0, second_moment(state)
    if "row_var" in state:
        least = torch.finfo(state["row_var"].dtype).eps if group["eps"][0] is None else group["eps"][0]
        clip, rate = min(clip, float(v.mean().sqrt()) / least), min(rate, 1 / math.sqrt(step))
    moved = size * rate * min(1, clip)
    return moved**2 * float(v.sum()), float((v * dw.square()).sum()), 0.0, 0.0


def momentum_of(rule: str, group: Mapping[str, Any], shape: tuple[int, ...], mean_square: float) -> list[float]:
    """How far a step moves an element, an error of the momentum moves it; what squares count, and flips of a sign."""
    lr = float(group["lr"])
    if rule == "lion":
        b1, b2 = group["betas"] if "betas" in group else (group["beta1"], group["beta2"])
        spread = (1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)
        reach = 0.8 * b1 * math.sqrt((1 - b2) / (1 + b2) / spread) / (1 - b2)
        return [lr, reach * lr / math.sqrt(mean_square), (1 + b2) / (1 - b2), math.sqrt(3)]
    b = group["momentum"]
    longer = b / (1 - b) * (b if group.get("nesterov", True) else 1)
    if rule == "sgd":
        return [lr * math.sqrt(mean_square), lr * longer, (1 - b * b) / (1 - group["dampening"]) ** 2, 0.0]
    rows, columns = shape
    scale = math.sqrt(max(1, rows / columns))
    if group.get("adjust_lr_fn") == "match_rms_adamw" or group.get("use_adjusted_lr"):
        scale = 0.2 * math.sqrt(max(rows, columns))
    step = 0.72 * lr * scale / math.sqrt(max(rows, columns))
    return [step, step / math.sqrt(mean_square) * longer, (1 + b) / (1 - b), 0.0]


def _momentum(rule, group, state, back, w, dw, whole) -> Energies:
    (b,), (again,) = moments(state), moments(back)
    mean_square = float(b.square().mean())
    step, reach, gain, flips = momentum_of(rule, group, whole, mean_square)
    unit, shift = gain * mean_square, reach * float((again - b).square().mean().sqrt())
    moved, erred = step**2 * b.numel(), (shift**2 + flips * shift * step) * b.numel()
    return unit * moved, unit * float(dw.square().sum()), unit * erred, 0.0


_RULES: dict[str, Callable[..., Energies]] = {
    "adam": _adam,
    "stable_adamw": partial(_adam, debiased=False),
    "came": _came,
    "adafactor": _adafactor,
    "prodigy": _prodigy,
    **{rule: partial(_momentum, rule) for rule in ("sgd", "lion", "muon")},
}
