"""Weights that several models of a checkpoint have, such as a model and its average.

Two models hold the same weights if all names and shapes of one are in the other, components that wrappers add aside.
Parts of a model count as models: a module may hold its average. A list of tensors has the weights of a model if its
shapes are those of the model, one after the other. Values are never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from ckpt8.checkpoint.meaning.nodes import Inside, is_optimizer
from ckpt8.checkpoint.meaning.pairing import parts_of
from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.state_dicts import evident_weights, find_all, untied, weights_of
from ckpt8.checkpoint.tree import TensorRef, iter_nodes
from ckpt8.checkpoint.vocabulary import is_average
from ckpt8.core.tensors import SMALL_NUMEL

_MOST = 32
"""Of more models the first count: each is compared with every other."""


@dataclass(frozen=True, slots=True)
class _Model:
    """Weights by what their names do not share; a ``part`` of a model, maybe one whose key names an average."""

    weights: Mapping[str, TensorRef]
    part: bool
    average: bool

    @property
    def form(self) -> set[tuple[str, tuple[int, ...]]]:
        """Names and shapes."""
        return {(name, ref.shape) for name, ref in self.weights.items()}


def twins(trees: Sequence[object]) -> Iterator[tuple[TensorRef, TensorRef]]:
    """Every weight of a model with the same one of another, both ways, from the trees of files that belong together."""
    models = [model for model in _models(trees) if sum(ref.numel for ref in model.weights.values()) >= SMALL_NUMEL]
    forms = [model.form for model in models[:_MOST]]
    for (one, form), (other, its) in permutations(zip(models, forms, strict=False), 2):
        # Layers are parts as well, and alike.
        if (form <= its or its < form) and not (one.part and other.part and one.average == other.average):
            yield from ((ref, other.weights[name]) for name, ref in one.weights.items() if name in other.weights)
    for line in _lists(trees):
        for model in models[:_MOST]:
            own = list(untied(model.weights).values())
            if [ref.shape for ref in own] == [ref.shape for ref in line]:
                yield from (pair for both in zip(own, line, strict=True) for pair in (both, both[::-1]))


def _models(trees: Sequence[object]) -> Iterator[_Model]:
    """All models, then the parts of those that hold an average."""
    evident = evident_weights(*trees)
    models = [model for tree in trees for kind in find_all(tree, evident)[:2] for model in kind]
    for model in models:
        yield _Model(_without_prefix(weights_of(model.node)), False, is_average(model.path))
    for model in models:
        parts = [(part, is_average(part.path.rpartition(".")[2])) for part in parts_of(model)]
        if any(average for _, average in parts):
            yield from (_Model(_without_prefix(weights_of(part.node)), True, average) for part, average in parts)


def _without_prefix(weights: Mapping[Any, TensorRef]) -> dict[str, TensorRef]:
    """The weights by their names without wrappers, and without the components that all names begin with.

    Numbers among them, such as the counters of averages, are left out.
    """
    weights = {name: ref for name, ref in weights.items() if ref.shape}
    plain = plain_names(map(str, weights))
    parts = {name: plain[str(name)].split(".") for name in weights}
    shared = 0
    for level in zip(*(part[:-1] for part in parts.values()), strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return {".".join(part[shared:]): weights[name] for name, part in parts.items()}


def _lists(trees: Sequence[object]) -> Iterator[Sequence[TensorRef]]:
    """Lists of nothing but tensors that no optimizer holds."""
    for tree in trees:
        optimizer = Inside()
        for path, node in iter_nodes(tree):
            if optimizer.holds(path):
                continue
            if is_optimizer(node):
                optimizer.enter(path)
            elif isinstance(node, (list, tuple)) and len(node) > 1 and all(isinstance(x, TensorRef) for x in node):
                yield node
