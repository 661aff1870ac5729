"""Checks that the saved state of a parameter is what the live optimizer keeps for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.quantised_state import parameter_shape
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.text import listed
from ckpt8.optim.known_optimizers import EMPTY_KEYS
from ckpt8.restoring.resume.live_parameters import Pair
from ckpt8.restoring.resume.live_values import ValueBuilder
from ckpt8.restoring.resume.published_state import Layout, expected_shape

WHOLE_GROUP = "group"
"""optimi with gradient release keeps a reference to the parameter group in the state of each parameter."""


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
    if saved is None or saved == {}:
        return None
    if not isinstance(saved, dict):
        return "its optimizer state is malformed"
    live = optimizer.state.get(pair.parameter)
    kept = {key: value for key, value in saved.items() if key != WHOLE_GROUP}
    problem = _keys_problem(kept, pair, layout, live, optimizer, hyper) or object_problem(
        kept, builder, "its optimizer state"
    )
    tensors = {key: value for key, value in kept.items() if isinstance(value, TensorRef)}
    problems = (_tensor_problem(key, ref, pair.parameter, layout, live) for key, ref in tensors.items())
    return problem or next((problem for problem in problems if problem is not None), None)


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
    tensors = {key for key in required if expected_shape(key, shape) is not None} - EMPTY_KEYS
    others = sorted(key for key in tensors if not isinstance(saved[key], TensorRef))
    return f"its optimizer state has {listed(others)} in another form than {name} keeps it" if others else None


def _tensor_problem(
    key: str, ref: TensorRef, parameter: Tensor, layout: Layout | None, live: Mapping[str, Any] | None
) -> str | None:
    if ref.conj or ref.neg:
        return f"{key} was saved as a conjugate or negative view, which resume does not support"
    if key == "step" or (key == "kahan_comp" and ref.shape == (1,)):
        return None
    twin = live.get(key) if live and layout is None else None
    if isinstance(twin, torch.Tensor):
        shape: tuple[int, ...] | None = tuple(twin.shape)
        dtypes = {twin.dtype}
    elif layout is None:
        whole = tuple(parameter.shape)
        return _shape_problem(key, ref.shape, whole) if expected_shape(key, whole) == whole else None
    else:
        shape = expected_shape(key, tuple(parameter.shape))
        dtypes = set() if shape is None else {parameter.dtype}
        if layout.published.widened and dtypes and parameter.element_size() == 2:
            dtypes.add(torch.float32)
    if shape is not None and ref.shape != shape:
        return f"{key} was saved with shape {list(ref.shape)}, here it has {list(shape)}"
    if dtypes and ref.dtype.torch not in dtypes:
        here = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"{key} was saved as {ref.dtype.label}, here it is {here}"
    return None


def foreign_state_problem(saved: Any, pair: Pair, builder: ValueBuilder) -> str | None:
    """As ``state_problem``, for an optimizer that loads the state itself."""
    if saved is None or saved == {}:
        return None
    if not isinstance(saved, dict):
        return "its optimizer state is malformed"
    shape, here = parameter_shape(saved), tuple(pair.parameter.shape)
    # State of fewer dimensions holds sums, or a part of the elements.
    alike = shape is not None and len(shape) == len(here)
    problem = _shape_problem("its optimizer state", shape or (), here) if alike else None
    return problem or object_problem(saved, builder, "its optimizer state")


def _shape_problem(what: str, shape: tuple[int, ...], here: tuple[int, ...]) -> str | None:
    """Why state of an unknown optimizer class cannot be that of a parameter of shape ``here``, or None.

    Some classes keep one value for a row, or for all: any shape that can be broadcast to the parameter fits.
    """
    pairs = zip(reversed(shape), reversed(here), strict=False)
    if len(shape) <= len(here) and all(mine in (1, size) for mine, size in pairs):
        return None
    return f"{what} was saved with shape {list(shape)}, here it has {list(here)}"
