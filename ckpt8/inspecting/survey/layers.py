"""Where the bytes are by layer: storages grouped by the part of the model that their parameter belongs to.

A layer is what the first number in the name of a parameter counts (``transformer.h.0``); what comes before the layers
and after them is grouped by module (``transformer.wte``, ``lm_head``). Moments and the rest of an optimizer's state
belong to the layer of their parameter where its name is known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt8.checkpoint.meaning.layer_names import _REPEATED, _SLICE, layer_of, plain_path
from ckpt8.checkpoint.meaning.parameter_names import display_names
from ckpt8.checkpoint.vocabulary import MASTER_LISTS
from ckpt8.container.manifest import Manifest
from ckpt8.core.tensors import DType, Role

if TYPE_CHECKING:
    from ckpt8.checkpoint.sources.bundle import Bundle
    from ckpt8.compressing.plan import Plan

UNNAMED = "optimizer state without names"
MASTERS = "flat master weights"
REST = "other"


@dataclass(frozen=True, slots=True)
class Stored:
    """One storage, or slice of a tensor: ``nbytes`` of ``dtype`` under the name of its first tensor."""

    name: str
    role: Role
    dtype: DType
    nbytes: int


def layers(storages: Iterable[Stored], parameters: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups in the order of the source: {group, parameters, bytes, roles}, ``roles`` with the bytes of each.

    ``parameters`` of a group are the elements of its weights; copies of a weight, as an average or masters, count once.
    Given are the parameters of optimizers, each a {name, named, moments}, moments by slot with the name of a storage.
    """
    owners: dict[str, str] = {}
    for parameter in parameters:
        path = plain_path(parameter["name"]) if parameter["named"] else ""
        owners.update((_state(moment), path) for moment in parameter["moments"].values())
    storages = list(storages)
    names = {each.name for each in storages}
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    counts: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for each in storages:
        owner = owners.get(_state(each.name))
        group = _group(each, owner)
        sizes[group][each.role.value] += each.nbytes
        if each.role is Role.WEIGHT and _is_parameter(each, names):
            slice_ = _SLICE.search(each.name)
            key = owner or plain_path(each.name), slice_.group() if slice_ else ""
            counts[group].setdefault(key, each.nbytes // each.dtype.itemsize)
    elsewhere = any(counts[group] for group in counts if group != MASTERS)
    return [
        {
            "group": group,
            "parameters": 0 if group == MASTERS and elsewhere else sum(counts[group].values()),
            "bytes": sum(roles.values()),
            "roles": dict(roles),
        }
        for group, roles in _in_order(sizes).items()
    ]


def _is_parameter(stored: Stored, names: Set[str]) -> bool:
    """Whether these are weights, or codes of 8 bits with a scale beside them, and not that scale."""
    if stored.name.endswith("weight_scale") and stored.name.removesuffix("_scale") in names:
        return False
    return stored.dtype.is_floating or f"{stored.name}_scale" in names


def _state(name: str) -> str:
    """Where the state of a parameter lies, from the name of something in it; without the place of a slice."""
    return _SLICE.sub("", _REPEATED.sub("", name)).rpartition(".")[0]


def _group(stored: Stored, path: str | None) -> str:
    if path is not None:
        return layer_of(path) if path else UNNAMED
    if stored.role is Role.WEIGHT:
        return (
            MASTERS
            if not MASTER_LISTS.isdisjoint(re.split(r"[.:]", stored.name))
            else layer_of(plain_path(stored.name))
        )
    return UNNAMED if stored.role in (Role.MOMENT1, Role.MOMENT2) else REST


def _in_order(sizes: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Groups of the model first, in the order in which they came; layers of one stack one behind the other."""
    places = {group: place for place, group in enumerate(sizes)}
    first: dict[str, int] = {}
    for group, place in places.items():
        first.setdefault(group.rstrip("0123456789"), place)

    def key(group: str) -> tuple[bool, int, int, int]:
        stack = group.rstrip("0123456789")
        number = group[len(stack) :]
        return group in (UNNAMED, MASTERS, REST), first[stack], int(number[:18] or 0), places[group]

    return {group: sizes[group] for group in sorted(sizes, key=key)}


def layers_of_plan(source: Bundle, plan: Plan) -> list[dict[str, Any]]:
    """The layers of a raw checkpoint; what is outside its storages is in none."""
    streams = plan.streams
    skeletons = {member.skeleton for member in source.members}
    dtypes = {index: tensor.ref.dtype for tensor, index in reversed(plan.tensors)}
    storages = [
        Stored(each.spec.name, each.spec.role, dtypes.get(each.index, each.spec.dtype), each.storage.nbytes)
        for each in streams
        if each.index not in skeletons
    ]
    found = [unit.parameter for unit in plan.units if unit.parameter is not None]
    moments = [{slot: streams[index].spec.name for slot, index in each.moments.items()} for each in found]
    return layers(storages, _named([each.name for each in found], moments, source.directory is not None))


def layers_of_manifest(manifest: Manifest) -> list[dict[str, Any]]:
    """The layers of what a ``.ckpt8`` was made from, with the bytes of the original."""
    skeletons = {member.skeleton for member in manifest.members}
    dtypes = {tensor.storage: tensor.dtype for tensor in reversed(manifest.tensors)}
    storages = [
        Stored(record.name, record.role, dtypes.get(index, record.dtype), record.nbytes)
        for index, record in enumerate(manifest.storages)
        if index not in skeletons
    ]
    moments = [
        {slot: manifest.storages[index].name for slot, index in each.moments.items()} for each in manifest.parameters
    ]
    names = [each.name for each in manifest.parameters]
    return layers(storages, _named(names, moments, manifest.directory is not None))


def _named(names: Sequence[str], moments: Sequence[Mapping[str, str]], directory: bool) -> list[dict[str, Any]]:
    given = [(name, list(each.values())) for name, each in zip(names, moments, strict=True)]
    shown = display_names(given, directory=directory)
    return [{**row, "moments": each} for row, each in zip(shown, moments, strict=True)]
