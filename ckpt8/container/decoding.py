"""Decodes storages and tensors, checks every frame by decoding it, and opens files for reading tensor by tensor.

``ckpt8.open`` gives the tensors of a container, or of a directory of those of ranks, one by one, by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Generic

import torch

from ckpt8.codecs.error_stats import ErrorStats, read_error
from ckpt8.container.facts import figures, tensor_facts
from ckpt8.container.header import FRAME, chunk_count
from ckpt8.container.joined import JoinedReader, Stored
from ckpt8.container.manifest import Manifest, Pack, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import GlobalTensor, Slice, find_sharded
from ckpt8.core.closing import Closing, T
from ckpt8.core.errors import InputError, UnsupportedError, UsageError, require
from ckpt8.core.public import checked
from ckpt8.core.tensors import Box, DType, Role, cut_into_boxes, overlap, view_of_box
from ckpt8.core.workers import Progress, Workers, scratch_elements

Chunk = tuple[int, int]
"""The index of a storage, and the number of one of its chunks."""


def decode_storage(reader: ContainerReader, storage: int) -> torch.Tensor:
    """One storage as a flat CPU tensor. Raises InputError that names the tensor where it is damaged."""
    record = reader.manifest.storages[storage]
    out = torch.empty(record.numel, dtype=record.dtype.torch, device="cpu")
    for chunk, start in enumerate(range(0, record.numel, FRAME)):
        reader.fill_chunk(storage, chunk, out[start : start + FRAME])
    return out


def decode_tensor(reader: ContainerReader, tensor: TensorRecord) -> torch.Tensor:
    """One tensor with its shape, strides and flags. Raises InputError for damage, or where its storage is too small."""
    flat = decode_storage(reader, tensor.storage)
    try:
        view = flat.view(tensor.dtype.torch).as_strided(tensor.shape, tensor.stride, tensor.offset)
        view = view.conj() if "conj" in tensor.flags else view
        return torch._neg_view(view) if "neg" in tensor.flags else view
    except (AttributeError, RuntimeError) as exc:
        raise InputError(f"{reader.path}: {tensor.name}: does not fit its storage, or this torch") from exc


def fill_box(
    reader: ContainerReader,
    storage: int,
    dtype: DType,
    shape: Sequence[int],
    target: torch.Tensor,
    offsets: Sequence[int] | None = None,
    workers: Workers | None = None,
) -> None:
    """Fill ``target``, of any type, strides and device, with its box of a tensor, which begins at ``offsets``.

    The contiguous tensor of ``dtype`` and ``shape`` is all of a storage; that may count elements of another size, such
    as bytes. Decodes only the chunks that have elements of the box. Raises InputError for damage.
    """
    if not target.numel():
        return
    shape, offsets = tuple(shape), tuple(offsets or [0] * len(shape))
    if shape and target.is_contiguous():
        # Dimensions behind the last one that is cut are one with it: most chunks then go where they belong.
        cut = max((dim for dim, size in enumerate(target.shape) if size != shape[dim]), default=0)
        inner = prod(shape[cut + 1 :])
        shape, offsets = (*shape[:cut], shape[cut] * inner), (*offsets[:cut], offsets[cut] * inner)
        target = target.view(*target.shape[:cut], -1)
    stored, box = reader.manifest.storages[storage].dtype, (offsets, tuple(target.shape))
    in_chunk = FRAME * stored.itemsize // dtype.itemsize

    def chunks() -> Iterator[tuple[int, list[tuple[int, Box, Box]]]]:
        """The chunks to decode, with their boxes, where these begin, and what is in the target."""
        ends = [offset + size - 1 for offset, size in zip(*box, strict=True)]
        for chunk in range(_position(shape, offsets) // in_chunk, _position(shape, ends) // in_chunk + 1):
            first = chunk * in_chunk
            boxes = cut_into_boxes(shape, first, min(first + in_chunk, prod(shape)))
            parts = [(at - first, own, both) for at, own in boxes if (both := overlap(own, box)) is not None]
            if parts:
                yield chunk, parts

    def decode(work: tuple[int, list[tuple[int, Box, Box]]]) -> None:
        chunk, parts = work
        spec = reader.chunk_spec(storage, chunk)
        out = view_of_box(target, parts[0][2], offsets)
        if (
            out.numel() * dtype.itemsize == spec.numel * stored.itemsize
            and (out.dtype, out.device.type) == (dtype.torch, "cpu")
            and out.is_contiguous()
            and not (out.is_conj() or out.is_neg())
            and stored.itemsize <= dtype.itemsize
        ):
            reader.fill_chunk(storage, chunk, out.view(-1).view(stored.torch))
            return
        elements = scratch_tensor(reader, storage, chunk)
        reader.fill_chunk(storage, chunk, elements)
        elements = elements.view(dtype.torch)
        for at, (starts, sizes), both in parts:
            own = elements[at : at + prod(sizes)].view(sizes)
            view_of_box(target, both, offsets).copy_(view_of_box(own, both, starts))

    for _ in (workers.map if workers is not None else map)(decode, chunks()):
        pass


def _position(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where the element at ``offsets`` is in the flat tensor."""
    return sum(offset * prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


def check_frames(
    reader: ContainerReader,
    workers: Workers,
    progress: Progress = lambda _: None,
    only: Iterable[int] | None = None,
) -> None:
    """Read, check and decode every chunk of all storages, or of ``only`` some. Raises InputError naming the tensor."""

    def decode(batch: list[Chunk]) -> int:
        nbytes = 0
        for storage, chunk in batch:
            out = scratch_tensor(reader, storage, chunk)
            reader.fill_chunk(storage, chunk, out)
            nbytes += out.numel() * out.element_size()
        return nbytes

    storages = range(len(reader.manifest.storages)) if only is None else only
    for nbytes in workers.map(decode, all_chunks(reader, storages)):
        progress(nbytes)


def all_chunks(reader: ContainerReader, storages: Iterable[int]) -> Iterator[list[Chunk]]:
    """Every chunk of the given storages, in batches for one thread: those of one pack come together."""
    packs: dict[Pack, list[Chunk]] = {}
    for index in storages:
        record = reader.manifest.storages[index]
        chunks = ((index, chunk) for chunk in range(chunk_count(record.numel)))
        if record.pack is None:
            yield from ([chunk] for chunk in chunks)
        else:
            packs.setdefault(record.pack, []).extend(chunks)
    yield from packs.values()


def scratch_tensor(reader: ContainerReader, storage: int, chunk: int) -> torch.Tensor:
    """The buffer of the calling thread, shaped for the elements of one chunk; the next call overwrites it."""
    spec = reader.chunk_spec(storage, chunk)
    return scratch_elements("decode", spec.dtype.torch, spec.numel)


class _Opened(Closing, Generic[T]):
    """Tensors by name, of what ``open`` opens."""

    def __init__(self, stored: Stored, tensors: dict[str, T]) -> None:
        self._stored, self._tensors = stored, tensors

    def close(self) -> None:
        """Close all files."""
        self._stored.close()

    @property
    def manifest(self) -> Manifest:
        """Everything that is stated of the tensors: of a directory that of all its containers, as one."""
        return self._stored.manifest

    def keys(self) -> list[str]:
        """Names of all tensors, in the order of the checkpoint. Values that are no plain tensors are not listed."""
        return list(self._tensors)


class CheckpointFile(_Opened[TensorRecord]):
    """A ``.ckpt8`` opened for reading tensor by tensor; a context manager. See ``open``.

    >>> with ckpt8.open("run.ckpt8") as file:
    ...     "model.weight" in file.keys()
    True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader = ContainerReader(Path(path))
        super().__init__(self._reader, {tensor.name: tensor for tensor in self._reader.manifest.tensors})

    def _record(self, name: str) -> TensorRecord:
        require(name in self._tensors, f"{self._reader.path}: has no tensor {name!r}", UsageError)
        return self._tensors[name]

    @checked
    def get_tensor(self, name: str) -> torch.Tensor:
        """Decode one tensor, with its shape, strides and flags, on the CPU. Raises UsageError for an unknown name."""
        return decode_tensor(self._reader, self._record(name))

    @checked
    def stats(self, name: str) -> dict[str, Any]:
        """Role, codec, sizes in bytes and error of one tensor. Raises UsageError for an unknown name."""
        return tensor_facts(self._reader.manifest, self._record(name))


class CheckpointDirectory(_Opened[GlobalTensor]):
    """A directory that ``Ckpt8StorageWriter`` wrote, opened as ``CheckpointFile`` opens one file; a context manager.

    Its tensors are those of the whole state dict, under the names of torch.distributed.checkpoint:
    ``optimizer.state.wte.weight.exp_avg``. See ``open``.
    """

    def __init__(self, path: Path) -> None:
        self._joined = JoinedReader(path)
        index = self._joined.index
        order = dict.fromkeys([*(name for name in index.paths or {} if name in index.tensors), *index.tensors])
        super().__init__(
            self._joined,
            {
                name: tensor
                for name, tensor in ((name, index.tensors[name]) for name in order)
                if tensor.is_whole or all(tensor.pickled(box) is None for box in tensor.boxes())
            },
        )

    def _tensor(self, name: str) -> GlobalTensor:
        if name in self._tensors:
            return self._tensors[name]
        index = self._joined.index
        require(
            name not in index.tensors and name not in index.objects,
            f"{self._joined.path}: {name!r} is kept as torch.save writes it, not as a plain tensor; load it with "
            "ckpt8.load",
            UnsupportedError,
        )
        raise UsageError(f"{self._joined.path}: has no tensor {name!r}")

    @checked
    def get_tensor(self, name: str) -> torch.Tensor:
        """Put one tensor together on the CPU. Only its own slices are read, chunk by chunk.

        Raises UsageError for an unknown name, UnsupportedError for a value that is no plain tensor, and InputError for
        damage.
        """
        tensor = self._tensor(name)
        out = torch.empty(tensor.shape, dtype=tensor.dtype.torch, device="cpu")
        for box in tensor.boxes():
            target = view_of_box(out, (box.offsets, box.sizes))
            reader, record = self._joined.by_name[box.file], self._record(name, box)
            if record.is_contiguous:
                fill_box(reader, record.storage, record.dtype, record.shape, target)
            else:
                target.copy_(decode_tensor(reader, record))
        return out

    def _record(self, name: str, box: Slice) -> TensorRecord:
        return self._joined.slices[box.file][name, box.offsets]

    @checked
    def stats(self, name: str) -> dict[str, Any]:
        """Role, codec, sizes in bytes and error of one tensor, over all of its ``slices``. Raises as ``get_tensor``."""
        tensor, joined = self._tensor(name), self._joined
        records = [replace(self._record(name, box), storage=joined.storage_of(name, box)) for box in tensor.boxes()]
        own = [tensor_facts(joined.manifest, record) for record in records]
        if not own:  # a tensor without elements, which no container holds
            return {
                "role": Role.OTHER.value,
                "dtype": tensor.dtype.label,
                **dict.fromkeys(("codec", "reason")),
                **dict.fromkeys(("elements", "bytes", "stored_bytes", "slices"), 0),
                "parts": {},
                "masters": [],
                "error": None,
            }
        parts = dict.fromkeys(part for record in own for part in record["parts"])
        return {
            **own[0],
            **{
                key: ", ".join(dict.fromkeys(record[key] for record in own if record[key] is not None)) or None
                for key in ("codec", "reason")
            },
            **{key: sum(record[key] for record in own) for key in ("elements", "bytes", "stored_bytes")},
            "parts": {part: sum(record["parts"].get(part, 0) for record in own) for part in parts},
            "masters": list(dict.fromkeys(master for record in own for master in record["masters"])),
            "error": _error(joined.manifest, records),
            "slices": len(own),
        }


def _error(manifest: Manifest, records: Sequence[TensorRecord]) -> dict[str, Any] | None:
    """The figures of the error of all slices together; None unless that of each was measured, and alike."""
    errors: list[Any] = [read_error(manifest.storages[record.storage].error) for record in records]
    total = errors[0]
    for error in errors[1:]:
        if not isinstance(total, ErrorStats) or type(error) is not type(total):
            return None
        total.merge(error)
    return figures(total) if total else None


@checked
def open_container(path: str | os.PathLike[str]) -> CheckpointFile | CheckpointDirectory:
    """Open a ``.ckpt8`` lazily: ``keys``, ``get_tensor``, ``stats``. Raises InputError for damage.

    Of a directory that ``Ckpt8StorageWriter`` wrote it gives whole tensors, put together from the slices of all ranks.

    >>> with ckpt8.open("run.ckpt8") as file:
    ...     file.get_tensor("model.weight").dtype
    torch.float32
    """
    directory = find_sharded(Path(path))
    return CheckpointFile(path) if directory is None else CheckpointDirectory(directory)
