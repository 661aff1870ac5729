"""Plans the state of a live optimizer from a saved one, and later allocates, fills and assigns it.

The state goes to ``optimizer.state`` directly, as fresh tensors of the saved element type and strides.
``Optimizer.load_state_dict`` would cast them all to the type of the parameter. ``PackedPlanner`` plans optimizers of
``ckpt8.optim``.

Other optimizers take their state through their own ``load_state_dict``. Their class is unknown, and has one of its own,
as in bitsandbytes, or keeps more than tensors and numbers, as in torchao. They get what ``torch.load`` would give them,
in the order of their parameters. When their code fails, resume raises ResumeError and gives the optimizer its old
state.

``state_problem`` says whether a saved state is the one that the class of the optimizer keeps for a parameter.

A fresh optimizer has no state from which to tell what it expects, and a state of another class under the same
hyperparameters would go in without complaint. The cards of known classes tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.optimizer_state import parameter_shape
from ckpt8.checkpoint.meaning.state_dicts import Candidate, is_packed_group
from ckpt8.checkpoint.sources.composite import Streamer
from ckpt8.checkpoint.sources.objects import ValueBuilder, is_plain
from ckpt8.checkpoint.tree import Checkpoint, TensorRef, is_dense
from ckpt8.core.errors import ResumeError, require
from ckpt8.core.tensors import contiguous_stride
from ckpt8.core.text import listed
from ckpt8.optim.cards import Card, Published, Shape
from ckpt8.optim.known_optimizers import EMPTY_KEYS, TENSORS, find_published, is_projected
from ckpt8.optim.packed import PackedOptimizer
from ckpt8.restoring.resume.live import (
    STRUCTURE,
    GroupPair,
    NewState,
    OptimizerPlan,
    Pair,
    class_problem,
    copy_of,
    map_parameters,
    restored,
)
from ckpt8.restoring.resume.new_state import PackedPlanner

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
        possible = {tensor.key for tensor in form.tensors if not tensor.when or tensor.when in defaults}
        present = {tensor.key for tensor in form.present(hyper)}
        return (possible & present) | more, possible | more | self.published.optional


def layout_of(optimizer: Optimizer) -> Layout | None:
    """The layout of the first known class that ``optimizer`` is made of; None for an unknown class."""
    for kind in type(unwrapped(optimizer)).__mro__:
        card_and_form = find_published(kind.__module__.partition(".")[0], kind.__name__)
        if card_and_form is not None:
            return Layout(*card_and_form)
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
    device = pair.parameter.device if group.get("capturable") or group.get("fused") else "cpu"
    made = torch.tensor(float(value), dtype=torch.float64 if wide else torch.float32, device=device)
    if made.item() != value:
        raise ResumeError(f"{pair.name}: step {value} cannot be held exactly by a float32")
    return made


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
    projected = is_projected(saved, hyper)
    problems = (
        _tensor_problem(key, ref, pair.parameter, layout, live, projected)
        for key, ref in kept.items()
        if isinstance(ref, TensorRef)
    )
    return (
        _keys_problem(kept, pair, layout, live, optimizer, hyper)
        or builder.problem("its optimizer state", kept)
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
    """Why a saved state does not fit an optimizer that loads it itself; None where it fits."""
    if not saved or not isinstance(saved, dict):
        return None if saved is None or saved == {} else _MALFORMED
    shape, here, problem = parameter_shape(saved), tuple(pair.parameter.shape), None
    if shape is not None and len(shape) == len(here):  # state of fewer dimensions holds sums, or a part of the elements
        problem = _shape_problem("its optimizer state", shape, here, is_projected(saved, hyper))
    return problem or builder.problem("its optimizer state", saved)


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
    fits = broadcasts or (projected and is_part)
    return None if fits else f"{what} was saved with shape {list(shape)}, here it has {list(here)}"


_FORM = {"state", "param_groups"}
_OTHERWISE = "restore the checkpoint and give its state to load_state_dict"


def form_problem(optimizer: Optimizer) -> str | None:
    """Why resume cannot match the state of ``optimizer`` with a checkpoint, or None."""
    name = type(optimizer).__name__
    if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
        return f"{name} has no state or parameter groups of its own; {_OTHERWISE}"
    if unwrapped(optimizer) is optimizer and (packed_optimizer(optimizer) or layout_of(optimizer)):
        return None
    missing = _FORM - optimizer.state_dict().keys()
    return f"the state dict of {name} has no {listed(sorted(missing))}; {_OTHERWISE}" if missing else None


def loads_itself(optimizer: Optimizer, node: Mapping[str, Any]) -> bool:
    """Whether the saved state ``node`` goes through the ``load_state_dict`` of ``optimizer``."""
    if layout_of(optimizer) is not None:
        return False
    if type(unwrapped(optimizer)).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return True
    states = (state for state in node["state"].values() if isinstance(state, dict))
    return not all(is_plain(value) for state in states for value in state.values())


def plan_own_state(node: Mapping[str, Any], plan: OptimizerPlan, builder: ValueBuilder) -> None:
    """Plan for an optimizer that loads the saved state ``node`` itself, as a whole or not at all."""
    known = {identifier for group in node["param_groups"] for identifier in group["params"]}
    # Some classes keep sums over all parameters among the states, under a name, or next to them.
    sums = {key: value for key, value in node["state"].items() if key not in known}
    shared = sums | {key: value for key, value in node.items() if key not in _FORM}
    pairs = [(group.saved or {}, pair) for group in plan.pairs for pair in group.pairs]
    for saved, pair in pairs:
        if problem := foreign_state_problem(node["state"].get(pair.identifier), pair, saved, builder):
            plan.problems.append(f"{pair.name}: {problem}")
    has_names = any(isinstance(identifier, str) for identifier in known)
    if unlisted := [key for key in sums if has_names or not isinstance(key, str)]:
        plan.problems.append(f"state of {listed(unlisted)}: belongs to no parameter of its groups")
    if shared and [pair.identifier for _, pair in pairs] != list(range(len(pairs))):
        plan.problems.append(f"{listed(shared)}: may count parameters, which are in another order here")
    if problem := builder.problem("its state dict", shared):
        plan.problems.append(problem)
    plan.wrong = "its state is taken as a whole or not at all" if plan.problems else None
    plan.build = partial(_build, node, sums, plan.pairs, builder)


def _build(
    node: Mapping[str, Any], sums: Mapping[Any, Any], paired: Sequence[GroupPair], builder: ValueBuilder
) -> dict[str, Any]:
    """The state dict. Raises InputError for damage, ResumeError for parts that do not make a tensor."""
    states, state, groups, numbers = node["state"], dict[Any, Any](), [], count()
    for group in paired:
        own = {next(numbers): pair for pair in group.pairs}
        for number, pair in own.items():
            if pair.identifier in states:
                state[number] = _with_objects_on(pair.parameter.device, builder.build(states[pair.identifier]))
        plain = {key: builder.build(value) for key, value in (group.saved or {}).items() if key not in STRUCTURE}
        groups.append({**group.live, **restored(plain, group.live), "params": list(own)})
    state |= {key: builder.build(value) for key, value in sums.items()}
    others = {key: builder.build(value) for key, value in node.items() if key not in _FORM}
    return {**others, "state": state, "param_groups": groups}


def _with_objects_on(device: torch.device, state: Any) -> Any:
    """A state whose objects hold their tensors on ``device``: ``Optimizer.load_state_dict`` does not look into them."""
    for value in state.values() if isinstance(state, dict) else ():
        if not isinstance(value, torch.Tensor) and hasattr(value, "__dict__"):
            value.__dict__.update((key, _on(device, held)) for key, held in list(value.__dict__.items()))
    return state


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_on(device, item) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def load(optimizer: Optimizer, take_state: Callable[[], object]) -> None:
    """Call ``take_state``, which runs code of the optimizer's class. Raises ResumeError for whatever that raises."""
    try:
        take_state()
    except Exception as exc:
        reason = (str(exc).splitlines() or [""])[0]
        raise ResumeError(
            f"{type(optimizer).__name__} does not take the saved state: {type(exc).__name__}: {reason}"
        ) from exc


