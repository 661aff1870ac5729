"""Converts packed state to plain state: pure functions on state dicts and tensors.

Packed state is what an optimizer of ``ckpt8.optim`` keeps: moments as codes and scales, and residuals or masters that
complete 16-bit parameters to fp32 weights. Plain state is what the published classes keep: moments in fp32, with groups
and steps in their layout.

    unpack(packed state dict)             returns a state dict that torch, optimi, came-pytorch or lion-pytorch loads
    adamw_to_stable_adamw, and back       convert the moments of a run to the other convention of bias
    join_weight                           returns the fp32 weights of bf16 parameters with residuals

StableAdamW stores bias-corrected moments: Adam's, divided by 1 - beta^t at step t (Wortsman et al., appendix).

The packages of the published classes are not needed: the cards say what each class keeps and
where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ckpt8.codecs import Codec, codec_from_config
from ckpt8.core.errors import UsageError, require
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts
from ckpt8.optim.known_optimizers import CARDS, SIDE_STATE, SPELLINGS
from ckpt8.optim.packed_tensor import Moment, read_master

_EXACT_IN_FP32 = 1 << 24
_STEPS = 1 << 62
_OURS = frozenset({"master", "moment1", "moment2", "seed", "rule"})


def plain_state(group: Mapping[str, Any], step: int, moments: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """One parameter's state in the layout of the first published class of the group's rule."""
    published = CARDS[group["rule"]].published[0]
    counter: dict[str, Any] = {"step": step} if published.step == "int" else {}
    if published.step == "tensor":
        counter["step"] = torch.tensor(step, dtype=torch.float32 if step <= _EXACT_IN_FP32 else torch.float64)
    return {
        **counter,
        **moments,
        **{
            key: torch.tensor(value(group), dtype=torch.float32) if callable(value) else value
            for key, value in published.state.items()
        },
    }


def plain_group(group: Mapping[str, Any], steps: set[int]) -> dict[str, Any]:
    """A group in the layout of the first published class of its rule. ``steps``: the steps of its parameters.

    Raises UsageError where that class cannot express the group.
    """
    rule = group["rule"]
    published = CARDS[rule].published[0]
    require(
        not group.get("maximize") or published.package == "torch", f"the published {rule} has no maximize", UsageError
    )
    ours = _OURS if published.package == "torch" else _OURS | {"maximize"}
    plain = {key: value for key, value in group.items() if key not in ours} | dict(published.group)
    if published.package == "optimi":
        plain["beta1"], plain["beta2"] = plain.pop("betas")
    if published.step == "group":
        require(
            len(steps) <= 1,
            f"{published.package} keeps one step for a group; its parameters are at steps {sorted(steps)}",
            UsageError,
        )
        plain["step"] = torch.tensor(max(steps, default=0), dtype=torch.int32)
    return plain


def step_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    """The step of a parameter, from its state or its group; 1 where neither has one (SGD, Lion). Raises UsageError."""
    step = state.get("step", group.get("step", 1))
    if isinstance(step, torch.Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < _STEPS or step != int(step):
        shown = "too large" if isinstance(step, int) and step >= _STEPS else f"{repr(step)[:40]}, not a whole number"
        raise UsageError(f"its step is {shown}")
    return int(step)


def class_problem(given: Mapping[Any, Any], rule: str, arguments: Sequence[str]) -> str | None:
    """Why a group of a published class does not fit ``rule``, or None."""
    try:
        settings = packed_group(given, rule, arguments)
    except UsageError as exc:
        return str(exc)
    card = CARDS[rule]
    # A group without ``amsgrad`` may belong to another optimizer with two moments.
    signs = {"amsgrad"} - given.keys() if card.matrix.update == "adam" else set()
    if missing := {*arguments} - settings.keys() - {"clip_threshold"} | signs:
        return f"its parameter groups lack {', '.join(sorted(missing))}"
    for key, value in {
        "decoupled_weight_decay": card.fixed.get("decoupled", True),
        "weight_decouple": True,
        "fixed_decay": False,
    }.items():
        if key in given and bool(given[key]) != value:
            return f"it was saved with {key}={given[key]}"
    return None


def state_problem(keys: Collection[str], expected: Collection[str], rule: str, group: Mapping[Any, Any]) -> str | None:
    """Why a published state with these ``keys`` does not fit ``rule``, which needs ``expected``; or None."""
    card = CARDS[rule]
    published = next(
        (candidate for candidate in card.published if (candidate.package == "optimi") == ("beta1" in group)), None
    )
    if card.published[0].step is not None and "step" not in keys and group.get("step") is None:
        return "its step is missing"
    needed = {*expected} | ({published.sign} if published is not None and published.sign else set())
    if missing := needed - set(keys):
        return f"its optimizer state lacks {', '.join(sorted(missing))}"
    if extra := set(keys) - needed - SIDE_STATE:
        return f"its optimizer state has {', '.join(sorted(map(str, extra)))}, which no {rule} has"
    return None


def packed_group(given: Mapping[str, Any], rule: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """The settings of a rule from a published group, with the entries of schedulers and torch.

    Raises UsageError for moments with another bias convention, for amsgrad, and for decoupled learning rates.
    """
    for key in ("amsgrad", "decouple_lr"):
        require(not given.get(key), f"{key} is not supported", UsageError)
    update = CARDS[rule].matrix.update if rule else None
    if (update == "adam" and "beta1" in given) or (update == "stable_adamw" and "amsgrad" in given):
        raise UsageError(f"the moments have another convention than {rule}; see adamw_to_stable_adamw and its inverse")
    spelled = {name: tuple(given[part] for part in parts) for name, parts in SPELLINGS.items() if parts[0] in given}
    kept = {*arguments, "maximize", "initial_lr", "param_names"}
    return {key: value for key, value in {**given, **spelled}.items() if key in kept}


StateDict = dict[str, Any]

# --- weights ------------------------------------------------------------------------------------------------------


def join_weight(param: torch.Tensor, residual: torch.Tensor | None, codec: Codec) -> torch.Tensor:
    """The fp32 weights of a parameter, in its shape.

    ``residual`` is the residual of a bf16 parameter, the fp32 master of an fp16 one, or None for an fp32 parameter.
    """
    flat = param.detach().reshape(-1), None if residual is None else residual.reshape(-1)
    return read_master(*flat, codec).float().view(param.shape)


def bf16_from_planes(parts: Parts) -> torch.Tensor:
    """The bf16 parameter, flat, from the planes ``exponent`` and ``mantissa`` of split24/1 or split32/1."""
    # A byte of ``mantissa`` holds the sign in bit 7 and the seven bits of a bf16 mantissa.
    exponent, mantissa = (parts[plane].to(torch.int32) for plane in ("exponent", "mantissa"))
    return (((mantissa >> 7) << 15) | (exponent << 7) | (mantissa & 0x7F)).to(torch.int16).view(torch.bfloat16)


# --- packed -> plain ----------------------------------------------------------------------------------------------


def moments_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """New fp32 tensors: the moments of one packed parameter, decoded, and its row and column averages.

    ``state`` is the state of the parameter, ``group`` its saved group.
    """
    moments = {}
    for name, entry in CARDS[group["rule"]].tensors.items():
        if name in state:
            moments[name] = state[name].clone()
        elif f"{name}_codes" in state:
            codes = state[f"{name}_codes"]
            # A group keeps the codec of each kind of moment under the name of the kind, such as moment2.
            codec = codec_from_config(group[entry.slot])
            moments[name] = Moment.of(name, codec, state).read(0, codes.numel()).view(codes.shape)
    return moments


def unpack(
    packed: Mapping[str, Any],
    read_step: Callable[[Any], int] = int,
    read_moments: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = moments_of,
) -> StateDict:
    """The plain state dict of torch's optimizers, optimi StableAdamW, came-pytorch CAME or lion-pytorch Lion.

    The ``rule`` of each group selects the class. The result has no residuals and fp32 masters, see ``join_weight``, and
    no state of parameters that never took a step. Pass ``read_step(step)`` and ``read_moments(state, group)`` if the
    values of ``packed`` are not in memory. Raises UsageError where the class cannot express a group, such as one of
    optimi whose parameters are at different steps.
    """
    groups, state = [], {}
    for group in packed["param_groups"]:
        states = {i: packed["state"][i] for i in group["params"] if packed["state"].get(i)}
        steps = {i: step for i, state in states.items() if (step := read_step(state["step"]))}
        for i, step in steps.items():
            state[i] = plain_state(group, step, read_moments(states[i], group))
        groups.append(plain_group(group, set(steps.values())))
    return {"state": state, "param_groups": groups}


# --- AdamW <-> StableAdamW ------------------------------------------------------------------------------------------


def adamw_to_stable_adamw(plain: Mapping[str, Any]) -> StateDict:
    """A torch AdamW state dict as optimi's StableAdamW: moments divided by 1 - beta^t, and optimi's groups."""
    return _rebias(plain, "stable_adamw", -1)


def stable_adamw_to_adamw(plain: Mapping[str, Any]) -> StateDict:
    """An optimi StableAdamW state dict as torch AdamW's: moments multiplied by 1 - beta^t, and torch's groups."""
    return _rebias(plain, "adamw", 1)


def _rebias(plain: Mapping[str, Any], rule: str, power: int) -> StateDict:
    """A plain state dict with moments times (1 - beta^t)^power, in the layout of the first published class of ``rule``.

    State from before the first step is left out, as in ``unpack``: its moments are zero, and t = 0 has no correction.
    """
    groups, state = [], {}
    for given in plain["param_groups"]:
        group = {
            "params": given["params"],
            **packed_group(given, None, ("lr", "betas", "eps", "weight_decay")),
            "rule": rule,
        }
        sources = {i: source for i in given["params"] if (source := plain["state"].get(i))}
        steps = {i: step for i, source in sources.items() if (step := step_of(source, given))}
        for i, step in steps.items():
            # In fp64, so that each moment is rounded to fp32 once.
            scaled = {
                name: sources[i][name].double().mul((1 - beta**step) ** power).float()
                for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
            }
            state[i] = plain_state(group, step, scaled)
        groups.append(plain_group(group, set(steps.values())))
    return {"state": state, "param_groups": groups}
