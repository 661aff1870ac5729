"""From a saved optimizer to the state of a live one: what is checked, what is allocated, what is assigned.

State is assigned to ``optimizer.state`` directly, as fresh tensors of the saved element type and strides.
``Optimizer.load_state_dict`` would cast them all to the type of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt8.errors import ResumeError
from ckpt8.plan import is_dense
from ckpt8.readers.base import TensorRef
from ckpt8.resuming.find import Candidate
from ckpt8.resuming.groups import class_problem, is_packed_group, restored
from ckpt8.resuming.layouts import Layout, expected_shape, layout_of
from ckpt8.resuming.mapping import Pair, ParameterMap, map_parameters
from ckpt8.resuming.names import listed
from ckpt8.resuming.rest import RestBuilder
from ckpt8.resuming.steps import exact_step, group_step_problem
from ckpt8.resuming.streaming import Copy, Fill

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ckpt8.resuming.packed import PackedPlanner

_WHOLE_GROUP = "group"
"""optimi with gradient release keeps a reference to the parameter group in the state of each parameter."""


Made = tuple[dict[str, Any], list[Fill]]
"""New state, and what fills it."""


@dataclass(slots=True)
class StatePlan:
    """The new state of one parameter; None where the checkpoint has none, as for one that never had a gradient.

    ``make``, where there is one, gives it when the time has come to allocate memory.
    """

    pair: Pair
    values: dict[str, Any] | None
    make: Callable[[], Made] | None = None


@dataclass(slots=True)
class OptimizerPlan:
    """What to assign. ``wrong`` says why nothing of the checkpoint fits; ``problems`` are single parameters.

    ``rounded``: what fills a live parameter that takes only the upper half of its saved weights, by ``id``.
    """

    states: list[StatePlan] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: str | None = None
    rounded: dict[int, Fill] = field(default_factory=dict)


def plan_optimizer(
    candidate: Candidate,
    optimizer: Optimizer,
    model: nn.Module | None,
    builder: RestBuilder,
    packed: PackedPlanner | None = None,
) -> OptimizerPlan:
    """Pair the parameters, check every state and build the hyperparameters; nothing is changed.

    ``packed`` plans in place of the rest where ``optimizer`` is one of ``ckpt8.optim``.
    """
    saved, live = candidate.node["param_groups"], optimizer.param_groups
    if not all(isinstance(group, dict) for group in saved):
        return OptimizerPlan(wrong="its parameter groups are malformed")
    if packed is None and any(is_packed_group(group) for group in saved):
        return OptimizerPlan(wrong="is of ckpt8.optim; ckpt8.load(path, unpack=True) gives its state unpacked")
    for group in saved:
        problem = packed.class_problem(group) if packed else class_problem(group, live[0], optimizer.defaults)
        if problem is not None:
            return OptimizerPlan(wrong=f"is of another optimizer than {type(optimizer).__name__}: {problem}")
    mapped = map_parameters(saved, optimizer, model)
    if isinstance(mapped, str):
        return OptimizerPlan(wrong=mapped)
    listed_ids = {identifier for group in saved for identifier in group["params"]}
    unlisted = [str(identifier) for identifier in candidate.node["state"] if identifier not in listed_ids]
    mapped.problems += [f"state of {listed(unlisted)}: belongs to no parameter of its groups"] if unlisted else []
    if packed is not None:
        return packed.plan(candidate.node, mapped)
    return _plan_mapped(candidate.node, mapped, optimizer, builder)


def _plan_mapped(
    node: Mapping[Any, Any], mapped: ParameterMap, optimizer: Optimizer, builder: RestBuilder
) -> OptimizerPlan:
    plan = OptimizerPlan(problems=list(mapped.problems))
    layout = layout_of(optimizer)
    for group, pairs, index in zip(optimizer.param_groups, mapped.pairs, mapped.group_of, strict=True):
        if index is None:
            continue
        hyper = node["param_groups"][index]
        if layout is not None and layout.step == "group" and any(pair.identifier in node["state"] for pair in pairs):
            plan.wrong = plan.wrong or group_step_problem(hyper)
        plain = {key: builder.build(value) for key, value in hyper.items() if key != "params"}
        plan.groups.append((group, restored(plain, group)))
        for pair in pairs:
            saved = node["state"].get(pair.identifier)
            problem = _state_problem(saved, pair, layout, optimizer, hyper)
            if problem is not None:
                plan.problems.append(f"{pair.name}: {problem}")
            else:
                plan.states.append(StatePlan(pair, _values(saved, layout, group, builder, pair)))
    return plan


def _state_problem(
    saved: Any, pair: Pair, layout: Layout | None, optimizer: Optimizer, hyper: Mapping[Any, Any]
) -> str | None:
    if saved is None or saved == {}:
        return None
    if not isinstance(saved, dict):
        return "its optimizer state is malformed"
    live = optimizer.state.get(pair.parameter)
    keys = {key for key in saved if key != _WHOLE_GROUP}
    if layout is not None:
        required = layout.keys(pair.parameter.dim())
        required |= {"max_exp_avg_sq"} if hyper.get("amsgrad") and "max_exp_avg_sq" in layout.optional else set()
        allowed = required | layout.optional
    elif live:
        required = allowed = frozenset(live) - {_WHOLE_GROUP}
    else:
        required, allowed = frozenset(), frozenset(keys)
    if required - keys:
        return f"its optimizer state lacks {listed(sorted(required - keys))}"
    if keys - allowed:
        return f"its optimizer state has {listed(sorted(keys - allowed))}, which {type(optimizer).__name__} has not"
    tensors = {key: value for key, value in saved.items() if isinstance(value, TensorRef)}
    problems = (_tensor_problem(key, ref, pair.parameter, layout, live) for key, ref in tensors.items())
    return next((problem for problem in problems if problem is not None), None)


def _tensor_problem(
    key: str, ref: TensorRef, parameter: Tensor, layout: Layout | None, live: Mapping[str, Any] | None
) -> str | None:
    import torch

    if ref.conj or ref.neg:
        return f"{key} was saved as a conjugate or negative view, which resume does not support"
    if key == "step" or (key == "kahan_comp" and ref.shape == (1,)):
        return None
    twin = live.get(key) if live and layout is None else None
    if isinstance(twin, torch.Tensor):
        shape: tuple[int, ...] | None = tuple(twin.shape)
        dtypes = {twin.dtype}
    else:
        shape = expected_shape(key, tuple(parameter.shape))
        dtypes = set() if layout is None or shape is None else {parameter.dtype}
        if layout is not None and layout.widened and dtypes and parameter.element_size() == 2:
            dtypes.add(torch.float32)
    if shape is not None and ref.shape != shape:
        return f"{key} was saved with shape {list(ref.shape)}, here it has {list(shape)}"
    if dtypes and ref.dtype.torch not in dtypes:
        here = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"{key} was saved as {ref.dtype.label}, here it is {here}"
    return None


def _values(
    saved: Any, layout: Layout | None, group: Mapping[str, Any], builder: RestBuilder, pair: Pair
) -> dict[str, Any] | None:
    """State with TensorRefs where tensors are still to be made; the step is made here."""
    if saved is None:
        return None
    values = {}
    for key, value in saved.items():
        if key == _WHOLE_GROUP:
            continue
        if key == "step" and layout is not None:
            values[key] = exact_step(builder.build(value), layout, group, pair)
        else:
            values[key] = value if isinstance(value, TensorRef) else builder.build(value)
    return values


def allocate(plan: OptimizerPlan) -> list[Fill]:
    """Make the tensors of the new state, on the devices of their parameters, and say what fills them.

    Raises ResumeError when there is not enough memory; nothing has been changed then.
    """
    fills: list[Fill] = []
    try:
        for state in plan.states:
            if state.make is not None:
                state.values, made = state.make()
                fills += made
                continue
            values = state.values or {}
            for key, value in values.items():
                if isinstance(value, TensorRef):
                    values[key] = _empty(value, state.pair.parameter.device if key != "step" else None)
                    fills.append(Copy(f"{state.pair.name}: {key}", value, values[key]))
    except RuntimeError as exc:
        raise ResumeError(f"the optimizer state cannot be allocated: {str(exc).splitlines()[0]}") from exc
    return fills


def _empty(ref: TensorRef, device: torch.device | None) -> Tensor:
    import torch

    if is_dense(ref):
        return torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype.torch, device=device)
    return torch.empty(ref.shape, dtype=ref.dtype.torch, device=device)


def assign(plan: OptimizerPlan, optimizer: Optimizer) -> None:
    """Put the new state and hyperparameters in place of the old, of which fused steps keep tables."""
    optimizer.__dict__.pop("_fused", None)
    for state in plan.states:
        old = optimizer.state.pop(state.pair.parameter, None) or {}
        if state.values is not None or _WHOLE_GROUP in old:
            kept = {_WHOLE_GROUP: old[_WHOLE_GROUP]} if _WHOLE_GROUP in old else {}
            optimizer.state[state.pair.parameter] = kept | (state.values or {})
    for group, values in plan.groups:
        group.update(values)
