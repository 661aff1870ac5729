"""The result of ``diff``, and its sums by role and by layer.

The difference between two tensors: figures in float64 that add up over tiles, in the order of the elements.

Elements of one type differ if their bits do; elements of two types, if their values do. Elements that are NaN or Inf on
either side are counted, and left out of all other figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from ckpt8.checkpoint.meaning.parameter_names import layer_of
from ckpt8.codecs.error_stats import ErrorStats
from ckpt8.core.tensors import Role
from ckpt8.inspecting.diff_sides import Tensor, text

_TILE = 1 << 16
_EXACT = 2.0**62
"""Smaller differences of 64-bit integers are computed as integers: float64 has too few bits for their values."""


@dataclass(slots=True)
class Change(ErrorStats):
    """Sums over ``elements``; ``differ`` of them differ.

    ``excluded`` of them are in no figure: they are NaN or Inf on either side, or of a type without numbers.

    ``square`` is the sum of a^2, ``change`` that of (b - a)^2, ``max_change`` is max |b - a|; of complex numbers |.| is
    the magnitude.
    """

    elements: int = 0
    differ: int = 0
    square: float = 0.0
    change: float = 0.0
    max_change: float = 0.0
    nan_a: int = 0
    nan_b: int = 0
    infinite_a: int = 0
    infinite_b: int = 0
    excluded: int = 0

    def times(self, count: int) -> Change:
        """The change of ``count`` copies of these elements."""
        values = {field.name: getattr(self, field.name) * count for field in fields(self)}
        return Change(**{**values, "max_change": self.max_change})

    @property
    def is_known(self) -> bool:
        """Whether there are figures: elements that differ give none if all are NaN or Inf."""
        return not self.differ or self.elements > self.excluded

    @property
    def relative(self) -> float | None:
        """||b - a|| / ||a||; None if it is unknown, if only a is zero, or beyond float64."""
        if not self.change:
            return 0.0 if self.is_known else None
        return _finite(math.sqrt(self.change / self.square)) if self.square else None

    @property
    def largest(self) -> float | None:
        """Largest |b - a|; None if it is unknown, or beyond float64."""
        return _finite(self.max_change) if self.is_known else None

    @property
    def rms(self) -> float | None:
        """Root mean square of a, over the elements that count; None without any."""
        return self._root_mean(self.square)

    def _root_mean(self, total: float) -> float | None:
        counted = self.elements - self.excluded
        return _finite(math.sqrt(total / counted)) if counted else None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``; ``nan`` and ``infinite`` count those of either side. What is unknown is None."""
        return {
            "elements": self.elements,
            "differ": self.differ,
            "max_change": self.largest,
            "relative": self.relative,
            "rms_change": self._root_mean(self.change),
            "rms": self.rms,
            "nan": [self.nan_a, self.nan_b],
            "infinite": [self.infinite_a, self.infinite_b],
            "excluded": self.excluded,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def measure(a: torch.Tensor, b: torch.Tensor) -> Change:
    """Compare two flat tensors of one length, on the CPU, both of types that have numbers."""
    total = Change()
    for start in range(0, len(a), _TILE):
        total.merge(_tile(a[start : start + _TILE], b[start : start + _TILE]))
    return total


def count_differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of two flat contiguous tensors of one type differ in their bits."""
    size = a.element_size()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x, y = (values.view(integers[min(size, 8)]) for values in (a, b))
    unequal = x.ne(y)
    return int((unequal.view(-1, 2).any(1) if size > 8 else unequal).count_nonzero())


def _tile(a: torch.Tensor, b: torch.Tensor) -> Change:
    same_type = a.dtype == b.dtype
    change = Change(len(a), count_differing(a, b) if same_type else 0)
    x = _wide(a)
    y = x if same_type and not change.differ else _wide(b)
    if not same_type:
        change.differ = int((x.ne(y) & ~(x.isnan() & y.isnan())).count_nonzero())
    difference = None if y is x else _difference(a, b, x, y)
    _add_energy(change, x, difference)
    if math.isfinite(change.square + change.change):
        return change
    finite = x.isfinite() & y.isfinite()
    change.nan_a, change.nan_b = int(x.isnan().count_nonzero()), int(y.isnan().count_nonzero())
    change.infinite_a, change.infinite_b = int(x.isinf().count_nonzero()), int(y.isinf().count_nonzero())
    change.excluded = len(a) - int(finite.count_nonzero())
    _add_energy(change, x[finite], None if difference is None else difference[finite])
    return change


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _difference(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``b - a``; ``x`` and ``y`` are their values in float64."""
    wide = y - x
    if a.dtype != b.dtype or a.dtype not in (torch.int64, torch.uint64):
        return wide
    # Modulo 2^64, and so exact if the difference is small enough.
    exact = (b.view(torch.int64) - a.view(torch.int64)).double()
    return torch.where(wide.abs() < _EXACT, exact, wide)


def _add_energy(into: Change, x: torch.Tensor, difference: torch.Tensor | None) -> None:
    """Set the sums and the maximum."""
    into.square = _square_sum(x)
    into.change = into.max_change = 0.0
    if difference is not None and len(difference):
        into.change = _square_sum(difference)
        into.max_change = float(difference.abs().max())


def _square_sum(x: torch.Tensor) -> float:
    flat = torch.view_as_real(x).view(-1) if x.is_complex() else x
    return float(flat.dot(flat))


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
        return not (only_a or only_b or changed) and all(tensor.identical for tensor in self.tensors)

    @property
    def changed(self) -> list[TensorDifference]:
        """Tensors that both have and that are not identical, the largest relative change first."""
        return sorted(
            (tensor for tensor in self.tensors if not tensor.identical), key=lambda tensor: -_relative(tensor)
        )

    def roles(self) -> dict[Role, dict[str, Any]]:
        """Sums over the tensors that both have, by role; of tied ones only the first counts.

        Beside the figures of ``Change`` these are ``tensors``, ``identical`` ones, and the name of the ``worst``.
        """
        totals = _totals((tensor for tensor in self.tensors if not tensor.is_tied), lambda tensor: tensor.role)
        return {role: totals[role] for role in Role if role in totals}

    def layers(self, role: Role) -> dict[str | None, dict[str, Any]]:
        """Such sums by layer, the largest change first; None stands for parameters without names."""
        totals = _totals(
            (tensor for tensor in self.tensors if tensor.role is role and not tensor.is_tied),
            lambda tensor: tensor.layer,
        )
        return dict(sorted(totals.items(), key=lambda item: -_or_infinite(item[1]["relative"])))

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
                "both": [tensor.to_json() for tensor in self.tensors],
                "only_a": [_facts(tensor) for tensor in self.tensors_only_a],
                "only_b": [_facts(tensor) for tensor in self.tensors_only_b],
            },
            "values": {
                "equal": self.equal_values,
                "changed": [{"name": value.name, "a": _plain(value.a), "b": _plain(value.b)} for value in self.values],
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


def _relative(tensor: TensorDifference) -> float:
    """The relative change, by which tensors are sorted; infinite if it is unknown."""
    return math.inf if tensor.change is None else _or_infinite(tensor.change.relative)


def _or_infinite(relative: float | None) -> float:
    return math.inf if relative is None else relative


K = TypeVar("K", bound=Hashable)


def _totals(tensors: Iterable[TensorDifference], key: Callable[[TensorDifference], K]) -> dict[K, dict[str, Any]]:
    groups: dict[K, list[TensorDifference]] = defaultdict(list)
    for tensor in tensors:
        groups[key(tensor)].append(tensor)
    return {name: _total(group) for name, group in groups.items()}


def _total(group: list[TensorDifference]) -> dict[str, Any]:
    total = Change()
    for change in (tensor.change for tensor in group if tensor.change is not None):
        total.merge(change)
    worst = max(group, key=_relative)
    identical = sum(tensor.identical for tensor in group)
    name = None if worst.identical else worst.a.name
    return {"tensors": len(group), "identical": identical, "worst": name, **total.to_json()}
