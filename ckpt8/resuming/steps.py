"""The step counter, exact and in the form that the optimizer expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import ResumeError
from ckpt8.resuming.layouts import Layout
from ckpt8.resuming.mapping import Pair

if TYPE_CHECKING:
    from torch import Tensor

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
    import torch

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
