"""Cuts a tensor and its parts into tiles."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec

if TYPE_CHECKING:
    import torch

TILE = 1 << 18
"""Elements that a codec handles at once, so that its temporaries stay in the L2 cache."""


class HasLayout(Hashable, Protocol):
    """A codec, as far as cutting needs it."""

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """As ``Codec.layout``."""


@lru_cache(maxsize=256)
def pieces(
    codec: HasLayout, dtype: DType, numel: int, step: int = TILE
) -> tuple[tuple[slice, Mapping[str, slice]], ...]:
    """Cut a flat tensor into runs of ``step`` elements: the slice of each run, and its slice of every part."""
    found = []
    part_start = dict.fromkeys(codec.layout(TensorSpec("", Role.OTHER, dtype, (numel,))), 0)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        run = codec.layout(TensorSpec("", Role.OTHER, dtype, (stop - start,)))
        cuts = {name: slice(part_start[name], part_start[name] + part.numel) for name, part in run.items()}
        found.append((slice(start, stop), cuts))
        part_start = {name: cut.stop for name, cut in cuts.items()}
    return tuple(found)


def take(parts: Mapping[str, torch.Tensor], cuts: Mapping[str, slice]) -> Parts:
    """Views of ``parts`` at ``cuts``."""
    return {name: parts[name][cut] for name, cut in cuts.items()}
