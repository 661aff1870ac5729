"""What every target checks of an outcome."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from ckpt8.core.errors import Ckpt8Error

MAX_MESSAGE = 2000
"""Characters of a message: one line that a person can read."""

REFUSED = "refused"


class BrokenError(Exception):
    """A promise that does not hold, other than by an exception."""


def check_refusal(error: Ckpt8Error) -> None:
    """Raise BrokenError unless the message is one line of bounded length."""
    text = str(error)
    if not text or "\n" in text or len(text) > MAX_MESSAGE:
        raise BrokenError(f"the message of {type(error).__name__} is {len(text)} characters long: {text[:200]!r}")


def refused(action: Callable[[], object]) -> bool:
    """Whether an action raised one of ckpt8's errors. Any other exception goes on."""
    return attempt(action, Ckpt8Error) is REFUSED


def attempt(action: Callable[[], Any], *allowed: type[Ckpt8Error]) -> Any:
    """The result, or REFUSED for an error of the ``allowed`` classes. Any other exception goes on."""
    try:
        return action()
    except Ckpt8Error as exc:
        check_refusal(exc)
        if not isinstance(exc, allowed):
            raise BrokenError(f"{type(exc).__name__} is no error of this command: {exc}") from exc
        return REFUSED


def silent() -> Console:
    """A console that shows nothing to anybody."""
    return Console(file=io.StringIO(), width=120, force_terminal=True)


def digest(value: Any, above: tuple[int, ...] = ()) -> Any:
    """What tells two loaded objects apart: types and plain values, and for tensors their layout and their bytes."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.numel() > 1 << 20 or value.is_meta or "q" in str(value.dtype):
            return str(
                (value.layout, value.dtype, value.shape, value.stride() if value.layout is torch.strided else "")
            )
        flat = torch.empty(value.numel(), dtype=value.dtype).view(value.shape).copy_(value.detach()).reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()
    if id(value) in above:
        return "itself"
    inside = (*above, id(value))
    if isinstance(value, dict):
        return type(value).__name__, [(digest(key), digest(each, inside)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [digest(each, inside) for each in value]
    if isinstance(value, torch.nn.Module):
        return digest(value.state_dict())
    return f"{type(value).__name__} {value!r}" if isinstance(value, (str, bytes, int, float)) else type(value).__name__
