"""Measures the error of a tile against its original, see ``error_stats``; in plain torch, on any device."""

from __future__ import annotations

import torch

from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.reference import square_root
from ckpt8.codecs.error_stats import SMALLEST_NORMAL, MomentError, UpdateError, WeightError, larger


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
    roots: tuple[torch.Tensor, torch.Tensor] | None = None,
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
