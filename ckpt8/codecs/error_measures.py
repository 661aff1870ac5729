"""Measures the error of a tile against its original, see ``error_stats``; in plain torch, on any device."""

from __future__ import annotations

import torch

from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.reference import square_root
from ckpt8.codecs.error_stats import (
    SMALLEST_NORMAL,
    LatticeError,
    MomentError,
    StepError,
    UpdateError,
    WeightError,
    larger,
)

Pair = tuple[torch.Tensor, torch.Tensor]
"""A flat fp32 tile as it was, and as it comes back."""


def _largest(x: torch.Tensor) -> float:
    """The largest magnitude, in one pass; NaN if there is one."""
    low, high = x.aminmax()
    return larger(-float(low), float(high))


def _square_sum(x: torch.Tensor) -> float:
    wide = x.double()
    # cuBLAS would keep a workspace for every thread.
    return float(wide.dot(wide) if x.device.type == "cpu" else wide.square().sum())


def root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root of a flat fp32 tile. On a GPU torch rounds it so; on a CPU MKL may not."""
    return square_root(x) if x.device.type == "cpu" else x.sqrt()


def weight_error(original: torch.Tensor, decoded: torch.Tensor) -> WeightError:
    """Measure a flat fp32 tile of weights."""
    magnitude = original.abs().clamp_min_(SMALLEST_NORMAL)
    relative = (decoded - original).abs_().div_(magnitude)
    steps = decoded.view(torch.int32) - original.view(torch.int32)
    total = relative.sum(dtype=torch.float64)
    return WeightError(original.numel(), float(relative.amax()), float(total), int(_largest(steps)))


def moment_error(
    original: torch.Tensor,
    decoded: torch.Tensor,
    scales: torch.Tensor | None,
    roots: Pair | None = None,
) -> MomentError:
    """Measure a flat fp32 tile of a moment. ``scales`` is the fp32 scale of each group of 32, if any.

    ``roots`` are the square roots of ``original`` and ``decoded`` for a second moment, else None.
    """
    error = decoded - original
    noise, signal = _square_sum(error), _square_sum(original)
    if scales is None:
        return MomentError(noise, signal)
    if roots is not None:
        error = roots[1] - roots[0]
    short = -error.numel() % GROUP
    if short:
        error = torch.nn.functional.pad(error, (0, short))
    largest = error.view(-1, GROUP).abs().amax(1)
    # A zero group has no scale and no error.
    scaled = largest.mul_(scales.sign()).div_(scales.clamp_min(SMALLEST_NORMAL))
    return MomentError(noise, signal, float(scaled.amax()))


def update_error(original: torch.Tensor, decoded: torch.Tensor, factor: float) -> UpdateError:
    """Measure a flat fp32 tile of updates, both given without their ``factor``."""
    error = decoded - original
    return UpdateError(
        _square_sum(error) * factor * factor,
        _square_sum(original) * factor * factor,
        _largest(error) * factor,
        _largest(original) * factor,
    )


def lattice_error(original: torch.Tensor, decoded: torch.Tensor) -> LatticeError:
    """Measure a flat fp32 tile of weights on a lattice."""
    error = decoded - original
    return LatticeError(_square_sum(error), _square_sum(original), _largest(error))


def step_sums(weight: Pair | None, moment1: Pair, moment2: torch.Tensor, roots: Pair) -> StepError:
    """Sums over a tile in the measure of a budget, without the factors of its parameter.

    They are the sums of m^2, v dW^2, dm^2 and (e m)^2, with e the relative error of sqrt(v), 0 where v is 0. ``roots``
    are the square roots of the second moments ``moment2`` and of these as they come back.
    """
    m, decoded = moment1
    moved = (roots[1] - roots[0]).div_(roots[0].clamp_min(SMALLEST_NORMAL)).masked_fill_(moment2 == 0, 0.0).mul_(m)
    weighed = 0.0
    if weight is not None:
        error = (weight[1] - weight[0]).double().square_()
        weighed = float(error.mul_(moment2.double()).sum())
    return StepError(_square_sum(m), weighed, _square_sum(decoded - m), _square_sum(moved))


def factored_step_sums(weight: Pair | None, update: Pair, inverse_roots: torch.Tensor) -> StepError:
    """Sums over a tile of CAME: of v u^2, v dW^2 and v du^2. ``inverse_roots`` are 1 / sqrt(v)."""
    u, decoded = update
    weighed = 0.0 if weight is None else _square_sum((weight[1] - weight[0]).div_(inverse_roots))
    return StepError(_square_sum(u / inverse_roots), weighed, _square_sum((decoded - u).div_(inverse_roots)))
