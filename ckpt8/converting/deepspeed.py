"""DeepSpeed's universal checkpoint: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, one tensor to a file.

A file holds ``{"param": tensor, ...}``. One made from ZeRO stage 3 holds the flat tensor itself; ``param_shapes`` in a
model file has its shape. The model file also holds what the optimizer does not train: buffers, frozen weights, tied
names. ``param_shapes`` gives the parameters of each optimizer group too, where it has as many entries as groups.

Flat partitions of the optimizer by rank are refused: only DeepSpeed can put them together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NoReturn

from ckpt8.checkpoint.meaning.nodes import dict_groups
from ckpt8.checkpoint.meaning.parameters import common_step, param_of
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef, is_setting
from ckpt8.converting.choice import Content, adopt_member
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.tensors import contiguous_stride
from ckpt8.core.text import listed

_STATE = re.compile(r"(?P<root>(?:.*/)?)zero/(?P<name>[^/]+)/(?P<key>[^/]+)\.pt")
_WEIGHT = "fp32"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_SECOND_RANK = re.compile(r"(?:.*/)?(?:zero_pp_rank_\d+_)?mp_rank_01_model_states\.pt")


States = Mapping[str, Mapping[str, DirectoryMember]]
"""Files by parameter, then by key."""


def is_universal(members: Bundle) -> bool:
    """Whether some parameter has a file with its fp32 weights."""
    return any((m := _STATE.fullmatch(checkpoint.path)) and m["key"] == _WEIGHT for checkpoint in members.checkpoints)


def assemble_universal(members: Bundle) -> Content:
    """``{"model": {name: fp32}, "optimizer": {"state": {name: ...}, "param_groups": ...}}``. Raises InputError."""
    files, optimizer_file, model_file = _search(members)
    data = Composite(str(members.path))
    groups = _shape_groups(model_file, files)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    step = None if optimizer_file is None else common_step(optimizer_file.checkpoint)
    shared = {} if optimizer_file is None or step is None else {"step": adopt_member(data, optimizer_file, step[0])}
    weights, states = {}, {}
    for name, state in files.items():
        values = {key: _value(data, member, shapes.get(name)) for key, member in state.items()}
        require(
            isinstance(values.get(_WEIGHT), TensorRef), f"{data.label}: zero/{name} has no {_WEIGHT}.pt with a tensor"
        )
        weights[name] = values.pop(_WEIGHT)
        if values:
            states[name] = values if "step" in values else shared | values
    data.tree = {
        "model": _model(data, model_file, weights),
        "optimizer": {"state": states, "param_groups": _param_groups(optimizer_file, groups, list(weights))},
    }
    used = {id(member) for state in files.values() for member in state.values()} | {id(optimizer_file), id(model_file)}
    unused = [member.path for member in members.opened if id(member) not in used]
    notes = [f"not used: {listed(unused)}"] if unused else []
    if any(_SECOND_RANK.fullmatch(member.path) for member in members.opened):
        notes.append("buffers and frozen weights are those of the first tensor-parallel rank")
    return Content(data, notes=notes)


def _search(members: Bundle) -> tuple[States, DirectoryMember | None, DirectoryMember | None]:
    """The files of the parameters, of the optimizer, and of the model. Raises InputError for several checkpoints."""
    roots: dict[str, dict[str, dict[str, DirectoryMember]]] = defaultdict(lambda: defaultdict(dict))
    for member in members.checkpoints:
        if match := _STATE.fullmatch(member.path):
            roots[match["root"]][match["name"]][match["key"]] = member
    complete = [root for root, states in roots.items() if any(_WEIGHT in state for state in states.values())]
    require(
        len(complete) <= 1,
        f"{members.path}: holds several universal checkpoints ({', '.join(sorted(complete))}); give one",
    )
    root = complete[0]
    inside = {
        checkpoint.path.removeprefix(root): checkpoint
        for checkpoint in members.checkpoints
        if checkpoint.path.startswith(root)
    }
    models = [member for name, member in inside.items() if _MODEL_FILE.fullmatch(name)]
    return roots[root], inside.get("zero/optimizer_state.pt"), models[-1] if models else None


def _value(data: Composite, member: DirectoryMember, shape: tuple[int, ...] | None) -> Any:
    """What one file holds: a tensor, or the number of a step."""
    tree = member.checkpoint.tree
    value = param_of(tree)
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, TensorRef):
        raise InputError(f"{data.label}: {member.path} does not hold the tensor of a parameter")
    ref: TensorRef = adopt_member(data, member, value)
    if isinstance(tree, dict) or shape is None or ref.shape == shape or not ref.shape:
        return ref
    if len(ref.shape) != 1 or not ref.is_contiguous or prod(shape) != ref.shape[0]:
        raise InputError(f"{data.label}: {member.path} has the shape {ref.shape}, which does not become {shape}")
    return replace(ref, shape=shape, stride=contiguous_stride(shape))


def _shape_groups(model: DirectoryMember | None, files: States) -> list[Mapping[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of each group, as the engine listed them; empty where it did not."""
    given = _entries(model).get("param_shapes")
    groups = [given] if isinstance(given, dict) else given
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    return [{name: shape for name, shape in group.items() if name in files and _is_shape(shape)} for group in groups]


