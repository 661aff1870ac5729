"""The tensors that a rank saves: in the memory of the state where they lie there as they are, else made when read.

A value that is not contiguous, or that the planner makes anew each time it is asked, has a stand-in in the object that
is compressed: a storage of its size that nobody writes to. Its elements are copied chunk by chunk, so that memory
beside the state does not grow with the number of such values.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt8.core.tensors import DType

_KEPT = 4
"""Values that stay in memory after the planner has made them: weight and moments of a parameter, and one more."""

_LARGE = 1 << 16
"""Bytes from which on a stand-in has pages of its own: a process has no more than some ten thousand mappings."""

_DTYPES = frozenset(dtype.label for dtype in DType)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sources:
    """Asks ``planner`` for the values of a plan. ``made`` reads stand-ins, by the address of their storages."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._exact: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}
        self._views: dict[tuple[object, ...], torch.UntypedStorage] = {}
        self._dtypes: dict[tuple[torch.device, int], torch.dtype] = {}
        self._last = _Last(planner)
        self.made: dict[int, Callable[[int, memoryview], None]] = {}

    def resolve(self, item: WriteItem) -> Any:
        """The value of an item as the planner has it; a plain tensor, see ``is_plain``, in a storage that it fills."""
        value = self._planner.resolve_data(item)
        if not isinstance(value, torch.Tensor) or not is_plain(value) or not value.numel():
            return value
        shape, dtype, storage = value.shape, value.dtype, StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        del value
        if storage.expired():  # type: ignore[no-untyped-call]
            return self._stand_in(shape, dtype, self._new(shape, dtype, partial(self._last.value, item)))
        found = _tensor(self._planner, item)
        place = found.device, found.data_ptr()
        # torch.save writes no two types that begin at one place.
        known = self._dtypes.setdefault(place, dtype) is dtype
        if not known or not found.is_contiguous() or found.is_conj() or found.is_neg():
            return self._stand_in(shape, dtype, self._view(found))
        return self._in_place(found)

    def _in_place(self, value: torch.Tensor) -> torch.Tensor:
        """The same values in the same memory, in a storage that holds nothing else; values in one place share it."""
        whole = value.untyped_storage()
        nbytes = value.numel() * value.element_size()
        if nbytes == whole.nbytes():
            return value
        key = value.device, value.data_ptr(), nbytes
        if key not in self._exact:
            start = value.storage_offset() * value.element_size()
            self._exact[key] = whole[start : start + nbytes]
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(self._exact[key]).view(value.shape)

    def _view(self, value: torch.Tensor) -> torch.UntypedStorage:
        """The stand-in of a value in the memory of the state; equal views share it."""
        key = (
            value.device,
            value.data_ptr(),
            value.dtype,
            value.shape,
            value.stride(),
            value.is_conj(),
            value.is_neg(),
        )
        if key not in self._views:
            self._views[key] = self._new(value.shape, value.dtype, partial(_itself, _settled(value)))
        return self._views[key]

    def _new(self, shape: torch.Size, dtype: torch.dtype, value: Callable[[], torch.Tensor]) -> torch.UntypedStorage:
        storage = _untouched(prod(shape) * dtype.itemsize)
        self.made[storage.data_ptr()] = partial(_read, value)
        return storage

    @staticmethod
    def _stand_in(shape: torch.Size, dtype: torch.dtype, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)


class _Last:
    """The values that the planner has made last. Thread-safe."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._found: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def value(self, item: WriteItem) -> torch.Tensor:
        """The value of an item, which its plan keeps in memory."""
        with self._lock:
            if id(item) not in self._found:
                while len(self._found) >= _KEPT:
                    self._found.popitem(last=False)
                self._found[id(item)] = _settled(_tensor(self._planner, item))
            self._found.move_to_end(id(item))
            return self._found[id(item)]


def _untouched(nbytes: int) -> torch.UntypedStorage:
    """A storage that takes addresses, but no memory while nobody writes to it.

    The allocator would give a large one pages that the planner's values have used before.
    """
    if nbytes < _LARGE:
        return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The value of an item, without its gradient."""
    value: Any = planner.resolve_data(item)
    return cast("torch.Tensor", value.detach())


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _settled(value: torch.Tensor) -> torch.Tensor:
    """The value, once a GPU has computed it: other threads read it on streams of their own."""
    if value.is_cuda:
        torch.cuda.current_stream(value.device).synchronize()
    return value


def is_plain(value: torch.Tensor) -> bool:
    """Whether the elements are all there is to a tensor: no subclass, dense, of a known type."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return plain and not value.is_quantized and str(value.dtype).removeprefix("torch.") in _DTYPES


def _read(get: Callable[[], torch.Tensor], first: int, buffer: memoryview) -> None:
    """Fill ``buffer`` with the bytes of a value from ``first`` on, in the order of its elements."""
    value = get()
    size = value.element_size()
    start, stop = first // size, -(-(first + len(buffer)) // size)
    if first % size or len(buffer) % size:
        whole = bytearray((stop - start) * size)
        _read(get, start * size, memoryview(whole))
        buffer[:] = memoryview(whole)[first - start * size :][: len(buffer)]
        return
    if size in _INTEGERS and not (value.is_conj() or value.is_neg()):
        value = value.view(_INTEGERS[size])  # not every type can be copied
    if len(buffer):
        _fill(torch.frombuffer(buffer, dtype=torch.uint8).view(value.dtype), value, start)


def _fill(out: torch.Tensor, value: torch.Tensor, start: int) -> None:
    """Fill ``out``, which has one dimension, with the elements of ``value`` from ``start`` on. Makes no other copy."""
    if value.dim() <= 1:
        out.copy_(value[start : start + len(out)] if value.dim() else value)
        return
    row, at = value[0].numel(), 0
    while at < len(out):
        number, inside = divmod(start + at, row)
        rows = (len(out) - at) // row
        if inside or not rows:
            count = min(row - inside, len(out) - at)
            _fill(out[at : at + count], value[number], inside)
        else:
            count = rows * row
            out[at : at + count].view(rows, *value.shape[1:]).copy_(value[number : number + rows])
        at += count
