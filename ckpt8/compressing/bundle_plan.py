"""The plan of a source with several members: one plan for all, with the indices and places of the bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpt8.checkpoint.meaning.dcp_states import joint_parameters
from ckpt8.checkpoint.meaning.deepspeed_universal import Universal
from ckpt8.checkpoint.meaning.names_beside import NamesBeside
from ckpt8.checkpoint.meaning.roles import Names, short_name
from ckpt8.checkpoint.sources.bundle import Bundle, Member
from ckpt8.compressing.lockstep import set_companions
from ckpt8.compressing.master_copies import refer_to_masters
from ckpt8.compressing.plan import Parameter, Plan, Stream, Unit, make_plan, plan_joint
from ckpt8.compressing.policy import Policy


def plan_bundle(bundle: Bundle, policy: Policy) -> Plan:
    """The plan of all members, one after the other. Raises UsageError for a rule that does not fit, InputError."""
    names = Names()
    plan = Plan([])
    beside = NamesBeside([(member.path, member.checkpoint) for member in bundle.members])
    universal = Universal(bundle.members)
    for number, member in enumerate(bundle.members):
        names.prefix = _prefix(bundle, member)
        own = make_plan(member.checkpoint, policy, names, universal.role(member.path))
        named = _parameter_names(bundle, member, beside) if any(unit.parameter for unit in own.units) else {}
        plan.units += [_unit(bundle, unit, number, named) for unit in own.units]
        plan.tensors += [(tensor, member.first + index) for tensor, index in own.tensors]
    joint = joint_parameters(state for member in bundle.members for state in member.states)
    joint += universal.parameters()
    if joint:
        plan_joint(bundle, plan, joint)
    refer_to_masters(plan, bundle, [(member.path, member.checkpoint.tree) for member in bundle.members], policy)
    set_companions(plan)
    return plan


def _prefix(bundle: Bundle, member: Member) -> str:
    """What the names of a member's tensors begin with."""
    return "" if bundle.directory is None else f"{member.path}:"


def _parameter_names(bundle: Bundle, member: Member, beside: NamesBeside) -> Mapping[str, str]:
    """Names for parameters of a member from the weights with it, by the name that they have without them."""
    before = _prefix(bundle, member)
    return {before + place: short_name(before + name) for place, name in beside.of(member.path).items()}


def _unit(bundle: Bundle, unit: Unit, number: int, names: Mapping[str, str]) -> Unit:
    streams = tuple(_stream(bundle, stream, number) for stream in unit.streams)
    parameter = unit.parameter
    if parameter is not None:
        parameter = replace(_parameter(bundle, parameter, number), name=names.get(parameter.name, parameter.name))
    return Unit(streams, parameter)


def _stream(bundle: Bundle, stream: Stream, number: int) -> Stream:
    index = bundle.members[number].first + stream.index
    return replace(stream, index=index, storage=bundle.storages[index])


def _parameter(bundle: Bundle, parameter: Parameter, number: int) -> Parameter:
    first = bundle.members[number].first
    confidence = parameter.confidence
    if confidence is not None:
        rows, columns = (replace(ref, key=bundle.key(ref.key, number)) for ref in confidence)
        confidence = rows, columns
    moments = {slot: first + index for slot, index in parameter.moments.items()}
    return replace(parameter, moments=moments, confidence=confidence)
