"""The tensors of a directory of containers, one by one: put together from their slices, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckpt8.codecs.error_stats import ErrorStats, read_error
from ckpt8.container.decoding import decode_tensor, fill_tensor
from ckpt8.container.facts import figures, tensor_facts
from ckpt8.container.manifest import Manifest, TensorRecord
from ckpt8.container.sharded.index import GlobalTensor
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.container.sharded.layouts import Slice
from ckpt8.core.arguments import checked
from ckpt8.core.closing import Closing
from ckpt8.core.errors import UnsupportedError, UsageError
from ckpt8.core.tensors import Role


class CheckpointDirectory(Closing):
    """A directory that ``Ckpt8StorageWriter`` wrote, opened as ``CheckpointFile`` opens one file; a context manager.

    Its tensors are those of the whole state dict, under the names of torch.distributed.checkpoint:
    ``optimizer.state.wte.weight.exp_avg``. See ``open``.
    """

    def __init__(self, path: Path) -> None:
        self._joined = JoinedReader(path)
        index = self._joined.index
        first = [name for name in index.paths or {} if name in index.tensors]
        order = dict.fromkeys([*first, *index.tensors])
        self._tensors = {name: index.tensors[name] for name in order if not _is_pickled(index.tensors[name])}

    def close(self) -> None:
        """Close all files."""
        self._joined.close()

    @property
    def manifest(self) -> Manifest:
        """Everything that the containers state about themselves, as one."""
        return self._joined.manifest

    def keys(self) -> list[str]:
        """Names of all tensors, in the order of the state dict. Values that are no plain tensors are not listed."""
        return list(self._tensors)

    def _tensor(self, name: str) -> GlobalTensor:
        if name in self._tensors:
            return self._tensors[name]
        index = self._joined.index
        if name in index.tensors or name in index.objects:
            raise UnsupportedError(
                f"{self._joined.path}: {name!r} is kept as torch.save writes it, not as a plain tensor; load it with "
                "ckpt8.load"
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
            target = out
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            reader, record = self._joined.by_name[box.file], self._record(name, box)
            if record.is_contiguous:
                fill_tensor(reader, record, target)
            else:
                target.copy_(decode_tensor(reader, record))
        return out

    def _record(self, name: str, box: Slice) -> TensorRecord:
        return self._joined.slices[box.file][name, box.offsets]

    @checked
    def stats(self, name: str) -> dict[str, Any]:
        """Role, codec, sizes in bytes and error of one tensor, over all of its ``slices``. Raises as ``get_tensor``."""
        tensor, joined = self._tensor(name), self._joined
        boxes = tensor.boxes()
        records = [replace(self._record(name, box), storage=joined.storage_of(name, box)) for box in boxes]
        own = [tensor_facts(joined.manifest, record) for record in records]
        if not own:
            return _facts_of_nothing(tensor)
        found = {**own[0], "slices": len(own)}
        for key in ("codec", "reason"):
            found[key] = ", ".join(dict.fromkeys(each[key] for each in own if each[key] is not None)) or None
        for key in ("elements", "bytes", "stored_bytes"):
            found[key] = sum(each[key] for each in own)
        parts = dict.fromkeys(part for each in own for part in each["parts"])
        found["parts"] = {part: sum(each["parts"].get(part, 0) for each in own) for part in parts}
        found["masters"] = list(dict.fromkeys(master for each in own for master in each["masters"]))
        found["error"] = _error(joined.manifest, records)
        return found


def _is_pickled(tensor: GlobalTensor) -> bool:
    return not tensor.is_whole and any(tensor.pickled(box) is not None for box in tensor.boxes())


def _facts_of_nothing(tensor: GlobalTensor) -> dict[str, Any]:
    """Those of a tensor without elements, which no container holds."""
    known: dict[str, Any] = {"role": Role.OTHER.value, "dtype": tensor.dtype.label, "codec": None, "reason": None}
    sizes = dict.fromkeys(("elements", "bytes", "stored_bytes", "slices"), 0)
    return {**known, **sizes, "parts": {}, "masters": [], "error": None}


def _error(manifest: Manifest, records: Sequence[TensorRecord]) -> dict[str, Any] | None:
    """The figures of the error of all slices together; None unless that of each was measured, and alike."""
    errors: list[Any] = [read_error(manifest.storages[record.storage].error) for record in records]
    total = errors[0]
    for each in errors[1:]:
        if not isinstance(total, ErrorStats) or type(each) is not type(total):
            return None
        total.merge(each)
    return figures(total) if total else None
