"""SwitchBack's operations as Triton kernels: those of ``reference``, each rounded once, to the bit. See ``linear``.

    state    = fp32 of max(bits of |x|)                    NaN where that is Inf or NaN
    code     = rint(127 · (x / state))                     as (t + 1.5·2²³) - 1.5·2²³, which rounds halves to even
    y        = (fp32(Σ codes · codes) · (state / 127²)) · row state + bias

Integer tensor cores want the summed dimension of both operands to be contiguous, so the codes of W are written
transposed for the input gradient. Rows of codes are padded with zeros to a multiple of ``STEP``: products then load 16
bytes at a time, without masks. bf16 is read and written as its 16 bits.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckpt8.codecs.triton_blocks import INFINITY, OPTIONS, QUIET_NAN, magnitude_bits, narrow, on_device, raw, widen
from ckpt8.nn import reference

ROW_BLOCK = 4096
"""Most columns of a row that a program handles at once."""

STEP = 128
"""Columns of codes that a product takes at once."""

TILE = 64
"""Rows and columns of a tile of W."""

GROUP = 8
"""How many tiles of rows share the columns that they read, so that operands stay in the L2 cache."""

MATMUL_OPTIONS = {"num_stages": 3, **OPTIONS}
"""How ``matmul_kernel`` is compiled."""

_LEVELS = tl.constexpr(127.0)
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def state_of(bits):
    """The state of the int32 bits of max|x|."""
    return tl.where(bits < INFINITY, bits, QUIET_NAN).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(x, state):
    """int8 codes of fp32 values, under states of the same shape or one for all."""
    states = tl.broadcast_to(state, x.shape)
    t = tl.where(states >= 0, tl.div_rn(x, tl.where(states > 0, states, 1.0)), 0.0) * _LEVELS
    return ((t + _ROUNDING) - _ROUNDING).to(tl.int8)


@triton.jit
def largest_bits(row, columns, block: tl.constexpr):
    """The int32 bits of the largest magnitude in a row of ``columns`` elements."""
    at = tl.arange(0, block)
    largest = tl.zeros([block], tl.int32)
    for first in range(0, columns, block):
        values = widen(tl.load(row + first + at, first + at < columns, 0)).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(values))
    return tl.max(largest, axis=0)


@triton.jit
def rows_kernel(x, codes, states, columns, padded, block: tl.constexpr):
    """The state of one row, and its codes unless ``codes`` is None."""
    row = tl.program_id(0).to(tl.int64)
    state = state_of(largest_bits(x + row * columns, columns, block))
    tl.store(states + row, state)
    if codes is not None:
        for first in range(0, padded, block):
            at = first + tl.arange(0, block)
            values = widen(tl.load(x + row * columns + at, at < columns, 0)).to(tl.float32)
            tl.store(codes + row * padded + at, codes_of(values, state), at < padded)


@triton.jit
def tiles_kernel(x, codes, state, rows, columns, padded, transposed: tl.constexpr, tile: tl.constexpr):
    """Codes of a tile of a matrix under one state, straight or transposed; rows of codes are ``padded`` long."""
    row = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = widen(tl.load(x + row[:, None] * columns + column[None, :], mask, 0)).to(tl.float32)
    code = codes_of(values, tl.load(state))
    if transposed:
        turned = (row < padded)[None, :] & (column < columns)[:, None]
        tl.store(codes + column[:, None].to(tl.int64) * padded + row[None, :], tl.trans(code), turned)
    else:
        straight = (row < rows)[:, None] & (column < padded)[None, :]
        tl.store(codes + row[:, None] * padded + column[None, :], code, straight)


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
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
):
    """A tile of a @ bᵀ as fp32, scaled and with its bias; columns are a multiple of ``block_k``."""
    across, down = tl.cdiv(outputs, block_n), tl.cdiv(rows, block_m)
    program = tl.program_id(0)
    first_down = program // (group * across) * group
    height = tl.minimum(down - first_down, group)
    within = program % (group * across)
    m = (first_down + within % height) * block_m + tl.arange(0, block_m)
    n = within // height * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    # Rows beyond the last wrap around when they are read, and are not written.
    from_a = a + (m % rows).to(tl.int64)[:, None] * columns + k[None, :]
    from_b = b + (n % outputs).to(tl.int64)[None, :] * columns + k[:, None]
    sums = tl.zeros((block_m, block_n), tl.int32)
    for first in range(0, columns, block_k):
        sums = tl.dot(tl.load(from_a + first), tl.load(from_b + first), sums, out_dtype=tl.int32)
    values = (
        sums.to(tl.float32)
        * tl.div_rn(tl.load(state), _LEVELS * _LEVELS)
        * tl.load(row_states + m, m < rows, 0)[:, None]
    )
    if bias is not None:
        values += widen(tl.load(bias + n, n < outputs, 0)).to(tl.float32)[None, :]
    mask = (m < rows)[:, None] & (n < outputs)[None, :]
    to_y = y + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(to_y, narrow(values, y.dtype.element_ty).to(y.dtype.element_ty), mask)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and states of a matrix by row; rows of codes are padded."""
    codes = _empty(x.shape[0], x.shape[1], x.device)
    return codes, _row_states(x, codes)


