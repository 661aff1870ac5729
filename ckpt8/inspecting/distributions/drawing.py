"""Counts one unit: a weight, or the moments of one parameter together with the update that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.codecs import Codec, config_of
from ckpt8.codecs.error_measures import root
from ckpt8.compressing.plan import Parameter
from ckpt8.container.facts import codec_name
from ckpt8.core.tensors import Parts, Role, TensorSpec
from ckpt8.inspecting.distributions.counts import Codes, Drawn, Pair

_COUNTED = (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2)


def is_counted(spec: TensorSpec, codec: Codec) -> bool:
    """Whether a storage is part of the distributions: floating weights and moments, without rounded copies."""
    return spec.role in _COUNTED and spec.dtype.is_plane_float and spec.numel > 0 and codec.copied is None


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one storage: as they were, if that is known, as they come back, and the parts they were stored as."""

    index: int
    role: Role
    codec: Codec
    before: torch.Tensor | None
    after: torch.Tensor
    parts: Parts


def draw(pieces: Sequence[Piece], parameter: Parameter | None) -> Drawn:
    """Count the pieces of one unit."""
    drawn = Drawn(sum(piece.after.numel() for piece in pieces))
    for piece in pieces:
        drawn.add(piece.role.value, Pair.of(piece.before, piece.after))
        found = _codes(piece)
        if found is not None:
            part, codes = found
            key = (piece.role.value, codec_name(config_of(piece.codec)), part)
            drawn.merge(Drawn(codes={key: codes}))
    if parameter is not None and draws_updates(parameter.rule):
        by_index = {piece.index: piece for piece in pieces}
        after = _update(parameter, {index: piece.after for index, piece in by_index.items()})
        originals = {index: piece.before for index, piece in by_index.items() if piece.before is not None}
        before = _update(parameter, originals) if len(originals) == len(by_index) else None
        drawn.add("update", Pair.of(before, after))
    return drawn


def draws_updates(rule: UpdateRule | None) -> bool:
    """Whether the update of an element follows from its own moments: not so for CAME's factored statistics."""
    return rule is not None and rule.kind != "came"


def _codes(piece: Piece) -> tuple[str, Codes] | None:
    codes = piece.codec.codes
    return None if codes is None else (codes.part, Codes.of(piece.parts[codes.part], codes.lowest, codes.highest))


def _update(parameter: Parameter, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if parameter.rule is None:
        raise AssertionError("updates are drawn only where draws_updates holds")
    moment = values[parameter.moments["moment1"]].float()
    slot = parameter.denominator
    divisor = None if slot is None else root(values[parameter.moments[slot]].float())
    return parameter.rule.apply(moment, divisor, None) * parameter.rule.factor
