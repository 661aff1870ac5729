"""What a user gives as a path becomes one by ``as_path``, which knows URLs, and not by ``Path``."""

from __future__ import annotations

import ast
from pathlib import Path

import ckpt8

PACKAGE = Path(ckpt8.__file__).parent

LOCAL = {
    "core/files/paths.py:as_path",
    "container/plain_reader.py:__init__",  # it stands alone
    "container/plain_reader.py:read",
    "converting/convert.py:convert",  # the config.json of a model
}
"""Functions that take local paths alone, and refuse URLs. So do the integrations of frameworks."""


def entries_without_as_path(path):
    """The functions in a module that turn an argument ``str | os.PathLike[str]`` into a Path themselves."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            given = {each.arg for each in arguments if each.annotation and "PathLike" in ast.unparse(each.annotation)}
            calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
            if any(
                ast.unparse(call.func) == "Path" and {ast.unparse(argument) for argument in call.args} & given
                for call in calls
            ):
                yield f"{path.relative_to(PACKAGE)}:{function.name}"


def test_entries_take_urls():
    found = {name for path in PACKAGE.rglob("*.py") for name in entries_without_as_path(path)}
    assert {name for name in found if not name.startswith("integrations/")} == LOCAL


def test_the_search_finds_such_a_function():
    assert [*entries_without_as_path(PACKAGE / "core" / "files" / "paths.py")] == ["core/files/paths.py:as_path"]
