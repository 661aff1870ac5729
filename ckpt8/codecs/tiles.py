"""The loop over tiles that all codecs share.

A kernel gets ``keywords(run)`` beside the tile and its parts, with ``run`` the slice of the tensor that it handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckpt8.codecs.cutting import TILE, HasLayout, pieces, take
from ckpt8.core.tensors import DType, Parts, Role, TensorSpec

Kernel = Callable[..., None]
Keywords = Callable[[slice], dict[str, Any]]


def encode(codec: HasLayout, x: torch.Tensor, kernel: Kernel, keywords: Keywords, *, in_tiles: bool) -> Parts:
    """Fill new parts with those of ``x``, tile by tile or at once. Raises RefusedError."""
    flat = x.detach().reshape(-1)
    spec = TensorSpec("", Role.OTHER, DType.from_label(str(x.dtype)), (flat.numel(),))
    parts = {
        name: torch.empty(part.numel, dtype=part.dtype.torch, device=x.device)
        for name, part in codec.layout(spec).items()
    }
    for run, tile in _tiles(codec, spec, parts, in_tiles):
        kernel(flat[run], tile, **keywords(run))
    return parts


def decode(
    codec: HasLayout,
    parts: Parts,
    spec: TensorSpec,
    out: torch.Tensor | None,
    kernel: Kernel,
    keywords: Keywords,
    *,
    in_tiles: bool,
) -> torch.Tensor:
    """Fill ``out``, or a new tensor, from ``parts``, tile by tile or at once."""
    if out is None:
        # As bytes: torch warns of new tensors of some element types, but not of views.
        device = next(iter(parts.values())).device
        out = torch.empty(spec.numel * spec.dtype.itemsize, dtype=torch.uint8, device=device).view(spec.dtype.torch)
    for run, tile in _tiles(codec, spec, parts, in_tiles):
        kernel(tile, out[run], **keywords(run))
    return out


def _tiles(codec: HasLayout, spec: TensorSpec, parts: Parts, in_tiles: bool) -> Iterator[tuple[slice, Parts]]:
    """The slice and the parts of every tile."""
    if spec.numel > TILE and in_tiles:
        for run, cuts in pieces(codec, spec.dtype, spec.numel):
            yield run, take(parts, cuts)
    elif spec.numel or not in_tiles:
        yield slice(0, spec.numel), parts
