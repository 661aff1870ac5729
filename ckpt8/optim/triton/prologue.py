"""What a rule computes once per tensor and step, on the device, so that the host need not wait for it.

    step += 1, unless there is no gradient, or one overflowed (``found_inf`` of a GradScaler)
    key   = stream_key(seed, index, step)
    the numbers of the rule, in float64 as Python computes them, and rounded to fp32

One program for each tensor. Python floats come as integers, the bits of float64: see ``bits_of_float``. Every prologue
lists the same first parameters, since Triton takes no structures.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from ckpt8.optim.triton.kernels import (
    ABSENT,
    COLUMNS,
    GRAD,
    GRADIENT_FACTOR,
    KEY,
    NOW,
    SCALARS,
    STEP,
    STREAM,
    double,
    extended_key,
)

ADDRESSES = 64
"""How many addresses one launch writes."""

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""How prologues are compiled."""


def bits_of_float(value: float) -> int:
    """The bits of a float64 as a signed integer, which a kernel reads with ``double``."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


@triton.jit
def own_numbers(scalars):
    """The scalars of this program's tensor."""
    return scalars + tl.program_id(0) * SCALARS


@triton.jit
def put(numbers, which: tl.constexpr, value):
    """Store a float64 number, rounded to fp32."""
    tl.store(numbers + which, value.to(tl.float32))


@triton.jit
def advance(table, scalars, grad_scale, found_inf, maximize: tl.constexpr):
    """Count the step of this program's tensor; store its random key and the factor of its gradient.

    Returns the scalars of the tensor, and the number of the step, also where it is skipped.
    """
    tensor, numbers = table + tl.program_id(0) * COLUMNS, own_numbers(scalars)
    counter = tl.load(tensor + STEP).to(tl.pointer_type(tl.int64))
    given = tl.load(tensor + GRAD) != ABSENT
    step = tl.load(counter, given, 0) + 1
    now = tl.where(given, step, 0)
    if found_inf is not None:
        now = tl.where(tl.load(found_inf) != 0, 0, now)
    tl.store(counter, step, now != 0)
    key = extended_key(tl.load(tensor + STREAM).to(tl.uint64, bitcast=True), step.to(tl.uint64, bitcast=True))
    tl.store(tensor + KEY, key.to(tl.int64, bitcast=True))
    tl.store(tensor + NOW, now)
    # 1/scale of a GradScaler, negated to maximise.
    factor = tl.full([], -1.0 if maximize else 1.0, tl.float64)
    if grad_scale is not None:
        factor = factor / tl.load(grad_scale).to(tl.float64)
    put(numbers, GRADIENT_FACTOR, factor)
    return numbers, step


@triton.jit
def rate(lr, lr_tensor):
    """The learning rate in float64, from a tensor on the device where there is one, else from its bits."""
    return double(lr) if lr_tensor is None else tl.load(lr_tensor).to(tl.float64)


@triton.jit(do_not_specialize=["first"])
def addresses_kernel(table, first, odd):
    """Write addresses of gradients.

    ``odd`` holds each address doubled, plus one: the compiler makes other kernels for 1 and for multiples of 16.
    """
    for i in tl.static_range(len(odd)):
        tl.store(table + (first + i) * COLUMNS + GRAD, odd[i] >> 1)


def write_addresses(table: torch.Tensor, addresses: list[int]) -> None:
    """Set the addresses of gradients by kernel arguments: no copy from the host, and a CUDA graph keeps them."""
    for first in range(0, len(addresses), ADDRESSES):
        some = [(2 * address) | 1 for address in addresses[first : first + ADDRESSES]]
        addresses_kernel[(1,)](table, first, tuple(some), **OPTIONS)
