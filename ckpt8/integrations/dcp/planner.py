"""The save planner of ``ckpt8.integrations.dcp``: of replicas, one rank writes all of a parameter's slice.

A family is what belongs to one parameter of a distributed state dict: its weight, copies of it, its optimizer state.

Moments in steps of row and column averages cannot be decoded without these. CAME's column averages go over all rows.
Where rows are cut, every rank has the same ones, of which one rank writes the tensor of the checkpoint. The others
write copies beside their slices. No index names a copy.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from ckpt8.container.sharded import GlobalTensor, Grid, Layout
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import Box, Role
from ckpt8.integrations.dcp.rank_file import Copy, Naming, average_of, slot_of
from ckpt8.optim.known_optimizers import STATE_ROLES


class Families:
    """The values of a state dict by parameter. ``names`` are of all values; ``ties`` join tensors with shared memory.

    A family is named after a parameter of an optimizer. A weight belongs to the one whose name ends its own, so that
    ``model.0.weight``, ``ema.0.weight`` and the state of ``0.weight`` are one family. Other values are families alone.
    """

    def __init__(self, names: Iterable[str], ties: Mapping[str, str] | None = None) -> None:
        names = list(names)
        naming = Naming(names)
        states = {name: state for name in names if (state := naming.split(name)) is not None}
        owners = {owner for _, owner, _ in states.values()}
        self.keys = {name: key for name, (_, _, key) in states.items()}
        """The key of each value that is part of an optimizer's state."""
        self._of: dict[str, str] = {name: owner for name, (_, owner, _) in states.items()}
        self._of |= {
            name: owner for name in names if name not in states and (owner := find_owner(name, owners)) is not None
        }
        tied: dict[str, str] = {}
        for name, first in (ties or {}).items():
            tied[first] = tied.get(first) or self._of.get(first) or self._of.get(name, "")
        for name, first in (ties or {}).items():
            self._of[name] = self._of[first] = tied[first] or first
        in_order = (*states, *(name for name in names if name not in states))
        self.members = grouped((self.of(name), name) for name in in_order)
        """The names of each family, its state before its weights."""
        self._averages = grouped(
            (name.removesuffix(key), name) for name, key in self.keys.items() if slot_of(key) == "statistic"
        )
        self.averages = {name for names in self._averages.values() for name in names}
        """All averages over rows or columns."""

    def of(self, name: str) -> str:
        """The family of a value."""
        return self._of.get(name, name)

    def statistic(self, name: str, box: Box) -> Box | None:
        """The slice of an average over rows or columns that belongs to a slice of the parameter; else None."""
        key = self.keys.get(name, "")
        return average_of(key, box) if slot_of(key) == "statistic" else None

    def averages_of(self, name: str, box: Box) -> Iterator[tuple[str, Box]]:
        """The averages that a slice of a first moment cannot be decoded without: their names, and slices of them."""
        key = self.keys.get(name, "")
        if slot_of(key) == "moment1":
            for average in self._averages.get(name.removesuffix(key), ()):
                place = self.statistic(average, box)
                if place is not None:
                    yield average, place


def count_parted(tensors: Mapping[str, GlobalTensor], roles: Container[Role] = frozenset(Role)) -> tuple[int, int]:
    """How many parameters have a slice with weight and state in files of different ranks; and how many have state.

    Only state with one of ``roles`` counts; weights alone do not. The time does not grow
    with the number of ranks where tensors are grids.
    """
    families = Families(tensors)
    parted = total = 0
    for names in families.members.values():
        state = [name for name in names if STATE_ROLES.get(families.keys.get(name, "")) in roles]
        if state:
            weights = [
                name for name in names if name not in families.keys and tensors[name].shape == tensors[state[0]].shape
            ]
            first, *others = (tensors[name].layout for name in state)
            total += 1
            parted += any(_differ(first, other) for other in others) or (
                bool(weights) and all(_differ(first, tensors[name].layout) for name in weights)
            )
    return parted, total


def _differ(one: Layout, other: Layout) -> bool:
    """Whether a box that both have is in different files."""
    if (
        isinstance(one, Grid)
        and isinstance(other, Grid)
        and [cuts.runs for cuts in one.cuts] == [cuts.runs for cuts in other.cuts]
    ):
        return one.owners != other.owners
    files = {tuple(box): file for file, *box in one.boxes()}
    return any(files.get(tuple(box), file) != file for file, *box in other.boxes())


def find_owner(name: str, owners: Container[str]) -> str | None:
    """The longest of ``owners`` that ends a name, or None."""
    while name not in owners:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return name


_LEAST = 16
"""The fewest elements of a slice for each one of a copy: with fewer it saves little more than the copy takes."""


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
    copies = {}
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
                copies[at] = Copy(here[at].index, here[at].type, tensor_data=here[at].tensor_data)
    return list(copies.values())


