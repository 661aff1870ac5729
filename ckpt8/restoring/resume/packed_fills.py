"""What fills the packed state of a parameter: stored parts as they are, or fp32 values encoded on the way.

Everything that is encoded here is rounded to nearest, on the device of the parameter, in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ckpt8.checkpoint.sources.stored_parts import StoredParts
from ckpt8.checkpoint.sources.values import Streamer, assign
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import Codec
from ckpt8.codecs.companded8 import GROUP
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts
from ckpt8.optim.master_weights import write_master
from ckpt8.optim.state_conversion import bf16_from_planes

_ENCODED = 1 << 20
"""Elements that are encoded at once."""


@dataclass(frozen=True, slots=True)
class MomentFill:
    """The codes and scales of moment ``name`` in ``state``. With ``stored``, they go straight in.

    Values that the codec refuses stay in fp32, as they would in a file.
    """

    ref: TensorRef
    name: str
    state: dict[str, torch.Tensor]
    codec: Codec
    stored: StoredParts | None

    def fill(self, streamer: Streamer) -> None:
        """Copy the parts, or encode the values."""
        codes, scales = self.state[f"{self.name}_codes"], self.state[f"{self.name}_scales"]
        try:
            for start, given in self._parts(streamer, codes.device):
                assign(codes.view(-1), start, given["codes"])
                assign(scales, start // GROUP, given["scales"])
        except RefusedError:
            del self.state[f"{self.name}_codes"], self.state[f"{self.name}_scales"]
            self.state[self.name] = torch.empty(self.ref.shape, dtype=torch.float32, device=codes.device)
            streamer.copy(self.ref, self.state[self.name])

    def _parts(self, streamer: Streamer, device: torch.device) -> Iterator[tuple[int, Parts]]:
        if self.stored is not None:
            yield from self.stored.chunks(self.ref, "codes", "scales")
            return
        for start, values in streamer.values(self.ref):
            for at, piece in _cut(values):
                yield start + at, self.codec.encode(piece.to(device))


@dataclass(frozen=True, slots=True)
class ResidualFill:
    """The residual of a bf16 parameter, flat. With ``stored``, it goes straight in."""

    ref: TensorRef
    residual: torch.Tensor
    codec: Codec
    stored: StoredParts | None

    def fill(self, streamer: Streamer) -> None:
        """Copy the residual, or split the values."""
        if self.stored is not None:
            name, _ = _residual(self.codec)
            for start, given in self.stored.chunks(self.ref, name):
                assign(self.residual, start, given[name])
            return
        for start, values in streamer.values(self.ref):
            for at, piece in _cut(values):
                part = self.residual[start + at : start + at + len(piece)]
                _split(piece.to(part.device), part, self.codec)


@dataclass(frozen=True, slots=True)
class RoundedFill:
    """A bf16 parameter of any strides: the upper half of the weights whose residual ``ResidualFill`` takes."""

    ref: TensorRef
    param: torch.Tensor
    codec: Codec
    stored: StoredParts | None

    def fill(self, streamer: Streamer) -> None:
        """Copy the upper half, or split the values."""
        target = self.param.detach()
        if not target.dim():
            target = target.view(1)
        if self.stored is not None:
            for start, given in self.stored.chunks(self.ref, "exponent", "mantissa"):
                assign(target, start, bf16_from_planes(given))
            return
        for start, values in streamer.values(self.ref):
            for at, piece in _cut(values):
                residual = torch.empty_like(piece, dtype=_residual(self.codec)[1])
                assign(target, start + at, _split(piece, residual, self.codec))


def _residual(codec: Codec) -> tuple[str, torch.dtype]:
    """Name and element type of the part that completes a bf16 weight."""
    assert codec.residual is not None  # noqa: S101 - the group was checked
    return codec.residual[0], codec.residual[1].torch


def _split(weights: torch.Tensor, residual: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Write the residual of flat fp32 weights; their bf16 upper half."""
    rounded = torch.empty_like(weights, dtype=torch.bfloat16)
    write_master(weights, rounded, residual, codec, None)
    return rounded


def _cut(values: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(start, values[start : start + _ENCODED]) for start in range(0, len(values), _ENCODED)]
