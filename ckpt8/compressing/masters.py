"""Copies of weights: averages and other copies that may be as far off as the weights, and rounded copies of masters.

The bf16 and fp16 weights of a checkpoint that are rounded copies of its fp32 masters become references. The structure
of the checkpoint proposes the master of a copy, and a few elements must agree. The encoder then compares every element.
A storage of copies may hold padding between its tensors and after them.

    partitions   DeepSpeed's stages 1 and 2: ``param_slice_mappings`` place every parameter in the flat partitions of
                 all ranks
    alike        masters that are tensors of as many elements: in a list, or in the state of an optimizer
    in order     flat masters that hold the parameters one after the other: all in one group, or the matrices in one
                 and the vectors in another. Under an unknown key they are longer than every copy
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt8.checkpoint.meaning.names import home_of
from ckpt8.checkpoint.meaning.parameter_names import split_member
from ckpt8.checkpoint.meaning.parameters import Partitions, find_partitions, slice_twins
from ckpt8.checkpoint.meaning.state_dicts import twins
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import Checkpoint, Labelled, NamedTensor, TensorRef, iter_leaves
from ckpt8.checkpoint.vocabulary import MASTER_LISTS
from ckpt8.codecs.base import Run
from ckpt8.codecs.rounded_copy import HalfReference, Reference
from ckpt8.compressing.plan import Plan, Stream, read_elements, views_of
from ckpt8.compressing.policy import Policy
from ckpt8.container.checks import ReferenceCheck
from ckpt8.core.arrays import Array, rounded
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import natural_order


def copies_of_weights(plan: Plan, bundle: Bundle) -> dict[int, int]:
    """The stream of the weight whose step the stream of a copy takes, by the stream of the copy.

    Units have their steps: see ``attach_steps``. A copy has the name of its weight in another model, and as many
    elements. Rounded copies of masters follow these, and are left out; so are copies of several weights with steps.
    """
    streams, units = plan.streams, [unit for unit in plan.units if unit.parameter]
    stepped = {unit.weight for unit in units}
    taken = {stream.index for unit in units for stream in unit.streams}
    weights: dict[int, set[int]] = defaultdict(set)
    for one, other in _twins(bundle, {stream.storage.key: stream.index for stream in streams}):
        weight = plan.masters.get(one, one)
        is_copy = streams[other].spec.role is Role.WEIGHT and streams[other].codec.copied is None
        if weight in stepped and other not in taken and is_copy:
            weights[other].add(weight)
    return {
        copy: weight
        for copy, weights_of_copy in weights.items()
        for weight in weights_of_copy
        if len(weights_of_copy) == 1 and streams[copy].spec.numel == streams[weight].spec.numel
    }


def _twins(bundle: Bundle, index_of: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """The streams of all weights that several models in a folder have, in pairs; those of one rank, where ranks are."""
    folders: dict[Hashable, list[tuple[int, object]]] = defaultdict(list)
    for number, member in enumerate(bundle.opened):
        tree = member.checkpoint.tree
        if not isinstance(tree, Labelled):
            folders[home_of(member.path, tree)].append((number, tree))
    for files in folders.values():
        homes = {id(ref): number for number, tree in files for _, ref in iter_leaves(tree)}
        for pair in twins([tree for _, tree in files]):
            if all(id(ref) in homes for ref in pair):
                one, other = (index_of[bundle.key(ref.key, homes[id(ref)])] for ref in pair)
                yield one, other
    for one_key, other_key in slice_twins(bundle.opened, bundle.key):
        yield index_of[one_key], index_of[other_key]


_REFERENCES = {DType.BFLOAT16: Reference, DType.FLOAT16: HalfReference}
"""The codec of a copy by its element type."""

_SAMPLE = 32
"""Elements to compare at the beginning, in the middle and at the end of a tensor."""

_MOST_PADDING = 4096
"""A flat group has fewer elements of alignment than these after its parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A tensor whose elements are one run of its storage."""

    name: str
    ref: TensorRef
    stream: Stream

    @property
    def run(self) -> Run:
        return Run(self.stream.index, self.ref.offset, self.ref.numel)


def refer_to_masters(plan: Plan, source: Checkpoint, members: Sequence[tuple[str, Any]], policy: Policy) -> None:
    """Turn the storages of ``plan`` that hold nothing but copies of masters into references.

    ``members`` are path and tree of every member.
    """
    if not any(tensor.ref.dtype in _REFERENCES for tensor, _ in plan.tensors):
        return
    streams = plan.by_index
    copies, masters = [], []
    for tensor, index in plan.tensors:
        candidate = _tensor(tensor, streams[index])
        if candidate is not None and candidate.ref.dtype in _REFERENCES:
            copies.append(candidate)
        elif candidate is not None and candidate.stream.codec.keeps_masters:
            masters.append(candidate)
    if not copies or not masters:
        return
    origins = _Origins(source, masters)
    origins.follow(copies, find_partitions(members))
    origins.match_alike(copies)
    origins.match_in_order(copies)
    views = views_of(plan.tensors)
    copied = _copied_storages(views, source, streams, origins.runs)
    whole = {index: _one_master(codec, streams) for index, codec in copied.items()}
    plan.masters = {index: master for index, master in whole.items() if master is not None}
    check = ReferenceCheck(lambda index, _: streams[index].spec.numel)
    for index, codec in copied.items():
        # The others have rules, or are copies too many.
        if not policy.has_rule([view.name for view in views[index]]) and check.problem(codec) is None:
            streams[index] = replace(streams[index], codec=codec, reason=None)


def _tensor(tensor: NamedTensor, stream: Stream) -> _Tensor | None:
    """The tensor if it can be a copy or a master, else None."""
    ref = tensor.ref
    usable = (
        tensor.role is stream.spec.role is Role.WEIGHT
        and ref.dtype is stream.spec.dtype
        and ref.dtype in (*_REFERENCES, DType.FLOAT32)
        and ref.is_contiguous
        and not (ref.conj or ref.neg)
        and ref.numel > 0
    )
    return _Tensor(tensor.name, ref, stream) if usable else None


class _Origins:
    """Finds the masters of copies. ``runs`` are those that it found, by the TensorRef of the copy."""

    def __init__(self, source: Checkpoint, masters: Sequence[_Tensor]) -> None:
        self._source = source
        self._masters = masters
        self.runs: dict[TensorRef, list[Run]] = {}

    def follow(self, copies: Iterable[_Tensor], partitions: Partitions) -> None:
        """Accept the masters that the checkpoint itself states."""
        known = {master.ref: master for master in self._masters}
        for copy in copies:
            pieces = partitions.get(copy.ref, [])
            owners = [known.get(master) for master, _, _ in pieces]
            runs = [
                owner.run._replace(start=owner.ref.offset + start, length=count)
                for owner, (_, start, count) in zip(owners, pieces, strict=True)
                if owner is not None and start + count <= owner.ref.numel
            ]
            if pieces and len(runs) == len(pieces):
                self._accept({copy: runs})

    def match_alike(self, copies: Iterable[_Tensor]) -> None:
        """Pair copies with masters of as many elements whose samples agree."""
        waiting = [copy for copy in copies if copy.ref not in self.runs]
        sizes = {(copy.ref.numel, copy.ref.dtype) for copy in waiting}
        by_sample = grouped(
            ((master.ref.numel, dtype, self._sample([master.run], dtype)), master.run)
            for master in self._masters
            for dtype in _REFERENCES
            if (master.ref.numel, dtype) in sizes
        )
        for copy in waiting:
            alike = by_sample.get((copy.ref.numel, copy.ref.dtype, self._sample_of_copy(copy)), []) if by_sample else []
            if alike:
                # Several masters with one sample are mostly constant norms and biases, in the order of their copies.
                self.runs[copy.ref] = [alike.pop(0) if len(alike) > 1 else alike[0]]

    def match_in_order(self, copies: Iterable[_Tensor]) -> None:
        """Lay the copies one after the other over flat masters, group by group."""
        waiting = {copy.run: copy for copy in copies if copy.ref not in self.runs}.values()
        lines = [master for master in self._masters if len(master.ref.shape) == 1]
        listed = [line for line in lines if not MASTER_LISTS.isdisjoint(re.split(r"[.:]", line.name))]
        longest = max((copy.ref.numel for copy in waiting), default=0)
        flat = listed or [line for line in lines if line.ref.numel > longest]
        if not waiting or not flat:
            return
        matrices = [copy for copy in waiting if len(copy.ref.shape) > 1]
        vectors = [copy for copy in waiting if len(copy.ref.shape) <= 1]
        for groups in ([list(waiting)], [matrices, vectors], [vectors, matrices]):
            runs = _lay_over(groups, flat)
            if runs and self._accept(runs):
                return

    def _accept(self, runs_of: Mapping[_Tensor, list[Run]]) -> bool:
        """Keep the runs of copies if all their samples agree; return whether they do."""
        agree = all(self._sample(runs, copy.ref.dtype) == self._sample_of_copy(copy) for copy, runs in runs_of.items())
        if agree:
            self.runs.update((copy.ref, runs) for copy, runs in runs_of.items())
        return agree

    def _sample(self, runs: Sequence[Run], dtype: DType) -> bytes:
        """A few of the elements of ``runs`` over masters, rounded to ``dtype``."""
        elements = b""
        codec = Reference(tuple(runs))
        for at, n in _windows(codec.numel):
            for run in codec.cut(at, n):
                elements += rounded(self._elements(run, DType.FLOAT32), dtype).tobytes()
        return elements

    def _sample_of_copy(self, copy: _Tensor) -> bytes:
        """The elements of a copy at the places where ``_sample`` reads its master."""
        codec = Reference((copy.run,))
        runs = (run for at, n in _windows(codec.numel) for run in codec.cut(at, n))
        return b"".join(self._elements(run, copy.ref.dtype).tobytes() for run in runs)

    def _elements(self, run: Run, dtype: DType) -> Array:
        return read_elements(self._source, self._source.storages[run.storage or 0], dtype, run.start, run.length)


def _windows(count: int) -> Iterator[tuple[int, int]]:
    """Start and length of the samples of ``count`` elements."""
    length = min(_SAMPLE, count)
    return ((start, length) for start in sorted({0, (count - length) // 2, count - length}))


def _lay_over(groups: Sequence[Sequence[_Tensor]], flat: Sequence[_Tensor]) -> dict[_Tensor, list[Run]]:
    """The runs of every tensor of ``groups`` over the flat masters; empty where these have another length.

    Each member of the checkpoint holds the share of one rank: one flat master for every group.
    """
    shares = grouped((split_member(master.name)[0], master) for master in flat)
    if any(len(share) != len(groups) for share in shares.values()):
        return {}
    runs: dict[_Tensor, list[Run]] = {}
    for number, group in enumerate(groups):
        ranks = [shares[member][number] for member in sorted(shares, key=natural_order)]
        padding = sum(rank.ref.numel for rank in ranks) - sum(copy.ref.numel for copy in group)
        if not 0 <= padding < _MOST_PADDING:
            return {}
        line = Reference(tuple(rank.run for rank in ranks))
        at = 0
        for copy in group:
            runs[copy] = list(line.cut(at, copy.ref.numel))
            at += copy.ref.numel
    return runs


def _copied_storages(
    views: Mapping[int, Sequence[NamedTensor]],
    source: Checkpoint,
    streams: Mapping[int, Stream],
    runs: Mapping[TensorRef, list[Run]],
) -> dict[int, Reference]:
    """The storages that hold nothing but copies, by their index, as references; ``views`` are their tensors."""
    references = {}
    for index in sorted(views):
        refs = [view.ref for view in views[index]]
        if any(ref in runs for ref in refs) and (whole := _runs_of_storage(streams[index], refs, runs, source)):
            references[index] = _REFERENCES[streams[index].spec.dtype](tuple(whole))
    return references


def _one_master(codec: Reference, streams: Mapping[int, Stream]) -> int | None:
    """The master that a copy has all elements of, in their order; None where it is a copy of parts or of several."""
    (storage, start, length), *others = codec.runs
    if others or storage is None or start or length != streams[storage].spec.numel:
        return None
    return storage


def _runs_of_storage(
    stream: Stream, views: Iterable[TensorRef], runs: Mapping[TensorRef, list[Run]], source: Checkpoint
) -> list[Run] | None:
    """The runs of a whole storage, put together from those of its tensors; None where a part is no copy."""
    whole: list[Run] = []
    reached, numel = 0, stream.spec.numel
    for ref in sorted(views, key=lambda ref: (ref.offset, ref not in runs)):
        stop = ref.offset + ref.span
        if stop <= reached or not ref.span:
            continue
        if ref not in runs or ref.offset < reached:
            return None
        whole += [*_padding(stream, reached, ref.offset, source), *runs[ref]]
        reached = stop
    whole += _padding(stream, reached, numel, source)
    return _join_runs(whole)


def _padding(stream: Stream, start: int, stop: int, source: Checkpoint) -> list[Run]:
    """The elements between two tensors as a run that repeats the first of them; nothing where there are none."""
    if start == stop:
        return []
    (bits,) = read_elements(source, stream.storage, DType.UINT16, start, 1).tolist()
    return [Run(None, bits, stop - start)]


def _join_runs(runs: Iterable[Run]) -> list[Run]:
    """Runs joined where one continues the other."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and run.storage is not None and (last.storage, last.start + last.length) == (run.storage, run.start):
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return joined
