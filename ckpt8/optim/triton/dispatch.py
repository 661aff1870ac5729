"""Which parameters the kernels update, why they do not update the others, and the plans of their launches.

The kernels update a parameter that lies on a CUDA device (or on a CPU with ``TRITON_INTERPRET=1``, for tests), where it
and its gradient are contiguous, and its rule has kernels. Plans stay from step to step: a step compares addresses, and
rewrites those of gradients on the device where they are new.

A ``LaunchPlan`` has the tensors that one launch updates together, their table, and the blocks of its programs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from operator import is_
from typing import Any, NamedTuple

import torch
import triton.language as tl

from ckpt8.codecs.triton_blocks import on_device
from ckpt8.core import backend
from ckpt8.core.errors import UsageError
from ckpt8.optim.known_optimizers import card_of
from ckpt8.optim.packed_state import PackedState
from ckpt8.optim.triton.kernels import ABSENT, BLOCK, COLUMNS, OPTIONS, SCALARS, Matrices, step_kernel, sum_kernel
from ckpt8.optim.triton.prologue import OPTIONS as PROLOGUE
from ckpt8.optim.triton.prologue import bits_of_float, write_addresses
from ckpt8.optim.triton.rows import KernelLayout, Row, describe

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


Work = tuple[int, dict[str, Any], torch.Tensor]
"""Index of a parameter, its group, itself."""


def obstacle(rule_id: str, param: torch.Tensor) -> str | None:
    """Why the kernels cannot update a parameter; None if they can."""
    if card_of(rule_id).kernels is None:
        return f"the rule {rule_id!r} has no kernels"
    if (fault := backend.obstacle(param.device)) is not None:
        return fault
    if not param.is_contiguous():
        return "it is not contiguous"
    if param.grad is not None and not param.grad.is_contiguous():
        return "its gradient is not contiguous"
    return None


class _Known(NamedTuple):
    """A parameter as it was in the last step."""

    tensors: tuple[torch.Tensor, ...]
    addresses: list[int]
    setup: tuple[Any, ...]
    layout: KernelLayout
    row: Row


class Fused:
    """The plans of one optimizer."""

    def __init__(self, optimizer: PackedState) -> None:
        self._optimizer = optimizer
        self._plans: dict[tuple[Any, ...], LaunchPlan] = {}
        self._known: dict[int, _Known] = {}
        self._captured: list[LaunchPlan] = []
        self._warned: set[int] = set()

    def takes(self, index: int, param: torch.Tensor) -> bool:
        """Whether the kernels update a parameter. Warns once where it lies on a CUDA device and they cannot.

        Raises UsageError instead where the optimizer demands them.
        """
        optimizer = self._optimizer
        if not optimizer.fused and (optimizer.fused is False or param.device.type != "cuda"):
            return False
        reason = obstacle(optimizer.rule_id, param)
        if reason is None:
            return True
        if optimizer.fused:
            raise UsageError(f"fused=True, but parameter {index} cannot be updated by kernels: {reason}")
        if index not in self._warned:
            self._warned.add(index)
            warnings.warn(f"parameter {index} is not updated by fused kernels: {reason}", stacklevel=5)
        return False

    def update(self, work: Iterable[Work], grad_scale: Any, found_inf: Any, alone: bool = False) -> None:
        """One step of parameters that ``takes`` accepted; ``alone`` if they come one by one."""
        launches: dict[tuple[Any, ...], tuple[dict[str, Any], list[tuple[Row, int]]]] = {}
        for index, group, param in work:
            if not param.numel():
                continue
            if not self._optimizer.state[param]:
                self._optimizer.state[param] = self._optimizer.initial_state(group, param)
            assert param.grad is not None  # noqa: S101
            known = self._look_up(index, group, param, param.grad)
            key = id(group), known.layout, param.device, index if alone else None
            launches.setdefault(key, (group, []))[1].append((known.row, param.grad.data_ptr()))
        for key, (group, found) in launches.items():
            plan = self._plan(key, found)
            module = import_module(f"ckpt8.optim.triton.{card_of(group['rule']).kernels}")
            scaler = [t if t is None else t.to(plan.device, non_blocking=True) for t in (grad_scale, found_inf)]
            module.step(plan, group, scaler)

    def _plan(self, key: tuple[Any, ...], found: list[tuple[Row, int]]) -> LaunchPlan:

        rows, gradients = [row for row, _ in found], [gradient for _, gradient in found]
        layout, device = key[1:3]
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        plan = self._plans.get(key)
        if plan is None or not plan.covers(rows):
            if capturing:
                raise UsageError("take a step with these parameters before capturing one in a CUDA graph")
            # Parameters that have no gradient this time stay, so that they may come and go.
            streams = {row.stream for row in rows}
            absent = [] if plan is None else [row for row in plan.rows if row.stream not in streams]
            plan = self._plans[key] = LaunchPlan(layout, [*rows, *absent], device)
        if capturing:
            # The graph reads these tables when it is replayed, and has to set the gradients itself.
            self._captured.append(plan)
        plan.use(rows, gradients, always=capturing)
        return plan

    def _look_up(self, index: int, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> _Known:
        """Layout and row of a parameter; made again where one of its tensors is another or has moved."""
        state = self._optimizer.state[param]
        tensors = (param, *state.values())
        addresses = [tensor.data_ptr() for tensor in tensors]
        setup = *map(group.get, ("master", "moment1", "moment2", "seed")), grad.dtype, grad.data_ptr() % 16 == 0
        known = self._known.get(index)
        if (
            known is None
            or known.addresses != addresses
            or not all(map(is_, known.tensors, tensors))
            or known.setup != setup
        ):
            state["step"] = state["step"].to(param.device)
            if any(tensor.device != param.device for tensor in state.values()):
                place = repr(str(param.device))
                raise UsageError(f"the state of parameter {index} is not on {place}, where the parameter is")
            described = describe(self._optimizer, index, group, param)
            known = self._known[index] = _Known(tensors, addresses, setup, *described)
        return known
