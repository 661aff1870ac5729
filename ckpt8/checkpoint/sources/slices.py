"""Puts a tensor together from boxes of it in different places, when somebody reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.computed import computed
from ckpt8.checkpoint.tree import Held, TensorRef
from ckpt8.container.sharded.covering import Box, check_cover
from ckpt8.core.tensors import DType

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: where it begins, and a tensor with its content."""

    offsets: tuple[int, ...]
    ref: TensorRef


def gather(data: Composite, name: str, dtype: DType, shape: tuple[int, ...], parts: Sequence[Part]) -> TensorRef:
    """The tensor made of ``parts``. Raises InputError, with its ``name``, unless they cover each element once."""
    filled = [part for part in parts if part.ref.numel]
    for part in filled:
        data.check_extent(name, part.ref)
    if not prod(shape):
        return data.tensor(Held(b""), dtype, shape)
    check_cover(f"{data.label}: {name}", shape, [(part.offsets, part.ref.shape) for part in filled])
    if len(filled) == 1:
        return filled[0].ref
    kind = getattr(torch, _INTEGERS[dtype.itemsize])

    def assemble(start: int, stop: int) -> torch.Tensor:
        flat = torch.empty(stop - start, dtype=kind, device="cpu")
        for at, box in _boxes(shape, start, stop):
            target = flat[at - start : at - start + prod(box[1])].view(box[1])
            for part in filled:
                _copy_part(data, part, box, target)
        return flat

    return computed(data, dtype, shape, assemble)


def gather_box(data: Composite, name: str, dtype: DType, box: Box, parts: Sequence[Part]) -> TensorRef:
    """A box of the tensor made of ``parts``. Raises InputError as ``gather``."""
    inside = []
    for part in parts:
        both = [
            (max(mine, theirs), min(mine + size, theirs + length))
            for mine, size, theirs, length in zip(*box, part.offsets, part.ref.shape, strict=True)
        ]
        if all(first < end for first, end in both):
            ref = part.ref
            steps = zip(both, part.offsets, ref.stride, strict=True)
            start = ref.offset + sum((first - at) * stride for (first, _), at, stride in steps)
            ref = replace(ref, offset=start, shape=tuple(end - first for first, end in both))
            inside.append(Part(tuple(first - at for (first, _), at in zip(both, box[0], strict=True)), ref))
    return gather(data, name, dtype, box[1], inside)


def _copy_part(data: Composite, part: Part, box: Box, target: torch.Tensor) -> None:
    """Copy the elements of a box that ``part`` holds into ``target``, which has the shape of the box."""
    ref, first = part.ref, part.ref.offset
    sizes = []
    for dim, (mine, theirs) in enumerate(zip(part.offsets, box[0], strict=True)):
        start, stop = max(mine, theirs), min(mine + ref.shape[dim], theirs + box[1][dim])
        if start >= stop:
            return
        target = target.narrow(dim, start - theirs, stop - start)
        first += (start - mine) * ref.stride[dim]
        sizes.append(stop - start)
    found = data.elements(replace(ref, offset=first, shape=tuple(sizes)), 0, prod(sizes))
    target.copy_(found.view(target.dtype).view(sizes))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Boxes that make up elements ``start`` to ``stop`` of a tensor, each with the position of its first element.

    Whole rows and parts of rows: at most two boxes for each dimension.
    """
    if not shape:
        yield start, ((), ())
        return
    inner = prod(shape[1:])
    while start < stop:
        row, into = divmod(start, inner)
        rows = (stop - start) // inner if into == 0 else 0
        if rows:
            yield start, ((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            start += rows * inner
        else:
            taken = min(stop - start, inner - into)
            for at, (offsets, sizes) in _boxes(shape[1:], into, into + taken):
                yield row * inner + at, ((row, *offsets), (1, *sizes))
            start += taken
