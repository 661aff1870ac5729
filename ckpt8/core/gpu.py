"""A GPU as seen from the host: pinned memory, copies that run beside the computation, and marks to wait for them."""

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
        """Return once everything before it is done."""


class Transfer(Protocol):
    """One device as seen from the host. ``kind`` is the type of the devices that a class serves.

    Copies run beside the computation on the device and are ordered against it here.
    """

    kind: ClassVar[str]

    def __init__(self, device: torch.device) -> None: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 memory on the host that the device can read and write by itself."""

    def active(self) -> AbstractContextManager[Any]:
        """Make it the current device."""

    def download(self, parts: list[Parts], row: torch.Tensor) -> tuple[list[Parts], Mark]:
        """Queue the copy of ``parts`` into a ``row`` of pinned memory, behind what the device computes now."""

    def upload(self, row: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Queue the copy of a ``row`` of pinned memory to the device. Thread-safe."""

    def receive(self, row: torch.Tensor, mark: Mark) -> None:
        """Let what the device computes from now on wait for an upload."""


class CudaTransfer:
    """A CUDA device, with one stream for each direction. What was queued on its current stream is done by then."""

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
    """Pinned memory that is used again, as much as is in use at once."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least ``nbytes``, whatever it holds: the smallest that is free, or a new one."""
        with self._lock:
            fitting = [k for k, buffer in enumerate(self._free) if len(buffer) >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda k: len(self._free[k])))
        return self._make(max(_SMALLEST_BUFFER, 1 << (nbytes - 1).bit_length()))

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that no copy reads or writes any more."""
        with self._lock:
            self._free.append(buffer)


def requested(device: str) -> torch.device | None:
    """The GPU that ``auto``, ``cpu`` or ``cuda`` asks for. Raises UsageError where it cannot be had."""
    if device not in DEVICES:
        raise UsageError(f"device {device!r}: expected one of {', '.join(DEVICES)}")
    if device != "cuda":
        return None

    if not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch finds no CUDA device here; use cpu")
    return torch.device("cuda", torch.cuda.current_device())


ALIGNMENT = 64
"""Every part of a row begins at a multiple of these bytes."""


def padded(nbytes: int) -> int:
    """Bytes that something of ``nbytes`` takes in a row."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def row_bytes(parts: Sequence[Parts]) -> int:
    """Bytes of the row that holds ``parts``."""
    return sum(padded(part.numel() * part.element_size()) for each in parts for part in each.values())


def row_views(parts: Sequence[Parts], row: torch.Tensor) -> list[Parts]:
    """Where each of ``parts`` lies in ``row``, flat uint8 of any device: tensors of the same types and lengths."""
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
    """Copy ``parts``, of any device, into ``row``; the copies. Without ``wait`` the copies are only queued."""
    copies = row_views(parts, row)
    for each, there in zip(parts, copies, strict=True):
        for name, part in each.items():
            # As bytes: not every device copies every element type.
            there[name].view(torch.uint8).copy_(part.view(torch.uint8), non_blocking=not wait)
    return copies
