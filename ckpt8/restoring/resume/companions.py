"""What a loop keeps beside model and optimizer: scheduler, gradient scaler, average of the weights, random states.

The extra states of a model's modules are here as well: they are undone with the rest.

A companion takes its entry by its own ``load_state_dict``. The path that was given chooses the entry; then a dictionary
with exactly the keys of the live ``state_dict()``: the one below a key that names the companion, or the only one. The
name alone decides where no dictionary has these keys. Of several that fit alike none is loaded.

Random states are known by their form (the Mersenne twister of Python, of numpy, and of torch on the CPU, the offsets of
a CUDA generator) and by their name: one without a name that says so, or that belongs to a sampler, stays in the rest.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from ckpt8.checkpoint.sources.objects import ValueBuilder
from ckpt8.checkpoint.tree import Components, TensorRef, format_path, iter_nodes
from ckpt8.checkpoint.vocabulary import is_average, words
from ckpt8.core.errors import ResumeError, UsageError, require
from ckpt8.core.grouping import grouped
from ckpt8.core.public import described
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed

_SHOWN = 10
_NAMES: dict[str, Callable[[str], bool]] = {
    "scheduler": lambda key: "scheduler" in key.lower() or "sched" in words(key),
    "scaler": lambda key: "scaler" in key.lower(),
    "ema": is_average,
}
"""By argument of ``resume``, whether a key names it."""


@dataclass(slots=True)
class Companion:
    """A ``live`` object that was given as the argument ``what`` of resume, and the path of its entry, if given.

    ``node`` is the entry of the tree and ``value`` what it takes, once they are chosen.
    """

    what: str
    live: Any
    at: str | None
    node: Any = None
    value: Any = None

    def choose(self, tree: object, values: ValueBuilder, taken: Sequence[object]) -> list[str]:
        """Choose the entry among those that models and optimizers have not ``taken``. Returns what does not fit.

        Raises UsageError for a path that leads to no entry.
        """
        keys = set(self.live.state_dict())
        found = self._candidates(tree, keys, set(map(id, taken)))
        if not found and not keys:  # a scaler that is off has no state
            return []
        if len(found) != 1:
            paths = listed((format_path(path) for path, _ in found), _SHOWN)
            which = f"may be any of {paths}" if found else "has no entry in the file"
            return [f"{self.what} {which}; choose with {self.what}_at="]
        path, node = found[0]
        where = f"{self.what} at {format_path(path)}"
        if problem := values.problem(where, node) or self._misplaced(where, node):
            return [problem]
        self.node, self.value = node, values.build(node)
        return []

    def _candidates(self, tree: object, keys: set[Any], taken: set[int]) -> list[tuple[Components, Any]]:
        entries = [(path, node) for path, node in iter_nodes(tree) if isinstance(node, dict) and id(node) not in taken]
        if self.at is not None:
            there = [(path, node) for path, node in entries if format_path(path) == self.at]
            require(there, f"resume: {self.what}_at={self.at!r} leads to no dictionary in the file", UsageError)
            return there
        is_named = _NAMES[self.what]
        alike = [(path, node) for path, node in entries if keys and node.keys() == keys]
        both = [(path, node) for path, node in alike if any(map(is_named, path))]
        named = [(path, node) for path, node in entries if path and is_named(path[-1])]
        return both if len(both) == 1 else alike or named

    def _misplaced(self, where: str, node: Mapping[Any, Any]) -> str | None:
        """Why a scheduler of torch must not take an entry, of which it makes an attribute for every key."""
        kind = type(self.live)
        if not isinstance(self.live, lr_scheduler.LRScheduler):
            return None
        others = [key for key in node if key not in self.live.state_dict()]
        wrong = [key for key in others if type(key) is not str or key == "optimizer" or callable(getattr(kind, key, 0))]
        return f"{where} is no state of a {kind.__name__}: it has {listed(map(described, wrong))}" if wrong else None

    def undo(self, state: dict[str, Any], attributes: Mapping[str, Any]) -> None:
        """Give back an old ``state`` and, as far as it does not have them, the old ``attributes``."""
        with suppress(Exception):  # the error that led here matters
            self.live.load_state_dict(state)
        if (now := getattr(self.live, "__dict__", None)) is not None:
            for key in now.keys() - attributes.keys():
                del now[key]
            now.update((key, value) for key, value in attributes.items() if key not in state)


def takes_state(value: object) -> bool:
    """Whether a value has the methods ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def given_companion(what: str, live: Any, at: str | None) -> Companion | None:
    """The companion of an argument, None where none was given. Raises UsageError for an object without a state."""
    if live is None:
        require(at is None, f"resume: {what}_at is given, and {what} is not", UsageError)
        return None
    require(
        takes_state(live) and not isinstance(live, type),
        f"resume: {what} is {described(live)}; give an object with state_dict and load_state_dict",
        UsageError,
    )
    return Companion(what, live, at)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """For a block in which an object takes its state. Raises ResumeError that begins with ``what`` where it fails."""
    try:
        yield
    except Exception as exc:
        reason = (str(exc).splitlines() or [""])[0]
        raise ResumeError(f"{what}: {reason}; nothing was changed") from exc


