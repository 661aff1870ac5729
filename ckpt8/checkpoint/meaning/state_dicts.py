"""Finds the entries of a checkpoint that can be the state dict of a model or of an optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ckpt8.checkpoint.meaning.live_objects import find_live_objects
from ckpt8.checkpoint.meaning.nodes import Inside, is_bare_state_dict, is_optimizer
from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.weight_evidence import evident_weights, weights_of
from ckpt8.checkpoint.tree import Inert
from ckpt8.checkpoint.vocabulary import MODEL_KEYS, is_average
from ckpt8.checkpoint.walk import format_path, iter_leaves


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A dictionary of the tree. ``path`` are its keys joined by dots, ``(top level)`` for the tree itself.

    ``origin`` is the pickled object whose state dict ``node`` is, None for a dictionary that is in the tree.
    ``numbered``: its keys are places in lists, which are no names of parameters. ``whole`` is the path of the
    dictionary of which this is a part.
    """

    path: str
    node: dict[Any, Any]
    origin: Inert | None = None
    numbered: bool = False
    whole: str | None = None

    @property
    def value(self) -> Any:
        """What is in the tree."""
        return self.node if self.origin is None else self.origin

    @property
    def before_names(self) -> str:
        """The path that the keys of ``node`` complete: a part of a dictionary has the keys of the whole."""
        return self.path if self.whole is None else self.whole

    @property
    def home(self) -> str:
        """The path of the container that holds it."""
        return self.path.rpartition(".")[0]


TOP_LEVEL = "(top level)"


def find(tree: object, evident: Set[int] = frozenset()) -> tuple[list[Candidate], list[Candidate]]:
    """Model state dicts and optimizer state dicts in the order of the document.

    A model has a key that names one, or ``weight_evidence`` shows it. Copies of models under other keys do not count,
    unless there are several optimizers, and no key names an average. ``evident`` are the weights that other files of a
    directory show, see ``evident_weights``.
    """
    models, copies, optimizers = find_all(tree, evident)
    return models + [each for each in copies if len(optimizers) > 1 and not is_average(each.path)], optimizers


def find_all(tree: object, evident: Set[int] = frozenset()) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
    """As ``find``: the models, their copies under keys that name no model, and the optimizers."""
    found, others, optimizers = _find_every(tree)
    weights = evident_weights(tree) | evident if others else set()
    unknown = {
        each for each, model in others.items() if not weights.issuperset(map(id, weights_of(model.node).values()))
    }
    forms = {_form(each) for each in found if id(each) not in others} if others else set()
    copies = [each for each in others.values() if id(each) not in unknown and _form(each) in forms]
    unknown.update(map(id, copies))
    return [each for each in found if id(each) not in unknown], copies, optimizers


def find_trees(tree: object) -> list[Candidate]:
    """All dictionaries of nothing but tensors, and modules, that are not part of an optimizer, weights or not."""
    return _find_every(tree)[0]


def _find_every(tree: object) -> tuple[list[Candidate], dict[int, Candidate], list[Candidate]]:
    """Trees of tensors, those of them under a key that names no model by ``id``, and optimizers."""
    found: list[Candidate] = []
    others: dict[int, Candidate] = {}
    optimizers: list[Candidate] = []
    entry, inert = Inside(), Inside()
    live = find_live_objects(tree)
    for path, node in live.containers(tree):
        if entry.holds(path) or (inert.holds(path) and id(node) not in live.origins):
            continue
        if is_optimizer(node):
            entry.enter(path)
            optimizers.append(Candidate(format_path(path) or TOP_LEVEL, node, live.origins.get(id(node))))
        elif isinstance(node, Inert):
            inert.enter(path)  # the content of a pickled object has no names of its own
        elif is_bare_state_dict(node):
            entry.enter(path)
            found.append(Candidate(format_path(path) or TOP_LEVEL, node, live.origins.get(id(node))))
            if path and path[-1] not in MODEL_KEYS and id(node) not in live.modules:
                others[id(found[-1])] = found[-1]
    return found, others, optimizers


def find_loose(tree: object, taken: Iterable[Candidate]) -> list[Candidate]:
    """Weights by evidence that are no state dict, by the first key: a list, a tree of dicts, entries among others.

    ``taken`` are the models and optimizers of the tree.
    """
    known = {id(value) for each in taken for value in each.node.values()}
    weights = evident_weights(tree) - known
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    named: set[str] = set()
    for path, leaf in iter_leaves(tree):
        if id(leaf) in weights:
            key, *rest = path if len(path) > 1 else ("", *path)
            numbered = all(map(str.isdecimal, rest))
            found[key].setdefault(".".join(path if numbered else rest), leaf)
            if not path[-1].isdecimal():
                named.add(key)
    return [Candidate(key or TOP_LEVEL, node, numbered=key not in named) for key, node in found.items()]


def _form(model: Candidate) -> frozenset[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a model's weights."""
    weights = weights_of(model.node)
    plain = plain_names(weights)
    return frozenset((plain[name], ref.shape) for name, ref in weights.items())


CHECKS = "weight_checks"
"""Key of a group of ckpt8.optim: the ``weight_check`` of each parameter, None without a residual or master."""


def weight_checks(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """The checks of 16-bit weights in a group of ckpt8.optim, by identifier; empty where there are none."""
    checks = saved.get(CHECKS)
    return dict(zip(saved["params"], checks, strict=False)) if isinstance(checks, list) else {}


def is_packed_group(saved: Mapping[Any, Any]) -> bool:
    """Whether an optimizer of ``ckpt8.optim`` saved a group."""
    return {"rule", "master", "moment1", "moment2"} <= saved.keys()
