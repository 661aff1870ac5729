"""One call that torch's ``weights_only`` unpickler would make, and the checks that rules share."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

from ckpt8.checkpoint.tree import StatefulDict, TensorRef

_PROPERTIES = frozenset({"data", "real", "imag", "grad", "names", "__class__", "__dict__"})
"""Attributes of a tensor that do something when they are set."""


class Budget(Protocol):
    """The limits of a pickle machine. Both methods raise ValueError where one is exceeded."""

    def count(self, units: int = 1) -> None:
        """Count objects that are about to be made."""

    def spend(self, size: int) -> None:
        """Count parts that are about to be copied."""


class Calls(Protocol):
    """The judge of all calls of one file: see ``torch_calls``."""

    def call(self, function: Any, args: tuple[Any, ...], made: Any, budget: Budget) -> None:
        """Judge a call. Raises ValueError."""

    def spend_data(self, nbytes: int) -> None:
        """Count bytes of tensors that are computed or copied. Raises ValueError when they are too many."""

    def is_tensor(self, value: Any) -> bool:
        """Whether torch has a tensor for ``value``."""

    def is_trusted(self, value: Any) -> bool:
        """Whether ``value`` is a class that the user allowed."""


class Call:
    """One call, for a rule to judge. The methods are checks: they raise ValueError."""

    __slots__ = ("args", "budget", "calls", "made", "name")

    def __init__(self, calls: Calls, name: str, args: tuple[Any, ...], made: Any, budget: Budget) -> None:
        self.calls = calls
        self.name = name
        self.args = args
        self.made: Any = made
        self.budget = budget

    def require(self, holds: object) -> None:
        """Raise ValueError unless ``holds`` is true."""
        if not holds:
            raise ValueError(f"the arguments of {self.name} are not those that torch.save writes")

    def is_made(self, kind: type) -> None:
        """Require that the inert machine made a ``kind`` of the call."""
        self.require(type(self.made) is kind)

    def dense(self, value: Any, itemsize: int | None = None) -> None:
        """Require a tensor that repeats no element, and count its bytes, with elements of ``itemsize`` bytes."""
        self.require(type(value) is TensorRef)
        span = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True))
        numel = prod(value.shape)
        self.require(numel <= max(span, 0))
        self.calls.spend_data(numel * (itemsize or value.dtype.itemsize))

    def state(self, state: Any) -> None:
        """Require attributes of a tensor: ``__dict__``, or that and the values of slots."""
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            self.require(part is None or type(part) in (dict, StatefulDict))
            self.require(not part or not any(name in _PROPERTIES for name in part))
            self.budget.spend(len(part or ()))
