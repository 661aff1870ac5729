"""Red flags: what is wrong with the values of a checkpoint, or would be if they were stored another way.

    nan, inf             values that are not finite (an Inf that is the only element of something else than weights and
                         moments is the score of a callback that has none yet, and left out)
    negative_moment2     second moments below zero: no average of squares is, and the root that divides a step is NaN
    zero_moment          a moment without any element that is not zero: the parameter is frozen, or was not reached
    dead_rows            rows whose moments are all zero while those of others are not: unused tokens, dead units
    bf16_in_fp32         fp32 weights or moments whose low 16 bits are all zero: half of the bytes say nothing
    stored_twice         weights that are byte-identical in several storages: tied in the model, and not in the file
    moment2_fp16_zero    second moments that are not zero and would be in fp16: an update would divide by eps
    fp16_scales          moments whose groups of 32 have a maximum that FlashOptim's fp16 scale takes for zero, or holds
                         with few bits since it is subnormal

A flag is {kind, tensor or tensors, count, of, fraction, sampled, message}: ``count`` of the ``of`` elements, rows or
groups that were looked at. ``sampled``: there are more that were not. What a sample does not show may still be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import percent, size
from ckpt8.inspecting.survey.tally import Rows, Tally

KINDS = (
    "nan",
    "inf",
    "negative_moment2",
    "zero_moment",
    "dead_rows",
    "bf16_in_fp32",
    "stored_twice",
    "moment2_fp16_zero",
    "fp16_scales",
)
"""All kinds in the order of the report: what breaks a run first, what only another format would lose last."""


@dataclass(slots=True)
class RowCount:
    """Rows of one parameter: ``dead`` of the ``seen`` ones of ``count``."""

    count: int = 0
    seen: int = 0
    dead: int = 0

    def add(self, count: int, rows: Rows) -> None:
        """Add the rows of a slice."""
        self.count += count
        self.seen += rows.seen
        self.dead += rows.dead


def flag(kind: str, name: str | Sequence[str], count: int, of: int, *, sampled: bool, message: str) -> dict[str, Any]:
    """One flag as plain values."""
    named = {"tensor": name} if isinstance(name, str) else {"tensors": list(name)}
    fraction = count / of if of else 0.0
    return {
        "kind": kind,
        **named,
        "count": count,
        "of": of,
        "fraction": fraction,
        "sampled": sampled,
        "message": message,
    }


def tensor_flags(name: str, tally: Tally, parameter: str | None = None) -> Iterator[dict[str, Any]]:
    """The flags of one tensor; ``parameter`` is the name of the one that it is state of, if that is known."""
    sampled = tally.seen < tally.numel
    looked = f"{tally.seen:,} elements" + (f" looked at, of {tally.numel:,}" if sampled else "")
    whose = f"{_beside(parameter, name)}, " if parameter else ""

    def found(kind: str, count: int, of: int, message: str) -> dict[str, Any]:
        return flag(kind, name, count, of, sampled=sampled, message=whose + message)

    scalar = tally.role is Role.OTHER and tally.numel == 1
    if tally.nan:
        yield found("nan", tally.nan, tally.seen, f"{tally.nan:,} NaN in {looked}")
    if tally.inf and not scalar:
        yield found("inf", tally.inf, tally.seen, f"{tally.inf:,} Inf in {looked}")
    if tally.negative:
        yield found("negative_moment2", tally.negative, tally.seen, f"{tally.negative:,} below zero in {looked}")
    if tally.role in (Role.MOMENT1, Role.MOMENT2) and not tally.present:
        yield found("zero_moment", tally.seen, tally.seen, f"zero in all {looked}")
    if tally.dtype is DType.FLOAT32 and tally.role is not Role.OTHER and not tally.wide and tally.varied:
        yield found("bf16_in_fp32", tally.seen, tally.seen, f"bf16 values in all {looked}: half of its bytes are zero")
    if tally.flushed:
        message = f"{percent(tally.flushed / tally.present)} of what is not zero in {looked}"
        yield found("moment2_fp16_zero", tally.flushed, tally.present, message)
    if tally.lost or tally.coarse:
        message = (
            f"the scale is zero for {percent(tally.lost / tally.groups)} of the groups, "
            f"subnormal for {percent(tally.coarse / tally.groups)}, in {looked}"
        )
        yield found("fp16_scales", tally.lost + tally.coarse, tally.groups, message)


def _beside(parameter: str, tensor: str) -> str:
    """The name of a parameter beside that of its state: the member need not be said twice."""
    member, colon, bare = parameter.partition(":")
    return bare if colon and tensor.startswith(f"{member}:") else parameter


def row_flags(name: str, rows: RowCount) -> Iterator[dict[str, Any]]:
    """The flag of the rows of one parameter."""
    if 0 < rows.dead < rows.seen:
        sampled = rows.seen < rows.count
        looked = f"{rows.seen:,} rows" + (f" looked at, of {rows.count:,}" if sampled else "")
        yield flag("dead_rows", name, rows.dead, rows.seen, sampled=sampled, message=f"{rows.dead:,} dead of {looked}")


def twin_flag(names: Sequence[str], count: int, numel: int, nbytes: int) -> dict[str, Any]:
    """The flag of tensors of ``numel`` elements and ``nbytes`` bytes each, of which ``count`` were compared."""
    sampled = count < numel
    same = f"equal in the {count:,} elements compared, of {numel:,}" if sampled else "byte-identical"
    message = f"{same}; stored {len(names)} times, {size(nbytes)} each: tied in the model?"
    return flag("stored_twice", names, count, count, sampled=sampled, message=message)
