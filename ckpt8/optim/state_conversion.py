"""Converts packed state to plain state and back: pure functions on state dicts and tensors.

    unpack(packed state dict)             a state dict that torch, optimi, came-pytorch or lion-pytorch loads
    pack(plain state dict, optimizer)     a state dict that ``optimizer`` loads
    adamw_to_stable_adamw, and back       the same run under the other bias convention
    split_weight, join_weight, ...        between fp32 weights, bf16 parameters and their residuals

StableAdamW's moments are Adam's divided by (1 - b^t): both hold the same run at step t (Wortsman et al., appendix).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt8.codecs import Codec, codec_from_config
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Parts
from ckpt8.optim.known_optimizers import CARDS
from ckpt8.optim.master_weights import read_master, residual_codes, residual_dtype, write_master
from ckpt8.optim.packed import PackedOptimizer
from ckpt8.optim.packed_tensor import Moment
from ckpt8.optim.published_layouts import packed_group, plain_group, plain_state, step_of

StateDict = dict[str, Any]
_MAGNITUDE = 0x7FFFFFFF
_HALF_STEP = 1 << 15
"""Half a step of bf16, in steps of fp32."""


# --- parts ------------------------------------------------------------------------------------------------------


def split_weight(weight: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 parameter and its residual (int8 for split24, int16 for split32), shaped as the fp32 ``weight``."""
    flat = weight.detach().float().contiguous().view(-1)
    param = torch.empty(flat.shape, dtype=torch.bfloat16, device=flat.device)
    residual = torch.empty(flat.shape, dtype=residual_dtype(codec), device=flat.device)
    write_master(flat, param, residual, codec, None)
    return param.view(weight.shape), residual.view(weight.shape)


