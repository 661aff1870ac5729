"""Which parameters the kernels update, what they need to know of each, and the plans of their launches.

The kernels update a parameter that lies on a CUDA device (or on a CPU with ``TRITON_INTERPRET=1``, for tests), where it
and its gradient are contiguous, and its rule has kernels. Plans stay from step to step: a step compares addresses, and
rewrites those of gradients on the device where they are new.

Imports no Triton at its top, since optimizers are imported on machines without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpt8.core import backend
from ckpt8.core.errors import UsageError, require
from ckpt8.optim.known_optimizers import card_of
from ckpt8.optim.packed_tensor import signed, stream_key

if TYPE_CHECKING:
    from ckpt8.optim.packed import PackedOptimizer
    from ckpt8.optim.triton.launches import LaunchPlan

Work = tuple[int, dict[str, Any], torch.Tensor]
"""Index of a parameter, its group, itself."""


def obstacle(rule_id: str, param: torch.Tensor) -> str | None:
    """Why the kernels cannot update a parameter; None if they can."""
    if not card_of(rule_id).kernels:
        return f"the rule {rule_id!r} has no kernels"
    if (fault := backend.obstacle(param.device)) is not None:
        return fault
    if not param.is_contiguous():
        return "it is not contiguous"
    if param.grad is not None and not param.grad.is_contiguous():
        return "its gradient is not contiguous"
    return None


_WEIGHTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class KernelLayout(NamedTuple):
    """What kernels are compiled for: see ``kernels``. ``grad`` is torch's name of the element type.

    ``matrix``: whether the state has row and column averages; ``even``: whether rows are then multiples of 16.
    """

    weight: str
    levels: int
    grad: str
    first: int | None
    second: int | None
    fourth_root: bool
    aligned: bool
    matrix: bool
    even: bool


class Row(NamedTuple):
    """The table row of one tensor, made of addresses and sizes.

    ``values``: parameter, its residual or master, codes and scales of both moments; 0 where it has none. ``step``: the
    step counter. ``stream``: the bits of ``stream_key(seed, index)``. ``factored``: row and column averages; ``shape``
    is the shape of a tensor that has them.
    """

    values: tuple[int, ...]
    step: int
    numel: int
    stream: int
    factored: tuple[int, ...]
    shape: tuple[int, ...]


def describe(
    optimizer: PackedOptimizer, index: int, group: dict[str, Any], param: torch.Tensor
) -> tuple[KernelLayout, Row]:
    """Layout and table row of a parameter and its gradient."""
    state, grad, shape = optimizer.state[param], param.grad, tuple(param.shape)
    assert grad is not None  # noqa: S101
    codec, part, moments = optimizer.views(group, param, state)
    by_kind = {kind: moments[name] for name, kind in optimizer.moments(group, shape).items()}
    first, second = by_kind.get("moment1"), by_kind.get("moment2")
    tensors = [param, part]
    for moment in (first, second):
        parts = {} if moment is None else moment.parts
        tensors += parts.get("codes", parts.get("values")), parts.get("scales")
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    factored = tuple(state[name].data_ptr() for name in optimizer.factored(shape))
    layout = KernelLayout(
        weight=_WEIGHTS[param.dtype],
        levels=0 if codec.codes is None else codec.codes.highest,
        grad=str(grad.dtype),
        first=None if first is None else first.levels,
        second=None if second is None else second.levels,
        fourth_root=second is not None and second.codec is not None and second.codec.p != 1,
        aligned=not any(address % 16 for address in (*addresses, grad.data_ptr())),
        matrix=bool(factored),
        even=bool(factored) and shape[-1] % 16 == 0,
    )
    return layout, Row(
        addresses,
        state["step"].data_ptr(),
        param.numel(),
        signed(stream_key(group["seed"], index), 64),
        factored,
        shape if factored else (),
    )


class _Known(NamedTuple):
    """A parameter as it was in the last step."""

    tensors: tuple[torch.Tensor, ...]
    addresses: list[int]
    setup: tuple[Any, ...]
    layout: KernelLayout
    row: Row


class Fused:
    """The plans of one optimizer."""

    def __init__(self, optimizer: PackedOptimizer) -> None:
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
        if not launches:
            return
        from ckpt8.optim.triton.rules import step

        for key, (group, entries) in launches.items():
            plan = self._plan(key, entries)
            scaler = [t if t is None else t.to(plan.device, non_blocking=True) for t in (grad_scale, found_inf)]
            step(plan, group, scaler)

    def _plan(self, key: tuple[Any, ...], entries: list[tuple[Row, int]]) -> LaunchPlan:
        from ckpt8.optim.triton.launches import LaunchPlan

        rows, gradients = [row for row, _ in entries], [gradient for _, gradient in entries]
        layout, device = key[1:3]
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        plan = self._plans.get(key)
        if plan is None or not plan.covers(rows):
            require(not capturing, "take a step with these parameters before capturing one in a CUDA graph", UsageError)
            # Parameters that have no gradient this time stay, so that they may come and go.
            streams = {row.stream for row in rows}
            absent = (row for row in (plan.rows if plan else ()) if row.stream not in streams)
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
                raise UsageError(f"the state of parameter {index} is not on '{param.device}', where the parameter is")
            known = _Known(tensors, addresses, setup, *describe(self._optimizer, index, group, param))
            self._known[index] = known
        return known