@contextmanager
def loaded(companions: Sequence[Companion], path: object) -> Iterator[None]:
    """Load the companions that have an entry; on an error there or in the block, give back their old states.

    Raises ResumeError where one refuses its entry.
    """
    with ExitStack() as undone:
        for one in companions:
            if one.node is None:
                continue
            undone.callback(one.undo, copy.deepcopy(one.live.state_dict()), dict(getattr(one.live, "__dict__", {})))
            with _refusing(f"{path}: {one.what} refuses its entry"):
                one.live.load_state_dict(one.value)
        yield
        undone.pop_all()


@contextmanager
def extra_states(label: str, model: nn.Module, states: Mapping[str, Any], path: object) -> Iterator[None]:
    """Give modules of a model their extra states, by name; on an error there or in the block, give back the old ones.

    The block fills the weights. A module may compute with them in ``set_extra_state``, which torch calls after it has
    loaded them, so each state is set again after the block. Raises ResumeError where a module refuses its state.
    """
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in states}
    with ExitStack() as undone:
        for name, module in modules.items():
            undone.callback(_give_back, module, copy.deepcopy(module.get_extra_state()))
            with _refusing(f"{path}: {label} refuses {name}"):
                module.set_extra_state(copy.deepcopy(states[name]))
        yield
        undone.pop_all()
    for name, module in modules.items():
        module.set_extra_state(states[name])


def _give_back(module: nn.Module, state: Any) -> None:
    with suppress(Exception):  # the error that led here matters
        module.set_extra_state(state)


_CUDA_STATE = 16
"""Bytes of the state of a CUDA generator: seed and offset."""

_IS_RANDOM = re.compile(r"rng|random|seed", re.IGNORECASE)
_IS_LIBRARY = {
    kind: re.compile(pattern)
    for kind, pattern in (
        ("python", "python|py"),
        ("numpy", "numpy|np"),
        ("torch", "(?:py)?torch|cpu"),
        ("cuda", "cuda"),
    )
}
"""By whose state it is, what a word of its path says."""

_IS_OF_DATA = re.compile(r"samplers?|(?:data)?loaders?|generators?|datasets?|workers?")
"""What a word says of a state that is no global one."""


def find_random_states(tree: object, values: ValueBuilder) -> tuple[dict[str, Any], list[Any], list[str]]:
    """The states of random numbers in ``tree``, by whose they are, and their entries.

    Last comes what is not clear, in words: two states of one kind, or none at all.
    """
    found = [(kind, *at) for at in iter_nodes(tree) if (kind := _kind(*at)) is not None]
    named = grouped((kind, (path, node)) for kind, path, node in found if _is_global(kind, path))
    chosen: dict[str, Any] = {}
    nodes: list[Any] = []
    problems = []
    if not named:
        others = listed((format_path(path) for _, path, _ in found), _SHOWN)
        more = f" under a name such as rng or torch_rng, only {others}" if found else ""
        problems.append(f"rng: the file holds no state of random numbers{more}")
    for kind, states in named.items():
        likely = [state for state in states if any(map(_IS_RANDOM.search, state[0]))] or states
        if kind != "cuda" and len(likely) > 1:
            paths = listed((format_path(path) for path, _ in likely), _SHOWN)
            problems.append(f"rng: the file holds {len(likely)} states of {kind}'s random numbers ({paths})")
            continue
        made = [values.build(node) for _, node in likely]
        if not all(map(_VALID[kind], made)):
            problems.append(f"rng: the state of {kind}'s random numbers is not valid")
            continue
        nodes += [node for _, node in likely]
        chosen[kind] = made if kind == "cuda" else made[0]
    return chosen, nodes, problems


