"""A ``.pt`` whose optimizer is in the layout of flashoptim (arXiv 2602.23349; package version 0.1.4).

    NAME::quantized   int8 (softsign) or, for exp_avg_sq, uint8 (square root); NAME::scales fp16, groups of 32,
                      viewed as bf16 where the parameter is bf16
    error_bits        e / (ulp/2) in 127ths, e = master - parameter, ulp = distance to the next larger value: int8,
                      cast to the type of the parameter by value
    step              int64;    group: initial_lr, master_bytewidth (0 or 3), quantize

    scale = max(max|x|, 1e-12) as fp16;   code = rint(Q * phi(x / max|x|)),  phi(n) = 2n/(1+|n|), or n of sqrt(v)

Scales are fp16, so small moments are lost.

Weights become bf16, and 8 ``error_bits`` keep what that loses: FlashAdamW, FlashAdam, FlashSGD and FlashLion with
``master_weight_bits=24`` go on from the 24-bit masters. With ``--dtype float32`` weights stay as they are and have no
``error_bits``. Everything else in the tree stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ckpt8.checkpoint.meaning.pairing import saved_names, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Composite, computed
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.reference import as_groups, square_root
from ckpt8.container.frames import FRAME
from ckpt8.converting.choice import FLOATS, cast, model_tensors
from ckpt8.converting.request import Report, Request
from ckpt8.converting.weights import WeightTypes, choose_run, step_number
from ckpt8.converting.writers.torch_zip import write_torch
from ckpt8.core.errors import InputError, UsageError, require
from ckpt8.core.tensors import DType
from ckpt8.optim.known_optimizers import CARDS, TENSORS

_BLOCK = 2 * FRAME
"""Elements to quantize at once, which takes several times their size."""

_KEPT = ("params", "param_names", "initial_lr")
_REFUSED = ("amsgrad", "maximize", "decouple_lr")
_MASTER_BYTES = 3
"""Bytes of a master weight: two of the parameter and one of ``error_bits``."""


def write(request: Request, report: Report) -> None:
    """Write the file. Raises Ckpt8Error; UsageError for an optimizer that flashoptim does not have."""
    dtype = request.dtype or DType.BFLOAT16
    with request.open(report) as content:
        data = content.data
        model, optimizer = choose_run(data, request.key, ", and flashoptim's layout is that of its state")
        tensors = model_tensors(model)
        groups = _make_groups(data.label, optimizer)
        ordered = (saved_names(optimizer.node["param_groups"]) != {}) or (content.ordered and not _is_sorted(tensors))
        weights = {} if dtype is DType.FLOAT32 else _find_weights(data, tensors, ordered=ordered)
        saved = optimizer.node["state"]
        states = {
            i: _make_state(data, saved[i], weights, dtype) for group in groups for i in group["params"] if saved.get(i)
        }
        for group in groups:
            has_bits = any("error_bits" in states.get(i, ()) for i in group["params"])
            group |= {"master_bytewidth": _MASTER_BYTES if has_bits else 0, "quantize": True}
        types = WeightTypes(data, dtype, report)
        model.node.update({name: types(name, ref) for name, ref in tensors.items()})
        optimizer.node.update({"state": states, "param_groups": groups})
        write_torch(request, report, data, data.tree)


def _find_weights(data: Composite, tensors: Mapping[str, TensorRef], *, ordered: bool) -> dict[int, TensorRef]:
    """The weights of parameters, by the ``id`` of their states. Raises UsageError for an unknown one.

    ``ordered``: order tells weights of one shape apart.
    """
    known = {id(ref) for ref in tensors.values()}
    alike = Counter(shape for _, _, shape in {(ref.key, ref.offset, ref.shape) for ref in tensors.values()})
    weights = {}
    for parameter in saved_parameters(data.tree):
        weight, why = parameter.weight, parameter.unpaired
        if weight is not None and id(weight) not in known:
            why = "it is of another model"
        elif weight is not None and not ordered and alike[weight.shape] > 1:
            why = "the optimizer has no names, and the weights are not in the order of the model"
        if weight is None or why is not None:
            raise UsageError(
                f"{data.label}: {parameter.name}: its weight is unknown: {why}; --dtype float32 does not need it"
            )
        weights[id(parameter.state)] = weight
    return weights


def _make_state(
    data: Composite, state: Mapping[str, Any], weights: Mapping[int, TensorRef], dtype: DType
) -> dict[str, Any]:
    """The state of a parameter of ``dtype``. Raises InputError for a malformed one."""
    try:
        made: dict[str, Any] = {"step": torch.tensor(step_number(data, state.get("step", 1)))}
    except (ValueError, TypeError, OverflowError) as exc:
        raise InputError(f"{data.label}: a step of its optimizer is not a whole number") from exc
    moments = _moments(state)
    require(
        not any(ref.dtype not in FLOATS for ref in moments.values())
        and len({ref.shape for ref in moments.values()}) <= 1,
        f"{data.label}: moments that are no floats, or of different shapes",
    )
    for name, ref in moments.items():
        made[f"{name}::quantized"], made[f"{name}::scales"] = _quantize(data, name, ref, dtype)
    weight = weights.get(id(state))
    if weight is not None and weight.dtype is DType.FLOAT32:
        made["error_bits"] = _error_bits(data, weight, dtype)
    return made


def _quantize(data: Composite, name: str, ref: TensorRef, dtype: DType) -> tuple[TensorRef, TensorRef]:
    """The int8 or uint8 codes of the moment ``name``, and its 16-bit scales, one for each group."""
    fp32 = cast(data, name, ref, DType.FLOAT32)
    data.check_extent(name, fp32)
    return (
        computed(
            data,
            DType.UINT8 if name == "exp_avg_sq" else DType.INT8,
            ref.shape,
            lambda start, stop: quantize(name, data.elements(fp32, start, stop))[0],
            _BLOCK,
        ),
        computed(
            data,
            # The bits are fp16. torch casts state to the type of the parameter when it loads: bf16 to bf16 keeps them.
            DType.BFLOAT16 if dtype is DType.BFLOAT16 else DType.FLOAT16,
            (-(-ref.numel // GROUP),),
            lambda first, last: quantize(name, data.elements(fp32, first * GROUP, min(last * GROUP, ref.numel)))[1],
            _BLOCK // GROUP,
        ),
    )


def quantize(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes shaped as ``x`` and fp16 scales of a moment."""
    squared = TENSORS[name].slot == "moment2"
    flat = x.float().reshape(-1)
    groups = as_groups(square_root(flat) if squared else flat)
    scales = groups.abs().amax(1).clamp_min(1e-12)
    n = groups / scales.unsqueeze(1)
    t = n * 255 if squared else (2 * n / (1 + n.abs())) * 127
    codes = t.round_().clamp_(0 if squared else -127, 255 if squared else 127).to(torch.int32)
    return codes.view(-1)[: x.numel()].to(torch.uint8 if squared else torch.int8).view(x.shape), scales.half()


