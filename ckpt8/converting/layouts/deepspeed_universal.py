"""DeepSpeed's universal checkpoint: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, one tensor to a file.

A file holds ``{"param": tensor, ...}`` or, made from ZeRO stage 3, the flat tensor itself, whose shape is then among
the ``param_shapes`` of a model file. What is no parameter of the optimizer (buffers, frozen weights, tied names) is in
the model file as well. Groups of the optimizer are given by ``param_shapes`` too, where it has as many.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.members import Members
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.converting.sources import Content
from ckpt8.core.errors import InputError
from ckpt8.core.text import listed

_STATE = re.compile(r"(?P<root>(?:.*/)?)zero/(?P<name>[^/]+)/(?P<key>[^/]+)\.pt")
_WEIGHT = "fp32"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_SECOND_RANK = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_01_model_states\.pt")


@dataclass(slots=True)
class _Found:
    """Members of a universal checkpoint; ``states`` by parameter, then by key."""

    root: str
    states: dict[str, dict[str, DirectoryMember]] = field(default_factory=lambda: defaultdict(dict))
    groups: DirectoryMember | None = None
    model: DirectoryMember | None = None

    def paths(self) -> Iterator[str]:
        """Paths of all of them."""
        yield from (member.path for state in self.states.values() for member in state.values())
        yield from (member.path for member in (self.groups, self.model) if member is not None)


class Universal:
    """See the module."""

    id: ClassVar[str] = "deepspeed-universal"

    def matches(self, members: Members) -> bool:
        """Whether some parameter has a file of its fp32 weights."""
        return any((m := _STATE.fullmatch(each.path)) and m["key"] == _WEIGHT for each in members.checkpoints)

    def assemble(self, members: Members) -> Content:
        """``{"model": {name: fp32}, "optimizer": {"state": {name: ...}, "param_groups": ...}}``. Raises InputError."""
        found = _search(members)
        data = Composite(str(members.path))
        groups = _shape_groups(found)
        shapes = {name: shape for group in groups for name, shape in group.items()}
        step = _common_step(data, found)
        weights, states = {}, {}
        for name, files in found.states.items():
            values = {key: _value(data, member, shapes.get(name)) for key, member in files.items()}
            if not isinstance(values.get(_WEIGHT), TensorRef):
                raise InputError(f"{data.label}: zero/{name} has no {_WEIGHT}.pt with a tensor")
            weights[name] = values.pop(_WEIGHT)
            if values:
                states[name] = values if step is None or "step" in values else {"step": step, **values}
        optimizer = {"state": states, "param_groups": _param_groups(found, groups, list(weights))}
        data.tree = {"model": _model(data, found, weights), "optimizer": optimizer}
        taken = set(found.paths())
        unused = [each.path for each in members.found if each.path not in taken]
        notes = [f"not used: {listed(unused)}"] if unused else []
        if any(_SECOND_RANK.fullmatch(each.path.rpartition("/")[2]) for each in members.found):
            notes.append("buffers and frozen weights are those of the first tensor-parallel rank")
        return Content(data, self.id, notes=notes)


def _search(members: Members) -> _Found:
    found: dict[str, _Found] = {}
    for member in members.checkpoints:
        match = _STATE.fullmatch(member.path)
        if match:
            of_root = found.setdefault(match["root"], _Found(match["root"]))
            of_root.states[match["name"]][match["key"]] = member
    roots = [root for root, each in found.items() if any(_WEIGHT in state for state in each.states.values())]
    if len(roots) > 1:
        raise InputError(f"{members.path}: holds several universal checkpoints ({', '.join(sorted(roots))}); give one")
    chosen = found[roots[0]]
    for member in members.checkpoints:
        folder, _, name = member.path.rpartition("/")
        if member.path == f"{chosen.root}zero/optimizer_state.pt":
            chosen.groups = member
        elif folder == chosen.root.rstrip("/") and _MODEL_FILE.fullmatch(name):
            chosen.model = member
    return chosen


def _adopted(data: Composite, member: DirectoryMember, value: TensorRef) -> TensorRef:
    """A tensor of a member as one of the whole."""
    prefix = f"{member.path}/"
    if prefix + value.key not in data:
        data.adopt(member.checkpoint, prefix)
    return replace(value, key=prefix + value.key)


def _value(data: Composite, member: DirectoryMember, shape: tuple[int, ...] | None) -> Any:
    """What one file holds: a tensor, or the number of a step."""
    tree = member.checkpoint.tree
    value = tree.get("param") if isinstance(tree, dict) else tree
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, TensorRef):
        raise InputError(f"{data.label}: {member.path} does not hold the tensor of a parameter")
    ref = _adopted(data, member, value)
    if isinstance(tree, dict) or shape is None or ref.shape == shape or not ref.shape:
        return ref
    if len(ref.shape) != 1 or not ref.is_contiguous or prod(shape) != ref.shape[0]:
        raise InputError(f"{data.label}: {member.path} has the shape {ref.shape}, which does not become {shape}")
    return replace(ref, shape=shape, stride=tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))))


def _shape_groups(found: _Found) -> list[Mapping[str, tuple[int, ...]]]:
    """Names and shapes of parameters, as the engine listed them; nothing where that is not known."""
    tree = found.model.checkpoint.tree if found.model is not None else None
    given = tree.get("param_shapes") if isinstance(tree, dict) else None
    groups = [given] if isinstance(given, dict) else given
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    return [
        {name: shape for name, shape in group.items() if name in found.states and _is_shape(shape)} for group in groups
    ]


def _common_step(data: Composite, found: _Found) -> Any:
    """The step that stage 3 keeps among the optimizer's settings, None where there is none, or several."""
    tree = found.groups.checkpoint.tree if found.groups is not None else None
    inner = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
    states = inner.get("state") if isinstance(inner, dict) else None
    if found.groups is None or not isinstance(states, dict):
        return None
    steps = [state["step"] for state in states.values() if isinstance(state, dict) and "step" in state]
    checkpoint = found.groups.checkpoint
    places = {storage.key: storage for storage in checkpoint.storages}
    values = {
        read_scalar(checkpoint, places[step.key], step) if isinstance(step, TensorRef) else step
        for step in steps
        if isinstance(step, (TensorRef, int, float))
    }
    if len(values) != 1 or None in values:
        return None
    return _adopted(data, found.groups, steps[0]) if isinstance(steps[0], TensorRef) else steps[0]


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


