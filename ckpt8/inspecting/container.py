"""Facts about a ``.ckpt8`` or a directory of them: without options from manifests alone, and without torch.

Among them are the names in pickles that ``torch.load`` refuses with ``weights_only``: without it, it imports them and
may call them.

``origin_of`` says which program wrote a checkpoint, at which step, and with which options of its optimizers. The
answers come from keys that only one program writes, and from the names of the files in a directory.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.names import RankFile, rank_file
from ckpt8.checkpoint.meaning.nodes import dict_groups, is_optimizer
from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.readers import READERS, get_reader
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.readers.torch_rules import NUMPY_NAMES, foreign_names
from ckpt8.checkpoint.sources.bundle import Bundle, Member
from ckpt8.checkpoint.tree import Checkpoint, OpenCheckpoint, format_path, iter_nodes, read_scalar
from ckpt8.codecs import codec_from_config
from ckpt8.codecs.error_stats import LatticeError, UpdateError, WeightError, read_error
from ckpt8.container.facts import error_facts, figure_of, figures, tensor_facts, total_errors
from ckpt8.container.joined import Stored, containers_of, open_stored
from ckpt8.container.manifest import DCP, FILE, Manifest
from ckpt8.container.manifest_json import plain_json
from ckpt8.container.reader import ContainerReader, SkeletonFile
from ckpt8.container.steps import step_facts
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import Ckpt8Error, InputError
from ckpt8.core.grouping import grouped
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.tensors import Role
from ckpt8.core.text import listed
from ckpt8.inspecting.facts import (
    EPOCH_KEYS,
    GLOBAL_KEYS,
    LARGEST,
    STEP_KEYS,
    asked_words,
    dtypes,
    first_number,
    frameworks_by_folder,
    is_below,
    layers_of,
    low_bit_state,
    parameter_facts,
    shown_names,
    sizes_by,
    unrecognised,
    whole_shapes,
)

FOREIGN = "foreign_globals"
"""The kind of the flag."""

_SHOWN, _LISTED, _MOST = 5, 20, 1000
"""Names in a warning, in a report, and in JSON."""


def names_of(member: DirectoryMember) -> Iterator[tuple[str, list[str]]]:
    """The path of an open member and the names in it, if there are any."""
    if isinstance(member.checkpoint, OpenCheckpoint) and (names := foreign_names(member.checkpoint.names)):
        yield member.path, names


def names_in_container(reader: ContainerReader) -> Iterator[tuple[str, list[str]]]:
    """Path and names of every member of a container that has some. ``verify`` names the damaged ones."""
    for index, record in enumerate(reader.manifest.members):
        if record.format in READERS and reader.is_plain(record.skeleton):
            try:
                checkpoint = get_reader(record.format).read(SkeletonFile(reader, index))
            except Ckpt8Error:
                continue
            yield from names_of(DirectoryMember(record.path, checkpoint))


def foreign_flags(members: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """A red flag for each member with such names, in the form of ``survey``; ``globals`` lists the names.

    Arrays and scalars of numpy, as random states have them, are none: ``load`` makes them and calls nothing for it.
    """
    others = ((path, [name for name in names if name not in NUMPY_NAMES]) for path, names in members)
    return [
        {
            "kind": FOREIGN,
            "tensor": path,
            "count": len(names),
            "of": len(names),
            "fraction": 1.0,
            "sampled": False,
            "message": listed(names, _LISTED),
            "globals": list(names[:_MOST]),
        }
        for path, names in others
        if names
    ]


def warning(target: str, members: Iterable[tuple[str, Sequence[str]]]) -> str | None:
    """The line in which ``restore`` warns of foreign names; None where there are none."""
    names = dict.fromkeys(name for _, classes in members for name in classes)
    line = (
        f"{target}: refers to {listed(names, _SHOWN)}, which torch.load refuses with weights_only=True, and without it "
        "imports and may call; load it so only if you trust where it came from"
    )
    return line if names else None


_WORST = 5


def inspect_container(
    path: Path,
    *,
    tensors: bool = False,
    original: Path | None = None,
    full: bool = False,
    visit: Callable[[Stored], None] | None = None,
) -> dict[str, Any]:
    """Totals, roles, errors and the worst tensors; with ``tensors`` every tensor.

    With ``original``, the checkpoint that the container was made from, measured errors replace the stored ones;
    ``measured_from`` then has its ``path`` and the names of lossless storages ``differing`` from it. ``visit`` gets the
    reader, whose manifest then has these errors. ``full`` decodes every element and looks for ``flags``. Raises
    InputError for damage.
    """
    with without_collection(), open_stored(path) as reader:
        differing = [] if original is None else _measure_again(reader, original)
        manifest = reader.manifest
        if visit is not None:
            visit(reader)
        if full:
            from ckpt8.inspecting.survey import survey_decoded

            looked = survey_decoded(path)
        else:
            looked = _not_surveyed(manifest)
        looked["flags"][:0] = foreign_flags(
            names for file in containers_of(reader) for names in names_in_container(file)
        )
        return {
            "path": str(reader.path),
            "kind": "ckpt8",
            "ranks": None
            if isinstance(reader, ContainerReader)
            else {"files": len(reader.readers), "strays": [*reader.strays()]},
            **_facts(manifest, reader.size),
            "measured_from": None if original is None else {"path": str(original), "differing": differing},
            **_framework(manifest),
            "layers": layers_of(manifest),
            **looked,
            **_lists(manifest, tensors),
        }


def _framework(manifest: Manifest) -> dict[str, Any]:
    """``framework``, and ``origins`` if names of files show several; what is in the files is not read."""
    folders = frameworks_by_folder([member.path for member in manifest.members])
    rows = [{"path": path or ".", "framework": name} for path, name in folders.items()]
    several = len(set(folders.values())) > 1
    return {"framework": None if several or not rows else rows[0]["framework"], "origins": rows if several else []}


def _not_surveyed(manifest: Manifest) -> dict[str, Any]:
    """The keys of ``survey``, when nobody reads an element."""
    seen: Counter[int] = Counter()
    for tensor in manifest.tensors:
        if tensor.dtype.is_floating:
            seen[tensor.storage] += tensor.numel
    count = sum(min(numel, manifest.storages[index].numel) for index, numel in seen.items())
    return {"flags": [], "sample": {"elements": 0, "of": count, "full": count == 0}}


def _measure_again(stored: Stored, original: Path) -> list[str]:
    """Replace the stored errors by measured ones; return the names of lossless storages that differ."""
    from ckpt8.core.workers import Workers
    from ckpt8.inspecting.verify import compare

    with Workers() as workers:
        measured, values, _ = compare(stored, original, workers)
    for reader, errors in zip(containers_of(stored), measured, strict=True):
        errors.replace_stated(reader.manifest)
    differing = [name for errors in measured for name in errors.differing]
    return differing + [line.partition(": differs")[0] for line in values]


def _facts(manifest: Manifest, size: int) -> dict[str, Any]:
    original, types, storages = sum(member.size for member in manifest.members), dtypes(manifest), manifest.storages
    weights = sum(
        record.nbytes // types[index].itemsize
        for index, record in enumerate(storages)
        if record.role is Role.WEIGHT and types[index].is_plane_float and not record.is_reference
    )
    parts: Counter[str] = Counter()
    own = (record.part_bytes for record in storages if record.pack is None)
    for sizes in (*own, *(pack.part_bytes for pack in manifest.packs)):
        parts.update(sizes)
    return {
        "format": manifest.version,
        "writer": manifest.writer,
        "preset": manifest.preset,
        "asked": asked_words(manifest.preset, manifest.budget),
        "rules": manifest.rules,
        "directory": manifest.directory,
        "base": plain_json(manifest.base) if manifest.base else None,
        "differences": sum(record.base is not None for record in manifest.storages),
        "members": [
            {
                "path": member.path,
                "format": member.format,
                "bytes": member.size,
                "stored_bytes": storages[member.skeleton].stored_bytes
                + sum(storages[index].stored_bytes for _, index in member.segments),
            }
            for member in manifest.members
        ],
        "bytes": original,
        "stored_bytes": size,
        "ratio": original / size,
        "weights": weights,
        "bytes_per_weight": size / weights if weights else None,
        "parts": dict(parts),
        "overhead_bytes": size - sum(parts.values()),
        "roles": sizes_by("codec", manifest),
        "low_bit": low_bit_state(manifest),
        "errors": total_errors(manifest, count_whole),
        "steps": step_facts(manifest, count_whole),
    }


def _lists(manifest: Manifest, tensors: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "worst": worst(manifest),
        "lossless": lossless_reasons(manifest),
        "unrecognised": unrecognised(manifest) if manifest.preset != "lossless" else [],
    }
    if tensors:
        whole = whole_shapes(manifest)
        facts["tensors"] = [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "whole_shape": whole.get(tensor.name, tensor.shape),
                **tensor_facts(manifest, tensor),
            }
            for tensor in manifest.tensors
        ]
        facts["parameters"] = [
            {**row, "error": error_facts(parameter.error), "figure": figure_of(parameter)}
            for row, parameter in zip(parameter_facts(manifest), manifest.parameters, strict=True)
        ]
    return facts


def lossless_reasons(manifest: Manifest) -> list[dict[str, Any]]:
    """Storages that are lossless although their role asks for another codec: the number by reason, and a few names."""
    names = grouped(
        (record.reason, record.name)
        for record in manifest.storages
        if record.reason is not None and codec_from_config(record.codec).measured_as is None
    )
    return [
        {"reason": reason, "count": len(storages), "names": storages[:_WORST]}
        for reason, storages in sorted(names.items())
    ]


def worst(manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    """The worst tensors by the figure of their kind.

    ``update``: parameters, the largest max |Δu| first; ``weight``: weights, the largest mean relative error first;
    ``lattice``: weights on a lattice, the lowest SNR first.
    """
    updates = [
        {**shown, **figures(error), "figure": figure_of(parameter)}
        for parameter, shown in zip(manifest.parameters, shown_names(manifest), strict=True)
        if isinstance(error := read_error(parameter.error), UpdateError)
    ]
    errors = [(record.name, read_error(record.error)) for record in manifest.storages]
    weights = [{"name": name, **figures(error)} for name, error in errors if isinstance(error, WeightError)]
    lattice = [(error.nmse, {"name": name, **figures(error)}) for name, error in errors if type(error) is LatticeError]
    return {
        "update": sorted(updates, key=lambda row: -row["max_error"])[:_WORST],
        "weight": sorted(weights, key=lambda row: -row["mean_relative"])[:_WORST],
        "lattice": [row for _, row in sorted(lattice, key=lambda pair: -pair[0])[:_WORST]],
    }


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
    folders = frameworks_by_folder([member.path for member in source.members])
    origins = [] if source.directory is None else _origins(source, folders)
    several = len({row["framework"] for row in origins} - {None}) > 1
    frameworks = set(folders.values())
    framework = frameworks.pop() if len(frameworks) == 1 and not several else None
    one = _origin(source, [] if several else source.members, framework, in_directory=source.directory is not None)
    return {
        **one,
        "origins": origins if several else [],
        "hyperparameters": [*_of_trees(source), *_of_distributed(source)],
    }


def _origins(source: Bundle, folders: Mapping[str, str]) -> list[dict[str, Any]]:
    """The origin of every one of ``folders``, with files of one program, and of every other member with tensors."""
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
    counted = next(filter(None, (_counted(source, home) for home in homes)), None) if step is None else None
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
                yield from _merged(before + format_path(path), dict_groups(node), 0)


def _homes(source: Bundle, members: Iterable[Member]) -> list[DcpCheckpoint]:
    """The distributed checkpoints that ``members`` of a source belong to."""
    paths = {member.path for member in members}
    return list({id(member.home): member.home for member in source.distributed if member.path in paths}.values())


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
