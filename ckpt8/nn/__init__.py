"""Layers that train in 8 bits: ``SwitchBackLinear``, and what puts it into a model that is there.

    ckpt8.nn.switchback(model)                    # every nn.Linear but the head; before or after ckpt8.resume
    ckpt8.nn.to_linear(model)                     # and back

Parameters stay the objects that they are, so optimizers, state dicts and checkpoints do not notice.
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
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
