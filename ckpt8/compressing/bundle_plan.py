"""Plans a whole source: the plans of its members as one, with the indices and places of the bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpt8.checkpoint.meaning.dcp_states import joint_parameters
from ckpt8.checkpoint.meaning.deepspeed_universal import Universal
from ckpt8.checkpoint.meaning.names_from_weights import NamesFromWeights
from ckpt8.checkpoint.meaning.roles import Names, short_name
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.compressing.lockstep import set_companions
from ckpt8.compressing.master_copies import refer_to_masters
from ckpt8.compressing.plan import Plan, Unit, make_plan, plan_joint
from ckpt8.compressing.policy import Policy


def plan_bundle(bundle: Bundle, policy: Policy) -> Plan:
    """The plan of all members, one after the other. Raises UsageError for a rule that does not fit, InputError."""
    names = Names()
    plan = Plan([])
    members = [(member.path, member.checkpoint) for member in bundle.members]
    weight_names, universal = NamesFromWeights(members), Universal(members)
    for number, member in enumerate(bundle.members):
        names.prefix = "" if bundle.directory is None else f"{member.path}:"
        own = make_plan(member.checkpoint, policy, names, universal.role(member.path))
        named: Mapping[str, str] = {}
        if any(unit.parameter for unit in own.units):
            found = weight_names.of_member(member.path).items()
            named = {names.prefix + place: short_name(names.prefix + name) for place, name in found}
        plan.units += [_in_bundle(unit, bundle, number, named) for unit in own.units]
        plan.tensors += [(tensor, member.first + index) for tensor, index in own.tensors]
    joint = joint_parameters(state for member in bundle.members for state in member.states)
    joint += universal.parameters()
    if joint:
        plan_joint(bundle, plan, joint)
    refer_to_masters(plan, bundle, [(path, checkpoint.tree) for path, checkpoint in members], policy)
    set_companions(plan)
    return plan


def _in_bundle(unit: Unit, bundle: Bundle, number: int, names: Mapping[str, str]) -> Unit:
    """A unit of member ``number`` as one of ``bundle``. ``names`` are better names of parameters, by their own."""
    first = bundle.members[number].first
    streams = tuple(
        replace(stream, index=first + stream.index, storage=bundle.storages[first + stream.index])
        for stream in unit.streams
    )
    parameter = unit.parameter
    if parameter is not None:
        confidence = parameter.confidence
        if confidence is not None:
            rows, columns = (replace(ref, key=bundle.key(ref.key, number)) for ref in confidence)
            confidence = rows, columns
        name = names.get(parameter.name, parameter.name)
        moments = {slot: first + index for slot, index in parameter.moments.items()}
        parameter = replace(parameter, name=name, moments=moments, confidence=confidence)
    return Unit(streams, parameter)
