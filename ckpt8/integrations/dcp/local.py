"""What a rank has of a value of a distributed state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_tensors(value: Any) -> list[torch.Tensor]:
    """The plain tensors in which this rank has its part of a tensor, a DTensor or a ShardedTensor; else none."""
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    local = value._local_tensor if isinstance(value, DTensor) else value
    return [local] if type(local) in (torch.Tensor, torch.nn.Parameter) else []
