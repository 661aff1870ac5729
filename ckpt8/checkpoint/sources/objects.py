"""The tree of a checkpoint as plain Python values, without the entries that were consumed.

Dictionaries, lists, tuples, sets, scalars, tensors (on the CPU, with shared storages still shared), torch dtypes and
devices, and numpy arrays and scalars come back as they were. A ``defaultdict`` becomes an ``OrderedDict``,
``torch.Size`` a tuple. No other class is ever imported: an object becomes a ``ckpt8.Inert`` with the name of its class,
its arguments, its state (mostly its ``__dict__``) and its items, all of them rebuilt. A class or function itself
becomes a ``ckpt8.Global`` with its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from ckpt8.checkpoint.tree import Checkpoint, Global, Inert, StatefulDict, StorageRef, TensorRef
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType

CONSUMED: Any = object()
_SETS = {"builtins.set": set, "builtins.frozenset": frozenset}
_NUMPY_DTYPE = "numpy.dtype"
_NUMPY_ARRAY = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
_NUMPY_SCALAR = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})


class RestBuilder:
    """Builds values of one checkpoint, without the dictionaries that are ``consumed``.

    A consumed entry is missing from the dictionary that held it, and None in a list or tuple, so that the others keep
    their places. What held consumed entries alone counts as consumed.
    """

    def __init__(self, checkpoint: Checkpoint, consumed: Iterable[object] = ()) -> None:
        self._checkpoint = checkpoint
        self._storages = {storage.key: storage for storage in checkpoint.storages}
        self._consumed = {id(node) for node in consumed}
        self._loaded: dict[str, torch.Tensor] = {}
        # By id, with the node itself, so that Python gives the id to no other.
        self._built: dict[int, tuple[Any, Any]] = {}
        self._makers: dict[type, Callable[[Any], Any]] = {
            dict: self._dict,
            StatefulDict: self._dict,
            list: self._list,
            tuple: self._tuple,
            TensorRef: self._tensor,
            StorageRef: lambda node: self._load(node.key).untyped_storage(),
            Inert: self._object,
            Global: dtype_of,
        }

    def tree(self) -> Any:
        """The whole tree; an empty dictionary if all of it was consumed. Raises InputError."""
        built = self.build(self._checkpoint.tree)
        return {} if built is CONSUMED else built

    def build(self, node: Any) -> Any:
        """One value with everything in it. Raises InputError if it is damaged or nested too deep."""
        try:
            return self._build(node)
        except RecursionError as exc:
            raise InputError("the checkpoint is nested too deep to be rebuilt") from exc

    def _build(self, node: Any) -> Any:
        if id(node) in self._consumed:
            return CONSUMED
        if id(node) not in self._built:
            make = self._makers.get(type(node))
            if make is None:
                return node
            made = make(node)
            self._built[id(node)] = (node, made)
        return self._built[id(node)][1]

    def _is_used_up(self, parts: Collection[Any]) -> bool:
        """Whether all parts, which have been built, are consumed, and there are any."""
        return bool(parts) and all(
            id(part) in self._consumed or self._built.get(id(part), (part, part))[1] is CONSUMED for part in parts
        )

    def _list(self, node: list[Any]) -> Any:
        made: list[Any] = []
        self._built[id(node)] = (node, made)
        made += self._items(node)
        return CONSUMED if self._is_used_up(node) else made

    def _tuple(self, node: tuple[Any, ...]) -> Any:
        made = tuple(self._items(node))
        return CONSUMED if self._is_used_up(node) else made

    def _child(self, name: Any, node: Any) -> Any:  # noqa: ARG002
        """The value of ``node``, which has the key or the position ``name``; CONSUMED leaves it out."""
        return self._build(node)

    def _key(self, key: Any) -> Any:
        """The key of an entry; CONSUMED leaves the entry out."""
        return self._build(key)

    def _items(self, nodes: Iterable[Any]) -> list[Any]:
        built = [self._child(place, node) for place, node in enumerate(nodes)]
        return [None if value is CONSUMED else value for value in built]

    def _dict(self, node: Mapping[Any, Any]) -> Any:
        made: dict[Any, Any] = OrderedDict() if isinstance(node, StatefulDict) else {}
        self._built[id(node)] = (node, made)
        for key, value in node.items():
            name = self._key(key)
            if name is not CONSUMED and (built := self._child(key, value)) is not CONSUMED:
                made[name] = built
        if isinstance(node, StatefulDict) and isinstance(node.state, dict) and "_metadata" in node.state:
            metadata = self._child("_metadata", node.state["_metadata"])
            if metadata is not CONSUMED:
                made._metadata = metadata  # type: ignore[attr-defined]
        return CONSUMED if self._is_used_up(node.values()) else made

    def _load(self, key: str) -> torch.Tensor:
        if key not in self._loaded:
            storage = self._storages[key]
            self._loaded[key] = host_bytes(storage.nbytes)
            self._checkpoint.read_into(storage.offset, bytes_of(self._loaded[key]))
        return self._loaded[key]

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        flat = self._load(ref.key)
        size = ref.dtype.itemsize
        typed = flat[: len(flat) // size * size].view(ref.dtype.torch)
        tensor = typed.as_strided(ref.shape, ref.stride, ref.offset)
        tensor = tensor.conj() if ref.conj else tensor
        return torch._neg_view(tensor) if ref.neg else tensor

    def _object(self, node: Inert) -> Any:
        if node.name in _SETS:
            items = self._items(node.items)
            try:
                return _SETS[node.name](items)
            except TypeError:
                return Inert(node.name, items=items)
        plain = plain_object(node)
        if plain is not None:
            return plain
        made = Inert(node.name)
        self._built[id(node)] = (node, made)
        made.args, made.items = tuple(self._items(node.args)), self._items(node.items)
        made.pairs = [(self._build(key), self._build(value)) for key, value in node.pairs]
        made.state = self._build(node.state)
        return made


def dtype_of(node: Global) -> Any:
    """The element type of torch that ``node`` refers to, else ``node``."""
    try:
        return DType.from_label(node.name).torch if node.name.startswith("torch.") else node
    except (KeyError, AttributeError):
        return node


def plain_object(node: Inert) -> Any:
    """The device of torch, or the array or scalar of numpy, that ``node`` stands for; None for anything else."""
    if node.name != "torch.device":
        return _numpy(node)

    try:
        return torch.device(*node.args) if all(type(arg) in (str, int) for arg in node.args) else None
    except (RuntimeError, TypeError):
        return None


def _numpy(node: Inert) -> Any:
    """A numpy array or scalar of plain numbers; None for anything else, and where there is no numpy."""
    try:
        if node.name in _NUMPY_ARRAY:
            _, shape, dtype, fortran, data = node.state
        elif node.name in _NUMPY_SCALAR:
            (dtype, data), shape, fortran = node.args, (), False
        else:
            return None
        if not (isinstance(dtype, Inert) and dtype.name == _NUMPY_DTYPE and isinstance(data, bytes)):
            return None
        import numpy as np

        kind = np.dtype(dtype.args[0])
        order = dtype.state[1] if dtype.state else "="
        if kind.hasobject:
            return None
        flat = np.frombuffer(data, dtype=kind.newbyteorder(order) if order in ("<", ">") else kind)
        array = flat.reshape(shape, order="F" if fortran else "C").copy()
        return array if node.name in _NUMPY_ARRAY else array[()]
    except (ImportError, ValueError, TypeError, IndexError):
        return None
