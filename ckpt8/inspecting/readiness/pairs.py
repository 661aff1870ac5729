"""Pairs each tensor of a checkpoint with its counterpart in a compressed, restored or converted copy.

Tensors of equal names are pairs. But a conversion moves tensors: files of a directory become one file, a nested state
dict a flat one, and moments by number become moments by name. So two other tensors are a pair if the label of one is
the end, by whole components, of the label of the other, and of no second label. Shapes must be equal, those of slices
too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ckpt8.inspecting.readiness.tensor_source import SourceTensor

Components = tuple[str, ...]


def pair_tensors(
    mine: Sequence[SourceTensor], theirs: Sequence[SourceTensor]
) -> list[tuple[SourceTensor, SourceTensor]]:
    """The pairs, in the order of ``mine``."""
    by_name = {(each.name, each.role): each for each in theirs}
    equal = {each.name: by_name[each.name, each.role] for each in mine if (each.name, each.role) in by_name}
    taken = {each.name for each in equal.values()}
    loose = _by_end(
        [each for each in mine if each.name not in equal], [each for each in theirs if each.name not in taken]
    )
    found = [(each, equal.get(each.name) or loose.get(each.name)) for each in mine]
    return [(one, other) for one, other in found if other is not None and _shapes(one) == _shapes(other)]


def _shapes(tensor: SourceTensor) -> list[tuple[int, ...]]:
    """The shapes of its slices: if two tensors have the same, their elements are in the same order."""
    return [ref.shape for ref in tensor.pieces]


def _by_end(mine: Sequence[SourceTensor], theirs: Sequence[SourceTensor]) -> dict[str, SourceTensor]:
    """By name of mine, the only one of theirs such that the label of one is the end of the label of the other."""
    forward, backward = _longer(mine, theirs), _longer(theirs, mine)
    found: dict[str, list[SourceTensor]] = defaultdict(list)
    owners: dict[str, set[str]] = defaultdict(set)
    for one, other in [*forward, *((long, short) for short, long in backward)]:
        if other not in found[one.name]:
            found[one.name].append(other)
            owners[other.name].add(one.name)
    return {name: others[0] for name, others in found.items() if len(others) == 1 and len(owners[others[0].name]) == 1}


def _longer(short: Sequence[SourceTensor], long: Sequence[SourceTensor]) -> list[tuple[SourceTensor, SourceTensor]]:
    """Pairs such that the label of the first is the end of the label of the second."""
    ends: dict[tuple[Components, object], list[SourceTensor]] = defaultdict(list)
    for each in long:
        parts = _components(each.label)
        for start in range(len(parts)):
            ends[parts[start:], each.role].append(each)
    return [(each, other) for each in short for other in ends.get((_components(each.label), each.role), ())]


def _components(label: str) -> Components:
    return tuple(label.replace(":", ".").split("."))
