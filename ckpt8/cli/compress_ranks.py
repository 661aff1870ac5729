"""``torchrun -m ckpt8 compress``: the ranks share a directory of torch.distributed.checkpoint and write another."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from ckpt8.cli.options import stopwatch
from ckpt8.cli.output import console, print_json, print_lines, waited
from ckpt8.core.errors import UsageError
from ckpt8.core.text import listed, printable, size

_LISTED = 5
_UNSHARED = {"device": "auto", "max_update_error": None, "base": None}
"""Options that the ranks do not take, with the value that asks for nothing."""


def ranks(sources: list[Path]) -> tuple[int, int] | None:
    """The number of this process and of all where torchrun has started it to share the source; else None.

    Only a directory with a ``.metadata`` is shared. Raises UsageError where the environment contradicts itself.
    """
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if None in given or len(sources) != 1 or not os.path.isfile(sources[0] / ".metadata"):  # noqa: PTH113 - never raises
        return None
    try:
        rank, world = (int(each or "") for each in given)
    except ValueError:
        rank, world = 0, 0
    if not 0 <= rank < world:
        raise UsageError(f"RANK is {given[0]!r} and WORLD_SIZE {given[1]!r}; start the ranks with torchrun")
    return rank, world


def compress_share(
    src: Path, output: Path | None, options: dict[str, Any], rank: int, world: int, *, force: bool, as_json: bool
) -> None:
    """Pack the share of this rank. Every rank prints a line of its part, rank 0 then the whole."""
    from ckpt8.container.target_names import CONTAINER

    if output is None or output.suffix == CONTAINER:
        raise UsageError(
            f"{src}: {world} ranks write a directory, a file each; give it with -o DIR, or unset RANK and WORLD_SIZE "
            f"to write one {CONTAINER}"
        )
    for name, nothing in _UNSHARED.items():
        if options[name] != nothing:
            raise UsageError(f"--{name.replace('_', '-')} is not for ranks that share a source; leave it out")

    from ckpt8.integrations.dcp.sharing import compress_share as run
    from ckpt8.integrations.dcp.sharing import connected

    given = {name: value for name, value in options.items() if name not in _UNSHARED}
    elapsed = stopwatch()
    with warnings.catch_warnings(record=True) as said, connected(world):
        warnings.simplefilter("always", UserWarning)
        planned = run(src, output, given, rank, world, overwrite=force)
    seconds = elapsed()
    for line in dict.fromkeys(str(each.message) for each in said if str(each.message).startswith(f"{output}: ")):
        sys.stderr.write(f"ckpt8: {printable(line)}\n")
    if not as_json:
        print_lines(console(), [f"rank {rank} of {world}: {planned.share.slices} slices, {size(planned.share.size)}"])
    if rank:
        return
    left_out = planned.directory.left_out

    from ckpt8.cli.show.inspect import summary
    from ckpt8.inspecting.container import inspect_container

    facts = inspect_container(output)
    if as_json:
        print_json({"target": str(output), "seconds": seconds, "left_out": left_out, **facts})
        return
    summary(console(), facts, str(output), seconds, waited())
    if left_out:
        print_lines(console(), [f"left out: {listed(left_out, _LISTED)}"])
