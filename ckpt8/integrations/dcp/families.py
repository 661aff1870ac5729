"""Which tensors of a distributed state dict belong to one parameter: its weight, copies of it, its optimizer state."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from ckpt8.container.sharded.index import GlobalTensor
from ckpt8.container.sharded.layouts import Grid, Layout
from ckpt8.core.tensors import Role
from ckpt8.integrations.dcp.tree import Box, Naming, average_of, slot_of
from ckpt8.optim.known_optimizers import STATE_ROLES


class Families:
    """The values of a state dict by parameter. ``names`` are of all values; ``ties`` join tensors with shared memory.

    A family is named after a parameter of an optimizer. A weight belongs to the one whose name ends its own, so that
    ``model.0.weight``, ``ema.0.weight`` and the state of ``0.weight`` are one family. Other values are families alone.
    """

    def __init__(self, names: Iterable[str], ties: Mapping[str, str] | None = None) -> None:
        names = list(names)
        naming = Naming(names)
        states = {name: found for name in names if (found := naming.state(name)) is not None}
        owners = {owner for _, owner, _ in states.values()}
        self.keys = {name: key for name, (_, _, key) in states.items()}
        """The key of each value that is part of an optimizer's state."""
        self._of: dict[str, str] = {name: owner for name, (_, owner, _) in states.items()}
        for name in names:
            if name not in states and (owner := _owner(name, owners)) is not None:
                self._of[name] = owner
        tied: dict[str, str] = {}
        for name, first in (ties or {}).items():
            tied[first] = tied.get(first) or self._of.get(first) or self._of.get(name, "")
        for name, first in (ties or {}).items():
            self._of[name] = self._of[first] = tied[first] or first
        self.members: dict[str, list[str]] = {}
        """The names of each family, its state before its weights."""
        for name in (*states, *(name for name in names if name not in states)):
            self.members.setdefault(self.of(name), []).append(name)
        self._averages: dict[str, list[str]] = {}
        for name, key in self.keys.items():
            if slot_of(key) == "statistic":
                self._averages.setdefault(name.removesuffix(key), []).append(name)
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
    if isinstance(one, Grid) and isinstance(other, Grid) and _cuts(one) == _cuts(other):
        return one.owners != other.owners
    files = {(offsets, sizes): file for file, offsets, sizes in one.boxes()}
    return any(files.get((offsets, sizes), file) != file for file, offsets, sizes in other.boxes())


def _cuts(grid: Grid) -> list[Sequence[Sequence[int]]]:
    return [cuts.runs for cuts in grid.cuts]


def _owner(name: str, owners: set[str]) -> str | None:
    """The longest of ``owners`` that ends a name."""
    while name not in owners:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return name
