"""Builds the tree of a source as Python objects with hollow tensors: reserved addresses that nothing touches.

torch saves these objects, and a writer fills in the content of the tensors afterwards. Builds only what
``torch.load(weights_only=True)`` reads. For anything else that it leaves out, a line says where it was and what it is.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.objects import CONSUMED, RestBuilder
from ckpt8.checkpoint.tree import Global, Inert, TensorRef
from ckpt8.converting.computed import hold
from ckpt8.converting.request import Report
from ckpt8.core.errors import InputError, UnsupportedError

_BUILT = frozenset(
    {
        *(type(None), bool, int, float, str, bytes, dict, OrderedDict, list, tuple, set),
        *(torch.Tensor, torch.UntypedStorage, torch.dtype, torch.device),
    }
)
"""The types of the objects that are built; anything else is left out."""

_MOST_BITS = 255 * 8 - 1
"""The longest integer that torch reads with weights_only."""

_KEYS = frozenset({type(None), bool, int, float, str, bytes, tuple})
_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_SHOWN = 80
NOTHING = "holds no tensors that torch.load reads with weights_only; there is nothing to convert"


class Hollow(NamedTuple):
    """The objects of a tree. ``keys`` are the storages of ``data`` by the address of each hollow storage.

    The addresses are valid as long as ``built`` lives.
    """

    data: Composite
    built: Any
    keys: dict[int, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(self.data.storage(key).nbytes for key in self.keys.values())


def build_hollow(
    data: Composite, tree: Any, report: Report, retype: Callable[[TensorRef], TensorRef] = lambda ref: ref
) -> Hollow:
    """The objects of ``tree``. ``retype`` gives for each tensor the one that takes its place.

    Counts tensors in ``report``, and lists there what is left out. Raises InputError for a tree without tensors,
    UnsupportedError for a tensor that this torch cannot make.
    """
    builder = _HollowBuilder(data, retype)
    try:
        built = builder.build(tree)
    except (AttributeError, RuntimeError) as exc:
        raise UnsupportedError(f"{data.label}: a tensor cannot be made by this torch: {exc}") from exc
    report.dropped += builder.dropped
    report.tensors += builder.tensors
    if built is CONSUMED or not builder.keys:
        raise InputError(f"{data.label}: {NOTHING}")
    return Hollow(data, built, builder.keys)


class _HollowBuilder(RestBuilder):
    """Builds the objects. ``dropped`` has a line for each object that it left out; ``keys`` are those of ``Hollow``."""

    def __init__(self, data: Composite, retype: Callable[[TensorRef], TensorRef]) -> None:
        super().__init__(data)
        self._makers[torch.Tensor] = lambda tensor: self._tensor(hold(data, tensor))
        self.dropped: dict[str, None] = {}
        self.keys: dict[int, str] = {}
        self.tensors = 0
        self._data = data
        self._retype = retype
        self._path: list[str] = []

    def _build(self, node: Any) -> Any:
        built = super()._build(node)
        if built is CONSUMED or (type(built) in _BUILT and not _is_too_long(built)):
            return built
        if (number := _numpy_number(built)) is not None:
            return number
        self._drop(built)
        return CONSUMED

    def _drop(self, built: Any) -> None:
        has_name = isinstance(built, (Inert, Global))
        kind = built.name if has_name else f"{type(built).__module__}.{type(built).__qualname__}"
        self.dropped[f"{'.'.join(self._path)[:_SHOWN] or 'the whole'}: {kind[:_SHOWN]}"] = None

    def _key(self, key: Any) -> Any:
        parts = key if type(key) is tuple else (key,)
        if all(type(part) in _KEYS and not _is_too_long(part) for part in parts):
            return key
        self._path.append("(key)")
        self._drop(key)
        self._path.pop()
        return CONSUMED

    def _child(self, name: Any, node: Any) -> Any:
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


def _is_too_long(value: Any) -> bool:
    return type(value) is int and value.bit_length() > _MOST_BITS


def _numpy_number(value: Any) -> bool | int | float | None:
    """The Python number of a NumPy scalar, None for anything else."""
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
