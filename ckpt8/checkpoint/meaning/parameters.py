"""The parameters of a whole source: state, group and weight of each, found in all of its files.

``trained_states`` are the optimizer, the group and the weight of every saved state. The weight is in the same file, or
in another one of the folder: see ``pairing``. What the optimizer keeps as its own copy of the weight, a master in fp32,
is the weight that it steps.

``slice_pairs`` say which slice of a weight belongs to which slice of optimizer state in distributed checkpoints.

The names of a distributed checkpoint make a tree of whole tensors, which ``pairing`` pairs as that of any file: by
name, or by the order of the state dict where the optimizer numbers its parameters. Where one checkpoint has the
optimizer and another one the model, both in folders of one folder, the weights are in the other. The slices of a pair
must lie in the same places.

``joint_parameters`` are those whose optimizer state is spread over several members, as that of slices is.

The moments of one slice of a parameter have one place in tensors of one shape, mostly in one file. The step and the
options of the group are whole, and may be in the file of another rank.

DeepSpeed's layouts: universal checkpoints, and the flat partitions of stages 1 and 2.

A universal checkpoint has one file for each tensor, whose name states the role:

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     the tensor, alone or as ``param`` of a dictionary
    zero/<parameter>/step.pt                                the step; stage 3 has it in optimizer_state.pt
    zero/optimizer_state.pt                                 ``param_groups``, and the rest of the optimizer

So the moments of a parameter are in two members, and the step and the options in others. Flat partitions keep the fp32
masters of the parameters of a model file in pieces:

    mp_rank_00_model_states.pt                        module: {name: tensor}
    zero_pp_rank_1_mp_rank_00_optim_states.pt         optimizer_state_dict: {
        single_partition_of_fp32_groups: [flat],      one for each parameter group, the share of one rank
        param_slice_mappings: [{name: {start, numel}}]}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from ckpt8.checkpoint.meaning.names import NamesFromWeights
from ckpt8.checkpoint.meaning.optimizer_state import recognise
from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.meaning.roles import ParameterState, short_name
from ckpt8.checkpoint.meaning.state_dicts import is_packed_group, twins
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import Place, Slice, StateKey
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.tree import Checkpoint, Inert, Labelled, TensorRef, read_scalar, read_settings
from ckpt8.checkpoint.vocabulary import MODEL_KEYS
from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.split24 import Split32
from ckpt8.core.tensors import DType, Role
from ckpt8.optim.known_optimizers import MASTER_KEYS, MEGATRON_MASTER, MOMENT_SLOTS, setting_names

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


_ROLES = {"fp32.pt": Role.WEIGHT, "exp_avg.pt": Role.MOMENT1, "exp_avg_sq.pt": Role.MOMENT2}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_REST = "optimizer_state.pt"


class Universal:
    """The universal checkpoints among the members of a directory, given by path and content."""

    def __init__(self, members: Iterable[tuple[str, Checkpoint]]) -> None:
        self._members = {path: (number, checkpoint) for number, (path, checkpoint) in enumerate(members)}
        self._roots = {
            folder
            for folder, _, name in (path.rpartition("/") for path in self._members)
            if name == _REST and folder.rpartition("/")[2] == "zero"
        }

    def role(self, path: str) -> Role | None:
        """The role of the one tensor of a member; None where the path does not tell."""
        folder, _, name = path.rpartition("/")
        return _ROLES.get(name) if folder.rpartition("/")[0] in self._roots else None

    def owner(self, path: str) -> str | None:
        """The parameter that the tensor of a member belongs to; None for another member."""
        return path.split("/")[-2] if self.role(path) else None

    def parameters(self) -> list[ParameterState]:
        """The state of every parameter, with tensors whose keys are those of the bundle."""
        return [self._parameter(folder) for folder in self._folders()]

    def weights(self) -> Iterator[tuple[str, TensorRef | None, ParameterState]]:
        """The folder, the fp32 weight and the state of every parameter, with keys of the bundle.

        The groups have no learning rate where it is not the same in all.
        """
        for folder in self._folders():
            root, state = folder.rpartition("/")[0], self._parameter(folder)
            groups = groups_of(self._tree(f"{root}/{_REST}"))
            if len({(repr(group.get("lr")), repr(group.get("initial_lr"))) for group in groups}) > 1:
                state = replace(state, group={key: value for key, value in state.group.items() if key != "lr"})
            yield root, self._tensor(f"{folder}/fp32.pt"), state

    def _folders(self) -> Iterator[str]:
        """The folders of parameters."""
        for folder, _, name in (path.rpartition("/") for path in self._members):
            if name == "exp_avg.pt" and self.role(f"{folder}/{name}"):
                yield folder

    def _parameter(self, folder: str) -> ParameterState:
        root, _, name = folder.rpartition("/")
        moments = {key: self._tensor(f"{folder}/{key}.pt") for key in _MOMENTS}
        state: dict[str, Any] = {key: ref for key, ref in moments.items() if ref is not None}
        step = self._step(folder, root)
        groups, names = groups_of(self._tree(f"{root}/{_REST}")), sorted(setting_names())
        # The files do not say which group has the parameter. That does not matter if all have one rule.
        rules = {(recognise(state, group, step), *(repr(group.get(name)) for name in names)) for group in groups}
        group = groups[0] if len(rules) == 1 else {}
        return ParameterState(short_name(f"{root}:{name}"), {**state, "step": step}, group)

    def _tensor(self, path: str) -> TensorRef | None:
        """The one tensor of a member; None where there is none."""
        tensor = param_of(self._tree(path))
        return replace(tensor, key=f"{self._members[path][0]}/{tensor.key}") if isinstance(tensor, TensorRef) else None

    def _tree(self, path: str) -> Any:
        return self._members[path][1].tree if path in self._members else None

    def _step(self, folder: str, root: str) -> float | None:
        """The step of a parameter; in stage 3 that of the whole optimizer."""
        own = f"{folder}/step.pt"
        if own in self._members:
            return _number(self._members[own][1], self._tree(own))
        common = common_step(self._members[f"{root}/{_REST}"][1])
        return None if common is None else common[1]


def param_of(tree: Any) -> Any:
    """The tensor in the tree of a member: the tree itself, or its ``param``."""
    return tree.get("param") if isinstance(tree, dict) else tree


def groups_of(tree: Any) -> list[dict[Any, Any]]:
    """The groups in the tree of optimizer_state.pt."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def common_step(checkpoint: Checkpoint) -> tuple[Any, float] | None:
    """The one step of all parameters in optimizer_state.pt, as saved and as a number; None where steps differ."""
    match checkpoint.tree:
        case {"optimizer_state_dict": {"state": dict(states)}}:
            steps = [state["step"] for state in states.values() if isinstance(state, dict) and "step" in state]
            match list({_number(checkpoint, step) for step in steps}):
                case [float() | int() as number]:
                    return steps[0], number
    return None


