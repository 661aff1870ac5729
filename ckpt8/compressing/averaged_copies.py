"""Averages and other copies of the weights that an optimizer steps: they may be as far off as these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping

from ckpt8.checkpoint.meaning.dcp_pairs import slice_twins
from ckpt8.checkpoint.meaning.rank_files import home_of
from ckpt8.checkpoint.meaning.twins import twins
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import Labelled
from ckpt8.checkpoint.walk import iter_leaves
from ckpt8.compressing.plan import Plan, Stream
from ckpt8.core.tensors import Role


def copies_of_weights(plan: Plan, bundle: Bundle) -> dict[int, int]:
    """The stream of the weight whose step the stream of a copy takes, by the stream of the copy.

    Units have their steps: see ``optimizer_steps``. A copy has the name of its weight in another model, and as many
    elements. Rounded copies of masters follow these, and are left out; so are copies of several weights with steps.
    """
    streams = plan.streams
    stepped = {unit.parameter.step.weight for unit in plan.units if unit.parameter and unit.parameter.step}
    taken = {stream.index for unit in plan.units if unit.parameter for stream in unit.streams}
    weights: dict[int, set[int]] = defaultdict(set)
    for one, other in _twins(bundle, {stream.storage.key: stream.index for stream in streams}):
        weight = plan.masters.get(one, one)
        if weight in stepped and other not in taken and _is_free(streams[other]):
            weights[other].add(weight)
    return {
        copy: weight
        for copy, found in weights.items()
        for weight in found
        if len(found) == 1 and streams[copy].spec.numel == streams[weight].spec.numel
    }


def _twins(bundle: Bundle, index_of: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """The streams of all weights that several models in a folder have, in pairs; those of one rank, where ranks are."""
    folders: dict[Hashable, list[tuple[int, object]]] = defaultdict(list)
    for number, member in enumerate(bundle.found):
        tree = member.checkpoint.tree
        if not isinstance(tree, Labelled):
            folders[home_of(member.path, tree)].append((number, tree))
    for files in folders.values():
        homes = {id(ref): number for number, tree in files for _, ref in iter_leaves(tree)}
        for pair in twins([tree for _, tree in files]):
            if all(id(ref) in homes for ref in pair):
                one, other = (index_of[bundle.key(ref.key, homes[id(ref)])] for ref in pair)
                yield one, other
    for one_key, other_key in slice_twins(bundle.found, bundle.key):
        yield index_of[one_key], index_of[other_key]


def _is_free(stream: Stream) -> bool:
    return stream.spec.role is Role.WEIGHT and stream.codec.copied is None
