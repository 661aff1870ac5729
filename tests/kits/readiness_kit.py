"""Oracles of rounding in float64, and what the tests read and plant checkpoints with.

``round_one`` searches the list of all numbers of a format, made from their bit patterns: it knows of no steps, casts or
rules for ties but that the even code wins. ``fast_expected`` is for whole checkpoints.
"""

import math
from bisect import bisect_left
from functools import cache

import safetensors.torch
import torch

BITS = {"fp16": (5, 10, True), "bf16": (8, 7, True), "float8_e4m3fn": (4, 3, False), "float8_e5m2": (5, 2, True)}
"""Bits of exponent and mantissa, and whether infinity and NaN take the highest exponent; else one code alone is NaN."""


@cache
def numbers(name):
    """All numbers from 0 on in the order of their codes, then the one beyond the largest; the smallest normal one."""
    if name == "int8":
        return [float(k) for k in range(129)], 1.0
    exponent_bits, mantissa_bits, infinities = BITS[name]
    bias, line = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        line.append(((exponent > 0) + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    return line[: 1 - 2**mantissa_bits] if infinities else line, line[2**mantissa_bits]


def round_one(name, x):
    """(rounded and saturated, overflows, underflows, is subnormal) of a finite float."""
    line, normal = numbers(name)
    magnitude = abs(x)
    at = min(bisect_left(line, magnitude), len(line) - 1)
    if at and line[at] > magnitude:
        # Both differences are exact: neighbours are within a factor of two, or below there is zero.
        below, above = magnitude - line[at - 1], line[at] - magnitude
        if below < above or (below == above and at % 2):
            at -= 1
    overflows = at == len(line) - 1
    found = line[at - overflows]
    return math.copysign(found, x), overflows, found == 0 and x != 0, 0 < found < normal


def all_finite(dtype):
    """Every finite number of a 16-bit type, as float32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return bits[bits.isfinite()].float()


FRACTIONS = ("overflow", "underflow", "subnormal")


def expected(name, x, scale=1.0, unit=1.0):
    """Fractions and SNR of rounding ``x * scale``, ``x`` a list of finite floats; ``unit`` brings these near 1."""
    rounded, *counts = zip(*(round_one(name, value * scale) for value in x), strict=True)
    noise = math.fsum(((y - value * scale) / scale * unit) ** 2 for value, y in zip(x, rounded, strict=True))
    return _figures(map(sum, counts), sum(value != 0 for value in x), noise / math.fsum((v * unit) ** 2 for v in x))


def _figures(counts, nonzero, nmse):
    fractions = {key: int(count) / max(int(nonzero), 1) for key, count in zip(FRACTIONS, counts, strict=True)}
    return {**fractions, "snr_db": -10 * math.log10(nmse) if nmse else None}


def same(found, wanted, *where, tolerance=1e-6):
    """Whether two sets of figures are equal but for the order of sums."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        is_close = value is not None and math.isclose(found[key], value, rel_tol=tolerance, abs_tol=1e-9)
        assert is_close or found[key] is value is None, (*where, key, found[key], value)


def fast_expected(name, x, scale, unit):
    """As ``expected``, of a flat float64 tensor: steps by ``frexp`` in float64, exact but for the last rounding."""
    (*_, largest, beyond), normal = numbers(name)
    scaled = x * scale
    exponents = torch.frexp(scaled.abs().clamp_min(normal))[1].double() - 1
    steps = torch.exp2(exponents - BITS[name][1]) if name in BITS else torch.ones_like(scaled)
    rounded = torch.round(scaled / steps) * steps
    over = rounded.abs() >= beyond
    rounded = rounded.clamp(-largest, largest)
    zero, gone = x == 0, rounded == 0
    subnormal = ~gone & (rounded.abs() < normal)
    nmse = float(((rounded - scaled) / scale * unit).square().sum() / (x * unit).square().sum())
    return _figures([over.sum(), (gone & ~zero).sum(), subnormal.sum()], (~zero).sum(), nmse)


MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "momentum_buffer": "moment1"}


def of_optimizer(saved, prefix):
    """Moments by name: (role, tensor)."""
    return {
        f"{prefix}state.{number}.{key}": (MOMENTS[key], value)
        for number, state in saved["state"].items()
        for key, value in state.items()
        if key in MOMENTS and value is not None
    }


def of_gpt(path):
    saved = torch.load(path, weights_only=False)
    weights = {f"model.{name}": ("weight", value) for name, value in saved["model"].items() if name != "lm_head.weight"}
    return weights | of_optimizer(saved["optimizer"], "optimizer.")


def save(tmp_path, tensors):
    path = tmp_path / "planted.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


def normal(*shape, scale=1.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
