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

``weights_without_state`` are weights that no optimizer moves, of models that have others which it does.

``join_weights`` are the fp32 weights that the state of ``ckpt8.optim`` completes.

``Universal`` and ``find_partitions`` are for DeepSpeed: universal checkpoints, and the flat partitions of stages 1 and
2. A universal checkpoint has one file for each tensor, whose name states the role:

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
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

from ckpt8.checkpoint.meaning.coded_moments import coded_moments
from ckpt8.checkpoint.meaning.names import NamesFromWeights
from ckpt8.checkpoint.meaning.nodes import Shape, dict_groups, place_of
from ckpt8.checkpoint.meaning.optimizer_state import SavedParameter, recognise
from ckpt8.checkpoint.meaning.pairing import NOT_NAMED, Beside, models_and_optimizers, owners, saved_parameters
from ckpt8.checkpoint.meaning.roles import short_name
from ckpt8.checkpoint.meaning.state_dicts import is_packed_group, twins, weights_of
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import Place, Slice, StateKey
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.tree import Checkpoint, Inert, Labelled, TensorRef, read_scalar, read_settings
from ckpt8.checkpoint.vocabulary import model_path
from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.split24 import Split32
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import DType, Role
from ckpt8.optim.known_optimizers import MASTER_KEYS, MEGATRON_MASTER, MOMENT_SLOTS, setting_names

_MODEL = "model"
"""The key for weights without a path before their names."""

_MOST_COMPONENTS = 64
"""A longer path is no path of a model."""

KeyOf = Callable[[str, int], str]
"""Gives the key in the source of a storage in the member of a number."""


@dataclass(slots=True)
class _Home:
    """A distributed checkpoint in a folder.

    Its ``slices`` are by the name of the tensor and the place in it; their keys are those of the source. ``rates`` are
    learning rates that are tensors, by name.
    """

    checkpoint: DcpCheckpoint
    folder: str
    slices: _Slices = field(default_factory=dict)
    rates: dict[str, float | None] = field(default_factory=dict)

    def group(self, key: StateKey) -> Mapping[str, Any]:
        """The options of the group of a parameter."""
        group = self.checkpoint.roles.group(key, self.checkpoint.value)
        names = self.checkpoint.roles.option_names(key, self.checkpoint.value) if self.rates else {}
        return {**group, **{option: self.rates[name] for option, name in names.items() if name in self.rates}}


def slice_pairs(members: Sequence[DirectoryMember], key_of: KeyOf) -> Iterator[SavedParameter]:
    """Every slice of state in the distributed checkpoints among ``members``, with the slice of its weight.

    The weights may be in another checkpoint, without an optimizer, whose folder lies beside.
    """
    for home, tree, slices in _trees_of_slices(members, key_of):
        roles = home.checkpoint.roles
        owned = {ref.key: parameter for parameter in saved_parameters(tree) for ref in parameter.state.values()}
        for (name, place), ref in home.slices.items():
            if (key := roles.states.get(name)) is not None:
                weight, reason = None, NOT_NAMED
                if (owner := owned.get(name)) is not None:
                    # A master is among the slices of the state itself.
                    whole = owner.master or owner.weight
                    weight = whole and slices.get(id(whole), home.slices).get((whole.key, place))
                    reason = "its weight is cut into other slices than its moments" if whole else owner.unpaired or ""
                yield SavedParameter(
                    name,
                    {key.key: ref},
                    home.group(key),
                    optimizer=(id(home), key.optimizer),
                    weight=weight,
                    unpaired=None if weight else reason,
                )


_Slices = dict[tuple[str, Place | None], TensorRef]
"""The slices of a distributed checkpoint by the name of their tensor and their place in it."""


