"""SGD with momentum (Sutskever et al., ICML 2013), as torch computes it.

g = g + wd theta;     b = g at the first step, then mu b + (1 - dampening) g
theta -= lr (g + mu b  if nesterov  else b);     without momentum: theta -= lr g
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ckpt8.core.errors import UsageError
from ckpt8.optim.packed import PackedOptimizer, Params
from ckpt8.optim.packed_tensor import Block, Values


def sgd(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> Iterator[Values]:
    """One step, ``step`` counting from 1; yields ``param`` and, with momentum, ``momentum_buffer``."""
    for block in blocks:
        param, grad = block.load("param", "grad")
        if weight_decay:
            grad.add_(param * weight_decay)
        if not momentum:
            yield {"param": param.sub_(grad.mul_(lr))}
            continue
        if step == 1:
            buffer = grad.clone()
        else:
            (buffer,) = block.load("momentum_buffer")
            buffer.mul_(momentum).add_(grad * (1 - dampening))
        update = grad.add_(buffer * momentum) if nesterov else buffer
        yield {"param": param.sub_(update * lr), "momentum_buffer": buffer}


class SGD(PackedOptimizer):
    """SGD on packed state. Arguments and defaults are torch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "sgd"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **packing: Any,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise UsageError("SGD: nesterov needs momentum and no dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, **packing)
