"""Split master weights in plain torch, in pure integer arithmetic on the bits of fp32.

    mag, sign = bits & 0x7fffffff, bits >> 31
    hi        = (mag + 0x7fff + ((mag >> 16) & 1)) >> 16        bf16 magnitude, rounded to nearest even
    d         = mag - (hi << 16)                                in [-32768, 32768], fp32 steps
    rho       = sign(d) * ((R*|d| + 16384) >> 15)               in [-R, R]
    decode    : d' = sign(rho) * min(round(32768*|rho| / R), 32767);  bits = sign | ((hi << 16) + d')

Following FlashOptim (arXiv 2602.23349, section 3), whose ULP-normalised residual this is, in units of fp32 steps.
The clamp to 32767 keeps a decoded value strictly inside the rounding interval of ``hi``, so that encoding it again
gives the same ``hi`` and ``rho``.

The exact split of ``split32`` rounds halves up instead of to even, which makes the remainder fit 16 bits:

    hi        = (mag + 0x8000) >> 16
    residual  = mag - (hi << 16)                                in [-32768, 32767], fp32 steps: an int16
    decode    : bits = sign | ((hi << 16) + residual)

FlashOptim's own int16 mode scales the remainder instead, and gives back 99.73 % of all values exactly.
"""

from __future__ import annotations

from ckpt8.codecs.split24 import FIRST_OVERFLOW, REFUSAL
from ckpt8.core.errors import RefusedError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts

_SIGN_AND_MANTISSA = 0x807F - 0x10000
"""Bits of bf16, as int16."""


def upper_half(bits: torch.Tensor) -> torch.Tensor:
    """The bits of bf16 (int16) for bits of fp32 (int32), rounded to nearest even. NaN does not always stay NaN."""
    # The sign may stay where it is: rounding up ends at infinity, before it.
    return (bits >> 16).bitwise_and_(1).add_(bits).add_(0x7FFF).bitwise_right_shift_(16).to(torch.int16)


def round_masters(x: torch.Tensor) -> torch.Tensor:
    """Flat fp32 masters rounded to bf16, on any device."""
    return upper_half(x.view(torch.int32)).view(torch.bfloat16)


def joined_planes(parts: Parts) -> torch.Tensor:
    """The bits of bf16, int16, of the planes ``exponent`` and ``mantissa``."""
    # Widening int8 copies the sign on top of the mantissa to all higher bits; the mask keeps one copy.
    signed = parts["mantissa"].view(torch.int8).to(torch.int16).bitwise_and_(_SIGN_AND_MANTISSA)
    return signed.bitwise_or_(parts["exponent"].to(torch.int16).bitwise_left_shift_(7))


def encode(x: torch.Tensor, out: Parts, levels: int) -> None:
    """Split a flat fp32 tile into ``exponent`` uint8, ``mantissa`` uint8 (sign on top) and ``rho`` int8.

    Raises RefusedError on NaN, Inf and magnitudes that overflow bf16.
    """
    bits = x.view(torch.int32)
    mag = bits & 0x7FFFFFFF
    if int(mag.amax()) >= FIRST_OVERFLOW:
        raise RefusedError(REFUSAL)
    hi = (mag >> 16).bitwise_and_(1).add_(mag).add_(0x7FFF).bitwise_right_shift_(16)
    d = mag.sub_(hi << 16)
    # Rounding half away from zero is one floor division: the sign of d moves the tie from 16384 to 16383.
    rho = (d >> 31).add_(d.mul_(levels)).add_(16384).bitwise_right_shift_(15)
    out["rho"].copy_(rho)
    out["exponent"].copy_(hi >> 7)
    out["mantissa"].copy_((bits >> 24).bitwise_and_(0x80).bitwise_or_(hi.bitwise_and_(0x7F)))


def decode(parts: Parts, out: torch.Tensor, levels: int) -> None:
    """Join the parts of a tile into the flat fp32 tile ``out``."""
    # R is odd, so 32768*rho/R is never a tie. The factor is rounded itself, but the product still rounds to the right
    # integer for every R and rho, as a test shows.
    d = parts["rho"].float().mul_(32768 / levels).round_().clamp_(-32767, 32767)
    # The magnitude stays below 2^31 when d is added, so the sign may be in place before.
    bits = out.view(torch.int32)
    bits.copy_(joined_planes(parts)).bitwise_left_shift_(16).add_(d.to(torch.int32))


def encode_exact(x: torch.Tensor, out: Parts) -> None:
    """Split a flat fp32 tile into ``exponent`` uint8, ``mantissa`` uint8 (sign on top) and ``residual`` int16.

    Raises RefusedError on NaN, Inf and magnitudes that overflow bf16, the same as split24.
    """
    bits = x.view(torch.int32)
    mag = bits & 0x7FFFFFFF
    if int(mag.amax()) >= FIRST_OVERFLOW:
        raise RefusedError(REFUSAL)
    hi = (mag + 0x8000).bitwise_right_shift_(16)
    out["residual"].copy_(mag.sub_(hi << 16))
    out["exponent"].copy_(hi >> 7)
    out["mantissa"].copy_((bits >> 24).bitwise_and_(0x80).bitwise_or_(hi.bitwise_and_(0x7F)))


def decode_exact(parts: Parts, out: torch.Tensor) -> None:
    """Join the parts of a tile into the flat fp32 tile ``out``."""
    mantissa = parts["mantissa"].to(torch.int32)
    bits = out.view(torch.int32)
    bits.copy_(parts["exponent"])
    bits.bitwise_left_shift_(7).bitwise_or_(mantissa & 0x7F).bitwise_left_shift_(16).add_(parts["residual"])
    bits.bitwise_or_(mantissa.bitwise_right_shift_(7).bitwise_left_shift_(31))
