"""What a live tensor takes from a checkpoint: the values of one saved tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import TensorRef


@dataclass(frozen=True, slots=True)
class Copy:
    """One saved tensor and the live one of its shape that takes its values, rounded where it has fewer bits."""

    name: str
    ref: TensorRef
    target: torch.Tensor

    def fill(self, streamer: Streamer) -> None:
        """Copy."""
        streamer.copy(self.ref, self.target.detach())
