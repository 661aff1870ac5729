"""The parameters of a checkpoint whose moments compression reads together, and how each makes a step of its state.

An error is measured in the steps of the optimizer that move each parameter. The weight of a parameter is a stream of
its unit where the source says which it is, and where its elements lie as those of the moments do; where a flat one
ends before the padding of its moments, zeros have to follow it in its storage. Nothing is guessed from values.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ckpt8.checkpoint.meaning.optimizer_state import (
    SavedParameter,
    UpdateRule,
    finite,
    identify_state,
    recognise,
    rule_of,
)
from ckpt8.checkpoint.meaning.parameters import trained_states
from ckpt8.checkpoint.meaning.replayed import LARGEST_MATRIX, Order, Replayed, find_rule
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import Checkpoint, NamedTensor, StorageInfo, TensorRef, is_dense, read_settings
from ckpt8.compressing.coded import CodedStep
from ckpt8.compressing.momentum import Momentum
from ckpt8.compressing.plan import OptimizerStep, Parameter, Plan, Replay, Stream, views_of
from ckpt8.compressing.relative import RelativeStep
from ckpt8.container.steps import COUNTED, UNCOUNTED
from ckpt8.core.tensors import DType
from ckpt8.optim.cards import Card, Form
from ckpt8.optim.known_optimizers import MASTER_KEYS, MEGATRON_MASTER, MOMENT_SLOTS, SIDE_STATE, setting


def find_parameters(
    source: Checkpoint,
    states: Iterable[SavedParameter],
    streams: Mapping[str, Stream],
    views: Mapping[int, list[NamedTensor]],
) -> list[Parameter]:
    """The parameters whose moments fill storages of their own, and those of Adafactor and of Adam in codes.

    ``streams`` are by the key that ``states`` use.
    """
    parameters, storages = [], {key: stream.storage for key, stream in streams.items()}
    groups: dict[int, tuple[Mapping[Any, Any], Mapping[Any, Any]]] = {}
    for saved in states:
        if id(saved.group) not in groups:  # with the group, so that its id stays its own
            groups[id(saved.group)] = saved.group, read_settings(source, storages, saved.group)
        own = {key: value for key, value in saved.state.items() if key in SIDE_STATE}
        numbers = read_settings(source, storages, own)
        state = replace(saved, state={**saved.state, **numbers}, group=groups[id(saved.group)][1])
        optimizer = identify_state(state.state, state.group)
        attempts: tuple[Mapping[str, str], ...] = (_replayed_slots(optimizer), MOMENT_SLOTS)
        for slots in attempts:
            refs = {key: ref for key, ref in state.state.items() if key in slots and isinstance(ref, TensorRef)}
            owned = all(_owns(ref, streams[ref.key], views) for ref in refs.values())
            owned = owned and any(slots[key] != "weight" for key in refs)
            if owned and len({(ref.shape, ref.stride) for ref in refs.values()}) == 1:
                parameters.append(_parameter(streams, state, refs, slots, optimizer))
                break
        else:
            parameters += _without_streams(streams, state)
    return parameters


def _without_streams(streams: Mapping[str, Stream], saved: SavedParameter) -> Iterator[Parameter]:
    """The parameter of a state whose moments are no streams: of Adafactor, or of Adam in codes."""
    found = RelativeStep.of(saved.state, saved.group) or CodedStep.of(saved.state, saved.group)
    if found is not None and saved.whole is None:
        shape, refs, step = found
        squares = [(streams[ref.key].storage, ref) for ref in refs]
        if not any(streams[ref.key].lossy for ref in refs):
            yield Parameter(saved.name, {}, None, step.unreplayed, shape, squares=squares, measure=step)


def _replayed_slots(card_and_form: tuple[Card, Form] | None) -> Mapping[str, str]:
    """The slots of what a replayed step needs besides statistics, by key; empty where no step is replayed."""
    if card_and_form is None or card_and_form[1].update != "replayed":
        return {}
    return {tensor.key: tensor.slot for tensor in card_and_form[1].tensors if tensor.is_moment}


def _owns(ref: TensorRef, stream: Stream, views: Mapping[int, list[NamedTensor]]) -> bool:
    """Whether a tensor of floats fills its storage and is the only one in it; other types are kept as bytes."""
    fills = is_dense(ref) and (ref.offset, ref.dtype, ref.numel) == (0, stream.spec.dtype, stream.spec.numel)
    return fills and len(views[stream.index]) == 1


def _parameter(
    streams: Mapping[str, Stream],
    saved: SavedParameter,
    refs: Mapping[str, TensorRef],
    slots: Mapping[str, str],
    optimizer: tuple[Card, Form] | None,
) -> Parameter:
    """The parameter of a state of ``optimizer``; ``refs`` are its tensors by key, ``slots`` the moments in them."""
    step = saved.state.get("step", saved.group.get("step"))
    rule = rule_of(optimizer, saved.state, saved.group, step if isinstance(step, (int, float)) else None)
    moments = {slots[key]: streams[ref.key].index for key, ref in refs.items() if slots[key] != "weight"}
    shape = next(iter(refs.values())).shape
    confidence: Sequence[tuple[StorageInfo, TensorRef]] = ()
    squares: Sequence[tuple[StorageInfo, TensorRef]] = ()
    replay: Replay | None = None
    if isinstance(rule, UpdateRule) and rule.kind == "came":
        confidence, squares = (
            [(streams[ref.key].storage, ref) for ref in (saved.state[f"{name}_row"], saved.state[f"{name}_col"])]
            for name in ("exp_avg_res", "exp_avg_sq")
        )
        if not all(_factors_fit(shape, refs["exp_avg"], *(ref for _, ref in pair)) for pair in (confidence, squares)):
            rule = "CAME's row and column statistics are not fp32 of the parameter's shape"
        elif _is_cut(shape, saved.whole, -2) and _is_cut(shape, saved.whole, -1):
            rule = "CAME's update of a slice with neither all rows nor all columns depends on other ranks"
    if isinstance(rule, UpdateRule) and rule.kind == "replayed":
        replayed = _replay(streams, saved, refs, step)
        rule, replay = (replayed, None) if isinstance(replayed, str) else (rule, replayed)
    measure = _momentum(optimizer, saved, moments, shape, step)
    if isinstance(rule, UpdateRule):
        return Parameter(
            saved.name,
            moments,
            rule,
            None,
            shape,
            confidence,
            replay,
            squares=squares,
            has_some_rows=bool(squares) and _is_cut(shape, saved.whole, -2),
            measure=measure,
        )
    beside_master = _rule_beside_master(saved, step)
    return Parameter(saved.name, moments, None, rule, shape, rule_beside_master=beside_master, measure=measure)


def _momentum(
    optimizer: tuple[Card, Form] | None,
    saved: SavedParameter,
    moments: Mapping[str, int],
    shape: tuple[int, ...],
    step: object,
) -> Momentum | None:
    """How a rule without second moments moves the parameter, whose own shape a slice may not have; None for others."""
    if optimizer is None or moments.keys() != {"moment1"}:
        return None
    rule = find_rule(saved.state, {"lr": 1.0, **saved.group}, step)
    return None if isinstance(rule, str) else Momentum.of(rule, saved.whole or shape)


def _rule_beside_master(saved: SavedParameter, step: object) -> UpdateRule | None:
    """The rule of a state that holds a master as well; None without a master, or for an unknown optimizer."""
    state = {key: value for key, value in saved.state.items() if key not in (*MASTER_KEYS, MEGATRON_MASTER)}
    if len(state) == len(saved.state):
        return None
    rule = recognise(state, saved.group, step if isinstance(step, (int, float)) else None)
    return rule if isinstance(rule, UpdateRule) and rule.kind in ("adam", "stable_adamw") else None


def _replay(
    streams: Mapping[str, Stream], saved: SavedParameter, refs: Mapping[str, TensorRef], step: object
) -> Replay | str:
    """How the first step is replayed, or why it is not."""
    # The update is per unit of learning rate, so that any will do; a distributed checkpoint may not tell it.
    rule = find_rule(saved.state, {"lr": 1.0, **saved.group}, step)
    if isinstance(rule, str):
        return rule
    first, others = refs.get(rule.form.tensors[0].key), {}
    moments = {tensor.key for tensor in rule.form.tensors if tensor.is_moment}
    if first is None or {key for key in moments if isinstance(saved.state.get(key), TensorRef)} != refs.keys():
        return "the tensors of its state do not fill storages of their own, in one order"
    if problem := _beyond_reach(rule, first, saved):
        return problem
    for tensor in rule.form.tensors:
        ref = saved.state.get(tensor.key)
        if not tensor.is_moment and isinstance(ref, TensorRef):
            others[tensor.key] = (streams[ref.key].storage, ref)
            if ref.shape != tensor.shape(first.shape) or streams[ref.key].lossy or not is_plain(first):
                return f"{tensor.key} is lossy, or does not have the shape of the parameter"
    state = {key: streams[ref.key].index for key, ref in refs.items()}
    return Replay(rule, Order.of(rule.form, first), state, others)


def _beyond_reach(rule: Replayed, first: TensorRef, saved: SavedParameter) -> str | None:
    """What a step needs that compression does not read with the state of a parameter, or None."""
    if rule.needs_weight:
        return "its step needs the weight, which compression does not read beside it; verify --resume-steps replays it"
    if rule.form.reach == "element":
        return None
    if first.numel > LARGEST_MATRIX:
        return f"its step takes the whole tensor, and that has more than {LARGEST_MATRIX:,} elements"
    return "its step takes the whole tensor, and the file has a slice of it" if saved.whole else None


def is_plain(ref: TensorRef) -> bool:
    """Whether the elements of a dense tensor lie in plain order."""
    return list(ref.stride) == sorted(ref.stride, reverse=True)


def _is_cut(shape: tuple[int, ...], whole: tuple[int, ...] | None, dim: int) -> bool:
    """Whether a slice of a parameter of the shape ``whole`` lacks some of its rows (-2) or of its columns (-1)."""
    return whole is not None and (len(whole) != len(shape) or whole[dim] != shape[dim])


def _factors_fit(shape: tuple[int, ...], moment: TensorRef, rows: TensorRef, columns: TensorRef) -> bool:
    return (
        len(shape) >= 2
        and is_plain(moment)
        and rows.shape == shape[:-1]
        and columns.shape == shape[:-2] + shape[-1:]
        and is_dense(rows)
        and is_dense(columns)
        and rows.dtype is columns.dtype is DType.FLOAT32
    )


_DECOUPLED = ("decoupled_weight_decay", "weight_decouple", "decouple")
"""Settings that are False where weight decay is part of the gradient."""

_SHARED = ("d", "lr", "initial_lr", "betas")
"""Settings that Prodigy has for all groups together."""

_UNKNOWN = SavedParameter("", {}, {}, unpaired="its optimizer is not known")

_LEAST_SHARE = 0.1
"""A learning rate counts as this part of the initial one at least: what a decay has left says little of the weights."""


def attach_steps(plan: Plan, bundle: Bundle) -> None:
    """Give every parameter of ``plan`` its step, or the reason why it has none, and join weights into their units."""
    parameters = [unit.parameter for unit in plan.units if unit.parameter is not None]
    if parameters := parameters + [parameter for parameter in plan.parameters if not parameter.moments]:
        steps = _Steps(plan, bundle, parameters)
        plan.parameters, plan.stepless = [steps.with_step(parameter) for parameter in parameters], steps.stepless


class _Steps:
    """Finds the steps of the ``parameters`` that have units in one plan. A weight belongs to one parameter."""

    def __init__(self, plan: Plan, bundle: Bundle, parameters: Iterable[Parameter]) -> None:
        self._streams = plan.streams
        self._index = {stream.storage.key: stream.index for stream in self._streams}
        self._views = views_of(plan.tensors)
        self._masters, self._chosen = plan.masters, plan.chosen
        self._taken = {index for parameter in parameters for index in parameter.streams}
        self.stepless: dict[int, str] = {}
        self._states = trained_states(bundle.opened, bundle.key, directory=bundle.directory is not None)
        self._optimizers = 1 + max((state.optimizer for state in self._states.values()), default=0)

    @cached_property
    def _mixed(self) -> set[int]:
        """The optimizers whose groups differ in what Prodigy has for all together."""
        groups = {(state.optimizer, id(state.group)): state.group for state in self._states.values()}
        kinds = {(optimizer, *map(repr, map(group.get, _SHARED))) for (optimizer, _), group in groups.items()}
        return {optimizer for optimizer, count in Counter(kind[0] for kind in kinds).items() if count > 1}

    def with_step(self, parameter: Parameter) -> Parameter:
        """The parameter with its step, or without one and with the reason."""
        if parameter.rule_beside_master is not None:
            parameter = replace(parameter, rule=parameter.rule_beside_master, reason=None)
        keys = [self._streams[index].storage.key for index in parameter.moments.values()]
        keys += [storage.key for storage, _ in parameter.squares]
        state = next((self._states[key] for key in keys if key in self._states), _UNKNOWN)
        step = _step(parameter, state)
        if parameter.rule is not None and parameter.rule.rate != 1 and state.optimizer in self._mixed:
            step = "its groups have other rates, betas or d, and it takes those of the first"
        if isinstance(parameter.measure, (Momentum, CodedStep)) and not isinstance(step, str):
            # Muon has groups that AdamW steps, and 8-bit Adam has small tensors in fp32: each has a budget of its own.
            step = replace(step, optimizer=step.optimizer + self._optimizers)
        weight = step if isinstance(step, str) else self._weight(parameter, state)
        if not parameter.moments and isinstance(weight, str):
            step = weight  # without moments there is nothing else to count
        if isinstance(step, str):
            if state.weight is not None:
                index = self._index[state.weight.key]
                self.stepless[self._masters.get(index, index)] = step
            return replace(parameter, stepless=step)
        if isinstance(weight, str):
            return replace(parameter, step=replace(step, unpaired=weight))
        self._taken.add(weight)
        return replace(parameter, step=replace(step, weight=weight))

    def _weight(self, parameter: Parameter, state: SavedParameter) -> int | str:
        """The stream of the weight, or why it is unknown. A copy stands for its master."""
        ref = state.weight
        if ref is None:
            return state.unpaired or "its weight is not known"
        first = next(iter(parameter.moments.values()), None)
        moment = TensorRef.whole("", ref.dtype, parameter.shape) if first is None else self._views[first][0].ref
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


def _step(parameter: Parameter, state: SavedParameter) -> OptimizerStep | str:
    """The step with no weight yet, or why it is not known."""
    group = state.group
    measure = parameter.measure
    if measure is None and (parameter.rule is None or parameter.rule.kind not in COUNTED):
        return parameter.reason or UNCOUNTED
    # A rate that the optimizer finds itself is the only one.
    lr = measure.most if isinstance(measure, RelativeStep) and group.get("relative_step") else _rate(group)
    if isinstance(lr, str):
        return lr
    betas = setting(group, "betas") if measure is None else (0.0, 0.0)
    numbers = [finite(beta) for beta in betas] if isinstance(betas, (tuple, list)) else []
    known = [beta for beta in numbers[:2] if beta is not None and 0 <= beta < 1]
    if len(known) != 2:
        return "betas are missing from the parameter group"
    decay = finite(group.get("weight_decay")) or 0.0
    is_coupled = any(group.get(key) is False for key in _DECOUPLED)
    stated = finite(group.get("lr"))
    beta1, beta2 = known
    shown = {} if measure is None else measure.stated
    if measure is None and parameter.rule is not None and (factor := parameter.rule.rate) != 1:
        lr, stated = lr * factor, None if stated is None else stated * factor
    return OptimizerStep(state.optimizer, lr, beta1, beta2, None, None, stated, decay, is_coupled, shown)


def _rate(group: Mapping[Any, Any]) -> float | str:
    """The learning rate of a group, or why there is none."""
    lr, initial = finite(group.get("lr")), finite(group.get("initial_lr"))
    if lr is None:
        return "its learning rate is missing" if "lr" not in group else "its learning rate is not a finite number"
    lr = max(lr, _LEAST_SHARE * (initial or 0.0))
    return lr if lr > 0 else "its learning rate is zero"


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
