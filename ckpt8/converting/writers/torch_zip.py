"""A ``.pt`` as ``torch.save`` writes it, streamed: torch writes everything but the storages.

``build_hollow`` builds the tree of a source as Python objects with hollow tensors: reserved addresses that nothing
touches. torch saves these objects, with holes for the storages, into a temporary file. What is there and the content of
the storages, block by block, make the target. It builds only what ``torch.load(weights_only=True)`` reads. For anything
else that it leaves out, a line says where it was and what it is.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import torch

from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.sources.composite import BLOCK, Composite
from ckpt8.checkpoint.sources.live_object import LiveCheckpoint, Read, live_checkpoint
from ckpt8.checkpoint.sources.objects import CONSUMED, RestBuilder
from ckpt8.checkpoint.tree import Global, Inert, StorageInfo, TensorRef, gaps
from ckpt8.container.checks import CRC_BYTES
from ckpt8.converting.choice import choose_model, hold, model_tensors
from ckpt8.converting.request import OpenFile, Report, Request
from ckpt8.converting.weights import WeightTypes, unpack_tree
from ckpt8.core.errors import UnsupportedError, require
from ckpt8.core.files.source_file import combine, crc32
from ckpt8.core.tensors import DType

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
_SHOWN = 80
NOTHING = "holds no tensors that torch.load reads with weights_only; there is nothing to convert"


def build_hollow(
    data: Composite, tree: Any, report: Report, retype: Callable[[TensorRef], TensorRef] = lambda ref: ref
) -> Hollow:
    """The objects of ``tree``. ``retype`` gives for each tensor the one that takes its place.

    Counts tensors in ``report``, and lists there what is left out. Raises InputError for a tree without tensors,
    UnsupportedError for a tensor that this torch cannot make.
    """
    hollow = Hollow(data, retype)
    try:
        hollow.built = hollow.build(tree)
    except (AttributeError, RuntimeError) as exc:
        raise UnsupportedError(f"{data.label}: a tensor cannot be made by this torch: {exc}") from exc
    report.dropped += hollow.dropped
    report.tensors += hollow.tensors
    require(hollow.built is not CONSUMED and hollow.made, f"{data.label}: {NOTHING}")
    return hollow


class Hollow(RestBuilder):
    """Builds the objects of a tree. ``dropped`` has a line for each object that it left out.

    ``built`` are the objects. ``made`` fill a buffer with bytes of a storage, by the address of the hollow storage; the
    addresses are valid as long as ``built`` lives. ``nbytes`` are those of all storages.
    """

    def __init__(self, data: Composite, retype: Callable[[TensorRef], TensorRef]) -> None:
        super().__init__(data)
        self._makers[torch.Tensor] = lambda tensor: self._tensor(hold(data, tensor))
        self.dropped: dict[str, None] = {}
        self.made: dict[int, Read] = {}
        self.tensors = self.nbytes = 0
        self.data = data
        self.built: Any = None
        self._retype = retype
        self._path: list[str] = []

    def _build(self, node: Any) -> Any:
        built = super()._build(node)
        if built is CONSUMED or (type(built) in _BUILT and not _is_too_long(built)):
            return built
        number = _numpy_number(built)
        return self._drop(built) if number is None else number

    def _drop(self, built: Any, *place: str) -> Any:
        has_name = isinstance(built, (Inert, Global))
        kind = built.name if has_name else f"{type(built).__module__}.{type(built).__qualname__}"
        path = ".".join((*self._path, *place))
        self.dropped[f"{path[:_SHOWN] or 'the whole'}: {kind[:_SHOWN]}"] = None
        return CONSUMED

    def _key(self, key: Any) -> Any:
        parts = key if type(key) is tuple else (key,)
        is_built = all(type(part) in _KEYS and not _is_too_long(part) for part in parts)
        return key if is_built else self._drop(key, "(key)")

    def _child(self, name: Any, node: Any) -> Any:
        self._path.append(str(name))
        built = self._build(node)
        self._path.pop()
        return built

    def _load(self, key: str) -> torch.Tensor:
        if key not in self._loaded:
            storage = self.data.places[key]
            flat = self._loaded[key] = _reserved(storage.nbytes)
            self.made[flat.data_ptr()] = partial(_read, self.data, storage.offset)
            self.nbytes += storage.nbytes
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


def _read(data: Composite, offset: int, first: int, buffer: memoryview) -> None:
    data.read_into(offset + first, buffer)


def _reserved(nbytes: int) -> torch.Tensor:
    """Addresses for ``nbytes`` bytes, as a tensor. They take no memory until they are touched."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


