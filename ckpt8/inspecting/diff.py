"""``diff``: opens two sources, matches their tensors, values and files, and compares them.

It reads two tensors side by side, in pieces of bounded size. ``Difference`` is the result, with sums by role and layer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import numpy as np

from ckpt8.checkpoint.meaning.parameter_names import layer_of
from ckpt8.checkpoint.meaning.roles import unique_name
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import Checkpoint, TensorRef, format_path, iter_nodes, read_scalar
from ckpt8.container.frames import FRAME
from ckpt8.core.arrays import Array
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import InputError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import crc32
from ckpt8.core.grouping import grouped
from ckpt8.core.public import checked
from ckpt8.core.summary import Summarised
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import counted, listed, size
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.change import Change, measure
from ckpt8.inspecting.container import read_json
from ckpt8.inspecting.diff_sides import (
    Collected,
    Equality,
    Leaves,
    Side,
    Tensor,
    align,
    collect,
    make_sides,
    naming,
    text,
)

_LARGEST = 1 << 63
_LONGEST_TEXT = 1000


K = TypeVar("K", bound=Hashable)


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
    def role(self) -> Role:
        """The role of the tensor in the checkpoint; a counter beside weights is none of them."""
        if self.a.ref.numel == 1 and not self.a.ref.dtype.is_floating:
            return Role.OTHER
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
    is_number = isinstance(value, (int, float)) and abs(value) < (_LARGEST if isinstance(value, int) else math.inf)
    return value if value is None or is_number else text(value)


def _facts(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.ref.dtype.label,
        "shape": list(tensor.ref.shape),
        "tied": tensor.tied,
    }


@dataclass(slots=True, repr=False)
class Difference(Summarised):
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

    def _summary(self) -> Iterator[tuple[str, str]]:
        yield "Difference", verdict(self.to_json())
        for side, facts in (("A", self.a), ("B", self.b)):
            kind = f"{'ckpt8 of ' if facts['ckpt8'] else ''}{facts['layout']}"
            yield side, f"{facts['path']}, {kind}, {size(facts['bytes'])}"
        for tensor in self.changed[:1]:
            relative = None if tensor.change is None else tensor.change.relative
            yield "most", f"{tensor.a.name}" + ("" if relative is None else f" differs by {relative:.3g} of its size")
        yield "notes", listed(self.notes, 1)

    @property
    def identical(self) -> bool:
        """Whether both hold the same: every tensor bit for bit, every value, every file."""
        only_one = self.tensors_only_a, self.values_only_a, self.files_only_a
        only_other = self.tensors_only_b, self.values_only_b, self.files_only_b
        is_changed = any((*only_one, *only_other, self.values, self.files))
        return not is_changed and all(tensor.identical for tensor in self.tensors)

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
        totals = self._totals(lambda tensor: tensor.role)
        return {role: totals[role] for role in Role if role in totals}

    def layers(self, role: Role) -> dict[str | None, dict[str, Any]]:
        """Such sums by layer, the largest change first; None stands for parameters without names."""
        totals = self._totals(lambda tensor: tensor.layer, (role,))
        return dict(sorted(totals.items(), key=lambda item: -_or_infinite(item[1]["relative"])))

    def _totals(
        self, key: Callable[[TensorDifference], K], roles: Collection[Role] = tuple(Role)
    ) -> dict[K, dict[str, Any]]:
        # Where both share their elements with another tensor, that one counts in their place.
        own = (tensor for tensor in self.tensors if tensor.a.tied is None or tensor.b.tied is None)
        groups = grouped((key(tensor), tensor) for tensor in own if tensor.role in roles)
        return {name: _total(group) for name, group in groups.items()}

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


def verdict(facts: dict[str, Any]) -> str:
    """One line: identical, or how many tensors, values and files differ, and how many only one side has."""
    both = facts["tensors"]["both"]
    kinds = {
        "tensors": (sum(not tensor["identical"] for tensor in both), len(both), facts["tensors"]),
        "other values": _counted(facts["values"]),
        "other files": _counted(facts["files"]),
    }
    if facts["identical"]:
        counts = ", ".join(counted(total, what.removesuffix("s")) for what, (_, total, _) in kinds.items() if total)
        return f"identical: {counts}; tensors bit for bit"
    parts = []
    for what, (differ, total, values) in kinds.items():
        words = [f"{differ:,} of {total:,} differ" if differ else f"all {total:,} equal"] if total else []
        words += [f"{len(values[key]):,} only in {key[-1].upper()}" for key in ("only_a", "only_b") if values[key]]
        if words:
            parts.append(f"{what}: {', '.join(words)}")
    return f"different: {'; '.join(parts)}"


def _counted(values: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    changed = len(values["changed"])
    return changed, changed + values["equal"], values


def _relative(tensor: TensorDifference) -> float:
    """The relative change, by which tensors are sorted; infinite if it is unknown."""
    return math.inf if tensor.change is None else _or_infinite(tensor.change.relative)


def _or_infinite(relative: float | None) -> float:
    return math.inf if relative is None else relative


def _total(group: list[TensorDifference]) -> dict[str, Any]:
    worst = max(group, key=_relative)
    return {
        "tensors": len(group),
        "identical": sum(tensor.identical for tensor in group),
        "worst": None if worst.identical else worst.a.name,
        **Change.total(tensor.change or Change() for tensor in group).to_json(),
    }


_READ = 4 * FRAME
"""Elements of one read: enough for a container to decode on several threads."""

OPAQUE = frozenset({DType.FLOAT4_E2M1FN_X2, DType.QINT8, DType.QUINT8, DType.QINT32, DType.QUINT4X2, DType.QUINT2X4})
"""Types whose elements torch does not give as numbers: ``diff`` compares only their bits."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of one shape; ``first`` and ``second`` have their dimensions in the order that suits the first.

    Every element counts ``repeat`` times: elements that both only repeat, as expanded tensors do, are read once.
    """

    a: Tensor
    b: Tensor
    first: TensorRef
    second: TensorRef
    repeat: int = 1


_Piece = tuple[int, int, tuple[DType, DType], Array, Array]
"""The number of a pair, the bytes of each opaque element (0 for numbers), and types and elements of both."""


def make_pair(a: Tensor, b: Tensor) -> Pair:
    """Pair two tensors of one shape. Raises InputError if both repeat more elements than they store, in two ways."""
    first, second, repeat = a.ref, b.ref, 1
    if not (first.is_contiguous and second.is_contiguous):
        # Of dimensions that both only repeat, one index is read.
        dims = range(len(first.shape))
        repeated = {dim for dim in dims if first.shape[dim] > 1 and first.stride[dim] == second.stride[dim] == 0}
        repeat = prod(first.shape[dim] for dim in repeated)
        shape = [1 if dim in repeated else first.shape[dim] for dim in dims]
        order = sorted(dims, key=lambda dim: -first.stride[dim])
        first, second = (
            replace(ref, shape=tuple(shape[dim] for dim in order), stride=tuple(ref.stride[dim] for dim in order))
            for ref in (first, second)
        )
        if _is_expanded(a, first) and _is_expanded(b, second):
            if first.stride != second.stride:
                a.part.data.check_extent(a.name, first)
            # Windows that overlap: compare the run of elements under them instead.
            first, second = (replace(ref, shape=(ref.span,), stride=(1,)) for ref in (first, second))
    if a.ref.dtype in OPAQUE or b.ref.dtype in OPAQUE:
        first, second = _as_bytes(first), _as_bytes(second)
    return Pair(a, b, first, second, repeat)


def _is_expanded(tensor: Tensor, ref: TensorRef) -> bool:
    return ref.nbytes > max(tensor.part.data.places[ref.key].nbytes, FRAME)


def _as_bytes(ref: TensorRef) -> TensorRef:
    size = ref.dtype.itemsize
    stride = (*(step * size for step in ref.stride), 1)
    return TensorRef(ref.key, DType.UINT8, ref.offset * size, (*ref.shape, size), stride)


def compare(pairs: Sequence[Pair], workers: Workers, progress: Progress) -> list[Change]:
    """Measure all pairs; calls ``progress`` with numbers of bytes that it has read. Raises InputError for damage."""
    changes = [Change() for _ in pairs]
    for number, change in workers.map(_measure, _pieces(pairs, progress), ahead=0):
        changes[number].merge(change)
    return [change.times(pair.repeat) for change, pair in zip(changes, pairs, strict=True)]


def _measure(piece: _Piece) -> tuple[int, Change]:
    number, itemsize, types, a, b = piece
    if itemsize == 0:
        return number, measure(a, b, types)
    unequal = (a != b).reshape(-1, itemsize).any(1)
    return number, Change(len(unequal), int(np.count_nonzero(unequal)), excluded=len(unequal))


def _pieces(pairs: Sequence[Pair], progress: Progress) -> Iterator[_Piece]:
    """All pairs, in the order of the first source, cut into pieces of a frame."""
    places = {id(part.data): k for k, part in enumerate({id(p.a.part.data): p.a.part for p in pairs}.values())}

    def place(number: int) -> tuple[int, int, int]:
        pair = pairs[number]
        data = pair.a.part.data
        return places[id(data)], data.places[pair.first.key].offset, pair.first.offset

    for number in sorted(range(len(pairs)), key=place):
        pair = pairs[number]
        if not (pair.first.numel or pair.a.part.crcs or pair.b.part.crcs):
            continue  # nothing to read, and no checksum of nothing
        itemsize = pair.a.ref.dtype.itemsize if pair.first.dtype is DType.UINT8 and pair.a.ref.dtype in OPAQUE else 0
        blocks = _blocks(pair.a, pair.first, progress), _blocks(pair.b, pair.second, progress)
        for a, b in zip(*blocks, strict=True):
            for at in range(0, len(a), FRAME):
                types = pair.first.dtype, pair.second.dtype
                yield number, itemsize, types, a[at : at + FRAME], b[at : at + FRAME]


def _blocks(tensor: Tensor, ref: TensorRef, progress: Progress) -> Iterator[Array]:
    """The elements of a tensor, _READ at a time. Raises InputError if the source states another checksum of them."""
    data, numel, crc = tensor.part.data, ref.numel, 0
    whole = ref.is_contiguous and not ref.offset and ref.nbytes == data.places[ref.key].nbytes
    expected = tensor.part.crcs.get(ref.key) if whole and not (ref.conj or ref.neg) else None
    for start in range(0, numel, _READ):
        block = data.array(ref, start, min(start + _READ, numel))
        if expected is not None:
            crc = crc32(block.view(np.uint8).data, crc)
        progress(len(block) * ref.dtype.itemsize)
        yield block
    if expected is not None and crc != expected:
        raise InputError(f"{data.label}: {tensor.name}: checksum and bytes do not match; the file is damaged")


V = TypeVar("V")
_BLOCK = 8 << 20


@checked
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Difference:
    """Compare two checkpoints: files or directories of any format that ckpt8 reads, or ``.ckpt8`` of them.

    Tensors and other values match by their paths. Models and optimizers at different paths, or with other names of
    parameters, match by the names that the readers establish. ``diff`` reads all elements that both have, a
    block at a time. It does not compare links, empty directories and the metadata in a safetensors header. It calls
    ``progress`` with numbers of bytes that it has read. Raises InputError for a source that is damaged, holds no
    checkpoint, or cannot be assembled as the other one is.

    >>> ckpt8.diff("run.pt", "run.ckpt8").identical
    False
    """
    with (
        without_collection(),
        open_source(as_path(a), threads=threads) as first,
        open_source(as_path(b), threads=threads) as second,
        Workers(threads) as workers,
    ):
        for source in (first, second):
            source.keep_all()
        sides = make_sides(first, second)
        names = naming(sides[0]), naming(sides[1])
        difference = Difference(sides[0].facts(), sides[1].facts(), notes=align(*names))
        difference.notes += [f"{which}: {note}" for which, side in zip("AB", sides, strict=True) for note in side.notes]
        # An assembled tree always has param_names, also where its files do not.
        listed = not any(part.checkpoint is part.data for side in sides for part in side.parts)
        mine, theirs = (collect(*pair, param_names=listed) for pair in zip(sides, names, strict=True))
        _match_values(difference, mine, theirs)
        _compare_files(difference, sides[0], sides[1], progress)
        _compare_tensors(difference, mine, theirs, workers, progress)
        for side in sides:
            side.check_unchanged()
        return difference


def _match_values(difference: Difference, mine: Collected, theirs: Collected) -> None:
    same = Equality()
    both, only_a, only_b = _split(mine.values, theirs.values)
    difference.values_only_a += only_a
    difference.values_only_b += only_b
    changed = [ValueDifference(name, a, b) for (name, a), (_, b) in both if not same(a, b)]
    difference.values += changed
    difference.equal_values += len(both) - len(changed)


def _split(a: Mapping[str, V], b: Mapping[str, V]) -> tuple[list[tuple[V, V]], list[V], list[V]]:
    """The pairs of equal names, and the values of names that only ``a`` or only ``b`` has."""
    both = [(value, b[name]) for name, value in a.items() if name in b]
    return both, [a[name] for name in a if name not in b], [b[name] for name in b if name not in a]


def _compare_tensors(
    difference: Difference, mine: Collected, theirs: Collected, workers: Workers, progress: Progress
) -> None:
    both, difference.tensors_only_a, difference.tensors_only_b = _split(mine.tensors, theirs.tensors)
    pairs = {
        k: make_pair(a, b)
        for k, (a, b) in enumerate(both)
        if a.ref.shape == b.ref.shape and (a.ref.dtype is b.ref.dtype or OPAQUE.isdisjoint((a.ref.dtype, b.ref.dtype)))
    }
    changes: dict[int, Change] = dict(zip(pairs, compare(list(pairs.values()), workers, progress), strict=True))
    for k, (a, b) in enumerate(both):
        change = changes.get(k)
        values = _numbers(a, b) if change is not None and change.differ and change.elements == 1 else None
        difference.tensors.append(TensorDifference(a, b, change, values))
    difference.notes += [
        f"{(a if a.tied else b).name} is tied to {a.tied or b.tied} in {'A' if a.tied else 'B'} only"
        for a, b in both
        if (a.tied is None) != (b.tied is None)
    ]


def _numbers(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """The values of two tensors of one element, such as steps; None if one of them is no number."""
    places = ((tensor.part.data, tensor.ref) for tensor in (a, b))
    first, second = (read_scalar(data, data.places[ref.key], ref) for data, ref in places)
    return None if first is None or second is None else (first, second)


def _compare_files(difference: Difference, a: Side, b: Side, progress: Progress) -> None:
    for path, file in a.files.items():
        other = b.files.get(path)
        if other is None:
            difference.files_only_a.append(path)
        elif _same_bytes(file, other, progress):
            difference.equal_files += 1
        else:
            trees = [read_json(side_file) if path.endswith(".json") else None for side_file in (file, other)]
            if None in trees:
                difference.files.append(path)
            else:
                _match_values(difference, *(_json_values(path, tree) for tree in trees))
    difference.files_only_b = [path for path in b.files if path not in a.files]


def _same_bytes(a: Checkpoint, b: Checkpoint, progress: Progress) -> bool:
    if a.size != b.size:
        return False
    for start in range(0, a.size, _BLOCK):
        blocks = [bytearray(min(_BLOCK, a.size - start)) for _ in range(2)]
        for side, block in zip((a, b), blocks, strict=True):
            side.read_into(start, memoryview(block))
            progress(len(block))
        if blocks[0] != blocks[1]:
            return False
    return True


def _json_values(path: str, tree: Any) -> Collected:
    """The values of a JSON file, with paths below that of the file."""
    is_leaf, taken = Leaves(), dict[str, int]()
    nodes = ((place, node) for place, node in iter_nodes(tree, path, is_leaf) if is_leaf(node))
    names = ((unique_name(f"{path}:{format_path(place)}", taken), node) for place, node in nodes)
    return Collected(values={name: (name, node) for name, node in names})
