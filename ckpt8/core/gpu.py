"""Copies between the host and a GPU: pinned memory, copies that overlap with computation, and marks to wait for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeAlias

from ckpt8.core.errors import UsageError, require
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts

Mark: TypeAlias = "torch.cuda.Event"
"""A point in a queue of copies: ``synchronize`` waits until everything queued before it is done."""


class CudaTransfer:
    """Copies to and from one CUDA device, with a stream for each direction.

    Copies overlap with computation on the device; the methods order one against the other. A new transfer first waits
    for what the current stream of the device has queued. ``kind`` is the type of the devices.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device).synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 host memory that the device reads and writes directly."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def active(self) -> AbstractContextManager[Any]:
        """A context in which this is the current device."""
        return torch.cuda.device(self._device)

    def download(self, parts: list[Parts], row: torch.Tensor) -> tuple[list[Parts], Mark]:
        """Queue a copy of ``parts`` into a ``row`` of pinned memory, after what the device is computing."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            copies = copy_to_row(parts, row, wait=False)
        for chunk in parts:
            for part in chunk.values():
                part.record_stream(self._down)
        return copies, self._down.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]

    def upload(self, row: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Queue the copy of a ``row`` of pinned memory to the device. Thread-safe."""
        with torch.cuda.stream(self._up):
            there = row.to(self._device, non_blocking=True)
        return there, self._up.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]

    def receive(self, row: torch.Tensor, mark: Mark) -> None:
        """Make later computation on the device wait for an upload."""
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(mark)
        row.record_stream(compute)


def requested(device: str) -> torch.device | None:
    """The GPU for ``cuda``, None for ``auto`` and ``cpu``. Raises UsageError when torch finds no CUDA device."""
    require(device in ("auto", "cpu", "cuda"), f"device {device!r}: expected one of auto, cpu, cuda", UsageError)
    if device != "cuda":
        return None
    require(torch.cuda.is_available(), "device 'cuda': torch finds no CUDA device here; use cpu", UsageError)
    return torch.device("cuda", torch.cuda.current_device())


ALIGNMENT = 64
"""Every part of a row begins at a multiple of this many bytes."""


def padded(nbytes: int) -> int:
    """Bytes that a part of ``nbytes`` takes in a row, with its padding."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def row_bytes(parts: Sequence[Parts]) -> int:
    """Bytes of the row that holds ``parts``."""
    return sum(padded(part.numel() * part.element_size()) for chunk in parts for part in chunk.values())


def cut_row(row: torch.Tensor, specs: Iterable[tuple[torch.dtype, int]]) -> Iterator[torch.Tensor]:
    """Views of ``row`` (flat uint8, any device), one for each element type and count."""
    start = 0
    for dtype, numel in specs:
        length = numel * dtype.itemsize
        yield row[start : start + length].view(dtype)
        start += padded(length)


def row_views(parts: Sequence[Parts], row: torch.Tensor) -> list[Parts]:
    """Views of ``row`` with the element types and lengths of ``parts``."""
    views = cut_row(row, ((part.dtype, part.numel()) for chunk in parts for part in chunk.values()))
    return [{name: next(views) for name in part} for part in parts]


def copy_to_row(parts: Sequence[Parts], row: torch.Tensor, *, wait: bool = True) -> list[Parts]:
    """Copy ``parts`` from any device into ``row`` and return the copies; without ``wait``, only queue them."""
    copies = row_views(parts, row)
    for chunk, there in zip(parts, copies, strict=True):
        for name, part in chunk.items():
            # As bytes: not every device copies every element type.
            there[name].view(torch.uint8).copy_(part.view(torch.uint8), non_blocking=not wait)
    return copies