def residual_of(master: torch.Tensor, param: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The residual of fp32 weights over a bf16 parameter that is their rounding; halves may be rounded either way.

    Where the layout rounds a half to the other neighbour, the residual is off by one fp32 step (split32), or by 1/254
    of a bf16 step (split24). Raises UsageError where the parameter is not a rounding of the weights.
    """
    bits = master.detach().float().contiguous().view(-1).view(torch.int32)
    hi = param.detach().reshape(-1).view(torch.int16).to(torch.int32) << 16
    d = (bits & _MAGNITUDE) - (hi & _MAGNITUDE)
    # A weight so small that it rounds to zero may differ in sign.
    differs = ((bits ^ hi) < 0) & (hi & _MAGNITUDE != 0)
    if bool(((d.abs() > _HALF_STEP) | differs).any()):
        raise UsageError("the bf16 parameters are not the master weights rounded; set them with split_weight first")
    if codec.codes is not None:
        residual = residual_codes(d, codec.codes.highest, None).to(torch.int8)
    else:
        residual = d.clamp_(-_HALF_STEP, _HALF_STEP - 1).to(torch.int16)
    return residual.view(param.shape)


def join_weight(param: torch.Tensor, residual: torch.Tensor | None, codec: Codec) -> torch.Tensor:
    """The fp32 weights of a parameter and its residual or master; of an fp32 parameter alone."""
    part = None if residual is None else residual.reshape(-1)
    return read_master(param.detach().reshape(-1), part, codec).float().view(param.shape)


def bf16_from_planes(parts: Parts) -> torch.Tensor:
    """The bf16 parameter, flat, from the planes ``exponent`` and ``mantissa`` of split24/1 or split32/1."""
    mantissa = parts["mantissa"].to(torch.int32)
    bits = (mantissa >> 7 << 15) | (parts["exponent"].to(torch.int32) << 7) | (mantissa & 0x7F)
    return bits.to(torch.int16).view(torch.bfloat16)


# --- packed <-> plain ---------------------------------------------------------------------------------------------


def moments_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The moments and the row and column averages of one packed parameter, in fp32."""
    found = {}
    for name, each in CARDS[group["rule"]].tensors.items():
        if name in state:
            found[name] = state[name].clone()
        elif f"{name}_codes" in state:
            codes = state[f"{name}_codes"]
            moment = Moment.of(name, codec_from_config(group[each.slot]), state)
            found[name] = moment.read(0, codes.numel()).view(codes.shape)
    return found


def unpack(
    packed: Mapping[str, Any],
    read_step: Callable[[Any], int] = int,
    read_moments: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = moments_of,
) -> StateDict:
    """The plain fp32 state dict of torch's optimizers, optimi StableAdamW, came-pytorch CAME or lion-pytorch Lion.

    The ``rule`` of each group decides which one. Residuals and fp32 masters are left out: see ``join_weight``; so is
    the state of parameters that never took a step. Raises UsageError where parameters of an optimi group are at
    different steps. ``read_step`` and ``read_moments`` are for state dicts whose values are not in memory.
    """
    groups, state = [], {}
    for group in packed["param_groups"]:
        states = {i: packed["state"][i] for i in group["params"] if packed["state"].get(i)}
        steps = {i: step for i, each in states.items() if (step := read_step(each["step"]))}
        for i, step in steps.items():
            state[i] = plain_state(group, step, read_moments(states[i], group))
        groups.append(plain_group(group, set(steps.values())))
    return {"state": state, "param_groups": groups}


def pack(
    plain: Mapping[str, Any], optimizer: PackedOptimizer, masters: Mapping[Any, torch.Tensor] | None = None
) -> StateDict:
    """A plain state dict in the packed layout of ``optimizer``, which does not change.

    Parameters match by their order, as in torch. ``masters`` gives fp32 weights by id; bf16 parameters must be their
    rounding (see ``split_weight``). Without them residuals are zero. Raises UsageError where groups, keys, shapes or
    weights do not match.
    """
    target = optimizer.state_dict()
    if [len(g["params"]) for g in plain["param_groups"]] != [len(g["params"]) for g in target["param_groups"]]:
        raise UsageError("the parameter groups do not have the sizes of the optimizer's")
    groups, state = [], {}
    for group, packed, given in zip(optimizer.param_groups, target["param_groups"], plain["param_groups"], strict=True):
        groups.append({**packed, **packed_group(given, packed["rule"], optimizer.rule_arguments)})
        for param, i, saved in zip(group["params"], packed["params"], given["params"], strict=True):
            if plain["state"].get(saved):
                master = None if masters is None else masters.get(saved)
                state[i] = _packed_state(optimizer, group, param, plain["state"][saved], given, master)
    return {"state": state, "param_groups": groups}


def _packed_state(
    optimizer: PackedOptimizer,
    group: dict[str, Any],
    param: torch.Tensor,
    plain: Mapping[str, Any],
    given: Mapping[str, Any],
    master: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    state, shape = optimizer.initial_state(group, param), tuple(param.shape)
    codec, _, moments = optimizer.views(group, param, state)
    factored = optimizer.factored(shape)
    state["step"].fill_(step_of(plain, given))
    if master is not None and "residual" in state:
        state["residual"].copy_(residual_of(master, param, codec))
    elif master is not None and "master" in state:
        state["master"].copy_(master.detach())
    for name in (*moments, *factored):
        values = plain.get(name)
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != factored.get(name, shape):
            raise UsageError(f"{name} of a parameter of shape {shape} is missing or has another shape")
        if name in moments:
            moments[name].write(0, values.numel(), values.detach().float().reshape(-1), None)
        else:
            state[name].copy_(values)
    return state


# --- AdamW <-> StableAdamW ------------------------------------------------------------------------------------------


def adamw_to_stable_adamw(plain: Mapping[str, Any]) -> StateDict:
    """A torch AdamW state dict as optimi's StableAdamW: moments divided by 1 - b^t, and optimi's groups."""
    return _rebias(plain, "stable_adamw", -1)


def stable_adamw_to_adamw(plain: Mapping[str, Any]) -> StateDict:
    """An optimi StableAdamW state dict as torch AdamW's: moments multiplied by 1 - b^t, and torch's groups."""
    return _rebias(plain, "adamw", 1)


def _rebias(plain: Mapping[str, Any], rule: str, power: int) -> StateDict:
    groups, state = [], {}
    for given in plain["param_groups"]:
        arguments = ("lr", "betas", "eps", "weight_decay")
        group = {"params": given["params"], **packed_group(given, None, arguments), "rule": rule}
        steps = set()
        for i in given["params"]:
            source = plain["state"].get(i)
            if not source:
                continue
            step = step_of(source, given)
            steps.add(step)
            factors = [(1 - beta**step) ** power for beta in group["betas"]]
            names = ("exp_avg", "exp_avg_sq")
            scaled = {name: source[name].double().mul(f).float() for name, f in zip(names, factors, strict=True)}
            state[i] = plain_state(group, step, scaled)
        groups.append(plain_group(group, steps))
    return {"state": state, "param_groups": groups}
