"""Which slice of a weight belongs to which slice of optimizer state in distributed checkpoints.

The names of a distributed checkpoint make a tree of whole tensors, which ``pairing`` pairs as that of any file: by
name, or by the order of the state dict where the optimizer numbers its parameters. Where one checkpoint has the
optimizer and another one the model, both in folders of one folder, the weights are in the other. The slices of a pair
must lie in the same places.

``joint_parameters`` are those whose optimizer state is spread over several members, as that of slices is.

The moments of one slice of a parameter have one place in tensors of one shape, mostly in one file. The step and the
options of the group are whole, and may be in the file of another rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.meaning.roles import ParameterState, short_name
from ckpt8.checkpoint.meaning.twins import twins
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import Place, Slice, StateKey
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.tree import TensorRef, read_scalar
from ckpt8.checkpoint.vocabulary import MODEL_KEYS
from ckpt8.optim.known_optimizers import MASTER_KEYS, MEGATRON_MASTER, MOMENT_SLOTS

_CUT_ELSEWHERE = "its weight is cut into other slices than its moments"
_NOT_FOUND = "no weight has its name"
_MODEL = "model"
"""The key for weights without a path before their names."""

_MOST_COMPONENTS = 64
"""A longer path is no path of a model."""

KeyOf = Callable[[str, int], str]
"""Gives the key in the source of a storage in the member of a number."""

_RATES = ("lr", "initial_lr")

SliceKey = tuple[str, Place | None]
"""The name of a tensor and the place of a slice in it."""


@dataclass(frozen=True, slots=True)
class SlicePair:
    """A slice of optimizer state by its key: what stands for its optimizer, its group, and the slice of its weight.

    Where that is None, ``unpaired`` says why.
    """

    key: str
    optimizer: object
    group: Mapping[Any, Any]
    weight: TensorRef | None
    unpaired: str | None


@dataclass(slots=True)
class _Home:
    """A distributed checkpoint in a folder. The keys of its ``slices`` are those of the source.

    ``rates`` are learning rates that are tensors, by name.
    """

    checkpoint: DcpCheckpoint
    folder: str
    slices: dict[SliceKey, TensorRef] = field(default_factory=dict)
    rates: dict[str, float | None] = field(default_factory=dict)

    def group(self, key: StateKey) -> Mapping[str, Any]:
        """The options of the group of a parameter."""
        group = self.checkpoint.roles.group(key, self.checkpoint.value)
        names = self.checkpoint.roles.option_names(key, self.checkpoint.value) if self.rates else {}
        return {**group, **{option: self.rates[name] for option, name in names.items() if name in self.rates}}

    def is_beside(self, other: _Home) -> bool:
        """Whether it has no optimizer and lies in a folder beside that of ``other``."""
        above = {one.folder.rpartition("/")[0] for one in (self, other)}
        return self is not other and len(above) == 1 and not self.checkpoint.roles.states


def slice_pairs(members: Sequence[DirectoryMember], key_of: KeyOf) -> Iterator[SlicePair]:
    """Every slice of state in the distributed checkpoints among ``members``."""
    homes = _homes(members, key_of)
    for home in homes:
        if home.checkpoint.roles.states:
            yield from _pairs_of(home, [other for other in homes if other.is_beside(home)])


def slice_twins(members: Sequence[DirectoryMember], key_of: KeyOf) -> Iterator[tuple[str, str]]:
    """The keys of all slices of weights that several models of a distributed checkpoint have, in pairs: see ``twins``.

    They lie in the same places.
    """
    for home in _homes(members, key_of):
        tree: dict[str, Any] = {}
        _add_weights(tree, home)
        places: dict[str, dict[Place | None, str]] = defaultdict(dict)
        for (name, place), ref in home.slices.items():
            places[name][place] = ref.key
        for one, other in twins([tree]):
            mine, its = places[one.key], places[other.key]
            yield from ((key, its[place]) for place, key in mine.items() if place in its)


def _homes(members: Sequence[DirectoryMember], key_of: KeyOf) -> list[_Home]:
    homes: dict[int, _Home] = {}
    for number, member in enumerate(members):
        if isinstance(member, DcpMember):
            home = homes.setdefault(id(member.home), _Home(member.home, member.path.rpartition("/")[0]))
            for piece, ref in member.parts:
                home.slices[piece.name, piece.place] = replace(ref, key=key_of(ref.key, number))
                option = home.checkpoint.roles.options.get(piece.name)
                if option is not None and option.key in _RATES:
                    storage = next(storage for storage in member.checkpoint.storages if storage.key == ref.key)
                    home.rates[piece.name] = read_scalar(member.checkpoint, storage, ref)
    return list(homes.values())


def _pairs_of(home: _Home, others: Sequence[_Home]) -> Iterator[SlicePair]:
    """The pairs of one checkpoint, whose weights ``others`` may have."""
    roles, tree = home.checkpoint.roles, dict[str, Any]()
    ordered = bool(home.checkpoint.metadata.paths)
    slices = {id(ref): home.slices for ref in _add_weights(tree, home)}
    for other in others if not slices else ():
        slices.update((id(ref), other.slices) for ref in _add_weights(tree, other))
        ordered &= bool(other.checkpoint.metadata.paths)
    _add_states(tree, home, ordered=ordered)
    saved = {ref.key: parameter for parameter in saved_parameters(tree) for ref in parameter.state.values()}
    for (name, place), ref in home.slices.items():
        if (key := roles.states.get(name)) is not None:
            weight, reason = _slice_of_weight(saved.get(name), place, slices, home.slices)
            yield SlicePair(ref.key, (id(home), key.optimizer), home.group(key), weight, reason)


def _slice_of_weight(
    saved: SavedParameter | None,
    place: Place | None,
    slices: Mapping[int, Mapping[SliceKey, TensorRef]],
    own: Mapping[SliceKey, TensorRef],
) -> tuple[TensorRef | None, str | None]:
    """The slice of a weight in a place, or why there is none. Masters are among the ``own`` slices of the state."""
    if saved is None:
        return None, _NOT_FOUND
    whole = saved.master or saved.weight
    if whole is None:
        return None, saved.unpaired
    ref = slices.get(id(whole), own).get((whole.key, place))
    return ref, None if ref is not None else _CUT_ELSEWHERE


def _add_weights(tree: dict[str, Any], home: _Home) -> list[TensorRef]:
    """Put the tensors outside the optimizers into a tree of models, and list them; the key of each is its name."""
    added = []
    metadata, roles = home.checkpoint.metadata, home.checkpoint.roles
    trained = {key.parameter for key in roles.states.values()}
    order = [name for name in metadata.paths if name in metadata.tensors]
    for name in dict.fromkeys((*order, *metadata.tensors)):
        stored = metadata.tensors[name]
        if not roles.is_inside(name) and stored.dtype.is_floating:
            *above, last = (_MODEL, name) if name in trained else _path(name, metadata.paths.get(name, ()))
            node = _node(tree, above)
            if node is not None:
                node[last] = ref = TensorRef.whole(name, stored.dtype, stored.shape)
                added.append(ref)
    return added


def _path(name: str, saved: Sequence[str | int]) -> list[str]:
    """The keys that lead to a model, then the name of the weight in it. ``saved`` is the path if it is known."""
    is_nested = 1 < len(saved) <= _MOST_COMPONENTS
    parts = [str(part) for part in saved] if is_nested else name.split(".", _MOST_COMPONENTS)
    at = next((k for k, part in enumerate(parts[:-1]) if part in MODEL_KEYS), None)
    if at is not None:
        return [*parts[: at + 1], ".".join(parts[at + 1 :])]
    return parts if is_nested else [_MODEL, name]


def _node(tree: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """The dictionary at a path, made where it is missing; None where there is a tensor."""
    node: Any = tree
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            return None
    return cast("dict[str, Any]", node)


def _add_states(tree: dict[str, Any], home: _Home, *, ordered: bool) -> None:
    """Put the tensors of optimizer state into the tree, each parameter under its name, or its number.

    Numbers say nothing unless the weights in the tree are ``ordered`` as in the state dict.
    """
    metadata, optimizers = home.checkpoint.metadata, dict[str, dict[str, Any]]()
    for name, key in home.checkpoint.roles.states.items():
        stored = metadata.tensors.get(name)
        if stored is not None:
            state = optimizers.setdefault(key.optimizer, {}).setdefault(key.parameter, {})
            ref = TensorRef.whole(name, stored.dtype, stored.shape)
            state[MASTER_KEYS[0] if key.key == MEGATRON_MASTER else key.key] = ref
    for path, states in optimizers.items():
        node = _node(tree, path.split(".") if path else [])
        if node is not None:
            numbers = home.checkpoint.roles.numbers(path, home.checkpoint.value) if ordered else []
            if {str(identifier) for group in numbers for identifier in group} >= states.keys():
                node.update(
                    state={
                        identifier: states[str(identifier)]
                        for group in numbers
                        for identifier in group
                        if str(identifier) in states
                    },
                    param_groups=[{"params": group} for group in numbers],
                )
            else:
                node.update(state=states, param_groups=[{"params": list(states)}])


UNKNOWN = object()
"""A value that exists but is unknown for a slice; it prevents that an update rule is recognised."""


@dataclass(frozen=True, slots=True)
class StateSlice:
    """A slice of the state of a parameter. The key of ``ref`` is that of its storage in the bundle."""

    home: DcpCheckpoint
    key: StateKey
    piece: Slice
    member: str
    ref: TensorRef

    @property
    def name(self) -> str:
        """The name of the parameter, or its place in an optimizer that numbers its parameters."""
        name = self.key.parameter
        if name.isdecimal():
            name = f"{self.key.optimizer}.state.{name}" if self.key.optimizer else f"state.{name}"
        return short_name(f"{self.member}:{name}{self.home.metadata.suffix(self.piece)}")


def state_slices(member: DcpMember, number: int) -> list[StateSlice]:
    """The slices of optimizer state in a member, which has that ``number`` in the bundle."""
    states = member.home.roles.states
    return [
        StateSlice(member.home, states[piece.name], piece, member.path, replace(ref, key=f"{number}/{ref.key}"))
        for piece, ref in member.parts
        if piece.name in states
    ]


def joint_parameters(states: Iterable[StateSlice]) -> list[ParameterState]:
    """The states of all slices of parameters, each named by the member of the moment that comes first."""
    owners: dict[tuple[int, str, str], list[StateSlice]] = defaultdict(list)
    for state in states:
        owners[id(state.home), state.key.optimizer, state.key.parameter].append(state)
    return [parameter for owned in owners.values() for parameter in _joined(owned)]


def _joined(owned: list[StateSlice]) -> Iterator[ParameterState]:
    """One parameter, slice by slice: each with the state that is whole, such as the step."""
    home, key = owned[0].home, owned[0].key
    places: dict[Place | None, dict[str, StateSlice]] = defaultdict(dict)
    shared: dict[str, Any] = {}
    for state_slice in owned:
        is_whole = home.metadata.is_whole(state_slice.piece)
        places[None if is_whole else state_slice.piece.place][state_slice.key.key] = state_slice
        shared[state_slice.key.key] = state_slice.ref if is_whole and state_slice.ref.numel == 1 else UNKNOWN
    shared |= home.state_values(key)
    group = home.roles.group(key, home.value)
    for place, slices in places.items():
        first = next((piece for name, piece in slices.items() if name in MOMENT_SLOTS), None)
        if first is not None:
            state = shared | {name: piece.ref for name, piece in slices.items()}
            whole = None if place is None else home.metadata.tensors[first.piece.name].shape
            yield ParameterState(first.name, state, group, whole)
