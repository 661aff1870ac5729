"""Red flags: faults in the values of a checkpoint, and values that another format would lose.

    nan, inf             values that are not finite; but a single Inf outside weights and moments is no flag, since
                         callbacks start their best score with it
    negative_moment2     second moments below zero: an average of squares never is, and its root becomes NaN
    zero_moment          a moment that is zero everywhere: the parameter is frozen, or no gradient reached it
    dead_rows            rows whose moments are all zero while those of others are not: unused tokens, dead units
    bf16_in_fp32         fp32 weights or moments whose low 16 bits are all zero: half of the bytes hold nothing
    stored_twice         byte-identical weights in several storages: tied in the model, and not in the file
    moment2_fp16_zero    second moments that fp16 would round to zero: an update would divide by eps
    fp16_scales          groups of 32 moments whose scale FlashOptim's fp16 would round to zero, or to a subnormal
                         number, which has few bits

A flag is {kind, tensor or tensors, count, of, fraction, sampled, message}: ``count`` of the ``of`` elements, rows or
groups that the survey read. ``sampled`` says that there are others, which may hold more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import percent, size
from ckpt8.inspecting.survey.tally import Tally

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
"""All kinds in the order of the report: first what breaks a run, last what only another format would lose."""


def flag(kind: str, name: str | Sequence[str], count: int, of: int, *, sampled: bool, message: str) -> dict[str, Any]:
    """One flag as plain values."""
    named = {"tensor": name} if isinstance(name, str) else {"tensors": list(name)}
    return {
        "kind": kind,
        **named,
        "count": count,
        "of": of,
        "fraction": count / of if of else 0.0,
        "sampled": sampled,
        "message": message,
    }


def tensor_flags(name: str, tally: Tally, parameter: str | None = None) -> Iterator[dict[str, Any]]:
    """The flags of one tensor. ``parameter`` names the parameter that it is state of, if that is known."""
    sampled = tally.seen < tally.numel
    looked = f"{tally.seen:,} elements" + (f" looked at, of {tally.numel:,}" if sampled else "")
    # Both names begin with the member; once is enough.
    member, colon, bare = (parameter or "").partition(":")
    whose = f"{bare if colon and name.startswith(f'{member}:') else parameter}, " if parameter else ""
    is_scalar = tally.role is Role.OTHER and tally.numel == 1
    is_zero = tally.role in (Role.MOMENT1, Role.MOMENT2) and not tally.present
    is_bf16 = tally.dtype is DType.FLOAT32 and tally.role is not Role.OTHER and not tally.wide and tally.varied
    scales = (
        f"the scale is zero for {percent(tally.lost, tally.groups)} of the groups, "
        f"subnormal for {percent(tally.coarse, tally.groups)}, in {looked}"
    )
    flushed = f"{percent(tally.flushed, tally.present)} of what is not zero in {looked}"
    bf16 = f"bf16 values in all {looked}: half of its bytes are zero"
    found = [
        ("nan", tally.nan, tally.seen, f"{tally.nan:,} NaN in {looked}"),
        ("inf", 0 if is_scalar else tally.inf, tally.seen, f"{tally.inf:,} Inf in {looked}"),
        ("negative_moment2", tally.negative, tally.seen, f"{tally.negative:,} below zero in {looked}"),
        ("zero_moment", tally.seen if is_zero else 0, tally.seen, f"zero in all {looked}"),
        ("bf16_in_fp32", tally.seen if is_bf16 else 0, tally.seen, bf16),
        ("moment2_fp16_zero", tally.flushed, tally.present, flushed),
        ("fp16_scales", tally.lost + tally.coarse, tally.groups, scales),
    ]
    for kind, count, of, message in found:
        if count:
            yield flag(kind, name, count, of, sampled=sampled, message=whose + message)


def row_flags(name: str, count: int, seen: int, dead: int) -> Iterator[dict[str, Any]]:
    """The flag of a parameter of ``count`` rows: the survey read ``seen`` of them, and ``dead`` of these are zero."""
    if 0 < dead < seen:
        looked = f"{seen:,} rows" + (f" looked at, of {count:,}" if seen < count else "")
        yield flag("dead_rows", name, dead, seen, sampled=seen < count, message=f"{dead:,} dead of {looked}")


def twin_flag(names: Sequence[str], count: int, numel: int, nbytes: int) -> dict[str, Any]:
    """The flag of tensors of ``numel`` elements and ``nbytes`` bytes each, equal in ``count`` elements."""
    sampled = count < numel
    same = f"equal in the {count:,} elements compared, of {numel:,}" if sampled else "byte-identical"
    message = f"{same}; stored {len(names)} times, {size(nbytes)} each: tied in the model?"
    return flag("stored_twice", names, count, count, sampled=sampled, message=message)