def _number(checkpoint: Checkpoint, value: Any) -> float | None:
    if isinstance(value, TensorRef):
        storage = next(storage for storage in checkpoint.storages if storage.key == value.key)
        return read_scalar(checkpoint, storage, value)
    return value if isinstance(value, (int, float)) else None


Piece = tuple[TensorRef, int, int]
"""``count`` elements of a flat master from ``start`` on: master, start, count."""

Partitions = Mapping[TensorRef, list[Piece]]
"""The pieces of a parameter of a model file, in order."""

_MODEL_FILE = re.compile(r"(?:.*/)?mp_rank_([\d_]+)_model_states\.pt")
_SHARE_FILE = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_([\d_]+)_optim_states\.pt")


def find_partitions(members: Iterable[tuple[str, Any]]) -> Partitions:
    """The pieces of all parameters whose numbers of elements agree. ``members`` are path and tree."""
    models: dict[tuple[str, str], Mapping[Any, Any]] = {}
    shares: dict[tuple[str, str], list[tuple[int, Mapping[Any, Any]]]] = defaultdict(list)
    for path, tree in members:
        folder, entries = path.rpartition("/")[0], tree if isinstance(tree, dict) else {}
        module, state = entries.get("module"), entries.get("optimizer_state_dict")
        if (match := _MODEL_FILE.fullmatch(path)) and isinstance(module, dict):
            models[folder, match[1]] = module
        elif (match := _SHARE_FILE.fullmatch(path)) and isinstance(state, dict):
            shares[folder, match[2]].append((int(match[1]), state))
    partitions: dict[TensorRef, list[Piece]] = {}
    for place, module in models.items():
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for _, state in sorted(shares[place], key=lambda share: share[0]):
            for name, piece in _pieces(state):
                pieces[name].append(piece)
        partitions.update(
            (ref, pieces[name])
            for name, ref in module.items()
            if isinstance(ref, TensorRef) and sum(count for _, _, count in pieces.get(name, [])) == ref.numel
        )
    return partitions


def _pieces(state: Mapping[Any, Any]) -> Iterator[tuple[str, Piece]]:
    """The names and pieces of one rank, group by group."""
    flats, mappings = state.get("single_partition_of_fp32_groups"), state.get("param_slice_mappings")
    if not isinstance(flats, list) or not isinstance(mappings, list):
        return
    for flat, mapping in zip(flats, mappings, strict=False):
        if not isinstance(flat, TensorRef) or not isinstance(mapping, dict):
            continue
        for name, address in mapping.items():
            match address:
                case Inert(state={"start": int(start), "numel": int(count)}) if start >= 0 and count > 0:
                    yield name, (flat, start, count)


_RANK = re.compile(r"(rank|shard)[_-]?\d+(?:_\d+)*")
"""The part of a path that numbers the processes that saved one optimizer together."""

Members = Sequence[tuple[str, Checkpoint]]
"""Path and content of every member."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The step that a saved state belongs to.

    ``optimizer`` is the number of the optimizer in the source; files that ranks wrote of one optimizer share it.
    ``group`` is its parameter group, with numbers in place of tensors. The key of ``weight`` is that of its storage in
    the source; where it is None, ``unpaired`` says why.
    """

    optimizer: int
    group: Mapping[Any, Any]
    weight: TensorRef | None
    unpaired: str | None


