"""CAME (Luo et al., arXiv 2307.02047), as came-pytorch has it: no bias correction.

    s  = g^2 + eps1;     R = b2 R + (1-b2) mean_-1(s);     C = b2 C + (1-b2) mean_-2(s)
    u  = g * approx(R, C);     approx(R, C) = rsqrt(R / mean_-1(R)) (x) rsqrt(C)
    u /= max(1, RMS(u)/d);     m = b1 m + (1-b1) u
    r  = (u - m)^2 + eps2;     Rr, Cr = b3-averages of its means, as R and C
    theta = theta (1 - lr wd) - lr m * approx(Rr, Cr)

Below two dimensions u = g * rsqrt(V), V = b2 V + (1-b2) s, and the step is m. Over blocks of rows this takes four
passes, each of which forms u and m anew from what is stored: R and C; RMS(u); Rr and Cr; the update. The factored
statistics are fp32 tensors of the whole parameter, summed in float64 over blocks that depend on the shape alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.reference import square_root
from ckpt8.optim.blocks import Block, Load, Values, block_sums, exact_sum
from ckpt8.optim.packed import Cut, PackedOptimizer, Params

_ROW_BLOCK = 1 << 18
"""Elements of a block of rows, about."""


def _inverse_root(x: torch.Tensor) -> torch.Tensor:
    return square_root(x).reciprocal_()


class _Factored:
    """Row and column averages of a tensor of the shape (batches, rows, width), gathered block by block."""

    def __init__(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        batches, width = columns.numel() // columns.shape[-1], columns.shape[-1]
        self._shapes = rows.shape, columns.shape
        self.rows, self.columns = rows.reshape(batches, -1), columns.reshape(batches, width)
        self._row_means = torch.empty_like(self.rows)
        self._column_sums = torch.zeros_like(self.columns, dtype=torch.float64)

    def add(self, block: Block, x: torch.Tensor) -> None:
        """Take in the values of one block."""
        wide = x.double()
        self._row_means[block.batches, block.rows] = wide.mean(-1).float()
        self._column_sums[block.batches] += wide.sum(-2)

    def averaged(self, beta: float) -> dict[str, torch.Tensor]:
        """Move the averages towards what was gathered; gives them in their own shapes."""
        means = self._column_sums.div_(self.rows.shape[-1]).float()
        self.rows = self.rows * beta + self._row_means * (1 - beta)
        self.columns = self.columns * beta + means * (1 - beta)
        self._row_factor = _inverse_root(self.rows / self.rows.double().mean(-1, keepdim=True).float())
        self._column_factor = _inverse_root(self.columns)
        return {"row": self.rows.reshape(self._shapes[0]), "col": self.columns.reshape(self._shapes[1])}

    def factor(self, block: Block) -> torch.Tensor:
        """approx(R, C) of one block."""
        rows = self._row_factor[block.batches, block.rows].unsqueeze(-1)
        return rows * self._column_factor[block.batches].unsqueeze(-2)


def _clip(blocks: Sequence[Block], direction: Callable[[Block], torch.Tensor], threshold: float) -> float:
    """What u is divided by: max(1, RMS(u)/d)."""
    sums, count = [], 0
    for block in blocks:
        u = direction(block)
        count += u.numel()
        sums += block_sums(u.square_())
    return max(1.0, math.sqrt(exact_sum(sums) / count) / threshold)


def came(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: tuple[float, float],
    clip_threshold: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step for a tensor of two dimensions or more.

    ``whole`` holds ``exp_avg_sq_row``, ``exp_avg_sq_col``, ``exp_avg_res_row`` and ``exp_avg_res_col``. Yields
    ``param`` and ``exp_avg`` of every block, then the new statistics.
    """
    square = _Factored(whole["exp_avg_sq_row"], whole["exp_avg_sq_col"])
    instability = _Factored(whole["exp_avg_res_row"], whole["exp_avg_res_col"])
    for block in blocks:
        square.add(block, block.load("grad")[0].square_().add_(eps[0]))
    squares = square.averaged(betas[1])

    def direction(block: Block) -> torch.Tensor:
        return block.load("grad")[0].mul_(square.factor(block))

    clip = _clip(blocks, direction, clip_threshold)

    def moved(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        u, (m,) = direction(block).div_(clip), block.load("exp_avg")
        return u, m.mul_(betas[0]).add_(u * (1 - betas[0]))

    for block in blocks:
        u, m = moved(block)
        instability.add(block, u.sub_(m).square_().add_(eps[1]))
    instabilities = instability.averaged(betas[2])
    for block in blocks:
        (param,), (_, m) = block.load("param"), moved(block)
        param.mul_(1 - lr * weight_decay).sub_((m * instability.factor(block)).mul_(lr))
        yield {"param": param, "exp_avg": m}
    sq = {f"exp_avg_sq_{axis}": values for axis, values in squares.items()}
    yield sq | {f"exp_avg_res_{axis}": values for axis, values in instabilities.items()}


def came_vector(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: tuple[float, float],
    clip_threshold: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step below two dimensions; yields ``param``, ``exp_avg`` and ``exp_avg_sq``."""

    def second(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        grad, v = block.load("grad", "exp_avg_sq")
        v.mul_(betas[1]).add_((grad * grad).add_(eps[0]).mul_(1 - betas[1]))
        return grad.mul_(_inverse_root(v)), v

    clip = _clip(blocks, lambda block: second(block)[0], clip_threshold)
    for block in blocks:
        (u, v), (param, m) = second(block), block.load("param", "exp_avg")
        m.mul_(betas[0]).add_(u.div_(clip).mul_(1 - betas[0]))
        param.mul_(1 - lr * weight_decay).sub_(m * lr)
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v}


def row_runs(shape: tuple[int, ...]) -> Iterator[tuple[int, int, slice, slice, tuple[int, int, int]]]:
    """First and last element, batches, rows and shape of blocks that start at multiples of 32 elements.

    Blocks are runs of rows of one matrix, or of whole matrices where a matrix is small or of uneven size.
    """
    height, width = shape[-2:]
    batches, size = math.prod(shape[:-2]), height * width
    if batches == 1 or (size > _ROW_BLOCK and size % GROUP == 0):
        rows = _multiple(width)
        for batch in range(batches):
            for row in range(0, height, rows):
                count = min(rows, height - row)
                start = batch * size + row * width
                yield start, start + count * width, slice(batch, batch + 1), slice(row, row + count), (1, count, width)
    else:
        step = _multiple(size)
        for batch in range(0, batches, step):
            count = min(step, batches - batch)
            start = batch * size
            yield start, start + count * size, slice(batch, batch + count), slice(None), (count, height, width)


def row_blocks(shape: tuple[int, ...], load: Load) -> list[tuple[int, int, Block]]:
    """The blocks of a tensor of two dimensions or more: first element, last element + 1, block of rows."""
    return [
        (a, b, Block(lambda *names, a=a, b=b, view=view: load(a, b, view, names), batches, rows))
        for a, b, batches, rows, view in row_runs(shape)
    ]


def _multiple(size: int) -> int:
    """How many pieces of ``size`` elements make a block of whole groups, near the size of a tile."""
    unit = GROUP // math.gcd(GROUP, size)
    return max(unit, _ROW_BLOCK // size // unit * unit)


class CAME(PackedOptimizer):
    """CAME on packed state. Arguments and defaults are came-pytorch's; for the others see PackedOptimizer."""

    rule_id: ClassVar[str] = "came"
    rule_arguments: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "clip_threshold", "weight_decay")

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, **packing)

    def moments(self, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, str]:
        """The momentum, and below two dimensions the second moment."""
        return {"exp_avg": "moment1"} | ({} if len(shape) > 1 else {"exp_avg_sq": "moment2"})

    def factored(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Row and column averages."""
        if len(shape) < 2:
            return {}
        row, column = shape[:-1], shape[:-2] + shape[-1:]
        return {
            f"exp_avg_{which}_{axis}": size for which in ("sq", "res") for axis, size in (("row", row), ("col", column))
        }

    def cuts(self, shape: torch.Size, load: Callable[..., list[torch.Tensor]]) -> list[Cut]:
        """Blocks of rows."""
        return super().cuts(shape, load) if len(shape) < 2 else row_blocks(tuple(shape), load)

    def rule(self, blocks: Sequence[Block], whole: Values, **arguments: Any) -> Iterator[Values]:
        """See ``came`` and ``came_vector``."""
        return (came if whole else came_vector)(blocks, whole, **arguments)
