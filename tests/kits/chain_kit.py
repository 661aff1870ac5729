"""Chains of containers on one lattice, without an encoder: symbols are moved and written as differences."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from budget_kit import run_of

import ckpt8
from ckpt8.codecs.lattice.reference import from_zigzag, zigzag
from ckpt8.container.manifest import BaseRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.container.symbols import difference
from ckpt8.container.writer import write_again
from ckpt8.core.arrays import as_arrays, as_tensors
from ckpt8.core.tensors import Role
from ckpt8.core.workers import Workers

SHAPES = [(64, 96), (80, 64)]


def key_of(folder: Path, name="key.ckpt8", shapes=SHAPES, dtype=torch.float32, **options) -> Path:
    """A container to begin a chain with."""
    torch.save(run_of(shapes, dtype=dtype), folder / "run.pt")
    ckpt8.compress(folder / "run.pt", folder / name, **(options or {"budget": 1}))
    (folder / "run.pt").unlink()
    return folder / name


def moved(source: Path, target: Path, seed: int) -> Path:
    """A container on the same lattice, some of whose values are others: also zeros, and what was zero."""
    with ContainerReader(source) as reader, Workers(1) as workers:
        changed = {index: partial(_moved, reader, index, seed) for index in _partners(reader)}
        write_again(reader, target, workers, deepcopy(reader.manifest), changed, force=False)
    return target


def _partners(reader):
    """The storages that a delta may have as differences."""
    for index, record in enumerate(reader.manifest.storages):
        codec = reader.codec(index)
        is_free = not codec.companions and codec.copied is None and record.pack is None
        if is_free and record.role is not Role.MOMENT1 and not reader.is_plain(index):
            yield index


def _moved(reader, index, seed, chunk):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    parts = as_tensors(reader.read_parts(index, chunk))
    for name, part in parts.items():
        n = len(part)
        if part.dtype is torch.int32:
            step = torch.randint(-3, 4, (n,), generator=generator, dtype=torch.int32)
            found = zigzag(from_zigzag(part) + step).where(part >= 0, part)
            gone = torch.rand(n, generator=generator) < 0.03
            new = (torch.rand(n, generator=generator) < 0.3) & (part < 0)
            parts[name] = found.masked_fill(gone, -1).where(~new, step.abs())
        elif name == "plane3" or (name == "plane1" and "plane2" not in parts):
            parts[name] = part ^ (torch.rand(n, generator=generator) < 0.2).to(torch.uint8)
    return as_arrays(parts)


def delta(whole: Path, base: Path, target: Path, *, only=None, **changes) -> Path:
    """The container ``whole`` as a delta to ``base``, which is on the same lattice."""
    with ContainerReader(whole) as reader, ContainerReader(base) as below, Workers(1) as workers:
        manifest = deepcopy(reader.manifest)
        record, seal = below.manifest.base, below.seal.hex()
        place, links, key = (0, 0, seal) if record is None else (record.place, record.links, record.key)
        fields = {"seal": seal, "path": base.name, "key": key, "place": place + 1, "links": links + 1}
        manifest.base = BaseRecord(**{**fields, **changes})
        changed = {}
        for index in _partners(reader) if only is None else only:
            manifest.storages[index].base = index
            changed[index] = partial(_difference, reader, below, index)
        write_again(reader, target, workers, manifest, changed, force=False)
    return target


def _difference(reader, below, index, chunk):
    own, base = (as_tensors(one.read_parts(index, chunk)) for one in (reader, below))
    return as_arrays(difference(own, base))


def chain(folder: Path, length: int, **options) -> tuple[list[Path], list[Path]]:
    """A key and deltas, each to the one before, and the same containers whole, in ``folder/whole``."""
    (folder / "whole").mkdir()
    wholes, files = [key_of(folder / "whole", **options)], [folder / "key.ckpt8"]
    files[0].write_bytes(wholes[0].read_bytes())
    for k in range(1, length):
        wholes.append(moved(wholes[-1], folder / "whole" / f"step-{k}.ckpt8", k))
        files.append(delta(wholes[-1], files[-1], folder / f"step-{k}.ckpt8"))
    return files, wholes


def elements(path: Path) -> dict[str, torch.Tensor]:
    """All tensors by name."""
    with ckpt8.open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
