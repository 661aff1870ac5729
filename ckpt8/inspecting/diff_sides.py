"""The two sides of a comparison: each source as trees of objects, and as files without tensors.

``diff`` compares two sources of one layout member by member, so that nothing is left out. If the layouts differ, or are
files of ranks, each source becomes one tree, as ``convert`` makes it of the slices of a distributed checkpoint or the
shards of a model.

``collect`` finds the tensors and values of a source by the paths that match them with those of the other. ``Leaves``
says which nodes are values, ``Equality`` when two are equal, ``text`` how reports show one.

``align`` matches the models, optimizers and parameters of the two. Tensors match by their paths. Models or optimizers
at different paths, or with other names of parameters (wrappers, numbers for names), match by the names that the readers
establish. Without a name there is no match.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from operator import eq
from pathlib import Path
from typing import Any, TypeVar

from ckpt8.checkpoint.meaning.names import NamesFromWeights
from ckpt8.checkpoint.meaning.nodes import dict_groups
from ckpt8.checkpoint.meaning.optimizer_state import quantised_weights
from ckpt8.checkpoint.meaning.pairing import saved_names
from ckpt8.checkpoint.meaning.parameter_names import match, plain_names
from ckpt8.checkpoint.meaning.parameters import Universal
from ckpt8.checkpoint.meaning.roles import classify, unique_name
from ckpt8.checkpoint.meaning.state_dicts import TOP_LEVEL, Candidate, evident_weights, find
from ckpt8.checkpoint.readers import READERS
from ckpt8.checkpoint.readers.dcp import DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.readers.entries import DirectoryMember, size_of
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import Checkpoint, Global, Inert, StatefulDict, StorageRef, TensorRef, iter_nodes
from ckpt8.container.joined import is_stored
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.converting.sources import PER_RANK, assemble_distributed, content_of, layout_of
from ckpt8.core.errors import InputError
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import Role
from ckpt8.core.text import printable


@dataclass(frozen=True, slots=True)
class Part:
    """One tree. ``path`` is its place in a directory, empty for the whole source; ``data`` holds its tensors.

    ``checkpoint`` is its file, or ``data`` if several files make it up. ``crcs`` are the checksums that the source
    states, by the keys of ``data``.
    """

    path: str
    checkpoint: Checkpoint
    data: Composite
    crcs: dict[str, int] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with."""
        return f"{self.path}:" if self.path else ""


