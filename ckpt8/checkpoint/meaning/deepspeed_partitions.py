"""DeepSpeed's flat partitions, stages 1 and 2: where the masters of every parameter of the model files lie.

mp_rank_00_model_states.pt                        module: {name: tensor}
zero_pp_rank_1_mp_rank_00_optim_states.pt         optimizer_state_dict: {
    single_partition_of_fp32_groups: [flat],      one for each parameter group, the share of one rank
    param_slice_mappings: [{name: {start, numel}}]}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt8.checkpoint.tree import Inert, TensorRef

Piece = tuple[TensorRef, int, int]
"""``count`` elements of a flat master from ``start`` on: master, start, count."""

Partitions = Mapping[TensorRef, list[Piece]]
"""The pieces of a parameter of a model file, in order."""

_MODEL = re.compile(r"(?:.*/)?mp_rank_([\d_]+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_([\d_]+)_optim_states\.pt")


def find_partitions(members: Iterable[tuple[str, Any]]) -> Partitions:
    """The pieces of all parameters whose numbers of elements agree, by path and tree of the members."""
    models: dict[tuple[str, str], Mapping[Any, Any]] = {}
    shares: dict[tuple[str, str], list[tuple[int, Mapping[Any, Any]]]] = defaultdict(list)
    for path, tree in members:
        folder = path.rpartition("/")[0]
        if (match := _MODEL.fullmatch(path)) and isinstance(module := _at(tree, "module"), dict):
            models[folder, match[1]] = module
        elif (match := _OPTIMIZER.fullmatch(path)) and isinstance(state := _at(tree, "optimizer_state_dict"), dict):
            shares[folder, match[2]].append((int(match[1]), state))
    found: dict[TensorRef, list[Piece]] = {}
    for place, module in models.items():
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for _, state in sorted(shares[place], key=lambda share: share[0]):
            for name, piece in _pieces(state):
                pieces[name].append(piece)
        found.update(
            (ref, pieces[name])
            for name, ref in module.items()
            if isinstance(ref, TensorRef) and sum(count for _, _, count in pieces.get(name, [])) == ref.numel
        )
    return found


def _at(tree: Any, key: str) -> Any:
    return tree.get(key) if isinstance(tree, dict) else None


def _pieces(state: Mapping[Any, Any]) -> Iterator[tuple[str, Piece]]:
    """The names and pieces of one rank, group by group."""
    flats, mappings = state.get("single_partition_of_fp32_groups"), state.get("param_slice_mappings")
    if not isinstance(flats, list) or not isinstance(mappings, list):
        return
    for flat, mapping in zip(flats, mappings, strict=False):
        if not isinstance(flat, TensorRef) or not isinstance(mapping, dict):
            continue
        for name, address in mapping.items():
            match address:
                case Inert(state={"start": int(start), "numel": int(count)}) if start >= 0 and count > 0:
                    yield name, (flat, start, count)
