"""Nests values again as they were before torch flattened the names of a state dict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt8.core.errors import InputError
from ckpt8.core.text import shown

Path = tuple[str | int, ...]


class _Branch(dict[Any, Any]):
    """A dictionary of the growing tree. No value has this type."""


def nest(values: Iterable[tuple[str, Path, Any]], where: str) -> dict[Any, Any]:
    """The tree of values, given with their names and paths. Numbers are places in lists.

    Raises InputError, opened by ``where``, for a value in another one.
    """
    top = _Branch()
    branches: list[tuple[_Branch, str | int, _Branch]] = []
    for name, path, value in values:
        node = top
        *above, last = path
        for part in above:
            if part not in node:
                node[part] = _Branch()
                branches.append((node, part, node[part]))
            if type(node[part]) is not _Branch:
                raise InputError(f"{where}: {shown(name)} lies inside another value")
            node = node[part]
        if last in node:
            raise InputError(f"{where}: {shown(name)} lies where another value does")
        node[last] = value
    for node, part, branch in reversed(branches):  # from the inside out
        is_list = set(branch) == set(range(len(branch)))
        node[part] = [branch[k] for k in range(len(branch))] if is_list else dict(branch)
    return dict(top)
