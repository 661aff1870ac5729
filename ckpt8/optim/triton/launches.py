"""``LaunchPlan``: tensors that one launch updates together, their table, the blocks of its programs; and prologues.

A prologue computes the numbers of a rule once per tensor and step, on the device, so that the host need not wait:

    step += 1, unless there is no gradient, or one overflowed (``found_inf`` of a GradScaler)
    key   = stream_key(seed, index, step)
    the numbers of the rule, in float64 as Python computes them, and rounded to fp32

One program for each tensor. Python floats come as integers, the bits of float64: see ``bits_of_float``. Every prologue
lists the same first parameters, since Triton takes no structures.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ckpt8.codecs.triton_blocks import on_device
from ckpt8.optim.triton.kernels import (
    ABSENT,
    BLOCK,
    COLUMNS,
    GRAD,
    GRADIENT_FACTOR,
    KEY,
    LINE,
    NOW,
    OPTIONS,
    SCALARS,
    STEP,
    STREAM,
    TILE,
    double,
    extended_key,
    step_kernel,
    sum_kernel,
)

if TYPE_CHECKING:
    from ckpt8.optim.triton.dispatch import KernelLayout, Row

ADDRESSES = 64
"""How many addresses one launch writes."""

PROLOGUE_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""How prologues are compiled."""


