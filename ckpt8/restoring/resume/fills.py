"""How live tensors take what a checkpoint holds: copied, taken packed as it is stored, or encoded on the way.

Encoding rounds to nearest, on the device of the parameter, in pieces of bounded size. ``OptimizerPlan`` collects what
resume is going to do to an optimizer, before anything changes.

``DeviceCopy`` fills tensors on a GPU from stored parts: it uploads these, 5 bytes a parameter of ``flash``, and decodes
them there.

``ValueBuilder`` builds values for live objects: plain ones, tensors, tensors of classes that torch calls safe, and
plain objects.

``RestBuilder`` makes an ``Inert`` of an object whose class it does not import. In a model or an optimizer that would
break a training step much later. ``unmade`` finds such objects beforehand and reads no tensor.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt8.checkpoint.sources.composite import Fill, Streamer
from ckpt8.checkpoint.sources.objects import RestBuilder, dtype_of, plain_object
from ckpt8.checkpoint.sources.stored_member import EncodedChunk, StoredParts
from ckpt8.checkpoint.tree import Global, Inert, TensorRef
from ckpt8.codecs import Codec
from ckpt8.codecs.companded8 import GROUP
from ckpt8.container.symbols import unpack_parts
from ckpt8.core.errors import RefusedError, ResumeError
from ckpt8.core.gpu import CudaTransfer, Mark, copy_to_row, row_bytes, row_views
from ckpt8.core.tensors import Parts
from ckpt8.core.workers import Buffers, assign
from ckpt8.optim.known_optimizers import state_objects
from ckpt8.optim.packed_tensor import write_master
from ckpt8.optim.state_conversion import bf16_from_planes

_ENCODED_AT_ONCE = 1 << 20
"""Elements."""


NewState = tuple[dict[str, Any], list[Fill]]
"""The new state of one parameter, its tensors still empty, and what fills them."""


@dataclass(slots=True)
class OptimizerPlan:
    """New states, and new values for each live group.

    ``states`` has for each parameter a function that allocates its state, or None where the checkpoint has none, as for
    a parameter that never had a gradient. ``wrong`` says why nothing of the checkpoint fits; ``problems`` are those of
    single parameters. ``rounded`` fills live parameters that take only the upper half of their saved weights, by
    ``id``. An optimizer that loads its state itself has ``build`` in place of states and groups: it makes the state
    dict.
    """

    states: list[tuple[torch.Tensor, Callable[[], NewState] | None]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: str | None = None
    rounded: dict[int, Fill] = field(default_factory=dict)
    build: Callable[[], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies one saved tensor into a live one of its shape; values are rounded where that has fewer bits."""

    name: str
    ref: TensorRef
    target: torch.Tensor

    def fill(self, streamer: Streamer) -> None:
        """Copy the values."""
        streamer.copy(self.ref, self.target.detach())


@dataclass(frozen=True, slots=True)
class _PackedFill:
    """Fills packed state from ``ref``. With ``stored``, the parts go in as they are, else ``codec`` makes them."""

    ref: TensorRef
    codec: Codec
    stored: StoredParts | None

    def _pieces(self, streamer: Streamer) -> Iterator[tuple[int, torch.Tensor]]:
        """The saved values as flat float32, in pieces that are encoded at once, and where each starts."""
        for start, values in streamer.values(self.ref):
            for at in range(0, len(values), _ENCODED_AT_ONCE):
                yield start + at, values[at : at + _ENCODED_AT_ONCE]