@dataclass(slots=True)
class Side:
    """One source. ``files`` are members without tensors, by path; ``notes`` say what ``diff`` does not compare."""

    path: Path
    layout: str
    is_container: bool
    size: int
    parts: list[Part] = field(default_factory=list)
    files: dict[str, Checkpoint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check_unchanged(self) -> None:
        """Raise InputError if a file changed since it was opened."""
        for file in (*(part.data for part in self.parts), *self.files.values()):
            file.check_unchanged()

    def facts(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"path": str(self.path), "layout": self.layout, "ckpt8": self.is_container, "bytes": self.size}


def make_sides(a: Bundle, b: Bundle) -> tuple[Side, Side]:
    """Both sides of two open sources. Raises InputError for damage, and for slices by rank that only one side has."""
    one, other = layout_of(a), layout_of(b)
    together = one is not None and other is not None and (one != other or one == PER_RANK)
    return _make(a, one, together=together), _make(b, other, together=together)


def _make(members: Bundle, layout: str | None, *, together: bool) -> Side:
    present = [member for member in members.opened if member.checkpoint.format not in (SYMLINK, DIRECTORY)]
    formats = [member.checkpoint.format for member in present]
    name = (layout or "directory") if members.directory is not None or not formats else formats[0]
    side = Side(members.path, name, is_stored(members.path), size_of(members.path))
    if together and members.directory is not None:
        content = content_of(members)
        side.parts.append(Part("", content.data, content.data))
        side.notes += content.notes
        _add_each(side, content.others, in_directory=True)
    else:
        _add_members(side, present, members)
    if not side.parts:
        raise InputError(f"{members.path}: holds no checkpoint that can be read; give one that does")
    nodes = (node for part in side.parts for _, node in iter_nodes(part.data.tree, leaves=frozenset()))
    codes = (names[0] for node in nodes if isinstance(node, Mapping) and (names := quantised_weights(node)))
    side.notes += [
        f"{name}: quantised for inference; its codes are compared as integers or floats, without their scales"
        for name in islice(codes, 1)
    ]
    return side


def _add_members(side: Side, present: list[DirectoryMember], members: Bundle) -> None:
    distributed = grouped((id(member.home), member) for member in present if isinstance(member, DcpMember))
    folders = set()
    for files in distributed.values():
        content = assemble_distributed(Bundle(members.path, files, ""))
        folder = files[0].path.rpartition("/")[0]
        folders.add(f"{folder}/{METADATA}" if folder else METADATA)
        crcs = (_crcs(side, file.checkpoint, f"{file.path}/") for file in files)
        side.parts.append(Part(folder, content.data, content.data, dict(ChainMap(*crcs))))
        side.notes += content.notes
    others = (member for member in present if not isinstance(member, DcpMember) and member.path not in folders)
    _add_each(side, others, in_directory=members.directory is not None)


def _add_each(side: Side, members: Iterable[DirectoryMember], *, in_directory: bool) -> None:
    for member in members:
        checkpoint = member.checkpoint
        if checkpoint.format not in READERS:
            side.files[member.path] = checkpoint
            continue
        data = Composite(f"{side.path}: {member.path}" if in_directory else str(side.path))
        data.adopt(checkpoint)
        data.tree = checkpoint.tree
        side.parts.append(Part(member.path if in_directory else "", checkpoint, data, _crcs(side, checkpoint)))


def _crcs(side: Side, checkpoint: Checkpoint, prefix: str = "") -> dict[str, int]:
    """Stated checksums by key; none of a ``.ckpt8``, which may give back other bytes than those of its original."""
    storages = () if side.is_container else checkpoint.storages
    return {prefix + storage.key: storage.crc32 for storage in storages if storage.crc32 is not None}


_SCALARS = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex, Global})
_SEQUENCES = (list, tuple)
_SETS = frozenset({"builtins.set", "builtins.frozenset"})
_DICTIONARIES = (dict, StatefulDict)
_LONGEST_VALUE = 60
_FEW = 8
_MOST_BITS = 1024
"""Longer integers are shown by their length: Python does not print thousands of digits."""


class Leaves:
    """Tells which nodes of a tree are values: scalars, lists, tuples and sets of scalars, and empty containers."""

    def __init__(self) -> None:
        # A tree may hold one list a million times; each list is checked once.
        self._flat: dict[int, bool] = {}

    def __call__(self, value: Any) -> bool:
        """Whether ``value`` is one value."""
        kind = type(value)
        if kind in _SEQUENCES:
            return self._is_flat(value)
        if kind is Inert:
            return value.name in _SETS and not value.args and value.state is None and self._is_flat(value.items)
        if kind in _DICTIONARIES:
            return not value and getattr(value, "state", None) is None
        return kind not in (TensorRef, StorageRef)

    def _is_flat(self, values: Any) -> bool:
        if id(values) not in self._flat:
            self._flat[id(values)] = all(type(value) in _SCALARS for value in values)
        return self._flat[id(values)]


class Equality:
    """Tells whether two values are the same: of one type, NaN like any other number, sets in any order."""

    def __init__(self) -> None:
        # As in Leaves: two trees may hold the same two lists a million times.
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, a: Any, b: Any) -> bool:
        """Whether ``a`` and ``b`` are the same."""
        if type(a) is not type(b):
            return all(type(value) in _DICTIONARIES and not value for value in (a, b))
        if type(a) not in (*_SEQUENCES, Inert):
            return _mark(a) == _mark(b)
        pair = id(a), id(b)
        if pair not in self._known:
            if type(a) is Inert:
                self._known[pair] = a.name == b.name and sorted(map(_mark, a.items)) == sorted(map(_mark, b.items))
            else:
                self._known[pair] = len(a) == len(b) and all(map(eq, map(_mark, a), map(_mark, b)))
        return self._known[pair]


