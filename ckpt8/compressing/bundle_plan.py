"""Plans a whole source: one plan for all its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from ckpt8.checkpoint.meaning.dcp import joint_parameters
from ckpt8.checkpoint.meaning.deepspeed import Universal
from ckpt8.checkpoint.meaning.names import NamesFromWeights
from ckpt8.checkpoint.meaning.parameter_names import SLICE
from ckpt8.checkpoint.meaning.roles import Names, short_name
from ckpt8.checkpoint.meaning.state_dicts import evident_weights
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import NamedTensor
from ckpt8.compressing.lockstep import set_companions
from ckpt8.compressing.masters import copies_of_weights, refer_to_masters
from ckpt8.compressing.optimizer_steps import attach_steps, copy_steps_from
from ckpt8.compressing.plan import Measured, Plan, Policy, Unit, choose, make_plan, plan_joint, views_of
from ckpt8.compressing.spending import spend
from ckpt8.core.closing import without_collection


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
        units = first.units if policy is policies[0] else [_chosen(unit, first, views, policy) for unit in first.units]
        plan = Plan(units, first.tensors, first.chosen)
        refer_to_masters(plan, bundle, trees, policy)
        if policy.budget is not None:
            if stepped is None:
                attach_steps(plan, bundle)
                plan.copies = copies_of_weights(plan, bundle)
            else:
                copy_steps_from(plan, stepped)
            stepped = stepped or replace(plan)  # whatever the budget is
            spend(plan, bundle, policy, policy.budget, measured)
        set_companions(plan)
        plans.append(plan)
    return plans


def plan_members(bundle: Bundle, policy: Policy) -> Plan:
    """The plan of all members, which leaves open which storages are copies of others. Raises as ``plan_bundle``."""
    members = [(member.path, member.checkpoint) for member in bundle.members]
    names = Names()
    plan = Plan([])
    weight_names, universal = NamesFromWeights(members), Universal(members)
    beside = cache(lambda: evident_weights(*(checkpoint.tree for _, checkpoint in members)))
    for member in bundle.members:
        names.prefix = "" if bundle.directory is None else f"{member.path}:"
        own = make_plan(member.checkpoint, policy, names, universal.role(member.path), bundle, member.first, beside)
        if any(unit.parameter for unit in own.units):
            better = weight_names.of_member(member.path).items()
            name_of = {names.prefix + place: short_name(names.prefix + name) for place, name in better}
            own.units = [_renamed(unit, name_of) for unit in own.units]
        plan.units += own.units
        plan.tensors += own.tensors
        plan.chosen |= own.chosen
    joint = joint_parameters(state for member in bundle.members for state in member.states) + universal.parameters()
    if joint:
        plan_joint(bundle, plan, joint)
    return plan


def _chosen(unit: Unit, plan: Plan, views: Mapping[int, list[NamedTensor]], policy: Policy) -> Unit:
    """The unit with the codecs that ``policy`` chooses."""
    streams = tuple(
        choose(stream, views[stream.index], policy) if stream.index in plan.chosen else stream
        for stream in unit.streams
    )
    return unit if streams == unit.streams else Unit(streams, unit.parameter)


def _renamed(unit: Unit, name_of: Mapping[str, str]) -> Unit:
    """The unit, whose parameter has a better name if ``name_of`` has one for it; the place of a slice stays."""
    parameter = unit.parameter
    if parameter is None:
        return unit
    bare = SLICE.sub("", parameter.name)
    name = name_of[bare] + parameter.name[len(bare) :] if bare in name_of else parameter.name
    return unit if name == parameter.name else Unit(unit.streams, replace(parameter, name=name))
