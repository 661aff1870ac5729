"""Looks at the values of a checkpoint, a sample of every tensor or all, and raises red flags.

These are faults, and values that another format would lose:

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

The sample is bounded and always the same, see ``sampling``. Memory holds one window with its temporaries, and a byte
for each row of one parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.parameter_names import whole_name
from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import percent, size
from ckpt8.inspecting import sampling
from ckpt8.inspecting.opening import describe, open_any
from ckpt8.inspecting.survey.pieces import Piece, Subject, subject_of
from ckpt8.inspecting.survey.tally import Rows, Tally

_KINDS = (
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

_MOST_ROWS = 1 << 24
"""A parameter with more rows than this has no rows of a layer; the survey then looks for no dead ones."""

_SMALLEST_TWIN = 32

Progress = Callable[[int], None]
"""Called with numbers of bytes that the survey has read."""


def survey(subject: Subject, *, full: bool, progress: Progress = lambda _: None) -> dict[str, Any]:
    """``flags``, sorted by kind and size, and ``sample``: {elements, of, full}, in elements of floating tensors.

    ``full`` reads every element; the ``full`` of ``sample`` says whether the survey read every one. Raises InputError.
    """
    found = _Survey(subject, full, progress)
    seen = sum(tally.seen for tally in found.tallies.values())
    return {"flags": found.flags(), "sample": {"elements": seen, "of": subject.numel, "full": seen == subject.numel}}


def survey_decoded(path: Path) -> dict[str, Any]:
    """``survey`` of every element that a ``.ckpt8`` gives back. Raises InputError."""
    with open_any(path) as source:
        plan = plan_bundle(source, Policy())
        return survey(subject_of(source, plan, describe(source, plan)), full=True)


class _Survey:
    def __init__(self, subject: Subject, full: bool, progress: Progress) -> None:
        self._read = subject.read
        self._most = None if full else sampling.budget(len(subject.pieces))
        self._progress = progress
        self.tallies: dict[str, Tally] = {}
        self._owners: dict[str, str] = {}
        self._rows: dict[str, Counter[str]] = defaultdict(Counter)
        self._alike: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)
        # The moments of a parameter come one after the other: a row is dead if all of them are zero.
        done: set[int] = set()
        for owner, moments in subject.owners:
            name, rows = whole_name(owner["name"]), _rows_of(moments)
            for piece in moments:
                self._look(piece, rows)
                done.add(id(piece))
                if owner["named"]:
                    self._owners[piece.tensor] = name
            if rows is not None:
                self._rows[name].update(count=rows.count, seen=rows.seen, dead=rows.dead)
        for piece in subject.pieces:
            if id(piece) not in done:
                self._look(piece, None)

    def _look(self, piece: Piece, rows: Rows | None) -> None:
        tally = Tally(piece.view.role, piece.dtype, piece.numel)
        # To find twins, take windows in the same places of all weights of one length, whatever their shape.
        row = 0 if tally.role is Role.WEIGHT else piece.row
        whole = self._most is None or piece.numel <= self._most
        for start, count in sampling.windows(piece.span, self._most, row):
            tally.add(self._read(piece, start, count), start, rows, whole=whole)
            self._progress(count * piece.dtype.itemsize)
        if _can_be_twin(piece) and tally.varied:
            self._alike[piece.dtype, piece.numel, tally.digest.digest()].append(piece)
        if self.tallies.setdefault(piece.tensor, tally) is not tally:
            self.tallies[piece.tensor].merge(tally)

    def flags(self) -> list[dict[str, Any]]:
        """All flags, by kind; within a kind those with the largest fraction first."""
        found = [
            each for name, tally in self.tallies.items() for each in _tensor_flags(name, tally, self._owners.get(name))
        ]
        found += [each for name, rows in self._rows.items() for each in _row_flags(name, **rows)]
        found += self._twins()
        return sorted(found, key=lambda each: (_KINDS.index(each["kind"]), -each["fraction"], -each["count"]))

    def _twins(self) -> Iterator[dict[str, Any]]:
        """Weights that agree in all elements of their samples; a full survey compares them byte by byte."""
        counts: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
        for alike in self._alike.values():
            for twins in self._confirmed(alike) if self._most is None else [alike]:
                first = twins[0]
                names = tuple(dict.fromkeys(piece.tensor for piece in twins))
                if len({piece.view.storage for piece in twins}) < 2 or len(names) < 2:
                    continue
                seen = sum(count for _, count in sampling.windows(first.span, self._most))
                for place, more in enumerate((seen, first.numel, first.numel * first.dtype.itemsize)):
                    counts[names][place] += more
        for names, (seen, numel, nbytes) in counts.items():
            yield _twin_flag(names, seen, numel, nbytes)

    def _confirmed(self, alike: list[Piece]) -> list[list[Piece]]:
        """Pieces of one hash, in lists of equal ones."""
        found: list[list[Piece]] = []
        for piece in alike:
            same = next((twins for twins in found if self._equal(twins[0], piece)), None)
            if same is None:
                found.append([piece])
            else:
                same.append(piece)
        return found

    def _equal(self, one: Piece, other: Piece) -> bool:
        # As bytes, since a NaN equals no other value.
        return all(
            torch.equal(*(self._read(piece, *place).view(torch.uint8) for piece in (one, other)))
            for place in sampling.windows(one.span, None)
        )


def _rows_of(moments: list[Piece]) -> Rows | None:
    """A count of the rows that all moments of a parameter share; None if they share none."""
    shape, row = moments[0].view.ref.shape, moments[0].row
    if not row or not 1 < shape[0] <= _MOST_ROWS or any(piece.row != row for piece in moments):
        return None
    return Rows(shape[0], row)


def _can_be_twin(piece: Piece) -> bool:
    """Whether a piece may be a tied weight: buffers do not count, they are alike in every layer."""
    name = piece.view.name.replace(":", ".").rpartition(".")[2]
    return piece.view.role is Role.WEIGHT and piece.is_dense and piece.numel >= _SMALLEST_TWIN and name not in BUFFERS


def _flag(kind: str, name: str | Sequence[str], count: int, of: int, *, sampled: bool, message: str) -> dict[str, Any]:
    """One flag as plain values."""
    return {
        "kind": kind,
        **({"tensor": name} if isinstance(name, str) else {"tensors": list(name)}),
        "count": count,
        "of": of,
        "fraction": count / of if of else 0.0,
        "sampled": sampled,
        "message": message,
    }


def _tensor_flags(name: str, tally: Tally, parameter: str | None = None) -> Iterator[dict[str, Any]]:
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
            yield _flag(kind, name, count, of, sampled=sampled, message=whose + message)


def _row_flags(name: str, count: int, seen: int, dead: int) -> Iterator[dict[str, Any]]:
    """The flag of a parameter of ``count`` rows: the survey read ``seen`` of them, and ``dead`` of these are zero."""
    if 0 < dead < seen:
        looked = f"{seen:,} rows" + (f" looked at, of {count:,}" if seen < count else "")
        yield _flag("dead_rows", name, dead, seen, sampled=seen < count, message=f"{dead:,} dead of {looked}")


def _twin_flag(names: Sequence[str], count: int, numel: int, nbytes: int) -> dict[str, Any]:
    """The flag of tensors of ``numel`` elements and ``nbytes`` bytes each, equal in ``count`` elements."""
    sampled = count < numel
    same = f"equal in the {count:,} elements compared, of {numel:,}" if sampled else "byte-identical"
    message = f"{same}; stored {len(names)} times, {size(nbytes)} each: tied in the model?"
    return _flag("stored_twice", names, count, count, sampled=sampled, message=message)
