"""SwitchBack's operations as Triton kernels: those of ``reference``, each rounded once, to the bit. See ``linear``.

    state    = fp32 of max(bits of |x|)                    NaN where that is Inf or NaN
    code     = rint(127 · (x / state))                     as (t + 1.5·2²³) - 1.5·2²³, which rounds halves to even
    y        = (fp32(Σ codes · codes) · (state / 127²)) · row state + bias

Both operands of a product lie with the summed dimension inside, as integer tensor cores want them: so the codes of W
are written transposed for the input gradient. bf16 is read and written as its 16 bits.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckpt8.codecs.triton_blocks import INFINITY, OPTIONS, QUIET_NAN, magnitude_bits, narrow, raw, widen
from ckpt8.nn import reference

ROW_BLOCK = 4096
"""Most columns of a row that a program handles at once."""

TILE = 64
"""Rows and columns of a tile of W."""

GROUP = 8
"""Tiles of rows that go through the columns together, so that their operands stay in the L2 cache."""

MATMUL_OPTIONS = {"num_stages": 3, **OPTIONS}
"""How the product is compiled."""

SLICE = tl.constexpr(reference.SLICE)
_LEVELS = tl.constexpr(127.0)
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def state_of(bits):
    """The state of the int32 bits of max|x|."""
    return tl.where(bits < INFINITY, bits, QUIET_NAN).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(x, state):
    """int8 codes of fp32 under states of its shape, or one for all."""
    states = tl.broadcast_to(state, x.shape)
    n = tl.div_rn(x, tl.where(states > 0, states, 1.0))
    t = tl.where(states >= 0, n, 0.0) * _LEVELS
    return ((t + _ROUNDING) - _ROUNDING).to(tl.int8)


@triton.jit
def rows_kernel(x, codes, states, columns, block: tl.constexpr):
    """One row: its largest magnitude, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    largest = tl.zeros([block], tl.int32)
    for first in range(0, columns, block):
        values = widen(tl.load(x + row * columns + first + at, first + at < columns, 0)).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(values))
    state = state_of(tl.max(largest, axis=0))
    tl.store(states + row, state)
    for first in range(0, columns, block):
        mask = first + at < columns
        values = widen(tl.load(x + row * columns + first + at, mask, 0)).to(tl.float32)
        tl.store(codes + row * columns + first + at, codes_of(values, state), mask)


