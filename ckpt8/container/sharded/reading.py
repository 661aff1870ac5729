"""Reads the index of a directory of containers. Checks all of it: nobody has to be trusted who could write it.

Reads as well the slices that a container states: which part of which distributed tensor each of its tensors is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from ckpt8.container.checks import name_problem
from ckpt8.container.columns import LARGEST, Fields, is_unicode
from ckpt8.container.manifest import Manifest, TensorRecord
from ckpt8.container.sharded import FOLDER, INDEX, is_part
from ckpt8.container.sharded.index import (
    FORMAT,
    VERSION,
    GlobalTensor,
    Grid,
    Layout,
    Listed,
    Part,
    Place,
    Shape,
    ShardedIndex,
)
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.json_text import parse_json
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown

_LONGEST = 512 << 20
"""Bytes of an index: that of a thousand ranks has ten million."""

_FREE_CELLS, _CELLS = 1 << 16, 64
"""Cells of grids that any index may have, and further ones for each of its bytes: a few numbers can say very many."""

_SEAL = re.compile(r"[0-9a-f]{64}")


def is_sharded(directory: Path) -> bool:
    """Whether a directory is a checkpoint of containers of ranks, or a part of one; False where it cannot be read."""
    if os.path.exists(directory / INDEX):  # noqa: PTH110 - False for a name that is too long
        return True
    with suppress(OSError):
        return any(is_part(entry.name) for entry in os.scandir(directory))
    return False


def find_sharded(path: Path) -> Path | None:
    """The directory of containers of ranks at ``path``, or in the folder that a trainer's checkpoint has for it.

    None where there is neither.
    """
    return next((folder for folder in (path, path / FOLDER) if is_sharded(folder)), None)


def has_other_parts(directory: Path, part: Part) -> bool:
    """Whether a directory holds an index, or parts that would not belong with ``part``, which is not written yet.

    The first rank looks for parts of ranks that its save does not have, the others at that of the first rank alone:
    a list of the directory would be as long as there are ranks.
    """
    if (directory / INDEX).exists() or (directory / part.name).exists():
        return True
    if not part.rank:
        own = {part._replace(rank=rank).name for rank in range(part.world)}
        return any(name not in own for name in _parts(directory))
    first = directory / part._replace(rank=0).name
    if not first.exists():
        return False
    stated = _read(first).part
    return stated is None or stated[1:] != part[1:]


def _parts(directory: Path) -> list[str]:
    """The names of the parts of an index, by rank."""
    try:
        names = [entry.name for entry in os.scandir(directory) if is_part(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise InputError(f"{directory}: cannot be read: {exc.strerror}") from exc
    return sorted(names, key=lambda name: (len(name), name))


def read_index(directory: Path, rank: int | None = None) -> ShardedIndex:
    """The index of a directory, joined where every rank has written a part of it.

    Of what several ranks have stored on their own, such as their random states, ``rank`` gets its own. Raises
    InputError where the index, or a part of it, is missing or malformed, or UnsupportedError.
    """
    path = directory / INDEX
    if path.exists():
        return _read(path)
    parts = _parts(directory)
    if not parts:
        raise InputError(explain_missing(directory))
    from ckpt8.container.sharded.collecting import join  # needs numpy, which takes its time

    return join(directory, {name: _read(directory / name) for name in parts}, rank)


def _read(path: Path) -> ShardedIndex:
    with closing(SourceFile(ByteRange.of(path))) as file:
        if file.source.length > _LONGEST:
            raise InputError(f"{path}: has {file.source.length} bytes, more than {_LONGEST}")
        text = file.read(0, file.source.length)
    return parse_index(text, str(path))


def refuse_directory(path: Path) -> None:
    """Raise InputError, which says why, for a directory that is no checkpoint of ckpt8."""
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises OSError for a name that is too long
        raise InputError(explain_missing(path))


def explain_missing(directory: Path) -> str:
    """Says why a directory is no checkpoint of ckpt8, in one line."""
    if (directory / ".metadata").exists():
        return f"{directory}: was written by torch's own FileSystemWriter; read it with FileSystemReader"
    if directory.is_dir() and any(directory.glob("__*.ckpt8")):
        return f"{directory}: has no {INDEX}; the save was interrupted before it was complete"
    return f"{directory}: holds no checkpoint of Ckpt8StorageWriter (no {INDEX}); give a .ckpt8, or such a directory"


def parse_index(text: bytes, where: str) -> ShardedIndex:
    """The index of that text. Raises as ``read_index``."""
    fields = Fields(parse_json(text, where), f"{where}:")
    if fields.get("format", str) != FORMAT:
        raise InputError(f"{where}: is not the index of a checkpoint of ckpt8")
    version = fields.get("version", str)
    if version.partition(".")[0] != VERSION.partition(".")[0]:
        raise UnsupportedError(f"{where}: has version {version}; this ckpt8 reads version {VERSION}")
    files = _read_files(fields, where)
    names = list(files)
    tensors = {
        name: _read_tensor(Fields(value, f"{where}: {shown(name)}"), names)
        for name, value in fields.get("tensors", dict).items()
    }
    objects = {name: _read_place(fields, name, value, names) for name, value in fields.get("objects", dict).items()}
    if tensors.keys() & objects.keys():
        raise fields.fail("objects")
    if sum(len(tensor.layout) for tensor in tensors.values()) > _FREE_CELLS + _CELLS * len(text):
        raise fields.fail("tensors")
    paths = fields.optional("paths", dict)
    for name, path in (paths or {}).items():
        if not isinstance(path, list) or not path or not all(type(key) in (str, int) for key in path):
            raise fields.fail(name)
    keys = (key for path in (paths or {}).values() for key in path if type(key) is str)
    for name in chain(tensors, objects, keys):
        if not is_unicode(name):
            raise InputError(f"{where}: names the value {shown(name)}, which is not valid UTF-8")
    known = None if paths is None else {name: tuple(path) for name, path in paths.items()}
    dcp, save_id = fields.optional("dcp", str), fields.optional("save_id", str)
    return ShardedIndex(files, tensors, objects, known, dcp, save_id, _read_part(fields))


def _read_part(fields: Fields) -> Part | None:
    stored = fields.optional("part", dict)
    if stored is None:
        return None
    part = fields.nested(stored)
    world = part.count("world")
    return Part(part.count("rank", world), world, part.get("save", str))


def _read_files(fields: Fields, where: str) -> dict[str, str]:
    seals: dict[str, str] = {}
    for pair in fields.get("files", list):
        match pair:
            case [str(name), str(seal)] if _SEAL.fullmatch(seal) and name not in seals:
                if (problem := name_problem(name)) is not None:
                    raise InputError(f"{where}: names the file {shown(name)}, which {problem}")
                seals[name] = seal
            case _:
                raise fields.fail("files")
    return seals


def _read_place(fields: Fields, key: str, value: Any, names: Sequence[str]) -> Place:
    if not _counts(value, 3) or value[0] >= len(names):
        raise fields.fail(key)
    return Place(names[value[0]], value[1], value[2])


def _counts(value: Any, length: int) -> bool:
    """Whether this is a list of so many counts."""
    return isinstance(value, list) and len(value) == length and all(type(k) is int and 0 <= k < LARGEST for k in value)


def _read_tensor(fields: Fields, names: Sequence[str]) -> GlobalTensor:
    shape = tuple(fields.counts("shape"))
    if prod(max(size, 1) for size in shape) >= LARGEST:
        raise fields.fail("shape")
    read = _read_grid if fields.any("boxes") is None else _read_boxes
    return GlobalTensor(fields.choice("dtype", DType.from_label), shape, read(fields, shape, len(names)), names)


def _read_grid(fields: Fields, shape: Shape, files: int) -> Layout:
    cuts, owners = fields.get("cuts", list), fields.get("owners", list)
    if not all(isinstance(runs, list) and all(_counts(run, 2) and all(run) for run in runs) for runs in cuts):
        raise fields.fail("cuts")
    if not all(_is_owner(owner, files) for owner in owners):
        raise fields.fail("owners")
    grid = Grid(cuts, owners)
    if grid.shape != shape or not all(shape):
        raise fields.fail("cuts")
    if grid.owned != len(grid):
        raise fields.fail("owners")
    return grid


def _is_owner(value: Any, files: int) -> bool:
    """Whether this is the number of a file, or [first, count, step] of such numbers."""
    match value:
        case [int(first), int(count), int(step)] if not any(isinstance(number, bool) for number in value):
            last = first + (count - 1) * step
            return 0 < count < LARGEST and 0 <= first < files and 0 <= last < files
    return type(value) is int and 0 <= value < files


def _read_boxes(fields: Fields, shape: Shape, files: int) -> Layout:
    dims = len(shape)
    boxes: list[tuple[int, Shape, Shape]] = []
    for box in fields.get("boxes", list):
        match box:
            case [int(file), offsets, sizes] if _counts(offsets, dims) and _counts(sizes, dims) and all(sizes):
                inside = all(at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True))
                if inside and _is_owner(file, files):
                    boxes.append((file, tuple(offsets), tuple(sizes)))
                    continue
        raise fields.fail("boxes")
    if len({offsets for _, offsets, _ in boxes}) != len(boxes):
        raise fields.fail("boxes")
    pickled = fields.optional("pickled", list)
    if pickled is None:
        return Listed(boxes)
    if len(pickled) != len(boxes) or not all(place is None or _counts(place, 2) for place in pickled):
        raise fields.fail("pickled")
    return Listed(
        boxes,
        {
            offsets: (place[0], place[1])
            for (_, offsets, _), place in zip(boxes, pickled, strict=True)
            if place is not None
        },
    )


SliceKey = tuple[str, tuple[int, ...]]
"""The name of a tensor in the state dict of all ranks, and the offsets of a part of it."""


def slices_of(manifest: Manifest) -> dict[SliceKey, TensorRecord]:
    """The tensors of a container that are slices, by what they are slices of; none in most containers."""
    return {(piece.name, tuple(piece.offsets)): manifest.tensors[piece.tensor] for piece in manifest.slices}
