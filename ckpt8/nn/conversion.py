"""``switchback`` and ``to_linear`` turn the linear layers of a model into 8-bit layers and back, in place.

Each module changes its class and stays the same object: parameters, hooks, names and references stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from ckpt8.core.arguments import checked
from ckpt8.core.errors import UsageError
from ckpt8.nn.linear import DTYPES, SwitchBackLinear, check_backend

HEADS = tuple(
    prefix + name
    for name in ("lm_head", "head", "classifier", "score", "embed_out", "output_projection")
    for prefix in ("", "*.")
)
"""Globs of the usual names of output layers. SwitchBack is meant for the layers inside the blocks."""


@checked
def switchback(model: nn.Module, skip: Sequence[str] | None = None, *, backend: str | None = None) -> list[str]:
    """Make every ``nn.Linear`` of ``model`` a ``SwitchBackLinear``, in place. Returns their paths.

    ``skip`` lists globs of module paths to leave alone, by default ``HEADS``; ``()`` skips none. Two kinds of layers
    never change: subclasses of ``nn.Linear``, which compute something else, and layers that share their weight with an
    ``nn.Embedding``. ``backend`` goes to ``SwitchBackLinear``. Raises UsageError, and changes nothing, where a glob
    matches no linear layer, the model has no linear layer, a weight is not fp32, bf16 or fp16, or the backend is
    unknown.

    >>> ckpt8.nn.switchback(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()))
    ['0']
    """
    check_backend(backend)
    layers = dict(_layers(model, nn.Linear))
    if not layers and not any(_layers(model, SwitchBackLinear)):
        raise UsageError("the model holds no nn.Linear; there is nothing that SwitchBackLinear could replace")
    for glob in skip or ():
        if not any(fnmatchcase(path, glob) for path in layers):
            raise UsageError(f"skip={glob!r} matches none of the model's linear layers: {', '.join(layers)}")
    globs = HEADS if skip is None else skip
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    chosen = {
        path: layer
        for path, layer in layers.items()
        if id(layer.weight) not in tied and not any(fnmatchcase(path, glob) for glob in globs)
    }
    for path, layer in chosen.items():
        if layer.weight.dtype not in DTYPES:
            raise UsageError(f"{path}: SwitchBackLinear takes no {layer.weight.dtype} weights; add it to skip")
    for layer in chosen.values():
        layer.__class__ = SwitchBackLinear
        if backend is not None:
            cast(SwitchBackLinear, layer).backend = backend
    return list(chosen)


@checked
def to_linear(model: nn.Module) -> list[str]:
    """Make every ``SwitchBackLinear`` of ``model`` an ``nn.Linear`` again, in place. Returns their paths.

    >>> layers = torch.nn.Sequential(ckpt8.nn.SwitchBackLinear(64, 64))
    >>> ckpt8.nn.to_linear(layers)
    ['0']
    """
    layers = dict(_layers(model, SwitchBackLinear))
    for layer in layers.values():
        layer.__class__ = nn.Linear
        layer.__dict__.pop("backend", None)
    return list(layers)


def _layers(model: nn.Module, kind: type[nn.Linear]) -> Iterator[tuple[str, nn.Linear]]:
    """The modules of exactly this class, each once, by path."""
    return ((path, module) for path, module in model.named_modules() if type(module) is kind)