@dataclass(frozen=True, slots=True)
class MomentFill(_PackedFill):
    """Fills the codes and scales of moment ``name`` in ``state``.

    Values that the codec refuses stay in fp32, as they would in a file.
    """

    name: str
    state: dict[str, torch.Tensor]

    def fill(self, streamer: Streamer) -> None:
        """Take the parts, or encode the values."""
        codes, scales = self.state[f"{self.name}_codes"], self.state[f"{self.name}_scales"]
        try:
            for start, parts in self._parts(streamer, codes.device):
                assign(codes.view(-1), start, parts["codes"])
                assign(scales, start // GROUP, parts["scales"])
        except RefusedError:
            del self.state[f"{self.name}_codes"], self.state[f"{self.name}_scales"]
            self.state[self.name] = torch.empty(self.ref.shape, dtype=torch.float32, device=codes.device)
            streamer.copy(self.ref, self.state[self.name])

    def _parts(self, streamer: Streamer, device: torch.device) -> Iterator[tuple[int, Parts]]:
        if self.stored is not None:
            return self.stored.chunks(self.ref, "codes", "scales")
        return ((start, self.codec.encode(piece.to(device))) for start, piece in self._pieces(streamer))


@dataclass(frozen=True, slots=True)
class ResidualFill(_PackedFill):
    """Fills ``residual``, flat: the difference between fp32 weights and a bf16 parameter."""

    residual: torch.Tensor

    def fill(self, streamer: Streamer) -> None:
        """Take the stored residual, or split the values."""
        if self.stored is not None:
            name, _ = _residual(self.codec)
            for start, parts in self.stored.chunks(self.ref, name):
                assign(self.residual, start, parts[name])
            return
        for start, piece in self._pieces(streamer):
            part = self.residual[start : start + len(piece)]
            _split(piece.to(part.device), part, self.codec)


@dataclass(frozen=True, slots=True)
class RoundedFill(_PackedFill):
    """Fills a bf16 parameter of any strides with the upper half of fp32 weights. See ``ResidualFill``."""

    param: torch.Tensor

    def fill(self, streamer: Streamer) -> None:
        """Take the stored upper half, or split the values."""
        target = self.param.detach()
        target = target if target.dim() else target.view(1)
        if self.stored is not None:
            for start, parts in self.stored.chunks(self.ref, "exponent", "mantissa"):
                assign(target, start, bf16_from_planes(parts))
            return
        for start, piece in self._pieces(streamer):
            residual = torch.empty_like(piece, dtype=_residual(self.codec)[1])
            assign(target, start, _split(piece, residual, self.codec))


def _residual(codec: Codec) -> tuple[str, torch.dtype]:
    """Name and element type of the part that completes a bf16 weight."""
    assert codec.residual is not None  # noqa: S101 - the group was checked
    return codec.residual[0], codec.residual[1].torch


def _split(weights: torch.Tensor, residual: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Write the residual of flat fp32 weights; return their bf16 upper half."""
    rounded = torch.empty_like(weights, dtype=torch.bfloat16)
    write_master(weights, rounded, residual, codec, None)
    return rounded


_BUFFERS = 2
"""Buffers in turn: the CPU fills one while the other is copied."""


class DeviceCopy:
    """Fills tensors on devices of the kind of ``make`` from the storages that ``stored`` keeps lossy."""

    def __init__(self, stored: StoredParts, make: type[CudaTransfer] = CudaTransfer) -> None:
        self._stored = stored
        self._make = make
        self._lanes: dict[torch.device, _Lane] = {}

    def copy(self, ref: TensorRef, target: torch.Tensor) -> bool:
        """Fill ``target`` with the values of ``ref``.

        Returns False, and fills nothing, on another device, or if ``ref`` is not stored lossy. Raises InputError for
        damage.
        """
        if target.device.type != self._make.kind or ref.conj or ref.neg:
            return False
        codec = self._stored.codec(ref)
        if codec is None or codec.measured_as is None:
            return False
        if target.device not in self._lanes:
            self._lanes[target.device] = _Lane(self._make(target.device))
        lane = self._lanes[target.device]
        with lane.transfer.active():
            for chunk in self._stored.encoded(ref):
                assign(target, chunk.first, _decode(chunk, lane))
        return True


def _decode(chunk: EncodedChunk, lane: _Lane) -> torch.Tensor:
    """The elements of a chunk on the device, its companions decoded there as well."""
    decoded = {name: _decode(other, lane).float() for name, other in chunk.companions.items()}
    packed, expanded = lane.send(chunk.parts, chunk.expanded)
    parts = unpack_parts(packed, chunk.packings, chunk.where)
    return chunk.codec.decode(parts, chunk.spec, first=chunk.first, companions=decoded | expanded)


class _Lane:
    """Uploads to one device through a few buffers."""

    def __init__(self, transfer: CudaTransfer) -> None:
        self.transfer = transfer
        self._buffers = Buffers(transfer.pinned)
        self._busy: deque[tuple[torch.Tensor, Mark]] = deque()

    def send(self, *parts: Parts) -> list[Parts]:
        """Upload the parts. The device can use them in everything that it computes from now on."""
        if len(self._busy) == _BUFFERS:
            buffer, mark = self._busy.popleft()
            mark.synchronize()
            self._buffers.give(buffer)
        total = row_bytes(parts)
        buffer = self._buffers.take(total)
        copy_to_row(parts, buffer)
        there, mark = self.transfer.upload(buffer[:total])
        self._busy.append((buffer, mark))
        self.transfer.receive(there, mark)
        return row_views(parts, there)


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
            part = pending.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, Global) and dtype_of(part) is part:
                return part.name
            if isinstance(part, Inert):
                if (parts := self._parts(part)) is None:
                    return _class_name(part)
                pending += parts
            elif isinstance(part, dict):
                pending += [*part.keys(), *part.values()]
            elif isinstance(part, (list, tuple)):
                pending += part
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
