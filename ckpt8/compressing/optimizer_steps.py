"""The step of the optimizer that moves each parameter of a plan, and units that hold a weight with its moments.

A budget counts these steps. The weight of a parameter is a stream of its unit where the source says which it is,
and where its elements lie as those of the moments do; where a flat one ends before the padding of its moments, zeros
have to follow it in its storage. Nothing is guessed from values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt8.checkpoint.meaning.trained import Trained, trained_states
from ckpt8.checkpoint.meaning.update_rules import finite
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import NamedTensor, TensorRef, is_dense
from ckpt8.compressing.parameters import OptimizerStep, Parameter
from ckpt8.compressing.plan import Plan, Stream, Unit, join, views_of
from ckpt8.optim.known_optimizers import setting

_RULES = ("adam", "stable_adamw", "came")
"""The kinds of rules whose steps a budget can be told in."""

_DECOUPLED = ("decoupled_weight_decay", "weight_decouple")
"""Settings that are False where weight decay is part of the gradient."""

_UNKNOWN = Trained(0, {}, None, "its optimizer is not known")
_LEAST_SHARE = 0.1
"""A learning rate counts as this part of the initial one at least: what a decay has left says little of the weights."""


def attach_steps(plan: Plan, bundle: Bundle) -> None:
    """Give every parameter of ``plan`` its step, or the reason why it has none, and join weights into their units."""
    if any(unit.parameter is not None for unit in plan.units):
        steps = _Steps(plan, bundle)
        parameters = [steps.with_step(unit.parameter) for unit in plan.units if unit.parameter is not None]
        plan.units, plan.stepless = join(plan.units, parameters), steps.stepless


def copy_steps_from(plan: Plan, other: Plan) -> None:
    """Give the parameters of ``plan`` the steps that ``other``, a plan of the same source, has, and the same copies."""
    plan.units = join(plan.units, [unit.parameter for unit in other.units if unit.parameter is not None])
    plan.copies, plan.stepless = other.copies, other.stepless


class _Steps:
    """Finds the steps of the parameters of one plan. A weight belongs to one parameter."""

    def __init__(self, plan: Plan, bundle: Bundle) -> None:
        self._streams = plan.streams
        self._index = {stream.storage.key: stream.index for stream in self._streams}
        self._views = views_of(plan.tensors)
        self._masters = plan.masters
        self._chosen = plan.chosen
        self._taken = {index for unit in plan.units if unit.parameter is not None for index in _indices(unit)}
        self.stepless: dict[int, str] = {}
        self._states = trained_states(bundle.opened, bundle.key, directory=bundle.directory is not None)

    def with_step(self, parameter: Parameter) -> Parameter:
        """The parameter with its step, or without one and with the reason."""
        if parameter.rule_beside_master is not None:
            parameter = replace(parameter, rule=parameter.rule_beside_master, reason=None)
        keys = (self._streams[index].storage.key for index in parameter.moments.values())
        state = next((self._states[key] for key in keys if key in self._states), _UNKNOWN)
        step = _step(parameter, state)
        if isinstance(step, str):
            if state.weight is not None:
                index = self._index[state.weight.key]
                self.stepless[self._masters.get(index, index)] = step
            return replace(parameter, stepless=step)
        weight = self._weight(parameter, state)
        if isinstance(weight, str):
            return replace(parameter, step=replace(step, unpaired=weight))
        self._taken.add(weight)
        return replace(parameter, step=replace(step, weight=weight))

    def _weight(self, parameter: Parameter, state: Trained) -> int | str:
        """The stream of the weight, or why it is unknown. A copy stands for its master."""
        ref = state.weight
        if ref is None:
            return state.unpaired or "its weight is not known"
        (moment,) = (view.ref for view in self._views[next(iter(parameter.moments.values()))])
        index = self._index[ref.key]
        if index in self._masters:
            index = self._masters[index]
            ref = next(view.ref for view in self._views[index])
        elif self._streams[index].codec.copied is not None:
            return "its weight is a copy of masters that do not lie as its moments"
        if index in self._taken:
            return "its weight is in the step of another parameter"
        return self._misfit(index, ref, moment) or index

    def _misfit(self, index: int, ref: TensorRef, moment: TensorRef) -> str | None:
        """Why the elements of a weight and those of its moments are not in the same places; None if they are."""
        if ref.numel == moment.numel:
            fits = _order(ref) == _order(moment) and _fills(ref, self._streams[index], self._views[index])
            return None if fits else "the elements of its weight do not lie as those of its moments"
        if self._ends_before_padding(index, moment):
            return None
        return f"its weight has {ref.numel} elements and its moments have {moment.numel}: one of them is padded"

    def _ends_before_padding(self, index: int, moment: TensorRef) -> bool:
        """Whether a storage has a flat weight, and nothing but zeros from there to where its flat moments end.

        A policy chooses a codec only where the elements of no tensor are few, and zeros.
        """
        stream, views = self._streams[index], self._views[index]
        refs = (moment, *(view.ref for view in views))
        return (
            index in self._chosen
            and len(views) == 1
            and views[0].ref.offset == 0
            and stream.spec.numel == moment.numel
            and all(len(ref.shape) == 1 and is_dense(ref) for ref in refs)
        )


def _step(parameter: Parameter, state: Trained) -> OptimizerStep | str:
    """The step with no weight yet, or why it is not known."""
    group = state.group
    if parameter.rule is None or parameter.rule.kind not in _RULES:
        return parameter.reason or "a budget cannot count the steps of its optimizer"
    lr = _rate(group)
    if isinstance(lr, str):
        return lr
    betas = setting(group, "betas")
    numbers = [finite(beta) for beta in betas] if isinstance(betas, (tuple, list)) else []
    known = [beta for beta in numbers[:2] if beta is not None and 0 <= beta < 1]
    if len(known) != 2:
        return "betas are missing from the parameter group"
    decay = finite(group.get("weight_decay")) or 0.0
    is_coupled = any(group.get(key) is False for key in _DECOUPLED)
    stated = finite(group.get("lr"))
    beta1, beta2 = known
    return OptimizerStep(state.optimizer, lr, beta1, beta2, None, None, stated, decay, is_coupled)


def _rate(group: Mapping[Any, Any]) -> float | str:
    """The learning rate of a group, or why there is none."""
    lr, initial = finite(group.get("lr")), finite(group.get("initial_lr"))
    if lr is None:
        return "its learning rate is missing" if "lr" not in group else "its learning rate is not a finite number"
    lr = max(lr, _LEAST_SHARE * (initial or 0.0))
    return lr if lr > 0 else "its learning rate is zero"


def _indices(unit: Unit) -> list[int]:
    return [stream.index for stream in unit.streams]


def _order(ref: TensorRef) -> list[tuple[int, int]]:
    """The dimensions that order the elements of a tensor: size and stride of each."""
    return [(size, stride) for size, stride in zip(ref.shape, ref.stride, strict=True) if size != 1]


def _fills(ref: TensorRef, stream: Stream, views: Sequence[NamedTensor]) -> bool:
    """Whether a weight fills its storage, in which other tensors have no other elements and no other type."""
    whole = (0, stream.spec.dtype, stream.spec.numel)
    refs = (ref, *(view.ref for view in views))
    return stream.spec.dtype.is_plane_float and all(
        is_dense(ref) and (ref.offset, ref.dtype, ref.numel) == whole for ref in refs
    )
