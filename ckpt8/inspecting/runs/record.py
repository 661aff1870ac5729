"""What ``ckpt8.runs`` says of a run and of each checkpoint in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from ckpt8.inspecting.runs.progress import StepFrom

Kind = Literal["key", "delta", "raw"]


@dataclass(slots=True)
class RunRecord:
    """One checkpoint of a run; ``name`` is its path below the directory, ``run`` the folder of the run in that.

    A checkpoint that is there both compressed and as it was is one record, that of the container: ``raw`` names the
    other one, which takes ``raw_bytes``.

    ``kind`` is ``key`` for a container that needs no other, ``delta`` for one that needs its ``base``, ``raw`` for any
    other checkpoint, and None where damage hides it. ``asked`` is what it was compressed with. ``bytes`` are those of
    the original, ``stored_bytes`` those of its files now. ``step_from`` says where the step was found: ``file``,
    ``name`` or ``optimizer``. ``steps`` is the measured error in steps of the optimizer. ``base`` is the name of its
    base, ``missing`` where that is not to be found. ``damage`` says what does not hold: seal, length, or a head.
    """

    name: str
    run: str = ""
    kind: Kind | None = None
    format: str | None = None
    asked: str | None = None
    step: int | None = None
    step_from: StepFrom | None = None
    epoch: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    time: datetime = field(default_factory=lambda: datetime.fromtimestamp(0, timezone.utc))
    bytes: int | None = None
    stored_bytes: int = 0
    raw: str | None = None
    raw_bytes: int = 0
    steps: float | None = None
    seal: str | None = None
    base: str | None = None
    damage: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times smaller than its original a container is; None for other checkpoints."""
        if self.kind not in ("key", "delta") or self.bytes is None or not self.stored_bytes:
            return None
        return self.bytes / self.stored_bytes

    @property
    def problem(self) -> str | None:
        """Why the checkpoint cannot be read whole, in a line; None where nothing is known against it."""
        return self.damage or (f"{self.name}: its base is missing" if self.base == MISSING else None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the time is UTC."""
        return {**asdict(self), "time": self.time.isoformat(timespec="seconds"), "ratio": self.ratio}


MISSING = "missing"
"""The base of a delta that cannot be found."""


@dataclass(slots=True)
class Run:
    """The checkpoints of a directory in the order of their steps, run by run; iterates over them.

    ``bases_bytes`` are those of bases that are kept for deltas alone, of checkpoints that are gone.
    """

    path: str
    checkpoints: list[RunRecord]
    bases_bytes: int = 0

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    @property
    def problems(self) -> list[str]:
        """What is damaged or lacks its base, a line each."""
        return [record.problem for record in self.checkpoints if record.problem is not None]

    def totals(self) -> dict[str, Any]:
        """Numbers of checkpoints by kind, their bytes before and now, and the ratio of those that are compressed."""
        kinds = [record.kind for record in self.checkpoints]
        packed = [record for record in self.checkpoints if record.ratio is not None]
        before, after = (sum(getattr(each, name) or 0 for each in packed) for name in ("bytes", "stored_bytes"))
        after += self.bases_bytes
        return {
            "checkpoints": len(self.checkpoints),
            **{kind: kinds.count(kind) for kind in ("key", "delta", "raw")},
            "damaged": sum(record.damage is not None for record in self.checkpoints),
            "base_missing": sum(record.base == MISSING for record in self.checkpoints),
            "bytes": sum(record.bytes or 0 for record in self.checkpoints),
            "stored_bytes": sum(record.stored_bytes for record in self.checkpoints) + self.bases_bytes,
            "packed_and_raw": sum(record.raw is not None for record in self.checkpoints),
            "raw_bytes": sum(record.raw_bytes for record in self.checkpoints),
            "bases_bytes": self.bases_bytes,
            "ratio": before / after if before and after else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        checkpoints = [record.to_json() for record in self.checkpoints]
        return {"path": self.path, "totals": self.totals(), "checkpoints": checkpoints}
