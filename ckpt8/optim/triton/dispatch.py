"""Which parameters are updated by kernels, why the others are not, and the plans of those that are.

A parameter is updated here where it lies on a CUDA device (or with ``TRITON_INTERPRET=1`` on a CPU, for tests), it and
its gradient are contiguous, and the rule has kernels. Plans are kept from step to step: a step then compares addresses,
and rewrites those of gradients on the device where they are new.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import import_module
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpt8.codecs import Codec
from ckpt8.core import backend
from ckpt8.core.errors import UsageError
from ckpt8.optim.contract import PackedState
from ckpt8.optim.known_optimizers import card_of
from ckpt8.optim.master_weights import exact_residual, master_part
from ckpt8.optim.packed_tensor import Moment
from ckpt8.optim.rounding import stream_key

if TYPE_CHECKING:
    from ckpt8.optim.triton.launches import Layout, Plan, Row

Work = tuple[int, dict[str, Any], torch.Tensor]
"""Index of a parameter, its group, itself."""


def obstacle(rule_id: str, param: torch.Tensor) -> str | None:
    """Why a parameter cannot be updated by kernels; None if it can."""
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
    """A parameter as it was in the last step. ``layouts``: its layout by that of the gradient."""

    tensors: tuple[torch.Tensor, ...]
    addresses: list[int]
    setup: tuple[Any, ...]
    layout: Layout
    row: Row
    layouts: dict[tuple[torch.dtype, bool], Layout]

    def layout_with(self, grad: torch.Tensor, address: int) -> Layout:
        """The layout with this gradient."""
        key = grad.dtype, address % 16 == 0
        found = self.layouts.get(key)
        if found is None:
            aligned = self.layout.aligned and key[1]
            found = self.layouts[key] = self.layout._replace(grad=str(grad.dtype), aligned=aligned)
        return found


class Fused:
    """The plans of one optimizer."""

    def __init__(self, optimizer: PackedState) -> None:
        self._optimizer = optimizer
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._known: dict[int, _Known] = {}
        self._captured: list[Plan] = []
        self._told: set[int] = set()

    def takes(self, index: int, param: torch.Tensor) -> bool:
        """Whether a parameter is updated here. Where it lies on a CUDA device and is not, a warning says why, once.

        With ``fused=True`` that is a UsageError.
        """
        optimizer = self._optimizer
        if not optimizer.fused and (optimizer.fused is False or param.device.type != "cuda"):
            return False
        reason = obstacle(optimizer.rule_id, param)
        if reason is None:
            return True
        if optimizer.fused:
            raise UsageError(f"fused=True, but parameter {index} cannot be updated by kernels: {reason}")
        if index not in self._told:
            self._told.add(index)
            warnings.warn(f"parameter {index} is not updated by fused kernels: {reason}", stacklevel=4)
        return False

    def update(self, work: Iterable[Work], grad_scale: Any, found_inf: Any, alone: bool = False) -> None:
        """One step of parameters for which there is no obstacle; ``alone`` if they come one by one."""
        tensors: dict[tuple[Any, ...], list[tuple[Row, int]]] = {}
        groups: dict[int, dict[str, Any]] = {}
        for index, group, param in work:
            if not param.numel():
                continue
            if not self._optimizer.state[param]:
                self._optimizer.state[param] = self._optimizer.initial_state(group, param)
            known, grad = self._tensor(index, group, param), param.grad
            assert grad is not None  # noqa: S101
            groups[id(group)], address = group, grad.data_ptr()
            key = id(group), known.layout_with(grad, address), param.device, index if alone else None
            tensors.setdefault(key, []).append((known.row, address))
        for key, found in tensors.items():
            group = groups[key[0]]
            plan = self._plan(key, found)
            module = import_module(f"ckpt8.optim.triton.{card_of(group['rule']).kernels}")
            module.step(plan, group, *(_on(value, plan.device) for value in (grad_scale, found_inf)))

    def _plan(self, key: tuple[Any, ...], found: list[tuple[Row, int]]) -> Plan:
        from ckpt8.optim.triton.launches import Plan

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
            plan = self._plans[key] = Plan(layout, [*rows, *absent], device)
        if capturing:
            # The graph reads these tables when it is replayed, and has to set the gradients itself.
            self._captured.append(plan)
        plan.use(rows, gradients, always=capturing)
        return plan

    def _tensor(self, index: int, group: dict[str, Any], param: torch.Tensor) -> _Known:
        """What is known of a parameter, anew where any of its tensors is another or lies elsewhere."""
        tensors = (param, *self._optimizer.state[param].values())
        addresses = [tensor.data_ptr() for tensor in tensors]
        setup = group["master"], group["moment1"], group["moment2"], group["seed"]
        known = self._known.get(index)
        if (
            known is None
            or known.addresses != addresses
            or not all(map(is_, known.tensors, tensors))
            or known.setup != setup
        ):
            known = self._known[index] = _Known(tensors, addresses, setup, *self._found(index, group, param), {})
        return known

    def _found(self, index: int, group: dict[str, Any], param: torch.Tensor) -> tuple[Layout, Row]:
        """Layout and table row of a parameter; the layout's gradient is like the parameter."""
        from ckpt8.optim.triton.launches import Layout, Row

        optimizer = self._optimizer
        state = optimizer.state[param]
        state["step"] = state["step"].to(param.device)
        codec = optimizer.codec(group, "master", param, exact_residual(state))
        part = master_part(param.dtype, codec)
        kinds = optimizer.moments(group, tuple(param.shape)).items()
        moments = {kind: Moment.of(name, optimizer.codec(group, kind, param), state) for name, kind in kinds}
        first, second = moments.get("moment1"), moments.get("moment2")
        if any(tensor.device != param.device for tensor in state.values()):
            raise UsageError(f"the state of parameter {index} is not on {str(param.device)!r}, where the parameter is")
        tensors = [param, None if part is None else state[part[0]], *_parts(first), *_parts(second)]
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        fourth_root = second is not None and second.codec is not None and second.codec.p != 1
        aligned = not any(address % 16 for address in addresses)
        levels = _levels(first), _levels(second)
        layout = Layout(*_weight(param.dtype, codec), str(param.dtype), *levels, fourth_root, aligned)
        whole = tuple(state[name].data_ptr() for name in optimizer.factored(tuple(param.shape)))
        if whole:
            layout = layout._replace(matrix=True, even=param.shape[-1] % 16 == 0)
        stream = stream_key(group["seed"], index)
        shape = tuple(param.shape) if whole else ()
        return layout, Row(addresses, state["step"].data_ptr(), param.numel(), stream, whole, shape)


def _weight(dtype: torch.dtype, codec: Codec) -> tuple[str, int]:
    if dtype == torch.float32:
        return "fp32", 0
    if dtype == torch.float16:
        return "fp16", 0
    return ("split32", 0) if codec.codes is None else ("split24", codec.codes.highest)


def _parts(moment: Moment | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if moment is None:
        return None, None
    parts = moment.parts
    return (parts["codes"], parts["scales"]) if "codes" in parts else (parts["values"], None)


def _levels(moment: Moment | None) -> int:
    return moment.codec.Q if moment is not None and moment.codec is not None else 0


def _on(value: Any, device: torch.device) -> Any:
    """A scalar tensor of a GradScaler on ``device``."""
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