def _mark(value: Any) -> tuple[str, Any]:
    """A key that is equal for equal scalars and can be sorted."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, (value.real.hex(), value.imag.hex())
    if isinstance(value, Global):
        return kind, value.name
    return kind, 0 if value is None or isinstance(value, _DICTIONARIES) else value


def text(value: Any) -> str:
    """One printable line of bounded length."""
    kind = type(value)
    if kind is Inert:
        return _sequence(value.items, "{", "}")
    if kind in _SEQUENCES:
        return _sequence(value, *("[]" if kind is list else "()"))
    if kind in _SCALARS:
        return _scalar(value)
    return "{}" if kind in _DICTIONARIES else f"<{kind.__name__}>"


def _sequence(values: Any, first: str, last: str) -> str:
    shown = ", ".join(_scalar(value) for value in values[:_FEW])
    if len(values) > _FEW:
        return f"{first}{_cut(shown[:_LONGEST_VALUE])}, … {len(values):,} in all{last}"
    return f"{first}{_cut(shown)}{last}"


def _scalar(value: Any) -> str:
    if isinstance(value, Global):
        return _cut(value.name)
    if isinstance(value, (bytes, bytearray)) and len(value) > _FEW:
        return f"{len(value):,} bytes"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length():,} bits"
    return _cut(repr(value[: 2 * _LONGEST_VALUE] if isinstance(value, str) else value))


def _cut(line: str) -> str:
    line = printable(line)
    return line if len(line) <= _LONGEST_VALUE else line[:_LONGEST_VALUE] + "…"


Entry = tuple[int, str]
"""The ``id`` of a dictionary, and a key of it."""


@dataclass(slots=True)
class Model:
    """The weights of a model, with all its shards: by name the entries that hold them.

    ``homes`` are the paths of the dictionaries with these entries, by their ``id``.
    """

    label: str
    homes: dict[int, str]
    entries: dict[str, Entry]

    def path(self, name: str) -> str:
        """The full path of a weight."""
        return join(self.homes[self.entries[name][0]], name)


@dataclass(slots=True)
class Optimizer:
    """The state of an optimizer at the path ``base``; ``names`` gives the names of parameters by their keys in it."""

    label: str
    base: str
    node: dict[Any, Any]
    names: dict[Any, str]

    def states(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The key and the state of every parameter."""
        return ((key, state) for key, state in self.node["state"].items() if isinstance(state, dict))

    @property
    def is_named(self) -> bool:
        """Whether every parameter with a state has a name, and no two have the same."""
        names = [self.names.get(key) for key, _ in self.states()]
        return None not in names and len(set(names)) == len(names)


@dataclass(slots=True)
class Naming:
    """The names in one source. ``places`` and ``entries`` have the paths that differ in the other source.

    ``places`` are these paths of dictionaries by their ``id``, ``entries`` those of tensors; None stands for no
    counterpart. ``state_owners`` and ``weight_owners`` name the parameter of a state or a weight.
    """

    models: list[Model]
    optimizers: list[Optimizer]
    places: dict[int, str | None] = field(default_factory=dict)
    entries: dict[Entry, str | None] = field(default_factory=dict)
    state_owners: dict[int, str] = field(default_factory=dict)
    weight_owners: dict[Entry, str] = field(default_factory=dict)


def join(base: str, name: object) -> str:
    """The path of ``name`` below ``base``, which is empty or ends with a colon for a whole tree."""
    return f"{base}{name}" if not base or base.endswith(":") else f"{base}.{name}"


def naming(side: Side) -> Naming:
    """Find the models and optimizers of a source, and the names of their parameters. Raises InputError."""
    weight_names = NamesFromWeights([*((part.path, part.checkpoint) for part in side.parts), *side.files.items()])
    evident = evident_weights(*(part.data.tree for part in side.parts))
    candidates = [(part, *find(part.data.tree, evident)) for part in side.parts]
    result = Naming(
        _models([(part, model) for part, models, _ in candidates for model in models]),
        [_optimizer(part, optimizer, weight_names) for part, _, optimizers in candidates for optimizer in optimizers],
    )
    for optimizer in result.optimizers:
        plain = plain_names(optimizer.names.values())
        states = ((id(state), optimizer.names[key]) for key, state in optimizer.states() if key in optimizer.names)
        result.state_owners.update((state, plain[name]) for state, name in states)
    for model in result.models:
        # With several models, a name alone does not say which one is meant.
        is_alone = len(result.models) == 1
        known = plain_names(model.entries) if is_alone else {name: model.path(name) for name in model.entries}
        result.weight_owners.update((entry, known[name]) for name, entry in model.entries.items())
    return result


