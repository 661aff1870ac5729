"""``LaunchPlan``: tensors that one launch updates together, their table, and the blocks of its programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton.language as tl

from ckpt8.codecs.triton_blocks import on_device
from ckpt8.optim.triton.kernels import ABSENT, BLOCK, COLUMNS, OPTIONS, SCALARS, Matrices, step_kernel, sum_kernel
from ckpt8.optim.triton.prologue import OPTIONS as PROLOGUE
from ckpt8.optim.triton.prologue import bits_of_float, write_addresses
from ckpt8.optim.triton.rows import KernelLayout, Row

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
            with on_device(self.device):
                write_addresses(self.table, new)
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
                self.table, self.scalars, *rate, *given, *map(bits_of_float, numbers), **constants, **PROLOGUE
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
            partials = self._partials[first:]
            self.launch(sum_kernel, programs, partials, *self._averages, summand=summand, masked=masked)
        return self._partials, self._runs

    def launch(self, kernel: Any, programs: torch.Tensor, *args: Any, **constants: Any) -> None:
        """Run ``kernel`` for each row of ``programs``, with those constants of the layout that it takes."""
        if len(programs):
            constants |= {name: self._constants[name] for name in kernel.arg_names if name in self._constants}
            with on_device(self.device):
                kernel[(len(programs),)](self.table, self.scalars, programs, *args, **constants, **OPTIONS)


def _programs(rows: torch.Tensor, blocks: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.stack((rows, blocks), 1).to(torch.int32).to(device)
