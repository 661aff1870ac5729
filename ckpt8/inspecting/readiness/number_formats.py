"""The number formats of low-precision training: range, best signal-to-noise ratio, and rounding.

A format holds the integers times a power of two, the step, which floats choose by the magnitude of the number. Rounding
is to nearest, ties to even. The rounded value of x is x^, and over the elements of a tensor

    SNR = 10 log10( sum x^2 / sum (x^ - x)^2 )  in dB
    overflow    |x| so large that rounding, were the range of exponents unbounded, gives more than the largest number
    underflow   x is not zero, and x^ is
    subnormal   0 < |x^| < the smallest normal number: fewer bits than the format has elsewhere

An overflow is stored as the largest number, as casts that saturate do; a plain cast gives infinity or NaN there.

The *ideal* SNR is that of a normal distribution. A step D makes the noise D^2 / 12, and a float of m stored bits of
mantissa has D = 2^(e - m) for 2^e <= |x| < 2^(e+1). So at a standard deviation of 1, with an unbounded exponent,

    SNR = -10 log10( sum over e of P(2^e <= |x| < 2^(e+1)) 4^(e - m) / 12 ) = 13.4 + 6.02 m  dB

int8 is scaled so that the largest magnitude is 127, and its ideal is that of a largest magnitude of 4.5 standard
deviations: D = 4.5 / 127. The *floor* lies 7.4 dB lower. Any normal numbers of a float format reach it, for the error
is at most half a step, |x| 2^-(m+1) at most: SNR >= 6.02 (m + 1) dB. An SNR below it is the fault of the range, not
bad luck. For int8 the same 7.4 dB are a largest magnitude of 10.6 standard deviations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ckpt8.core.tensors import DType

CREST = 4.5
"""Largest magnitude by standard deviation that the ideal of int8 assumes: that of 150,000 normal values."""

_BIT_DB = 20 * math.log10(2)
_EXPONENTS = range(-60, 8)
"""Exponents of normally distributed values: others change no sum in float64."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A format. ``mantissa`` counts its stored bits, None for integers; ``step`` separates the largest numbers."""

    id: str
    label: str
    dtype: DType
    mantissa: int | None
    largest: float
    step: float
    smallest_normal: float

    @property
    def scaling(self) -> str:
        """How to scale a tensor for it: ``unit`` brings the RMS near 1, ``absmax`` the largest magnitude to 127."""
        return "unit" if self.mantissa is not None else "absmax"

    @property
    def ideal_snr(self) -> float:
        """SNR of a normal distribution, in dB."""
        if self.mantissa is None:
            return 10 * math.log10(12 * (self.largest / CREST) ** 2)
        return _normal_snr() + _BIT_DB * self.mantissa

    @property
    def floor_snr(self) -> float:
        """The least SNR, in dB, at which the format suits a tensor."""
        return self.ideal_snr - (_normal_snr() - _BIT_DB)

    def overflows(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Which magnitudes overflow."""
        tie = self.largest + self.step / 2
        tie_goes_up = self.largest / self.step % 2 == 1
        return magnitudes >= tie if tie_goes_up else magnitudes > tie

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers that finite ``x``, float32 or float64, become: float32, saturated if they overflow.

        torch rounds to float8. Its versions cast an overflow differently, so that none reaches the cast.
        """
        if self.mantissa is None:
            return x.round().clamp_(-self.largest, self.largest).float()
        narrow = x if x.dtype is torch.float32 else round_to_odd(x)
        return narrow.clamp(-self.largest, self.largest).to(self.dtype.torch).float()


FORMATS: tuple[NumberFormat, ...] = (
    NumberFormat("fp16", "fp16", DType.FLOAT16, 10, 65504.0, 32.0, 2.0**-14),
    NumberFormat("bf16", "bf16", DType.BFLOAT16, 7, 255 * 2.0**120, 2.0**120, 2.0**-126),
    NumberFormat("float8_e4m3fn", "fp8 e4m3fn", DType.FLOAT8_E4M3FN, 3, 448.0, 32.0, 2.0**-6),
    NumberFormat("float8_e5m2", "fp8 e5m2", DType.FLOAT8_E5M2, 2, 57344.0, 8192.0, 2.0**-14),
    NumberFormat("int8", "int8", DType.INT8, None, 127.0, 1.0, 1.0),
)
"""Every format, in the order of the report. int8 is symmetric: it has no -128."""


def _normal_snr() -> float:
    """SNR in dB of a standard normal distribution in a float format without stored mantissa bits."""
    noise = sum((math.erf(2.0 ** (e + 0.5)) - math.erf(2.0 ** (e - 0.5))) * 4.0**e / 12 for e in _EXPONENTS)
    return -10 * math.log10(noise)


def round_to_odd(x: torch.Tensor) -> torch.Tensor:
    """``x``, float64, as float32 that any shorter format rounds as it would round ``x`` itself.

    Bits that float32 does not hold are cut off, and its last bit is set: so no value moves onto a tie, or off one.
    """
    nearest = x.float()
    bits = nearest.view(torch.int32)
    wide = nearest.double()
    bits = bits - (wide.abs() > x.abs()).int()
    return torch.where(wide == x, bits, bits | 1).view(torch.float32)
