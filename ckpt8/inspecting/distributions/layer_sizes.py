"""What the layers of a checkpoint add up to: bytes by role, and errors in update space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.meaning.layer_names import in_model_order, layer_of, plain_path
from ckpt8.codecs.error_stats import UpdateError
from ckpt8.container.facts import error_facts
from ckpt8.container.manifest import Manifest
from ckpt8.core.tensors import Role
from ckpt8.inspecting.manifest_facts import shown_names, skeleton_roles

REST = "everything else"
"""What belongs to no layer: steps, random states, the structure of files."""


@dataclass(slots=True)
class _Layer:
    elements: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[str] = field(default_factory=Counter)
    parameters: int = 0
    update: UpdateError = field(default_factory=UpdateError)


@dataclass(slots=True)
class LayerSizes:
    """Sums by layer. ``stored`` tells whether sizes in a container are known."""

    stored: bool
    _layers: dict[str, _Layer] = field(default_factory=dict)
    _rest: _Layer = field(default_factory=_Layer)

    @classmethod
    def of(cls, manifest: Manifest, counted: Collection[int], *, stored: bool) -> LayerSizes:
        """The sizes of all storages. Those that are weights and ``counted`` count as weights of their layer."""
        sizes = cls(stored)
        skeletons, owners = skeleton_roles(manifest), dict[int, str]()
        for parameter, row in zip(manifest.parameters, shown_names(manifest), strict=True):
            owners.update(dict.fromkeys(parameter.moments.values(), row["name"]))
        for index, record in enumerate(manifest.storages):
            has_layer = index not in skeletons and record.role is not Role.OTHER
            name = owners.get(index, record.name if has_layer else None)
            layer = sizes._rest if name is None else sizes._layer(name)
            role = skeletons.get(index, record.role.value)
            layer.elements += record.numel if index in counted and record.role is Role.WEIGHT else 0
            layer.bytes[role] += record.nbytes
            layer.stored_bytes[role] += record.stored_bytes
        return sizes

    def _layer(self, name: str) -> _Layer:
        return self._layers.setdefault(layer_of(plain_path(name)), _Layer())

    def add_error(self, name: str, error: UpdateError) -> None:
        """Add the error of the parameter ``name``."""
        layer = self._layer(name)
        layer.parameters += 1
        layer.update.merge(error)

    def to_json(self) -> list[dict[str, Any]]:
        """All layers in the order of the model; what is in none comes last."""
        rows = [self._row(name, self._layers[name]) for name in in_model_order(self._layers)]
        return [*rows, self._row(REST, self._rest)] if self._rest.bytes else rows

    def _row(self, name: str, layer: _Layer) -> dict[str, Any]:
        update = error_facts(layer.update.to_json()) if layer.parameters else None
        return {
            "layer": name,
            "weights": layer.elements,
            "bytes": dict(sorted(layer.bytes.items())),
            "stored_bytes": dict(sorted(layer.stored_bytes.items())) if self.stored else None,
            "update": None if update is None else {**update, "parameters": layer.parameters},
        }
