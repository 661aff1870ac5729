"""Stochastic rounding of second moments and 24-bit weights, which every step encodes again.

Rounding to nearest loses every change below half a code: v no longer decays, and weights stand still. So the choice
between two neighbouring codes is random, from a hash of (seed, parameter, step, element): integer arithmetic, the same
on every device, for every tile size, and after resuming.

Second moment, x = sqrt(v), code t = Q*(x/s)^p between c and c+1, A = probability that keeps the mean of x:

    s  = max x of the group, rounded UP to 8 exponent and 8 mantissa bits: so that no code is clamped
    A  = t - c                  (p = 1)       (t-c)(t+c) / (2c+1)            (p = 1/2)
    up = A * ((c+1)/t)^(1/p)    below 1/16 of s: keeps the mean of 1/x, so of the update
    up = A * (v(t) + ..)        above: keeps the mean of v: (t+c)/(2c+1), or (t^2+c^2)/((c+1)^2+c^2)
    v > 0 keeps a code of at least 1.

Measured, mean of v over 2048 elements (normal times log-normal) against b2^t, with zero gradients, after T = 1/(1-b2)
and 3T steps, p = 1/2, Q = 255; "nearest" is the encoder of companded8/1 with its scale rounded to nearest:

    b2       nearest        this            x, nearest scale   x, scale up     1/x everywhere
    .95      1.00  1.00     0.997  0.993    0.986  0.972       0.995  0.989    0.995  0.991
    .99      1.05  1.18     1.001  1.001    0.953  0.870       0.996  0.976    0.999  0.984
    .999     2.72  20.1     1.007  0.987    0.995  0.990       1.013  1.057    1.030  1.094
    .9999    2.72  20.1     1.007  1.011    1.002  0.974       1.011  1.024    1.025  1.058

Measured, 2000 steps of independent gradients whose scale spreads log-normally (sigma) inside the groups, b2 = .999:
error of the update against fp32 (NMSE, largest difference), and the 0.1 % quantile of v / v(fp32):

                            sigma 1                  sigma 2
    nearest, p = 1          1.4e-2  0.61  0.29       1.6e-1  1.39  0.22
    this, p = 1             2.7e-2  1.68  0.24       2.1e-1  1.74  0.22
    nearest, p = 1/2        5.3e-3  0.24  0.71       2.6e-2  0.96  0.29     (v too large by 17 %, and frozen)
    this, p = 1/2           1.2e-2  0.38  0.44       5.9e-2  1.33  0.17
    mean of v kept, p = 1/2 1.4e-2  0.57  0.38       2.5e-1  6.58  0.02

A low-discrepancy sequence over the steps in place of independent bits was worse: it locks in, v 2.0 times too large
after 3T at .999, and the same NMSE 7.0e-2 and 1.5e-1 where this has 1.1e-2 and 5.5e-2.

So p = 1/2 is the default for training: it is better here than the linear codes of the ``flash`` preset, even with
those rounded to nearest. A state that came with linear codes keeps them. First moments are rounded to nearest: for
beta1 <= .99 they decay as they should (0.978 after 3T at .99), and stochastic codes had twice the error energy.

24-bit weights (split24): rho = floor((R*d + noise) / 2^15), noise from 127 to 32640. A weight that does not change
keeps its code; a change under half a step of fp32 is lost, as in fp32. Rounding to nearest would lose all of a weight
decay of 1e-6 a step.
"""

from __future__ import annotations

import torch

from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.reference import QUIET_NAN, SMALLEST_ROOT2, as_groups, scale_value, square_root
from ckpt8.core.tensors import Parts

_MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B1
MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX32 = (0x7FEB352D, 0x846CA68B)
"""Multipliers of published bit mixers: Weyl's golden ratio, splitmix64's finaliser, Wellons's lowbias32."""

NARROW = 16
"""Below 1/16 of the scale, where v is under 1/256 of the group's largest, rounding keeps the mean of 1/x."""

