"""Tensors that one launch updates together: their element types, their table, and the blocks of its programs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton.language as tl

from ckpt8.optim.triton.blocks import ABSENT, BLOCK, COLUMNS, OPTIONS, SCALARS
from ckpt8.optim.triton.prologue import OPTIONS as PROLOGUE
from ckpt8.optim.triton.prologue import bits_of_float, write_addresses

_KINDS = {"torch.float32": tl.float32, "torch.float16": tl.float16, "torch.bfloat16": tl.int16}


class Layout(NamedTuple):
    """What kernels are compiled for: see ``state``. ``grad`` is torch's name of the element type.

    ``matrix``: for rules that work row by row, whether it has rows; ``even``: whether those are multiples of 16.
    """

    weight: str
    levels: int
    grad: str
    first: int
    second: int
    fourth_root: bool
    aligned: bool
    matrix: bool = False
    even: bool = False


class Row(NamedTuple):
    """One tensor. ``values``: addresses of parameter, its part, and codes and scales of both moments; 0 for none.

    ``step``: the address of the counter; ``stream``: ``stream_key(seed, index)``; ``factored``: the addresses of state
    that belongs to the whole tensor, and ``shape`` of tensors that have such.
    """

    values: tuple[int, ...]
    step: int
    numel: int
    stream: int
    factored: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


class Plan:
    """The tables of tensors of one layout on one device, and the launches over them.

    ``extra`` is for tables that the kernels of one rule need besides.
    """

    def __init__(self, layout: Layout, rows: Sequence[Row], device: torch.device) -> None:
        self.layout, self.rows, self.device = layout, list(rows), device
        self._constants = {**layout._asdict(), "grad": _KINDS[layout.grad]}
        self._places = {row: place for place, row in enumerate(rows)}
        self._gradients: list[int] | None = []  # None for good: a graph may write them behind our back
        self.extra: Any = None
        numbers = [[row.values[0], 0, *row.values[1:], row.step, row.numel, _signed(row.stream), 0, 0] for row in rows]
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
        """Set the addresses of the gradients of ``rows``, where any is new or ``always``; the others have none."""
        if rows == self.rows:
            new = list(gradients)
        else:
            new = [ABSENT.value] * len(self.rows)
            for row, gradient in zip(rows, gradients, strict=True):
                new[self._places[row]] = gradient
        if always:
            self._gradients = None
        if self._gradients is None or new != self._gradients:
            with self._on_device():
                write_addresses(self.table, new)
            if self._gradients is not None:
                self._gradients = new

    def tensors(self, kernel: Any, lr: Any, *args: Any, **constants: Any) -> None:
        """Run ``kernel`` for each tensor, with a learning rate that is a number, or a tensor on the device."""
        there = isinstance(lr, torch.Tensor) and lr.device == self.device
        bits = 0 if there else bits_of_float(float(lr))
        with self._on_device():
            kernel[(len(self.rows),)](
                self.table, self.scalars, bits, lr if there else None, *args, **constants, **PROLOGUE
            )

    def blocks(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run ``kernel`` for each block."""
        self.launch(kernel, self.whole, *args, masked=False, **constants)
        self.launch(kernel, self.short, *args, masked=True, **constants)

    def sums(self, kernel: Any, *args: Any, **constants: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``kernel`` for each block, of which each gives a float64; gives those, and which are of a tensor.

        The second result has for each tensor: the first of its whole blocks, their number, its short block or -1.
        """
        if self._partials is None:
            count = len(self.whole) + len(self.short)
            self._partials = torch.zeros(count, dtype=torch.float64, device=self.device)
        self.launch(kernel, self.whole, self._partials, *args, masked=False, **constants)
        self.launch(kernel, self.short, self._partials[len(self.whole) :], *args, masked=True, **constants)
        return self._partials, self._runs

    def launch(self, kernel: Any, programs: torch.Tensor, *args: Any, **constants: Any) -> None:
        """Run ``kernel`` for each row of ``programs``, with the constants of the layout that it has."""
        if len(programs):
            known = {**self._constants, "block": BLOCK}
            constants |= {name: known[name] for name in kernel.arg_names if name in known}
            with self._on_device():
                kernel[(len(programs),)](self.table, self.scalars, programs, *args, **constants, **OPTIONS)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def _programs(rows: torch.Tensor, blocks: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.stack((rows, blocks), 1).to(torch.int32).to(device)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