def _models(candidates: Sequence[tuple[Part, Candidate]]) -> list[Model]:
    labels = (
        f"{part.path.rpartition('/')[0]}:" if candidate.path == TOP_LEVEL else join(part.prefix, candidate.path)
        for part, candidate in candidates
    )
    result = []
    for label, parts in grouped(zip(labels, candidates, strict=True)).items():
        names = [name for _, candidate in parts for name in candidate.node]
        if len(set(names)) < len(names):
            result += [_model(join(part.prefix, shard.path), [(part, shard)]) for part, shard in parts]
        else:
            result.append(_model(label, parts))
    return result


def _model(label: str, parts: Sequence[tuple[Part, Candidate]]) -> Model:
    nodes = [candidate.node for _, candidate in parts]
    weights = ((id(node), name) for node in nodes for name, value in node.items() if isinstance(value, TensorRef))
    homes = {id(candidate.node): _base(part, candidate) for part, candidate in parts}
    return Model(label, homes, {name: (home, name) for home, name in weights})


def _base(part: Part, candidate: Candidate) -> str:
    return part.prefix if candidate.path == TOP_LEVEL else join(part.prefix, candidate.path)


def _optimizer(part: Part, candidate: Candidate, weight_names: NamesFromWeights) -> Optimizer:
    known = saved_names(dict_groups(candidate.node))
    names: dict[Any, str] = {} if isinstance(known, str) else dict(known)
    if not names:
        place = "state" if candidate.path == TOP_LEVEL else f"{candidate.path}.state"
        names_of = weight_names.of_member(part.path)
        names = {key: names_of[f"{place}.{key}"] for key in candidate.node["state"] if f"{place}.{key}" in names_of}
    return Optimizer(join(part.prefix, candidate.path), _base(part, candidate), candidate.node, names)


def align(a: Naming, b: Naming) -> list[str]:
    """Set the paths of ``b`` that differ in ``a``. Returns notes on matches by name, and on states without a match."""
    notes = []
    for model, other in _pairs(a.models, b.models):
        if model.label != other.label:
            notes.append(f"A's model {_shown(model.label)} is compared with B's {_shown(other.label)}")
            if len(model.homes) == len(other.homes) == 1:
                b.places[next(iter(other.homes))] = next(iter(model.homes.values()))
        paths = {name: model.path(same) for name, same in match(model.entries, other.entries).items()}
        b.entries.update(
            (entry, paths.get(name)) for name, entry in other.entries.items() if paths.get(name) != other.path(name)
        )
    for one, another in _pairs(a.optimizers, b.optimizers):
        if one.label != another.label:
            b.places[id(another.node)] = one.base
        if one.is_named and another.is_named:
            b.places.update(_match_parameters(one, another))
        elif one.label != another.label:
            notes.append("the optimizers' states are not compared: their parameters have no names on one side")
            b.places.update((id(state), None) for _, state in another.states())
    return notes


def _match_parameters(one: Optimizer, another: Optimizer) -> dict[int, str | None]:
    """The new places of those states of ``another`` whose path differs.

    A dictionary may stand at several paths, and is met at the first of them alone: that of an equal path stays there.
    """
    mine = {one.names[key]: key for key, _ in one.states()}
    matched = match(mine, [another.names[key] for key, _ in another.states()])
    paths = {name: join(one.base, f"state.{mine[same]}") for name, same in matched.items()}
    places = ((id(state), paths.get(another.names[key]), f"state.{key}") for key, state in another.states())
    return {state: path for state, path, own in places if path != join(another.base, own)}


T = TypeVar("T", Model, Optimizer)


def _pairs(a: Sequence[T], b: Sequence[T]) -> list[tuple[T, T]]:
    """Those with equal labels; then the last ones, if each side has exactly one left."""
    by_label = {item.label: item for item in a}
    pairs = [(by_label[item.label], item) for item in b if item.label in by_label]
    taken = {id(item) for pair in pairs for item in pair}
    ours, theirs = ([item for item in side if id(item) not in taken] for side in (a, b))
    return pairs + (list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) == 1 else [])


def _shown(label: str) -> str:
    return "at the top" if label.endswith((":", TOP_LEVEL)) else f"at {label}"


