"""Builds the tree of a source as Python objects whose tensors are hollow: reserved addresses that nothing touches.

torch saves these objects, and the content of the tensors is written afterwards. Builds only what
``torch.load(weights_only=True)`` reads, and leaves out the rest with a line that says where it was and what it is.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.objects import CONSUMED, RestBuilder
from ckpt8.checkpoint.tree import Global, Held, Inert, StatefulDict, TensorRef
from ckpt8.container.frames import bytes_of
from ckpt8.converting.request import Report
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.tensors import DType

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, dict, OrderedDict, list, tuple, set})
_KEYS = frozenset({type(None), bool, int, float, str, bytes, tuple})
_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_SHOWN = 80
NOTHING = "holds no tensors that torch.load reads with weights_only; there is nothing to convert"


class Hollow(NamedTuple):
    """The objects of a tree. ``keys`` are the storages of the source by the address of each hollow storage.

    The addresses are valid as long as ``built`` lives.
    """

    built: Any
    keys: dict[int, str]


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
    return Hollow(built, builder.keys)


class _HollowBuilder(RestBuilder):
    """Builds the objects. ``dropped`` are lines about what it left out; ``keys`` are those of ``Hollow``."""

    def __init__(self, data: Composite, retype: Callable[[TensorRef], TensorRef]) -> None:
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
        has_name = isinstance(built, (Inert, Global))
        kind = built.name if has_name else f"{type(built).__module__}.{type(built).__qualname__}"
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
            elif (built := self._below(key, value)) is not CONSUMED:
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
        """A tensor that is in memory already, such as a step."""
        small = small.contiguous()
        held = Held(bytes(bytes_of(small)))
        return self._tensor(self._data.tensor(held, DType.from_label(str(small.dtype)), tuple(small.shape)))


def _is_torch(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.UntypedStorage, torch.dtype, torch.device)


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