def _param_groups(found: _Found, by_group: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The optimizer's groups with names for parameters; one group of what all agree on where they are not known."""
    tree = found.groups.checkpoint.tree if found.groups is not None else None
    given = tree.get("param_groups") if isinstance(tree, dict) else None
    groups = [group for group in given if isinstance(group, dict)] if isinstance(given, list) else []
    plain = [{key: value for key, value in group.items() if key != "params" and _is_plain(value)} for group in groups]
    if len(plain) == len(by_group) and {name for group in by_group for name in group} == set(names):
        return [{**group, "params": list(of_group)} for group, of_group in zip(plain, by_group, strict=True)]
    first = plain[0] if plain else {}
    agreed = {key: value for key, value in first.items() if all(group.get(key) == value for group in plain)}
    return [{**agreed, "params": list(names)}]


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return isinstance(value, (int, float, str, type(None)))


def _model(data: Composite, found: _Found, weights: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """All tensors of the model: fp32 weights, and what only the model file has, in its order."""
    tree = found.model.checkpoint.tree if found.model is not None else None
    module = tree.get("module") if isinstance(tree, dict) else None
    shared = tree.get("shared_params") if isinstance(tree, dict) else None
    if found.model is None or not isinstance(module, dict):
        return dict(weights)
    places = {_place(module[name]): name for name in weights if isinstance(module.get(name), TensorRef)}
    model: dict[str, TensorRef] = {}
    for name, value in module.items():
        if not isinstance(value, TensorRef) or not isinstance(name, str):
            continue
        alias = shared.get(name) if isinstance(shared, dict) else None
        tied = alias if isinstance(alias, str) and alias in weights else places.get(_place(value))
        source = name if name in weights else tied
        if source is not None:
            model[name] = weights[source]
        elif value.numel:  # stage 3 leaves an empty tensor where it has taken one away
            model[name] = _adopted(data, found.model, value)
    return {**model, **{name: ref for name, ref in weights.items() if name not in model}}


def _place(ref: TensorRef) -> tuple[object, ...]:
    return (ref.key, ref.offset, ref.shape, ref.stride) if ref.numel else (id(ref),)