def _trees_of_slices(
    members: Sequence[DirectoryMember], key_of: KeyOf
) -> Iterator[tuple[_Home, dict[str, Any], dict[int, _Slices]]]:
    """Every distributed checkpoint with an optimizer, its tree of whole tensors, and where the slices of a weight are.

    Those are by the ``id`` of the weight in the tree, whose key is its name.
    """
    homes = _homes(members, key_of)
    for home in (home for home in homes if home.checkpoint.roles.states):
        tree: dict[str, Any] = {}
        ordered, above = bool(home.checkpoint.metadata.paths), home.folder.rpartition("/")[0]
        slices = {id(ref): home.slices for ref in _add_weights(tree, home)}
        for other in homes if not slices else ():
            if other.folder.rpartition("/")[0] == above and not other.checkpoint.roles.states:
                slices.update((id(ref), other.slices) for ref in _add_weights(tree, other))
                ordered &= bool(other.checkpoint.metadata.paths)
        _add_states(tree, home, ordered=ordered)
        yield home, tree, slices


def slice_twins(members: Sequence[DirectoryMember], key_of: KeyOf) -> Iterator[tuple[str, str]]:
    """The keys of all slices of weights that several models of a distributed checkpoint have, in pairs: see ``twins``.

    They lie in the same places.
    """
    for home in _homes(members, key_of):
        tree: dict[str, Any] = {}
        _add_weights(tree, home)
        places = grouped(home.slices)
        for one, other in twins([tree]):
            pairs = (((one.key, place), (other.key, place)) for place in places.get(one.key, ()))
            yield from ((home.slices[mine].key, home.slices[its].key) for mine, its in pairs if its in home.slices)


def _homes(members: Sequence[DirectoryMember], key_of: KeyOf) -> list[_Home]:
    homes: dict[int, _Home] = {}
    for number, member in enumerate(members):
        if isinstance(member, DcpMember):
            home = homes.setdefault(id(member.home), _Home(member.home, member.path.rpartition("/")[0]))
            for piece, ref in member.parts:
                home.slices[piece.name, piece.place] = replace(ref, key=key_of(ref.key, number))
                option = home.checkpoint.roles.options.get(piece.name)
                if option is not None and option.key in ("lr", "initial_lr"):
                    home.rates[piece.name] = _number(member.checkpoint, ref)
    return list(homes.values())


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


def _path(name: str, saved: Sequence[str | int]) -> Sequence[str]:
    """The keys that lead to a model, then the name of the weight in it. ``saved`` is the path if it is known."""
    is_nested = 1 < len(saved) <= _MOST_COMPONENTS
    parts = [str(part) for part in saved] if is_nested else name.split(".", _MOST_COMPONENTS)
    return model_path(parts) or (parts if is_nested else [_MODEL, name])


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
            is_listed = {str(identifier) for group in numbers for identifier in group} >= states.keys()
            groups = numbers if is_listed else [list(states)]
            listed = {own: states[str(own)] for group in groups for own in group if str(own) in states}
            node.update(state=listed, param_groups=[{"params": group} for group in groups])


UNKNOWN = object()
"""A value that exists but is unknown for a slice; it prevents that an update rule is recognised."""


_StateSlice = tuple[DcpMember, StateKey, Slice, TensorRef]
"""A slice of state in a member. The key of the tensor is that of its storage in the source."""


def joint_parameters(members: Iterable[DirectoryMember]) -> list[SavedParameter]:
    """The states of all slices of parameters, each named by the member of the moment that comes first."""
    slices = (
        (member, key, piece, replace(ref, key=f"{number}/{ref.key}"))
        for number, member in enumerate(members)
        if isinstance(member, DcpMember)
        for piece, ref in member.parts
        if (key := member.home.roles.states.get(piece.name)) is not None
    )
    owners = grouped(((id(own[0].home), own[1].optimizer, own[1].parameter), own) for own in slices)
    return [parameter for owned in owners.values() for parameter in _joined(owned)]


