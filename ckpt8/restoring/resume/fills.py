"""How live tensors take what a checkpoint holds: copied, taken packed as it is stored, or encoded on the way.

Encoding rounds to nearest, on the device of the parameter, in pieces of bounded size. ``OptimizerPlan`` collects what
resume is going to do to an optimizer, before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt8.checkpoint.sources.stored_member import StoredParts
from ckpt8.checkpoint.sources.values import Fill, Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import Codec
from ckpt8.codecs.companded8 import GROUP
from ckpt8.core.elements import assign
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts
from ckpt8.optim.master_weights import write_master
from ckpt8.optim.state_conversion import bf16_from_planes

_ENCODED_AT_ONCE = 1 << 20
"""Elements."""


NewState = tuple[dict[str, Any], list[Fill]]
"""The new state of one parameter, its tensors still empty, and what fills them."""


@dataclass(slots=True)
class OptimizerPlan:
    """New states, and new values for each live group.

    ``states`` has for each parameter a function that allocates its state, or None where the checkpoint has none, as for
    a parameter that never had a gradient. ``wrong`` says why nothing of the checkpoint fits; ``problems`` are those of
    single parameters. ``rounded`` fills live parameters that take only the upper half of their saved weights, by
    ``id``. An optimizer that loads its state itself has ``build`` in place of states and groups: it makes the state
    dict.
    """

    states: list[tuple[torch.Tensor, Callable[[], NewState] | None]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: str | None = None
    rounded: dict[int, Fill] = field(default_factory=dict)
    build: Callable[[], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies one saved tensor into a live one of its shape; values are rounded where that has fewer bits."""

    name: str
    ref: TensorRef
    target: torch.Tensor

    def fill(self, streamer: Streamer) -> None:
        """Copy the values."""
        streamer.copy(self.ref, self.target.detach())


@dataclass(frozen=True, slots=True)
class _PackedFill:
    """Fills packed state from ``ref``. With ``stored``, the parts go in as they are, else ``codec`` makes them."""

    ref: TensorRef
    codec: Codec
    stored: StoredParts | None

    def _pieces(self, streamer: Streamer) -> Iterator[tuple[int, torch.Tensor]]:
        """The saved values as flat float32, in pieces that are encoded at once, and where each starts."""
        for start, values in streamer.values(self.ref):
            for at in range(0, len(values), _ENCODED_AT_ONCE):
                yield start + at, values[at : at + _ENCODED_AT_ONCE]


@dataclass(frozen=True, slots=True)
class MomentFill(_PackedFill):
    """Fills the codes and scales of moment ``name`` in ``state``.

    Values that the codec refuses stay in fp32, as they would in a file.
    """

    name: str
    state: dict[str, torch.Tensor]

    def fill(self, streamer: Streamer) -> None:
        """Take the parts, or encode the values."""
        codes, scales = self.state[f"{self.name}_codes"], self.state[f"{self.name}_scales"]
        try:
            for start, parts in self._parts(streamer, codes.device):
                assign(codes.view(-1), start, parts["codes"])
                assign(scales, start // GROUP, parts["scales"])
        except RefusedError:
            del self.state[f"{self.name}_codes"], self.state[f"{self.name}_scales"]
            self.state[self.name] = torch.empty(self.ref.shape, dtype=torch.float32, device=codes.device)
            streamer.copy(self.ref, self.state[self.name])

    def _parts(self, streamer: Streamer, device: torch.device) -> Iterator[tuple[int, Parts]]:
        if self.stored is not None:
            return self.stored.chunks(self.ref, "codes", "scales")
        return ((start, self.codec.encode(piece.to(device))) for start, piece in self._pieces(streamer))


@dataclass(frozen=True, slots=True)
class ResidualFill(_PackedFill):
    """Fills ``residual``, flat: the difference between fp32 weights and a bf16 parameter."""

    residual: torch.Tensor

    def fill(self, streamer: Streamer) -> None:
        """Take the stored residual, or split the values."""
        if self.stored is not None:
            name, _ = _residual(self.codec)
            for start, parts in self.stored.chunks(self.ref, name):
                assign(self.residual, start, parts[name])
            return
        for start, piece in self._pieces(streamer):
            part = self.residual[start : start + len(piece)]
            _split(piece.to(part.device), part, self.codec)


@dataclass(frozen=True, slots=True)
class RoundedFill(_PackedFill):
    """Fills a bf16 parameter of any strides with the upper half of fp32 weights. See ``ResidualFill``."""

    param: torch.Tensor

    def fill(self, streamer: Streamer) -> None:
        """Take the stored upper half, or split the values."""
        target = self.param.detach()
        target = target if target.dim() else target.view(1)
        if self.stored is not None:
            for start, parts in self.stored.chunks(self.ref, "exponent", "mantissa"):
                assign(target, start, bf16_from_planes(parts))
            return
        for start, piece in self._pieces(streamer):
            residual = torch.empty_like(piece, dtype=_residual(self.codec)[1])
            assign(target, start, _split(piece, residual, self.codec))


def _residual(codec: Codec) -> tuple[str, torch.dtype]:
    """Name and element type of the part that completes a bf16 weight."""
    assert codec.residual is not None  # noqa: S101 - the group was checked
    return codec.residual[0], codec.residual[1].torch


def _split(weights: torch.Tensor, residual: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Write the residual of flat fp32 weights; return their bf16 upper half."""
    rounded = torch.empty_like(weights, dtype=torch.bfloat16)
    write_master(weights, rounded, residual, codec, None)
    return rounded
