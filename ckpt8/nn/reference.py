"""SwitchBack's operations in plain torch: codes by row and by tensor, and their exact product. See ``linear``.

Sums of products of codes are integers, and the result is exact. ``torch._int_mm`` computes them where it is fast: on
CUDA devices for the shapes that it takes, on CPUs with VNNI. Without VNNI torch adds them one by one, or oneDNN
saturates sums of two products at 16 bits; for matrices with one column it returns uninitialised memory (torch 2.13).
Elsewhere fp32 products compute them, 1024 columns at a time:

    127² · 1024 < 2²⁴        every partial sum is an integer that fp32 holds, in any order
    127² · 2¹⁷  < 2³¹        every sum over a slice is an int32

Longer sums are added in fp32, by slices of 2¹⁷ columns, in order.
"""

from functools import reduce

import torch
from torch import Tensor

LEVELS = 127
"""Codes are -127 .. 127."""

SLICE = 1 << 17
"""Columns whose products are added as int32."""

_EXACT_IN_FLOAT = 1024
_FEWEST_COLUMNS = 8
_TILE = 1 << 16
"""Elements that are quantised at once, so that intermediate values stay in the cache."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and states of a matrix (rows, columns) of fp32, bf16 or fp16: int8 of its shape, and fp32 (rows,).

    A state is max|x| of its row, NaN where the row holds NaN or Inf; codes are then 0.
    """
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    states = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    for rows in _tiles(x):
        values = x[rows].float()
        states[rows] = state = _state(_largest(values))
        codes[rows] = _codes(values, state.unsqueeze(1))
    return codes, states


def tensor_state(x: Tensor) -> Tensor:
    """The state of a whole matrix, a 0-d fp32 tensor: max|x|, or NaN where the matrix holds NaN or Inf."""
    largest = [_largest(x[rows].float()) for rows in _tiles(x)]
    return _state(torch.cat(largest).amax() if largest else x.new_zeros((), dtype=torch.float32))


def quantise_tensor(x: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
    """Codes of a whole matrix under one state: int8 of its shape, or the contiguous transpose."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for rows in _tiles(x):
        codes[rows] = _codes(x[rows].float(), state)
    return codes.t().contiguous() if transposed else codes


def matmul(a: Tensor, row_states: Tensor, b: Tensor, state: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """((a @ bᵀ) · (state / 127²)) · row_states + bias, as ``dtype``; a is (rows, columns), b (outputs, columns)."""
    parts = zip(torch.split(a, SLICE, 1), torch.split(b, SLICE, 1), strict=True)
    sums = reduce(torch.add, (_integer_sums(left, right).float() for left, right in parts))
    return scaled(sums, row_states, state, bias, dtype)


def scaled(sums: Tensor, row_states: Tensor, state: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The last part of ``matmul``: fp32 ``sums``, which it overwrites, times the states, plus the bias."""
    # The product of the two states would leave fp32's range sooner.
    y = sums.mul_(state / LEVELS**2).mul_(row_states.unsqueeze(1))
    if bias is not None:
        y += bias.float()
    return y.to(dtype)


def _tiles(x: Tensor) -> list[slice]:
    rows, columns = x.shape
    step = max(1, _TILE // max(1, columns))
    return [slice(first, first + step) for first in range(0, rows, step)]


def _largest(values: Tensor) -> Tensor:
    return values.abs().amax(1) if values.shape[1] else values.new_zeros(values.shape[0])


def _state(largest: Tensor) -> Tensor:
    return torch.where(largest.isfinite(), largest, torch.nan)


def _codes(values: Tensor, state: Tensor) -> Tensor:
    """127 · (x / state), each operation rounded once, then to the nearest integer, halves to even."""
    codes = (values / torch.where(state > 0, state, 1.0)).mul_(LEVELS).round_()
    return torch.where(state >= 0, codes, 0.0).to(torch.int8)


def _integer_sums(a: Tensor, b: Tensor) -> Tensor:
    if _takes(a, b):
        return torch._int_mm(a, b.t())
    # On CUDA fp32 products may run in TF32, on tensor cores that add in an unknown way.
    floating = torch.float64 if a.device.type == "cuda" else torch.float32
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for first in range(0, a.shape[1], _EXACT_IN_FLOAT):
        part = slice(first, first + _EXACT_IN_FLOAT)
        total += (a[:, part].to(floating) @ b[:, part].to(floating).t()).to(torch.int32)
    return total


def _takes(a: Tensor, b: Tensor) -> bool:
    """Whether ``torch._int_mm`` computes this product, and exactly."""
    (rows, columns), outputs = a.shape, b.shape[0]
    if a.device.type == "cuda":
        return rows > 16 and columns > 0 and columns % 8 == 0 and outputs > 0 and outputs % 8 == 0
    return a.device.type == "cpu" and columns >= _FEWEST_COLUMNS and _CPU_IS_EXACT


def _cpu_is_exact() -> bool:
    """Whether the CPU has VNNI and adds the largest products without saturation, in a vector and in a matrix."""
    if not torch.cpu._is_vnni_supported():
        return False
    largest = torch.full((17, 64), LEVELS, dtype=torch.int8, device="cpu")
    signs = torch.tensor([[1], [-1]], dtype=torch.int8, device="cpu")
    return all(
        bool((torch._int_mm(largest[:rows], (largest * sign).t()) == 64 * LEVELS * LEVELS * sign.int()).all())
        for rows in (1, 17)
        for sign in signs
    )


# Tested once, at import: in a forward pass tensors may have no values, as under torch.compile.
_CPU_IS_EXACT = _cpu_is_exact()
