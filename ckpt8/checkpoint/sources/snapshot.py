"""A copy of an object at one moment, made while training waits: a save in the background reads the copy.

``Snapshot`` walks containers, numbers, texts, plain tensors and numpy arrays, and copies every storage once, into one
piece of memory; the pickle is made later, of the copies. An object of any other class is pickled at once, as
``live_checkpoint`` does, before its storages are copied. Both give the bytes that ``torch.save`` would have written at
that moment.

The memory is borrowed until the last tensor that views it is gone. Then it is kept for the next snapshot, which need
not wait for new pages; ``give_back`` frees it.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from ckpt8.checkpoint.sources.live_object import LiveCheckpoint, live_checkpoint
from ckpt8.checkpoint.tree import OpenCheckpoint
from ckpt8.core.closing import Closing
from ckpt8.core.gpu import padded
from ckpt8.core.workers import default_threads

_PAGE = 1 << 21
"""Memory is borrowed in multiples of a huge page."""

_ADVICE = (mmap.MADV_HUGEPAGE, 18) if sys.platform == "linux" else ()
"""The second is ``MADV_WIPEONFORK``, which Python does not name."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all GPUs."""

_MOST_HELPERS = 3
"""With the caller these reach the bandwidth of memory."""

_SHARED, _PIECE, _HELP = 1 << 18, 1 << 20, 1 << 23
"""Threads share storages of at least so many bytes, in pieces of at most so many; one more for each so many."""

_keep_lock, _let_lock = ctypes.PyDLL(None).memmove, ctypes.CDLL(None).memmove
"""The first keeps Python's lock: another thread might hold it for longer than a small copy takes."""
for _move in (_keep_lock, _let_lock):
    _move.argtypes, _move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None

_Place = tuple[int, torch.Size, tuple[int, ...]]

_CPU = torch.device("cpu")

_UNCHANGING = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
    | {np.dtype(code).type for code in "?bhilqBHILQefdFD"}
)
"""Classes of objects that never change and that ``ckpt8.load`` takes."""


class NotPlainError(Exception):
    """An object that only its own pickle describes."""


class _Memory:
    """Pages for copies; ``pinned``: a GPU writes to them while nobody waits.

    A fork gets zeros at their place: the parent would wait for new pages otherwise. With ``MADV_DONTFORK`` the child
    would put something else there, and lose that with this object.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes, self.pinned, self.owner = nbytes, False, os.getpid()
        self.round: object = None
        # Shared pages, which are the default, would be small ones, and slow to get.
        self.pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in _ADVICE:
            with suppress(OSError):
                self.pages.madvise(advice)
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

_round = [object()]
"""Another one after each ``give_back``; memory that was borrowed in an earlier one is not kept."""


def give_back() -> None:
    """Free the memory that is kept for the next snapshot; what is borrowed now will not be kept."""
    _round[0] = object()
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
    memory.round = _round[0]
    view = memoryview(memory.pages)
    weakref.finalize(view, _keep, memory).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _keep(memory: _Memory) -> None:
    if memory.owner == os.getpid() and memory.round is _round[0]:
        _kept[:] = [memory]


class Copies:
    """Copies of storages of any device in memory that is borrowed. Raises MemoryError."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        sizes = [storage.nbytes() for storage in storages]
        cuts = [0, *accumulate(map(padded, sizes))]
        self._places = list(zip(cuts, sizes, strict=False))
        self.gpus = {storage.device for storage in storages} - {_CPU}
        moves = []
        with torch.inference_mode(mode=False):  # other threads write to this memory
            self._memory = borrow(cuts[-1], pinned=bool(self.gpus))
            first = self._memory.data_ptr()
            for storage, start, size in zip(storages, cuts, sizes, strict=False):
                if storage.device == _CPU:
                    moves.append((first + start, storage.data_ptr(), size))
                else:
                    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                    self._memory[start : start + size].copy_(content, non_blocking=True)
        _move_all(moves, (self._memory, storages))
        for device in self.gpus:
            torch.cuda.current_stream(device).synchronize()

    def storages(self) -> list[torch.UntypedStorage]:
        """The copies."""
        whole = self._memory.untyped_storage()
        # An empty one has no address, else torch.save would take it for another type of what begins there.
        return [whole[start : start + size] if size else torch.UntypedStorage(0) for start, size in self._places]  # type: ignore[no-untyped-call]


