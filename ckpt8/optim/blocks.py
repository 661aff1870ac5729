"""How a rule sees a tensor: blocks of fp32 values that it asks for, and sums that do not depend on how it is cut.

A rule is a pure function ``rule(blocks, whole, *, step, lr, ...)``: it reads fp32 values from the blocks of one
parameter, any number of times, and yields the new values of every block in order, then, where it has state of the
whole tensor, that state. Whoever calls it stores what it yields before asking for more. So a rule that needs a sum
over the tensor (StableAdamW, CAME) takes it in a pass of its own over the blocks, and no full-size fp32 copy of
anything is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ckpt8.codecs.base import TILE

Values = Mapping[str, torch.Tensor]
"""fp32 tensors by name: ``param``, ``grad`` and the state of the optimizer."""

SUM_BLOCK = 4096
"""Elements summed at once, in float64; tiles are multiples of it, and the sums of blocks are added exactly."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of one parameter.

    ``load(*names)`` gives new fp32 tensors that the rule may overwrite. For rules that work row by row, the
    values have the shape (batches, rows, width), and ``batches`` and ``rows`` say which of the whole they are.
    """

    load: Callable[..., list[torch.Tensor]]
    batches: slice = field(default_factory=lambda: slice(None))
    rows: slice = field(default_factory=lambda: slice(None))


Load = Callable[[int, int, tuple[int, ...], tuple[str, ...]], list[torch.Tensor]]
"""(first element, last element + 1, shape, names) -> new fp32 tensors."""


def flat_blocks(numel: int, load: Load, size: int = TILE) -> list[tuple[int, int, Block]]:
    """The blocks of a flat tensor: first element, last element + 1, block."""
    runs = [(start, min(start + size, numel)) for start in range(0, numel, size)]
    return [(a, b, Block(lambda *names, a=a, b=b: load(a, b, (b - a,), names))) for a, b in runs]


def block_sums(x: torch.Tensor) -> list[float]:
    """Sums of 4096 elements each, in float64."""
    flat = x.reshape(-1).double()
    short = -flat.numel() % SUM_BLOCK
    if short:
        flat = torch.nn.functional.pad(flat, (0, short))
    sums: list[float] = flat.view(-1, SUM_BLOCK).sum(1).tolist()
    return sums


def exact_sum(parts: Iterable[float]) -> float:
    """The correctly rounded sum, whatever the order; NaN or Inf where one is among them."""
    found = list(parts)
    return math.fsum(found) if all(math.isfinite(part) for part in found) else sum(found)
