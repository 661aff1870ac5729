"""Which tensors of a distributed state dict belong to one parameter: its weight, copies of it, its optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt8.integrations.dcp.tree import Naming
from ckpt8.optim.known_optimizers import TENSORS

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a slice."""


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

    def of(self, name: str) -> str:
        """The family of a value."""
        return self._of.get(name, name)

    def statistic(self, name: str, box: Box) -> Box | None:
        """The slice of an average over rows or columns that belongs to a slice of the parameter; else None."""
        tensor = TENSORS.get(self.keys.get(name, ""))
        if tensor is None or tensor.slot != "statistic":
            return None
        offsets, sizes = box
        ends = tensor.shape(tuple(offset + size for offset, size in zip(offsets, sizes, strict=True)))
        sizes = tensor.shape(sizes)
        return tuple(end - size for end, size in zip(ends, sizes, strict=True)), sizes


def _owner(name: str, owners: set[str]) -> str | None:
    """The longest of ``owners`` that ends a name."""
    while name not in owners:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return name
