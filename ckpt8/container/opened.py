"""The tensors of an open container, or of a directory of containers of ranks, by name: what ``ckpt8.open`` gives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ckpt8.codecs.error_stats import ErrorStats, read_error
from ckpt8.container.decoding import decode_tensor, fill_box
from ckpt8.container.facts import figures, tensor_facts
from ckpt8.container.joined import JoinedReader
from ckpt8.container.manifest import Manifest, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import GlobalTensor, Slice
from ckpt8.core.closing import Closing
from ckpt8.core.errors import UnknownNameError, UnsupportedError
from ckpt8.core.files.paths import as_path
from ckpt8.core.public import checked
from ckpt8.core.summary import Summarised
from ckpt8.core.tensors import Role, Strided, view_of_box
from ckpt8.core.text import counted, listed

T = TypeVar("T", bound=Strided | GlobalTensor)


class Tensors(Summarised, Closing, Generic[T]):
    """The tensors of an open checkpoint by name, as ``safetensors.safe_open`` gives them.

    Iteration, ``len`` and ``in`` go over the names; ``file[name]`` is ``file.get_tensor(name)``. The UsageError for an
    unknown name is a KeyError as well.
    """

    def __init__(self, path: Path, device: torch.device | str, tensors: Mapping[str, T]) -> None:
        self._path, self._device, self._tensors = path, device, tensors

    def _summary(self) -> Iterator[tuple[str, str]]:
        yield type(self).__name__, f"{self._path}: {counted(len(self), 'tensor')}"
        yield "metadata", ", ".join(f"{key} {value}" for key, value in (self.metadata() or {}).items())
        yield "names", listed(self._tensors)

    def keys(self) -> list[str]:
        """Names of all tensors, in the order of the checkpoint. Values that are no plain tensors are not listed."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor. Raises UsageError for an unknown name."""
        raise NotImplementedError

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be cut: ``file.get_slice(name)[:10]``. Raises UsageError for an unknown name."""
        return TensorSlice(self, name, self._tensor(name))

    def metadata(self) -> dict[str, str] | None:
        """What the checkpoint states about itself, as texts; None where it states nothing."""
        return None

    def _tensor(self, name: str) -> T:
        """What is known of one tensor. Raises UsageError for an unknown name."""
        if name not in self._tensors:
            near = get_close_matches(name, self._tensors, 3, 0.5)
            names = counted(len(self._tensors), "tensor")
            rest = f"near it are {listed(near)}" if near else f"keys() lists its {names}"
            raise UnknownNameError(f"{self._path}: has no tensor {name!r}; {rest}")
        return self._tensors[name]

    def _box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor | None:  # noqa: ARG002
        """A box of the tensor; None where only the whole of it can be had."""
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.get_tensor(name)


class TensorSlice:
    """A tensor of an open checkpoint that is read when it is cut. See ``Tensors.get_slice``."""

    def __init__(self, tensors: Tensors[T], name: str, tensor: T) -> None:
        self._tensors, self._name = tensors, name
        self._dtype, self._shape = tensor.dtype.torch, tuple(tensor.shape)

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> torch.dtype:
        """The element type."""
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) <= len(self._shape) and all(isinstance(part, slice) and part.step is None for part in parts):
            full = [slice(None)] * (len(self._shape) - len(parts))
            ranges = [range(*part.indices(size)) for part, size in zip((*parts, *full), self._shape, strict=True)]
            place = tuple(cut.start for cut in ranges), tuple(map(len, ranges))
            if (box := self._tensors._box(self._name, *place)) is not None:
                return box
        return self._tensors.get_tensor(self._name)[index]


class CheckpointFile(Tensors[TensorRecord]):
    """A ``.ckpt8`` opened for reading tensor by tensor; a context manager. See ``open``.

    >>> with ckpt8.open("run.ckpt8") as file:
    ...     "model.weight" in file.keys()
    True
    """

    def __init__(self, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
        path = as_path(path)
        self._reader = ContainerReader(path)
        super().__init__(path, device, {tensor.name: tensor for tensor in self._reader.manifest.tensors})

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    @property
    def manifest(self) -> Manifest:
        """Everything the container states about itself."""
        return self._reader.manifest

    def metadata(self) -> dict[str, str]:
        """The names and the preset of what is in the container."""
        manifest = self.manifest
        return {"preset": manifest.preset, "source": manifest.directory or manifest.members[0].path}

    @checked
    def get_tensor(self, name: str) -> torch.Tensor:
        """Decode one tensor, with its shape, strides and flags. Raises UsageError for an unknown name."""
        return decode_tensor(self._reader, self._tensor(name)).to(self._device)

    def _box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor | None:
        record = self._tensor(name)
        whole = record.numel * record.dtype.itemsize
        if not record.is_contiguous or record.flags or self._reader.manifest.storages[record.storage].nbytes != whole:
            return None
        target = torch.empty(sizes, dtype=record.dtype.torch, device=self._device)
        fill_box(self._reader, record.storage, record.dtype, record.shape, target, offsets)
        return target

    @checked
    def stats(self, name: str) -> dict[str, Any]:
        """Role, codec, sizes in bytes and error of one tensor. Raises UsageError for an unknown name."""
        return tensor_facts(self._reader.manifest, self._tensor(name))


class CheckpointDirectory(Tensors[GlobalTensor]):
    """A directory that ``Ckpt8StorageWriter`` wrote, opened as ``CheckpointFile`` opens one file; a context manager.

    Its tensors are those of the whole state dict, under the names of torch.distributed.checkpoint:
    ``optimizer.state.wte.weight.exp_avg``. See ``open``.
    """

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        self._joined = JoinedReader(path)
        index = self._joined.index
        order = dict.fromkeys([*(name for name in index.paths or {} if name in index.tensors), *index.tensors])
        tensors = {
            name: tensor
            for name, tensor in ((name, index.tensors[name]) for name in order)
            if tensor.is_whole or all(tensor.pickled(box) is None for box in tensor.boxes())
        }
        super().__init__(path, device, tensors)

    def close(self) -> None:
        """Close all files."""
        self._joined.close()

    @property
    def manifest(self) -> Manifest:
        """Everything that the containers state about themselves, as one."""
        return self._joined.manifest

    def _tensor(self, name: str) -> GlobalTensor:
        index = self._joined.index
        if name not in self._tensors and (name in index.tensors or name in index.objects):
            raise UnsupportedError(
                f"{self._path}: {name!r} is kept as torch.save writes it, not as a plain tensor; load it with "
                "ckpt8.load"
            )
        return super()._tensor(name)

    @checked
    def get_tensor(self, name: str) -> torch.Tensor:
        """Put one tensor together. Only its own slices are read, chunk by chunk.

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
        return out.to(self._device)

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
