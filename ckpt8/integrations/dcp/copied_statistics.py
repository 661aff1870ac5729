"""Copies of row and column averages in the files of several ranks: moments in steps of these cannot be decoded without.

CAME's column averages go over all rows. Where rows are cut, every rank has the same ones, of which one rank writes the
tensor of the checkpoint. The others write copies beside their slices. No index names a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckpt8.integrations.dcp.families import Box, Families
from ckpt8.optim.known_optimizers import TENSORS

_LEAST = 16
"""The fewest elements of a slice for each one of a copy: with fewer it saves little more than the copy takes."""


@dataclass(frozen=True)
class Copy(WriteItem):
    """An average that another rank writes as well."""


def with_copies(plans: Sequence[SavePlan], held: Sequence[SavePlan], names: Iterable[str]) -> list[SavePlan]:
    """``plans`` in which a rank that writes the first moment of a slice writes the averages of that slice, too.

    ``held`` is what each rank could write. ``names`` are those of all values.
    """
    families = Families(names)
    averages: dict[str, list[str]] = defaultdict(list)
    for name, key in families.keys.items():
        if (tensor := TENSORS.get(key)) is not None and tensor.slot == "statistic":
            averages[name.removesuffix(key)].append(name)
    if not averages:
        return list(plans)
    known = {name for each in averages.values() for name in each}
    firsts = {
        name: averages[state]
        for name, key in families.keys.items()
        if key in TENSORS and TENSORS[key].slot == "moment1" and (state := name.removesuffix(key)) in averages
    }
    return [
        replace(plan, items=[*plan.items, *_missing(plan, own, families, firsts, known)])
        for plan, own in zip(plans, held, strict=True)
    ]


def _missing(
    plan: SavePlan, held: SavePlan, families: Families, firsts: dict[str, list[str]], known: set[str]
) -> list[Copy]:
    """The averages of the slices in a plan that are not in it, of those that the rank holds."""
    found = {}
    here = {_place(item): item for item in held.items if item.index.fqn in known}
    there = {_place(item) for item in plan.items if item.index.fqn in known}
    for item in plan.items:
        box = _box(item)
        for name in firsts.get(item.index.fqn, ()):
            place = families.statistic(name, box)
            average = None if place is None else here.get((name, tuple(place[0])))
            if average is None or place is None or _box(average) != place or _place(average) in there:
                continue
            if prod(box[1]) >= _LEAST * prod(place[1]) > 0:
                found[_place(average)] = Copy(average.index, average.type, tensor_data=average.tensor_data)
    return list(found.values())


def without_copies(plan: SavePlan) -> SavePlan:
    """The plan as it is of use where nothing depends on averages."""
    return replace(plan, items=[item for item in plan.items if not isinstance(item, Copy)])


def _place(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, _box(item)[0]


def _box(item: WriteItem) -> Box:
    data = item.tensor_data
    return ((), ()) if data is None else (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
