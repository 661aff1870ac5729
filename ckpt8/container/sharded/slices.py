"""The slices that a container states: which part of which distributed tensor each of its tensors is."""

from __future__ import annotations

from ckpt8.container.manifest import Manifest, TensorRecord

SliceKey = tuple[str, tuple[int, ...]]
"""The name of a tensor in the state dict of all ranks, and the offsets of a part of it."""


def slices_of(manifest: Manifest) -> dict[SliceKey, TensorRecord]:
    """The tensors of a container that are slices, by what they are slices of; none in most containers."""
    return {(each.name, tuple(each.offsets)): manifest.tensors[each.tensor] for each in manifest.slices}
