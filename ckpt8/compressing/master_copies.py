"""Which bf16 weights of a checkpoint are the rounded copies of its fp32 masters: they become references.

Where a copy may come from follows from the structure, and a few elements must agree before it is taken up; all others
are compared when it is written. A storage of copies may hold padding between and behind its tensors.

    partitions   DeepSpeed's stages 1 and 2: ``param_slice_mappings`` say where every parameter lies in the flat
                 partitions of all ranks
    alike        a tensor of as many elements: a list of masters, or the state of an optimizer
    in order     flat masters that hold the parameters one behind the other, in one group or in two, of which one has
                 the matrices and the other the vectors
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt8.checkpoint.meaning.deepspeed_partitions import Partitions, find_partitions
from ckpt8.checkpoint.tree import Checkpoint, NamedTensor, TensorRef
from ckpt8.checkpoint.vocabulary import MASTER_LISTS
from ckpt8.codecs.base import Run
from ckpt8.codecs.rounded_copy import Reference
from ckpt8.codecs.split24.reference import round_masters
from ckpt8.compressing.plan import Plan, Stream, Unit
from ckpt8.compressing.policy import Policy
from ckpt8.container.copies import CopyCount, reference_problem
from ckpt8.container.frames import bytes_of
from ckpt8.core.tensors import DType, Role

_SAMPLE = 32
"""Elements that are compared at the beginning, in the middle and at the end of a tensor."""

_MOST_PADDING = 4096
"""Elements behind the parameters of a flat group that align it."""

Members = Sequence[tuple[str, Any]]
"""Path and tree of every member."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A tensor whose elements are one run of its storage, from ``start`` on."""

    name: str
    ref: TensorRef
    stream: Stream

    @property
    def start(self) -> int:
        return self.ref.offset

    @property
    def count(self) -> int:
        return self.ref.numel


def refer_to_masters(plan: Plan, checkpoint: Checkpoint, members: Members, policy: Policy) -> None:
    """Make references of the storages of ``plan`` that hold nothing but copies of masters."""
    streams = {stream.index: stream for unit in plan.units for stream in unit.streams}
    copies, masters = [], []
    for tensor, index in plan.tensors:
        found = _tensor(tensor, streams[index])
        if found is not None and found.ref.dtype is DType.BFLOAT16:
            copies.append(found)
        elif found is not None and found.stream.codec.keeps_masters:
            masters.append(found)
    if not copies or not masters:
        return
    origins = _Origins(checkpoint, masters)
    origins.follow(copies, find_partitions(members))
    origins.match_alike(copies)
    origins.match_in_order(copies)
    references = _references(plan, checkpoint, streams, origins.runs, policy)
    plan.units = [_with_reference(unit, references) for unit in plan.units]


def _tensor(tensor: NamedTensor, stream: Stream) -> _Tensor | None:
    """A tensor that can be a copy or a master."""
    ref = tensor.ref
    usable = (
        tensor.role is stream.spec.role is Role.WEIGHT
        and ref.dtype is stream.spec.dtype
        and ref.dtype in (DType.BFLOAT16, DType.FLOAT32)
        and ref.is_contiguous
        and not (ref.conj or ref.neg)
        and ref.numel > 0
    )
    return _Tensor(tensor.name, ref, stream) if usable else None


def _with_reference(unit: Unit, references: Mapping[int, Reference]) -> Unit:
    streams = tuple(
        replace(stream, codec=references[stream.index], reason=None) if stream.index in references else stream
        for stream in unit.streams
    )
    return replace(unit, streams=streams)


class _Origins:
    """``runs`` of the copies whose masters were found, by their TensorRef."""

    def __init__(self, checkpoint: Checkpoint, masters: Sequence[_Tensor]) -> None:
        self._checkpoint = checkpoint
        self._masters = masters
        self.runs: dict[TensorRef, list[Run]] = {}

    def follow(self, copies: Iterable[_Tensor], partitions: Partitions) -> None:
        """Take the masters that a checkpoint states itself."""
        known = {master.ref: master for master in self._masters}
        for copy in copies:
            pieces = partitions.get(copy.ref, [])
            owners = [known.get(master) for master, _, _ in pieces]
            runs = [
                Run(owner.stream.index, owner.start + start, count)
                for owner, (_, start, count) in zip(owners, pieces, strict=True)
                if owner is not None and start + count <= owner.count
            ]
            if pieces and len(runs) == len(pieces):
                self._accept({copy: runs})

    def match_alike(self, copies: Iterable[_Tensor]) -> None:
        """Pair copies with masters of as many elements, some of which agree."""
        waiting = [copy for copy in copies if copy.ref not in self.runs]
        sizes = {copy.count for copy in waiting}
        found: dict[tuple[int, bytes], list[Run]] = defaultdict(list)
        for master in self._masters:
            if master.count in sizes:
                run = Run(master.stream.index, master.start, master.count)
                found[master.count, self._sample([run], master.count)].append(run)
        for copy in waiting:
            alike = found.get((copy.count, self._sample_copy(copy)), []) if found else []
            if alike:
                # Several are constant for the most part: norms and biases, one after the other on both sides.
                self.runs[copy.ref] = [alike.pop(0) if len(alike) > 1 else alike[0]]

    def match_in_order(self, copies: Iterable[_Tensor]) -> None:
        """Lay the copies one behind the other over flat masters, group by group."""
        waiting = {
            (copy.stream.index, copy.start, copy.count): copy for copy in copies if copy.ref not in self.runs
        }.values()
        flat = [master for master in self._masters if len(master.ref.shape) == 1 and _in_list(master.name)]
        if not waiting or not flat:
            return
        matrices = [copy for copy in waiting if len(copy.ref.shape) > 1]
        vectors = [copy for copy in waiting if len(copy.ref.shape) <= 1]
        for groups in ([list(waiting)], [matrices, vectors], [vectors, matrices]):
            found = _laid_over(groups, flat)
            if found and self._accept(found):
                return

    def _accept(self, found: Mapping[_Tensor, list[Run]]) -> bool:
        """Take runs of copies if all their samples agree."""
        agree = all(self._sample(runs, copy.count) == self._sample_copy(copy) for copy, runs in found.items())
        if agree:
            self.runs.update((copy.ref, runs) for copy, runs in found.items())
        return agree

    def _sample_copy(self, copy: _Tensor) -> bytes:
        size = DType.BFLOAT16.itemsize
        offset = copy.stream.storage.offset + copy.start * size
        return b"".join(self._read(offset + at * size, n * size) for at, n in _windows(copy.count))

    def _sample(self, runs: Sequence[Run], count: int) -> bytes:
        """The rounded elements of masters where ``_sample_copy`` looks at a copy."""
        codec = Reference(tuple(runs))
        found = b""
        for at, n in _windows(count):
            for run in codec.cut(at, n):
                place = self._checkpoint.storages[run.storage or 0].offset + run.start * DType.FLOAT32.itemsize
                content = bytearray(self._read(place, run.length * DType.FLOAT32.itemsize))
                rounded = round_masters(torch.frombuffer(content, dtype=torch.float32))
                found += _bytes(rounded)
        return found

    def _read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self._checkpoint.read_into(offset, memoryview(buffer))
        return bytes(buffer)