def bits_of_float(value: float) -> int:
    """The bits of a float64 as a signed integer, which a kernel reads with ``double``."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


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


class Matrices:
    """The tables of the matrices in the ``rows`` of a plan: ``table``, two buffers, and the programs of the kernels."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        numbers, factors, sums = [], 0, 0
        tiles, row_lines, column_lines = [], [], []
        for index, row in enumerate(rows):
            height, width = row.shape[-2:]
            batches = math.prod(row.shape[:-2])
            across, down, blocks = -(-width // TILE), -(-height // TILE), -(-height // LINE)
            sizes = (batches * size for size in (height, width, height, width))
            *offsets, factors = accumulate(sizes, initial=factors)
            sizes = (batches * size for size in (height * across, down * width, blocks))
            *partials, sums = accumulate(sizes, initial=sums)
            numbers.append([*row.factored, *offsets, height, width, across, down, blocks, *partials])
            tiles.append(_pieces(index, batches, down, across))
            row_lines.append(_pieces(index, batches, blocks, 1))
            column_lines.append(_pieces(index, batches, -(-width // LINE), 1, axis=1))
        self.table = torch.tensor(numbers, dtype=torch.int64).to(device)
        self.factors = torch.zeros(factors, dtype=torch.float32, device=device)
        self.sums = torch.zeros(sums, dtype=torch.float64, device=device)
        self.tiles = torch.cat(tiles).to(device)
        self.rows = torch.cat(row_lines).to(device)
        self.lines = torch.cat([*row_lines, *column_lines]).to(device)


def _pieces(index: int, batches: int, down: int, across: int, axis: int = 0) -> torch.Tensor:
    """(row of the table, batch, block down, block across or ``axis``) of every program, int32."""
    grid = torch.cartesian_prod(*(torch.arange(size, dtype=torch.int32) for size in (batches, down, across)))
    return torch.cat((torch.full((len(grid), 1), index, dtype=torch.int32), grid[:, :2], grid[:, 2:] + axis), 1)


_KINDS = {"torch.float32": tl.float32, "torch.float16": tl.float16, "torch.bfloat16": tl.int16}


Scaler = Sequence[torch.Tensor | None]
"""``grad_scale`` and ``found_inf`` of a GradScaler on the device of a plan, or None for each."""


class LaunchPlan:
    """The tables of tensors of one layout on one device, and the launches over them.

    ``matrices``: the tables for row and column averages; None for tensors that have none.
    """

    def __init__(self, layout: KernelLayout, rows: Sequence[Row], device: torch.device) -> None:
        self.rows, self.device = list(rows), device
        self.matrices = Matrices(self.rows, device) if layout.matrix else None
        self._averages = (None, None) if self.matrices is None else (self.matrices.table, self.matrices.factors)
        self._constants = {**layout._asdict(), "grad": _KINDS[layout.grad], "block": BLOCK}
        self._places = {row: place for place, row in enumerate(rows)}
        self._gradients: list[int] | None = []  # None once a CUDA graph has captured the plan: it may write others
        numbers = [[row.values[0], 0, *row.values[1:], row.step, row.numel, row.stream, 0, 0] for row in rows]
        self.table = torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, COLUMNS.value)
        self.scalars = torch.zeros(len(rows), SCALARS.value, dtype=torch.float32, device=device)
        index, whole = torch.arange(len(rows)), torch.tensor([row.numel // BLOCK for row in rows])
        first = torch.repeat_interleave(whole.cumsum(0) - whole, whole)
        short = torch.tensor([bool(row.numel % BLOCK) for row in rows])
        self.whole = _programs(torch.repeat_interleave(index, whole), torch.arange(len(first)) - first, device)
        self.short = _programs(index[short], whole[short], device)
        after = torch.where(short, len(first) + short.cumsum(0) - 1, -1)
        self._runs = torch.stack((whole.cumsum(0) - whole, whole, after), 1).to(device)
        self._partials: torch.Tensor | None = None

    def covers(self, rows: Sequence[Row]) -> bool:
        """Whether all of ``rows`` are in the tables."""
        return rows == self.rows or all(row in self._places for row in rows)

    def use(self, rows: Sequence[Row], gradients: Sequence[int], always: bool) -> None:
        """Set the addresses of the gradients of ``rows`` if one is new, or ``always``; other tensors get none."""
        if rows == self.rows:
            new = list(gradients)
        else:
            new = [ABSENT.value] * len(self.rows)
            for row, gradient in zip(rows, gradients, strict=True):
                new[self._places[row]] = gradient
        if always:
            self._gradients = None
        if self._gradients is None or new != self._gradients:
            # Kernel arguments need no copy from the host, and a CUDA graph keeps them.
            with on_device(self.device):
                for first in range(0, len(new), ADDRESSES):
                    odd = tuple((2 * address) | 1 for address in new[first : first + ADDRESSES])
                    addresses_kernel[(1,)](self.table, first, odd, **PROLOGUE_OPTIONS)
            if self._gradients is not None:
                self._gradients = new

    def tensors(
        self, kernel: Any, lr: Any, given: Iterable[torch.Tensor | None], numbers: Iterable[float], **constants: Any
    ) -> None:
        """Run ``kernel`` for each tensor. ``lr`` is a number, or a tensor on the device; numbers go as their bits."""
        on_gpu = isinstance(lr, torch.Tensor) and lr.device == self.device
        rate = (0, lr) if on_gpu else (bits_of_float(float(lr)), None)
        with on_device(self.device):
            kernel[(len(self.rows),)](
                self.table, self.scalars, *rate, *given, *map(bits_of_float, numbers), **constants, **PROLOGUE_OPTIONS
            )

    def step(self, rule: Any) -> None:
        """Update every block by ``rule``: see ``kernels``."""
        for programs, masked in ((self.whole, False), (self.short, True)):
            self.launch(step_kernel, programs, *self._averages, rule=rule, masked=masked)

    def sums(self, summand: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum ``summand`` over every block. Returns the float64 sums, and which of them belong to a tensor.

        The second result has for each tensor: the first of its whole blocks, their number, its short block or -1.
        """
        whole, short = len(self.whole), len(self.short)
        if self._partials is None:
            self._partials = torch.zeros(whole + short, dtype=torch.float64, device=self.device)
        for programs, first, masked in ((self.whole, 0, False), (self.short, whole, True)):
            self.launch(sum_kernel, programs, self._partials[first:], *self._averages, summand=summand, masked=masked)
        return self._partials, self._runs

    def launch(self, kernel: Any, programs: torch.Tensor, *args: Any, **constants: Any) -> None:
        """Run ``kernel`` for each row of ``programs``, with those constants of the layout that it takes."""
        if len(programs):
            constants |= {name: self._constants[name] for name in kernel.arg_names if name in self._constants}
            with on_device(self.device):
                kernel[(len(programs),)](self.table, self.scalars, programs, *args, **constants, **OPTIONS)


def _programs(rows: torch.Tensor, blocks: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.stack((rows, blocks), 1).to(torch.int32).to(device)
