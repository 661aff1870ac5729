"""What loading, gradient release and the fused kernels need to know of a packed optimizer."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any, ClassVar, Protocol

import torch

from ckpt8.codecs import Codec

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Element type and shape of the tensors of a state, by key."""


class PackedState(Protocol):
    """A ``torch.optim.Optimizer`` whose state is parts of codecs: see ``packed``."""

    rule_id: ClassVar[str]
    fused: bool | None
    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """State by parameter."""

    def numbered(self) -> list[tuple[int, dict[str, Any], torch.Tensor]]:
        """Every parameter with its index over all groups and its group."""

    def moments(self, group: dict[str, Any], shape: tuple[int, ...]) -> dict[str, str]:
        """Names of the moments of a parameter of this shape, each with its kind: ``moment1`` or ``moment2``."""

    def factored(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of fp32 state that belongs to the whole tensor."""

    def codec(self, group: dict[str, Any], key: str, param: torch.Tensor, exact: Collection[str] = ()) -> Codec:
        """The codec of ``master``, ``moment1`` or ``moment2`` for a parameter."""

    def state_layout(self, group: dict[str, Any], param: torch.Tensor, exact: Collection[str] = ()) -> Layout:
        """Element types and shapes of the whole state of a parameter."""

    def initial_state(
        self, group: dict[str, Any], param: torch.Tensor, exact: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """The state before the first step, new tensors."""

    def update(self, index: int, group: dict[str, Any], param: torch.Tensor) -> None:
        """Update one parameter from its gradient."""
