"""``PackedState``: which tensors the state of a packed optimizer has, and which codecs hold them.

Per parameter: ``step`` (int64), ``residual`` or ``master`` (see ``packed_tensor``), and for each moment ``NAME_codes``
of the parameter's shape and ``NAME_scales`` (see ``packed_tensor``), or ``NAME`` in fp32 where the parameter is small.
Row and column averages are fp32. The parameter group holds the configuration of the codecs under ``master``,
``moment1`` and ``moment2``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch

from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split32 import Split32
from ckpt8.core.tensors import is_small
from ckpt8.optim.card import Card
from ckpt8.optim.known_optimizers import card_of
from ckpt8.optim.packed_tensor import Moment, StateLayout, exact_residual, master_part, moment_layout


class PackedState(torch.optim.Optimizer):
    """The part of ``PackedOptimizer`` that describes its state and takes no step."""

    rule_id: ClassVar[str]
    fused: bool | None = None

    @property
    def card(self) -> Card:
        """The optimizer's card."""
        return card_of(self.rule_id)

    @property
    def rule_arguments(self) -> tuple[str, ...]:
        """The settings of a group that the rule takes."""
        return tuple(self.card.settings)

    def moments(self, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, str]:
        """Names of the moments of a parameter of this shape, each with its kind: ``moment1`` or ``moment2``."""
        return {tensor.key: tensor.slot for tensor in self.card.form(len(shape)).present(group) if tensor.is_moment}

    def factored(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the row and column averages of a parameter of this shape."""
        return {
            tensor.key: tensor.shape(shape) for tensor in self.card.form(len(shape)).tensors if not tensor.is_moment
        }

    def codec(self, group: dict[str, Any], key: str, param: torch.Tensor, exact: Collection[str] = ()) -> Codec:
        """The codec of ``master``, ``moment1`` or ``moment2`` for a parameter; an exact one for a small tensor.

        The codec of the master is exact, too, if ``exact`` contains ``residual``.
        """
        if is_small(tuple(param.shape)) or (key == "master" and "residual" in exact):
            return Split32() if key == "master" else Lossless()
        return codec_from_config(group[key])

    def state_layout(self, group: dict[str, Any], param: torch.Tensor, exact: Collection[str] = ()) -> StateLayout:
        """Element types and shapes of the whole state of a parameter.

        ``exact`` names the moments that stay in fp32 whatever the group says, and ``residual`` if it has 16 bits.
        """
        shape = tuple(param.shape)
        layout: StateLayout = {"step": (torch.int64, ())}
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
        """New tensors, the state before the first step. ``exact``: see ``state_layout``."""
        # Kernels read the step counter on the device, the torch path in the memory of the host.
        on_device = self.fused is not False and param.device.type == "cuda"
        state = {
            name: torch.zeros(shape, dtype=dtype, device="cpu" if name == "step" and not on_device else param.device)
            for name, (dtype, shape) in self.state_layout(group, param, exact).items()
        }
        if "master" in state:
            state["master"].copy_(param.detach())
        return state

    def views(
        self, group: dict[str, Any], param: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[Codec, torch.Tensor | None, dict[str, Moment]]:
        """Flat views of a parameter's state: codec of the master weights, residual or fp32 master, moments by name."""
        codec = self.codec(group, "master", param, exact_residual(state))
        part = master_part(param.dtype, codec)
        kinds = self.moments(group, tuple(param.shape)).items()
        moments = {name: Moment.of(name, self.codec(group, kind, param), state) for name, kind in kinds}
        return codec, None if part is None else state[part[0]].view(-1), moments

    def numbered(self) -> list[tuple[int, dict[str, Any], torch.Tensor]]:
        """Every parameter with its index over all groups, which selects its random bits, and its group."""
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        return [(index, group, param) for index, (group, param) in enumerate(pairs)]
