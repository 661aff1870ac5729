"""``diff``: opens two sources, matches their tensors, values and files, and compares them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ckpt8.checkpoint.meaning.roles import unique_name
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.checkpoint.walk import format_path, iter_nodes
from ckpt8.core.arguments import checked
from ckpt8.core.collection import without_collection
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.diff.change import Change
from ckpt8.inspecting.diff.leaves import Found, Tensor, collect
from ckpt8.inspecting.diff.naming import align, naming
from ckpt8.inspecting.diff.pairs import OPAQUE, compare, make_pair
from ckpt8.inspecting.diff.result import Difference, TensorDifference, ValueDifference
from ckpt8.inspecting.diff.sides import Side, make_sides
from ckpt8.inspecting.diff.values import Equality, Leaves
from ckpt8.inspecting.survey.origin import read_json

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
        open_source(Path(a), threads=threads) as first,
        open_source(Path(b), threads=threads) as second,
        Workers(threads) as workers,
    ):
        sides = make_sides(first, second)
        names = naming(sides[0]), naming(sides[1])
        found = Difference(sides[0].facts(), sides[1].facts(), notes=align(*names))
        found.notes += [f"{which}: {note}" for which, side in zip("AB", sides, strict=True) for note in side.notes]
        # An assembled tree always has param_names, also where its files do not.
        listed = not any(part.checkpoint is part.data for side in sides for part in side.parts)
        mine, theirs = (collect(*each, param_names=listed) for each in zip(sides, names, strict=True))
        _match_values(found, mine, theirs)
        _compare_files(found, sides[0], sides[1], progress)
        _compare_tensors(found, mine, theirs, workers, progress)
        for side in sides:
            side.check_unchanged()
        return found


def _match_values(found: Difference, mine: Found, theirs: Found) -> None:
    same = Equality()
    both, only_a, only_b = _split(mine.values, theirs.values)
    found.values_only_a += only_a
    found.values_only_b += only_b
    changed = [ValueDifference(name, a, b) for (name, a), (_, b) in both if not same(a, b)]
    found.values += changed
    found.equal_values += len(both) - len(changed)


def _split(a: Mapping[str, V], b: Mapping[str, V]) -> tuple[list[tuple[V, V]], list[V], list[V]]:
    """The pairs of equal names, and the values of names that only ``a`` or only ``b`` has."""
    both = [(each, b[name]) for name, each in a.items() if name in b]
    return both, [a[name] for name in a if name not in b], [b[name] for name in b if name not in a]


def _compare_tensors(found: Difference, mine: Found, theirs: Found, workers: Workers, progress: Progress) -> None:
    both, found.tensors_only_a, found.tensors_only_b = _split(mine.tensors, theirs.tensors)
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
    has_numbers = OPAQUE.isdisjoint((a.ref.dtype, b.ref.dtype))
    return a.ref.shape == b.ref.shape and (a.ref.dtype is b.ref.dtype or has_numbers)


def _numbers(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """The values of two tensors of one element, such as steps; None if one of them is no number."""
    data = ((each.part.data, each.ref) for each in (a, b))
    first, second = (read_scalar(source, source.storage(ref.key), ref) for source, ref in data)
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
                _match_values(found, *(_json_values(path, tree) for tree in trees))
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


def _json_values(path: str, tree: Any) -> Found:
    """The values of a JSON file, with paths below that of the file."""
    found = Found()
    is_leaf = Leaves()
    taken: dict[str, int] = {}
    for place, node in iter_nodes(tree, path, is_leaf):
        if is_leaf(node):
            name = unique_name(f"{path}:{format_path(place)}", taken)
            found.values[name] = name, node
    return found