def _move_all(moves: Sequence[tuple[int, int, int]], owners: object) -> None:
    """Copy so many bytes to an address from another. Threads that help hold on to the ``owners`` of the memory.

    A thread that a busy processor does not start in time has nothing left to do, and nobody waits for it.
    """
    pieces: list[tuple[int, int, int]] = []
    for target, source, size in moves:
        if size >= _SHARED:
            pieces += [(target + at, source + at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]

    def work(owners: object) -> None:  # noqa: ARG001
        with suppress(IndexError):
            while True:
                _let_lock(*pieces.pop())  # atomic

    def help_out(at_work: _thread.LockType, owners: object) -> None:
        with at_work:
            work(owners)

    shared = sum(size for _, _, size in pieces)
    count = min(default_threads() - 1, _MOST_HELPERS, shared // _HELP)
    helpers = [_thread.allocate_lock() for _ in range(count)]
    try:
        for at_work in helpers:
            _thread.start_new_thread(help_out, (at_work, owners))
        work(owners)
        for move in moves:
            if move[-1] < _SHARED:
                _keep_lock(*move)
    finally:
        pieces.clear()
        for at_work in helpers:
            with at_work:
                pass


class Taken:
    """A tensor over the copy of its storage, made when it is pickled. A walk of another kind may ``wrap`` it.

    ``place`` is its first element, its shape, and its strides.
    """

    __slots__ = ("_copies", "_dtype", "_is_parameter", "_number", "_place", "_requires_grad", "wrap")

    def __init__(
        self, tensor: torch.Tensor, dtype: torch.dtype, place: _Place, number: int, copies: list[torch.UntypedStorage]
    ) -> None:
        self._copies, self._number, self._dtype, self._place = copies, number, dtype, place
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
        self._known: dict[int, tuple[int, torch.dtype, int]] = {}
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
                made[key] = value if type(value) in _UNCHANGING else self.copy(value)
            if kind is OrderedDict and (attributes := vars(node)):
                made.__dict__ = self.copy(attributes)  # which may stand elsewhere, too
        elif kind is list:
            made = self._made[id(node)] = []
            made.extend(node if _UNCHANGING.issuperset(map(type, node)) else map(self.copy, node))
        elif kind is tuple:
            copies = node if _UNCHANGING.issuperset(map(type, node)) else tuple(map(self.copy, node))
            is_same = all(copy is item for copy, item in zip(copies, node, strict=True))
            # A list inside may have led here again.
            made = self._made.setdefault(id(node), node if is_same else copies)
        elif kind is Counter and _UNCHANGING.issuperset(map(type, [*node, *node.values(), *vars(node)])):
            made = self._made[id(node)] = Counter(node)
        elif kind is np.ndarray and not node.dtype.hasobject:
            made = self._made[id(node)] = node.copy(order="F" if node.flags.fnc else "C")
        else:
            made = self._made[id(node)] = self.other(node)
        return made

    def other(self, node: Any) -> Any:  # noqa: ARG002 - for walks of another kind
        """A copy of an object of any other class, or of a tensor that is more than its elements."""
        raise NotPlainError

    def taken(self, tensor: torch.Tensor) -> Taken | None:
        """A plain tensor over the copy of its storage; None for any other tensor."""
        dtype = tensor.dtype
        if (
            tensor.layout is not torch.strided
            or not (tensor.is_cpu or tensor.is_cuda)
            or tensor.is_quantized
            or tensor.is_nested
            or (dtype.is_complex and tensor.is_conj())
            or tensor.is_neg()
            or tensor._backward_hooks  # torch.load makes an empty one
            or tensor.__dict__
        ):
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = len(self.storages), dtype, storage.nbytes()
            self.storages.append(storage)  # in any case: its address is known now
        number, first_dtype, nbytes = known
        offset, shape, strides = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        if tensor.is_contiguous():
            end = tensor.nbytes
        else:
            end = (sum(map(mul, shape, strides)) - sum(strides) + 1) * dtype.itemsize if tensor.numel() else 0
        is_plain = dtype is first_dtype and offset * dtype.itemsize + end <= nbytes
        return Taken(tensor, dtype, (offset, shape, strides), number, self._copies) if is_plain else None


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
        self._locations: list[str] = []
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
                if self._taken.gpus:
                    self._locations = [torch.serialization.location_tag(storage) for storage in walk.storages]
            self._resources = resources.pop_all()

    @contextmanager
    def checkpoint(self) -> Iterator[OpenCheckpoint]:
        """The file of ``torch.save``, whose storages are the copies."""
        if self.pickled is not None:
            yield self.pickled
        elif self._taken is not None:
            self._copies += self._taken.storages()
            locations = {copy._cdata: place for copy, place in zip(self._copies, self._locations, strict=False)}
            with live_checkpoint(self._copy, self._name, locations=locations) as checkpoint:
                yield checkpoint

    def close(self) -> None:
        """Give the memory back."""
        self._resources.close()
        self.pickled = self._copy = self._taken = None
        self._copies.clear()