@triton.jit
def largest_kernel(x, largest, columns, block: tl.constexpr):
    """The int32 bits of the largest magnitude of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    found = tl.zeros([block], tl.int32)
    for first in range(0, columns, block):
        values = widen(tl.load(x + row * columns + first + at, first + at < columns, 0)).to(tl.float32)
        found = tl.maximum(found, magnitude_bits(values))
    tl.store(largest + row, tl.max(found, axis=0))


@triton.jit
def tiles_kernel(x, codes, state, rows, columns, transposed: tl.constexpr, tile: tl.constexpr):
    """Codes of a tile of a matrix under one state, in their places or transposed."""
    row = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = widen(tl.load(x + row[:, None] * columns + column[None, :], mask, 0)).to(tl.float32)
    code = codes_of(values, tl.load(state))
    if transposed:
        turned = (row < rows)[None, :] & (column < columns)[:, None]
        tl.store(codes + column[:, None].to(tl.int64) * rows + row[None, :], tl.trans(code), turned)
    else:
        tl.store(codes + row[:, None] * columns + column[None, :], code, mask)


@triton.jit
def matmul_kernel(
    a,
    b,
    bias,
    y,
    row_states,
    state,
    rows,
    outputs,
    columns,
    even: tl.constexpr,
    sliced: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
):
    """A tile of a @ bᵀ; ``even``: columns are a multiple of ``block_k``; ``sliced``: more than an int32 adds."""
    across, down = tl.cdiv(outputs, block_n), tl.cdiv(rows, block_m)
    program = tl.program_id(0)
    first_down = program // (group * across) * group
    height = tl.minimum(down - first_down, group)
    within = program % (group * across)
    m = (first_down + within % height) * block_m + tl.arange(0, block_m)
    n = within // height * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    # Rows beyond the last are read as others are, and not written.
    from_a = a + (m % rows).to(tl.int64)[:, None] * columns + k[None, :]
    from_b = b + (n % outputs).to(tl.int64)[None, :] * columns + k[:, None]
    sums = tl.zeros((block_m, block_n), tl.int32)
    total = tl.zeros((block_m, block_n), tl.float32)
    for first in range(0, columns, block_k):
        if sliced:  # noqa: SIM102
            if (first > 0) & (first % SLICE == 0):
                total += sums.to(tl.float32)
                sums = tl.zeros((block_m, block_n), tl.int32)
        left = tl.load(from_a + first, None if even else (first + k < columns)[None, :], None if even else 0)
        right = tl.load(from_b + first, None if even else (first + k < columns)[:, None], None if even else 0)
        sums = tl.dot(left, right, sums, out_dtype=tl.int32)
    values = total + sums.to(tl.float32) if sliced else sums.to(tl.float32)
    values = values * tl.div_rn(tl.load(state), _LEVELS * _LEVELS) * tl.load(row_states + m, m < rows, 0)[:, None]
    if bias is not None:
        values += widen(tl.load(bias + n, n < outputs, 0)).to(tl.float32)[None, :]
    mask = (m < rows)[:, None] & (n < outputs)[None, :]
    to_y = y + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(to_y, narrow(values, y.dtype.element_ty).to(y.dtype.element_ty), mask)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and states of a matrix by row."""
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    states = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        with _on(x.device):
            rows_kernel[(rows,)](raw(x.contiguous()), codes, states, columns, block=_row_block(columns), **OPTIONS)
    return codes, states


def tensor_state(x: Tensor) -> Tensor:
    """The state of a whole matrix, fp32 without dimensions."""
    rows, columns = x.shape
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    largest = torch.empty(rows, dtype=torch.int32, device=x.device)
    with _on(x.device):
        largest_kernel[(rows,)](raw(x.contiguous()), largest, columns, block=_row_block(columns), **OPTIONS)
    found = largest.amax().view(torch.float32)
    return torch.where(found.isfinite(), found, torch.nan)


def quantise_tensor(x: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
    """Codes of a whole matrix under one state; ``transposed`` the other way around."""
    rows, columns = x.shape
    shape = (columns, rows) if transposed else (rows, columns)
    codes = torch.empty(shape, dtype=torch.int8, device=x.device)
    if x.numel():
        grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))
        with _on(x.device):
            tiles_kernel[grid](
                raw(x.contiguous()), codes, state, rows, columns, transposed=transposed, tile=TILE, **OPTIONS
            )
    return codes


def matmul(a: Tensor, row_states: Tensor, b: Tensor, state: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """((a @ bᵀ) · (state / 127²)) · row_states + bias, rounded to ``dtype``."""
    (rows, columns), outputs = a.shape, b.shape[0]
    y = torch.empty(rows, outputs, dtype=dtype, device=a.device)
    if not y.numel():
        return y
    blocks = matmul_blocks(rows)
    grid = (triton.cdiv(rows, blocks["block_m"]) * triton.cdiv(outputs, blocks["block_n"]),)
    tensors = a, b, None if bias is None else raw(bias.contiguous()), raw(y), row_states, state
    even, sliced = columns % blocks["block_k"] == 0, columns > reference.SLICE
    with _on(a.device):
        matmul_kernel[grid](
            *tensors, rows, outputs, columns, even=even, sliced=sliced, group=GROUP, **blocks, **MATMUL_OPTIONS
        )
    return y


def matmul_blocks(rows: int) -> dict[str, int]:
    """The tile of a program: fewer rows where there are few."""
    return {"block_m": 128 if rows > 64 else 64 if rows > 16 else 16, "block_n": 128, "block_k": 128}


def _row_block(columns: int) -> int:
    block: int = triton.next_power_of_2(columns)
    return max(256, min(ROW_BLOCK, block))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
