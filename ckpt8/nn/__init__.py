"""Layers that train in 8 bits: ``SwitchBackLinear``, and the functions that put it into an existing model.

    ckpt8.nn.switchback(model)                    # every nn.Linear but the head; before or after ckpt8.resume
    ckpt8.nn.to_linear(model)                     # and back

Parameters stay the same objects, so optimizers, state dicts and checkpoints do not notice.

Imports core and codecs only. Names are imported when they are first used, so that the package needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt8.nn.conversion import HEADS as HEADS
    from ckpt8.nn.conversion import switchback as switchback
    from ckpt8.nn.conversion import to_linear as to_linear
    from ckpt8.nn.linear import SwitchBackLinear as SwitchBackLinear

_NAMES = {
    "HEADS": "ckpt8.nn.conversion",
    "SwitchBackLinear": "ckpt8.nn.linear",
    "switchback": "ckpt8.nn.conversion",
    "to_linear": "ckpt8.nn.conversion",
}

__all__ = ["HEADS", "SwitchBackLinear", "switchback", "to_linear"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'ckpt8.nn' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
