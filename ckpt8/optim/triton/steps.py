"""The kernels over blocks that every rule shares: a step, and a sum over the blocks of each tensor.

A kernel decodes a block to fp32, calls the rule, which is one of its constants, and stores the block encoded:

    x, m, v = rule(x, g, m, v, numbers, step, place)         weight, gradient, moments -> new weight and moments
    s = summand(g, v, numbers, place)                        what ``sum_kernel`` adds over a tensor, for example g^2

``numbers`` points to the scalars that the rule's prologue wrote; ``step`` counts from 1. A moment that the state lacks
is None; the rule returns any block in its place (device functions cannot return None), and it is not stored. ``place``
is None, or what ``matrices.approximation`` needs for a tensor with row and column averages. Both kernels list the
constants of a layout, since Triton takes no structures.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.optim.triton.arithmetic import random_bits
from ckpt8.optim.triton.blocks import (
    CHUNK,
    COLUMNS,
    FIRST,
    GRADIENT_FACTOR,
    KEY,
    NOW,
    NUMEL,
    SCALARS,
    SECOND,
    offsets,
    read_gradient,
    read_moment,
    read_weight,
    scalar,
    without_padding,
    write_moment,
    write_weight,
)
from ckpt8.optim.triton.matrices import MATRIX, place_of


@triton.jit
def locate(table, scalars, programs, block: tl.constexpr):
    """The block of this program: number of its table row, the row, its scalars, and the first element."""
    program = programs + tl.program_id(0) * 2
    row, start = tl.load(program).to(tl.int64), tl.load(program + 1).to(tl.int64) * block
    return row, table + row * COLUMNS, scalars + row * SCALARS, start


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
    matrices,
    factors,
    rule: tl.constexpr,
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
    row, tensor, numbers, start = locate(table, scalars, programs, block)
    count = (tl.load(tensor + NUMEL) - start).to(tl.int32) if masked else None
    place = None if matrices is None else place_of(matrices + row * MATRIX, factors, start, count, block)
    step = tl.load(tensor + NOW)
    if step == 0:
        return
    g = read_gradient(tensor, grad, scalar(numbers, GRADIENT_FACTOR), start, count, block, aligned)
    x = read_weight(tensor, weight, levels, start, count, block, aligned)
    m = None if first is None else read_moment(tensor, FIRST, first, False, start, count, block, aligned)
    v = None if second is None else read_moment(tensor, SECOND, second, fourth_root, start, count, block, aligned)
    x, m, v = rule(x, g, m, v, numbers, step, place)
    bits = random_bits(tl.load(tensor + KEY).to(tl.uint64, bitcast=True), start, offsets(block))
    write_weight(tensor, weight, levels, start, count, x, bits, block, aligned)
    write_moment(tensor, FIRST, first, False, start, count, m, bits, block, aligned)
    write_moment(tensor, SECOND, second, fourth_root, start, count, v, bits, block, aligned)


@triton.jit
def sum_kernel(
    table,
    scalars,
    programs,
    partials,
    matrices,
    factors,
    summand: tl.constexpr,
    grad: tl.constexpr,
    second: tl.constexpr,
    fourth_root: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Sum ``summand`` over one block of one tensor, in float64."""
    row, tensor, numbers, start = locate(table, scalars, programs, block)
    count = (tl.load(tensor + NUMEL) - start).to(tl.int32) if masked else None
    place = None if matrices is None else place_of(matrices + row * MATRIX, factors, start, count, block)
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(numbers, GRADIENT_FACTOR), start, count, block, aligned)
    v = None if second is None else read_moment(tensor, SECOND, second, fourth_root, start, count, block, aligned)
    terms = without_padding(summand(g, v, numbers, place), count, block)
    tl.store(partials + tl.program_id(0), tl.sum(tl.sum(terms.to(tl.float64), axis=1)))


@triton.jit
def root_mean(table, partials, runs):
    """The root of the mean over this program's tensor of what ``sum_kernel`` added; float64.

    It always adds in the same order. ``runs`` says which ``partials`` belong to the tensor: see ``LaunchPlan.sums``.
    """
    row = tl.program_id(0)
    first, whole, short = tl.load(runs + row * 3), tl.load(runs + row * 3 + 1), tl.load(runs + row * 3 + 2)
    at = tl.arange(0, CHUNK)
    gathered = tl.zeros([CHUNK], tl.float64)
    # Older interpreters take no bounds of ``range`` that were loaded.
    begin = 0
    while begin < whole:
        gathered += tl.load(partials + first + begin + at, begin + at < whole, 0.0)
        begin += CHUNK
    total = tl.sum(gathered) + tl.load(partials + short, short >= 0, 0.0)
    return tl.sqrt(total / tl.load(table + row * COLUMNS + NUMEL).to(tl.float64))
