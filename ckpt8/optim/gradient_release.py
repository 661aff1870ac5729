"""Gradient release: parameters are updated during the backward pass, and no two gradients need live at once.

With bf16 parameters, an 8-bit residual and 8-bit moments this is FlashOptim's mode of 5 bytes a parameter (arXiv
2602.23349): 2 + 1 + 1 + 1, and 1/8 for the scales.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ckpt8.optim.contract import PackedState


class GradientRelease:
    """The hooks on the parameters of one optimizer. A context manager; ``remove`` takes the hooks away."""

    def __init__(self, optimizer: PackedState) -> None:
        self._optimizer = optimizer
        self._handles = [
            param.register_post_accumulate_grad_hook(partial(self._release, index, group))  # type: ignore[no-untyped-call]
            for index, group, param in optimizer.numbered()
            if param.requires_grad
        ]

    def _release(self, index: int, group: dict[str, Any], param: torch.Tensor) -> None:
        self._optimizer.update(index, group, param)
        param.grad = None

    def remove(self) -> None:
        """Give gradients back to ``step``."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
