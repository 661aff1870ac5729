"""The state that each known optimizer keeps: keys, shapes and the form of its step counter.

Read in the published code of torch 2.13, torch-optimi 0.3.3, came-pytorch 0.1.3, pytorch-optimizer 4.1.0 and
lion-pytorch 0.2.5. A fresh optimizer has no state from which to tell what it expects, and a state of another class
under the same hyperparameters would be taken without complaint: this table is what a wrong class is caught by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import ResumeError
from ckpt8.restoring.resume.live_parameters import Pair

Shape = tuple[int, ...]
Step = Literal["tensor", "int", "group"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys of the state of one parameter, without the step, below two dimensions and from two on.

    ``step`` says where the counter is: a 0-d float tensor or an int in the state, in the group, or nowhere.
    ``widened``: the state of a 16-bit parameter may be float32.
    """

    vector: frozenset[str]
    matrix: frozenset[str]
    optional: frozenset[str] = frozenset()
    step: Step | None = None
    widened: bool = False

    def keys(self, ndim: int) -> frozenset[str]:
        """Keys that the state of a parameter must have."""
        keys = self.vector if ndim < 2 else self.matrix
        return keys | {"step"} if self.step in ("tensor", "int") else keys


def _layout(
    keys: str, *, vector: str | None = None, optional: str = "", step: Step | None = None, widened: bool = False
) -> Layout:
    small = keys if vector is None else vector
    return Layout(frozenset(small.split()), frozenset(keys.split()), frozenset(optional.split()), step, widened)


_CAME = "exp_avg exp_avg_sq_row exp_avg_sq_col exp_avg_res_row exp_avg_res_col RMS"
_CAME_VECTOR = "exp_avg exp_avg_sq RMS"
_OPTIMI = "mean_square group step"

_ADAM = _layout("exp_avg exp_avg_sq", optional="max_exp_avg_sq", step="tensor")
LAYOUTS: dict[tuple[str, str], Layout] = {
    ("torch", "Adam"): _ADAM,
    ("torch", "AdamW"): _ADAM,
    ("torch", "SGD"): _layout("", optional="momentum_buffer"),
    ("torch", "Adafactor"): _layout("row_var col_var", vector="variance", step="tensor"),
    ("optimi", "StableAdamW"): _layout("exp_avg exp_avg_sq eps_sq kahan_comp", optional=_OPTIMI, step="group"),
    ("optimi", "AdamW"): _layout("exp_avg exp_avg_sq kahan_comp", optional=_OPTIMI, step="group"),
    ("optimi", "Adam"): _layout("exp_avg exp_avg_sq kahan_comp", optional=_OPTIMI, step="group"),
    ("optimi", "Lion"): _layout("exp_avg kahan_comp", optional=_OPTIMI),
    ("came_pytorch", "CAME"): _layout(_CAME, vector=_CAME_VECTOR, step="int", widened=True),
    ("pytorch_optimizer", "CAME"): _layout(_CAME, vector=_CAME_VECTOR, step="group", widened=True),
    ("pytorch_optimizer", "StableAdamW"): _layout("exp_avg exp_avg_sq kahan_comp", step="group", widened=True),
    ("pytorch_optimizer", "Lion"): _layout("exp_avg", step="group"),
    ("lion_pytorch", "Lion"): _layout("exp_avg"),
}
"""By top-level package and class name."""

_SHAPES: dict[str, Callable[[Shape], Shape]] = {
    "exp_avg_sq_row": lambda shape: shape[:-1],
    "exp_avg_sq_col": lambda shape: shape[:-2] + shape[-1:],
    "exp_avg_res_row": lambda shape: shape[:-1],
    "exp_avg_res_col": lambda shape: shape[:-2] + shape[-1:],
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, shape[-1]),
}
_LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "variance", "kahan_comp"})


def layout_of(optimizer: Optimizer) -> Layout | None:
    """The layout of the first known class that ``optimizer`` is made of; None for an unknown class."""
    for kind in type(unwrapped(optimizer)).__mro__:
        found = LAYOUTS.get((kind.__module__.partition(".")[0], kind.__name__))
        if found is not None:
            return found
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
    if key in _LIKE_PARAMETER:
        return shape
    return _SHAPES[key](shape) if key in _SHAPES and len(shape) >= 2 else None


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
    if layout.step == "int":
        return int(value)
    if layout.step != "tensor":
        return step.clone() if isinstance(step, torch.Tensor) else step
    wide = isinstance(step, torch.Tensor) and step.dtype == torch.float64
    on_device = bool(group.get("capturable") or group.get("fused"))
    device = pair.parameter.device if on_device else "cpu"
    made = torch.tensor(float(value), dtype=torch.float64 if wide else torch.float32, device=device)
    if made.item() != value:
        raise ResumeError(f"{pair.name}: step {value} cannot be held exactly by a float32")
    return made
