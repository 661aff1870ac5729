"""What public names have in common: their arguments are checked, and they are imported when they are first used.

A value of another type is a UsageError, before anything is done. Importing a package does not import torch.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import chain
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, TypeVar, cast

from ckpt8.core.errors import UsageError, WrongTypeError
from ckpt8.core.text import shortened

F = TypeVar("F", bound=Callable[..., Any])

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD

_MOST_THREADS, _MOST_STEPS = 1 << 10, 1 << 20


def checked(function: F) -> F:
    """``function`` that first compares its arguments with their annotations, as far as ``_KINDS`` has them.

    Raises TypeError in a module without ``from __future__ import annotations``: its annotations are not text.
    """
    signature = inspect.signature(function)
    if not all(isinstance(p.annotation, str) for p in signature.parameters.values() if p.annotation is not p.empty):
        raise TypeError(f"{function.__module__} needs 'from __future__ import annotations'")
    known = {
        name: _KINDS[text]
        for name, parameter in signature.parameters.items()
        if (text := parameter.annotation) in _KINDS
    }
    places = [name for name, parameter in signature.parameters.items() if parameter.kind in _POSITIONAL]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in chain(zip(places, args, strict=False), kwargs.items()):
            if name in known:
                accepts, wanted = known[name]
                if not accepts(value):
                    raise WrongTypeError(f"{called}: {name} is {described(value)}; give {wanted}")
        return function(*args, **kwargs)

    return cast("F", call)


def described(value: object) -> str:
    """What a value is, in a few words: ``None``, ``a dict``, ``the class Linear``, ``-1``."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print very long ones
        return "a number of more than 300 digits"
    if value is None or isinstance(value, (bool, int, float, str)):
        return shortened(repr(value[:80] if isinstance(value, str) else value), 100)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, os.PathLike):
        return f"the path {str(value)[:80]}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def is_path(value: object) -> bool:
    """Whether a value can name a file."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    text = str(value) if isinstance(value, PurePath) else os.fspath(value)
    try:
        return isinstance(text, str) and text != "" and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_file(value: object) -> bool:
    """Whether a value is a file object to read from or write to."""
    return not isinstance(value, type) and any(callable(getattr(value, name, None)) for name in ("read", "write"))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, (bool, Integral)) and value in (0, 1)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= most


def _are_all(value: object, accepts: Callable[[object], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(accepts, value))


_are_texts = functools.partial(_are_all, accepts=_is_text)


def _is_module(value: object) -> bool:
    """Whether this is a module of torch, which need not be imported to find that out."""
    return any(
        (base.__module__, base.__name__) == ("torch.nn.modules.module", "Module") for base in type(value).__mro__
    )


def _optional(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or accepts(value)


_KINDS: dict[Any, tuple[Callable[[object], bool], str]] = {
    "str | os.PathLike[str]": (is_path, "a path, as text or a pathlib.Path"),
    "str | os.PathLike[str] | None": (_optional(is_path), "a path, as text or a pathlib.Path"),
    "str | os.PathLike[str] | IO[bytes]": (
        lambda value: is_path(value) or is_file(value),
        "a path, as text or a pathlib.Path, or a binary file",
    ),
    "Sequence[str | os.PathLike[str]]": (functools.partial(_are_all, accepts=is_path), "a list of paths"),
    "str": (_is_text, "a text"),
    "str | None": (_optional(_is_text), "a text"),
    "Sequence[str]": (_are_texts, "a list of texts"),
    "str | Sequence[str]": (lambda value: _is_text(value) or _are_texts(value), "a text, or a list of texts"),
    "Sequence[str] | None": (_optional(_are_texts), "a list of texts"),
    "bool": (_is_flag, "True or False"),
    "int": (functools.partial(_is_count, most=_MOST_STEPS), f"a whole number from 0 to {_MOST_STEPS}"),
    "int | None": (
        _optional(functools.partial(_is_count, most=_MOST_THREADS)),
        f"a whole number from 0 to {_MOST_THREADS}, or None",
    ),
    "float | None": (_optional(_is_number), "a number, or None"),
    "nn.Module": (_is_module, "a torch.nn.Module"),
    "Progress": (lambda value: callable(value) and not isinstance(value, type), "a function of the number of bytes"),
}
"""What the annotations of public functions accept, and the words for it."""


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


_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**k for k, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**k for k, prefix in enumerate("kmgt", 1)},
}


def parse_size(text: str, option: str) -> int:
    """Bytes of ``1.5GB``, ``250 MB``, ``8GiB`` or ``2.5e8``. Raises UsageError that names the option."""
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    count = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    if not 1 <= count < 1 << 62:
        raise UsageError(f"{option} {text}: expected a number of bytes, as in 1.5GB or 2.5e8")
    return int(count)
