"""Fills tensors on a GPU from stored parts: uploads these, 5 bytes a parameter of ``flash``, and decodes them there."""

from __future__ import annotations

from collections import deque

import torch

from ckpt8.checkpoint.sources.stored_member import EncodedChunk, StoredParts
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.symbols import unpack_parts
from ckpt8.core.buffers import Buffers
from ckpt8.core.elements import assign
from ckpt8.core.gpu import CudaTransfer, Mark, copy_to_row, row_bytes, row_views
from ckpt8.core.tensors import Parts

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
