"""A ``.pt`` as ``torch.save`` writes it, streamed: torch writes everything but the storages, which follow.

Under ``skip_data`` torch leaves holes for the storages. This fills them block by block, and then sets their checksums
in the zip directory.

``build_hollow`` builds the tree of a source as Python objects with hollow tensors: reserved addresses that nothing
touches.

torch saves these objects; the content of the tensors follows. It builds only what ``torch.load(weights_only=True)``
reads. For anything else that it leaves out, a line says where it was and what it is.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources.composite import BLOCK, Composite
from ckpt8.checkpoint.sources.live_object import recording_pickle, torch_writes, with_crc_fields
from ckpt8.checkpoint.sources.objects import CONSUMED, RestBuilder
from ckpt8.checkpoint.tree import Global, Inert, StorageInfo, TensorRef
from ckpt8.container.checks import CRC_BYTES
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.converting.choice import choose_model, hold, model_tensors
from ckpt8.converting.request import OpenFile, Report, Request
from ckpt8.converting.weights import WeightTypes, unpack_tree
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.atomic import Guard, temporary_directory
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
        tree = data.tree if key is None else models[0].node
        write_torch(request, report, data, tree, lambda ref: retyped.get(id(ref), ref))


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
    label = hollow.data.label
    with out.guard(), temporary_directory("ckpt8-") as folder:
        # torch names the records in the file after the file.
        link = folder / name
        link.symlink_to(out.path)
        storages = save_hollow(hollow.built, link, label, out.guard)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(out.path)
    if not storages:
        raise InputError(f"{label}: {NOTHING}")
    if unsafe:
        raise UnsupportedError(f"{label}: holds {unsafe[0]}, which this torch does not load")
    with open_checkpoint(out.path) as skeleton:
        places = with_crc_fields(skeleton)
    fill_storages(hollow, storages, places, out)


def save_hollow(obj: object, path: Path, label: str, guard: Guard) -> dict[str, torch.UntypedStorage]:
    """Save hollow objects with holes in place of their storages, which are returned by their names in the file.

    Raises OutputError by way of ``guard``, and UnsupportedError, opened by ``label``, for what torch does not save.
    """
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        with guard(), torch_writes(), torch.serialization.skip_data():
            torch.save(obj, path, pickle_module=cast("Any", recording_pickle(storages)))
    except RuntimeError as exc:
        raise UnsupportedError(f"{label}: cannot be saved by torch: {exc}") from exc
    return storages


def fill_storages(
    hollow: Hollow,
    saved: Mapping[str, torch.UntypedStorage],
    places: Iterable[StorageInfo],
    out: OpenFile,
) -> None:
    """Copy the content of the ``saved`` storages to their ``places`` in a file of torch, with their checksums.

    Raises InputError, OutputError.
    """
    for place in places:
        source = hollow.data.storage(hollow.keys[saved[place.key]._cdata])
        crc = 0
        for start in range(0, source.nbytes, _BLOCK_BYTES):
            content = host_bytes(min(_BLOCK_BYTES, source.nbytes - start))
            view = bytes_of(content)
            hollow.data.read_into(source.offset + start, view)
            out.write(view, place.offset + start)
            crc = combine(crc, crc32(view), len(view))
            out.progress(len(view))
        for field in place.crc_fields:
            out.write(crc.to_bytes(CRC_BYTES, "little"), field)
