"""The tree of a checkpoint as plain Python values, without the entries that were consumed.

Dictionaries, lists, tuples, sets, scalars, tensors (on the CPU, with shared storages still shared), torch dtypes and
devices, counters, and numpy arrays and scalars come back as they were. A ``defaultdict`` becomes an ``OrderedDict``,
``torch.Size`` a tuple, a parameter a tensor. No other class is ever imported: an object becomes a ``ckpt8.Inert`` with
the name of its class, its arguments, its state (mostly its ``__dict__``) and its items, all of them rebuilt. A class or
function itself becomes a ``ckpt8.Global`` with its name.

``ValueBuilder`` builds values for live objects: plain ones, tensors, tensors of classes that torch calls safe, and
plain objects. An ``Inert`` in a model or an optimizer would break a training step much later; ``problem`` finds such
objects beforehand and reads no tensor.

Arrays and scalars of numpy are built if they are of its own class and of booleans, numbers or texts (kinds b i u f c S
U), and if their bytes are exactly those of their shape. No dtype with fields, void, object or subclass is built.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ckpt8.checkpoint.readers.rebuild import WRAPPED, check_hashes, dict_key
from ckpt8.checkpoint.readers.torch_rules import ARRAYS, COUNTER, DATA_ALLOWANCE, DATA_FACTOR, PROPERTIES, TYPED
from ckpt8.checkpoint.tree import (
    Checkpoint,
    Global,
    Inert,
    Size,
    StatefulDict,
    StorageInfo,
    StorageRef,
    TensorRef,
    iter_nodes,
)
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.core.errors import InputError, ResumeError, UnsupportedError, require
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType
from ckpt8.optim.known_optimizers import state_objects

CONSUMED: Any = object()
_SETS = {"builtins.set": set, "builtins.frozenset": frozenset}
_NUMPY_SCALAR = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})
_NUMPY_BUFFER = frozenset({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})
_NDARRAY = Global("numpy.ndarray")
_NUMPY_KIND = re.compile(r"[biufcSU][0-9]{1,9}")


class RestBuilder:
    """Builds values of one checkpoint, without the dictionaries that are ``consumed``.

    A consumed entry is missing from the dictionary that held it, and None in a list or tuple, so that the others keep
    their places. What held consumed entries alone counts as consumed.
    """

    def __init__(self, checkpoint: Checkpoint, consumed: Iterable[object] = ()) -> None:
        self._checkpoint = checkpoint
        self._room = DATA_FACTOR * checkpoint.size + DATA_ALLOWANCE
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
        return {} if (built := self.build(self._checkpoint.tree)) is CONSUMED else built

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
            if (make := self._makers.get(type(node))) is None:
                return node
            self._built[id(node)] = (node, make(node))
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
                if name is not key:
                    self._check_key(made, name)
                made[name] = built
        if isinstance(node, StatefulDict) and isinstance(node.state, dict) and "_metadata" in node.state:
            metadata = self._child("_metadata", node.state["_metadata"])
            if metadata is not CONSUMED:
                made._metadata = metadata  # type: ignore[attr-defined]
        return CONSUMED if self._is_used_up(node.values()) else made

    @staticmethod
    def _check_key(made: dict[Any, Any], name: Any) -> None:
        """Raise InputError for a key that has no hash, or that makes the dictionary or set slow."""
        try:
            hash(name)
            check_hashes(made)
        except (TypeError, ValueError) as exc:
            raise InputError(f"the checkpoint has a dictionary or set that cannot be built: {exc}") from exc

    def _load(self, key: str) -> torch.Tensor:
        if key not in self._loaded:
            self._loaded[key] = read_storage(self._checkpoint, self._storages[key])
        return self._loaded[key]

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        return view_of(ref, self._load(ref.key))

    def _object(self, node: Inert) -> Any:
        if node.name in _SETS:
            return self._set(node)
        if (plain := plain_object(node)) is not None:
            self._room -= getattr(plain, "nbytes", 0)
            require(self._room >= 0, "the checkpoint has the same data in many arrays of numpy")
            return plain if isinstance(plain, torch.device) else _own(node, plain)
        if _is_counter(node):
            counts: Counter[Any] = Counter()
            self._built[id(node)] = (node, counts)
            counts.update(self._dict(node.args[0]) if node.args else {})
            return counts
        made = Inert(node.name)
        self._built[id(node)] = (node, made)
        made.args, made.items = tuple(self._items(node.args)), self._items(node.items)
        made.pairs = [(self._build(key), self._build(value)) for key, value in node.pairs]
        made.state = self._build(node.state)
        return made

    def _set(self, node: Inert) -> Any:
        """The set, or an ``Inert`` where an item has no hash, or takes long to hash. Raises InputError."""
        items, members = self._items(node.items), dict[Any, None]()
        for saved, item in zip(node.items, items, strict=True):
            try:
                if type(saved) is tuple:
                    dict_key(saved)
                hash(item)
            except (TypeError, ValueError):
                return Inert(node.name, items=items)
            self._check_key(members, item)
            members[item] = None
        return _SETS[node.name](members)

    @classmethod
    def unmade(cls, value: Any) -> str | None:
        """The name of the first class in a value that would stay an ``Inert`` or ``Global``; None if none would."""
        pending: list[Any] = [value]
        seen: set[int] = set()
        while pending:
            part = pending.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, Global) and dtype_of(part) is part:
                return part.name
            if isinstance(part, Inert):
                if (parts := cls._parts(part)) is None:
                    return _class_name(part)
                pending += parts
            elif isinstance(part, dict):
                pending += [*part.keys(), *part.values()]
            elif isinstance(part, (list, tuple)):
                pending += part
        return None

    @classmethod
    def _parts(cls, node: Inert) -> list[Any] | None:
        """The parts of an object that is built, or None for one that stays an ``Inert``."""
        if _is_counter(node):
            return list(node.args)
        is_set = node.name in _SETS and all(map(_is_member, node.items))
        return [] if is_set or (node.name not in _SETS and plain_object(node) is not None) else None


class TreeBuilder(RestBuilder):
    """Builds what ``torch.load`` would, of a checkpoint of torch that was read for it, with ``TorchCalls``.

    Tensors are on the CPU, unless ``map_location``, as that of ``torch.load``, says otherwise.
    """

    def __init__(self, checkpoint: Checkpoint, map_location: Any = None) -> None:
        super().__init__(checkpoint)
        self._makers |= {StorageRef: self._storage, Size: torch.Size}
        self._restore = torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]

    def _load(self, key: str) -> torch.Tensor:
        if key not in self._loaded:
            storage = self._restore(super()._load(key).untyped_storage(), "cpu")
            self._loaded[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._loaded[key]

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        """The tensor as torch makes it: a view of nothing, with flags and attributes. Raises UnsupportedError."""
        require(ref.share is None, "the checkpoint has a DTensor together with arrays of numpy", UnsupportedError)
        attributes = self._build(ref.attributes)
        require(
            PROPERTIES.isdisjoint(attributes or ()),
            "the checkpoint gives a tensor an attribute that torch.save does not write",
        )
        content = self._load(ref.key)
        empty = torch.empty(0, dtype=ref.dtype.torch, device=content.device)
        tensor = empty.set_(content.untyped_storage(), ref.offset, ref.shape, ref.stride)
        if flags := {flag: True for flag in ("conj", "neg") if getattr(ref, flag)}:
            torch._utils.set_tensor_metadata(tensor, flags)  # type: ignore[no-untyped-call]
        if ref.is_parameter:
            tensor = torch.nn.Parameter(tensor, ref.requires_grad)
        else:
            tensor.requires_grad = ref.requires_grad
        return torch._utils._set_obj_state(tensor, attributes)  # type: ignore[no-any-return, no-untyped-call]

    def _dict(self, node: Mapping[Any, Any]) -> Any:
        made = super()._dict(node)
        if isinstance(node, StatefulDict) and isinstance(node.state, dict):
            vars(made).update(self._build(node.state))
        return made

    def _storage(self, ref: StorageRef) -> torch.TypedStorage:
        """What torch makes of any storage in a file, with the element type that the file gives it."""
        size = ref.dtype.itemsize
        part = self._load(ref.key).untyped_storage()
        if ref.offset or ref.numel * size != part.nbytes():
            part = part[ref.offset * size : (ref.offset + ref.numel) * size]
        return torch.TypedStorage(wrap_storage=part, dtype=ref.dtype.torch, _internal=True)  # type: ignore[no-untyped-call]


def read_storage(checkpoint: Checkpoint, storage: StorageInfo) -> torch.Tensor:
    """The bytes of a storage on the CPU. Raises InputError."""
    content = host_bytes(storage.nbytes)
    checkpoint.read_into(storage.offset, bytes_of(content))
    return content


def view_of(ref: TensorRef, content: torch.Tensor) -> torch.Tensor:
    """The tensor ``ref`` in the bytes of its storage, with its shape, strides and flags."""
    size = ref.dtype.itemsize
    typed = content[: len(content) // size * size].view(ref.dtype.torch)
    tensor = typed.as_strided(ref.shape, ref.stride, ref.offset)
    tensor = tensor.conj() if ref.conj else tensor
    return torch._neg_view(tensor) if ref.neg else tensor


def dtype_of(node: Global) -> Any:
    """The element type of torch that ``node`` refers to, else ``node``."""
    try:
        return DType.from_label(node.name).torch if node.name.startswith("torch.") else node
    except (KeyError, AttributeError):
        return node


def plain_object(node: Inert) -> Any:
    """The device of torch that ``node`` stands for, or the array of numpy, not copied; None for anything else."""
    if node.name != "torch.device":
        return _numpy(node)
    with suppress(RuntimeError, TypeError):
        return torch.device(*node.args) if all(type(arg) in (str, int) for arg in node.args) else None
    return None


def _numpy(node: Inert) -> Any:
    """The array or, without a shape, the scalar in the bytes of ``node``; None for what is not built."""
    try:
        if node.name in ARRAYS:
            kind = node.args[0]
            _, shape, dtype, fortran, data = node.state
            order = "F" if fortran else "C"
        elif node.name in _NUMPY_SCALAR:
            (dtype, data), kind, shape, order = node.args, _NDARRAY, (), "C"
        elif node.name in _NUMPY_BUFFER:
            (data, dtype, shape, order), kind = node.args, _NDARRAY
        else:
            return None
        known = _numpy_dtype(dtype)
        is_data = isinstance(data, (bytes, bytearray)) and type(shape) is tuple and order in ("C", "F")
        if known is None or kind != _NDARRAY or not is_data or known.itemsize * math.prod(shape) != len(data):
            return None
        if shape and not known.itemsize:  # as many empty texts as somebody likes
            return None
        import numpy as np

        return np.ndarray(shape, known, data, order=order)  # type: ignore[arg-type]
    except (ImportError, ValueError, TypeError, IndexError, OverflowError):
        return None


def _own(node: Inert, array: Any) -> Any:
    """``array`` in memory of its own, or the scalar that it holds. Raises InputError."""
    if node.name not in _NUMPY_SCALAR:
        return array.copy(order="K")
    try:
        return array[()]
    except (ValueError, SystemError) as exc:
        raise InputError("the checkpoint has a text of numpy that is not Unicode") from exc


def _numpy_dtype(node: Any) -> Any:
    """``numpy.dtype("f8", False, True)`` with its byte order; None for one with fields, of objects or unknown."""
    if not (isinstance(node, Inert) and node.name == "numpy.dtype" and type(node.args[0]) is str):
        return None
    state = node.state or (3, "=", None, None, None)
    has_fields = type(state) is not tuple or any(part is not None for part in state[2:5])
    if has_fields or not _NUMPY_KIND.fullmatch(node.args[0]):
        return None
    import numpy as np

    dtype: Any = np.dtype(node.args[0])
    return dtype.newbyteorder(state[1]) if state[1] in ("<", ">") else dtype


def numpy_dtype_classes(tree: object) -> set[str]:
    """The names of the classes of the numpy dtypes in a tree: torch asks for them beside ``numpy.dtype`` itself."""
    try:
        import numpy as np
    except ImportError:
        return set()
    nodes = (node for _, node in iter_nodes(tree) if type(node) is Inert and node.name == "numpy.dtype" and node.args)
    kinds = {text for node in nodes if type(text := node.args[0]) is str and re.fullmatch(r"[A-Za-z][0-9]{0,4}", text)}
    names = set()
    for kind in kinds:
        with suppress(TypeError):  # numpy has no such one
            names.add(f"numpy.dtypes.{type(np.dtype(kind)).__name__}")
    return names


_SCALARS = frozenset({str, int, float, bool, type(None), bytes, complex})
_HOOKS = (
    *("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__setattr__", "__getattribute__"),
    *("__del__", "__slots__"),
)
"""What a class defines whose objects are more than their ``__dict__``, or run code when they come or go."""


class ValueBuilder(RestBuilder):
    """Also builds deques, and tensors of classes in ``torch.serialization.get_safe_globals()``.

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
        if (kind := _registered_class(node)) is not None:
            return self._subclass(kind, node)
        if _is_deque(node):
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
            agrees = made.shape == frame.shape and all(
                own is part or not (isinstance(own, torch.Tensor) or isinstance(part, torch.Tensor) or own != part)
                for own, part in ((vars(made)[key], part) for key, part in parts.items())
            )
        except Exception as exc:
            raise ResumeError(f"a {_class_name(node)} cannot be made of its parts: {exc}") from exc
        if not agrees:
            raise ResumeError(f"a {_class_name(node)} does not have the parts that the file gives it")
        return made  # type: ignore[no-any-return]

    @classmethod
    def problem(cls, what: str, value: Any) -> str | None:
        """Why a value cannot go into a live object, or None: it holds an object that resume does not make."""
        name = cls.unmade(value)
        return None if name is None else f"{what} holds a {name}, which resume does not make"

    @classmethod
    def _parts(cls, node: Inert) -> list[Any] | None:
        if _plain_class(node) is not None:
            return list(node.state.values())
        if _registered_class(node) is not None:
            return list(node.args[3].values())
        return node.items if _is_deque(node) else super()._parts(node)


