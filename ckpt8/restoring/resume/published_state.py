"""The state that each published optimizer class keeps: keys, shapes and the form of its step counter.

A fresh optimizer has no state from which to tell what it expects, and a state of another class under the same
hyperparameters would be taken without complaint: what the cards say catches a wrong class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import ResumeError
from ckpt8.optim.card import Card, Published, Shape
from ckpt8.optim.known_optimizers import TENSORS, find_published
from ckpt8.optim.packed import PackedOptimizer
from ckpt8.restoring.resume.live_parameters import Pair


class Layout(NamedTuple):
    """What a known class keeps for a parameter."""

    card: Card
    published: Published

    def keys(self, ndim: int, hyper: Mapping[Any, Any], defaults: Mapping[str, Any]) -> tuple[set[str], set[str]]:
        """Keys that a state must have, and those that it may have.

        ``hyper`` are the settings of the saved group, ``defaults`` those that the class takes.
        """
        form, more = self.card.form(ndim), set(self.published.state)
        more |= {"step"} if self.published.step in ("tensor", "int") else set()
        possible = {each.key for each in form.tensors if not each.when or each.when in defaults}
        present = {each.key for each in form.present(hyper)}
        return (possible & present) | more, possible | more | self.published.optional


def layout_of(optimizer: Optimizer) -> Layout | None:
    """The layout of the first known class that ``optimizer`` is made of; None for an unknown class."""
    for kind in type(unwrapped(optimizer)).__mro__:
        found = find_published(kind.__module__.partition(".")[0], kind.__name__)
        if found is not None:
            return Layout(*found)
    return None


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper such as accelerate's, which passes its state off as its own; else itself."""
    inner = getattr(optimizer, "optimizer", None)
    shared = getattr(inner, "state", None)
    return inner if shared is not None and shared is getattr(optimizer, "state", None) else optimizer


def packed_optimizer(optimizer: Optimizer | None) -> PackedOptimizer | None:
    """The optimizer of ``ckpt8.optim`` that ``optimizer`` is or wraps; None for any other."""
    inner = None if optimizer is None else unwrapped(optimizer)
    return inner if isinstance(inner, PackedOptimizer) else None


def expected_shape(key: str, shape: Shape) -> Shape | None:
    """The shape that state tensor ``key`` has for a parameter of ``shape``; None for an unknown key or one element."""
    if key == "kahan_comp":
        return shape
    tensor = TENSORS.get(key)
    return tensor.shape(shape) if tensor is not None and (tensor.is_moment or len(shape) >= 2) else None


_LARGEST_STEP = 2**53
"""float64 holds every whole number up to here."""


def group_step_problem(group: Mapping[Any, Any]) -> str | None:
    """Why ``group``, which should keep the step, has none that can be used; or None."""
    step = group.get("step")
    if isinstance(step, TensorRef) or (isinstance(step, int) and not isinstance(step, bool)):
        return None
    return "its parameter groups lack the step that this optimizer keeps there"


def exact_step(step: Any, layout: Layout, group: Mapping[str, Any], pair: Pair) -> Tensor | int | Any:
    """The step of one parameter as its optimizer keeps it: a 0-d float tensor or an int, whatever was saved.

    A tensor is on the CPU, as in torch, unless ``group`` is stepped on the device. Raises ResumeError where the step is
    not a whole number, or float32 does not hold it.
    """
    value = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST_STEP
    if not is_number or value != int(value):
        raise ResumeError(f"{pair.name}: its step is not a whole number")
    if layout.published.step == "int":
        return int(value)
    if layout.published.step != "tensor":
        return step.clone() if isinstance(step, torch.Tensor) else step
    wide = isinstance(step, torch.Tensor) and step.dtype == torch.float64
    on_device = bool(group.get("capturable") or group.get("fused"))
    device = pair.parameter.device if on_device else "cpu"
    made = torch.tensor(float(value), dtype=torch.float64 if wide else torch.float32, device=device)
    if made.item() != value:
        raise ResumeError(f"{pair.name}: step {value} cannot be held exactly by a float32")
    return made