K = TypeVar("K")
_ALONE = "\0"
"""Stands before a path without a counterpart; no other name begins with it."""

_LONGEST_NAME = 600
"""Paths are cut to this many characters while they are made; names are shorter."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a part. ``name`` is its path, ``parameter`` the path of the weight that it is or belongs to.

    ``tied`` is the path of an earlier tensor over the same elements of the same storage.
    """

    name: str
    ref: TensorRef
    part: Part
    role: Role
    parameter: str | None
    tied: str | None


@dataclass(slots=True)
class Collected:
    """Tensors and values by their path in the first source, or by one that nothing has there.

    A value comes with its path in its own source.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, tuple[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """The path of a node; its path in the first source and its parameter, or None."""

    own: str
    name: str | None
    parameter: str | None = None

    def below(self, component: str) -> _Place:
        own = join(self.own, component)[:_LONGEST_NAME]
        if self.name is None or self.name == self.own:
            return _Place(own, None if self.name is None else own, self.parameter)
        return _Place(own, join(self.name, component)[:_LONGEST_NAME], self.parameter)

    def renamed(self, key: K, names: Mapping[K, str | None], owners: Mapping[K, str]) -> _Place:
        """The place with the name and the parameter that are known under ``key``."""
        return _Place(self.own, names.get(key, self.name), owners.get(key, self.parameter))


def collect(side: Side, naming: Naming, *, param_names: bool) -> Collected:
    """All tensors and values of a source. ``param_names`` False leaves out these lists of an optimizer's groups.

    Raises InputError for a tree that is too deep.
    """
    collected, own, taken = Collected(), dict[str, int](), dict[str, int]()
    ties: dict[tuple[object, ...], str] = {}
    universal = Universal((part.path, part.checkpoint) for part in side.parts)
    beside = cache(lambda: evident_weights(*(part.data.tree for part in side.parts)))
    for part in side.parts:
        classified = classify(part.data.tree, role=universal.role(part.path), beside=beside)
        roles = {id(tensor.ref): tensor.role for tensor in reversed(classified.tensors)}
        for place, leaf in _walk(part, naming, param_names=param_names):
            called = unique_name(place.own, own)
            name = f"{_ALONE}{called}" if place.name is None else unique_name(place.name, taken)
            if isinstance(leaf, (TensorRef, StorageRef)):
                ref = leaf if isinstance(leaf, TensorRef) else _flat(leaf)
                elements = (id(part), ref.key, ref.dtype, ref.offset, ref.shape, ref.stride, ref.conj, ref.neg)
                # An empty tensor shares its place with nothing.
                first = ties.setdefault(elements, called) if ref.numel else called
                parameter, role = universal.owner(part.path) or place.parameter, roles.get(id(leaf), Role.OTHER)
                collected.tensors[name] = Tensor(called, ref, part, role, parameter, None if first == called else first)
            else:
                collected.values[name] = called, leaf
    return collected


def _flat(storage: StorageRef) -> TensorRef:
    return TensorRef(storage.key, storage.dtype, storage.offset, (storage.numel,), (1,))


def _walk(part: Part, naming: Naming, *, param_names: bool) -> Iterator[tuple[_Place, Any]]:
    """Every tensor and value of a part, in the order of the document."""
    tree = part.data.tree
    is_leaf = Leaves()
    if isinstance(tree, (TensorRef, StorageRef)) or is_leaf(tree):
        whole = join(part.prefix, "value" if is_leaf(tree) else "tensor")
        yield _Place(whole, whole), tree
        return
    places: list[tuple[_Place, int]] = []
    for path, node in iter_nodes(tree, part.data.label, is_leaf):
        del places[len(path) :]
        place = _Place(part.prefix, part.prefix)
        if path:
            above, above_id = places[-1]
            place = above.below(path[-1]).renamed((above_id, path[-1]), naming.entries, naming.weight_owners)
        if isinstance(node, (TensorRef, StorageRef)) or is_leaf(node):
            if param_names or path[-1] != "param_names":
                yield place, node
            continue
        place = place.renamed(id(node), naming.places, naming.state_owners)
        places.append((place, id(node)))
        if isinstance(node, Inert):
            yield place.below("(class)"), Global(node.name)
