"""The state that each optimizer class keeps for a parameter, and whether a saved state is that.

A fresh optimizer has no state from which to tell what it expects, and a state of another class under the same
hyperparameters would go in without complaint. The cards of known classes tell the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.quantised_state import parameter_shape
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import ResumeError
from ckpt8.core.text import listed
from ckpt8.optim.card import Card, Published, Shape
from ckpt8.optim.known_optimizers import EMPTY_KEYS, TENSORS, find_published, is_projected
from ckpt8.optim.packed import PackedOptimizer
from ckpt8.restoring.resume.live_parameters import Pair
from ckpt8.restoring.resume.live_values import ValueBuilder

WHOLE_GROUP = "group"
"""Key of a reference to the parameter group, which optimi with gradient release keeps in each state."""

_LARGEST_STEP = 2**53
"""float64 holds every whole number up to here."""

_MALFORMED = "its optimizer state is malformed"


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
    """The optimizer inside a wrapper such as accelerate's, which shares its state; else the optimizer itself."""
    inner = getattr(optimizer, "optimizer", None)
    shared = getattr(inner, "state", None)
    return inner if shared is not None and shared is getattr(optimizer, "state", None) else optimizer


def packed_optimizer(optimizer: Optimizer | None) -> PackedOptimizer | None:
    """The optimizer of ``ckpt8.optim`` that ``optimizer`` is or wraps; None for any other."""
    inner = None if optimizer is None else unwrapped(optimizer)
    return inner if isinstance(inner, PackedOptimizer) else None


def _expected_shape(key: str, shape: Shape) -> Shape | None:
    """The shape that state tensor ``key`` has for a parameter of ``shape``; None for an unknown key or one element."""
    if key == "kahan_comp":
        return shape
    tensor = TENSORS.get(key)
    return tensor.shape(shape) if tensor is not None and (tensor.is_moment or len(shape) >= 2) else None


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


def object_problem(value: Any, builder: ValueBuilder, what: str) -> str | None:
    """Why a value cannot go into a live object: it holds an object of a class that resume does not make; or None."""
    name = builder.unmade(value)
    return None if name is None else f"{what} holds a {name}, which resume does not make"


def state_problem(
    saved: Any,
    pair: Pair,
    layout: Layout | None,
    optimizer: Optimizer,
    hyper: Mapping[Any, Any],
    builder: ValueBuilder,
) -> str | None:
    """Why a saved state does not fit a parameter of ``optimizer``, or None. ``hyper`` is its saved group."""
    if not saved or not isinstance(saved, dict):
        return None if saved is None or saved == {} else _MALFORMED
    live = optimizer.state.get(pair.parameter)
    kept = {key: value for key, value in saved.items() if key != WHOLE_GROUP}
    tensors = {key: value for key, value in kept.items() if isinstance(value, TensorRef)}
    projected = is_projected(saved, hyper)
    problems = (_tensor_problem(key, tensors[key], pair.parameter, layout, live, projected) for key in tensors)
    return (
        _keys_problem(kept, pair, layout, live, optimizer, hyper)
        or object_problem(kept, builder, "its optimizer state")
        or next(filter(None, problems), None)
    )


def _keys_problem(
    saved: Mapping[Any, Any],
    pair: Pair,
    layout: Layout | None,
    live: Mapping[str, Any] | None,
    optimizer: Optimizer,
    hyper: Mapping[Any, Any],
) -> str | None:
    """Why a state has too few keys, too many, or no tensor where there must be one; or None."""
    name, shape = type(optimizer).__name__, tuple(pair.parameter.shape)
    if layout is not None:
        required, allowed = layout.keys(pair.parameter.dim(), hyper, optimizer.defaults)
    elif live:
        required = allowed = set(live) - {WHOLE_GROUP}
    else:
        required, allowed = set(), set(saved)
    if required - saved.keys():
        return f"its optimizer state lacks {listed(sorted(required - saved.keys()))}"
    if saved.keys() - allowed:
        return f"its optimizer state has {listed(sorted(saved.keys() - allowed))}, which {name} has not"
    if layout is None:
        return None
    tensors = {key for key in required if _expected_shape(key, shape) is not None} - EMPTY_KEYS
    others = sorted(key for key in tensors if not isinstance(saved[key], TensorRef))
    return f"its optimizer state has {listed(others)} in another form than {name} keeps it" if others else None


def _tensor_problem(
    key: str,
    ref: TensorRef,
    parameter: Tensor,
    layout: Layout | None,
    live: Mapping[str, Any] | None,
    projected: bool,
) -> str | None:
    if ref.conj or ref.neg:
        return f"{key} was saved as a conjugate or negative view, which resume does not support"
    if key == "step" or (key == "kahan_comp" and ref.shape == (1,)):
        return None
    twin = live.get(key) if live and layout is None else None
    whole = tuple(parameter.shape)
    shape, dtypes = _expected_shape(key, whole), {parameter.dtype}
    if isinstance(twin, torch.Tensor):
        shape, dtypes = tuple(twin.shape), {twin.dtype}
    elif layout is None:
        return _shape_problem(key, ref.shape, whole, projected) if shape == whole else None
    elif layout.published.widened and parameter.element_size() == 2:
        dtypes.add(torch.float32)
    if shape is not None and ref.shape != shape:
        return f"{key} was saved with shape {list(ref.shape)}, here it has {list(shape)}"
    here = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    fits = shape is None or ref.dtype.torch in dtypes
    return None if fits else f"{key} was saved as {ref.dtype.label}, here it is {here}"


def foreign_state_problem(saved: Any, pair: Pair, hyper: Mapping[Any, Any], builder: ValueBuilder) -> str | None:
    """As ``state_problem``, for an optimizer that loads the state itself."""
    if not saved or not isinstance(saved, dict):
        return None if saved is None or saved == {} else _MALFORMED
    shape, here = parameter_shape(saved), tuple(pair.parameter.shape)
    # State of fewer dimensions holds sums, or a part of the elements.
    alike = shape is not None and len(shape) == len(here)
    projected = is_projected(saved, hyper)
    problem = _shape_problem("its optimizer state", shape or (), here, projected) if alike else None
    return problem or object_problem(saved, builder, "its optimizer state")


def _shape_problem(what: str, shape: tuple[int, ...], here: tuple[int, ...], projected: bool) -> str | None:
    """Why state of an unknown optimizer class cannot be that of a parameter of shape ``here``, or None.

    Some classes keep one value for a row, or for all: any shape that can be broadcast to the parameter fits. State of
    ``projected`` gradients has the rank in place of a dimension, or of both.
    """
    pairs = list(zip(reversed(shape), reversed(here), strict=False))
    broadcasts = len(shape) <= len(here) and all(mine in (1, size) for mine, size in pairs)
    is_part = len(shape) == len(here) and (
        any(mine == size for mine, size in pairs) or all(mine <= size for mine, size in pairs)
    )
    if broadcasts or (projected and is_part):
        return None
    return f"{what} was saved with shape {list(shape)}, here it has {list(here)}"
