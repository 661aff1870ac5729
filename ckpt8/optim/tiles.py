"""One parameter during one step: reads fp32 tiles of its weights, gradient and state, and stores new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt8.codecs import Codec
from ckpt8.optim.blocks import Values
from ckpt8.optim.masters import needs_noise, read_master, write_master
from ckpt8.optim.moments import Moment
from ckpt8.optim.rounding import random_bits


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Flat views, in the order of the parameter's logical shape.

    ``part`` is the residual or fp32 master, or None; ``key`` is that of the random bits of this step.
    ``grad_factor`` is what gradients are multiplied by.
    """

    param: torch.Tensor
    grad: torch.Tensor
    part: torch.Tensor | None
    codec: Codec
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
        """Store what the rule gave for elements ``start`` (a multiple of 32) to ``stop``."""
        bits = None
        if needs_noise(self.part) or any(moment.needs_bits for moment in self.moments.values()):
            bits = random_bits(self.key, start, stop - start, self.param.device)
        for name, value in values.items():
            flat = value.reshape(-1)
            if name == "param":
                run = slice(start, stop)
                part = None if self.part is None else self.part[run]
                write_master(flat, self.param[run], part, self.codec, bits)
            else:
                self.moments[name].write(start, stop, flat, bits)