def _is_member(item: Any) -> bool:
    """Whether a value of a set is a scalar, or a tuple of scalars."""
    return type(item) in _SCALARS or (type(item) is tuple and all(type(part) in _SCALARS for part in item))


def _is_counter(node: Inert) -> bool:
    """Whether it is a ``Counter`` of whole numbers, as ``MultiStepLR`` keeps its milestones."""
    counts = node.args[0] if len(node.args) == 1 else {}
    is_whole = type(counts) in (dict, StatefulDict) and all(type(count) is int for count in counts.values())
    return node.name == COUNTER and len(node.args) <= 1 and is_whole and node.state is None


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
    """Whether it is a deque without a length, or with one that can be."""
    length = node.args[1] if len(node.args) == 2 else None
    is_length = length is None or (type(length) is int and 0 <= length <= sys.maxsize)
    return node.name == "collections.deque" and len(node.args) in (0, 2) and is_length


def _registered_class(node: Inert) -> type[torch.Tensor] | None:
    """The class of a pickled tensor subclass, if it is registered with torch as safe."""
    if node.name != TYPED or len(node.args) != 4:
        return None
    function, kind, arguments, state = node.args
    if not (isinstance(function, Global) and isinstance(kind, Global) and function.name == WRAPPED):
        return None
    if not (isinstance(arguments, tuple) and len(arguments) >= 4 and isinstance(state, dict)):
        return None
    plain = all(
        is_plain(value) or (isinstance(value, tuple) and all(type(part) in _SCALARS for part in value))
        for value in state.values()
    )
    if not (plain and _is_shape(arguments[2]) and _is_shape(arguments[3]) and isinstance(arguments[1], Global)):
        return None
    registered = _registered().get(kind.name)
    is_tensor = (
        registered is not None and issubclass(registered, torch.Tensor) and hasattr(registered, "__tensor_unflatten__")
    )
    return registered if is_tensor else None


def _registered() -> dict[str, type]:
    """The classes that are registered with torch as safe, by name."""
    classes = {}
    for entry in torch.serialization.get_safe_globals():
        kind, name = entry if isinstance(entry, tuple) else (entry, None)
        if isinstance(kind, type):
            classes[name or f"{kind.__module__}.{kind.__qualname__}"] = kind
    return classes


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(size) is int for size in value)


def _class_name(node: Inert) -> str:
    """The class of an object; for a tensor subclass that class, not the function that rebuilds it."""
    kinds = [arg for arg in node.args[:2] if isinstance(arg, Global)]
    return kinds[-1].name if node.name.startswith("torch._tensor._rebuild") and kinds else node.name
