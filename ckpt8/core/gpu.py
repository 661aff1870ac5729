"""Copies between the host and a GPU: pinned memory, copies that overlap with computation, and marks to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, cast

import torch

from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Parts

DEVICES = ("auto", "cpu", "cuda")
_SMALLEST_BUFFER = 1 << 20


class Mark(Protocol):
    """A point in a queue of copies."""

    def synchronize(self) -> None:
        """Wait until everything queued before the mark is done."""


class Transfer(Protocol):
    """Copies to and from one device. ``kind`` is the device type that a class serves.

    Copies overlap with computation on the device; the methods order one against the other.
    """

    kind: ClassVar[str]

    def __init__(self, device: torch.device) -> None: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 host memory that the device reads and writes directly."""

    def active(self) -> AbstractContextManager[Any]:
        """A context in which this is the current device."""

    def download(self, parts: list[Parts], row: torch.Tensor) -> tuple[list[Parts], Mark]:
        """Queue a copy of ``parts`` into a ``row`` of pinned memory, after what the device is computing."""

    def upload(self, row: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Queue the copy of a ``row`` of pinned memory to the device. Thread-safe."""

    def receive(self, row: torch.Tensor, mark: Mark) -> None:
        """Make later computation on the device wait for an upload."""


class CudaTransfer:
    """A CUDA device with one stream for each direction. Waits first for what its current stream has queued."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._cuda = torch.cuda
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device).synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """As ``Transfer``."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def active(self) -> AbstractContextManager[Any]:
        """As ``Transfer``."""
        return self._cuda.device(self._device)

    def download(self, parts: list[Parts], row: torch.Tensor) -> tuple[list[Parts], Mark]:
        """As ``Transfer``."""
        self._down.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._down):
            copies = copy_to_row(parts, row, wait=False)
        for each in parts:
            for part in each.values():
                part.record_stream(self._down)
        return copies, self._mark(self._down)

    def upload(self, row: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """As ``Transfer``."""
        with self._cuda.stream(self._up):
            there = row.to(self._device, non_blocking=True)
        return there, self._mark(self._up)

    def receive(self, row: torch.Tensor, mark: Mark) -> None:
        """As ``Transfer``."""
        compute = self._cuda.current_stream(self._device)
        compute.wait_event(cast("torch.cuda.Event", mark))
        row.record_stream(compute)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class PinnedBuffers:
    """A pool of pinned buffers; it grows to as many as are in use at once."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """The smallest free buffer of at least ``nbytes``, or a new one; its content is arbitrary."""
        with self._lock:
            fitting = [k for k, buffer in enumerate(self._free) if len(buffer) >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda k: len(self._free[k])))
        return self._make(max(_SMALLEST_BUFFER, 1 << (nbytes - 1).bit_length()))

    def give(self, buffer: torch.Tensor) -> None:
        """Give back a buffer that no copy uses any more."""
        with self._lock:
            self._free.append(buffer)


def requested(device: str) -> torch.device | None:
    """The GPU for ``cuda``, None for ``auto`` and ``cpu``. Raises UsageError when torch finds no CUDA device."""
    if device not in DEVICES:
        raise UsageError(f"device {device!r}: expected one of {', '.join(DEVICES)}")
    if device != "cuda":
        return None

    if not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch finds no CUDA device here; use cpu")
    return torch.device("cuda", torch.cuda.current_device())


ALIGNMENT = 64
"""Every part of a row begins at a multiple of this many bytes."""


def padded(nbytes: int) -> int:
    """Bytes that a part of ``nbytes`` takes in a row, padding included."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def row_bytes(parts: Sequence[Parts]) -> int:
    """Bytes of the row that holds ``parts``."""
    return sum(padded(part.numel() * part.element_size()) for each in parts for part in each.values())


def row_views(parts: Sequence[Parts], row: torch.Tensor) -> list[Parts]:
    """Views of ``row`` (flat uint8, any device) with the element types and lengths of ``parts``."""
    views: list[Parts] = []
    start = 0
    for each in parts:
        views.append({})
        for name, part in each.items():
            length = part.numel() * part.element_size()
            views[-1][name] = row[start : start + length].view(part.dtype)
            start += padded(length)
    return views


def copy_to_row(parts: Sequence[Parts], row: torch.Tensor, *, wait: bool = True) -> list[Parts]:
    """Copy ``parts`` from any device into ``row`` and return the copies; without ``wait``, only queue them."""
    copies = row_views(parts, row)
    for each, there in zip(parts, copies, strict=True):
        for name, part in each.items():
            # As bytes: not every device copies every element type.
            there[name].view(torch.uint8).copy_(part.view(torch.uint8), non_blocking=not wait)
    return copies
