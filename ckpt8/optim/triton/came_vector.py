"""CAME below two dimensions, fused: ``ckpt8.optim.came.came_vector`` on blocks in registers.

V = b2 V + (1-b2) (g^2 + eps1);     u = g * rsqrt(V);     u /= max(1, RMS(u)/d)
m = b1 m + (1-b1) u;     theta = theta (1 - lr wd) - lr m
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.optim.triton.blocks import (
    NOW,
    bits_of_block,
    elements,
    read_first,
    read_gradient,
    read_second,
    read_weight,
    scalar,
    without_padding,
    work,
    write_first,
    write_second,
    write_weight,
)
from ckpt8.optim.triton.came_rule import DECAY, EPS, FACTOR, SECOND_KEEP, SECOND_RATE, STEP_SIZE, moved
from ckpt8.optim.triton.matrices import inverse_root


@triton.jit
def direction(g, v, scalars, row):
    """U before it is clipped, and the new second moment."""
    square = (g * g + scalar(scalars, row, EPS)) * scalar(scalars, row, SECOND_RATE)
    v = v * scalar(scalars, row, SECOND_KEEP) + square
    return g * inverse_root(v), v


@triton.jit
def sum_kernel(
    table,
    scalars,
    programs,
    partials,
    grad: tl.constexpr,
    second: tl.constexpr,
    fourth_root: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """The sum of u^2 over one block of one tensor."""
    row, tensor, start = work(table, programs, block)
    count = elements(tensor, start) if masked else None
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(scalars, row, FACTOR), start, count, block, aligned)
    v = read_second(tensor, second, fourth_root, start, count, block, aligned)
    u, v = direction(g, v, scalars, row)
    square = without_padding(u * u, count, block).to(tl.float64)
    tl.store(partials + tl.program_id(0), tl.sum(tl.sum(square, axis=1)))


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
    weight: tl.constexpr,
    levels: tl.constexpr,
    grad: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
    fourth_root: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Update one block of one tensor."""
    row, tensor, start = work(table, programs, block)
    count = elements(tensor, start) if masked else None
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(scalars, row, FACTOR), start, count, block, aligned)
    x = read_weight(tensor, weight, levels, start, count, block, aligned)
    m = read_first(tensor, first, start, count, block, aligned)
    v = read_second(tensor, second, fourth_root, start, count, block, aligned)
    u, v = direction(g, v, scalars, row)
    u, m = moved(u, m, scalars, row)
    x = x * scalar(scalars, row, DECAY) - m * scalar(scalars, row, STEP_SIZE)
    bits = bits_of_block(tensor, start, block)
    write_weight(tensor, weight, levels, start, count, x, bits, block, aligned)
    write_first(tensor, first, start, count, m, block, aligned)
    write_second(tensor, second, fourth_root, start, count, v, bits, block, aligned)
