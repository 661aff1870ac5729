"""Plans a whole source, member by member: roles, codecs of the policy, copies, budget, companions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache

import numpy as np

from ckpt8.checkpoint.meaning.names import NamesFromWeights
from ckpt8.checkpoint.meaning.parameter_names import SLICE
from ckpt8.checkpoint.meaning.parameters import Universal, joint_parameters
from ckpt8.checkpoint.meaning.roles import Names, Structure, classify, short_name, unique_name
from ckpt8.checkpoint.meaning.state_dicts import evident_weights
from ckpt8.checkpoint.sources.bundle import Bundle, WithSkeleton
from ckpt8.checkpoint.tree import Checkpoint, NamedTensor, StorageInfo, TensorRef, is_dense
from ckpt8.compressing.masters import copies_of_weights, refer_to_masters
from ckpt8.compressing.parameters import attach_steps, find_parameters
from ckpt8.compressing.plan import Measured, Parameter, Plan, Stream, Unit, read_elements, views_of
from ckpt8.compressing.policy import LOSSLESS, Policy
from ckpt8.compressing.spending import spend
from ckpt8.container.manifest import SKELETON
from ckpt8.container.steps import COPY
from ckpt8.core.closing import without_collection
from ckpt8.core.tensors import DType, Role, TensorSpec


def plan_bundle(bundle: Bundle, policy: Policy, measured: Measured | None = None) -> Plan:
    """The plan of all members, one after the other. Raises UsageError for a rule that does not fit, InputError.

    ``measured`` is that of ``spend``.
    """
    return plan_policies(bundle, [policy], measured)[0]


@without_collection()
def plan_policies(bundle: Bundle, policies: Sequence[Policy], measured: Measured | None = None) -> list[Plan]:
    """The plan of all members under each policy. Raises as ``plan_bundle``."""
    trees = [(member.path, member.checkpoint.tree) for member in bundle.members]
    first = plan_members(bundle, policies[0])
    views = views_of(first.tensors)
    plans: list[Plan] = []
    stepped: Plan | None = None
    for policy in policies:
        plan = Plan(dict(first.by_index), first.parameters, first.tensors, first.chosen)
        for index in first.chosen if policy is not policies[0] else ():
            plan.by_index[index] = choose(plan.by_index[index], views[index], policy)
        refer_to_masters(plan, bundle, trees, policy)
        if plan.is_lossy or policy.budget is not None:
            if stepped is None:
                attach_steps(plan, bundle)
                plan.copies = copies_of_weights(plan, bundle) if _has_other_weights(plan) else {}
                stepped = plan
            # They are the same under every policy that is not lossless.
            plan.parameters, plan.copies, plan.stepless = stepped.parameters, stepped.copies, stepped.stepless
        if policy.budget is not None:
            spend(plan, bundle, policy, policy.budget, measured)
        else:
            _note_copies(plan)
        set_companions(plan)
        plans.append(plan)
    return plans


def _has_other_weights(plan: Plan) -> bool:
    """Whether a policy chooses codecs for weights that no step moves."""
    moved = {parameter.step.weight for parameter in plan.parameters if parameter.step}
    return any(plan.by_index[index].spec.role is Role.WEIGHT for index in plan.chosen - moved)


def _note_copies(plan: Plan) -> None:
    """Note of lossy copies of weights that no optimizer updates them: their error is in no figure in steps."""
    for index in plan.copies:
        stream = plan.by_index[index]
        if stream.lossy and stream.reason is None:
            plan.by_index[index] = replace(stream, reason=COPY)


def plan_members(bundle: Bundle, policy: Policy) -> Plan:
    """The plan of all members, which leaves open which storages are copies of others. Raises as ``plan_bundle``."""
    members = [(member.path, member.checkpoint) for member in bundle.members]
    names = Names()
    plan = Plan()
    weight_names, universal = NamesFromWeights(members), Universal(members)
    beside = cache(lambda: evident_weights(*(checkpoint.tree for _, checkpoint in members)))
    for member in bundle.members:
        names.prefix = "" if bundle.directory is None else f"{member.path}:"
        own = make_plan(member.checkpoint, policy, names, universal.role(member.path), bundle, member.first, beside)
        if own.parameters:
            better = weight_names.of_member(member.path).items()
            name_of = {names.prefix + place: short_name(names.prefix + name) for place, name in better}
            plan.parameters += [_renamed(parameter, name_of) for parameter in own.parameters]
        plan.by_index |= own.by_index
        plan.tensors += own.tensors
        plan.chosen |= own.chosen
    joint = [*joint_parameters(bundle.opened), *universal.parameters()]
    if joint:
        by_key = {stream.storage.key: stream for stream in plan.streams}
        plan.parameters = find_parameters(bundle, joint, by_key, views_of(plan.tensors)) + plan.parameters
    return plan


def _renamed(parameter: Parameter, name_of: Mapping[str, str]) -> Parameter:
    """The parameter with a better name if ``name_of`` has one for it; the place of a slice stays."""
    bare = SLICE.sub("", parameter.name)
    return replace(parameter, name=name_of[bare] + parameter.name[len(bare) :]) if bare in name_of else parameter


_MOST_PADDING = 4096
"""The most elements in a gap between tensors that counts as alignment."""


def make_plan(
    checkpoint: Checkpoint | WithSkeleton,
    policy: Policy,
    names: Names | None = None,
    role: Role | None = None,
    bundle: Checkpoint | None = None,
    first: int = 0,
    beside: Callable[[], Set[int]] = frozenset,
) -> Plan:
    """Classify the tensors of a checkpoint, choose codecs, group moments into units; add the skeleton if it has one.

    With a ``role`` all tensors get it: the checkpoint is one file of several, whose tree does not tell. With a
    ``bundle`` the checkpoint is one of its members, and the plan is in terms of the bundle, in which the storages of
    the checkpoint have the indices from ``first`` on. ``beside`` is that of ``classify``.
    """
    names, source = names or Names(), bundle or checkpoint
    structure = classify(checkpoint.tree, names, role, beside)
    storages = checkpoint.source_storages if isinstance(checkpoint, WithSkeleton) else checkpoint.storages
    index_of = {storage.key: index for index, storage in enumerate(storages, first)}
    tensors = [(tensor, index_of[tensor.ref.key]) for tensor in structure.tensors]
    views = views_of(tensors)
    chosen: set[int] = set()
    by_key = {}
    for key, index in index_of.items():
        by_key[key], is_free = _stream(index, key, views[index], structure, names, source)
        if is_free:
            chosen.add(index)
            by_key[key] = choose(by_key[key], views[index], policy)
    parameters = find_parameters(source, structure.parameters, by_key, views)
    by_index = {stream.index: stream for stream in by_key.values()}
    if isinstance(checkpoint, WithSkeleton):
        index = first + len(storages)
        name = unique_name(names.prefix + SKELETON, names.storages)
        spec = TensorSpec(name, Role.OTHER, DType.UINT8, (checkpoint.skeleton.nbytes,))
        by_index[index] = Stream(index, spec, source.storages[index], LOSSLESS, checkpoint.reason)
    return Plan(by_index, parameters, tensors, chosen)


def _stream(
    index: int,
    key: str,
    views: list[NamedTensor],
    structure: Structure,
    names: Names,
    source: Checkpoint,
) -> tuple[Stream, bool]:
    """The stream of storage ``index`` of ``source``, lossless, and whether a policy may choose another codec.

    ``structure`` knows the storage as ``key``.
    """
    storage = source.storages[index]
    name = unique_name(views[0].name if views else f"{names.prefix}storage:{key}", names.storages)
    dtypes = {view.ref.dtype for view in views} or {storage.dtype}
    dtype = dtypes.pop() if len(dtypes) == 1 else DType.UINT8
    plain_bytes = not dtypes and not dtype.is_plane_float
    if not dtype.is_plane_float or storage.nbytes % dtype.itemsize:
        dtype = DType.UINT8  # kept as bytes; torch here may not even know the type
    roles = {view.role for view in views}
    role = roles.pop() if len(roles) == 1 else Role.OTHER
    spec = TensorSpec(name, role, dtype, (storage.nbytes // dtype.itemsize,))
    if plain_bytes:
        return Stream(index, spec, storage, LOSSLESS), False
    refs = [view.ref for view in views]
    fills = len(refs) == 1 and refs[0].nbytes == storage.nbytes and is_dense(refs[0])
    reason = None
    if key in structure.opaque:
        reason = "used by something other than a tensor"
    elif roles:
        reason = "shared by tensors of several roles"
    elif not fills and not all(_is_padding(source, storage, dtype, gap) for gap in _gaps(spec.numel, refs)):
        reason = "not fully covered by its tensors"
    return Stream(index, spec, storage, LOSSLESS, reason), reason is None


def choose(stream: Stream, views: Sequence[NamedTensor], policy: Policy) -> Stream:
    """The stream with the codec that ``policy`` chooses; ``views`` are its tensors."""
    paths, shapes = [path for view in views for path in view.paths], [view.ref.shape for view in views]
    codec, reason = policy.choose(stream.spec, paths, shapes)
    same = (codec, reason) == (stream.codec, stream.reason)
    return stream if same else Stream(stream.index, stream.spec, stream.storage, codec, reason)


def _gaps(numel: int, refs: list[TensorRef]) -> list[range]:
    """The elements of a storage of ``numel`` elements that no dense tensor covers."""
    gaps = []
    reached = 0
    for ref in sorted(refs, key=lambda ref: ref.offset):
        if is_dense(ref):
            gaps.append(range(reached, ref.offset))
            reached = max(reached, ref.offset + ref.numel)
    gaps.append(range(reached, numel))
    return [gap for gap in gaps if gap]


def _is_padding(source: Checkpoint, storage: StorageInfo, dtype: DType, gap: range) -> bool:
    """Whether a gap holds few elements, all zero. Every codec keeps zeros exactly."""
    if len(gap) > _MOST_PADDING:
        return False
    return not read_elements(source, storage, dtype, gap.start, len(gap)).view(np.uint8).any()


def set_companions(plan: Plan) -> None:
    """Set the companions of codecs that need other moments. Streams whose parameter lacks them become lossless."""
    if any(stream.codec.companions for stream in plan.by_index.values()):
        for unit in plan.units:
            plan.by_index |= {stream.index: _with_companions(stream, unit) for stream in unit.streams}


def _with_companions(stream: Stream, unit: Unit) -> Stream:
    usable = {stream.index for stream in unit.streams if not stream.codec.companions}
    moments = unit.parameter.moments if unit.parameter else {}
    companions: dict[str, int] = {}
    for name, slots in stream.codec.companions.items():
        if name in stream.codec.factored:
            continue
        index = next((moments[slot] for slot in slots if moments.get(slot) in usable), None)
        if index is None:
            return replace(stream, codec=LOSSLESS, reason=f"its codec needs {slots[0]} of the same parameter")
        companions[name] = index
    return replace(stream, codec=replace(stream.codec, **companions)) if companions else stream  # type: ignore[type-var]
