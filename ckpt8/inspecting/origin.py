"""Which program wrote a checkpoint, at which step, and with which options of its optimizers.

The answers come from keys that only one program writes, and from the names of the files in a directory.

``layers`` groups storages by the part of the model that their parameter belongs to, and adds up their bytes.

The first number in the name of a parameter counts layers (``transformer.h.0``); parameters before and after the layers
are grouped by module (``transformer.wte``, ``lm_head``). Moments and other state of an optimizer belong to the layer of
their parameter if its name is known.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ckpt8.checkpoint.meaning.names import RankFile, rank_file
from ckpt8.checkpoint.meaning.nodes import dict_groups, is_optimizer
from ckpt8.checkpoint.meaning.parameter_names import SLICE, in_model_order, layer_of, plain_path, whole_tensor
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.sources.bundle import Bundle, Member
from ckpt8.checkpoint.tree import Checkpoint, format_path, iter_nodes, read_scalar
from ckpt8.checkpoint.vocabulary import MASTER_LISTS
from ckpt8.container.manifest import DCP, FILE, Manifest
from ckpt8.core.errors import InputError
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.tensors import DType, Role
from ckpt8.inspecting.facts import (
    EPOCH_KEYS,
    GLOBAL_KEYS,
    LARGEST,
    STEP_KEYS,
    dtypes,
    first_number,
    framework_of_files,
    frameworks_by_folder,
    is_below,
    parameter_facts,
    skeleton_roles,
)

_COUNTERS = frozenset({*STEP_KEYS, *EPOCH_KEYS})
_MOST_STEPS = 4096
"""Parameters of a distributed checkpoint whose own step is read."""

_LONGEST_JSON = 16 << 20
_MOST_OPTIONS, _MOST_ITEMS, _LONGEST_TEXT = 64, 8, 100

_BY_KEYS: tuple[tuple[str, frozenset[str]], ...] = (
    ("Lightning", frozenset({"pytorch-lightning_version"})),
    ("DeepSpeed", frozenset({"ds_version"})),
    ("nanoGPT", frozenset({"model_args", "iter_num"})),
    ("fairseq", frozenset({"extra_state", "last_optimizer_state"})),
    ("timm", frozenset({"arch", "state_dict", "version"})),
    ("open_clip", frozenset({"name", "epoch", "state_dict"})),
)
"""Keys at the top of a file that only this program writes; the first set that is complete counts."""

_VERSIONS = ("pytorch-lightning_version", "ds_version")


_WHOLE = ("DeepSpeed", "torch.distributed.checkpoint")
"""Programs below others: a folder with their files has no files of another program, whatever keys these have."""


def origin_of(source: Bundle) -> dict[str, Any]:
    """``framework``, its ``version``, ``step`` and ``epoch``, None if unknown, and ``hyperparameters``.

    ``step_from`` says who counted the step: ``file``, where it has a name of its own, or else the ``optimizer``.

    ``hyperparameters`` is a list of {optimizer, parameters, options}, one for every group of an optimizer that differs
    from its others: the path of its state, the number of parameters, and the options with plain values. In a directory
    with checkpoints of several programs the first five are None, and ``origins`` has them for each ``path``.
    """
    origins = [] if source.directory is None else _origins(source)
    several = len({row["framework"] for row in origins} - {None}) > 1
    framework = None if several else framework_of_files([member.path for member in source.members])
    one = _origin(source, [] if several else source.members, framework, in_directory=source.directory is not None)
    return {
        **one,
        "origins": origins if several else [],
        "hyperparameters": [*_of_trees(source), *_of_distributed(source)],
    }


def _origins(source: Bundle) -> list[dict[str, Any]]:
    """The origin of every folder with files of one program, and of every other member with tensors."""
    folders = frameworks_by_folder([member.path for member in source.members])
    rest = []
    rows = {}
    for member in source.members:
        folder = next((folder for folder in folders if is_below(member.path, folder)), None)
        own = _by_keys([member])
        if folder is None or (folders[folder] not in _WHOLE and own not in (None, "DeepSpeed", folders[folder])):
            rest += [member] if own or any(storage.nbytes for storage in member.checkpoint.source_storages) else []
    for folder, name in folders.items():
        inside = [member for member in source.members if member not in rest and is_below(member.path, folder)]
        rows[folder] = _origin(source, inside, name, in_directory=True)
    rows |= {member.path: _origin(source, [member], None, in_directory=False) for member in rest}
    return [{"path": path or ".", **row} for path, row in sorted(rows.items())]


def _by_keys(members: Iterable[Member]) -> str | None:
    trees = [tree for member in members if isinstance(tree := member.checkpoint.tree, dict)]
    return next((name for tree in trees for name, keys in _BY_KEYS if keys <= tree.keys()), None)


def _origin(source: Bundle, members: Sequence[Member], framework: str | None, *, in_directory: bool) -> dict[str, Any]:
    """The origin of ``members`` of one program; ``framework`` is what their names say."""
    trees = [tree for member in members if isinstance(tree := member.checkpoint.tree, dict)]
    version = next((tree[key] for tree in trees for key in _VERSIONS if isinstance(tree.get(key), str)), None)
    # In a directory, the files of schedulers and random generators count steps of their own.
    known = GLOBAL_KEYS if in_directory else _COUNTERS
    numbers = [{key: tree[key] for key in known if key in tree} for tree in trees]
    for member in members:
        name = member.path.rpartition("/")[2]
        if name in ("trainer_state.json", "config.json") and member.checkpoint.format == FILE:
            tree = read_json(member.checkpoint)
            state = tree if isinstance(tree, dict) else {}
            numbers += [state] if name == "trainer_state.json" else []
            version = version or _text(state.get("transformers_version"))
    homes = _homes(source, members)
    numbers += [_numbers(source, home) for home in homes]
    step = first_number(numbers, STEP_KEYS, whole=True)
    counted = (
        None
        if step is not None
        else next((step_there for step_there in (_counted(source, home) for home in homes) if step_there), None)
    )
    return {
        "framework": framework or _by_keys(members),
        "version": _text(version),
        "step": counted if step is None else step,
        "step_from": "file" if step is not None else "optimizer" if counted is not None else None,
        "epoch": first_number(numbers, EPOCH_KEYS, whole=False),
    }


def read_json(file: Checkpoint) -> Any:
    """The tree in a file of JSON; None if it is too long or not JSON. Raises InputError."""
    content = bytearray(file.size if file.size <= _LONGEST_JSON else 0)
    file.read_into(0, memoryview(content))
    try:
        return parse_any_json(content, "a file")
    except InputError:
        return None


def _text(value: object) -> str | None:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else None


def _of_trees(source: Bundle) -> Iterator[dict[str, Any]]:
    seen = set()
    for member in source.members:
        if member.checkpoint.format in (DCP, FILE):
            continue
        # The ranks of a job have one optimizer.
        _, name = rank_file(member.path, member.checkpoint.tree) or RankFile(0, member.path)
        if name in seen:
            continue
        seen.add(name)
        before = "" if source.directory is None else f"{name}:"
        for path, node in iter_nodes(member.checkpoint.tree):
            if is_optimizer(node):
                groups = dict_groups(node)
                yield from _merged(before + format_path(path), groups, 0)


def _homes(source: Bundle, members: Iterable[Member]) -> list[DcpCheckpoint]:
    """The distributed checkpoints that ``members`` of a source belong to."""
    paths = {member.path for member in members}
    homes = [member.home for member in source.distributed if member.path in paths]
    return list({id(home): home for home in homes}.values())


def _numbers(source: Bundle, home: DcpCheckpoint) -> dict[str, Any]:
    """The steps and epochs of a distributed checkpoint outside of its optimizers, those at the top first."""
    numbers: dict[str, Any] = {}
    names = sorted(home.metadata.names, key=lambda name: name.count("."))
    last = {name: name.rpartition(".")[2] for name in names}
    outside = [name for name in names if last[name] in _COUNTERS and not home.roles.is_inside(name)]
    depths: dict[bool, int] = {}
    for name, value in _values(source, home, outside):
        if depths.setdefault(last[name] in STEP_KEYS, name.count(".")) == name.count("."):
            numbers.setdefault(last[name], value)
    return numbers


def _counted(source: Bundle, home: DcpCheckpoint) -> int | None:
    """The step of the optimizers of a distributed checkpoint, if it is the same in all."""
    steps = [name for name in home.metadata.names if name.endswith(".step") and home.roles.is_inside(name)]
    counted = {value for _, value in _values(source, home, sorted(steps)[:_MOST_STEPS])}
    step = counted.pop() if len(counted) == 1 else None
    return step if isinstance(step, int) and step >= 0 else None


def _values(source: Bundle, home: DcpCheckpoint, names: Iterable[str]) -> Iterator[tuple[str, int | float]]:
    """Those of the values that are numbers, plain or in a tensor of one element; whole ones as int."""
    wanted = dict.fromkeys(names)
    tensors: dict[str, Any] = {}
    for member in source.opened:
        if isinstance(member, DcpMember) and member.home is home:
            parts = [(piece.name, ref) for piece, ref in member.parts if piece.name in wanted]
            places = {storage.key: storage for storage in member.checkpoint.storages} if parts else {}
            tensors |= {name: read_scalar(member.checkpoint, places[ref.key], ref) for name, ref in parts}
    for name in wanted:
        value = tensors[name] if name in tensors else home.value(name)
        if type(value) in (int, float):
            yield name, int(value) if isinstance(value, float) and value.is_integer() else value


def _of_distributed(source: Bundle) -> Iterator[dict[str, Any]]:
    for home in _homes(source, source.members):
        options: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
        for name, key in home.roles.options.items():
            options[key.optimizer][key.parameter][key.key] = home.value(name)
        for optimizer, groups in options.items():
            # In a flattened state every parameter has a group of its own, which does not list it.
            yield from _merged(optimizer, groups.values(), 1)


def _merged(optimizer: str, groups: Iterable[Mapping[Any, Any]], unlisted: int) -> Iterable[dict[str, Any]]:
    """One row for all groups of the same options; ``unlisted`` counts the parameters of a group without a list."""
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        options, params = _options(group), group.get("params")
        row = rows.setdefault(json.dumps(options), {"optimizer": optimizer, "parameters": 0, "options": options})
        row["parameters"] += len(params) if isinstance(params, list) else unlisted
    return rows.values()


def _options(group: Mapping[Any, Any]) -> dict[str, Any]:
    """The plain values of a group."""
    options: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(key, str) and key not in ("params", "param_names") and len(options) < _MOST_OPTIONS:
            plain = _plain(value)
            if plain is not None or value is None:
                options[key[:_LONGEST_TEXT]] = plain
    return options


def _plain(value: object) -> Any:
    """A number, a text or a few of them as JSON has them; None for anything else."""
    if isinstance(value, (list, tuple)):
        items = [None if isinstance(item, (list, tuple)) else _plain(item) for item in value[: _MOST_ITEMS + 1]]
        return None if None in items or len(items) > _MOST_ITEMS else items
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return _text(value) if not isinstance(value, int) or abs(value) >= LARGEST else value


UNNAMED = "optimizer state without names"
MASTERS = "flat master weights"
OUTSIDE_LAYERS = "other"


class Stored(NamedTuple):
    """One storage, or slice of a tensor: ``nbytes`` of ``dtype`` under the name of its first tensor."""

    name: str
    role: Role
    dtype: DType
    nbytes: int


def layers(storages: Iterable[Stored], parameters: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups in the order of the source: {group, parameters, bytes, roles}, ``roles`` with the bytes of each.

    ``parameters`` of a group are the elements of its weights; copies of a weight, as an average or masters, count once.
    The argument ``parameters`` lists those of optimizers: {name, named, moments}, moments by slot with the name of a
    storage.
    """
    owners: dict[str, str] = {}
    for parameter in parameters:
        path = plain_path(parameter["name"]) if parameter["named"] else ""
        owners.update((_state(moment), path) for moment in parameter["moments"].values())
    storages = list(storages)
    names = {storage.name for storage in storages}
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    counts: dict[tuple[str, str, str], int] = {}
    for storage in storages:
        owner = owners.get(_state(storage.name)) if owners else None
        plain = plain_path(storage.name) if storage.role is Role.WEIGHT else ""
        group = _group(storage, owner, plain)
        own, role = sizes[group], storage.role.value
        own[role] = own.get(role, 0) + storage.nbytes
        if storage.role is Role.WEIGHT and _is_parameter(storage, names):
            key = group, owner or plain, "".join(SLICE.findall(storage.name))
            counts.setdefault(key, storage.nbytes // storage.dtype.itemsize)
    totals: Counter[str] = Counter()
    for (group, _, _), count in counts.items():
        totals[group] += count
    elsewhere = any(group != MASTERS for group in totals)
    return [
        {
            "group": group,
            "parameters": 0 if group == MASTERS and elsewhere else totals[group],
            "bytes": sum(sizes[group].values()),
            "roles": sizes[group],
        }
        for group in sorted(in_model_order(sizes), key=lambda group: group in (UNNAMED, MASTERS, OUTSIDE_LAYERS))
    ]


def _is_parameter(stored: Stored, names: Set[str]) -> bool:
    """Whether a storage holds weights, or codes of 8 bits with a scale; not so that scale."""
    if stored.name.endswith("weight_scale") and stored.name.removesuffix("_scale") in names:
        return False
    return stored.dtype.is_floating or f"{stored.name}_scale" in names


def _state(name: str) -> str:
    """The path of the state of a parameter, from the name of a tensor in it."""
    return whole_tensor(name).rpartition(".")[0]


def _group(stored: Stored, path: str | None, plain: str) -> str:
    """The group of a storage. ``path`` is that of its optimizer's parameter, if it has one, ``plain`` its own."""
    if path is not None:
        return layer_of(path) if path else UNNAMED
    if stored.role is Role.WEIGHT:
        is_master = not MASTER_LISTS.isdisjoint(re.split(r"[.:]", stored.name))
        return MASTERS if is_master else layer_of(plain)
    return UNNAMED if stored.role in (Role.MOMENT1, Role.MOMENT2) else OUTSIDE_LAYERS


def layers_of(manifest: Manifest) -> list[dict[str, Any]]:
    """The layers of a checkpoint, with their uncompressed bytes."""
    types, skeletons = dtypes(manifest), skeleton_roles(manifest)
    storages = [
        Stored(record.name, record.role, types[index], record.nbytes)
        for index, record in enumerate(manifest.storages)
        if index not in skeletons
    ]
    return layers(storages, parameter_facts(manifest))
