"""Looks at the checkpoint to measure: its size, the files that torch opens, the layout for ZipNN; and opens them.

A checkpoint to measure, and a job of one operation on it. Imports no torch: ``cp`` and zstd run without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load

from ckpt8.checkpoint.gate import TORCH_FORMATS, is_loadable
from ckpt8.checkpoint.readers import safetensors
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile

RANKS_DO = ("save", "load", "async_save")
"""What ranks measure, on each of two sides."""

OWN, PLAIN = "ckpt8", "dcp"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint. ``nbytes`` is the size of its files.

    ``loaded`` are the members with tensors that ``torch.load(weights_only=True)`` or safetensors open, relative to the
    path; an empty one is the path itself. ``layout`` is the floating type of most of its bytes.
    """

    path: str
    nbytes: int
    directory: bool
    loaded: Sequence[str]
    layout: str

    @property
    def files(self) -> list[Path]:
        """The paths of ``loaded``."""
        return [Path(self.path) / member if member else Path(self.path) for member in self.loaded]


@dataclass(frozen=True, slots=True)
class Job:
    """``container`` holds ``source`` already; an operation writes to ``target``."""

    source: Source
    container: Path
    target: Path
    threads: int


_LAYOUTS = ("float32", "bfloat16", "float16")


def work(job: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Source at ``path``. Raises InputError."""
    return asdict(survey(Path(job["path"])))


def survey(path: Path) -> Source:
    """Look at a checkpoint without reading its tensors. Raises InputError if it holds none."""
    sizes: Counter[str] = Counter()
    loaded = []
    with open_source(path, containers=False) as bundle:
        if not bundle.holds_tensors:
            raise InputError(f"{path}: holds no tensors; there is nothing to measure")
        directory = bundle.directory is not None
        for member in bundle.members:
            storages = member.checkpoint.source_storages
            for storage in storages:
                sizes[storage.dtype.label] += storage.nbytes
            name = member.path if directory else ""
            if storages and _opens(path / name if name else path, member.checkpoint.format):
                loaded.append(name)
        return Source(str(path), bundle.size, directory, tuple(loaded), max(_LAYOUTS, key=lambda name: sizes[name]))


def load_file(path: Path) -> Any:
    """The object in a file of ``Source.loaded``, from torch or safetensors, read and not mapped."""
    with closing(SourceFile(ByteRange.of(path))) as file:
        is_safetensors = safetensors.sniff(file)
    return load(path) if is_safetensors else torch.load(path, weights_only=True, mmap=False)


def _opens(path: Path, kind: str) -> bool:
    """Whether ``load_file`` opens a file of this format. This reads files in the older format of torch."""
    return kind == "safetensors" or (kind in TORCH_FORMATS and is_loadable(path))