def _joined(owned: list[_StateSlice]) -> Iterator[SavedParameter]:
    """One parameter, slice by slice: each with the state that is whole, such as the step."""
    home, owner = owned[0][0].home, owned[0][1]
    places: dict[Place | None, dict[str, _StateSlice]] = defaultdict(dict)
    shared: dict[str, Any] = {}
    for member, key, piece, ref in owned:
        is_whole = home.metadata.is_whole(piece)
        places[None if is_whole else piece.place][key.key] = member, key, piece, ref
        shared[key.key] = ref if is_whole and ref.numel == 1 else UNKNOWN
    shared |= home.state_values(owner)
    group = home.roles.group(owner, home.value)
    name = owner.parameter
    if name.isdecimal():  # its place in an optimizer that numbers its parameters
        name = f"{owner.optimizer}.state.{name}" if owner.optimizer else f"state.{name}"
    for place, slices in places.items():
        if (moment := next((key for key in slices if key in MOMENT_SLOTS), None)) is not None:
            member, _, piece, _ = slices[moment]
            yield SavedParameter(
                short_name(f"{member.path}:{name}{home.metadata.suffix(piece)}"),
                shared | {key: ref for key, (_, _, _, ref) in slices.items()},
                group,
                None if place is None else home.metadata.tensors[piece.name].shape,
            )


_ROLES = {"fp32.pt": Role.WEIGHT, "exp_avg.pt": Role.MOMENT1, "exp_avg_sq.pt": Role.MOMENT2}
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

    def parameters(self) -> Iterator[SavedParameter]:
        """The state and the fp32 weight of every parameter, with tensors whose keys are those of the bundle.

        The groups have no learning rate where it is not the same in all.
        """
        for folder, _, last in (path.rpartition("/") for path in self._members):
            root, _, name = folder.rpartition("/")
            if last == "exp_avg.pt" and root in self._roots:
                moments = {key: self._tensor(f"{folder}/{key}.pt") for key in ("exp_avg", "exp_avg_sq")}
                step, groups = self._step(folder, root), dict_groups(self._tree(f"{root}/{_REST}"))
                state = {**{key: ref for key, ref in moments.items() if ref is not None}, "step": step}
                # The files do not say which group has the parameter. That does not matter if all have one rule.
                names = sorted(setting_names())
                rules = {(recognise(state, group, step), *(repr(group.get(key)) for key in names)) for group in groups}
                group = groups[0] if len(rules) == 1 else {}
                if len({(repr(group.get("lr")), repr(group.get("initial_lr"))) for group in groups}) > 1:
                    group = {key: value for key, value in group.items() if key != "lr"}
                weight = self._tensor(f"{folder}/fp32.pt")
                yield SavedParameter(
                    short_name(f"{root}:{name}"),
                    state,
                    group,
                    optimizer=root,
                    weight=weight,
                    unpaired=None if weight else "it has no fp32.pt",
                )

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
    """A number that a file has as it is, or in a tensor of one element; None for anything else."""
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
        ranks = sorted(shares[place], key=lambda share: share[0])
        pieces = grouped(named for _, state in ranks for named in _pieces(state))
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


def trained_states(members: Sequence[DirectoryMember], key_of: KeyOf, *, directory: bool) -> dict[str, SavedParameter]:
    """The parameter of every saved state, by the key of each of its storages. Raises InputError.

    The keys of its tensors are those of the source, and its ``weight`` is what the optimizer steps: the master where it
    keeps one. Groups have numbers in place of tensors. Optimizers are numbered; files that ranks wrote of one share it.
    """
    contents = [(member.path, member.checkpoint) for member in members]
    of_files, universal = _parameters_of_files(contents, key_of, directory), Universal(contents)
    numbers: dict[object, int] = {}
    states: dict[str, SavedParameter] = {}
    for row in chain(of_files, slice_pairs(members, key_of), universal.parameters()):
        numbered = replace(row, optimizer=numbers.setdefault(row.optimizer, len(numbers)))
        states.update((ref.key, numbered) for ref in row.tensors.values())
    return states


def weights_without_state(members: Sequence[DirectoryMember], key_of: KeyOf, *, directory: bool) -> set[str]:
    """The keys of the storages that hold weights without state alone, of models whose other weights have some.

    None of the shape of a state whose weight is not known. Empty where a state has no known shape, and where an
    optimizer may train one of several models. Raises InputError.
    """
    moved, others, unknown = set[str](), dict[str, set[Shape]](), set[Shape]()
    for tree, beside, keys_of in _trees_of_weights(members, key_of, directory):
        rows = saved_parameters(tree, beside)
        weights = {id(row.weight) for row in rows if row.weight is not None}
        for row in rows:
            if row.weight is None and row.shape is None:
                return set()
            unknown |= {row.shape} if row.weight is None and row.shape is not None else set()
        models, optimizers = models_and_optimizers(tree) if rows else ([], [])
        for owner in owners(optimizers, models or beside.models):
            if owner.model is None:
                return set()
            for ref in weights_of(owner.model.node).values():
                if id(ref) in weights:
                    moved.update(keys_of(ref))
                elif ref.dtype.is_floating:
                    for key in keys_of(ref):
                        others.setdefault(key, set()).add(ref.shape)
    return {key for key, shapes in others.items() if not shapes & unknown} - moved


