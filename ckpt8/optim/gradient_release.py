"""Gradient release: the backward pass updates each parameter, so that only one gradient is in memory at a time.

With bf16 parameters, an 8-bit residual and 8-bit moments this is FlashOptim's mode of 5 bytes a parameter (arXiv
2602.23349): 2 + 1 + 1 + 1, and 1/8 for the scales.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ckpt8.optim.contract import PackedState


class GradientRelease(ExitStack):
    """The hooks on the parameters of one optimizer. A context manager, at whose end the hooks go."""

    def __init__(self, optimizer: PackedState) -> None:
        super().__init__()
        for index, group, param in optimizer.numbered():
            if param.requires_grad:
                hook = partial(_release, optimizer, index, group)
                self.callback(param.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks away: ``step`` has gradients again."""
        self.close()


def _release(optimizer: PackedState, index: int, group: dict[str, Any], param: torch.Tensor) -> None:
    optimizer.update(index, group, param)
    param.grad = None
