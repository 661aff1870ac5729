"""Makes the state dict for a distributed checkpoint, with the names of torch's get_state_dict.

model.<name>, optimizer.state.<name>.<key>, optimizer.param_groups.<number>.<option>, and all else in the tree as it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt8.checkpoint.meaning.names_from_weights import parameter_names
from ckpt8.checkpoint.meaning.pairing import saved_names, saved_parameters
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.walk import Components, iter_nodes
from ckpt8.converting.choice import choose_model, choose_optimizer
from ckpt8.converting.request import Report
from ckpt8.converting.weights import WeightTypes, strip_wrappers
from ckpt8.core.errors import UsageError

_MODEL, _OPTIMIZER = "model", "optimizer"
_UNKNOWN = "the optimizer has no names, and they do not follow from the order of the model"


def distributed_tree(data: Composite, key: str | None, types: WeightTypes, report: Report) -> dict[str, Any]:
    """The state dict; with a ``key`` only the model at that path.

    Raises UsageError for several models or optimizers, and for a parameter without a known name.
    """
    model = choose_model(data, key)
    plain = strip_wrappers((str(name) for name in model.node), report)
    weights = {
        plain[str(name)]: types(str(name), value) if isinstance(value, TensorRef) else value
        for name, value in model.node.items()
    }
    if key is not None:
        return {_MODEL: weights}
    optimizer = choose_optimizer(data)
    tree: dict[str, Any] = {_MODEL: weights}
    if optimizer is not None:
        tree[_OPTIMIZER] = _named(data, model, optimizer, plain, report)
    used = {id(each.value) for each in (model, optimizer) if each is not None}
    others = _without(data.tree, [path for path, node in iter_nodes(data.tree, data.label) if id(node) in used])
    named = others if isinstance(others, dict) else dict(enumerate(others or ()))
    for name, value in named.items():
        if name in tree:
            report.dropped.append(f"{name}: the format needs this name for the model or the optimizer")
        else:
            tree[str(name)] = value
    return tree


def _without(node: Any, paths: Sequence[Components]) -> Any:
    """A copy of a dictionary or list without the values at ``paths``, and without what becomes empty; else None."""
    if () in paths or not isinstance(node, (dict, list)):
        return None
    kept = []
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        below = [path[1:] for path in paths if path[0] == str(name)]
        left = _without(value, below) if below else value
        if left or not below:
            kept.append((name, left))
    return dict(kept) if isinstance(node, dict) else [value for _, value in kept]


def _named(
    data: Composite, model: Candidate, optimizer: Candidate, plain: Mapping[str, str], report: Report
) -> dict[str, Any]:
    """The optimizer with names of parameters in place of numbers."""
    names = _names(model, optimizer, plain)
    before = optimizer.node["state"]
    states: dict[str, Any] = {}
    groups = []
    for group in optimizer.node["param_groups"]:
        listed = []
        for identifier in group["params"]:
            name, state = names.get(identifier), before.get(identifier)
            if name is None and state:
                raise UsageError(
                    f"{data.label}: {optimizer.path}: parameter {identifier} cannot be named, which this format needs: "
                    f"{_UNKNOWN}; --key {model.path} writes the model alone"
                )
            if name is None:
                report.dropped.append(f"{optimizer.path}: parameter {identifier}: has neither a name nor a state")
                continue
            listed.append(name)
            if state:
                states[name] = state
        groups.append({**group, "params": listed, "param_names": list(listed)})
    return {"state": states, "param_groups": groups} | {
        key: value for key, value in optimizer.node.items() if key not in ("state", "param_groups")
    }


def _names(model: Candidate, optimizer: Candidate, plain: Mapping[str, str]) -> dict[int | str, str]:
    """The names of parameters by identifier: those of the model, or the optimizer's own where the model lacks them."""
    given = saved_names(optimizer.node["param_groups"])
    if isinstance(given, dict) and given:
        found = match(model.node, given.values())
        return {each: plain.get(found.get(name, name), name) for each, name in given.items()}
    tree = {_MODEL: model.node, _OPTIMIZER: optimizer.node}
    names = parameter_names(tree)
    return {each.identifier: plain[names[each.name]] for each in saved_parameters(tree) if each.name in names}
