"""What the command runs first: the few that must start fast without the parser, all others through ``ckpt8.cli.app``.

Importing typer, and pydantic with which it converts arguments, takes longer than showing a ``.ckpt8``. So two plain
calls are recognised here and go straight to their work: ``--version``, and ``inspect PATH.ckpt8``, perhaps with flags.
Everything else, mistakes included, is the parser's; what both can do, both do alike.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ckpt8.cli.guard import guarded

_FLAGS = {"--tensors": "tensors", "--json": "as_json"}
"""Options of ``inspect`` that are known here, and what ``_inspect`` calls them."""


def launch() -> None:
    """Run the command that ``sys.argv`` asks for. Leaves through ``SystemExit`` where that is not exit code 0."""
    arguments = sys.argv[1:]
    command = None
    if arguments == ["--version"]:
        command = _version
    elif arguments[:1] == ["inspect"]:
        command = _inspection(arguments[1:])
    if command is None:
        from ckpt8.cli.app import main

        main()
        return
    guarded(command)
    # Nothing is open and no thread runs: what is left is to free the memory object by object, an eighth of the time.
    os._exit(0)


def _version() -> None:
    from ckpt8 import __version__

    sys.stdout.write(f"ckpt8 {__version__}\n")


def _inspection(arguments: Sequence[str]) -> Callable[[], None] | None:
    """``inspect`` with these arguments, if they are one ``.ckpt8`` and flags that are known here, each once."""
    flags = [argument for argument in arguments if argument in _FLAGS]
    paths = [argument for argument in arguments if argument not in _FLAGS]
    if len(paths) != 1 or paths[0].startswith("-") or len(set(flags)) != len(flags):
        return None
    # What is made from here on stays until the end: looking for garbage in it takes a twentieth of the time.
    gc.disable()
    from ckpt8.container.header import is_container

    path = Path(paths[0])
    if not is_container(path):
        gc.enable()
        return None
    return partial(_inspect, path, **{_FLAGS[flag]: True for flag in flags})


def _inspect(path: Path, *, tensors: bool = False, as_json: bool = False) -> None:
    from ckpt8.cli.output import print_json
    from ckpt8.inspecting.container import inspect_container

    facts = inspect_container(path, tensors=tensors)
    if as_json:
        print_json(facts)
        return
    from ckpt8.cli.output import console
    from ckpt8.cli.show.inspect import show

    show(console(), facts)
