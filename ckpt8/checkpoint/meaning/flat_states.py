"""The state of an optimizer in a flat file: every tensor under a path that names its parameter and its key.

    state.0.exp_avg   layer.weight.exp_avg   exp_avg.layer.weight   optimizer/state/0/exp_avg_sq

The key is one component of the path, and the rest of the path is its owner. It counts where it is the last component
after a dot, where the owner has another moment of the same shape, or where a weight with the name of the owner has it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.optim.known_optimizers import MOMENT_SLOTS, STATE_ROLES

Shape = tuple[int, ...]

_SEPARATOR = re.compile(r"[./]")
_MOST_COMPONENTS = 32
"""Of a longer path the rest counts as one component."""

_STEP = "step"


class FlatKey(NamedTuple):
    """What a tensor of the state is: the ``key`` of the parameter ``owner``."""

    owner: str
    key: str


def flat_states(tensors: Mapping[str, TensorRef]) -> dict[str, FlatKey]:
    """The tensors that are state of a parameter, by name; empty where none is."""
    keys = {*STATE_ROLES, _STEP}
    found: dict[str, FlatKey] = {}
    shown: set[str] = set()
    shapes: dict[str, Counter[Shape]] = defaultdict(Counter)
    for name, ref in tensors.items():
        parts = _SEPARATOR.split(name, _MOST_COMPONENTS)
        if len(parts) == 1 or keys.isdisjoint(parts):
            continue
        places = [k for k, part in enumerate(parts) if part in keys]
        if len(places) != 1:
            continue
        (k,) = places
        found[name] = key = FlatKey(".".join(parts[:k] + parts[k + 1 :]), parts[k])
        if key.key in MOMENT_SLOTS:
            shapes[key.owner][ref.shape] += 1
            if name.endswith(f".{key.key}"):
                shown.add(key.owner)
    if not shapes:
        return {}
    weights = _Named((name, ref) for name, ref in tensors.items() if name not in found)
    for owner, counts in shapes.items():
        if max(counts.values()) > 1 or any(map(partial(weights.has, owner), counts)):
            shown.add(owner)
    return {name: key for name, key in found.items() if key.owner in shown}


def flat_weights(tensors: Mapping[str, TensorRef], states: Mapping[str, FlatKey]) -> set[str]:
    """The names of the tensors beside the state that have the name and the shape of an owner."""
    owners = _Named((key.owner, tensors[name]) for name, key in states.items() if key.key in MOMENT_SLOTS)
    return {name for name, ref in tensors.items() if name not in states and owners.has(name, ref.shape)}


class _Named:
    """Tensors by name: two names mean the same where one is the end of the other."""

    def __init__(self, tensors: Iterable[tuple[str, TensorRef]]) -> None:
        self._whole: dict[str, set[Shape]] = defaultdict(set)
        self._ends: dict[str, set[Shape]] = defaultdict(set)
        for name, ref in tensors:
            ends = list(_ends(name))
            self._whole[ends[0]].add(ref.shape)
            for end in ends:
                self._ends[end].add(ref.shape)

    def has(self, name: str, shape: Shape) -> bool:
        """Whether there is a tensor of this name and shape."""
        ends = list(_ends(name))
        return shape in self._ends.get(ends[0], ()) or any(shape in self._whole.get(end, ()) for end in ends)


def _ends(name: str) -> Iterator[str]:
    """The name with dots between its components, and all its ends."""
    parts = _SEPARATOR.split(name, _MOST_COMPONENTS)
    return (".".join(parts[k:]) for k in range(len(parts)))