def _trees_of_weights(
    members: Sequence[DirectoryMember], key_of: KeyOf, directory: bool
) -> Iterator[tuple[Any, Beside, Callable[[TensorRef], Iterable[str]]]]:
    """The tree of every file and distributed checkpoint, what is beside it, and a weight's storages, by their keys."""
    contents = [(member.path, member.checkpoint) for member in members]
    names = NamesFromWeights(contents) if directory else None
    numbers = {path: number for number, (path, _) in enumerate(contents)}

    def in_file(path: str, files: Mapping[int, str], ref: TensorRef) -> list[str]:
        return [key_of(ref.key, numbers[files.get(id(ref), path)])]

    def in_slices(slices: Mapping[int, _Slices], keys: Mapping[int, dict[str, list[str]]], ref: TensorRef) -> list[str]:
        return keys[id(slices[id(ref)])][ref.key]

    for path, checkpoint in contents:
        if not isinstance(checkpoint.tree, Labelled):
            beside = Beside() if names is None else names.beside(path)
            yield checkpoint.tree, beside, partial(in_file, path, beside.files)
    for _, tree, slices in _trees_of_slices(members, key_of):
        homes = {id(own): own for own in slices.values()}
        keys = {number: grouped((name, ref.key) for (name, _), ref in own.items()) for number, own in homes.items()}
        yield tree, Beside(), partial(in_slices, slices, keys)


def _parameters_of_files(
    contents: Sequence[tuple[str, Checkpoint]], key_of: KeyOf, directory: bool
) -> Iterator[SavedParameter]:
    """The parameters of all files, given by path and content, with keys of the source."""
    names = NamesFromWeights(contents) if directory else None
    numbers = {path: number for number, (path, _) in enumerate(contents)}
    for number, (path, checkpoint) in enumerate(contents):
        if isinstance(checkpoint.tree, Labelled):
            continue
        storages = {storage.key: storage for storage in checkpoint.storages}
        groups: dict[int, Mapping[Any, Any]] = {}
        for saved in saved_parameters(checkpoint.tree, None if names is None else names.beside(path), as_torch=True):
            if id(saved.group) not in groups:
                groups[id(saved.group)] = read_settings(checkpoint, storages, saved.group)
            weight, home = saved.master or saved.weight, path if saved.master else saved.home or path
            weight = weight and _renamed(weight, key_of(weight.key, numbers[home]))
            yield replace(
                saved,
                state={key: _renamed(ref, key_of(ref.key, number)) for key, ref in _tensors(saved).items()},
                group=groups[id(saved.group)],
                weight=weight,
                unpaired=None if weight else saved.unpaired,
                optimizer=(_RANK.sub("rank", path), saved.optimizer),
            )


def _tensors(saved: SavedParameter) -> dict[Any, TensorRef]:
    """The tensors of a state, those of coded moments too."""
    _, *moments = coded_moments(saved.state) or ((),)
    coded = enumerate(ref for moment in moments for ref in moment.tensors)
    return {**saved.tensors, **{("codes", number): ref for number, ref in coded}}


def _renamed(ref: TensorRef, key: str) -> TensorRef:
    return ref if ref.key == key else replace(ref, key=key)


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
    refs = set(map(id, saved.values()))
    for parameter in parameters:
        if parameter.weight is not None and id(parameter.weight) not in refs:
            continue  # it belongs to another model
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
        and (place_of(ref) == place_of(saved[name]) or (len(ref.shape) > 1 and is_copy(name, other)))
    }
    return full | tied
