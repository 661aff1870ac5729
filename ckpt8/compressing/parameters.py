"""The parameters of a checkpoint whose moments compression reads together, and how each makes a step of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ckpt8.checkpoint.meaning.replayed import LARGEST_MATRIX, Order, Replayed, find_rule
from ckpt8.checkpoint.meaning.roles import ParameterState
from ckpt8.checkpoint.meaning.update_rules import UpdateRule, identify_state, recognise, rule_of
from ckpt8.checkpoint.tree import Checkpoint, NamedTensor, StorageInfo, TensorRef, is_dense, read_settings
from ckpt8.core.tensors import DType, TensorSpec
from ckpt8.optim.cards import Card, Form
from ckpt8.optim.known_optimizers import MASTER_KEYS, MEGATRON_MASTER, MOMENT_SLOTS, SIDE_STATE


class Place(Protocol):
    """What is asked of a stream."""

    @property
    def index(self) -> int:
        """Its number in the container."""

    @property
    def spec(self) -> TensorSpec:
        """Its element type and number of elements."""

    @property
    def storage(self) -> StorageInfo:
        """Where it lies in the source."""

    @property
    def lossy(self) -> bool:
        """Whether decoding gives other values than the source has."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How the first step of a parameter is replayed.

    ``state`` are the streams of the unit by the key of the rule, ``statistics`` what else its state has, by key, each
    with its storage; they come back as they are.
    """

    rule: Replayed
    order: Order
    state: Mapping[str, int]
    statistics: Mapping[str, tuple[StorageInfo, TensorRef]]

    @property
    def is_whole(self) -> bool:
        """Whether the step takes all elements at once."""
        return self.rule.form.reach != "element"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What a budget needs to know of the step that moves one parameter.

    ``optimizer`` is the number of its optimizer among those of the source. ``lr`` is the learning rate of its group, at
    least a tenth of the initial one where that is known, and above zero; ``stated_lr`` is what the group says.
    ``decay`` is the weight decay, which ``is_coupled`` where it is part of the gradient. ``weight`` is the stream whose
    elements are its weights, in the order of its moments; None where that is unknown, and ``unpaired`` then says why.
    """

    optimizer: int
    lr: float
    beta1: float
    beta2: float
    weight: int | None
    unpaired: str | None = None
    stated_lr: float | None = None
    decay: float = 0.0
    is_coupled: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """The moments of one parameter by slot (``moment1``, ``moment2``, ``max_moment2``), as indices of streams.

    ``rule`` is None where the update rule is unknown; ``reason`` then says why. ``confidence`` are the row and column
    statistics of CAME's confidence, ``squares`` those of its second moments, each with its storage; ``has_some_rows``
    says whether they are those of a slice without all rows. ``replay`` is there
    if the rule is ``replayed``. ``step`` is there under a budget, where rule and learning rate are known, else
    ``stepless`` says why it is not; its weight is then a stream of the same unit. ``rule_beside_master`` is the rule of
    a state without the master that makes ``rule`` unknown.
    """

    name: str
    moments: Mapping[str, int]
    rule: UpdateRule | None
    reason: str | None
    shape: tuple[int, ...]
    confidence: Sequence[tuple[StorageInfo, TensorRef]] = ()
    replay: Replay | None = None
    step: OptimizerStep | None = None
    stepless: str | None = None
    squares: Sequence[tuple[StorageInfo, TensorRef]] = ()
    rule_beside_master: UpdateRule | None = None
    has_some_rows: bool = False

    @property
    def streams(self) -> set[int]:
        """The indices of all streams that are read together."""
        storages = {*self.moments.values(), *(self.replay.state.values() if self.replay else ())}
        return storages if self.step is None or self.step.weight is None else storages | {self.step.weight}

    @property
    def denominator(self) -> str | None:
        """The slot whose square root the update is divided by, or None."""
        return next((slot for slot in ("max_moment2", "moment2") if slot in self.moments), None)


def find_parameters(
    source: Checkpoint,
    states: Iterable[ParameterState],
    streams: Mapping[str, Place],
    views: Mapping[int, list[NamedTensor]],
) -> list[Parameter]:
    """The parameters whose moments fill storages of their own. ``streams`` are by the key that ``states`` use."""
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
    return parameters


def _replayed_slots(card_and_form: tuple[Card, Form] | None) -> Mapping[str, str]:
    """The slots of what a replayed step needs besides statistics, by key; empty where no step is replayed."""
    if card_and_form is None or card_and_form[1].update != "replayed":
        return {}
    return {tensor.key: tensor.slot for tensor in card_and_form[1].tensors if tensor.is_moment}


def _owns(ref: TensorRef, stream: Place, views: Mapping[int, list[NamedTensor]]) -> bool:
    """Whether a tensor of floats fills its storage and is the only one in it; other types are kept as bytes."""
    fills = is_dense(ref) and (ref.offset, ref.dtype, ref.numel) == (0, stream.spec.dtype, stream.spec.numel)
    return fills and len(views[stream.index]) == 1


def _parameter(
    streams: Mapping[str, Place],
    saved: ParameterState,
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
        )
    return Parameter(saved.name, moments, None, rule, shape, rule_beside_master=_rule_beside_master(saved, step))


def _rule_beside_master(saved: ParameterState, step: object) -> UpdateRule | None:
    """The rule of a state that holds a master as well; None without a master, or for an unknown optimizer."""
    state = {key: value for key, value in saved.state.items() if key not in (*MASTER_KEYS, MEGATRON_MASTER)}
    if len(state) == len(saved.state):
        return None
    rule = recognise(state, saved.group, step if isinstance(step, (int, float)) else None)
    return rule if isinstance(rule, UpdateRule) and rule.kind in ("adam", "stable_adamw") else None


def _replay(
    streams: Mapping[str, Place], saved: ParameterState, refs: Mapping[str, TensorRef], step: object
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


def _beyond_reach(rule: Replayed, first: TensorRef, saved: ParameterState) -> str | None:
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
