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

The sample is bounded and always the same, see ``tensors``. Memory holds one window with its temporaries, and two bytes
for each row of one parameter.

A ``Tally`` has the counts of one tensor. ``make_pieces`` says what to read: the floating tensors of a checkpoint as
runs of elements, each element of a storage once. Of a strided view it reads the whole span, and a mask picks its
elements. A view inside another one adds nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import split_member, whole_name
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.reference import square_root
from ckpt8.compressing.plan import Plan, read_elements
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.frames import bytes_of
from ckpt8.container.manifest import Manifest
from ckpt8.core.arrays import as_tensor
from ckpt8.core.grouping import grouped
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import percent, size
from ckpt8.core.workers import Progress
from ckpt8.inspecting.facts import shown_names
from ckpt8.inspecting.tensors import bits_of, budget, describe, open_any, windows

FP16_ZERO = 2.0**-25
"""fp16 rounds numbers up to this one, half of its smallest, to zero."""

_FP16_NORMAL = 2.0**-14
_VARIETY = 16
"""A tensor with fewer different values is a mask or a constant."""

_VARIED_IN = 4096
"""Elements of every window in which the tally looks for different values."""

_MOMENTS = (Role.MOMENT1, Role.MOMENT2)


class Rows:
    """Which of ``count`` rows of ``row`` elements were read in full, and which have a moment that is not zero."""

    def __init__(self, count: int, row: int) -> None:
        self.count, self._row = count, row
        self._alive, self._seen = torch.zeros(2, count, dtype=torch.bool, device="cpu")

    def add(self, nonzero: torch.Tensor, start: int, *, reads_all: bool) -> None:
        """Add elements from ``start`` on: ``nonzero`` is True where one is not zero.

        ``reads_all`` says that the caller adds all elements, in several calls: rows may then be cut between two calls.
        """
        first, last = -(-start // self._row), (start + len(nonzero)) // self._row
        if first > last:  # within one row
            self._alive[start // self._row] |= nonzero.any()
        else:
            head, tail = first * self._row - start, last * self._row - start
            if head:
                self._alive[first - 1] |= nonzero[:head].any()
            if tail < len(nonzero):
                self._alive[last] |= nonzero[tail:].any()
            if head < tail:
                self._alive[first:last] |= nonzero[head:tail].view(-1, self._row).any(dim=1)
                self._seen[first:last] = True
        if reads_all:
            self._seen.fill_(True)

    @property
    def seen(self) -> int:
        """How many rows were read in full."""
        return int(self._seen.sum())

    @property
    def dead(self) -> int:
        """How many of these rows are zero in all moments."""
        return int((self._seen & ~self._alive).sum())


@dataclass(slots=True)
class Tally:
    """What the elements of a tensor that were read hold, as ``counts`` by name.

    ``seen`` elements were read; ``nan``, ``inf`` and ``nonzero`` are those of them that are so, ``negative`` second
    moments below zero, ``fp16_zero`` second moments that fp16 rounds to zero. ``groups`` are the groups of 32 moments
    that are not all zero; in fp16 the scale is zero in ``zero_scales`` of them and subnormal in ``subnormal_scales``.
    ``fits_bf16`` says that no fp32 value has bits that bf16 lacks. ``values`` are the bits of up to 16 different
    elements.
    """

    role: Role
    dtype: DType
    numel: int
    counts: Counter[str] = field(default_factory=Counter)
    fits_bf16: bool = True
    values: set[int] = field(default_factory=set)
    digest: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, x: torch.Tensor, start: int, rows: Rows | None = None, *, reads_all: bool = False) -> None:
        """Count the elements ``x`` from ``start`` on, and add them to ``rows`` if given."""
        if self.role is Role.WEIGHT:
            self.digest.update(bytes_of(x))
        bits = bits_of(x)
        if self.dtype is DType.FLOAT32:
            self.fits_bf16 = self.fits_bf16 and not bool((bits & 0xFFFF).any())
        if len(self.values) < _VARIETY:
            self.values.update(bits[:_VARIED_IN].unique()[:_VARIETY].tolist())  # type: ignore[no-untyped-call]
        values = x if x.dtype in (torch.float32, torch.float64) else x.float()
        finite = values.isfinite()
        if not finite.all():
            self.counts.update(nan=int(values.isnan().sum()), inf=int(values.isinf().sum()))
        nonzero = values != 0
        count = int(nonzero.sum())
        self.counts.update(seen=len(x), nonzero=count)
        if rows is not None:
            rows.add(nonzero, start, reads_all=reads_all)
        if self.role is Role.MOMENT2:
            self.counts["negative"] += int((values < 0).sum())
        if self.role in _MOMENTS and count:
            self._moments(values.abs(), start)

    @property
    def is_varied(self) -> bool:
        """Whether the tensor is neither a mask nor a constant."""
        return len(self.values) >= _VARIETY

    def merge(self, other: Tally) -> None:
        """Add the counts of another slice of the same tensor."""
        self.numel += other.numel
        self.counts.update(other.counts)
        self.fits_bf16 &= other.fits_bf16
        self.values |= other.values

    def _moments(self, magnitude: torch.Tensor, start: int) -> None:
        """Count the groups that a window holds in full. The last group of the tensor may be short."""
        if self.role is Role.MOMENT2 and self.dtype is not DType.FLOAT16:
            self.counts["fp16_zero"] += int(((magnitude > 0) & (magnitude <= FP16_ZERO)).sum())
        skip = min(-start % GROUP, len(magnitude))
        stop = skip + (len(magnitude) - skip) // GROUP * GROUP
        self._scales(magnitude[skip:stop].view(-1, GROUP).amax(dim=1))
        if stop < len(magnitude) and start + len(magnitude) == self.numel:
            self._scales(magnitude[stop:].amax(dim=0, keepdim=True))

    def _scales(self, largest: torch.Tensor) -> None:
        scales = square_root(largest) if self.role is Role.MOMENT2 else largest.float()
        halves = scales.to(torch.float16)
        self.counts.update(
            groups=int((scales != 0).sum()),
            zero_scales=int(((scales > 0) & (halves == 0)).sum()),
            subnormal_scales=int(((halves > 0) & (halves.float() < _FP16_NORMAL)).sum()),
        )


_MOST_STRIDED = 16
"""The survey reads strided views of one storage up to this many times its length; it takes further ones for dense."""


@dataclass(frozen=True)
class Piece:
    """A tensor to read, over storage number ``storage``; of a slice, ``whole`` is the name of the whole tensor.

    Elements count from its first one, over ``span`` elements of its storage. ``numel`` of them are its own: a strided
    view leaves some of the span out.
    """

    name: str
    role: Role
    storage: int
    ref: TensorRef
    span: int
    numel: int
    whole: str | None = None

    @property
    def stop(self) -> int:
        """Where the span ends, in elements of the storage."""
        return self.ref.offset + self.span

    @property
    def is_dense(self) -> bool:
        """Whether the span holds nothing but the tensor."""
        return self.numel == self.span

    @property
    def tensor(self) -> str:
        """The name of the whole tensor, whichever files its slices are in."""
        return whole_name(self.name) if self.whole else self.name

    @cached_property
    def row(self) -> int:
        """Elements of one row, an index of the first dimension, if rows follow each other; 0 if there are none.

        A slice has rows only if it has them whole.
        """
        shape = self.ref.shape
        suffix = self.name[len(self.whole) :].strip("[]").split(",")[1:] if self.whole else []
        if len(shape) < 2 or not self.is_dense or any(part != ":" for part in suffix):
            return 0
        row = prod(shape[1:])
        return row if self.ref.stride[0] == row else 0

    def read(self, source: Bundle, start: int, count: int) -> torch.Tensor:
        """Its elements, flat, in their own type, among ``count`` of the span from ``start`` on. Raises InputError."""
        storage = source.storages[self.storage]
        x = as_tensor(read_elements(source, storage, self.ref.dtype, self.ref.offset + start, count), self.ref.dtype)
        if self.is_dense:
            return x
        left = torch.arange(start, start + count, device="cpu")
        inside = torch.ones(count, dtype=torch.bool, device="cpu")
        for stride, extent in _steps(self.ref):
            index = left.div(stride, rounding_mode="floor")
            inside &= index < extent
            left -= index * stride
        return x[inside & (left == 0)]


def _steps(ref: TensorRef) -> list[tuple[int, int]]:
    """Stride and size of the dimensions that lead to other elements, the largest step first."""
    return sorted(((st, n) for st, n in zip(ref.stride, ref.shape, strict=True) if st and n > 1), reverse=True)


def _is_nested(ref: TensorRef) -> bool:
    """Whether every stride is longer than all that the smaller ones reach: then no two indices share an element."""
    reach = 1
    for stride, extent in reversed(_steps(ref)):
        if stride < reach:
            return False
        reach = stride * (extent - 1) + reach
    return True


def make_pieces(plan: Plan) -> list[Piece]:
    """The tensors of a plan that add elements, in its order."""
    by_storage: dict[tuple[int, DType], list[tuple[int, Piece]]] = defaultdict(list)
    for number, (tensor, index) in enumerate(plan.tensors):
        ref, steps = tensor.ref, _steps(tensor.ref)
        if ref.dtype.is_floating and 0 not in ref.shape:
            span = 1 + sum(stride * (size - 1) for stride, size in steps)
            numel = prod(size for _, size in steps) if not is_dense(ref) and _is_nested(ref) else span
            piece = Piece(tensor.name, tensor.role, index, ref, span, numel, tensor.whole)
            by_storage[index, ref.dtype].append((number, piece))
    pieces = [numbered for views_of_storage in by_storage.values() for numbered in _without_inner(views_of_storage)]
    return [piece for _, piece in sorted(pieces, key=lambda numbered: numbered[0])]


def _without_inner(pieces: Sequence[tuple[int, Piece]]) -> Iterator[tuple[int, Piece]]:
    """The pieces of one storage, without elements that an earlier dense piece has."""
    reached = strided = 0
    most = _MOST_STRIDED * max(piece.stop for _, piece in pieces)
    for number, piece in sorted(pieces, key=lambda piece: (piece[1].ref.offset, -piece[1].span, piece[0])):
        if piece.stop <= reached:
            continue
        if not piece.is_dense:
            strided += piece.span
            if strided <= most:
                yield number, piece
                continue
        start = max(reached, piece.ref.offset)
        # What is left of the span is a dense piece.
        ref = replace(piece.ref, offset=start, shape=(piece.stop - start,), stride=(1,))
        is_whole = piece.is_dense and start == piece.ref.offset
        yield number, piece if is_whole else replace(piece, ref=ref, span=ref.numel, numel=ref.numel)
        reached = piece.stop


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


def survey(
    source: Bundle, plan: Plan, manifest: Manifest, *, full: bool, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """``flags``, sorted by kind and fraction, and ``sample``: {elements, of, full}, in elements of floating tensors.

    ``manifest`` describes the source. The argument ``full`` makes the survey read every element. The ``full`` of
    ``sample`` says whether it has: a sample of small tensors is all of them, too. Raises InputError.
    """
    pieces = make_pieces(plan)
    reading = _Survey(source, None if full else budget(len(pieces)), progress)
    reading.read_all(pieces, manifest)
    seen, total = sum(tally.counts["seen"] for tally in reading.tallies.values()), sum(piece.numel for piece in pieces)
    return {"flags": reading.flags(), "sample": {"elements": seen, "of": total, "full": seen == total}}


def survey_decoded(path: Path) -> dict[str, Any]:
    """``survey`` of every element that a ``.ckpt8`` gives back. Raises InputError."""
    with open_any(path) as source:
        # The plan is needed for tensors, roles and parameters. Its codecs do not matter: nothing is compressed.
        plan = plan_bundle(source, Policy())
        return survey(source, plan, describe(source, plan), full=True)


class _Survey:
    """Tallies of the tensors of a source. ``budget`` is the number of elements to read of each; None means all."""

    def __init__(self, source: Bundle, budget: int | None, progress: Progress) -> None:
        self._source, self._budget, self._progress = source, budget, progress
        self.tallies: dict[str, Tally] = {}
        self._parameter_of: dict[str, str] = {}
        self._rows: dict[str, Counter[str]] = defaultdict(Counter)
        self._by_digest: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)

    def read_all(self, pieces: Sequence[Piece], manifest: Manifest) -> None:
        """Read every piece once. Raises InputError."""
        by_storage = grouped((piece.storage, piece) for piece in pieces)
        done: set[int] = set()
        # The moments of a parameter come one after the other: a row is dead if all of them are zero.
        for record, shown in zip(manifest.parameters, shown_names(manifest), strict=True):
            stored = [by_storage.get(index, []) for index in record.moments.values()]
            if not stored or any(len(pieces_there) != 1 for pieces_there in stored):
                continue  # it has no moments, or they are no storages of their own
            moments = [piece for (piece,) in stored]
            name, rows = whole_name(shown["name"]), _row_counter(moments)
            for piece in moments:
                self._tally(piece, rows)
                done.add(id(piece))
                if shown["named"]:
                    self._parameter_of[piece.tensor] = name
            if rows is not None:
                # This adds: other slices of the same parameter have rows, too.
                self._rows[name].update(count=rows.count, seen=rows.seen, dead=rows.dead)
        for piece in pieces:
            if id(piece) not in done:
                self._tally(piece, None)

    def _tally(self, piece: Piece, rows: Rows | None) -> None:
        tally = Tally(piece.role, piece.ref.dtype, piece.numel)
        # Windows of a weight do not follow its rows: a copy of another shape then has the same windows and digest.
        row = 0 if tally.role is Role.WEIGHT else piece.row
        reads_all = self._budget is None or piece.numel <= self._budget
        for start, count in windows(piece.span, self._budget, row):
            tally.add(piece.read(self._source, start, count), start, rows, reads_all=reads_all)
            self._progress(count * piece.ref.dtype.itemsize)
        # Buffers are alike in every layer.
        is_buffer = piece.name.replace(":", ".").rpartition(".")[2] in BUFFERS
        can_be_tied = tally.role is Role.WEIGHT and piece.is_dense and piece.numel >= _MIN_TWIN and not is_buffer
        if can_be_tied and tally.is_varied:
            self._by_digest[piece.ref.dtype, piece.numel, tally.digest.digest()].append(piece)
        if (known := self.tallies.setdefault(piece.tensor, tally)) is not tally:
            known.merge(tally)

    def flags(self) -> list[dict[str, Any]]:
        """All flags, by kind; within a kind those with the largest fraction first."""
        flags = [
            flag
            for name, tally in self.tallies.items()
            for flag in _tensor_flags(name, tally, self._parameter_of.get(name))
        ]
        flags += [flag for name, rows in self._rows.items() for flag in _row_flags(name, **rows)]
        flags += self._twin_flags()
        return sorted(flags, key=lambda flag: (_KINDS.index(flag["kind"]), -flag["fraction"], -flag["count"]))

    def _twin_flags(self) -> Iterator[dict[str, Any]]:
        """Flags of weights whose elements that were read have one digest, of 128 bits."""
        sums: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for twins in self._by_digest.values():
            names, first = tuple(dict.fromkeys(piece.tensor for piece in twins)), twins[0]
            # Views of one storage are tied in the file, too. Slices of one tensor may repeat each other.
            if len({piece.storage for piece in twins}) > 1 and len(names) > 1:
                compared = sum(count for _, count in windows(first.span, self._budget))
                sums[names].update(compared=compared, numel=first.numel, nbytes=first.numel * first.ref.dtype.itemsize)
        for names, total in sums.items():
            compared, numel = total["compared"], total["numel"]
            sampled = compared < numel
            same = f"equal in the {compared:,} elements compared, of {numel:,}" if sampled else "byte-identical"
            message = f"{same}; stored {len(names)} times, {size(total['nbytes'])} each: tied in the model?"
            yield _flag("stored_twice", names, compared, compared, sampled=sampled, message=message)


def _row_counter(moments: list[Piece]) -> Rows | None:
    """A counter of the rows of a parameter; None where its moments have no rows, rows of other lengths, or too many."""
    shape, row = moments[0].ref.shape, moments[0].row
    if not row or not 1 < shape[0] <= _MAX_ROWS or any(piece.row != row for piece in moments):
        return None
    return Rows(shape[0], row)


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


def _tensor_flags(name: str, tally: Tally, parameter: str | None) -> Iterator[dict[str, Any]]:
    """The flags of one tensor. For optimizer state, ``parameter`` names its parameter if that is known."""
    counts = tally.counts
    seen, sampled = counts["seen"], counts["seen"] < tally.numel
    looked = f"{seen:,} elements" + (f" looked at, of {tally.numel:,}" if sampled else "")
    # In a directory both names begin with the member. Say it once.
    member, bare = split_member(parameter or "")
    whose = f"{bare if member and name.startswith(f'{member}:') else parameter}, " if parameter else ""
    is_scalar = tally.role is Role.OTHER and tally.numel == 1
    is_zero = tally.role in (Role.MOMENT1, Role.MOMENT2) and not counts["nonzero"]
    is_bf16 = tally.dtype is DType.FLOAT32 and tally.role is not Role.OTHER and tally.fits_bf16 and tally.is_varied
    scales = (
        f"in fp16 the scale would be zero for {percent(counts['zero_scales'], counts['groups'])} of the groups, "
        f"subnormal for {percent(counts['subnormal_scales'], counts['groups'])}, in {looked}"
    )
    zeroed = percent(counts["fp16_zero"], counts["nonzero"])
    flags = [
        ("nan", counts["nan"], "seen", f"{counts['nan']:,} NaN in {looked}"),
        ("inf", 0 if is_scalar else counts["inf"], "seen", f"{counts['inf']:,} Inf in {looked}"),
        ("negative_moment2", counts["negative"], "seen", f"{counts['negative']:,} below zero in {looked}"),
        ("zero_moment", seen if is_zero else 0, "seen", f"zero in all {looked}"),
        ("bf16_in_fp32", seen if is_bf16 else 0, "seen", f"bf16 values in all {looked}: half of its bytes are zero"),
        (
            "moment2_fp16_zero",
            counts["fp16_zero"],
            "nonzero",
            f"fp16 would round {zeroed} of the nonzero values to zero, in {looked}",
        ),
        ("fp16_scales", counts["zero_scales"] + counts["subnormal_scales"], "groups", scales),
    ]
    for kind, count, of, message in flags:
        if count:
            yield _flag(kind, name, count, counts[of], sampled=sampled, message=whose + message)


def _row_flags(name: str, count: int, seen: int, dead: int) -> Iterator[dict[str, Any]]:
    """The flag of a parameter with ``count`` rows, ``seen`` of them read in full, and ``dead`` of these all zero.

    There is none where all are: ``zero_moment`` says that.
    """
    if 0 < dead < seen:
        looked = f"{seen:,} rows" + (f" looked at, of {count:,}" if seen < count else "")
        yield _flag("dead_rows", name, dead, seen, sampled=seen < count, message=f"{dead:,} dead of {looked}")
