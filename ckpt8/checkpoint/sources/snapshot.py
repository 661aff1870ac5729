"""A copy of an object at one moment, made while training waits: a save in the background reads the copy.

``Snapshot`` walks containers, numbers, texts and plain tensors, and copies every storage once, into one piece of
memory; the pickle is made later, of the copies. An object of any other class is pickled at once, as ``live_checkpoint``
does, before its storages are copied. Both give the bytes that ``torch.save`` would have written at that moment.

The memory is borrowed until the last tensor that views it is gone. Then it is kept for the next snapshot, which need
not wait for new pages; ``give_back`` frees it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import Any

import torch
from torch.nn import Parameter

from ckpt8.checkpoint.sources.live_object import LiveCheckpoint, live_checkpoint
from ckpt8.checkpoint.tree import OpenCheckpoint
from ckpt8.core.closing import Closing
from ckpt8.core.gpu import padded
from ckpt8.core.workers import Workers, default_threads

_PAGE = 1 << 21
"""Memory is borrowed in multiples of a huge page."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all GPUs."""

_MOST_THREADS = 4
"""These reach the bandwidth of memory."""

_SMALL = 1 << 26
"""Bytes that are copied before other threads are at work."""

_memmove = ctypes.PyDLL(None).memmove
"""It keeps Python's lock, which another thread might hold for longer than a small copy takes."""
_memmove.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t

_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
"""Classes of objects that never change and that ``ckpt8.load`` takes."""


class NotPlainError(Exception):
    """An object that only its own pickle describes."""


class _Memory:
    """Pages for copies; ``pinned``: a GPU writes to them while nobody waits.

    A fork does not get them: the child needs none, and the parent would wait for new ones.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes, self.pinned, self.owner = nbytes, False, os.getpid()
        self.pages = mmap.mmap(-1, nbytes)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(AttributeError, OSError):
                self.pages.madvise(getattr(mmap, advice))
        if pinned:
            self._address = torch.frombuffer(self.pages, dtype=torch.uint8).data_ptr()
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(self._address, nbytes, _PORTABLE)))
            self.pinned = True

    def __del__(self) -> None:
        if self.pinned and self.owner == os.getpid():
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


_kept: list[_Memory] = []
"""What the last snapshot has given back, one at most. Operations on a list are atomic: tensors end in any thread."""


def give_back() -> None:
    """Free the memory that is kept for the next snapshot."""
    _kept.clear()


os.register_at_fork(after_in_child=give_back)


def borrow(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """At least ``nbytes`` of memory as a flat tensor, for as long as anything views it. Raises MemoryError."""
    size = max(-(-nbytes // _PAGE), 1) * _PAGE
    memory = None
    with suppress(IndexError):
        memory = _kept.pop()
    if memory is None or memory.pinned is not pinned or not size <= memory.nbytes <= 2 * size:
        memory = None  # it is freed before there is more
        try:
            memory = _Memory(size, pinned=pinned)
        except (OSError, RuntimeError) as exc:
            raise MemoryError(f"no memory for a copy of {nbytes:,} bytes; snapshot='packed' takes less") from exc
    view = memoryview(memory.pages)
    weakref.finalize(view, _keep, memory).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _keep(memory: _Memory) -> None:
    if memory.owner == os.getpid():
        _kept[:] = [memory]


class Copies:
    """Copies of storages of any device in memory that is borrowed. Raises MemoryError."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        sizes = [storage.nbytes() for storage in storages]
        cuts = [0, *accumulate(map(padded, sizes))]
        devices = {storage.device for storage in storages if storage.device.type == "cuda"}
        self._places = list(zip(cuts, sizes, strict=False))
        with torch.inference_mode(mode=False):  # other threads write to this memory
            self._memory = borrow(cuts[-1], pinned=bool(devices))
            if devices or cuts[-1] > _SMALL:
                self._copy(storages)
            else:
                first = self._memory.data_ptr()
                for (start, size), storage in zip(self._places, storages, strict=True):
                    _memmove(first + start, storage.data_ptr(), size)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def storages(self) -> list[torch.UntypedStorage]:
        """The copies."""
        whole = self._memory.untyped_storage()
        # An empty one has no address, else torch.save would take it for another type of what begins there.
        return [whole[start : start + size] if size else torch.UntypedStorage(0) for start, size in self._places]  # type: ignore[no-untyped-call]

    def _copy(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Have GPUs copy theirs, and meanwhile threads those of the CPU."""
        here = []
        for (start, size), storage in zip(self._places, storages, strict=True):
            copy = self._memory[start : start + size]
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if content.is_cuda:
                copy.copy_(content, non_blocking=True)
            else:
                here.append((copy, content))
        parts = _shares(here, min(default_threads(), _MOST_THREADS))
        # torch's own threads would wait for each other after every tensor, long where the processors are busy.
        with Workers(len(parts)) as workers:
            for _ in workers.map(lambda part: torch._foreach_copy_(*part), parts):
                pass


def _shares(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Flat copies and contents, cut into lists of as many bytes each."""
    share = sum(content.numel() for _, content in pairs) // count + 1
    parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], [])]
    room = share
    for copy, content in pairs:
        start, end = 0, content.numel()
        while start < end:
            if not room:
                parts.append(([], []))
                room = share
            stop = min(start + room, end)
            parts[-1][0].append(copy[start:stop])
            parts[-1][1].append(content[start:stop])
            start, room = stop, room - (stop - start)
    return parts


