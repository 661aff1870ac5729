"""``Moment``, one tensor of optimizer state, and ``PackedTensor``, all that a step reads and writes of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from ckpt8.codecs import Codec
from ckpt8.codecs.companded8 import GROUP, Companded8
from ckpt8.codecs.companded8 import reference as companding
from ckpt8.core.tensors import Parts
from ckpt8.optim.blocks import Values
from ckpt8.optim.master_weights import read_master, write_master
from ckpt8.optim.rounding import encode_second_moment, groups_of, random_bits

StateLayout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Element type and shape of the tensors of a state, by key."""


def moment_layout(name: str, codec: Codec, shape: tuple[int, ...], numel: int) -> StateLayout:
    """Keys of the state of moment ``name``: itself in fp32, or ``_codes`` of the parameter's shape and ``_scales``."""
    if codec.codes is None:
        return {name: (torch.float32, shape)}
    codes = torch.uint8 if codec.stores_roots else torch.int8
    return {f"{name}_codes": (codes, shape), f"{name}_scales": (torch.uint16, (groups_of(numel),))}


@dataclass(frozen=True, slots=True)
class Moment:
    """Flat views of a stored moment: ``parts`` are ``codes`` and ``scales``, or fp32 ``values`` without a codec."""

    codec: Companded8 | None
    parts: Parts

    @classmethod
    def of(cls, name: str, codec: Codec, state: Mapping[str, torch.Tensor]) -> Moment:
        """The moment ``name`` of a parameter's state: codes of ``codec``, or fp32 where the state has that."""
        if name in state:
            return cls(None, {"values": state[name].view(-1)})
        keys = {"codes": f"{name}_codes", "scales": f"{name}_scales"}
        return cls(cast("Companded8", codec), {part: state[key].view(-1) for part, key in keys.items()})

    @property
    def levels(self) -> int:
        """The largest code; 0 for fp32."""
        return 0 if self.codec is None else self.codec.Q

    def _tile(self, start: int, stop: int) -> Parts:
        groups = slice(start // GROUP, groups_of(stop))
        return {name: part[groups if name == "scales" else slice(start, stop)] for name, part in self.parts.items()}

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A new fp32 tensor of the elements ``start`` (a multiple of 32) to ``stop``."""
        parts = self._tile(start, stop)
        if self.codec is None:
            return parts["values"].clone()
        out = torch.empty(stop - start, dtype=torch.float32, device=parts["codes"].device)
        self.codec.kernel("decode", "torch")(parts, out)
        return out

    def write(self, start: int, stop: int, values: torch.Tensor, bits: torch.Tensor | None) -> None:
        """Store flat fp32 ``values``; random int32 ``bits`` round a second moment, None to nearest."""
        parts = self._tile(start, stop)
        if self.codec is None:
            parts["values"].copy_(values)
        elif self.codec.signed:
            companding.compand_signed(values, parts, self.codec.Q)
        elif bits is None:
            companding.encode_unsigned(values, parts, self.codec.Q, self.codec.p != 1)
        else:
            encode_second_moment(values, parts, self.codec.Q, self.codec.p != 1, bits)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Flat views of a parameter, its gradient and its state, in the order of the parameter's logical shape.

    ``part``: the residual or fp32 master, or None. ``key``: the key of the random bits of this step. ``grad_factor``
    multiplies gradients.
    """

    param: torch.Tensor
    grad: torch.Tensor
    codec: Codec
    part: torch.Tensor | None
    moments: Mapping[str, Moment]
    key: int
    grad_factor: float = 1.0

    def load(self, start: int, stop: int, shape: tuple[int, ...], names: tuple[str, ...]) -> list[torch.Tensor]:
        """New fp32 tensors of ``shape``: elements ``start`` to ``stop`` of each name."""
        return [self._read(name, start, stop).view(shape) for name in names]

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        run = slice(start, stop)
        if name == "param":
            return read_master(self.param[run], None if self.part is None else self.part[run], self.codec)
        if name == "grad":
            grad = self.grad[run].to(torch.float32, copy=True)
            return grad if self.grad_factor == 1.0 else grad.mul_(self.grad_factor)
        return self.moments[name].read(start, stop)

    def store(self, start: int, stop: int, values: Values) -> None:
        """Store new values of the elements ``start`` (a multiple of 32) to ``stop``, by name."""
        draws = self.part is not None and self.part.dtype == torch.int8
        draws |= any(moment.codec is not None and moment.codec.stores_roots for moment in self.moments.values())
        bits = random_bits(self.key, start, stop - start, self.param.device) if draws else None
        for name, value in values.items():
            flat = value.reshape(-1)
            if name == "param":
                run = slice(start, stop)
                part = None if self.part is None else self.part[run]
                write_master(flat, self.param[run], part, self.codec, bits)
            else:
                self.moments[name].write(start, stop, flat, bits)