_BLOCK_BYTES = 4 * BLOCK


def write(request: Request, report: Report) -> None:
    """Write the whole tree, or with a key the one state dict there, as ``torch.load(weights_only=True)`` reads it.

    Element types stay as they are; ``--dtype`` casts every model in the tree, never moments. float32 turns a run of
    ckpt8.optim into one of the published optimizer. Raises Ckpt8Error.
    """
    with request.open(report) as content:
        data, key = content.data, request.key
        if request.dtype is DType.FLOAT32:
            unpack_tree(data)
        models = find(data.tree)[0] if key is None else [choose_model(data, key)]
        types = WeightTypes(data, request.dtype, report)
        retyped = {id(ref): types(name, ref) for model in models for name, ref in model_tensors(model).items()}
        write_torch(
            request, report, data, data.tree if key is None else models[0].node, lambda ref: retyped.get(id(ref), ref)
        )


def write_torch(
    request: Request,
    report: Report,
    data: Composite,
    tree: Any,
    retype: Callable[[TensorRef], TensorRef] = lambda ref: ref,
) -> None:
    """Write ``tree`` to the target, a file of torch. Raises Ckpt8Error."""
    hollow = build_hollow(data, tree, report, retype)
    with request.new_file(data, report, hollow.nbytes) as out:
        write_zip(hollow, out, request.target.name)


def write_zip(hollow: Hollow, out: OpenFile, name: str) -> None:
    """Write a file of torch, which will have the name ``name``.

    Raises InputError where there is no storage, OutputError, and UnsupportedError for what torch does not save.
    """
    # torch names the records in the file after the file.
    saved = save_hollow(hollow, hollow.built, PurePath(name).stem)
    require(saved.places, f"{hollow.data.label}: {NOTHING}")
    write_saved(hollow, saved, out)


class Saved(NamedTuple):
    """What torch saves: bytes outside storages by their offsets, and storages with the addresses of their tensors."""

    length: int
    outside: Sequence[tuple[int, bytes]]
    places: Sequence[tuple[StorageInfo, int]]


def save_hollow(hollow: Hollow, obj: object, name: str) -> Saved:
    """What torch saves of an object with hollow tensors, in a file of this ``name`` without a suffix.

    Raises OutputError for a temporary file, and UnsupportedError for what torch does not save or load.
    """
    label = hollow.data.label
    try:
        with live_checkpoint(obj, name, hollow.made) as opened:
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(opened.file.source.path)
            if unsafe:
                raise UnsupportedError(f"{label}: holds {unsafe[0]}, which this torch does not load")
            outside = [(at, opened.file.read(at, size)) for at, size in gaps(opened.storages, opened.size)]
            memory = cast("LiveCheckpoint", opened).memory
            return Saved(opened.size, outside, [(place, memory[place.key].data_ptr()) for place in opened.storages])
    except RuntimeError as exc:
        raise UnsupportedError(f"{label}: cannot be saved by torch: {exc}") from exc


def write_saved(hollow: Hollow, saved: Saved, out: OpenFile, position: int = 0) -> None:
    """Write what torch saves at a ``position``, with the content of the storages and its checksums.

    Raises InputError, OutputError.
    """
    for start, content in saved.outside:
        out.write(content, position + start)
    for place, address in saved.places:
        crc = 0
        for start in range(0, place.nbytes, _BLOCK_BYTES):
            view = memoryview(bytearray(min(_BLOCK_BYTES, place.nbytes - start)))
            hollow.made[address](start, view)
            out.write(view, position + place.offset + start)
            crc = combine(crc, crc32(view), len(view))
            out.progress(len(view))
        for field in place.crc_fields:
            out.write(crc.to_bytes(CRC_BYTES, "little"), position + field)
