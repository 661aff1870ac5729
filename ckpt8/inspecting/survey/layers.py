"""Bytes by layer: storages grouped by the part of the model that their parameter belongs to.

The first number in the name of a parameter counts layers (``transformer.h.0``); parameters before and after the layers
are grouped by module (``transformer.wte``, ``lm_head``). Moments and other state of an optimizer belong to the layer of
their parameter if its name is known.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from ckpt8.checkpoint.meaning.parameter_names import SLICE, in_model_order, layer_of, plain_path, whole_tensor
from ckpt8.checkpoint.vocabulary import MASTER_LISTS
from ckpt8.container.manifest import Manifest
from ckpt8.core.tensors import DType, Role
from ckpt8.inspecting.manifest_facts import dtypes, parameter_facts, skeleton_roles

UNNAMED = "optimizer state without names"
MASTERS = "flat master weights"
OUTSIDE_LAYERS = "other"


class Stored(NamedTuple):
    """One storage, or slice of a tensor: ``nbytes`` of ``dtype`` under the name of its first tensor."""

    name: str
    role: Role
    dtype: DType
    nbytes: int


def layers(storages: Iterable[Stored], parameters: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups in the order of the source: {group, parameters, bytes, roles}, ``roles`` with the bytes of each.

    ``parameters`` of a group are the elements of its weights; copies of a weight, as an average or masters, count once.
    The argument ``parameters`` lists those of optimizers: {name, named, moments}, moments by slot with the name of a
    storage.
    """
    owners: dict[str, str] = {}
    for parameter in parameters:
        path = plain_path(parameter["name"]) if parameter["named"] else ""
        owners.update((_state(moment), path) for moment in parameter["moments"].values())
    storages = list(storages)
    names = {each.name for each in storages}
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    counts: dict[tuple[str, str, str], int] = {}
    for each in storages:
        owner = owners.get(_state(each.name)) if owners else None
        plain = plain_path(each.name) if each.role is Role.WEIGHT else ""
        group = _group(each, owner, plain)
        own, role = sizes[group], each.role.value
        own[role] = own.get(role, 0) + each.nbytes
        if each.role is Role.WEIGHT and _is_parameter(each, names):
            key = group, owner or plain, "".join(SLICE.findall(each.name))
            counts.setdefault(key, each.nbytes // each.dtype.itemsize)
    totals: Counter[str] = Counter()
    for (group, _, _), count in counts.items():
        totals[group] += count
    elsewhere = any(group != MASTERS for group in totals)
    return [
        {
            "group": group,
            "parameters": 0 if group == MASTERS and elsewhere else totals[group],
            "bytes": sum(sizes[group].values()),
            "roles": sizes[group],
        }
        for group in sorted(in_model_order(sizes), key=lambda group: group in (UNNAMED, MASTERS, OUTSIDE_LAYERS))
    ]


def _is_parameter(stored: Stored, names: Set[str]) -> bool:
    """Whether a storage holds weights, or codes of 8 bits with a scale; not so that scale."""
    if stored.name.endswith("weight_scale") and stored.name.removesuffix("_scale") in names:
        return False
    return stored.dtype.is_floating or f"{stored.name}_scale" in names


def _state(name: str) -> str:
    """The path of the state of a parameter, from the name of a tensor in it."""
    return whole_tensor(name).rpartition(".")[0]


def _group(stored: Stored, path: str | None, plain: str) -> str:
    """The group of a storage. ``path`` is that of its optimizer's parameter, if it has one, ``plain`` its own."""
    if path is not None:
        return layer_of(path) if path else UNNAMED
    if stored.role is Role.WEIGHT:
        is_master = not MASTER_LISTS.isdisjoint(re.split(r"[.:]", stored.name))
        return MASTERS if is_master else layer_of(plain)
    return UNNAMED if stored.role in (Role.MOMENT1, Role.MOMENT2) else OUTSIDE_LAYERS


def layers_of(manifest: Manifest) -> list[dict[str, Any]]:
    """The layers of a checkpoint, with their uncompressed bytes."""
    types, skeletons = dtypes(manifest), skeleton_roles(manifest)
    storages = [
        Stored(record.name, record.role, types[index], record.nbytes)
        for index, record in enumerate(manifest.storages)
        if index not in skeletons
    ]
    return layers(storages, parameter_facts(manifest))