def _entries(member: DirectoryMember | None) -> dict[Any, Any]:
    """The dictionary that a member holds; empty where there is none."""
    tree = None if member is None else member.checkpoint.tree
    return tree if isinstance(tree, dict) else {}


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


def _param_groups(
    optimizer: DirectoryMember | None, by_group: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The groups with the names of their parameters; where these are unknown one group of the settings all share."""
    plain = [
        {key: value for key, value in group.items() if key != "params" and is_setting(value)}
        for group in dict_groups(_entries(optimizer))
    ]
    if len(plain) == len(by_group) and {name for group in by_group for name in group} == set(names):
        return [{**group, "params": list(shapes)} for group, shapes in zip(plain, by_group, strict=True)]
    shared = plain[0].items() if plain else ()
    agreed = {key: value for key, value in shared if all(group.get(key) == value for group in plain)}
    return [{**agreed, "params": list(names)}]


def _model(data: Composite, file: DirectoryMember | None, weights: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """All tensors of the model: fp32 weights, and what only the model file has, in its order."""
    entries = _entries(file)
    module, shared = entries.get("module"), entries.get("shared_params")
    if file is None or not isinstance(module, dict):
        return dict(weights)
    places = {_place(module[name]): name for name in weights if isinstance(module.get(name), TensorRef)}
    model: dict[str, TensorRef] = {}
    for name, value in module.items():
        if not isinstance(value, TensorRef) or not isinstance(name, str):
            continue
        alias = shared.get(name) if isinstance(shared, dict) else None
        known = (other for other in (name, alias) if isinstance(other, str) and other in weights)
        source = next(known, places.get(_place(value)))
        if source is not None:
            model[name] = weights[source]
        elif value.numel:  # stage 3 leaves an empty tensor in place of a weight that it partitioned
            model[name] = adopt_member(data, file, value)
    return {**model, **{name: ref for name, ref in weights.items() if name not in model}}


def _place(ref: TensorRef) -> tuple[object, ...]:
    return (ref.key, ref.offset, ref.shape, ref.stride) if ref.numel else (id(ref),)


def holds_partitions(members: Bundle) -> bool:
    """Whether the directory holds files of partitions."""
    return _count_ranks(members) > 0


def refuse_partitions(members: Bundle) -> NoReturn:
    """Raise UnsupportedError that says what to do."""
    raise UnsupportedError(
        f"{members.path}: DeepSpeed ZeRO partitions of {_count_ranks(members)} ranks; make a universal checkpoint of "
        "them first (python -m deepspeed.checkpoint.ds_to_universal), and convert that"
    )


def _count_ranks(members: Bundle) -> int:
    return sum(member.path.endswith("_optim_states.pt") for member in members.opened)
