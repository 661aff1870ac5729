"""Layers that train in 8 bits: ``SwitchBackLinear``, and the functions that put it into an existing model.

    ckpt8.nn.switchback(model)                    # every nn.Linear but the head; before or after ckpt8.resume
    ckpt8.nn.to_linear(model)                     # and back

Parameters stay the same objects: optimizers, state dicts and checkpoints work as before.

Imports core and codecs only. A name is imported when it is first used, so that the package needs no torch.
"""

from typing import TYPE_CHECKING

from ckpt8.core.public import lazy_names

if TYPE_CHECKING:
    from ckpt8.nn.linear import HEADS, SwitchBackLinear, switchback, to_linear

__all__ = ["HEADS", "SwitchBackLinear", "switchback", "to_linear"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, lambda: {name: f"ckpt8.nn.linear:{name}" for name in __all__})


def __dir__() -> list[str]:
    return sorted(__all__)
