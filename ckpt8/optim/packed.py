"""What the packed optimizers share: a ``torch.optim.Optimizer`` whose state is parts of codecs.

Per parameter: ``step`` (int64), ``residual`` or ``master`` (see ``masters``), and for each moment ``NAME_codes`` of
the parameter's shape and ``NAME_scales`` (see ``moments``), or ``NAME`` in fp32 where the parameter is small. Codec
ids and configurations stand in the parameter group under ``master``, ``moment1`` and ``moment2``.

An optimizer is a rule over blocks of fp32 values (see ``blocks``). Blocks are tiles of 2^18 elements, so that beside
the packed state a step needs a few megabytes. Every operation on state is elementwise and rounded once, sums are taken
over fixed runs, and random bits depend on (seed, index of the parameter, step, element) alone: runs are reproducible,
resumable bit for bit, and independent of tile size and threads.

On a CUDA device Triton kernels take the step, with the same results (see ``triton``): all of a group in a few launches,
nothing read by the host, so that steps can be captured in a CUDA graph. ``step`` lies on the device there. Parameters
that they cannot take are updated as on a CPU, and a warning says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any, ClassVar

import torch

from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.cutting import TILE
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split32 import Split32
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import is_small
from ckpt8.optim.blocks import Block, flat_blocks, row_blocks
from ckpt8.optim.contract import Layout
from ckpt8.optim.gradient_release import GradientRelease
from ckpt8.optim.known_optimizers import Card, card_of, resolve
from ckpt8.optim.master_weights import CHECKS, exact_residual, master_part, weight_check
from ckpt8.optim.packed_tensor import Moment, PackedTensor, moment_layout
from ckpt8.optim.packing_options import MOMENT2, check_group
from ckpt8.optim.rounding import stream_key
from ckpt8.optim.state_dicts import matched_state
from ckpt8.optim.triton.dispatch import Fused

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
Cut = tuple[int, int, Block]
"""First element, last element + 1, and the block as the rule sees it."""


class PackedOptimizer(torch.optim.Optimizer):
    """Base class. Besides the arguments of the rule it takes these, which a parameter group may override.

    ``master``: how bf16 parameters are completed: ``split24`` (int8 residual) or ``split32`` (int16, exact).
    ``moment1``, ``moment2``: ``companded8(...)`` or ``lossless`` (fp32), as text or as a stored configuration.
    ``maximize``: ascend instead of descend. ``seed``: of stochastic rounding.
    ``fused``: True demands the kernels, False forbids them, None takes them on CUDA devices. Not part of the state.

    Raises UsageError for arguments, parameters and gradients that it does not take: complex, integer, float64, sparse.
    """

    rule_id: ClassVar[str]
    tile: int = TILE
    fused: bool | None = None
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        master: str = "split24",
        moment1: str = "companded8",
        moment2: str = MOMENT2,
        maximize: bool = False,
        seed: int = 0,
        fused: bool | None = None,
    ) -> None:
        self.fused = fused
        packing = {"master": master, "moment1": moment1, "moment2": moment2, "maximize": maximize, "seed": seed}
        super().__init__(params, {**defaults, **packing, "rule": self.card.rule_id})

    @property
    def card(self) -> Card:
        """What is known of the optimizer."""
        return card_of(self.rule_id)

    @property
    def rule_arguments(self) -> tuple[str, ...]:
        """The settings of a group that the rule takes."""
        return tuple(self.card.settings)

    def moments(self, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, str]:
        """Names of the moments of a parameter of this shape, each with its kind: ``moment1`` or ``moment2``."""
        return {each.key: each.slot for each in self.card.form(len(shape)).present(group) if each.is_moment}

    def factored(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of fp32 state that belongs to the whole tensor."""
        return {each.key: each.shape(shape) for each in self.card.form(len(shape)).tensors if not each.is_moment}

    def cuts(self, shape: torch.Size, load: Callable[..., list[torch.Tensor]]) -> list[Cut]:
        """The blocks of a tensor: rows where it has factored state. ``load(start, stop, shape, names)`` reads one."""
        if self.factored(tuple(shape)):
            return row_blocks(tuple(shape), load)
        return flat_blocks(shape.numel(), load, self.tile)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; the codecs of the group are checked and kept as their stored configuration."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            if self.fused:
                for index, group, param in self.numbered():
                    if group is self.param_groups[-1]:
                        self._fused.takes(index, param)
        except UsageError:
            self.param_groups.pop()
            raise

    def codec(self, group: dict[str, Any], key: str, param: torch.Tensor, exact: Collection[str] = ()) -> Codec:
        """The codec of ``master``, ``moment1`` or ``moment2`` for a parameter; small tensors stay exact.

        With ``residual`` in ``exact``, so does the master.
        """
        if is_small(tuple(param.shape)) or (key == "master" and "residual" in exact):
            return Split32() if key == "master" else Lossless()
        return codec_from_config(group[key])

    def state_layout(self, group: dict[str, Any], param: torch.Tensor, exact: Collection[str] = ()) -> Layout:
        """Element types and shapes of the whole state of a parameter.

        ``exact`` names the moments that stay in fp32, and ``residual`` where it has 16 bits, whatever the group says.
        """
        shape = tuple(param.shape)
        layout: Layout = {"step": (torch.int64, ())}
        part = master_part(param.dtype, self.codec(group, "master", param, exact))
        if part is not None:
            layout[part[0]] = (part[1], shape)
        for name, kind in self.moments(group, shape).items():
            codec = Lossless() if name in exact else self.codec(group, kind, param)
            layout |= moment_layout(name, codec, shape, param.numel())
        return layout | {name: (torch.float32, size) for name, size in self.factored(shape).items()}

    def initial_state(
        self, group: dict[str, Any], param: torch.Tensor, exact: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """The state before the first step, new tensors: see ``state_layout``."""
        # Kernels read the step counter beside the parameter, the host reads it in its own memory.
        on_device = self.fused is not False and param.device.type == "cuda"
        state = {
            name: torch.zeros(shape, dtype=dtype, device="cpu" if name == "step" and not on_device else param.device)
            for name, (dtype, shape) in self.state_layout(group, param, exact).items()
        }
        if "master" in state:
            state["master"].copy_(param)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. With a ``GradScaler``, gradients are unscaled here, and the step is skipped on overflow."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(i, group, p) for i, group, p in self.numbered() if p.grad is not None]
        for _, _, param in work:
            _check_gradient(param)
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        fused = [item for item in work if self._fused.takes(item[0], item[2])]
        self._fused.update(fused, scale, found_inf)
        taken = {index for index, _, _ in fused}
        rest = [item for item in work if item[0] not in taken]
        if not rest or (found_inf is not None and float(found_inf) != 0):
            return loss
        for index, group, param in rest:
            self._update(index, group, param, 1.0 if scale is None else 1.0 / float(scale))
        return loss

    @cached_property
    def _fused(self) -> Fused:
        """The fused steps, planned for the present state."""
        return Fused(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch; forgets what was planned for the old state."""
        self.__dict__.pop("_fused", None)
        super().__setstate__(state)

    def numbered(self) -> list[tuple[int, dict[str, Any], torch.Tensor]]:
        """Every parameter with its group and its index over all groups, which is that of its random bits."""
        found = [(group, param) for group in self.param_groups for param in group["params"]]
        return [(index, group, param) for index, (group, param) in enumerate(found)]

    @torch.no_grad()
    def update(self, index: int, group: dict[str, Any], param: torch.Tensor) -> None:
        """Update one parameter from its gradient."""
        _check_gradient(param)
        if self._fused.takes(index, param):
            self._fused.update([(index, group, param)], None, None, alone=True)
        else:
            self._update(index, group, param, 1.0)

    def _update(self, index: int, group: dict[str, Any], param: torch.Tensor, grad_factor: float) -> None:
        if not self.state[param]:
            self.state[param] = self.initial_state(group, param)
        state = self.state[param]
        if not param.numel():
            return
        state["step"] += 1
        step = int(state["step"])
        weights = param.detach().reshape(-1)
        tensor = self._packed(group, param, weights, stream_key(group["seed"], index, step), grad_factor)
        cuts = self.cuts(param.shape, tensor.load)
        whole = {name: state[name] for name in self.factored(tuple(param.shape))}
        arguments = {name: group[name] for name in self.rule_arguments} | {"lr": float(group["lr"])}
        rule = resolve(self.card.form(param.dim()).rule)
        results = rule([block for _, _, block in cuts], whole, step=step, **self.card.fixed, **arguments)
        for start, stop, _ in cuts:
            tensor.store(start, stop, next(results))
        for values in results:
            for name, value in values.items():
                state[name].copy_(value)
        if not param.is_contiguous():
            param.copy_(weights.view(param.shape))

    def _packed(
        self, group: dict[str, Any], param: torch.Tensor, weights: torch.Tensor, key: int, grad_factor: float
    ) -> PackedTensor:
        state = self.state[param]
        codec = self.codec(group, "master", param, exact_residual(state))
        part = master_part(param.dtype, codec)
        kinds = self.moments(group, tuple(param.shape)).items()
        moments = {name: Moment.of(name, self.codec(group, kind, param), state) for name, kind in kinds}
        factor = -grad_factor if group["maximize"] else grad_factor
        assert param.grad is not None  # noqa: S101
        master = None if part is None else state[part[0]].view(-1)
        return PackedTensor(weights, param.grad.reshape(-1), master, codec, moments, key, factor)

    def release_gradients(self) -> GradientRelease:
        """Update each parameter during the backward pass, as soon as its gradient is there, and free the gradient.

        Calls of ``step`` then find nothing to do. Undone by ``remove()`` of the result. Every backward pass is a
        step, so it goes with neither gradient accumulation, nor clipping by global norm, nor a ``GradScaler``.
        """
        return GradientRelease(self)

    def state_dict(self) -> dict[str, Any]:
        """As torch, packed. Groups of 16-bit parameters hold ``weight_checks`` as well: see ``weight_check``."""
        saved = super().state_dict()
        for live, group in zip(self.param_groups, saved["param_groups"], strict=True):
            states = [self.state.get(param, {}) for param in live["params"]]
            if any({"residual", "master"} & state.keys() for state in states):
                pairs = zip(live["params"], states, strict=True)
                group[CHECKS] = [
                    weight_check(param) if {"residual", "master"} & state.keys() else None for param, state in pairs
                ]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of the same class gave, copied, with every element type kept.

        Raises UsageError, with nothing changed, where groups, keys, shapes or element types do not match.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups, state = matched_state(self, state_dict)
        self.__setstate__({"state": state, "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check_gradient(param: torch.Tensor) -> None:
    grad = param.grad
    if grad is None or grad.is_sparse or grad.layout != torch.strided:
        raise UsageError("sparse gradients are not supported; build the embedding with sparse=False")
