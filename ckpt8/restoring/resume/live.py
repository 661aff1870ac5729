"""Which saved tensor or parameter goes into which live one.

A live model takes tensors by name. Parameters of a saved optimizer are paired with live ones by name where both have
names, else by their order. Parameter groups: which hyperparameters resume restores, and whether the groups are of the
same optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.pairing import saved_names
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.state_dicts import CHECKS, Candidate
from ckpt8.checkpoint.sources.composite import Fill, Streamer
from ckpt8.checkpoint.sources.objects import ValueBuilder
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import ResumeError, require
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed
from ckpt8.optim.known_optimizers import setting_names


def copy_of(ref: TensorRef, target: torch.Tensor) -> Fill:
    """Copies a saved tensor into a live one of its shape; values are rounded where that has fewer bits."""
    return Fill(ref, lambda streamer: streamer.copy(ref, target.detach()))


@dataclass(slots=True)
class ModelPlan:
    """What to copy into a model, as name, saved and live tensor, and what does not fit.

    ``extra`` has the extra states of modules, by their names in the model.
    """

    copies: list[tuple[str, TensorRef, torch.Tensor]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def fitting_models(candidates: list[Candidate], model: nn.Module) -> list[Candidate]:
    """The state dicts with exactly the names of ``model``, else those with its names but for prefixes of wrappers.

    Of several with the same names, those with its shapes fit. A single candidate always fits.
    """
    if len(candidates) == 1:
        return candidates
    live = model.state_dict()
    matched = {candidate: match(candidate.node, live) for candidate in candidates}
    same = [candidate for candidate in candidates if candidate.node.keys() == live.keys()]
    same = same or [one for one in candidates if len(matched[one]) == len(live) == len(one.node)]

    def has_shapes(candidate: Candidate) -> bool:
        saved = ((live[name], candidate.node[key]) for name, key in matched[candidate].items())
        return all(ref.shape == tensor.shape for tensor, ref in saved if isinstance(ref, TensorRef))

    return list(filter(has_shapes, same)) or same


def plan_model(
    candidate: Candidate, model: nn.Module, streamer: Streamer, builder: ValueBuilder, halves: Collection[int]
) -> ModelPlan:
    """Match names, shapes and element types, and build the extra states of modules.

    ``halves``: the ``id`` of 16-bit parameters that may take fp32 weights; an optimizer keeps their other half.
    """
    live = model.state_dict(keep_vars=True)
    owned = {id(t) for _, t in (*model.named_parameters(), *model.named_buffers())}
    saved_name = match(candidate.node, live)
    plan, filled = ModelPlan(), dict[int, TensorRef]()
    for name, tensor in live.items():
        if name not in saved_name:
            continue
        value = candidate.node[saved_name[name]]
        if name.endswith("_extra_state"):
            if problem := builder.problem("its extra state", value):
                plan.problems.append(f"{name}: {problem}")
            else:
                plan.extra[name] = builder.build(value)
        elif id(tensor) not in owned or not isinstance(value, TensorRef):
            plan.problems.append(f"{name}: is not a tensor that can be filled in place")
        elif problem := _mismatch(value, tensor, is_half=id(tensor) in halves):
            plan.problems.append(f"{name}: {problem}")
        elif id(tensor) not in filled:
            filled[id(tensor)] = value
            plan.copies.append((name, value, tensor))
        elif not streamer.equal(filled[id(tensor)], value):
            plan.problems.append(f"{name}: is tied in the model, but was saved with other values than its twin")
    # A tied tensor is there if it was saved under any of its names.
    present, taken = {id(live[name]) for name in saved_name}, set(saved_name.values())
    missing = (name for name, tensor in live.items() if name not in saved_name and id(tensor) not in present)
    plan.problems += [f"{name}: is missing from the checkpoint" for name in missing]
    extra = (name for name in candidate.node if name not in taken)
    plan.problems += [f"{name}: is in the checkpoint but not in the model" for name in extra]
    return plan


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
    is_view = ref.conj or ref.neg
    return "was saved as a conjugate or negative view, which resume does not support" if is_view else None


STRUCTURE = frozenset({"params", "param_names", CHECKS})
"""Keys about the parameters themselves, not about how to step them."""

IMPLEMENTATION = frozenset({"foreach", "fused", "triton", "capturable", "differentiable"})
"""Keys for how to compute a step. This depends on the machine, so the live setting stays where there is one."""

_ADDED_BY_TORCH = IMPLEMENTATION | {"maximize", "amsgrad", "decoupled_weight_decay"}
"""Keys that files of older versions lack; the live setting stays."""

_CLASS_MARKERS = ("decoupled_weight_decay", "decouple_wd", "gradient_release")
"""Settings that turn an optimizer into another, such as AdamW into Adam."""

_OTHER_SETTINGS = frozenset(
    {
        *("alpha", "rho", "ams_bound", "centered", "lr_decay", "ns_steps"),
        *("decoupled_weight_decay", "decouple_wd", "decouple_lr", "weight_decouple", "fixed_decay", "kahan_sum"),
        *("gradient_release", "quantize", "master_bytewidth"),
        *("trust_coefficient", "momentum_decay", "rectify", "degenerated_to_sgd", "nus", "gamma", "hessian_power"),
        *("update_period", "final_lr", "k", "adanorm", "adam_debias", "stable_adamw", "cautious"),
    }
)
"""Settings that no card lists: of unknown optimizers, and of how packages implement known ones."""


def _hyperparameters() -> set[str]:
    """The settings of all optimizers. A scheduler or the user added any other key."""
    return setting_names() | _OTHER_SETTINGS


_FORMS = frozenset(
    {
        *("beta1", "beta2", "eps1", "eps2", "amsgrad", "ams_bound", "decoupled_weight_decay", "decouple_wd"),
        *("decouple_lr", "weight_decouple", "fixed_decay", "kahan_sum", "gradient_release"),
    }
)
"""Settings that packages spell differently for one and the same optimizer, or that have checks of their own."""

_BOOKKEEPING = frozenset({"step", "setup", "master", "moment1", "moment2", "seed", "rule"})
"""Keys that optimizers, of packages and ours, keep in a group for themselves."""


def class_problem(saved: Mapping[Any, Any], live: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    """Why a saved group cannot be one of this optimizer, or None."""
    if missing := defaults.keys() - saved.keys() - _ADDED_BY_TORCH - STRUCTURE:
        return f"its parameter groups lack {listed(sorted(missing))}"
    if foreign := (saved.keys() & _hyperparameters()) - defaults.keys() - live.keys():
        return f"its parameter groups have {listed(sorted(foreign))}"
    for key in _CLASS_MARKERS:
        if key in saved and key in live and bool(saved[key]) != bool(live[key]):
            return f"it was saved with {key}={saved[key]}, here it is {live[key]}"
    return length_problem(saved, live)


def length_problem(saved: Mapping[Any, Any], live: Mapping[str, Any]) -> str | None:
    """Why ``betas`` or ``eps`` have another number of values than here, or None."""
    for key in (key for key in ("betas", "eps") if key in saved and key in live):
        if len({len(group[key]) if isinstance(group[key], (tuple, list)) else 1 for group in (saved, live)}) > 1:
            return f"its {key} are {saved[key]}, here they are {live[key]}"
    return None


def foreign_settings(saved: Mapping[Any, Any], arguments: Collection[str]) -> str | None:
    """Why a group is not of an optimizer with these ``arguments``: it has settings beyond them; or None."""
    foreign = (saved.keys() & _hyperparameters()) - set(arguments) - _FORMS
    return f"its parameter groups have {listed(sorted(foreign))}" if foreign else None


def added_entries(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group that a scheduler or the user added to the settings of the optimizer."""
    known = STRUCTURE | IMPLEMENTATION | _hyperparameters() | _BOOKKEEPING
    return {key: value for key, value in saved.items() if key not in known and value is not None}


