"""Public functions with arguments of every wrong type: one line of UsageError or InputError, and nothing is written."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import ckpt8
from ckpt8.core.errors import Ckpt8Error, UsageError
from ckpt8.core.public import checked

FUNCTIONS = ("compress", "convert", "diff", "load", "open", "restore", "resume", "save", "verify")

WRONG = {
    "None": None, "true": True, "zero": 0, "negative": -1, "float": 3.5, "nan": float("nan"), "huge": 10**400,
    "longer": 10**5000,
    "empty text": "", "text": "x", "nul": "nope\0", "surrogate": "\ud800", "bytes": b"a.pt", "list": [], "numbers": [1],
    "dict": {}, "set": set(), "object": object(), "tensor": torch.ones(2), "class": int, "function": len,
    "dtype": torch.float32, "device": torch.device("cpu"), "range": range(3), "array": np.array([1, 2]),
    "scalar": np.float64(1), "exception": ValueError("x"), "module": torch.nn.Identity(), "one star": "*",
}  # fmt: skip

NEVER_RIGHT = ("object", "tensor", "dtype", "array", "exception", "set", "module")
"""Values that no argument takes but for objects, models, and what torch takes for ``map_location``."""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments with which every function works."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(3)}}, "a.pt")
    ckpt8.compress("a.pt", threads=1)
    # Of another run: one that is under way goes on without the file of ``frozen_from``.
    torch.save({"model": {"v": torch.ones(4)}}, "b.pt")
    return {
        "compress": {"source": "b.pt", "target": "o.ckpt8"},
        "convert": {"source": "a.pt", "target": "o.safetensors"},
        "diff": {"a": "a.pt", "b": "a.ckpt8"},
        "load": {"path": "a.ckpt8"},
        "open": {"path": "a.ckpt8"},
        "restore": {"source": "a.ckpt8", "target": "o.pt"},
        "resume": {"path": "a.ckpt8"},
        "save": {"obj": {"w": torch.ones(3)}, "target": "o.ckpt8"},
        "verify": {"source": "a.ckpt8", "original": "a.pt"},
    }


def outcome(function, arguments):
    """The result of a call, or its expected error."""
    try:
        found = function(**arguments)
        return found.result() if hasattr(found, "result") else found
    except Ckpt8Error as error:
        return error


@pytest.mark.by_default(most=12)
@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_type_is_one_line(name, value, arguments, tmp_path):
    function = getattr(ckpt8, name)
    before = {path.name for path in tmp_path.iterdir()}
    for parameter in inspect.signature(function).parameters.keys() - {"obj"}:
        if parameter == "progress" and callable(WRONG[value]):
            continue
        threads = {} if name == "open" else {"threads": 1}
        found = outcome(function, arguments[name] | threads | {parameter: WRONG[value]})
        if isinstance(found, Ckpt8Error):
            assert "\n" not in str(found)
            assert {path.name for path in tmp_path.iterdir()} == before
        else:
            takes_modules = parameter in (
                "model",
                "scheduler",
                "scaler",
                "ema",
            )  # whatever has a state dict, here empty
            allowed = (takes_modules and value == "module") or parameter == "map_location"
            assert allowed or value not in NEVER_RIGHT, f"{name}({parameter}={value}) returned {found}"
        for path in tmp_path.iterdir():
            if path.name not in before:
                path.unlink()


def test_what_was_found_and_what_to_give(arguments):
    for name, given in arguments.items():
        with pytest.raises(UsageError, match=rf"^{name}: \w+ is an object; give a path"):
            getattr(ckpt8, name)(**given | {next(key for key in given if key != "obj"): object()})
    for value in ("object", "tensor", "class", "list", "float"):
        with ckpt8.open("a.ckpt8") as file:
            for method in (file.get_tensor, file.stats):
                with pytest.raises(UsageError, match="name is "):
                    method(WRONG[value])
        for function in (ckpt8.nn.switchback, ckpt8.nn.to_linear):
            with pytest.raises(UsageError, match=r"model is .*; give a torch.nn.Module"):
                function(WRONG[value])


def test_annotations_that_are_no_text_would_check_nothing():
    def function(path):
        return path

    function.__annotations__["path"] = str
    with pytest.raises(TypeError, match="from __future__ import annotations"):
        checked(function)


@pytest.mark.parametrize("obj", [(x for x in ()), lambda: 0, {"f": lambda: 0}], ids=["generator", "function", "inside"])
@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_pickled(obj, background, tmp_path):
    with pytest.raises(UsageError, match=r"cannot be pickled: .*; save its state"):
        ckpt8.save(obj, tmp_path / "x.ckpt8", background=background)
    assert not list(tmp_path.iterdir())
