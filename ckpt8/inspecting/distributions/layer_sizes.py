"""Which layer a tensor belongs to, by its name, and what layers add up to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt8.codecs.error_stats import UpdateError
from ckpt8.container.facts import error_facts

REST = "everything else"
"""What belongs to no layer: steps, random states, the structure of files."""

_DIGITS = re.compile(r"\d+")


class LayerNames:
    """The layer of weights by their names, and of parameters by the names that they are shown with.

    A layer is a name up to its first number, as in ``transformer.h.0``, or without its last component. The name of a
    weight may have more in front than the parameter has; in a ``directory`` a member and a colon stand before both.
    """

    def __init__(self, parameters: Iterable[str], *, directory: bool) -> None:
        self._directory = directory
        self._parameters = {self._bare(name) for name in parameters}

    def _bare(self, name: str) -> str:
        return name.partition(":")[2] if self._directory and ":" in name else name

    def of(self, name: str) -> str:
        """The layer."""
        components = self._bare(name).split(".")
        for start in range(len(components)):
            if ".".join(components[start:]) in self._parameters:
                components = components[start:]
                break
        number = next((k for k, each in enumerate(components) if each.isdecimal()), None)
        return ".".join(components[: -1 if number is None else number + 1]) or components[0]


@dataclass(slots=True)
class _Layer:
    elements: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[str] = field(default_factory=Counter)
    parameters: int = 0
    update: UpdateError = field(default_factory=UpdateError)


@dataclass(slots=True)
class LayerSizes:
    """Bytes by layer and role, and errors in update space."""

    names: LayerNames
    stored: bool
    _layers: dict[str, _Layer] = field(default_factory=dict)
    _rest: _Layer = field(default_factory=_Layer)

    def add(self, name: str | None, role: str, nbytes: int, stored: int = 0, elements: int = 0) -> None:
        """A storage that belongs to the tensor or parameter of that name, or to none. ``elements`` if it is a weight.

        ``stored`` is its size in the container.
        """
        layer = self._rest if name is None else self._layers.setdefault(self.names.of(name), _Layer())
        layer.elements += elements
        layer.bytes[role] += nbytes
        layer.stored_bytes[role] += stored

    def add_error(self, name: str, error: UpdateError) -> None:
        """The error of a parameter."""
        layer = self._layers.setdefault(self.names.of(name), _Layer())
        layer.parameters += 1
        layer.update.merge(error)

    def to_json(self) -> list[dict[str, Any]]:
        """All layers, in the order of the checkpoint but for numbers, which go up; the rest is last."""
        first: dict[str, int] = {}
        for name in self._layers:
            first.setdefault(_DIGITS.sub("#", name), len(first))
        order = sorted(
            self._layers, key=lambda name: (first[_DIGITS.sub("#", name)], [int(n) for n in _DIGITS.findall(name)])
        )
        rows = [self._row(name, self._layers[name]) for name in order]
        return [*rows, self._row(REST, self._rest)] if self._rest.bytes else rows

    def _row(self, name: str, layer: _Layer) -> dict[str, Any]:
        update = error_facts(layer.update.to_json()) if layer.parameters else None
        return {
            "layer": name,
            "weights": layer.elements,
            "bytes": _sorted(layer.bytes),
            "stored_bytes": _sorted(layer.stored_bytes) if self.stored else None,
            "update": None if update is None else {**update, "parameters": layer.parameters},
        }


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return {role: counts[role] for role in sorted(counts)}