@contextmanager
def undone_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Give ``optimizer`` back its state, groups and attributes when the block raises."""
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    attributes = (optimizer.__dict__, unwrapped(optimizer).__dict__)
    backups = [(live, dict(live)) for live in (*attributes, *optimizer.param_groups, optimizer.state, *states)]
    try:
        yield
    except BaseException:
        for live, before in backups:
            live.clear()
            live.update(before)
        raise


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
    require(all(isinstance(group, dict) for group in saved), "its parameter groups are malformed", ResumeError)
    require(
        packed is not None or not any(is_packed_group(group) for group in saved),
        "is of ckpt8.optim; ckpt8.load(path, unpack=True) gives its state unpacked",
        ResumeError,
    )
    # Groups may have settings of their own: Muon steps some of them with Adam.
    settings = {key: value for group in reversed(live) for key, value in group.items()}
    for group in saved:
        if problem := packed.class_problem(group) if packed else class_problem(group, settings, optimizer.defaults):
            raise ResumeError(f"is of another optimizer than {type(optimizer).__name__}: {problem}")
    hyper = [{key: value for key, value in group.items() if key not in STRUCTURE} for group in saved]
    if problem := builder.problem("a parameter group", hyper):
        raise ResumeError(problem)
    plan = map_parameters(saved, optimizer, model)
    if packed is None and loads_itself(optimizer, node):
        plan_own_state(node, plan, builder)
        return plan
    known = {identifier for group in saved for identifier in group["params"]}
    if unlisted := [str(identifier) for identifier in node["state"] if identifier not in known]:
        plan.problems.append(f"state of {listed(unlisted)}: belongs to no parameter of its groups")
    if packed:
        packed.plan(node, plan)
    else:
        _plan_states(node["state"], plan, optimizer, builder)
    return plan


def _plan_states(states: Mapping[Any, Any], plan: OptimizerPlan, optimizer: Optimizer, builder: ValueBuilder) -> None:
    """Plan for an optimizer of another package: it takes its state as saved."""
    layout = layout_of(optimizer)
    for group in plan.pairs:
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
                continue
            kept = {key: value for key, value in (saved or {}).items() if key != WHOLE_GROUP}
            values = {key: ref if isinstance(ref, TensorRef) else builder.build(ref) for key, ref in kept.items()}
            if "step" in kept and layout is not None:
                values["step"] = exact_step(builder.build(kept["step"]), layout, group.live, pair)
            allocate = partial(_new_state, values, pair.parameter.device)
            plan.states.append((pair.parameter, None if saved is None else allocate))


def _new_state(values: dict[str, Any], device: torch.device) -> NewState:
    """``values`` with an empty tensor in the place of every TensorRef, and the copies that fill these."""
    fills = []
    for key, ref in values.items():
        if isinstance(ref, TensorRef):
            place, kind = device if key != "step" else None, ref.dtype.torch
            stride = ref.stride if is_dense(ref) else contiguous_stride(ref.shape)
            values[key] = torch.empty_strided(ref.shape, stride, dtype=kind, device=place)
            fills.append(copy_of(ref, values[key]))
    return values, fills


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
