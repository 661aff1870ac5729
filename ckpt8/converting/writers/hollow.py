"""The tree of a source as Python objects whose tensors have no content yet: addresses that nothing ever touches.

Only what ``torch.load(weights_only=True)`` reads is built. Everything else is left out, with a line that says where it
was and what it is.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckpt8.checkpoint.sources.composite import Composite, Held
from ckpt8.checkpoint.sources.objects import CONSUMED, RestBuilder
from ckpt8.checkpoint.tree import Global, Inert, StatefulDict, TensorRef
from ckpt8.container.frames import bytes_of
from ckpt8.core.tensors import DType

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, dict, OrderedDict, list, tuple, set})
_KEYS = frozenset({type(None), bool, int, float, str, bytes, tuple})
_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_SHOWN = 80


class HollowBuilder(RestBuilder):
    """Builds the objects. ``retype`` gives for a tensor the one that is written in its place.

    ``dropped`` are the lines about what is left out; ``keys`` the storages by address of the object that stands for
    each, ``tensors`` their number.
    """

    def __init__(self, data: Composite, retype: Callable[[TensorRef], TensorRef] = lambda ref: ref) -> None:
        super().__init__(data)
        self._makers[torch.Tensor] = self._held
        self.dropped: dict[str, None] = {}
        self.keys: dict[int, str] = {}
        self.tensors = 0
        self._data = data
        self._retype = retype
        self._path: list[str] = []

    def _build(self, node: Any) -> Any:
        built = super()._build(node)
        if built is CONSUMED or type(built) in _PLAIN or _is_torch(built):
            return built
        number = _numpy_number(built)
        if number is not None:
            return number
        self._drop(built)
        return CONSUMED

    def _drop(self, built: Any) -> None:
        of_name = isinstance(built, (Inert, Global))
        kind = built.name if of_name else f"{type(built).__module__}.{type(built).__qualname__}"
        self.dropped[f"{'.'.join(self._path)[:_SHOWN] or 'the whole'}: {kind[:_SHOWN]}"] = None

    def _items(self, nodes: Iterable[Any]) -> list[Any]:
        found = [self._below(k, node) for k, node in enumerate(nodes)]
        return [None if value is CONSUMED else value for value in found]

    def _dict(self, node: Mapping[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedDict() if isinstance(node, StatefulDict) else {}
        self._built[id(node)] = (node, made)
        for key, value in node.items():
            if type(key) not in _KEYS or (type(key) is tuple and not all(type(part) in _KEYS for part in key)):
                self._path.append("(key)")
                self._drop(key)
                self._path.pop()
                continue
            built = self._below(key, value)
            if built is not CONSUMED:
                made[key] = built
        if isinstance(node, StatefulDict) and isinstance(node.state, dict) and "_metadata" in node.state:
            metadata = self._below("_metadata", node.state["_metadata"])
            if metadata is not CONSUMED:
                made._metadata = metadata  # type: ignore[attr-defined]
        return made

    def _below(self, name: object, node: Any) -> Any:
        self._path.append(str(name))
        built = self._build(node)
        self._path.pop()
        return built

    def _load(self, key: str) -> torch.Tensor:
        if key not in self._loaded:
            flat = _reserved(self._data.storage(key).nbytes)
            self.keys[flat.untyped_storage()._cdata] = key
            self._loaded[key] = flat
        return self._loaded[key]

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        self.tensors += 1
        return super()._tensor(self._retype(ref))

    def _held(self, small: torch.Tensor) -> torch.Tensor:
        """A tensor that was computed already, such as a step."""
        small = small.contiguous()
        held = Held(bytes(bytes_of(small)))
        return self._tensor(self._data.tensor(held, DType.from_label(str(small.dtype)), tuple(small.shape)))


def _is_torch(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.UntypedStorage, torch.dtype, torch.device)


def _numpy_number(value: Any) -> bool | int | float | None:
    """The Python number that a scalar of numpy stands for."""
    if type(value).__module__ != "numpy" or not hasattr(value, "item") or getattr(value, "shape", None) != ():
        return None
    number = value.item()
    return number if type(number) in (bool, int, float) else None


def _reserved(nbytes: int) -> torch.Tensor:
    """Addresses for ``nbytes`` bytes, as a tensor. They take no memory until they are touched."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8)
