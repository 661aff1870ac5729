"""The result of ``diff``, and its sums by role and by layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt8.checkpoint.meaning.parameter_names import layer_of
from ckpt8.core.tensors import Role
from ckpt8.inspecting.diff.change import Change
from ckpt8.inspecting.diff.leaves import Tensor
from ckpt8.inspecting.diff.values import text

_LARGEST = 1 << 63
_LONGEST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Two tensors that match. ``change`` is None if their shapes or types cannot be compared.

    ``values`` are two numbers that differ, if each tensor has one element.
    """

    a: Tensor
    b: Tensor
    change: Change | None
    values: tuple[float, float] | None = None

    @property
    def identical(self) -> bool:
        """Whether type, shape and every bit are the same."""
        return self.change is not None and not self.change.differ and self.a.ref.dtype is self.b.ref.dtype

    @property
    def is_tied(self) -> bool:
        """Whether both share their elements with another tensor, which sums count in their place."""
        return self.a.tied is not None and self.b.tied is not None

    @property
    def role(self) -> Role:
        """The role of the tensor in the checkpoint."""
        return self.b.role if self.a.role is Role.OTHER else self.a.role

    @property
    def layer(self) -> str | None:
        """The layer of its parameter; None if it belongs to no parameter, or to one without a name."""
        name = self.a.parameter or self.b.parameter
        if name is None and self.role is Role.WEIGHT:
            name = self.a.name
        return None if name is None else layer_of(name)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **_facts(self.a),
            "name_b": self.b.name,
            "tied_b": self.b.tied,
            "dtype_b": self.b.ref.dtype.label,
            "shape_b": list(self.b.ref.shape),
            "role": self.role.value,
            "parameter": self.a.parameter or self.b.parameter,
            "layer": self.layer,
            "identical": self.identical,
            "change": None if self.change is None else self.change.to_json(),
            "values": None if self.values is None else [_plain(value) for value in self.values],
        }


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """Two values that match by name and differ."""

    name: str
    a: Any
    b: Any


def _plain(value: Any) -> Any:
    """For ``--json``: short plain values as they are, all others as text."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT] + "…"
    if isinstance(value, int):
        return value if abs(value) < _LARGEST else text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else text(value)
    return None if value is None else text(value)


def _facts(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.ref.dtype.label,
        "shape": list(tensor.ref.shape),
        "tied": tensor.tied,
    }


@dataclass(slots=True)
class Difference:
    """The differences between two checkpoints. ``a`` and ``b`` describe each of them.

    ``tensors`` are those that both have, equal or not. ``values`` are other values that both have and that differ;
    ``equal_values`` counts the equal ones. ``files`` are members without tensors whose bytes differ.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    tensors: list[TensorDifference] = field(default_factory=list)
    tensors_only_a: list[Tensor] = field(default_factory=list)
    tensors_only_b: list[Tensor] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    values_only_a: list[tuple[str, Any]] = field(default_factory=list)
    values_only_b: list[tuple[str, Any]] = field(default_factory=list)
    equal_values: int = 0
    files: list[str] = field(default_factory=list)
    files_only_a: list[str] = field(default_factory=list)
    files_only_b: list[str] = field(default_factory=list)
    equal_files: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether both hold the same: every tensor bit for bit, every value, every file."""
        only_a = self.tensors_only_a or self.values_only_a or self.files_only_a
        only_b = self.tensors_only_b or self.values_only_b or self.files_only_b
        changed = self.values or self.files
        return not (only_a or only_b or changed) and all(each.identical for each in self.tensors)

    @property
    def changed(self) -> list[TensorDifference]:
        """Tensors that both have and that are not identical, the largest relative change first."""
        return sorted((each for each in self.tensors if not each.identical), key=lambda each: -_relative(each))

    def roles(self) -> dict[Role, dict[str, Any]]:
        """Sums over the tensors that both have, by role; of tied ones only the first counts.

        Beside the figures of ``Change`` these are ``tensors``, ``identical`` ones, and the name of the ``worst``.
        """
        found = _totals((each for each in self.tensors if not each.is_tied), lambda each: each.role)
        return {role: found[role] for role in Role if role in found}

    def layers(self, role: Role) -> dict[str | None, dict[str, Any]]:
        """Such sums by layer, the largest change first; None stands for parameters without names."""
        found = _totals(
            (each for each in self.tensors if each.role is role and not each.is_tied), lambda each: each.layer
        )
        return dict(sorted(found.items(), key=lambda item: -_or_infinite(item[1]["relative"])))

    def to_json(self) -> dict[str, Any]:
        """Plain values.

        ``a``, ``b``: path, layout, whether it is a ``.ckpt8``, bytes. ``roles`` and ``layers``: sums over the tensors
        of a role, or of a role and a layer, with the name of the ``worst``. ``tensors``, ``values`` and ``files`` list
        those of one side under ``only_a`` and ``only_b``. Tensors of both sides are under ``both``; values and files of
        both are under ``changed`` if they differ, else ``equal`` counts them. See ``Change`` for its figures.
        """
        return {
            "a": self.a,
            "b": self.b,
            "identical": self.identical,
            "roles": {role.value: total for role, total in self.roles().items()},
            "layers": {
                role.value: [{"layer": layer, **total} for layer, total in self.layers(role).items()]
                for role in (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2)
            },
            "tensors": {
                "both": [each.to_json() for each in self.tensors],
                "only_a": [_facts(each) for each in self.tensors_only_a],
                "only_b": [_facts(each) for each in self.tensors_only_b],
            },
            "values": {
                "equal": self.equal_values,
                "changed": [{"name": each.name, "a": _plain(each.a), "b": _plain(each.b)} for each in self.values],
                "only_a": [{"name": name, "a": _plain(value)} for name, value in self.values_only_a],
                "only_b": [{"name": name, "b": _plain(value)} for name, value in self.values_only_b],
            },
            "files": {
                "equal": self.equal_files,
                "changed": self.files,
                "only_a": self.files_only_a,
                "only_b": self.files_only_b,
            },
            "notes": self.notes,
        }


def _relative(each: TensorDifference) -> float:
    """The relative change, by which tensors are sorted; infinite if it is unknown."""
    return math.inf if each.change is None else _or_infinite(each.change.relative)


def _or_infinite(relative: float | None) -> float:
    return math.inf if relative is None else relative


K = TypeVar("K", bound=Hashable)


def _totals(tensors: Iterable[TensorDifference], key: Callable[[TensorDifference], K]) -> dict[K, dict[str, Any]]:
    groups: dict[K, list[TensorDifference]] = defaultdict(list)
    for each in tensors:
        groups[key(each)].append(each)
    return {name: _total(group) for name, group in groups.items()}


def _total(group: list[TensorDifference]) -> dict[str, Any]:
    total = Change()
    for change in (each.change for each in group if each.change is not None):
        total.merge(change)
    worst = max(group, key=_relative)
    identical = sum(each.identical for each in group)
    name = None if worst.identical else worst.a.name
    return {"tensors": len(group), "identical": identical, "worst": name, **total.to_json()}
