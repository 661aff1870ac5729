"""The operations on objects in memory that ``bench`` measures, ours and torch's, and the look at the checkpoint before.

Each operation imports what its first call would, then works against the clock.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_safetensors
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_leaves

import ckpt8
from ckpt8.checkpoint.readers import safetensors
from ckpt8.checkpoint.sources.gate import TORCH_FORMATS, is_loadable
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.cli.bench.probe import DCP, Job, Operation, Source, flush, remove
from ckpt8.core.errors import require
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.workers import settle

_LAYOUTS = ("float32", "bfloat16", "float16")

COPY, BACKGROUND = "copy in memory", "save in the background"


def survey(path: Path) -> Source:
    """Look at a checkpoint without reading its tensors. Raises InputError if it holds none."""
    sizes: Counter[str] = Counter()
    loaded = []
    with open_source(path, containers=False) as bundle:
        require(bundle.holds_tensors, f"{path}: holds no tensors; there is nothing to measure")
        directory = bundle.directory is not None
        for member in bundle.members:
            storages = member.checkpoint.source_storages
            for storage in storages:
                sizes[storage.dtype.label] += storage.nbytes
            name = member.path if directory else ""
            # ``_load_file`` must open it. This reads files in the older format of torch.
            kind, file = member.checkpoint.format, path / name if name else path
            if storages and (kind == "safetensors" or (kind in TORCH_FORMATS and is_loadable(file))):
                loaded.append(name)
        return Source(str(path), bundle.size, directory, tuple(loaded), max(_LAYOUTS, key=lambda name: sizes[name]))


def _load_file(path: Path) -> Any:
    """The object in a file of ``Source.loaded``, from torch or safetensors, read and not mapped."""
    with closing(SourceFile(ByteRange.of(path))) as file:
        is_safetensors = safetensors.sniff(file)
    return load_safetensors(path) if is_safetensors else torch.load(path, weights_only=True, mmap=False)


def _load(job: Job) -> Callable[[], object]:
    """``ckpt8.load`` of every member that ``torch.load`` opens."""
    settle()
    return lambda: [
        ckpt8.load(job.container, member=member or None, threads=job.threads) for member in job.source.loaded
    ]


def _save(job: Job) -> Callable[[], object]:
    """``ckpt8.save`` of the objects in memory."""
    settle()
    return partial(ckpt8.save, _objects(job), job.target, threads=job.threads)


def _torch_save(job: Job) -> Callable[[], object]:
    """``torch.save`` and fsync of the objects in memory."""
    objects = _objects(job)

    def run() -> None:
        torch.save(objects, job.target)
        flush(job.target)

    return run


def _in_background(job: Job) -> Callable[[], object]:
    """``ckpt8.save`` of the objects in the background, the second time."""
    settle()
    objects = _objects(job)

    def run() -> Any:
        return ckpt8.save(objects, job.target, threads=job.threads, background=True)

    run().result()
    return run


def _async_save(job: Job) -> Callable[[], object]:
    """``async_save`` of torch.distributed.checkpoint, the second time."""
    state = {"checkpoint": _objects(job)}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it says so in a thread, at any time

    def run() -> Any:
        return async_save(state, storage_writer=FileSystemWriter(job.target), no_dist=True)

    run().result()
    remove(job.target)
    return run


def distinct_tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors in ``tree``; those that begin at one address count once."""
    tensors = [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


class TensorCopy:
    """Copies ``tensors``, with ``copy_``, into memory that was allocated and written to before."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._copies = [tensor.clone() for tensor in tensors]

    def seconds(self, threads: int) -> float:
        """Copy with so many threads of torch; return how long that takes."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        start = time.perf_counter()
        for copy, tensor in zip(self._copies, self.tensors, strict=True):
            copy.copy_(tensor)
        seconds = time.perf_counter() - start
        torch.set_num_threads(before)
        return seconds


def _copy_in_memory(job: Job) -> Callable[[], object]:
    """A ``TensorCopy``, with one thread where torch's threads wait longer for each other than they save."""
    copy, threads = TensorCopy(distinct_tensors(_objects(job))), torch.get_num_threads()
    return partial(copy.seconds, min((threads, 1), key=copy.seconds))


def _objects(job: Job) -> Any:
    """The checkpoint in memory: one object, or a list of those of several files."""
    objects = [_load_file(file) for file in job.source.files]
    return objects[0] if len(objects) == 1 else objects


OPERATIONS: dict[str, Operation] = {
    "load": _load,
    "torch.load": lambda job: lambda: [_load_file(file) for file in job.source.files],
    "save": _save,
    "torch.save": _torch_save,
    COPY: _copy_in_memory,
    BACKGROUND: _in_background,
    DCP: _async_save,
}
"""The operations of this module by their names in the report."""

IN_MEMORY = ("load", "torch.load", "save", "torch.save")
"""Operations that hold all tensors at once, as every training script does."""

TWICE = (COPY, BACKGROUND, DCP)
"""Those that hold all tensors, and a copy of them."""
