"""What the head of one file says, or those of the files in a folder together."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt8.codecs.error_stats import StepError
from ckpt8.container.base_record import BaseRecord
from ckpt8.inspecting.runs.progress import Progress


@dataclass(slots=True)
class Facts:
    """``bytes`` are those of the original, ``counted`` the step in the state of an optimizer.

    ``trains``: a file that is not compressed holds the state of an optimizer and more. The rest is that of a container:
    ``original`` is the name of what it was made from.
    """

    format: str
    bytes: int
    progress: Progress = field(default_factory=Progress)
    counted: int | None = None
    trains: bool = False
    original: str | None = None
    asked: str | None = None
    seal: str | None = None
    base: BaseRecord | None = None
    error: StepError | None = None
