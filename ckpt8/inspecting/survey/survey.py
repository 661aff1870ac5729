"""Reads the values of a checkpoint, all or a sample of every tensor, and raises red flags.

Flags stand for faults, and for values that another format would lose:

    nan, inf             values that are not finite; an Inf is no flag in a tensor of one element that is neither weight
                         nor moment, since callbacks start their best score with it
    negative_moment2     second moments below zero: an average of squares never is, and its root becomes NaN
    zero_moment          a moment that is zero everywhere: the parameter is frozen, or no gradient reached it
    dead_rows            rows whose moments are all zero while those of others are not: unused tokens, dead units
    bf16_in_fp32         fp32 weights or moments whose low 16 bits are all zero: half of the bytes hold nothing
    stored_twice         weights of several storages that are equal in all elements read: perhaps the model ties them,
                         and the file repeats them
    moment2_fp16_zero    second moments that fp16 would round to zero: an update would divide by eps
    fp16_scales          groups of 32 moments whose scale FlashOptim, which keeps scales in fp16, would round to zero or
                         to a subnormal number, which has fewer bits

A flag is {kind, tensor or tensors, count, of, fraction, sampled, message}: it holds for ``count`` of ``of`` elements
that the survey read. ``dead_rows`` counts rows, ``fp16_scales`` groups that are not all zero, and ``moment2_fp16_zero``
elements that are not zero; ``stored_twice`` counts the elements of one copy, all of them equal. ``sampled`` says that
the survey left elements out, which may hold more, or differ.

The sample is bounded and always the same, see ``sampling``. Memory holds one window with its temporaries, or two where
the survey compares weights, and two bytes for each row of one parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.parameter_names import split_member, whole_name
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

_MAX_ROWS = 1 << 24
"""The survey looks for dead rows in parameters of at most this many rows, since it keeps two bytes for each."""

_MIN_TWIN = 32
"""The survey does not look for copies of weights with fewer elements than this."""

Progress = Callable[[int], None]
"""Called after each window with the number of its bytes."""


def survey(subject: Subject, *, full: bool, progress: Progress = lambda _: None) -> dict[str, Any]:
    """``flags``, sorted by kind and fraction, and ``sample``: {elements, of, full}, in elements of floating tensors.

    The argument ``full`` makes the survey read every element. The ``full`` of ``sample`` says whether it has: a sample
    of small tensors is all of them, too. Raises InputError.
    """
    found = _Survey(subject, None if full else sampling.budget(len(subject.pieces)), progress)
    found.read_all()
    seen = sum(tally.seen for tally in found.tallies.values())
    return {"flags": found.flags(), "sample": {"elements": seen, "of": subject.numel, "full": seen == subject.numel}}


def survey_decoded(path: Path) -> dict[str, Any]:
    """``survey`` of every element that a ``.ckpt8`` gives back. Raises InputError."""
    with open_any(path) as source:
        # The plan is needed for tensors, roles and parameters. Its codecs do not matter: nothing is compressed.
        plan = plan_bundle(source, Policy())
        return survey(subject_of(source, plan, describe(source, plan)), full=True)


class _Survey:
    """Tallies of all tensors of a subject. ``budget`` is the number of elements to read of each; None means all."""

    def __init__(self, subject: Subject, budget: int | None, progress: Progress) -> None:
        self._subject = subject
        self._budget = budget
        self._progress = progress
        self.tallies: dict[str, Tally] = {}
        self._parameter_of: dict[str, str] = {}
        self._rows: dict[str, Counter[str]] = defaultdict(Counter)
        self._by_digest: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)

    def read_all(self) -> None:
        """Read every piece once. Raises InputError."""
        done: set[int] = set()
        # The moments of a parameter come one after the other: a row is dead if all of them are zero.
        for parameter, moments in self._subject.owners:
            name, rows = whole_name(parameter["name"]), _row_counter(moments)
            for piece in moments:
                self._tally(piece, rows)
                done.add(id(piece))
                if parameter["named"]:
                    self._parameter_of[piece.tensor] = name
            if rows is not None:
                # This adds: other slices of the same parameter have rows, too.
                self._rows[name].update(count=rows.count, seen=rows.seen, dead=rows.dead)
        for piece in self._subject.pieces:
            if id(piece) not in done:
                self._tally(piece, None)

    def _tally(self, piece: Piece, rows: Rows | None) -> None:
        tally = Tally(piece.view.role, piece.dtype, piece.numel)
        # Windows of a weight do not follow its rows: a copy of another shape then has the same windows and digest.
        row = 0 if tally.role is Role.WEIGHT else piece.row
        reads_all = self._budget is None or piece.numel <= self._budget
        for start, count in sampling.windows(piece.span, self._budget, row):
            tally.add(self._subject.read(piece, start, count), start, rows, reads_all=reads_all)
            self._progress(count * piece.dtype.itemsize)
        if _can_be_twin(piece) and tally.is_varied:
            self._by_digest[piece.dtype, piece.numel, tally.digest.digest()].append(piece)
        if piece.tensor in self.tallies:
            self.tallies[piece.tensor].merge(tally)
        else:
            self.tallies[piece.tensor] = tally

    def flags(self) -> list[dict[str, Any]]:
        """All flags, by kind; within a kind those with the largest fraction first."""
        found = [
            flag
            for name, tally in self.tallies.items()
            for flag in _tensor_flags(name, tally, self._parameter_of.get(name))
        ]
        found += [flag for name, rows in self._rows.items() for flag in _row_flags(name, **rows)]
        found += self._twin_flags()
        return sorted(found, key=lambda flag: (_KINDS.index(flag["kind"]), -flag["fraction"], -flag["count"]))

    def _twin_flags(self) -> Iterator[dict[str, Any]]:
        """Flags of weights that agree in all elements read. A survey of all elements compares them byte by byte."""
        counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for pieces in self._by_digest.values():
            for twins in self._equal_groups(pieces):
                names = tuple(dict.fromkeys(piece.tensor for piece in twins))
                # Views of one storage are tied in the file, too. Slices of one tensor may repeat each other.
                if len({piece.view.storage for piece in twins}) < 2 or len(names) < 2:
                    continue
                first = twins[0]
                compared = sum(count for _, count in sampling.windows(first.span, self._budget))
                counts[names].update(compared=compared, numel=first.numel, nbytes=first.numel * first.dtype.itemsize)
        for names, sums in counts.items():
            yield _twin_flag(names, **sums)

    def _equal_groups(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Pieces of one digest, in lists of those that are equal byte by byte; of a sample, in one list."""
        if self._budget is not None:
            return [pieces]
        groups: list[list[Piece]] = []
        for piece in pieces:
            equal = next((group for group in groups if self._are_equal(group[0], piece)), None)
            if equal is None:
                groups.append([piece])
            else:
                equal.append(piece)
        return groups

    def _are_equal(self, one: Piece, other: Piece) -> bool:
        # As bytes, since a NaN equals no other value.
        return all(
            torch.equal(
                self._subject.read(one, *window).view(torch.uint8), self._subject.read(other, *window).view(torch.uint8)
            )
            for window in sampling.windows(one.span, None)
        )


