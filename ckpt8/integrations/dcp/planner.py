"""The save planner of ``ckpt8.integrations.dcp``: of replicas, one rank writes all of a parameter's slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckpt8.integrations.dcp.copied_statistics import with_copies
from ckpt8.integrations.dcp.families import Families
from ckpt8.integrations.dcp.local import local_tensors
from ckpt8.integrations.dcp.tree import Box


class Ckpt8SavePlanner(DefaultSavePlanner):
    """As torch's DefaultSavePlanner, but one rank writes weight and state of a slice that several ranks hold.

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
        load = self._unshared_bytes()
        for nbytes, holders, part in sorted(parts, key=lambda each: -each[0]):
            rank = min(holders, key=load.__getitem__) if len(holders) > 1 else holders[0]
            writer.update(dict.fromkeys(part, rank))
            load[rank] += nbytes
        return writer

    def _groups(self, ties: Mapping[str, str], placed: Mapping[int, int]) -> Iterator[list[int]]:
        """Pieces that belong together, where one of them is shared; ``placed`` have a writer already."""
        first: dict[str, int] = {}
        for (name, _), number in self._numbers.items():
            first.setdefault(name, number)
        families = Families(first, ties)
        shapes = {name: self._shape(number) for name, number in first.items()}
        largest = {
            family: max((shapes[name] for name in names), key=prod) for family, names in families.members.items()
        }
        slices: dict[tuple[str, Box], None] = {}
        for number in self._shared:
            name = self._items[number].index.fqn
            family = families.of(name)
            if number not in placed and shapes[name] == largest[family]:
                slices[family, self._box(number)] = None
        taken: set[int] = set()
        for family, box in slices:
            group = []
            for name in families.members[family]:
                whole = shapes[name] == largest[family]
                place = box if whole else families.statistic(name, box)
                found = None if place is None else self._numbers.get((name, place[0]))
                if found is not None and found not in taken and self._box(found) == place:
                    group.append(found)
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

    def _unshared_bytes(self) -> list[int]:
        """Of each rank, what no other holds."""
        load = [0] * len(self._plans)
        for number, rank in enumerate(self._first):
            if number not in self._shared:
                load[rank] += self._nbytes(number)
        return load

    def _shape(self, number: int) -> tuple[int, ...]:
        data = self._items[number].tensor_data
        return () if data is None else data.size

    def _box(self, number: int) -> Box:
        data = self._items[number].tensor_data
        return ((), ()) if data is None else (data.chunk.offsets, data.chunk.sizes)

    def _nbytes(self, number: int) -> int:
        """Bytes of a piece of a tensor; none for a number, and for what is no tensor."""
        data = self._items[number].tensor_data
        if data is None or not data.size:
            return 0
        return prod(data.chunk.sizes) * data.properties.dtype.itemsize
