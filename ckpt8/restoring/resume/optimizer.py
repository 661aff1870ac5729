"""From a saved optimizer to the state of a live one: what is checked, what is allocated, what is assigned.

State is assigned to ``optimizer.state`` directly, as fresh tensors of the saved element type and strides.
``Optimizer.load_state_dict`` would cast them all to the type of the parameter. Classes that load their state in a way
of their own do so: see ``own_loading``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.state_dicts import Candidate, is_packed_group
from ckpt8.checkpoint.sources.values import Fill
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.core.errors import ResumeError
from ckpt8.core.text import listed
from ckpt8.restoring.resume.fills import Copy
from ckpt8.restoring.resume.groups import STRUCTURE, class_problem, restored
from ckpt8.restoring.resume.live_parameters import Pair, ParameterMap, map_parameters
from ckpt8.restoring.resume.live_values import ValueBuilder
from ckpt8.restoring.resume.own_loading import OwnState, load, loads_itself
from ckpt8.restoring.resume.packed_state import PackedPlanner
from ckpt8.restoring.resume.plans import OptimizerPlan, StatePlan
from ckpt8.restoring.resume.published_state import (
    Layout,
    exact_step,
    group_step_problem,
    is_packed,
    layout_of,
    unwrapped,
)
from ckpt8.restoring.resume.state_checks import WHOLE_GROUP, object_problem, state_problem

_WHOLE = "its state is taken as a whole or not at all"


def plan_optimizer(
    candidate: Candidate,
    optimizer: Optimizer,
    model: nn.Module | None,
    builder: ValueBuilder,
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
    # Groups may have settings of their own, as those of Muon that are stepped by Adam.
    settings = {key: value for group in reversed(live) for key, value in group.items()}
    for group in saved:
        problem = packed.class_problem(group) if packed else class_problem(group, settings, optimizer.defaults)
        if problem is not None:
            return OptimizerPlan(wrong=f"is of another optimizer than {type(optimizer).__name__}: {problem}")
    mapped = _object_in_groups(saved, builder) or map_parameters(saved, optimizer, model)
    if isinstance(mapped, str):
        return OptimizerPlan(wrong=mapped)
    return _plan_states(candidate.node, mapped, optimizer, builder, packed)


def _plan_states(
    node: Mapping[str, Any],
    mapped: ParameterMap,
    optimizer: Optimizer,
    builder: ValueBuilder,
    packed: PackedPlanner | None,
) -> OptimizerPlan:
    if packed is None and loads_itself(optimizer, node):
        own = OwnState(node, mapped, optimizer.param_groups, builder)
        return OptimizerPlan(problems=own.problems, wrong=_WHOLE if own.problems else None, own=own)
    listed_ids = {identifier for group in node["param_groups"] for identifier in group["params"]}
    unlisted = [str(identifier) for identifier in node["state"] if identifier not in listed_ids]
    mapped.problems += [f"state of {listed(unlisted)}: belongs to no parameter of its groups"] if unlisted else []
    if packed is not None:
        return packed.plan(node, mapped)
    return _plan_mapped(node, mapped, optimizer, builder)


def _object_in_groups(saved: Sequence[Mapping[Any, Any]], builder: ValueBuilder) -> str | None:
    settings = ({key: value for key, value in group.items() if key not in STRUCTURE} for group in saved)
    return object_problem(list(settings), builder, "a parameter group")


def _plan_mapped(
    node: Mapping[Any, Any], mapped: ParameterMap, optimizer: Optimizer, builder: ValueBuilder
) -> OptimizerPlan:
    plan = OptimizerPlan(problems=list(mapped.problems))
    layout = layout_of(optimizer)
    for group, pairs, index in zip(optimizer.param_groups, mapped.pairs, mapped.group_of, strict=True):
        if index is None:
            continue
        hyper = node["param_groups"][index]
        if (
            layout is not None
            and layout.published.step == "group"
            and any(pair.identifier in node["state"] for pair in pairs)
        ):
            plan.wrong = plan.wrong or group_step_problem(hyper)
        plain = {key: builder.build(value) for key, value in hyper.items() if key != "params"}
        plan.groups.append((group, restored(plain, group)))
        for pair in pairs:
            saved = node["state"].get(pair.identifier)
            problem = state_problem(saved, pair, layout, optimizer, hyper, builder)
            if problem is not None:
                plan.problems.append(f"{pair.name}: {problem}")
            else:
                plan.states.append(StatePlan(pair, _values(saved, layout, group, builder, pair)))
    return plan


def _values(
    saved: Any, layout: Layout | None, group: Mapping[str, Any], builder: ValueBuilder, pair: Pair
) -> dict[str, Any] | None:
    """State with TensorRefs where tensors are still to be made; the step is made here."""
    if saved is None:
        return None
    values = {}
    for key, value in saved.items():
        if key == WHOLE_GROUP:
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
        plan.loaded = plan.own.build() if plan.own is not None else None
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
    if is_dense(ref):
        return torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype.torch, device=device)
    return torch.empty(ref.shape, dtype=ref.dtype.torch, device=device)


def assign(plan: OptimizerPlan, optimizer: Optimizer) -> None:
    """Put the new state and hyperparameters in place of the old, of which fused steps keep tables.

    Raises ResumeError where the class of the optimizer does not take them.
    """
    if plan.loaded is not None:
        load(optimizer, partial(optimizer.load_state_dict, plan.loaded))
        return
    optimizer.__dict__.pop("_fused", None)
    for state in plan.states:
        old = optimizer.state.pop(state.pair.parameter, None) or {}
        if state.values is not None or WHOLE_GROUP in old:
            kept = {WHOLE_GROUP: old[WHOLE_GROUP]} if WHOLE_GROUP in old else {}
            optimizer.state[state.pair.parameter] = kept | (state.values or {})
    for group, values in plan.groups:
        group.update(values)
    if not is_packed(optimizer) and layout_of(optimizer) is None:
        # What classes add to, or change of, state that an older version saved.
        inner = unwrapped(optimizer)
        load(inner, partial(inner.__setstate__, {"state": inner.state, "param_groups": inner.param_groups}))
