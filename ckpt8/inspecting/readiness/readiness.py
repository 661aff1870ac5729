"""``inspect --readiness``: how weights and moments survive fp16, bf16, fp8 and int8, as they are and scaled.

``number_formats`` rounds, ``casting`` counts and adds up, ``verdicts`` judges; each states its maths. Of a ``.ckpt8``
they take the decoded values. With an original, they also measure the error of tensors of equal name and shape:

    SNR = 10 log10( sum x^2 / sum (y - x)^2 ) dB        x of the original, y of the checkpoint, if both are finite

y of 8-bit elements with scales is their product, see ``tensor_source``.

The keys of ``readiness`` in the JSON of ``inspect``; an SNR is in dB, and None where no error is made:

    full, sample         whether every element was read; else elements and windows of the sample of a long tensor
    elements, looked_at  of all weights and moments; ``nonfinite`` of them were left out
    left_out             tensors that were not looked at, counted by reason
    thresholds           underflow and few, see ``verdicts``
    formats[]            format, label, scaling, ideal_snr_db, floor_snr_db, line
      roles{}            tensors, verdict, text; raw and scaled: overflow, underflow, subnormal (fractions), snr_db,
                         failing (number of tensors that the format does not suit), worst (name, label, snr_db)
    tensors[]            name, label, role, dtype, shape, elements, looked_at, nonfinite, nonzero (fraction), rms,
                         absmax, unit_scale
      formats{}          by format, raw and scaled: overflow, underflow, subnormal, snr_db; None for 8-bit elements
      measured           name (in the original), snr_db, max_error, differing (fraction); None where there is none
    against              path, unpaired (tensors), and by role tensors, snr_db, worst; only with an original
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ckpt8.core.errors import CheckFailedError
from ckpt8.core.workers import Workers
from ckpt8.inspecting.readiness.casting import Casts, Extent, decibels, tiles
from ckpt8.inspecting.readiness.tensor_source import SourceTensor, TensorSource, open_tensors, pair_tensors
from ckpt8.inspecting.readiness.verdicts import FEW, MOST_UNDERFLOW, format_reports, measured_total
from ckpt8.inspecting.sampling import PER_TENSOR, WINDOWS


def inspect_readiness(path: Path, *, full: bool = False, original: Path | None = None) -> dict[str, Any]:
    """Figures of every weight and moment, and a verdict for each format. All values are plain JSON.

    Tensors of more than PER_TENSOR elements are sampled, unless ``full``. Raises InputError for damage,
    CheckFailedError if the ``original`` has none of the tensors.
    """
    with open_tensors(path) as source, Workers() as workers:
        measured = {} if original is None else _measure_all(source, original, workers, full=full)
        found = [
            {**facts, "measured": measured.get(tensor)}
            for tensor, facts in zip(
                source.tensors, workers.map(lambda t: _tensor_facts(source, t, full=full), source.tensors), strict=True
            )
        ]
        source.bundle.check_unchanged()
        report = {
            "full": full,
            "sample": None if full else {"elements": PER_TENSOR, "windows": WINDOWS},
            "elements": sum(each["elements"] for each in found),
            "looked_at": sum(each["looked_at"] for each in found),
            "nonfinite": sum(each["nonfinite"] for each in found),
            "left_out": dict(source.left_out),
            "thresholds": {"underflow": MOST_UNDERFLOW, "few": FEW},
            "formats": format_reports(found),
            "tensors": found,
        }
        if original is not None:
            report["against"] = {
                "path": str(original),
                "unpaired": sum(each["measured"] is None for each in found),
                "roles": measured_total(found),
            }
        return report


def _tensor_facts(source: TensorSource, tensor: SourceTensor, *, full: bool) -> dict[str, Any]:
    extent = Extent()
    elements = tensor.in_memory_order
    for tile in tiles(source.blocks(elements, full=full)):
        extent.add(tile)
    casts = None
    if tensor.scale is None:
        casts = Casts(extent)
        for tile in tiles(source.blocks(elements, full=full)):
            casts.add(tile)
    count = extent.count + extent.nonfinite
    return {
        "name": tensor.name,
        "label": tensor.label,
        "role": tensor.role.value,
        "dtype": tensor.dtype.label,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "elements": tensor.numel,
        "looked_at": count,
        "nonfinite": extent.nonfinite,
        "nonzero": extent.nonzero / count,
        "rms": extent.rms,
        "absmax": extent.largest,
        "unit_scale": extent.unit,
        "formats": casts and casts.to_json(),
    }


def _measure_all(
    source: TensorSource, original: Path, workers: Workers, *, full: bool
) -> dict[SourceTensor, dict[str, Any]]:
    """The measured error of every tensor that the original has too."""
    with open_tensors(original) as other:
        pairs = pair_tensors(source.tensors, other.tensors)
        if source.tensors and not pairs:
            raise CheckFailedError(
                f"{original}: has no weight or moment with the name and shape of one in the other; "
                "give the checkpoint that it was made from"
            )
        errors = workers.map(lambda pair: _measure(source, pair[0], other, pair[1], full=full), pairs)
        found = {mine: error for (mine, _), error in zip(pairs, errors, strict=True)}
        other.bundle.check_unchanged()
    return found


def _measure(
    source: TensorSource, mine: SourceTensor, other: TensorSource, theirs: SourceTensor, *, full: bool
) -> dict[str, Any]:
    signal, error, differing = Extent(), Extent(), 0
    one, two = mine, theirs
    strides = [[ref.stride for ref in each.pieces] for each in (mine, theirs)]
    if strides[0] == strides[1] and mine.scale is theirs.scale is None:
        one, two = mine.in_memory_order, theirs.in_memory_order
    for pair in zip(source.blocks(one, full=full), other.blocks(two, full=full), strict=True):
        for y, x in zip(*(tiles([block]) for block in pair), strict=True):
            finite = y.isfinite() & x.isfinite()
            y_finite, x_finite = (y, x) if bool(finite.all()) else (y[finite], x[finite])
            differing += int((y_finite != x_finite).count_nonzero())
            signal.add(x_finite)
            error.add(y_finite.double() - x_finite.double())
    scale = 2 * (error.exponent - signal.exponent)
    nmse = math.ldexp(error.square / signal.square, scale) if signal.square else None
    return {
        "name": theirs.name,
        "differing": differing / max(signal.count, 1),
        "max_error": error.largest,
        "snr_db": None if nmse is None else decibels(nmse),
    }
