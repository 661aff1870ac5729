"""The public ``inspect``: facts of any checkpoint, those that the command prints as JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt8.container.joined import Stored, is_stored
from ckpt8.container.steps import error_in_words
from ckpt8.core.errors import UsageError
from ckpt8.core.files.paths import as_path
from ckpt8.core.public import checked
from ckpt8.core.summary import Summarised, shrunk
from ckpt8.core.text import counted, listed, size

if TYPE_CHECKING:
    from ckpt8.core.workers import Progress


class Inspection(Summarised, dict[str, Any]):
    """The facts of a checkpoint by their keys in the JSON of ``ckpt8 inspect``."""

    __slots__ = ()

    def _summary(self) -> Iterator[tuple[str, str]]:
        is_packed = self["kind"] == "ckpt8"
        holds = self["asked"] if is_packed else f"{self['format']}, {counted(self['tensor_count'], 'tensor')}"
        yield "Inspection", f"{self['path']}: {holds}"
        yield "size", shrunk(self["bytes"], self["stored_bytes"]) if is_packed else size(self["bytes"])
        yield "error", error_in_words(self.get("steps")) if is_packed else ""
        predicted = self.get("predicted", {}).items()
        yield "predicted", ", ".join(f"{name} {row['ratio']:.2f}x" for name, row in predicted if " " not in name)
        sample, flags = self["sample"], Counter(flag["kind"] for flag in self["flags"])
        seen = f"none in {sample['elements']:,} of {sample['of']:,} elements"
        yield (
            "red flags",
            listed(f"{count:,} {kind}" for kind, count in flags.items())
            or (seen if sample["elements"] else "no values were read; full=True reads them"),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(self)


@checked
def inspect(
    path: str | os.PathLike[str],
    *,
    tensors: bool = False,
    full: bool = False,
    against: str | os.PathLike[str] | None = None,
    readiness: bool = False,
    progress: Progress = lambda _: None,
) -> Inspection:
    """What a ``.ckpt8`` or a checkpoint holds, as ``ckpt8 inspect --json`` prints it; a dictionary.

    Of a checkpoint it predicts what every preset would make of it: ``predicted``. ``tensors`` adds every tensor.
    ``full`` reads every element for the red ``flags``, not a sample, and calls ``progress`` with the bytes that it has
    read of a checkpoint. ``against`` is the original of a ``.ckpt8``, whose error is then measured anew. ``readiness``
    adds what fp16, bf16, fp8 and int8 would lose. Raises InputError for damage and for what is no checkpoint.

    >>> ckpt8.inspect("run.pt")["tensor_count"]
    8
    """
    original = None if against is None else as_path(against)
    return Inspection(
        facts_of(as_path(path), tensors=tensors, full=full, against=original, readiness=readiness, progress=progress)
    )


def facts_of(
    path: Path,
    *,
    tensors: bool,
    full: bool,
    against: Path | None,
    readiness: bool,
    progress: Progress,
    visit: Callable[[Stored], None] | None = None,
) -> dict[str, Any]:
    """The facts that ``inspect`` gives. ``visit`` gets the reader of a container."""
    if is_stored(path):
        from ckpt8.inspecting.container import inspect_container

        facts = inspect_container(path, tensors=tensors, original=against, full=full, visit=visit)
    elif against is not None and not readiness:
        problem = f"{path}: is not a .ckpt8, which --against compares with its original"
        raise UsageError(f"{problem}; compare the two with ckpt8 diff {path} {against}")
    else:
        from ckpt8.inspecting.checkpoint import inspect_checkpoint

        facts = inspect_checkpoint(path, tensors=tensors, full=full, progress=progress)
    if readiness:
        from ckpt8.inspecting.readiness import inspect_readiness

        facts["readiness"] = inspect_readiness(path, full=full, original=against)
    return facts