def _bytes(x: torch.Tensor) -> bytes:
    return bytes(bytes_of(x))


def _windows(count: int) -> Iterator[tuple[int, int]]:
    """Start and length of what is compared of ``count`` elements."""
    length = min(_SAMPLE, count)
    return ((start, length) for start in sorted({0, (count - length) // 2, count - length}))


def _in_list(name: str) -> bool:
    return any(component in MASTER_LISTS for component in re.split(r"[.:]", name))


def _natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by value: rank 10 behind rank 2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _laid_over(groups: Sequence[Sequence[_Tensor]], flat: Sequence[_Tensor]) -> dict[_Tensor, list[Run]]:
    """Runs of every tensor of ``groups`` where the flat masters are as long as these; empty where they are not.

    A member of the checkpoint has one flat master for every group: the share of one rank.
    """
    shares: dict[str, list[_Tensor]] = defaultdict(list)
    for master in flat:
        shares[master.name.partition(":")[0] if ":" in master.name else ""].append(master)
    if any(len(share) != len(groups) for share in shares.values()):
        return {}
    found: dict[_Tensor, list[Run]] = {}
    for number, group in enumerate(groups):
        ranks = [shares[member][number] for member in sorted(shares, key=_natural)]
        behind = sum(rank.count for rank in ranks) - sum(copy.count for copy in group)
        if not 0 <= behind < _MOST_PADDING:
            return {}
        line = Reference(tuple(Run(rank.stream.index, rank.start, rank.count) for rank in ranks))
        at = 0
        for copy in group:
            found[copy] = list(line.cut(at, copy.count))
            at += copy.count
    return found


def _references(
    plan: Plan,
    checkpoint: Checkpoint,
    streams: Mapping[int, Stream],
    runs: Mapping[TensorRef, list[Run]],
    policy: Policy,
) -> dict[int, Reference]:
    """References by storage, for those that are copies throughout, in the order of the checkpoint."""
    views: dict[int, list[NamedTensor]] = defaultdict(list)
    for tensor, index in plan.tensors:
        views[index].append(tensor)
    copied = CopyCount()

    def numel_of(index: int) -> int | None:
        return streams[index].spec.numel

    found = {}
    for index in sorted({index for tensor, index in plan.tensors if tensor.ref in runs}):
        if policy.has_rule([view.name for view in views[index]]):
            continue
        whole = _whole(streams[index], [view.ref for view in views[index]], runs, checkpoint)
        codec = Reference(tuple(whole or ()))
        if whole and reference_problem(codec, numel_of) is None and copied.add(codec, numel_of):
            found[index] = codec
    return found


def _whole(
    stream: Stream, views: Iterable[TensorRef], runs: Mapping[TensorRef, list[Run]], checkpoint: Checkpoint
) -> list[Run] | None:
    """The runs of a whole storage from those of its tensors; None where some of it is not a copy."""
    whole: list[Run] = []
    reached, numel = 0, stream.spec.numel
    for ref in sorted(views, key=lambda ref: (ref.offset, ref not in runs)):
        stop = ref.offset + ref.span
        if stop <= reached or not ref.span:
            continue
        if ref not in runs or ref.offset < reached:
            return None
        whole += [*_padding(stream, reached, ref.offset, checkpoint), *runs[ref]]
        reached = stop
    whole += _padding(stream, reached, numel, checkpoint)
    return _joined(whole)


def _padding(stream: Stream, start: int, stop: int, checkpoint: Checkpoint) -> list[Run]:
    """A run of what stands first between two tensors, if there is anything."""
    if start == stop:
        return []
    bits = bytearray(DType.BFLOAT16.itemsize)
    checkpoint.read_into(stream.storage.offset + start * len(bits), memoryview(bits))
    return [Run(None, int.from_bytes(bits, "little"), stop - start)]


def _joined(runs: Iterable[Run]) -> list[Run]:
    """The same elements in as few runs as possible."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and run.storage is not None and (last.storage, last.start + last.length) == (run.storage, run.start):
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return joined
