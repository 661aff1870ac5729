"""Plans the state of a live optimizer from a saved one, and later allocates, fills and assigns it.

The state goes to ``optimizer.state`` directly, as fresh tensors of the saved element type and strides.
``Optimizer.load_state_dict`` would cast them all to the type of the parameter. ``packed_state`` plans optimizers of
``ckpt8.optim``; ``own_loading`` plans classes that load their state themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.state_dicts import Candidate, is_packed_group
from ckpt8.checkpoint.sources.values import Fill, Streamer
from ckpt8.checkpoint.tree import Checkpoint, TensorRef, is_dense
from ckpt8.core.errors import ResumeError
from ckpt8.core.text import listed
from ckpt8.restoring.resume.fills import Copy, NewState, OptimizerPlan
from ckpt8.restoring.resume.groups import STRUCTURE, class_problem, restored
from ckpt8.restoring.resume.live_parameters import Pair, ParameterMap, map_parameters
from ckpt8.restoring.resume.live_values import ValueBuilder
from ckpt8.restoring.resume.own_loading import load, loads_itself, plan_own_state
from ckpt8.restoring.resume.packed_state import PackedPlanner
from ckpt8.restoring.resume.state_checks import (
    WHOLE_GROUP,
    exact_step,
    layout_of,
    object_problem,
    packed_optimizer,
    state_problem,
    unwrapped,
)


def plan_optimizer(
    candidate: Candidate,
    optimizer: Optimizer,
    model: nn.Module | None,
    builder: ValueBuilder,
    packed: PackedPlanner | None,
) -> OptimizerPlan:
    """Pair the parameters, check every state and build the hyperparameters; nothing is changed.

    ``packed`` plans the states of an optimizer of ``ckpt8.optim``. Raises ResumeError where nothing of ``candidate``
    fits.
    """
    node, live = candidate.node, optimizer.param_groups
    saved = node["param_groups"]
    if not all(isinstance(group, dict) for group in saved):
        raise ResumeError("its parameter groups are malformed")
    if packed is None and any(is_packed_group(group) for group in saved):
        raise ResumeError("is of ckpt8.optim; ckpt8.load(path, unpack=True) gives its state unpacked")
    # Groups may have settings of their own: Muon steps some of them with Adam.
    settings = {key: value for group in reversed(live) for key, value in group.items()}
    for group in saved:
        problem = packed.class_problem(group) if packed else class_problem(group, settings, optimizer.defaults)
        if problem is not None:
            raise ResumeError(f"is of another optimizer than {type(optimizer).__name__}: {problem}")
    hyper = [{key: value for key, value in group.items() if key not in STRUCTURE} for group in saved]
    if problem := object_problem(hyper, builder, "a parameter group"):
        raise ResumeError(problem)
    mapped = map_parameters(saved, optimizer, model)
    if packed is None and loads_itself(optimizer, node):
        return plan_own_state(node, mapped, builder)
    listed_ids = {identifier for group in saved for identifier in group["params"]}
    if unlisted := [str(identifier) for identifier in node["state"] if identifier not in listed_ids]:
        mapped.problems.append(f"state of {listed(unlisted)}: belongs to no parameter of its groups")
    return packed.plan(node, mapped) if packed else _plan_states(node["state"], mapped, optimizer, builder)


def _plan_states(
    states: Mapping[Any, Any], mapped: ParameterMap, optimizer: Optimizer, builder: ValueBuilder
) -> OptimizerPlan:
    """The plan of an optimizer of another package: it takes its state as saved."""
    plan = OptimizerPlan(problems=list(mapped.problems))
    layout = layout_of(optimizer)
    for group in mapped.groups:
        if group.saved is None:
            continue
        keeps_step = layout is not None and layout.published.step == "group"
        has_state = any(pair.identifier in states for pair in group.pairs)
        if keeps_step and has_state and type(group.saved.get("step")) not in (int, TensorRef):
            plan.wrong = plan.wrong or "its parameter groups lack the step that this optimizer keeps there"
        plain = {key: builder.build(value) for key, value in group.saved.items() if key != "params"}
        plan.groups.append((group.live, restored(plain, group.live)))
        for pair in group.pairs:
            saved = states.get(pair.identifier)
            if problem := state_problem(saved, pair, layout, optimizer, group.saved, builder):
                plan.problems.append(f"{pair.name}: {problem}")
            elif saved is None:
                plan.states.append((pair.parameter, None))
            else:
                values = {
                    key: value if isinstance(value, TensorRef) else builder.build(value)
                    for key, value in saved.items()
                    if key != WHOLE_GROUP
                }
                if "step" in values and layout is not None:
                    values["step"] = exact_step(builder.build(saved["step"]), layout, group.live, pair)
                plan.states.append((pair.parameter, partial(_new_state, values, pair)))
    return plan


def _new_state(values: dict[str, Any], pair: Pair) -> NewState:
    """``values`` with an empty tensor in the place of every TensorRef, and the copies that fill these."""
    fills: list[Fill] = []
    for key, ref in values.items():
        if isinstance(ref, TensorRef):
            values[key] = _empty(ref, pair.parameter.device if key != "step" else None)
            fills.append(Copy(f"{pair.name}: {key}", ref, values[key]))
    return values, fills


def _empty(ref: TensorRef, device: torch.device | None) -> Tensor:
    if is_dense(ref):
        return torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype.torch, device=device)
    return torch.empty(ref.shape, dtype=ref.dtype.torch, device=device)


def apply(plan: OptimizerPlan, optimizer: Optimizer, checkpoint: Checkpoint, streamer: Streamer) -> None:
    """Make the new state on the devices of the parameters, fill it, and replace the old state and hyperparameters.

    Raises ResumeError for lack of memory, before anything changes, and where the class does not take the state;
    InputError for damage.
    """
    try:
        loaded = plan.build() if plan.build is not None else None
        made = [(parameter, allocate() if allocate else None) for parameter, allocate in plan.states]
    except RuntimeError as exc:
        raise ResumeError(f"the optimizer state cannot be allocated: {str(exc).splitlines()[0]}") from exc
    streamer.run(fill for _, new in made if new is not None for fill in new[1])
    checkpoint.check_unchanged()
    if loaded is not None:
        load(optimizer, partial(optimizer.load_state_dict, loaded))
        return
    # Fused steps keep tables of the tensors that are replaced here.
    optimizer.__dict__.pop("_fused", None)
    for parameter, new in made:
        old = optimizer.state.pop(parameter, None) or {}
        kept = {WHOLE_GROUP: old[WHOLE_GROUP]} if WHOLE_GROUP in old else {}
        if new is not None or kept:
            optimizer.state[parameter] = kept | (new[0] if new is not None else {})
    for group, values in plan.groups:
        group.update(values)
    if packed_optimizer(optimizer) is None and layout_of(optimizer) is None:
        # Unknown classes complete here the state that an older version of them saved.
        inner = unwrapped(optimizer)
        load(inner, partial(inner.__setstate__, {"state": inner.state, "param_groups": inner.param_groups}))
