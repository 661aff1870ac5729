"""Every optimizer class of the installed packages: how it is made, how it steps, and what its state may hold."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

WIDTH = 64
"""One matrix of 4096 elements, the smallest that packages keep in 8 bits."""

SETTINGS: dict[str, dict[str, Any]] = {
    **{
        name: {"momentum": 0.9}
        for name in ("LARS", "LARS32bit", "LARS8bit", "PytorchLARS", "SGD", "SGD32bit", "SGD8bit")
    },
    "CAME": {"lr": 1e-3},
    "Ranger21": {"num_iterations": 10},
    "BSAM": {"num_data": 8},
}
"""What classes need that cannot be made, or have no state, without it."""

GRAPH = frozenset({"AdaHessian", "SophiaH"})
"""Classes that differentiate the gradients."""

MUON = frozenset({"AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"})
"""Classes of pytorch_optimizer that are told which parameters they step, and leave the rest to Adam."""

NO_TRITON = frozenset({"optimi"})
"""Packages whose kernels need a GPU unless they are switched off."""

WRAPPERS = frozenset({"Lookahead", "Magma", "OrthoGrad", "ScheduleFreeWrapper", "TRAC"})
"""Classes around another optimizer."""


def network(seed: int = 0, *, matrices: bool = False) -> nn.Sequential:
    """A large matrix, a small one, and vectors unless there are to be ``matrices`` alone."""
    torch.manual_seed(seed)
    bias = not matrices
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh(), nn.Linear(WIDTH, 4, bias=bias))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and log lines of the packages; torch.compile, which takes minutes, gives the function itself."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), mock.patch("torch.compile", lambda function=None, **_: function or (lambda f: f)):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def classes(package: str) -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer class that a package offers, by name."""
    module = importlib.import_module(package)
    found: dict[str, type[torch.optim.Optimizer]] = {}
    for name in dir(module):
        kind = getattr(module, name, None)
        own = inspect.isclass(kind) and kind.__module__.partition(".")[0] == package.partition(".")[0]
        if own and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found.setdefault(kind.__name__, kind)
    return found


def build(kind: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of ``model``. Raises what the class raises."""
    settings = dict(SETTINGS.get(kind.__name__, {}))
    if kind.__module__.split(".")[0] in NO_TRITON:
        settings["triton"] = False
    parameters = inspect.signature(kind).parameters
    if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty:
        settings.setdefault("lr", 1e-3)
    settings = {key: value for key, value in settings.items() if key in parameters}
    if kind.__name__ in WRAPPERS:
        return kind(optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    if "model" in parameters and "params" not in parameters:
        return kind(model, **settings)
    if "base_optimizer" in parameters:
        return kind(model.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-3)
    if kind.__name__ in MUON and kind.__module__.startswith("pytorch_optimizer"):
        matrix, *others = sorted(model.parameters(), key=lambda each: -each.numel())
        return kind([{"params": [matrix], "use_muon": True}, {"params": others, "use_muon": False}], **settings)
    return kind(model.parameters(), **settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on a batch, and with random numbers, that are a function of ``seed`` alone."""
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(batch) - batch[:, :4]).square().mean()
        value.backward(create_graph=type(optimizer).__name__ in GRAPH)
        return value

    torch.manual_seed(seed)
    loss()
    if hasattr(optimizer, "train"):
        optimizer.train()
    try:
        optimizer.step()
    except Exception as exc:
        if "closure" not in str(exc):
            raise
        torch.manual_seed(seed)
        optimizer.step(loss)


def trained(kind: type[torch.optim.Optimizer], seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after some steps, of matrices alone where the class takes no others.

    Raises what the class raises where it cannot be made, or does not step, on a CPU.
    """
    failure: Exception | None = None
    for matrices in (False, True):
        try:
            model = network(seed, matrices=matrices)
            optimizer = build(kind, model)
            for number in range(max(steps, 1)):
                step(model, optimizer, number)
        except Exception as exc:
            failure = failure or exc
            continue
        if not steps:
            model = network(seed, matrices=matrices)
            optimizer = build(kind, model)
        return model, optimizer
    raise failure or AssertionError


def foreign(value: Any, seen: set[int] | None = None) -> set[str]:
    """Classes of ckpt8 found anywhere in ``value``."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return set()
    seen.add(id(value))
    found = {type(value).__qualname__} if type(value).__module__.split(".")[0] == "ckpt8" else set()
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = list(value)
    else:
        ours = [getattr(value, name) for name in getattr(value, "__slots__", ())] if found else []
        parts = [*ours, *vars(value).values()] if isinstance(value, torch.Tensor) else ours
    return found.union(*(foreign(part, seen) for part in parts))
