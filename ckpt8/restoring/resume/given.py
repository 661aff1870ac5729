"""What the caller of resume gave: one live object, or several as a list, a tuple or a dict; and the paths for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt8.core.arguments import described
from ckpt8.core.errors import UsageError
from ckpt8.restoring.resume.state_checks import unwrapped

T = TypeVar("T")

Paths = str | Sequence[str | None] | Mapping[str, str | None] | None
"""Paths in the tree: one, or as many as there are objects, in their order or under their keys."""

_FSDP = "FullyShardedDataParallel"
_SHARDED = frozenset({_FSDP, "DTensor", "FlatParameter", "ShardedTensor"})
"""Classes of torch, by name, of what a process has only a part of."""


@dataclass(frozen=True, slots=True)
class Given(Generic[T]):
    """The ``objects`` of one argument, which is called ``what``, with the path that was given for each.

    ``keys`` are those of a dict. ``labels`` are what messages call them. ``many`` is false for an object alone.
    """

    what: str
    objects: list[T]
    labels: list[str]
    at: list[str | None]
    many: bool = False
    keys: list[str] | None = None


def given_models(value: Any, at: Paths) -> Given[nn.Module]:
    """The models of an argument. Raises UsageError for anything that is none."""
    return _given("model", value, at, _check_model, lambda model: {id(each) for each in _tensors(model)} or {id(model)})


def given_optimizers(value: Any, at: Paths) -> Given[Optimizer]:
    """The optimizers of an argument. Raises UsageError for anything that is none."""
    return _given("optimizer", value, at, _check_optimizer, lambda optimizer: {id(unwrapped(optimizer))})


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _given(
    what: str, value: Any, at: Paths, check: Callable[[str, Any], None], parts: Callable[[Any], set[int]]
) -> Given[Any]:
    if value is None:
        if at is not None:
            raise UsageError(f"resume: {what}_at is given, and {what} is not")
        return Given(what, [], [], [])
    if not isinstance(value, (list, tuple, Mapping)):
        check(what, value)
        if at is not None and not isinstance(at, str):
            raise UsageError(f"resume: {what}_at is {described(at)}; give one path in the tree, as text")
        return Given(what, [value], [what], [at])
    keys = list(value) if isinstance(value, Mapping) else None
    objects = list(value.values()) if isinstance(value, Mapping) else list(value)
    if keys is not None and (_is_state_dict(keys, objects) or not all(isinstance(key, str) for key in keys)):
        kind = "a state dict" if _is_state_dict(keys, objects) else "a dict whose keys are no texts"
        raise UsageError(f"resume: {what} is {kind}; give the live {what} itself, or a dict of several by name")
    if not objects:
        raise UsageError(f"resume: {what} is an empty {type(value).__name__}; leave it out, or give a {what}")
    labels = [f"{what}[{key!r}]" for key in (keys or range(len(objects)))]
    for label, each in zip(labels, objects, strict=True):
        check(label, each)
    owned = [parts(each) for each in objects]
    for place, mine in enumerate(owned):
        if mine in owned[:place]:
            raise UsageError(
                f"resume: {labels[owned.index(mine)]} and {labels[place]} are the same {what}; give it once"
            )
    return Given(what, objects, labels, _paths(what, at, keys, len(objects)), True, keys)


def _paths(what: str, at: Any, keys: list[str] | None, count: int) -> list[str | None]:
    """The path for each of several objects. Raises UsageError."""
    if at is None:
        return [None] * count
    found: Any = None
    if keys is not None and isinstance(at, Mapping) and at.keys() <= set(keys):
        found = [at.get(key) for key in keys]
    elif keys is None and isinstance(at, (list, tuple)) and len(at) == count:
        found = list(at)
    if found is None or not all(path is None or isinstance(path, str) for path in found):
        form = f"a list of {count} paths" if keys is None else "a dict of paths under the same keys"
        raise UsageError(f"resume: {what}_at is {described(at)}; give {form}, as {what} is")
    return cast("list[str | None]", found)


def _is_state_dict(keys: Sequence[Any], values: Sequence[Any]) -> bool:
    return {"state", "param_groups"} <= set(keys) or (
        bool(values) and all(isinstance(each, torch.Tensor) for each in values)
    )


def _check_model(label: str, value: Any) -> None:
    if not isinstance(value, nn.Module):
        raise UsageError(f"resume: {label} is {described(value)}; give a torch.nn.Module, or a list or dict of several")
    wrapped = any(type(each).__name__ == _FSDP for each in value.modules())
    _refuse_sharded(label, [_FSDP] if wrapped else [type(each).__name__ for each in _tensors(value)])


def _check_optimizer(label: str, value: Any) -> None:
    takes_state = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    if isinstance(value, (type, nn.Module)) or not (isinstance(value, Optimizer) or takes_state):
        raise UsageError(
            f"resume: {label} is {described(value)}; give an optimizer of torch, or a list or dict of several"
        )
    groups = getattr(value, "param_groups", None) or ()
    _refuse_sharded(label, (type(each).__name__ for group in groups for each in group["params"]))


def _refuse_sharded(label: str, kinds: Iterable[str]) -> None:
    """Raise UsageError where one of the tensors, or the module around them, is a part of what several ranks have."""
    found = next((kind for kind in kinds if kind in _SHARDED), None)
    if found is not None:
        raise UsageError(
            f"resume: {label} is shared by several processes ({found}), and resume fills what one process has whole; "
            "load a packed directory with torch.distributed.checkpoint.load and Ckpt8StorageReader, then "
            "set_state_dict"
        )
