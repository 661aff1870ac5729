"""First moments in steps of their second moments as Triton kernels: the operations of ``reference``, to the bit.

All numbers of a codec are arguments of a compiled kernel: one serves all tensors. ``encode`` and ``decode`` have the
signatures of the reference.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ckpt8.codecs.lattice import modulo
from ckpt8.codecs.lattice.triton import SYMBOL_BLOCK, dither, elements, floor, from_zigzag, zigzag
from ckpt8.codecs.triton_blocks import launch, narrow, raw, refuse_any, widen
from ckpt8.codecs.vscaled import CODES, LARGEST_UPDATE, REACH, REFUSAL, SMALLEST_STEP, STEP_SHARE
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts

_CODES = tl.constexpr(float(CODES))
_SMALLEST_STEP = tl.constexpr(SMALLEST_STEP)
_INFINITE = tl.constexpr(math.inf)


@triton.jit
def divisor_of(v, bias1, root_bias2, eps):
    """The divisor of the rule for fp32 second moments."""
    return (tl.div_rn(tl.sqrt_rn(v), root_bias2) + eps) * bias1


@triton.jit
def steps_of(v, divisor, k, share):
    """The step of every element: ``share`` is what it may move an update at most."""
    largest = divisor * share
    steps = tl.sqrt_rn(tl.sqrt_rn(v)) * k
    return tl.where((v == 0) | (largest < steps), largest, steps)


@triton.jit(do_not_specialize=["origin", "salt", "first", "count"])
def encode_kernel(
    moments,
    second,
    original,
    codes,
    flags,
    k,
    bias1,
    root_bias2,
    eps,
    origin: tl.uint32,
    salt: tl.uint32,
    share,
    reach,
    most,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Encode first moments, fp32 or the bits of bf16; ``flags[0]`` becomes 1 where one cannot be kept."""
    start, at, mask = elements(first, count, masked, block)
    m = widen(tl.load(moments + start + at, mask, 0 if masked else None))
    v = tl.load(second + start + at, mask, 1.0 if masked else None)
    divisor = divisor_of(v, bias1, root_bias2, eps)
    step = steps_of(v, divisor, k, share)
    offset = tl.where(v == 0, 0.0, 0.5 - dither(origin, start, at, salt))
    original_v = tl.load(original + start + at, mask, 1.0 if masked else None)
    u = tl.where(m == 0, 0.0, tl.div_rn(m, divisor_of(original_v, bias1, root_bias2, eps)))
    # The ceiling of a number is minus the floor of minus the number.
    low = -floor(offset - tl.div_rn((u - reach) * divisor, step))
    high = floor(tl.div_rn((u + reach) * divisor, step) - offset)
    q = tl.minimum(tl.maximum(floor(tl.div_rn(m, step) + (0.5 - offset)), low), high)
    nothing = (v == 0) & (step == 0) & (m == 0)
    bounded = (step >= _SMALLEST_STEP) & (step < _INFINITE) & (divisor < _INFINITE)
    bounded &= (tl.abs(u) < most) & (tl.abs(q) < _CODES)
    refuse_any(flags, (nothing | bounded) == 0)
    tl.store(codes + start + at, zigzag(tl.where(nothing, 0.0, q).to(tl.int32)), mask)


@triton.jit(do_not_specialize=["origin", "salt", "first", "count"])
def decode_kernel(
    moments,
    second,
    codes,
    k,
    bias1,
    root_bias2,
    eps,
    origin: tl.uint32,
    salt: tl.uint32,
    share,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Decode first moments, to fp32 or the bits of bf16."""
    start, at, mask = elements(first, count, masked, block)
    symbol = tl.load(codes + start + at, mask, 0 if masked else None)
    v = tl.load(second + start + at, mask, 1.0 if masked else None)
    step = steps_of(v, divisor_of(v, bias1, root_bias2, eps), k, share)
    offset = tl.where(v == 0, 0.0, 0.5 - dither(origin, start, at, salt))
    m = (from_zigzag(symbol).to(tl.float32) + offset) * step
    tl.store(moments + start + at, narrow(m, moments.dtype.element_ty), mask)


def _fp32(*numbers: float) -> list[float]:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").tolist()


def encode(
    x: torch.Tensor,
    out: Parts,
    *,
    second: torch.Tensor,
    original_second: torch.Tensor,
    first: int,
    k: float,
    u_max: float,
    bias1: float,
    root_bias2: float,
    eps: float,
    salt: int,
) -> None:
    """Fill ``out`` with the codes of first moments, to the bit those of ``reference``. Raises RefusedError."""
    flags = torch.zeros(1, dtype=torch.int32, device=x.device)
    given = (raw(x.contiguous()), *(squares.float().contiguous() for squares in (second, original_second)))
    [bound] = _fp32(u_max)
    # Products with numbers of a few bits, which are exact here.
    share, reach, most = _fp32(*(bound * part for part in (STEP_SHARE, REACH, LARGEST_UPDATE)))
    numbers = (*_fp32(k, bias1, root_bias2, eps), modulo(first), salt, share, reach, most)
    launch(encode_kernel, x.numel(), x.device, *given, out["codes"], flags, *numbers, block=SYMBOL_BLOCK)
    if flags.item():
        raise RefusedError(REFUSAL)


def decode(
    parts: Parts,
    out: torch.Tensor,
    *,
    second: torch.Tensor,
    first: int,
    k: float,
    u_max: float,
    bias1: float,
    root_bias2: float,
    eps: float,
    salt: int,
) -> None:
    """Fill ``out`` with first moments, to the bit those of ``reference``."""
    given = (raw(out), second.float().contiguous(), parts["codes"].contiguous())
    [bound] = _fp32(u_max)
    numbers = (*_fp32(k, bias1, root_bias2, eps), modulo(first), salt, *_fp32(bound * STEP_SHARE))
    launch(decode_kernel, out.numel(), out.device, *given, *numbers, block=SYMBOL_BLOCK)
