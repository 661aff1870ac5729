"""Names that are imported when they are first used: importing a package then does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def resolve(location: str) -> Any:
    """The object at ``module:name``, or the module at ``module``."""
    module, _, name = location.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def lazy_names(package: str, locate: Callable[[], Mapping[str, str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package. ``locate`` gives the location of each of its names: see ``resolve``."""

    def find(name: str) -> Any:
        locations = locate()
        if name not in locations:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return resolve(locations[name])

    return find