def _row_states(x: Tensor, codes: Tensor | None) -> Tensor:
    """The states of a matrix by row. Fills ``codes``, if there are to be any."""
    rows, columns = x.shape
    states = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        padded = columns if codes is None else codes.shape[1]
        with on_device(x.device):
            rows_kernel[(rows,)](raw(x.contiguous()), codes, states, columns, padded, **row_options(columns))
    return states


def tensor_state(x: Tensor) -> Tensor:
    """The state of a whole matrix, fp32 without dimensions."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return _row_states(x, None).amax()


def quantise_tensor(x: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
    """Codes of a whole matrix under one state, ``transposed`` the other way around; rows of codes are padded."""
    rows, columns = x.shape
    codes = _empty(columns, rows, x.device) if transposed else _empty(rows, columns, x.device)
    if codes.numel():
        padded = codes.shape[1]
        grid = triton.cdiv(columns if transposed else padded, TILE), triton.cdiv(padded if transposed else rows, TILE)
        options = {"transposed": transposed, "tile": TILE, **OPTIONS}
        with on_device(x.device):
            tiles_kernel[grid](raw(x.contiguous()), codes, state, rows, columns, padded, **options)
    return codes


def matmul(a: Tensor, row_states: Tensor, b: Tensor, state: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """((a @ bᵀ) · (state / 127²)) · row_states + bias, rounded to ``dtype``."""
    a, b = _padded(a), _padded(b)
    (rows, columns), outputs = a.shape, b.shape[0]
    if columns > reference.SLICE:
        ones, unscaled = torch.ones_like(row_states), torch.full_like(state, reference.LEVELS**2)
        parts = zip(torch.split(a, reference.SLICE, 1), torch.split(b, reference.SLICE, 1), strict=True)
        sums = (matmul(left, ones, right, unscaled, None, torch.float32) for left, right in parts)
        return reference.scaled(reduce(torch.add, sums), row_states, state, bias, dtype)
    y = torch.empty(rows, outputs, dtype=dtype, device=a.device)
    if not y.numel():
        return y
    blocks = matmul_blocks(rows)
    grid = (triton.cdiv(rows, blocks["block_m"]) * triton.cdiv(outputs, blocks["block_n"]),)
    tensors = a, b, None if bias is None else raw(bias.contiguous()), raw(y), row_states, state
    with on_device(a.device):
        matmul_kernel[grid](*tensors, rows, outputs, columns, group=GROUP, **blocks, **MATMUL_OPTIONS)
    return y


def matmul_blocks(rows: int) -> dict[str, int]:
    """The tile of a program: 128 rows, or fewer where the matrix has few."""
    return {"block_m": 128 if rows > 64 else 64 if rows > 16 else 16, "block_n": 128, "block_k": STEP}


def row_options(columns: int) -> dict[str, Any]:
    """Launch options of kernels over rows: 16 elements for each thread, if a row has that many."""
    block = max(256, min(ROW_BLOCK, triton.next_power_of_2(columns)))
    return {**OPTIONS, "block": block, "num_warps": max(1, block // 512)}


def _empty(rows: int, columns: int, device: torch.device) -> Tensor:
    """Memory for codes, with padded rows."""
    return torch.empty(rows, columns + -columns % STEP, dtype=torch.int8, device=device)


def _padded(codes: Tensor) -> Tensor:
    """Codes in rows of a multiple of ``STEP``, as products take them; codes from this module have them already."""
    missing = -codes.shape[1] % STEP
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes.contiguous()