def error_bits(master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The residual of fp32 master weights over a bf16 or fp16 parameter, as int8."""
    size = param.abs()
    gap = torch.nextafter(size, torch.full_like(size, float("inf"))).sub(size).float()
    half_ulp = gap.mul_(0.5).clamp_min_(torch.finfo(torch.float32).tiny)
    return ((master - param.float()) / half_ulp).clamp_(-1, 1).mul_(127).round_().to(torch.int8)


def _error_bits(data: Composite, weight: TensorRef, dtype: DType) -> TensorRef:
    """The difference between an fp32 weight and its parameter, in 127ths of half a step, cast to ``dtype`` by value."""

    def compute(start: int, stop: int) -> torch.Tensor:
        master = data.elements(weight, start, stop)
        return error_bits(master, master.to(dtype.torch)).to(dtype.torch)

    return computed(data, dtype, weight.shape, compute, _BLOCK)


def _is_sorted(tensors: Mapping[str, TensorRef]) -> bool:
    """Whether a state dict stands in the order of a safetensors file rather than in that of a model."""
    return list(tensors) in (sorted(tensors), sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)))


def _moments(state: Mapping[str, Any]) -> dict[str, TensorRef]:
    return {str(key): value for key, value in state.items() if key != "step" and isinstance(value, TensorRef)}


def _make_groups(label: str, optimizer: Candidate) -> list[dict[str, Any]]:
    """The groups with the settings that flashoptim has. Raises UsageError for a group of another optimizer."""
    groups = []
    for group in optimizer.node["param_groups"]:
        states = (optimizer.node["state"].get(i) for i in group["params"])
        kinds = {frozenset(_moments(state)) for state in states if state}
        known = [
            card.settings
            for card in CARDS.values()
            if card.flashoptim
            and kinds <= {frozenset(tensor.key for tensor in card.matrix.present(group))}
            and card.settings.keys() <= group.keys()
            and ("eps" in group) == ("eps" in card.settings)
        ]
        refused = [name for name in _REFUSED if group.get(name)]
        if not known or refused:
            what = f"with {refused[0]}" if refused else "of this kind"
            raise UsageError(
                f"{label}: {optimizer.path}: flashoptim has no optimizer {what}; it has AdamW, Adam, SGD and Lion"
            )
        settings = {key: group[key] for key in (*_KEPT, *known[0]) if key in group}
        groups.append(settings | {"initial_lr": group.get("initial_lr", group["lr"])})
    return groups
