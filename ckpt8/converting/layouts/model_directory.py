"""Directories of transformers, accelerate and diffusers: weights in one file or in shards, an optimizer or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt8.checkpoint.meaning.names import NamesFromWeights, rank_file
from ckpt8.checkpoint.meaning.nodes import is_bare_state_dict
from ckpt8.checkpoint.meaning.pairing import saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import TOP_LEVEL, Candidate, find
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.converting.choice import Content, adopt_member, check_optimizer
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.text import listed

_MODEL_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
"""Names of a model's only file, the preferred one first."""

_INDEX = ".index.json"
_MAX_INDEX_BYTES = 64 << 20
_LISTED = 20


def matches(members: Bundle) -> bool:
    """Whether there is a file of weights, or an index of some, at the top."""
    names = {member.path for member in members.opened}
    return any(name in names for name in _MODEL_FILES) or any(_is_index(name) for name in names)


def assemble(members: Bundle) -> Content:
    """``{"model": ..., "optimizer": ...}``, with ``param_names`` where the names are known.

    Raises InputError, and UsageError for several optimizers.
    """
    data = Composite(str(members.path))
    top = {member.path: member for member in members.opened if "/" not in member.path}
    shards = _shards(top, data.label)
    data.tree = {"model": _merged(shards, data)}
    names = NamesFromWeights([(member.path, member.checkpoint) for member in members.opened])
    optimizers = [member for member in top.values() if _is_optimizer(member.checkpoint)]
    spread = [member for member in optimizers if rank_file(member.path, member.checkpoint.tree)]
    optimizers = [member for member in optimizers if member not in spread]
    if len(optimizers) > 1:
        paths = listed((member.path for member in optimizers), _LISTED)
        raise UsageError(f"{data.label}: has several optimizers; choose a file with --member: {paths}")
    for member in optimizers:
        data.adopt(member.checkpoint)
        check_optimizer(data.label, Candidate(member.path, member.checkpoint.tree))
        data.tree["optimizer"] = _named(member.checkpoint.tree, names.of_member(member.path))
    used = {member.path for member in (*shards, *optimizers)}
    unused = [member for member in members.opened if member.path not in used and not _is_index(member.path)]
    others = [member for member in unused if member.path not in _MODEL_FILES]
    notes = [f"{member.path}: the same weights again, not used" for member in unused if member not in others]
    notes += [f"left out: {member.path}: the file of one rank, with its parts of the tensors" for member in spread]
    ordered = len(shards) == 1 and shards[0].checkpoint.format != "safetensors"
    return Content(data, others=others, notes=notes, ordered=ordered)


def _is_index(name: str) -> bool:
    return name.endswith(_INDEX) and "/" not in name


def _is_optimizer(checkpoint: Checkpoint) -> bool:
    models, optimizers = find(checkpoint.tree)
    return not models and [candidate.path for candidate in optimizers] == [TOP_LEVEL]


def _shards(top: Mapping[str, DirectoryMember], label: str) -> list[DirectoryMember]:
    """The files of the model, from its index if it has one. Raises InputError."""
    single = next((top[name] for name in _MODEL_FILES if name in top), None)
    if single is not None:
        return [single]
    # Weights in safetensors come before the same ones in pickles.
    index = min((name for name in top if _is_index(name)), key=lambda name: ("safetensors" not in name, name))
    checkpoint = top[index].checkpoint
    content = bytearray(min(checkpoint.size, _MAX_INDEX_BYTES))
    checkpoint.read_into(0, memoryview(content))
    try:
        files = dict.fromkeys(parse_any_json(content, index).get("weight_map").values())
        return [top[name] for name in files]
    except (KeyError, TypeError, AttributeError, InputError) as exc:
        missing = f"names {str(exc)[:80]}, which is not there" if isinstance(exc, KeyError) else "cannot be read"
        raise InputError(f"{label}: the index {index} {missing}") from exc


def _merged(shards: Sequence[DirectoryMember], data: Composite) -> dict[str, Any]:
    """The state dict of all shards together."""
    merged: dict[str, Any] = {}
    for member in shards:
        tree = member.checkpoint.tree
        if not is_bare_state_dict(tree):
            raise InputError(f"{data.label}: {member.path} is not a state dict of a model")
        for name, value in adopt_member(data, member, tree).items():
            if name in merged:
                raise InputError(f"{data.label}: {name!r} is in two files of weights; choose one with --member")
            merged[name] = value
    return merged


def _named(tree: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The optimizer, with ``param_names`` in each group that has none and all of whose names are in ``names``."""
    known = {saved.identifier: names[saved.name] for saved in saved_parameters(tree) if saved.name in names}
    groups = []
    for group in tree["param_groups"]:
        own = [known.get(identifier) for identifier in group["params"]]
        complete = own and None not in own and "param_names" not in group
        groups.append({**group, "param_names": own} if complete else group)
    return {**tree, "param_groups": groups}
