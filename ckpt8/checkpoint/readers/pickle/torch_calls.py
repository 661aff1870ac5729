"""Judges the calls that torch's ``weights_only`` unpickler would make, by their arguments, before torch sees the file.

torch allows some names and calls them with whatever arguments a pickle has. Each name has a rule in ``torch_rules``.
Calls that pass take memory and time in proportion to the bytes of the file. Calls of classes that the user allowed
pass unjudged. This module calls nothing and does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckpt8.checkpoint.readers.pickle.pickle_stack import StackMachine
from ckpt8.checkpoint.readers.pickle.rebuild import MAX_DIMS
from ckpt8.checkpoint.readers.pickle.torch_rules import COUNTER, RULES, TENSOR_MAKERS, Call
from ckpt8.checkpoint.tree import Global, Inert, StatefulDict, StorageRef, TensorRef

DATA_FACTOR = 4
DATA_ALLOWANCE = 1 << 26
"""Bytes of tensors that are computed or copied may be this many times those of the file, and this many more."""

_META = "meta"


class TorchCalls:
    """The judge of one file of ``size`` bytes. It raises ValueError for a call that torch must not make.

    ``allowed`` are the names that torch allows, ``trusted`` those that the user added. ``foreign`` are the names in the
    file that are neither. torch refuses a file that has one, so the first one ends all judging.
    """

    def __init__(self, size: int, allowed: Collection[str], trusted: Collection[str]) -> None:
        self.foreign: dict[str, None] = {}
        self._allowed = allowed
        self._trusted = trusted
        self._room = DATA_FACTOR * size + DATA_ALLOWANCE
        self._tensors = TENSOR_MAKERS | frozenset(trusted)

    def name(self, name: str) -> None:
        """Note a class or function that the pickle refers to."""
        if name not in self._allowed and name not in self._trusted:
            self.foreign[name] = None

    def call(self, function: Any, args: tuple[Any, ...], made: Any, budget: StackMachine) -> None:
        """Judge a call. ``made`` is the value that the inert machine makes of it, or NOT_INTERPRETED."""
        if self.foreign:
            return
        if type(function) is not Global:
            raise ValueError("it calls something that is no function")
        rule = RULES.get(function.name)
        if rule is not None:
            rule(Call(self, function.name, args, made, budget))
        elif function.name not in self._trusted:
            asks = any(type(arg) is int or (type(arg) in (tuple, list) and arg) for arg in args[:MAX_DIMS])
            why = "it asks for memory of a stated size" if asks else "it calls what torch.save never calls"
            raise ValueError(f"{why} ({function.name})")

    def build(self, target: Any, state: Any, budget: StackMachine) -> None:
        """Judge a state for an object."""
        if self.foreign or (type(target) is Inert and target.name in self._trusted):
            return
        if type(target) is not StatefulDict and not (type(target) is Inert and target.name == COUNTER):
            kind = target.name if type(target) is Inert else type(target).__name__
            raise ValueError(f"a state is given to a {kind}")
        if type(state) not in (dict, StatefulDict):
            raise ValueError("the attributes of a dictionary are none")
        budget.spend(len(state))

    def fill(self, target: Inert) -> None:
        """Refuse items for an object: torch adds them to lists and dictionaries alone."""
        if not self.foreign:
            raise ValueError(f"items are added to a {target.name}")

    def storage(self, pid: Any, found: Any) -> None:
        """Judge a reference to a storage. torch makes one of the device ``meta`` anew for every reference."""
        if type(found) is StorageRef and pid[3] == _META:
            self.spend_data(found.numel * found.dtype.itemsize)

    def spend_data(self, nbytes: int) -> None:
        """Count bytes of tensors that are computed or copied. Raises ValueError when they are too many."""
        self._room -= nbytes
        if self._room < 0:
            raise ValueError("it has the same data copied over and over")

    def is_tensor(self, value: Any) -> bool:
        """Whether torch has a tensor for ``value``."""
        return type(value) is TensorRef or (type(value) is Inert and value.name in self._tensors)

    def is_trusted(self, value: Any) -> bool:
        """Whether ``value`` is a class that the user allowed."""
        return type(value) is Global and value.name in self._trusted
