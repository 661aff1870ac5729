"""Decides which saved tensor goes into which parameter or buffer of a live model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.tensors import DType
from ckpt8.restoring.resume.fills import Copy, ValueBuilder
from ckpt8.restoring.resume.optimizer import object_problem

EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class ModelPlan:
    """What to copy into a model, and what does not fit.

    ``extra`` has the extra states of modules, by their names in the model; ``filled`` the saved tensor of each live
    one, by ``id``.
    """

    copies: list[Copy] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    filled: dict[int, TensorRef] = field(default_factory=dict)


def fitting(candidates: list[Candidate], model: nn.Module) -> list[Candidate]:
    """The state dicts with exactly the names of ``model``, else those with its names but for prefixes of wrappers.

    Of several with the same names, those with its shapes fit. A single candidate always fits.
    """
    if len(candidates) == 1:
        return candidates
    live = model.state_dict()
    same = [candidate for candidate in candidates if candidate.node.keys() == live.keys()]
    same = same or [
        candidate for candidate in candidates if len(match(candidate.node, live)) == len(live) == len(candidate.node)
    ]
    return [candidate for candidate in same if _has_shapes(candidate, live)] or same


def _has_shapes(candidate: Candidate, live: dict[str, Any]) -> bool:
    """Whether a state dict has tensors of the shapes of the live ones."""
    saved = {name: candidate.node[key] for name, key in match(candidate.node, live).items()}
    return all(ref.shape == live[name].shape for name, ref in saved.items() if isinstance(ref, TensorRef))


def plan_model(
    candidate: Candidate, model: nn.Module, streamer: Streamer, builder: ValueBuilder, halves: Collection[int]
) -> ModelPlan:
    """Match names, shapes and element types, and build the extra states of modules.

    ``halves``: the ``id`` of 16-bit parameters that may take fp32 weights; an optimizer keeps their other half.
    """
    live = model.state_dict(keep_vars=True)
    owned = {id(t) for _, t in (*model.named_parameters(), *model.named_buffers())}
    saved_name = match(candidate.node, live)
    plan = ModelPlan()
    filled = plan.filled
    for name, tensor in live.items():
        if name not in saved_name:
            continue
        value = candidate.node[saved_name[name]]
        if name.endswith(EXTRA_STATE):
            if problem := object_problem(value, builder, "its extra state"):
                plan.problems.append(f"{name}: {problem}")
            else:
                plan.extra[name] = builder.build(value)
        elif id(tensor) not in owned or not isinstance(value, TensorRef):
            plan.problems.append(f"{name}: is not a tensor that can be filled in place")
        elif problem := _mismatch(value, tensor, is_half=id(tensor) in halves):
            plan.problems.append(f"{name}: {problem}")
        elif id(tensor) not in filled:
            filled[id(tensor)] = value
            plan.copies.append(Copy(name, value, tensor))
        elif not streamer.equal(filled[id(tensor)], value):
            plan.problems.append(f"{name}: is tied in the model, but was saved with other values than its twin")
    plan.problems += _unmatched(candidate, live, saved_name)
    return plan


def _unmatched(candidate: Candidate, live: dict[str, Any], saved_name: dict[str, str]) -> list[str]:
    # A tied tensor is there if it was saved under any of its names.
    present = {id(live[name]) for name in saved_name}
    missing = [name for name, tensor in live.items() if name not in saved_name and id(tensor) not in present]
    taken = set(saved_name.values())
    extra = [name for name in candidate.node if name not in taken]
    return [
        *(f"{name}: is missing from the checkpoint" for name in missing),
        *(f"{name}: is in the checkpoint but not in the model" for name in extra),
    ]


def _mismatch(ref: TensorRef, tensor: Tensor, *, is_half: bool) -> str | None:
    """Why a saved tensor cannot be copied into a live one, or None. ``is_half``: it may be rounded from float32."""
    shape = tuple(tensor.shape)
    if tensor.is_meta:
        return "is on the meta device; give it memory first, for instance with to_empty()"
    if str(tensor.layout) != "torch.strided":
        return "is sparse, which resume does not support"
    if ref.shape != shape:
        return f"was saved with shape {list(ref.shape)}, here it has {list(shape)}"
    if ref.dtype.torch != tensor.dtype and not (is_half and ref.dtype is DType.FLOAT32):
        return f"was saved as {ref.dtype.label}, here it is {str(tensor.dtype).removeprefix('torch.')}"
    if ref.conj or ref.neg:
        return "was saved as a conjugate or negative view, which resume does not support"
    return None
