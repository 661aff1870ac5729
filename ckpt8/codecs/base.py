"""The contract that every codec keeps, and the tile loop that they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from ckpt8.core.backend import Backend
from ckpt8.core.tensors import DType, Parts, PartSpec, Role, TensorSpec

if TYPE_CHECKING:
    import torch

TILE = 1 << 18
"""Elements handled at once, so that the temporaries of a codec stay in the L2 cache."""


class Codec(Hashable, Protocol):
    """A frozen dataclass whose fields are the stored configuration.

    ``id`` names one byte layout for ever: a change of layout is a new id. ``measured_as`` names the statistics
    that its error is reported in, and is None for a codec that makes none.
    """

    id: ClassVar[str]
    measured_as: ClassVar[Literal["weight", "moment"] | None]

    def accepts(self, spec: TensorSpec) -> bool:
        """Whether the codec is defined for this element type and role."""

    def layout(self, spec: TensorSpec) -> dict[str, PartSpec]:
        """Element type and count of every part, from the specification alone.

        The parts of a tensor are the concatenation of the parts of its pieces, wherever it is cut at a multiple
        of 32 elements.
        """

    def encode(self, x: torch.Tensor, *, backend: Backend | None = None) -> Parts:
        """Parts of ``x``, taken flat in storage order. Raises RefusedError when ``x`` cannot be represented."""

    def decode(
        self,
        parts: Parts,
        spec: TensorSpec,
        *,
        out: torch.Tensor | None = None,
        backend: Backend | None = None,
    ) -> torch.Tensor:
        """The flat tensor of ``spec.numel`` elements and ``spec.dtype`` that ``parts`` stand for.

        It is written to ``out`` (flat, contiguous, of that type) when given.
        """


@lru_cache(maxsize=256)
def pieces(codec: Codec, dtype: DType, numel: int, step: int = TILE) -> tuple[tuple[slice, Mapping[str, slice]], ...]:
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


def empty_parts(codec: Codec, spec: TensorSpec, device: torch.device) -> Parts:
    """Uninitialised parts for a tensor of ``spec``."""
    import torch

    return {
        name: torch.empty(part.numel, dtype=part.dtype.torch, device=device)
        for name, part in codec.layout(spec).items()
    }


def encode_tiles(
    codec: Codec,
    x: torch.Tensor,
    spec: TensorSpec,
    kernel: Callable[[torch.Tensor, Parts], None],
    backend: Backend = "torch",
) -> Parts:
    """Run ``kernel(tile, parts of the tile)`` over the tiles of ``x``, which write into one set of parts.

    Other kernels than torch's take a tensor whole.
    """
    flat = x.detach().reshape(-1)
    parts = empty_parts(codec, spec, x.device)
    if 0 < spec.numel <= TILE or backend != "torch":
        kernel(flat, parts)
        return parts
    for run, cuts in pieces(codec, spec.dtype, spec.numel):
        kernel(flat[run], take(parts, cuts))
    return parts


def decode_tiles(
    codec: Codec,
    parts: Parts,
    spec: TensorSpec,
    out: torch.Tensor | None,
    kernel: Callable[[Parts, torch.Tensor], None],
    backend: Backend = "torch",
) -> torch.Tensor:
    """Run ``kernel(parts of the tile, tile of the result)`` over the tiles of the result.

    Other kernels than torch's take a tensor whole.
    """
    import torch

    if out is None:
        device = next(iter(parts.values())).device
        out = torch.empty(spec.numel, dtype=spec.dtype.torch, device=device)
    if 0 < spec.numel <= TILE or backend != "torch":
        kernel(parts, out)
        return out
    for run, cuts in pieces(codec, spec.dtype, spec.numel):
        kernel(take(parts, cuts), out[run])
    return out


def config_of(codec: Codec) -> dict[str, Any]:
    """The stored form of a codec: its id and its fields."""
    from dataclasses import asdict

    return {"id": codec.id, **asdict(codec)}  # type: ignore[call-overload]