def _row_counter(moments: list[Piece]) -> Rows | None:
    """A counter of the rows of a parameter; None where its moments have no rows, rows of other lengths, or too many."""
    shape, row = moments[0].view.ref.shape, moments[0].row
    if not row or not 1 < shape[0] <= _MAX_ROWS or any(piece.row != row for piece in moments):
        return None
    return Rows(shape[0], row)


def _can_be_twin(piece: Piece) -> bool:
    """Whether a piece may be a tied weight. Buffers may not: they are alike in every layer."""
    name = piece.view.name.replace(":", ".").rpartition(".")[2]
    return piece.view.role is Role.WEIGHT and piece.is_dense and piece.numel >= _MIN_TWIN and name not in BUFFERS


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
    """The flags of one tensor. For optimizer state, ``parameter`` names its parameter if that is known."""
    sampled = tally.seen < tally.numel
    looked = f"{tally.seen:,} elements" + (f" looked at, of {tally.numel:,}" if sampled else "")
    # In a directory both names begin with the member. Say it once.
    member, bare = split_member(parameter or "")
    whose = f"{bare if member and name.startswith(f'{member}:') else parameter}, " if parameter else ""
    is_scalar = tally.role is Role.OTHER and tally.numel == 1
    is_zero = tally.role in (Role.MOMENT1, Role.MOMENT2) and not tally.nonzero
    is_bf16 = tally.dtype is DType.FLOAT32 and tally.role is not Role.OTHER and tally.fits_bf16 and tally.is_varied
    scales = (
        f"in fp16 the scale would be zero for {percent(tally.zero_scales, tally.groups)} of the groups, "
        f"subnormal for {percent(tally.subnormal_scales, tally.groups)}, in {looked}"
    )
    fp16_zero = f"fp16 would round {percent(tally.fp16_zero, tally.nonzero)} of the nonzero values to zero, in {looked}"
    bf16 = f"bf16 values in all {looked}: half of its bytes are zero"
    found = [
        ("nan", tally.nan, tally.seen, f"{tally.nan:,} NaN in {looked}"),
        ("inf", 0 if is_scalar else tally.inf, tally.seen, f"{tally.inf:,} Inf in {looked}"),
        ("negative_moment2", tally.negative, tally.seen, f"{tally.negative:,} below zero in {looked}"),
        ("zero_moment", tally.seen if is_zero else 0, tally.seen, f"zero in all {looked}"),
        ("bf16_in_fp32", tally.seen if is_bf16 else 0, tally.seen, bf16),
        ("moment2_fp16_zero", tally.fp16_zero, tally.nonzero, fp16_zero),
        ("fp16_scales", tally.zero_scales + tally.subnormal_scales, tally.groups, scales),
    ]
    for kind, count, of, message in found:
        if count:
            yield _flag(kind, name, count, of, sampled=sampled, message=whose + message)


def _row_flags(name: str, count: int, seen: int, dead: int) -> Iterator[dict[str, Any]]:
    """The flag of a parameter with ``count`` rows, ``seen`` of them read in full, and ``dead`` of these all zero.

    There is none where all are: ``zero_moment`` says that.
    """
    if 0 < dead < seen:
        looked = f"{seen:,} rows" + (f" looked at, of {count:,}" if seen < count else "")
        yield _flag("dead_rows", name, dead, seen, sampled=seen < count, message=f"{dead:,} dead of {looked}")


def _twin_flag(names: Sequence[str], compared: int, numel: int, nbytes: int) -> dict[str, Any]:
    """The flag of tensors of ``numel`` elements and ``nbytes`` bytes each, equal in the ``compared`` elements."""
    sampled = compared < numel
    same = f"equal in the {compared:,} elements compared, of {numel:,}" if sampled else "byte-identical"
    message = f"{same}; stored {len(names)} times, {size(nbytes)} each: tied in the model?"
    return _flag("stored_twice", names, compared, compared, sampled=sampled, message=message)
