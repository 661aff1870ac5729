"""Copies of row and column averages in the files of several ranks: moments in steps of these cannot be decoded without.

CAME's column averages go over all rows. Where rows are cut, every rank has the same ones, of which one rank writes the
tensor of the checkpoint. The others write copies beside their slices. No index names a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckpt8.integrations.dcp.families import Families
from ckpt8.integrations.dcp.tree import Box

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
    if not families.averages:
        return list(plans)
    return [
        replace(plan, items=[*plan.items, *_missing(plan, own, families)])
        for plan, own in zip(plans, held, strict=True)
    ]


def _missing(plan: SavePlan, held: SavePlan, families: Families) -> list[Copy]:
    """The averages of the slices in a plan that are not in it, of those that the rank holds."""
    found = {}
    here = {_place(item): item for item in held.items if item.index.fqn in families.averages}
    there = {_place(item) for item in plan.items if item.index.fqn in families.averages}
    for item in plan.items:
        box = _box(item)
        for name, place in families.averages_of(item.index.fqn, box):
            at = name, tuple(place[0])
            if (
                at in here
                and at not in there
                and _box(here[at]) == place
                and prod(box[1]) >= _LEAST * max(prod(place[1]), 1)
            ):
                found[at] = Copy(here[at].index, here[at].type, tensor_data=here[at].tensor_data)
    return list(found.values())


def without_copies(plan: SavePlan) -> SavePlan:
    """The plan as it is of use where nothing depends on averages."""
    return replace(plan, items=[item for item in plan.items if not isinstance(item, Copy)])


def _place(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, _box(item)[0]


def _box(item: WriteItem) -> Box:
    data = item.tensor_data
    return ((), ()) if data is None else (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
