"""A dithered lattice as Triton kernels: the operations of ``reference``, each rounded once, to the bit.

    q        = floor(w / step + t)                          t is the dither of an element, see ``dither``
    decode   : w' = (q + (1/2 - t)) * step                  the reserved symbol: +0

Step, salt and the index of the first element are arguments of a compiled kernel: one serves all tensors. ``encode`` and
``decode`` have the signatures of the reference. Symbols and the dither are device functions, for the kernels of all
codecs that write symbols.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ckpt8.codecs.lattice import CODES, MULTIPLIERS, REFUSAL, RESERVED, modulo, step_of
from ckpt8.codecs.triton_blocks import launch, narrow, raw, refuse_any, widen
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts

SYMBOL_BLOCK = 1024
"""Elements of a program: 4 for each of its 256 threads, a 16-byte store of symbols. More would take its registers."""

ZERO = tl.constexpr(RESERVED)

_FIRST, _SECOND, _THIRD = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def elements(first, count, masked: tl.constexpr, block: tl.constexpr):
    """The first element of a program, the offsets of all its elements, and their mask; None for a whole block."""
    start = (tl.program_id(0) + first).to(tl.int64) * block
    at = tl.arange(0, block)
    return start, at, at < count if masked else None


@triton.jit
def zigzag(q):
    """Symbols of int32 integers."""
    return (q << 1) ^ (q >> 31)


@triton.jit
def from_zigzag(symbol):
    """The integers of int32 symbols."""
    return (symbol >> 1) ^ -(symbol & 1)


@triton.jit
def floor(x):
    """The fp32 floor. CUDA's own one takes a subnormal number for zero, and gives 0 for one below zero."""
    below = tl.floor(x)
    return tl.where(below > x, below - 1.0, below)


@triton.jit
def dither(origin, start, at, salt):
    """The dither of the elements ``start + at``. ``origin`` is the index in the storage of element 0, modulo 2^32."""
    index = origin.to(tl.uint32) + start.to(tl.uint32) + at.to(tl.uint32)
    h = index * _FIRST + salt.to(tl.uint32)
    h = (h ^ (h >> 15)) * _SECOND
    h = (h ^ (h >> 12)) * _THIRD
    h = h ^ (h >> 15)
    return (h >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


_CODES = tl.constexpr(float(CODES))


@triton.jit(do_not_specialize=["origin", "salt", "first", "count"])
def encode_kernel(
    weights,
    codes,
    flags,
    step,
    origin: tl.uint32,
    salt: tl.uint32,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Encode weights, fp32 or the bits of bf16; ``flags[0]`` becomes 1 where a code is out of range."""
    start, at, mask = elements(first, count, masked, block)
    w = widen(tl.load(weights + start + at, mask, 0 if masked else None))
    q = floor(tl.div_rn(w, step) + dither(origin, start, at, salt))
    # So that NaN is refused, too.
    refuse_any(flags, (tl.abs(q) < _CODES) == 0)
    tl.store(codes + start + at, tl.where(w == 0, ZERO, zigzag(q.to(tl.int32))), mask)


@triton.jit(do_not_specialize=["origin", "salt", "first", "count"])
def decode_kernel(
    weights,
    codes,
    step,
    origin: tl.uint32,
    salt: tl.uint32,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Decode weights, to fp32 or the bits of bf16."""
    start, at, mask = elements(first, count, masked, block)
    symbol = tl.load(codes + start + at, mask, 0 if masked else None)
    w = (from_zigzag(symbol).to(tl.float32) + (0.5 - dither(origin, start, at, salt))) * step
    tl.store(weights + start + at, narrow(tl.where(symbol == ZERO, 0.0, w), weights.dtype.element_ty), mask)


def encode(x: torch.Tensor, out: Parts, *, k: int, salt: int, first: int) -> None:
    """Fill ``out`` with the codes of weights, to the bit those of ``reference``. Raises RefusedError."""
    flags = torch.zeros(1, dtype=torch.int32, device=x.device)
    numbers = (step_of(k), modulo(first), salt)
    launch(encode_kernel, x.numel(), x.device, raw(x.contiguous()), out["codes"], flags, *numbers, block=SYMBOL_BLOCK)
    if flags.item():
        raise RefusedError(REFUSAL)


def decode(parts: Parts, out: torch.Tensor, *, k: int, salt: int, first: int) -> None:
    """Fill ``out`` with weights, to the bit those of ``reference``."""
    numbers = (step_of(k), modulo(first), salt)
    launch(decode_kernel, out.numel(), out.device, raw(out), parts["codes"].contiguous(), *numbers, block=SYMBOL_BLOCK)
