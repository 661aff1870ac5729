"""A ``.pt`` whose optimizer is in the layout of flashoptim 0.1.4: see ``optim.flashoptim_layout`` for it.

Weights become bf16, and 8 ``error_bits`` keep what that loses: FlashAdamW, FlashAdam, FlashSGD and FlashLion with
``master_weight_bits=24`` go on from the 24-bit masters. With ``--dtype float32`` weights stay as they are and have no
``error_bits``. Everything else in the tree stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_names, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.companded8 import GROUP
from ckpt8.container.frames import FRAME
from ckpt8.converting.choice import choose_model, choose_optimizer, model_tensors
from ckpt8.converting.computed import FLOATS, cast, computed
from ckpt8.converting.request import Report, Request
from ckpt8.converting.unpacked import step_number, unpack_tree
from ckpt8.converting.weights import WeightTypes
from ckpt8.converting.writers.torch_zip import write_torch
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.tensors import DType
from ckpt8.optim.flashoptim_layout import error_bits, quantize
from ckpt8.optim.known_optimizers import CARDS

_BLOCK = 2 * FRAME
"""Elements to quantize at once, which takes several times their size."""

_UNORDERED = "the optimizer has no names, and the weights are not in the order of the model"
_KEPT = ("params", "param_names", "initial_lr")
_REFUSED = ("amsgrad", "maximize", "decouple_lr")
_MASTER_BYTES = 3
"""Bytes of a master weight: two of the parameter and one of ``error_bits``."""


def write(request: Request, report: Report) -> None:
    """Write the file. Raises Ckpt8Error; UsageError for an optimizer that flashoptim does not have."""
    dtype = request.dtype or DType.BFLOAT16
    with request.open(report) as content:
        data = content.data
        optimizer = choose_optimizer(data)
        if optimizer is None:
            raise UsageError(f"{data.label}: holds no optimizer, and flashoptim's layout is that of its state")
        unpack_tree(data)
        model = choose_model(data, request.key)
        tensors = model_tensors(model)
        ordered = (content.ordered and not _is_sorted(tensors)) or saved_names(optimizer.node["param_groups"]) != {}
        state = _Flash(data, tensors, dtype, ordered=ordered).make_state_dict(optimizer)
        types = WeightTypes(data, dtype, report)
        model.node.update({name: types(name, ref) for name, ref in tensors.items()})
        optimizer.node.update(state)
        write_torch(request, report, data, data.tree)


class _Flash:
    """Makes the state dict for parameters of ``dtype``. ``ordered``: their order tells weights of one shape apart."""

    def __init__(self, data: Composite, tensors: Mapping[str, TensorRef], dtype: DType, *, ordered: bool) -> None:
        self._data = data
        self._dtype = dtype
        self._ordered = ordered
        self._saved = {id(saved.state): saved for saved in saved_parameters(data.tree)}
        self._weights = {id(ref) for ref in tensors.values()}
        places = {(ref.key, ref.offset, ref.shape) for ref in tensors.values()}
        self._alike = Counter(shape for _, _, shape in places)

    def make_state_dict(self, optimizer: Candidate) -> dict[str, Any]:
        """The state of all parameters. Raises UsageError, and InputError for a malformed state."""
        states, groups = {}, []
        for group in optimizer.node["param_groups"]:
            saved = {i: state for i in group["params"] if (state := optimizer.node["state"].get(i))}
            settings = _settings(group, saved, f"{self._data.label}: {optimizer.path}")
            made = {i: self._make_state(state) for i, state in saved.items()}
            width = _MASTER_BYTES if any("error_bits" in state for state in made.values()) else 0
            states.update(made)
            groups.append({**settings, "master_bytewidth": width, "quantize": True})
        return {"state": states, "param_groups": groups}

    def _make_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        try:
            made: dict[str, Any] = {"step": torch.tensor(step_number(self._data, state.get("step", 1)))}
        except (ValueError, TypeError, OverflowError) as exc:
            raise InputError(f"{self._data.label}: a step of its optimizer is not a whole number") from exc
        moments = _moments(state)
        if any(ref.dtype not in FLOATS for ref in moments.values()) or len({ref.shape for ref in moments.values()}) > 1:
            raise InputError(f"{self._data.label}: moments that are no floats, or of different shapes")
        for name, ref in moments.items():
            made[f"{name}::quantized"], made[f"{name}::scales"] = self._quantize(name, ref)
        if self._dtype is not DType.FLOAT32:
            weight = self._weight(self._saved[id(state)])
            if weight.dtype is DType.FLOAT32:
                made["error_bits"] = self._error_bits(weight)
        return made

    def _quantize(self, name: str, ref: TensorRef) -> tuple[TensorRef, TensorRef]:
        """The int8 or uint8 codes of the moment ``name``, and its 16-bit scales, one for each group."""
        data, numel = self._data, ref.numel
        fp32 = cast(data, name, ref, DType.FLOAT32)
        data.check_extent(name, fp32)

        # The bits are fp16. torch casts state to the type of the parameter when it loads, and bf16 to bf16 keeps them.
        kind = DType.BFLOAT16 if self._dtype is DType.BFLOAT16 else DType.FLOAT16
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
                kind,
                (-(-numel // GROUP),),
                lambda first, last: quantize(name, data.elements(fp32, first * GROUP, min(last * GROUP, numel)))[1],
                _BLOCK // GROUP,
            ),
        )

    def _error_bits(self, weight: TensorRef) -> TensorRef:
        """What the parameter does not hold of its fp32 weight, in 127ths of half a step, cast to its type by value."""
        dtype = self._dtype.torch

        def compute(start: int, stop: int) -> torch.Tensor:
            master = self._data.elements(weight, start, stop)
            return error_bits(master, master.to(dtype), torch.int8).to(dtype)

        return computed(self._data, self._dtype, weight.shape, compute, _BLOCK)

    def _weight(self, saved: SavedParameter) -> TensorRef:
        """The weight of a parameter. Raises UsageError where it is not known."""
        why = saved.unpaired
        if saved.weight is not None:
            if id(saved.weight) not in self._weights:
                why = "it is of another model"
            elif not self._ordered and self._alike[saved.weight.shape] > 1:
                why = _UNORDERED
        if saved.weight is None or why is not None:
            raise UsageError(
                f"{self._data.label}: {saved.name}: its weight is unknown: {why}; --dtype float32 does not need it"
            )
        return saved.weight


def _is_sorted(tensors: Mapping[str, TensorRef]) -> bool:
    """Whether a state dict stands in the order of a safetensors file rather than in that of a model."""
    by_width = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    return list(tensors) in (sorted(tensors), by_width)


def _moments(state: Mapping[str, Any]) -> dict[str, TensorRef]:
    return {str(key): value for key, value in state.items() if key != "step" and isinstance(value, TensorRef)}


def _settings(group: Mapping[str, Any], states: Mapping[Any, Mapping[str, Any]], where: str) -> dict[str, Any]:
    """The settings of a group that flashoptim has. Raises UsageError for a group of another optimizer."""
    kinds = {frozenset(_moments(state)) for state in states.values()}
    found = [
        card.settings
        for card in CARDS.values()
        if card.flashoptim
        and kinds <= {frozenset(each.key for each in card.matrix.present(group))}
        and card.settings.keys() <= group.keys()
        and ("eps" in group) == ("eps" in card.settings)
    ]
    refused = [name for name in _REFUSED if group.get(name)]
    if not found or refused:
        what = f"with {refused[0]}" if refused else "of this kind"
        raise UsageError(f"{where}: flashoptim has no optimizer {what}; it has AdamW, Adam, SGD and Lion")
    initial = {"initial_lr": group.get("initial_lr", group["lr"])}
    return {key: group[key] for key in (*_KEPT, *found[0]) if key in group} | initial
