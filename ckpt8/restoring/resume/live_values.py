"""Builds values for live objects: plain ones, tensors, tensors of classes that torch calls safe, and plain objects.

``RestBuilder`` makes an ``Inert`` of an object whose class it does not import. In a model or an optimizer that would
break a training step much later. ``unmade`` finds such objects beforehand and reads no tensor.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch

from ckpt8.checkpoint.sources.objects import RestBuilder, dtype_of, plain_object
from ckpt8.checkpoint.tree import Global, Inert, TensorRef
from ckpt8.core.errors import ResumeError
from ckpt8.optim.known_optimizers import state_objects

_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_DEQUE = "collections.deque"
_SETS = frozenset({"builtins.set", "builtins.frozenset"})
_SCALARS = frozenset({str, int, float, bool, type(None), bytes, complex})
_HOOKS = (
    *("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__setattr__", "__getattribute__"),
    *("__del__", "__slots__"),
)
"""What a class defines whose objects are more than their ``__dict__``, or run code when they come or go."""


class ValueBuilder(RestBuilder):
    """As ``RestBuilder``; also builds deques, and tensors of classes in ``torch.serialization.get_safe_globals()``.

    Packages register their tensor classes there for ``torch.load(weights_only=True)``, as torchao does for its
    optimizers. Nothing is imported here either.

    Objects that are nothing but attributes, as the projectors of GaLore are, are built without a call of their code,
    if their class is imported: those that a known optimizer keeps, and of classes that are registered as safe.
    """

    def _object(self, node: Inert) -> Any:
        if (plain := _plain_class(node)) is not None:
            empty: Any = object.__new__(plain)
            self._built[id(node)] = (node, empty)
            vars(empty).update((key, self._build(value)) for key, value in node.state.items())
            return empty
        kind = _registered_class(node)
        if kind is not None:
            return self._subclass(kind, node)
        if node.name == _DEQUE and _is_deque(node):
            made: deque[Any] = deque(maxlen=node.args[1] if node.args else None)
            self._built[id(node)] = (node, made)
            made.extend(self._items(node.items))
            return made
        return super()._object(node)

    def _subclass(self, kind: type[torch.Tensor], node: Inert) -> torch.Tensor:
        """A tensor that class ``kind`` makes of the parts in the file. Raises ResumeError where it cannot."""
        _, _, (_, dtype, shape, stride, *_), state = node.args
        parts = {key: self._build(value) for key, value in state.items()}
        try:
            frame = torch.Tensor._make_wrapper_subclass(
                kind, shape, strides=stride, dtype=dtype_of(dtype), device=torch.device("cpu")
            )
            for key, value in parts.items():
                setattr(frame, key, value)
            names, context = frame.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {name: getattr(frame, name) for name in names}
            made = kind.__tensor_unflatten__(inner, context, frame.shape, frame.stride())  # type: ignore[attr-defined]
            agrees = made.shape == frame.shape and all(_agree(vars(made)[key], parts[key]) for key in parts)
        except Exception as exc:
            raise ResumeError(f"a {_class_name(node)} cannot be made of its parts: {exc}") from exc
        if not agrees:
            raise ResumeError(f"a {_class_name(node)} does not have the parts that the file gives it")
        return made  # type: ignore[no-any-return]

    def unmade(self, node: Any) -> str | None:
        """The class or function of the first object in ``node`` that would stay ``Inert`` or ``Global``, or None."""
        pending: list[Any] = [node]
        seen: set[int] = set()
        while pending:
            each = pending.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, Global) and dtype_of(each) is each:
                return each.name
            if isinstance(each, Inert):
                if (parts := self._parts(each)) is None:
                    return _class_name(each)
                pending += parts
            elif isinstance(each, dict):
                pending += [*each.keys(), *each.values()]
            elif isinstance(each, (list, tuple)):
                pending += each
        return None

    @staticmethod
    def _parts(node: Inert) -> list[Any] | None:
        """The parts of an object to make, or None for one that resume does not make."""
        if _plain_class(node) is not None:
            return list(node.state.values())
        if _registered_class(node) is not None:
            return list(node.args[3].values())
        if node.name == _DEQUE and _is_deque(node):
            return node.items
        if node.name in _SETS:
            return [] if all(type(item) in _SCALARS for item in node.items) else None
        return None if plain_object(node) is None else []


def is_plain(value: Any) -> bool:
    """Whether a value of a saved state is a tensor, a number, a text or None."""
    return isinstance(value, TensorRef) or type(value) in _SCALARS


def _plain_class(node: Inert) -> type | None:
    """The class of an object that is nothing but attributes, if it may be built and is imported; else None."""
    module, _, name = node.name.rpartition(".")
    is_known = node.name in state_objects() and module in sys.modules
    kind = vars(sys.modules[module]).get(name) if is_known else _registered().get(node.name)
    if type(kind) is not type or any(getattr(kind, hook, None) is not getattr(object, hook, None) for hook in _HOOKS):
        return None
    has_attributes = isinstance(node.state, dict) and all(type(key) is str for key in node.state)
    return kind if has_attributes and not (node.args or node.items or node.pairs) else None


def _is_deque(node: Inert) -> bool:
    if not node.args:
        return True
    length = node.args[1] if len(node.args) == 2 else False
    return length is None or (type(length) is int and 0 <= length <= sys.maxsize)


def _registered_class(node: Inert) -> type[torch.Tensor] | None:
    """The class of a pickled tensor subclass, if it is registered with torch as safe."""
    if node.name != _SUBCLASS or len(node.args) != 4:
        return None
    function, kind, arguments, state = node.args
    if not (isinstance(function, Global) and isinstance(kind, Global) and function.name == _WRAPPER):
        return None
    if not (isinstance(arguments, tuple) and len(arguments) >= 4 and isinstance(state, dict)):
        return None
    plain = all(isinstance(value, TensorRef) or _is_setting(value) for value in state.values())
    if not (plain and _is_shape(arguments[2]) and _is_shape(arguments[3]) and isinstance(arguments[1], Global)):
        return None
    found = _registered().get(kind.name)
    is_tensor = found is not None and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")
    return found if is_tensor else None


def _registered() -> dict[str, type]:
    """The classes that are registered with torch as safe, by name."""
    found = {}
    for entry in torch.serialization.get_safe_globals():
        kind, name = entry if isinstance(entry, tuple) else (entry, None)
        if isinstance(kind, type):
            found[name or f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


def _is_setting(value: Any) -> bool:
    return type(value) in _SCALARS or (isinstance(value, tuple) and all(type(part) in _SCALARS for part in value))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(size) is int for size in value)


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return bool(one == other)


def _class_name(node: Inert) -> str:
    """The class of an object; for a tensor subclass that class, not the function that rebuilds it."""
    kinds = [arg for arg in node.args[:2] if isinstance(arg, Global)]
    return kinds[-1].name if node.name.startswith("torch._tensor._rebuild") and kinds else node.name