class Pairs:
    """The parameters of the members of a source, paired with weights of the same file or of others in its folder.

    A source of one file has nothing beside it.
    """

    def __init__(self, members: Members, *, directory: bool) -> None:
        self._members = dict(members)
        self._names = NamesFromWeights(members) if directory else None

    def of_member(self, path: str) -> tuple[list[SavedParameter], Mapping[int, str]]:
        """The parameters of a member, and the path of each weight in another one, by its ``id``. Raises InputError."""
        beside = None if self._names is None else self._names.beside(path)
        parameters = saved_parameters(self._members[path].tree, beside, as_torch=True)
        return parameters, {} if beside is None else beside.files


def trained_states(
    members: Sequence[DirectoryMember], key_of: Callable[[str, int], str], *, directory: bool
) -> dict[str, Trained]:
    """What is known of every saved state, by the key of each of its storages. Raises InputError.

    ``key_of`` gives the key in the source of a storage in the member of a number.
    """
    contents = [(member.path, member.checkpoint) for member in members]
    pairs, states = Pairs(contents, directory=directory), dict[str, Trained]()
    numbers = {path: number for number, (path, _) in enumerate(contents)}
    optimizers: dict[object, int] = {}

    def number_of(optimizer: object) -> int:
        return optimizers.setdefault(optimizer, len(optimizers))

    for number, (path, checkpoint) in enumerate(contents):
        if isinstance(checkpoint.tree, Labelled):
            continue
        parameters, files = pairs.of_member(path)
        storages = {storage.key: storage for storage in checkpoint.storages} if parameters else {}
        groups: dict[int, Mapping[Any, Any]] = {}
        for saved in parameters:
            if id(saved.group) not in groups:
                groups[id(saved.group)] = read_settings(checkpoint, storages, saved.group)
            weight, home = saved.master, number
            if weight is None and (weight := saved.weight) is not None:
                home = numbers[files[id(weight)]] if id(weight) in files else number
            weight = weight and replace(weight, key=key_of(weight.key, home))
            optimizer = number_of((_RANK.sub("rank", path), saved.optimizer))
            trained = Trained(optimizer, groups[id(saved.group)], weight, None if weight else saved.unpaired)
            states.update((key_of(ref.key, number), trained) for ref in _tensors(saved.state))
    for pair in slice_pairs(members, key_of):
        states[pair.key] = Trained(number_of(pair.optimizer), pair.group, pair.weight, pair.unpaired)
    for root, weight, state in Universal(contents).weights():
        trained = Trained(number_of(root), state.group, weight, None if weight else "it has no fp32.pt")
        states.update((ref.key, trained) for ref in _tensors(state.state))
    return states


def _tensors(state: Mapping[Any, Any]) -> Iterator[TensorRef]:
    return (ref for ref in state.values() if isinstance(ref, TensorRef))


Weight = TypeVar("Weight")
"""A tensor, or a reference to one that is computed when it is read."""


def join_weights(
    saved: Mapping[str, Any],
    parameters: Iterable[SavedParameter],
    join: Callable[[SavedParameter, str, Codec], tuple[str, Weight]],
    is_copy: Callable[[str, str], bool],
) -> dict[str, Weight]:
    """The fp32 weights by name, tied names included, that ``parameters`` of packed optimizers complete.

    ``saved`` is the state dict of the model. ``join(parameter, key, codec)`` returns the name of its weight, and that
    weight in fp32: the state holds under ``key`` a residual of ``codec``, or the master. It raises UsageError where the
    name is not certain. ``is_copy`` compares two weights of one shape and type: whether they are equal bit for bit,
    and not all zero.
    """
    full: dict[str, Weight] = {}
    for parameter in parameters:
        key = "residual" if "residual" in parameter.state else "master"
        part = parameter.state.get(key)
        if isinstance(part, TensorRef) and is_packed_group(parameter.group):
            codec = Split32() if part.dtype is DType.INT16 else codec_from_config(parameter.group["master"])
            name, weight = join(parameter, key, codec)
            full[name] = weight
    others = {name: ref for name, ref in saved.items() if name not in full and isinstance(ref, TensorRef)}
    tied = {
        other: weight
        for name, weight in full.items()
        for other, ref in others.items()
        if (ref.shape, ref.dtype) == (saved[name].shape, saved[name].dtype)
        and (_place(ref) == _place(saved[name]) or (len(ref.shape) > 1 and is_copy(name, other)))
    }
    return full | tied


def of_model(parameters: Iterable[SavedParameter], saved: Mapping[str, Any]) -> list[SavedParameter]:
    """The parameters with a weight in the state dict ``saved``, and those whose weight is unknown."""
    refs = set(map(id, saved.values()))
    return [parameter for parameter in parameters if parameter.weight is None or id(parameter.weight) in refs]


def _place(ref: TensorRef) -> tuple[object, ...]:
    return ref.key, ref.offset, ref.stride
