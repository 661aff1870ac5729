"""Matches the models, optimizers and parameters of one source with those of the other.

``diff`` matches tensors by their paths. Models or optimizers at different paths, or with other names of parameters
(wrappers, numbers for names), match by the names that the readers establish. Without a name there is no match.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt8.checkpoint.meaning.names_from_weights import NamesFromWeights
from ckpt8.checkpoint.meaning.nodes import dict_groups
from ckpt8.checkpoint.meaning.pairing import saved_names
from ckpt8.checkpoint.meaning.parameter_names import match, plain_names
from ckpt8.checkpoint.meaning.state_dicts import TOP_LEVEL, Candidate, find
from ckpt8.checkpoint.meaning.weight_evidence import evident_weights
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.inspecting.diff.sides import Part, Side

Entry = tuple[int, str]
"""The ``id`` of a dictionary, and a key of it."""


@dataclass(slots=True)
class Model:
    """The weights of a model, with all its shards: by name their full paths, and the entries that hold them.

    ``homes`` are the paths of the dictionaries with these entries, by their ``id``.
    """

    label: str
    homes: dict[int, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(slots=True)
class Optimizer:
    """The state of an optimizer at the path ``base``; ``names`` gives the names of parameters by their keys in it."""

    label: str
    base: str
    node: dict[Any, Any]
    names: dict[Any, str]

    def states(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The key and the state of every parameter."""
        return ((each, state) for each, state in self.node["state"].items() if isinstance(state, dict))

    @property
    def is_named(self) -> bool:
        """Whether every parameter with a state has a name, and no two have the same."""
        names = [self.names.get(each) for each, _ in self.states()]
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
    members = [(part.path, part.checkpoint) for part in side.parts] + list(side.files.items())
    weight_names = NamesFromWeights(members)
    evident = evident_weights(*(part.data.tree for part in side.parts))
    candidates = [(part, *find(part.data.tree, evident)) for part in side.parts]
    found = Naming(
        _models([(part, model) for part, models, _ in candidates for model in models]),
        [_optimizer(part, each, weight_names) for part, _, optimizers in candidates for each in optimizers],
    )
    for optimizer in found.optimizers:
        plain = plain_names(optimizer.names.values())
        for each, state in optimizer.states():
            if each in optimizer.names:
                found.state_owners[id(state)] = plain[optimizer.names[each]]
    for model in found.models:
        # With several models, a name alone does not say which one is meant.
        known = plain_names(model.names) if len(found.models) == 1 else model.names
        found.weight_owners.update((model.entries[name], known[name]) for name in known)
    return found


def _models(candidates: Sequence[tuple[Part, Candidate]]) -> list[Model]:
    models: dict[str, list[tuple[Part, Candidate]]] = defaultdict(list)
    for part, candidate in candidates:
        is_shard = candidate.path == TOP_LEVEL
        label = f"{part.path.rpartition('/')[0]}:" if is_shard else join(part.prefix, candidate.path)
        models[label].append((part, candidate))
    found = []
    for label, parts in models.items():
        counts = Counter(name for _, candidate in parts for name in candidate.node)
        if any(count > 1 for count in counts.values()):
            found += [_model(join(part.prefix, each.path), [(part, each)]) for part, each in parts]
        else:
            found.append(_model(label, parts))
    return found


def _model(label: str, parts: Sequence[tuple[Part, Candidate]]) -> Model:
    model = Model(label)
    for part, candidate in parts:
        base = model.homes[id(candidate.node)] = _base(part, candidate)
        for name, value in candidate.node.items():
            if isinstance(value, TensorRef):
                model.names[name] = join(base, name)
                model.entries[name] = id(candidate.node), name
    return model


def _base(part: Part, candidate: Candidate) -> str:
    return part.prefix if candidate.path == TOP_LEVEL else join(part.prefix, candidate.path)


def _optimizer(part: Part, candidate: Candidate, weight_names: NamesFromWeights) -> Optimizer:
    groups = dict_groups(candidate.node)
    known = saved_names(groups)
    names: dict[Any, str] = {} if isinstance(known, str) else dict(known)
    if not names:
        place = "state" if candidate.path == TOP_LEVEL else f"{candidate.path}.state"
        found = weight_names.of_member(part.path)
        names = {each: found[f"{place}.{each}"] for each in candidate.node["state"] if f"{place}.{each}" in found}
    return Optimizer(join(part.prefix, candidate.path), _base(part, candidate), candidate.node, names)


def align(a: Naming, b: Naming) -> list[str]:
    """Set the paths of ``b`` that differ in ``a``. Returns notes on matches by name, and on states without a match."""
    notes = []
    for model, other in _pairs(a.models, b.models):
        if model.label != other.label:
            notes.append(f"A's model {_shown(model.label)} is compared with B's {_shown(other.label)}")
            if len(model.homes) == len(other.homes) == 1:
                b.places[next(iter(other.homes))] = next(iter(model.homes.values()))
        matched = match(model.names, other.names)
        paths = {name: model.names[same] for name, same in matched.items()}
        b.entries.update(
            (entry, paths.get(name)) for name, entry in other.entries.items() if paths.get(name) != other.names[name]
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
    mine = {one.names[each]: each for each, _ in one.states()}
    matched = match(mine, [another.names[each] for each, _ in another.states()])
    paths = {name: join(join(one.base, "state"), mine[same]) for name, same in matched.items()}
    base = join(another.base, "state")
    moved = ((id(state), paths.get(another.names[each]), join(base, each)) for each, state in another.states())
    return {state: path for state, path, own in moved if path != own}


T = TypeVar("T", Model, Optimizer)


def _pairs(a: Sequence[T], b: Sequence[T]) -> list[tuple[T, T]]:
    """Those with equal labels; then the last ones, if each side has exactly one left."""
    by_label = {each.label: each for each in a}
    pairs = [(by_label[each.label], each) for each in b if each.label in by_label]
    taken = {id(each) for pair in pairs for each in pair}
    left = [[each for each in side if id(each) not in taken] for side in (a, b)]
    if len(left[0]) == len(left[1]) == 1:
        pairs.append((left[0][0], left[1][0]))
    return pairs


def _shown(label: str) -> str:
    return "at the top" if label.endswith((":", TOP_LEVEL)) else f"at {label}"
