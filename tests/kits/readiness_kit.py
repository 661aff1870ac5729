"""Oracles of rounding in float64, and what the tests read and plant checkpoints with.

``round_one`` searches the list of all numbers of a format, made from their bit patterns: it knows of no steps, casts or
rules for ties but that the even code wins. ``fast_expected`` is for whole checkpoints.
"""

import math
from bisect import bisect_left
from functools import cache

import safetensors.torch
import torch


def _float_values(exponent_bits, mantissa_bits, infinities):
    """The positive numbers of a float in the order of their codes, and what would follow if exponents went on.

    ``infinities``: whether the highest exponent is taken by infinity and NaN; else one code alone is NaN.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        if exponent:
            values.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
        else:
            values.append(mantissa / 2**mantissa_bits * 2.0 ** (1 - bias))
    if infinities:
        return values[: -(2**mantissa_bits)], values[-(2**mantissa_bits)]
    return values[:-1], values[-1]


@cache
def numbers(name):
    """Non-negative numbers, the one beyond the largest, and the smallest that is normal."""
    if name == "int8":
        return [float(k) for k in range(128)], 128.0, 1.0
    bits = {"fp16": (5, 10, True), "bf16": (8, 7, True), "float8_e4m3fn": (4, 3, False), "float8_e5m2": (5, 2, True)}
    values, beyond = _float_values(*bits[name])
    return values, beyond, values[2 ** bits[name][1]]


@cache
def _line(name):
    values, beyond, _ = numbers(name)
    return [*values, beyond]


def round_one(name, x):
    """(rounded and saturated, overflows, underflows, is subnormal) of a finite float."""
    values, _, normal = numbers(name)
    line = _line(name)
    magnitude = abs(x)
    at = bisect_left(line, magnitude)
    if at == len(line):
        code = len(line) - 1
    elif line[at] == magnitude or at == 0:
        code = at
    else:
        # Both differences are exact: neighbours are within a factor of two, or below there is zero.
        below, above = magnitude - line[at - 1], line[at] - magnitude
        even = at - 1 if (at - 1) % 2 == 0 else at
        code = at - 1 if below < above else at if above < below else even
    overflows = code == len(values)
    found = values[-1] if overflows else values[code]
    return math.copysign(found, x), overflows, found == 0 and x != 0, 0 < found < normal


def all_finite(dtype):
    """Every finite number of a 16-bit type, as float32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return bits[bits.isfinite()].float()


def expected(name, x, scale=1.0, unit=1.0):
    """Fractions and SNR of rounding ``x * scale``, ``x`` a list of finite floats; ``unit`` brings these near 1."""
    counts, noise, signal = [0, 0, 0], [], []
    for value in x:
        rounded, *found = round_one(name, value * scale)
        counts = [a + b for a, b in zip(counts, found, strict=True)]
        noise.append(((rounded - value * scale) / scale * unit) ** 2)
        signal.append((value * unit) ** 2)
    nonzero = max(sum(value != 0 for value in x), 1)
    nmse = math.fsum(noise) / math.fsum(signal)
    fractions = {key: count / nonzero for key, count in zip(FRACTIONS, counts, strict=True)}
    return {**fractions, "snr_db": -10 * math.log10(nmse) if nmse else None}


FRACTIONS = ("overflow", "underflow", "subnormal")


def same(found, wanted, *where, tolerance=1e-6):
    """Whether two sets of figures are equal but for the order of sums."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        close = (
            found[key] is None if value is None else math.isclose(found[key], value, rel_tol=tolerance, abs_tol=1e-9)
        )
        assert close, (*where, key, found[key], value)


def fast_expected(name, x, scale, unit):
    """As ``expected``, of a flat float64 tensor: steps by ``frexp`` in float64, exact but for the last rounding."""
    values, beyond, normal = numbers(name)
    scaled = x * scale
    bits = {"fp16": 10, "bf16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}.get(name)
    exponents = torch.frexp(scaled.abs().clamp_min(normal))[1].double() - 1
    steps = torch.ones_like(scaled) if bits is None else torch.exp2(exponents - bits)
    rounded = torch.round(scaled / steps) * steps
    over = rounded.abs() >= beyond
    rounded = rounded.clamp(-values[-1], values[-1])
    zero, gone = x == 0, rounded == 0
    subnormal = ~gone & (rounded.abs() < normal)
    counts = [over.sum(), (gone & ~zero).sum(), subnormal.sum()]
    nonzero = max(int((~zero).sum()), 1)
    nmse = float(((rounded - scaled) / scale * unit).square().sum() / (x * unit).square().sum())
    fractions = {key: int(count) / nonzero for key, count in zip(FRACTIONS, counts, strict=True)}
    return {**fractions, "snr_db": -10 * math.log10(nmse) if nmse else None}


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