def _is_global(kind: str, path: Components) -> bool:
    """Whether the name of a state says that it is Python's, numpy's, torch's or CUDA's, and not a sampler's."""
    parts = [word for component in path for word in words(component)]
    is_named = any(_IS_RANDOM.search(word) or _IS_LIBRARY[kind].fullmatch(word) for word in parts)
    return is_named and not any(map(_IS_OF_DATA.fullmatch, parts))


def check_random_states(states: Mapping[str, Any], path: object) -> None:
    """Raise ResumeError for a state that a generator does not take. All generators stay as they are."""
    before = _current()
    try:
        set_random_states(states)
    except Exception as exc:
        raise ResumeError(f"{path}: a state of random numbers is not valid: {exc}; nothing was changed") from exc
    finally:
        set_random_states(before)


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators of Python, numpy, torch, and of the CUDA devices that are here, as far as ``states`` go."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])


def _current() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _kind(path: Components, node: Any) -> str | None:
    """Whose random state a node is: ``python``, ``numpy``, ``torch`` or ``cuda``; None for anything else."""
    if isinstance(node, TensorRef):
        if node.dtype is not DType.UINT8 or len(node.shape) != 1:
            return None
        if node.numel == torch.get_rng_state().numel():
            return "torch"
        return "cuda" if node.numel == _CUDA_STATE and any("cuda" in part.lower() for part in path) else None
    if isinstance(node, tuple) and len(node) == 3 and node[0] == 3 and isinstance(node[1], tuple):
        return "python" if len(node[1]) == 625 and all(type(word) is int for word in node[1]) else None
    is_tuple = isinstance(node, (tuple, list)) and len(node) == 5 and node[0] == "MT19937"
    # A generator of its own has no ``has_gauss``.
    is_dict = isinstance(node, Mapping) and node.get("bit_generator") == "MT19937" and "has_gauss" in node
    return "numpy" if is_tuple or is_dict else None


_WORDS = 624
"""Numbers of 32 bits in the state of a Mersenne twister."""


def _is_python_valid(state: Any) -> bool:
    return any(state[1][:-1]) and (state[2] is None or type(state[2]) is float)


def _is_numpy_valid(state: Any) -> bool:
    """Whether the position is in the state: numpy reads at any that it is given, in memory or not."""
    inner = state.get("state") if isinstance(state, Mapping) else {"key": state[1], "pos": state[2]}
    if not (isinstance(inner, Mapping) and {"key", "pos"} <= inner.keys()):
        return False
    with suppress(TypeError, ValueError):  # a key that is no row of numbers
        return any(inner["key"]) and isinstance(inner["pos"], Integral) and 0 <= int(inner["pos"]) <= _WORDS
    return False


def _is_torch_valid(state: torch.Tensor) -> bool:
    """Whether what is left, counted from the next number, is in the state: torch bounds each of the two alone."""
    raw = state.contiguous().numpy().tobytes()
    left, upcoming = int.from_bytes(raw[8:12], sys.byteorder), int.from_bytes(raw[16:24], sys.byteorder)
    return left + upcoming <= _WORDS + 1 and any(raw[24 : 24 + 8 * _WORDS])


_VALID: dict[str, Callable[[Any], bool]] = {
    "python": _is_python_valid,
    "numpy": _is_numpy_valid,
    "torch": _is_torch_valid,
    "cuda": lambda _: True,
}
"""By whose it is, whether a state leads to no place outside of it, and is not all zero: then numpy draws normal numbers
for ever. What else is wrong its generator finds."""