def restored(saved: Mapping[Any, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a live group takes from ``saved``, which holds plain values and tensors."""
    values = {}
    for key, value in saved.items():
        current = live.get(key)
        if key in STRUCTURE or (key in IMPLEMENTATION and current is not None):
            continue
        values[key] = value.clone() if isinstance(value, torch.Tensor) else value
        if isinstance(current, torch.Tensor):
            new = torch.as_tensor(value, dtype=current.dtype, device=current.device).clone()
            values[key] = new.reshape(current.shape) if new.numel() == current.numel() else new
    return values


Saved = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """A live parameter, the identifier of its saved state, and its name for messages."""

    parameter: Tensor
    identifier: int | str
    name: str


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A live parameter group, the saved one (None if the checkpoint has none of its parameters), and its pairs."""

    live: dict[str, Any]
    saved: Saved | None
    pairs: list[Pair]


NewState = tuple[dict[str, Any], list[Fill]]
"""The new state of one parameter, its tensors still empty, and what fills them."""


@dataclass(slots=True)
class OptimizerPlan:
    """What resume is going to do to an optimizer: new states, and new values for each live group.

    ``pairs`` are the live groups in their order. ``states`` has for each parameter a function that allocates its state,
    or None where the checkpoint has none, as for a parameter that never had a gradient. ``wrong`` says why nothing of
    the checkpoint fits; ``problems`` are those of single parameters. ``rounded`` fills live parameters that take only
    the upper half of their saved weights, by ``id``. An optimizer that loads its state itself has ``build`` in place of
    states and groups: it makes the state dict.
    """

    pairs: list[GroupPair] = field(default_factory=list)
    states: list[tuple[torch.Tensor, Callable[[], NewState] | None]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: str | None = None
    rounded: dict[int, Fill] = field(default_factory=dict)
    build: Callable[[], dict[str, Any]] | None = None


def live_names(optimizer: Optimizer, model: nn.Module | None) -> dict[int, list[str]]:
    """All names of every parameter, by ``id``: those in ``model``, else the ``param_names`` of the groups."""
    names: dict[int, list[str]] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    for group in optimizer.param_groups:
        for name, parameter in zip(group.get("param_names") or (), group["params"], strict=False):
            names.setdefault(id(parameter), [str(name)])
    return names


def map_parameters(saved: Sequence[Saved], optimizer: Optimizer, model: nn.Module | None) -> OptimizerPlan:
    """Pair saved and live parameters. Raises ResumeError where only a guess could do that."""
    names_there, names_here = saved_names(saved), live_names(optimizer, model)
    if isinstance(names_there, str):
        raise ResumeError(names_there)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if names_there and all(id(parameter) in names_here for parameter in parameters):
        return _map_by_name(saved, names_there, optimizer.param_groups, names_here)
    require(
        not any(isinstance(identifier, str) for identifier in names_there),
        "its state has parameter names, which this optimizer does not know; give model= as well",
        ResumeError,
    )
    return _map_by_order(saved, optimizer.param_groups, names_here)


def _map_by_name(
    saved: Sequence[Saved],
    names_there: Mapping[int | str, str],
    live: Sequence[dict[str, Any]],
    names_here: Mapping[int, list[str]],
) -> OptimizerPlan:
    identifier_of = {name: identifier for identifier, name in names_there.items()}
    matched = match(
        names_there.values(),
        (name for group in live for identifier in group["params"] for name in names_here[id(identifier)]),
    )
    group_of = {identifier: k for k, group in enumerate(saved) for identifier in group["params"]}
    result = OptimizerPlan()
    for group in live:
        pairs = []
        for parameter in group["params"]:
            names = sorted({matched[name] for name in names_here[id(parameter)] if name in matched})
            if len(names) > 1:
                raise ResumeError(f"{listed(names)} are one tied parameter here, but several in the checkpoint")
            if names:
                pairs.append(Pair(parameter, identifier_of[names[0]], names[0]))
            else:
                result.problems.append(f"{names_here[id(parameter)][0]}: is not in the optimizer of the checkpoint")
        numbers = sorted({group_of[pair.identifier] for pair in pairs})
        settings = [{key: value for key, value in saved[at].items() if key not in STRUCTURE} for at in numbers]
        if any(own != settings[0] for own in settings):
            raise ResumeError(
                f"parameters of one group here belong to groups {listed(numbers)} with other hyperparameters"
            )
        result.pairs.append(GroupPair(group, saved[numbers[0]] if numbers else None, pairs))
    taken = {pair.identifier for group in result.pairs for pair in group.pairs}
    extra = (name for identifier, name in names_there.items() if identifier not in taken)
    result.problems += [f"{name}: is in the optimizer of the checkpoint but not in this one" for name in extra]
    return result


def _map_by_order(
    saved: Sequence[Saved], live: Sequence[dict[str, Any]], names_here: Mapping[int, list[str]]
) -> OptimizerPlan:
    """Pair by the running index over the groups, which means the same parameter only where the groups are equal."""
    before, now = ([len(group["params"]) for group in groups] for groups in (saved, live))
    require(
        before == now,
        f"its parameter groups hold {before} parameters, those here hold {now}, and the file has no names; "
        "give this optimizer the groups of the saved one",
        ResumeError,
    )
    decays, decays_here = ([group.get("weight_decay") for group in groups] for groups in (saved, live))
    are_numbers = all(isinstance(decay, (int, float)) for decay in (*decays, *decays_here))
    if are_numbers and decays != decays_here and sorted(decays) == sorted(decays_here):  # type: ignore[type-var]
        raise ResumeError(
            "its parameter groups have the weight decays of those here in another order, and the file has no names; "
            "give this optimizer its groups in the saved order"
        )
    result, numbers = OptimizerPlan(), count()
    for there, group in zip(saved, live, strict=True):
        pairs = [
            Pair(parameter, identifier, names_here.get(id(parameter), [f"parameter {number}"])[0])
            for identifier, parameter, number in zip(there["params"], group["params"], numbers, strict=False)
        ]
        result.pairs.append(GroupPair(group, there, pairs))
    return result