class Taken:
    """A tensor over the copy of its storage, made when it is pickled. A walk of another kind may ``wrap`` it."""

    __slots__ = ("_copies", "_dtype", "_is_parameter", "_number", "_place", "_requires_grad", "wrap")

    def __init__(self, tensor: torch.Tensor, number: int, copies: list[torch.UntypedStorage]) -> None:
        self._copies, self._number, self._dtype = copies, number, tensor.dtype
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._is_parameter, self._requires_grad = type(tensor) is Parameter, tensor.requires_grad
        self.wrap: Callable[[torch.Tensor], torch.Tensor] | None = None

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        tensor = torch.empty(0, dtype=self._dtype, device="cpu").set_(self._copies[self._number], *self._place)
        if self._is_parameter:
            tensor = Parameter(tensor, self._requires_grad)
        tensor.requires_grad_(self._requires_grad)
        return tensor if self.wrap is None else self.wrap(tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Walk:
    """Copies containers, with a ``Taken`` for each tensor; ``copies`` will be those of its ``storages``."""

    def __init__(self, copies: list[torch.UntypedStorage]) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._copies = copies
        self._known: dict[int, tuple[int, torch.dtype]] = {}
        self._made: dict[int, Any] = {}

    def copy(self, node: Any) -> Any:
        """A copy of ``node`` with the same pickle. Raises what ``other`` raises."""
        kind = type(node)
        if kind in _UNCHANGING:
            return node
        if (made := self._made.get(id(node))) is not None:
            return made
        if (kind is torch.Tensor or kind is Parameter) and (taken := self.taken(node)) is not None:
            made = self._made[id(node)] = taken
        elif (kind is dict or kind is OrderedDict) and _UNCHANGING.issuperset(map(type, node)):
            made = self._made[id(node)] = kind()
            for key, value in list(node.items()):  # another thread may change it meanwhile
                made[key] = self.copy(value)
            if kind is OrderedDict and (attributes := vars(node)):
                made.__dict__ = self.copy(attributes)  # which may stand elsewhere, too
        elif kind is list:
            made = self._made[id(node)] = []
            made.extend(node if _UNCHANGING.issuperset(map(type, node)) else map(self.copy, node))
        elif kind is tuple:
            copies = tuple(map(self.copy, node))
            is_same = all(copy is item for copy, item in zip(copies, node, strict=True))
            # A list inside may have led here again.
            made = self._made.setdefault(id(node), node if is_same else copies)
        else:
            made = self._made[id(node)] = self.other(node)
        return made

    def other(self, node: Any) -> Any:  # noqa: ARG002 - for walks of another kind
        """A copy of an object of any other class, or of a tensor that is more than its elements."""
        raise NotPlainError

    def taken(self, tensor: torch.Tensor) -> Taken | None:
        """A plain tensor over the copy of its storage; None for any other tensor."""
        if (
            tensor.layout is not torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor._backward_hooks is not None
            or vars(tensor)
        ):
            return None
        storage = tensor.untyped_storage()
        number, dtype = self._known.setdefault(storage._cdata, (len(self.storages), tensor.dtype))
        if number == len(self.storages):
            self.storages.append(storage)  # in any case: its address is known now
        is_plain = dtype is tensor.dtype and _end(tensor) <= storage.nbytes()
        return Taken(tensor, number, self._copies) if is_plain else None


def _end(tensor: torch.Tensor) -> int:
    """The bytes of a storage up to the last element of a tensor."""
    if tensor.is_contiguous():
        return int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset() + steps + 1) * tensor.element_size() if tensor.numel() else 0


class Snapshot(Closing):
    """``obj`` as it is now, for one save to a file of that ``name`` without its suffix.

    ``pickled`` is the checkpoint of an object that had to be pickled at once. Raises UsageError where it cannot be,
    OutputError, and MemoryError.
    """

    def __init__(self, obj: object, name: str) -> None:
        self._name = name
        self.pickled: OpenCheckpoint | None = None
        self._copy: Any = None
        self._copies: list[torch.UntypedStorage] = []
        self._locations: list[str | None] = []
        self._taken: Copies | None = None
        with ExitStack() as resources:
            walk = Walk(self._copies)
            try:
                self._copy = walk.copy(obj)
            except (NotPlainError, RecursionError):
                self.pickled = resources.enter_context(live_checkpoint(obj, name))
                if isinstance(self.pickled, LiveCheckpoint):
                    memory = self.pickled.memory
                    memory.update(zip(memory, Copies(list(memory.values())).storages(), strict=True))
            else:
                self._taken = Copies(walk.storages)
                self._locations = [
                    None if storage.device.type == "cpu" else torch.serialization.location_tag(storage)
                    for storage in walk.storages
                ]
            self._resources = resources.pop_all()

    @contextmanager
    def checkpoint(self) -> Iterator[OpenCheckpoint]:
        """The file of ``torch.save``, whose storages are the copies."""
        if self.pickled is not None:
            yield self.pickled
        elif self._taken is not None:
            self._copies += self._taken.storages()
            pairs = zip(self._copies, self._locations, strict=True)
            locations = {copy._cdata: location for copy, location in pairs if location is not None}
            with live_checkpoint(self._copy, self._name, locations=locations) as checkpoint:
                yield checkpoint

    def close(self) -> None:
        """Give the memory back."""
        self._resources.close()
        self.pickled = self._copy = self._taken = None
        self._copies.clear()
