"""Which entries of a checkpoint can be the state of a model, and which that of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt8.readers.base import Inert
from ckpt8.readers.walk import Components, format_path, iter_nodes
from ckpt8.roles import MODEL_KEYS, is_bare_state_dict, is_optimizer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A dictionary of the tree. ``path`` is its keys joined by dots, ``(top level)`` for the tree itself."""

    path: str
    node: dict[Any, Any]


TOP_LEVEL = "(top level)"


def find(tree: object) -> tuple[list[Candidate], list[Candidate]]:
    """Model state dicts and optimizer state dicts in the order of the document."""
    models: list[Candidate] = []
    optimizers: list[Candidate] = []
    found: Components | None = None
    for path, node in iter_nodes(tree):
        if found is not None and len(path) > len(found) and path[: len(found)] == found:
            continue  # inside of what was found last
        if is_optimizer(node):
            found = path
            optimizers.append(Candidate(format_path(path) or TOP_LEVEL, node))
        elif isinstance(node, Inert):
            found = path  # what a pickled object holds has no names of its own
        elif is_bare_state_dict(node) and (not path or path[-1] in MODEL_KEYS):
            found = path
            models.append(Candidate(format_path(path) or TOP_LEVEL, node))
    return models, optimizers


def holds_module(tree: object) -> bool:
    """Whether a module was pickled whole, which is not a state dict."""
    for _, node in iter_nodes(tree):
        if isinstance(node, Inert) and isinstance(node.state, dict) and "_parameters" in node.state:
            return True
    return False