def _place(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, _box(item)[0]


def _box(item: WriteItem) -> Box:
    data = item.tensor_data
    return ((), ()) if data is None else (tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def local_tensors(value: Any) -> list[torch.Tensor]:
    """The plain tensors in which this rank has its part of a tensor, a DTensor or a ShardedTensor; else none."""
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    local = value._local_tensor if isinstance(value, DTensor) else value
    return [local] if type(local) in (torch.Tensor, torch.nn.Parameter) else []


class Ckpt8SavePlanner(DefaultSavePlanner):
    """torch's DefaultSavePlanner; of a slice that several ranks hold, one rank writes weight and state.

    torch's planner spreads the tensors of a parameter over the ranks. No rank then has what it takes to measure the
    error of an update, to keep it within a budget, or to store a 16-bit weight as a rounding of its master copy. This
    planner spreads slices, balanced by bytes. Values of no size, and those that are no tensors, go to the lowest rank
    that has them, so that loading reads few files. Averages over rows or columns, as CAME's, are copied to every rank
    that writes a slice which depends on them. The same plans always give the same result.

    >>> from torch.distributed import checkpoint as dcp
    >>> from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageWriter
    >>> writer, planner = Ckpt8StorageWriter("step-2"), Ckpt8SavePlanner()
    >>> saved = dcp.save({"model": model.state_dict()}, storage_writer=writer, planner=planner, no_dist=True)
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        enable_plan_caching: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, enable_plan_caching=enable_plan_caching)

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super()._create_global_plan(all_plans)
        return with_copies(plans, all_plans, metadata.state_dict_metadata), metadata

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return _Pieces(all_plans).share(_ties(getattr(self, "state_dict", {})))


def _ties(values: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors whose memory another one has as well, and the first name of that memory."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, value in values.items():
        for local in local_tensors(value)[:1]:
            if local.layout is torch.strided and local.nbytes:
                known = first.setdefault((local.device, local.data_ptr(), local.nbytes), name)
                if known != name:
                    ties[name] = known
    return ties


class _Pieces:
    """What the ranks plan to write: values and slices of tensors, numbered, and who holds each."""

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        self._plans = plans
        self._numbers: dict[tuple[str, tuple[int, ...] | None], int] = {}
        self._items: list[WriteItem] = []
        self._first: list[int] = []
        self._shared: dict[int, list[int]] = {}
        self._of_rank: list[list[int]] = []
        numbers, items, first, shared = self._numbers, self._items, self._first, self._shared
        for rank, plan in enumerate(plans):
            mine = []
            for item in plan.items:
                index = item.index
                number = numbers.setdefault((index.fqn, index.offset), len(numbers))
                mine.append(number)
                if number == len(first):
                    first.append(rank)
                    items.append(item)
                elif (holders := shared.get(number)) is not None:
                    holders.append(rank)
                elif first[number] != rank:
                    shared[number] = [first[number], rank]
            self._of_rank.append(mine)

    def share(self, ties: Mapping[str, str]) -> list[SavePlan]:
        """The plans without what another rank writes."""
        if not self._shared:
            return list(self._plans)
        writer = self._choose(ties)
        return [
            replace(
                plan,
                items=[item for item, number in zip(plan.items, mine, strict=True) if writer.get(number, rank) == rank],
            )
            for rank, (plan, mine) in enumerate(zip(self._plans, self._of_rank, strict=True))
        ]

    def _choose(self, ties: Mapping[str, str]) -> dict[int, int]:
        """The rank that writes each shared piece: of what has a size, the one with the fewest bytes so far."""
        writer = {number: holders[0] for number, holders in self._shared.items() if not self._nbytes(number)}
        if len(writer) == len(self._shared):
            return writer
        parts = [
            (sum(self._nbytes(number) for number in part if number in self._shared), holders, part)
            for group in self._groups(ties, writer)
            for holders, part in self._parts(group)
        ]
        load = [0] * len(self._plans)
        for number, rank in enumerate(self._first):
            load[rank] += 0 if number in self._shared else self._nbytes(number)
        for nbytes, holders, part in sorted(parts, key=lambda part: -part[0]):
            rank = min(holders, key=load.__getitem__) if len(holders) > 1 else holders[0]
            writer.update(dict.fromkeys(part, rank))
            load[rank] += nbytes
        return writer

    def _groups(self, ties: Mapping[str, str], placed: Mapping[int, int]) -> Iterator[list[int]]:
        """Pieces that belong together, where one of them is shared; ``placed`` have a writer already."""
        shapes: dict[str, tuple[int, ...]] = {}
        for (name, _), number in self._numbers.items():
            shapes.setdefault(name, getattr(self._items[number].tensor_data, "size", ()))
        families = Families(shapes, ties)
        largest = {
            family: max((shapes[name] for name in names), key=prod) for family, names in families.members.items()
        }
        slices: dict[tuple[str, Box], None] = {}
        for number in self._shared:
            name = self._items[number].index.fqn
            family = families.of(name)
            if number not in placed and shapes[name] == largest[family]:
                slices[family, _box(self._items[number])] = None
        taken: set[int] = set()
        for family, box in slices:
            group = []
            for name in families.members[family]:
                place = box if shapes[name] == largest[family] else families.statistic(name, box)
                member = None if place is None else self._numbers.get((name, place[0]))
                if member is not None and member not in taken and _box(self._items[member]) == place:
                    group.append(member)
            taken.update(group)
            yield group
        yield from ([number] for number in self._shared if number not in taken and number not in placed)

    def _parts(self, group: list[int]) -> list[tuple[list[int], list[int]]]:
        """A group in as few parts as may be, each with the ranks that hold all of it. One, as a rule."""
        parts: list[tuple[list[int], list[int]]] = []
        for number in group:
            own = self._shared.get(number) or [self._first[number]]
            for k, (holders, part) in enumerate(parts):
                both = own if own == holders else sorted({*own} & {*holders})
                if both:
                    parts[k] = both, [*part, number]
                    break
            else:
                parts.append((own, [number]))
        return [(holders, part) for holders, part in parts if any(number in self._shared for number in part)]

    def _nbytes(self, number: int) -> int:
        """Bytes of a piece of a tensor; none for a number, and for what is no tensor."""
        data = self._items[number].tensor_data
        if data is None or not data.size:
            return 0
        return prod(data.chunk.sizes) * data.properties.dtype.itemsize