WEIGHT_MARGIN = 127
"""The least noise: the largest R times the distance of a decoded weight from its exact level, in fp32 steps.

That distance is at most 1/2, but 1 at rho = +-R."""


def stream_key(*counters: int) -> int:
    """A 64-bit key for a run of random bits, from (seed, parameter index, step)."""
    key = 0
    for counter in counters:
        key = ((key + GOLDEN64) ^ counter) & _MASK64
        key = ((key ^ (key >> 30)) * MIX64[0]) & _MASK64
        key = ((key ^ (key >> 27)) * MIX64[1]) & _MASK64
        key ^= key >> 31
    return key


def signed(value: int, bits: int = 32) -> int:
    """The signed integer with the low ``bits`` bits of ``value``."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def random_bits(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """32 random bits (int32) for each of the elements ``start`` to ``start + count`` of a tensor."""
    x = torch.arange(count, dtype=torch.int32, device=device).add_(signed(start))
    for word in (key, (key >> 32) ^ (start >> 32)):
        x.bitwise_xor_(signed(word))
        x.bitwise_xor_(_shift(x, 16)).mul_(signed(MIX32[0]))
        x.bitwise_xor_(_shift(x, 15)).mul_(signed(MIX32[1]))
        x.bitwise_xor_(_shift(x, 16))
    return x


def weight_noise(bits: torch.Tensor) -> torch.Tensor:
    """int32 noise from 127 to 32640, from random bits; added to R*d before the shift by 15."""
    noise = _shift(bits * signed(GOLDEN32), 17)
    # 2^15 values onto 254/256 as many, their mean unchanged.
    return noise.sub_((noise >> 8).mul_(2)).add_(WEIGHT_MARGIN)


def encode_second_moment(v: torch.Tensor, out: Parts, levels: int, fourth_root: bool, bits: torch.Tensor) -> None:
    """Encode a flat fp32 tile of v >= 0 into ``codes`` uint8 and ``scales`` uint16 of companded8/1.

    ``bits`` are random int32, one per element. A NaN or Inf makes its group of 32 meaningless; none is refused.
    """
    root = as_groups(square_root(v))
    largest = root.amax(1)
    largest = torch.maximum(largest, largest.sign().mul_(SMALLEST_ROOT2))
    # torch.maximum makes NaN of all ones, the sign too, which would round to a scale of zero.
    magnitude = largest.view(torch.int32).bitwise_and_(0x7FFFFFFF).clamp_max_(QUIET_NAN)
    scale16 = magnitude.add_(0x7FFF).bitwise_right_shift_(15)
    divisor = scale_value(scale16)
    divisor[scale16 == 0] = 1.0
    n = root / divisor.unsqueeze(1)
    t = (square_root(n) if fourth_root else n).mul_(levels)
    low = t.floor().clamp_(1, levels)
    up = _chance_up(t, low, levels, fourth_root)
    codes = low.add_(as_groups(_shift(bits, 8).float()).mul_(2.0**-24) < up).clamp_(max=levels).mul_(root.sign_())
    # Through int32, since torch converts float to uint8 element by element.
    out["codes"].copy_(codes.to(torch.int32).view(-1)[: out["codes"].numel()])
    out["scales"].copy_(scale16)


def _chance_up(t: torch.Tensor, low: torch.Tensor, levels: int, fourth_root: bool) -> torch.Tensor:
    """The probability of the code above ``low``: A times the factor that keeps the mean of 1/x or of v."""
    high = low + 1
    narrow = low < levels / (NARROW**0.5 if fourth_root else NARROW)
    a, b, c = (high * high, t * t, low * low) if fourth_root else (high, t, low)
    chance = torch.where(narrow, a / b, (b + c) / (a + c)).mul_(t - low)
    return chance.mul_(t + low).div_(high + low) if fourth_root else chance


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: multiplications alone, so that every device gives the same float."""
    result = 1.0
    while exponent > 0:
        result = result * base if exponent & 1 else result
        base *= base
        exponent >>= 1
    return result


def groups_of(numel: int) -> int:
    """Number of scales of a tensor."""
    return -(-numel // GROUP)
