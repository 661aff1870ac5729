"""The state that each published optimizer class keeps: keys, shapes and the form of its step counter.

A fresh optimizer has no state from which to tell what it expects, and a state of another class under the same
hyperparameters would be taken without complaint: what the cards say catches a wrong class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import ResumeError
from ckpt8.optim.known_optimizers import TENSORS, Card, Published, Shape, find_published
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
    """The optimizer itself: accelerate and others wrap it, keep it as an attribute, and give its state as their own."""
    inner = getattr(optimizer, "optimizer", None)
    shared = getattr(inner, "state", None)
    return inner if shared is not None and shared is optimizer.state else optimizer


def is_packed(optimizer: Optimizer) -> bool:
    """Whether it is one of ``ckpt8.optim``, which is not imported for the answer."""
    packed = sys.modules.get("ckpt8.optim.packed")
    return packed is not None and isinstance(unwrapped(optimizer), packed.PackedOptimizer)


def expected_shape(key: str, shape: Shape) -> Shape | None:
    """Shape of a state tensor of a parameter of ``shape``; None where it is not known or of one element."""
    if key == "kahan_comp":
        return shape
    tensor = TENSORS.get(key)
    return tensor.shape(shape) if tensor is not None and (tensor.is_moment or len(shape) >= 2) else None


_LARGEST_STEP = 2**53
"""Up to here every whole number is a float64."""


def group_step_problem(group: Mapping[Any, Any]) -> str | None:
    """Why the step of a group that keeps one cannot be used, or None."""
    step = group.get("step")
    if isinstance(step, TensorRef) or (isinstance(step, int) and not isinstance(step, bool)):
        return None
    return "its parameter groups lack the step that this optimizer keeps there"


def exact_step(step: Any, layout: Layout, group: Mapping[str, Any], pair: Pair) -> Tensor | int | Any:
    """The counter of one parameter: a 0-d float tensor, or an int, whatever it was saved as.

    torch keeps it on the CPU unless the step itself runs on the device. Raises ResumeError where it is no whole
    number, or does not fit the type.
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
