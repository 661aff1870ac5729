"""Chooses what to convert of a source: a model, and its optimizer."""

from __future__ import annotations

from ckpt8.checkpoint.meaning.nodes import is_bare_state_dict
from ckpt8.checkpoint.meaning.pairing import saved_names
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.walk import format_path, iter_nodes
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import listed

_LISTED = 20


def choose_model(data: Composite, key: str | None) -> Candidate:
    """The state dict of the model, or with a ``key`` the dictionary of tensors at that path.

    Raises UsageError that lists the models.
    """
    models, _ = find(data.tree)
    paths = listed((model.path for model in models), _LISTED)
    if key is not None:
        found = [model for model in models if model.path == key] or [
            Candidate(key, node)
            for path, node in iter_nodes(data.tree)
            if isinstance(node, dict) and format_path(path) == key and is_bare_state_dict(node)
        ]
        if found:
            return found[0]
        what = paths or "no state dict of a model"
        raise UsageError(f"{data.label}: --key {key!r} leads to no dictionary of tensors; there is {what}")
    if len(models) == 1:
        return models[0]
    if models:
        raise UsageError(f"{data.label}: holds {len(models)} models; choose one with --key: {paths}")
    raise UsageError(f"{data.label}: holds no state dict of a model")


def choose_optimizer(data: Composite) -> Candidate | None:
    """The only optimizer, or None. Raises UsageError where there are several, InputError for a malformed one."""
    _, optimizers = find(data.tree)
    if len(optimizers) > 1:
        paths = listed((optimizer.path for optimizer in optimizers), _LISTED)
        raise UsageError(f"{data.label}: holds {len(optimizers)} optimizers ({paths}), and this format takes one")
    for optimizer in optimizers:
        check_optimizer(data.label, optimizer)
    return optimizers[0] if optimizers else None


def check_optimizer(label: str, optimizer: Candidate) -> None:
    """Raise InputError unless its groups list each parameter once, and every state is a dictionary."""
    groups, states = optimizer.node["param_groups"], optimizer.node["state"]
    if not all(isinstance(each, dict) for each in (*groups, *states.values())):
        raise InputError(f"{label}: {optimizer.path}: a group or a state of its optimizer is not a dictionary")
    if isinstance(names := saved_names(groups), str):
        raise InputError(f"{label}: {optimizer.path}: {names}")


def model_tensors(model: Candidate) -> dict[str, TensorRef]:
    """The tensors of a state dict by name."""
    return {name: value for name, value in model.node.items() if isinstance(value, TensorRef)}
