"""``diff``: opens both sources, matches what is in them, and compares it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.roles import unique_name
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.checkpoint.walk import format_path, iter_nodes
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.diff.change import Change
from ckpt8.inspecting.diff.leaves import Found, Tensor, Value, collect
from ckpt8.inspecting.diff.naming import align, naming
from ckpt8.inspecting.diff.pairs import OPAQUE, compare, make_pair
from ckpt8.inspecting.diff.result import Difference, TensorDifference, ValueDifference
from ckpt8.inspecting.diff.sides import Side, make_sides
from ckpt8.inspecting.diff.values import Equality, Leaves
from ckpt8.inspecting.survey.origin import read_json

_BLOCK = 8 << 20


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Difference:
    """Compare two checkpoints: files or directories of any format that ckpt8 reads, or ``.ckpt8`` of them.

    Tensors and other values are matched by their paths. Models and optimizers at different paths, or with other names
    of parameters, are matched by the names that the readers establish. All elements that both have are read, a block
    at a time. Links, empty directories and the metadata in a safetensors header are not compared. ``progress`` is
    called with numbers of bytes that were read. Raises InputError for a source that is damaged, holds no checkpoint, or
    cannot be put together as the other one is.

    >>> ckpt8.diff("run.pt", "run.ckpt8").identical
    False
    """
    with (
        open_source(Path(a), threads=threads) as first,
        open_source(Path(b), threads=threads) as second,
        Workers(threads) as workers,
    ):
        sides = make_sides(first, second)
        names = naming(sides[0]), naming(sides[1])
        found = Difference(sides[0].facts(), sides[1].facts(), notes=align(*names))
        found.notes += [f"{which}: {note}" for which, side in zip("AB", sides, strict=True) for note in side.notes]
        # A tree that was put together always has param_names, also where its files do not.
        listed = not any(part.is_assembled for side in sides for part in side.parts)
        mine, theirs = (collect(*each, param_names=listed) for each in zip(sides, names, strict=True))
        _match_values(found, mine, theirs)
        _compare_files(found, sides[0], sides[1], progress)
        _compare_tensors(found, mine, theirs, workers, progress)
        for side in sides:
            side.check_unchanged()
        return found


def _match_values(found: Difference, mine: Found, theirs: Found) -> None:
    same = Equality()
    for name, value in mine.values.items():
        other = theirs.values.get(name)
        if other is None:
            found.values_only_a.append((value.name, value.value))
        elif same(value.value, other.value):
            found.equal_values += 1
        else:
            found.values.append(ValueDifference(value.name, value.value, other.value))
    found.values_only_b += [(each.name, each.value) for name, each in theirs.values.items() if name not in mine.values]


def _compare_tensors(found: Difference, mine: Found, theirs: Found, workers: Workers, progress: Progress) -> None:
    both = [(tensor, theirs.tensors[name]) for name, tensor in mine.tensors.items() if name in theirs.tensors]
    found.tensors_only_a = [each for name, each in mine.tensors.items() if name not in theirs.tensors]
    found.tensors_only_b = [each for name, each in theirs.tensors.items() if name not in mine.tensors]
    pairs = {k: make_pair(a, b) for k, (a, b) in enumerate(both) if _comparable(a, b)}
    changes: dict[int, Change] = dict(zip(pairs, compare(list(pairs.values()), workers, progress), strict=True))
    for k, (a, b) in enumerate(both):
        change = changes.get(k)
        values = _numbers(a, b) if change is not None and change.differ and change.elements == 1 else None
        found.tensors.append(TensorDifference(a, b, change, values))
    found.notes += [
        f"{(a if a.tied else b).name} is tied to {a.tied or b.tied} in {'A' if a.tied else 'B'} only"
        for a, b in both
        if (a.tied is None) != (b.tied is None)
    ]


def _comparable(a: Tensor, b: Tensor) -> bool:
    kinds = {a.ref.dtype, b.ref.dtype}
    return a.ref.shape == b.ref.shape and (len(kinds) == 1 or not kinds & OPAQUE)


def _numbers(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """The values of two tensors of one element, such as steps."""
    data = a.part.data, b.part.data
    first = read_scalar(data[0], data[0].storage(a.ref.key), a.ref)
    second = read_scalar(data[1], data[1].storage(b.ref.key), b.ref)
    return None if first is None or second is None else (first, second)


def _compare_files(found: Difference, a: Side, b: Side, progress: Progress) -> None:
    for path, file in a.files.items():
        other = b.files.get(path)
        if other is None:
            found.files_only_a.append(path)
        elif _same_bytes(file, other, progress):
            found.equal_files += 1
        else:
            trees = [read_json(each) if path.endswith(".json") else None for each in (file, other)]
            if None in trees:
                found.files.append(path)
            else:
                _compare_json(found, path, *trees)
    found.files_only_b = [path for path in b.files if path not in a.files]


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


def _compare_json(found: Difference, path: str, a: Any, b: Any) -> None:
    """Add the values of two files of JSON as those of trees."""
    sides = (Found(), Found())
    for side, tree in zip(sides, (a, b), strict=True):
        is_leaf = Leaves()
        taken: dict[str, int] = {}
        for place, node in iter_nodes(tree, path, is_leaf):
            if is_leaf(node):
                name = unique_name(f"{path}:{format_path(place)}", taken)
                side.values[name] = Value(name, node)
    _match_values(found, *sides)
