"""Finds the storages of an earlier container that hold earlier states of those of a plan."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict

from ckpt8.compressing.plan import Plan
from ckpt8.compressing.policy import Policy
from ckpt8.container.manifest import Manifest
from ckpt8.core.tensors import Role

_STEP = re.compile(r"\bglobal_step\d+")
"""DeepSpeed names the folder in a checkpoint by its step."""

Partners = Mapping[int, int]
"""The index of a storage in the base, by that of a stream."""

_UNBOUND = (Role.OTHER, None)


def find_partners(plan: Plan, base: Manifest) -> Partners:
    """The partners of the streams of ``plan`` among the storages of ``base``.

    They have one name, type, size and role, and tensors of the same names and places; storages of no tensors have none.
    The number of a step in a name does not count.
    """
    own, other = defaultdict(set), defaultdict(set)
    for tensor, index in plan.tensors:
        ref = tensor.ref
        own[index].add((_timeless(tensor.name), ref.dtype, ref.offset, *ref.shape, *ref.stride))
    for view in base.tensors:
        other[view.storage].add((_timeless(view.name), view.dtype, view.offset, *view.shape, *view.stride))
    named = {
        (_timeless(each.name), each.dtype, each.numel, each.role): index for index, each in enumerate(base.storages)
    }
    found = {}
    for stream in plan.streams:
        spec = stream.spec
        partner = named.get((_timeless(spec.name), spec.dtype, spec.numel, spec.role))
        if partner is not None and stream.index in own and own[stream.index] == other[partner]:
            found[stream.index] = partner
    return found


def fits(plan: Plan, policy: Policy, base: Manifest) -> bool:
    """Whether ``base`` holds an earlier state of the weights and moments of ``plan``, compressed as ``policy`` asks.

    Other tensors may come and go: Lightning names scores after the files that had them.
    """
    budget = asdict(policy.budget) if policy.budget else None
    if (base.preset, base.rules, base.budget) != (policy.preset, [rule.text for rule in policy.rules], budget):
        return False
    roles = {stream.index: stream.spec.role for stream in plan.streams}
    own, other = set(), set()
    for tensor, index in plan.tensors:
        if roles.get(index) not in _UNBOUND:
            own.add((_timeless(tensor.name), tensor.ref.dtype, *tensor.ref.shape))
    for view in base.tensors:
        if base.storages[view.storage].role not in _UNBOUND:
            other.add((_timeless(view.name), view.dtype, *view.shape))
    return own == other


def _timeless(name: str) -> str:
    return _STEP.sub("global_step", name)
