"""What type checkers read in a package is what Python finds there."""

from __future__ import annotations

import ast
import inspect
import runpy
import sys
from importlib import import_module

import pytest

import ckpt8
import ckpt8.nn
import ckpt8.optim


@pytest.mark.parametrize("package", [ckpt8, ckpt8.nn, ckpt8.optim], ids=lambda package: package.__name__)
def test_the_imports_for_type_checkers_name_the_objects_that_are_found(package):
    tree = ast.parse(inspect.getsource(package))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {}
    for statement in block.body:
        for alias in statement.names:
            home = import_module(statement.module)
            submodule = f"{statement.module}.{alias.name}"
            seen[alias.asname or alias.name] = getattr(home, alias.name, None) or import_module(submodule)
    assert seen.keys() == set(package.__all__) - {"__version__", "OPTIMIZERS"}
    for name, thing in seen.items():
        assert getattr(package, name) is thing, name


def test_windows_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="Windows"):
        runpy.run_path(ckpt8.__file__)
