"""A ``.pt`` whose optimizer is in the layout of flashoptim 0.1.4: see ``optim.flashoptim_layout`` for it.

Weights become bf16, and what is lost by that is kept in ``error_bits`` of 8 bits, so that FlashAdamW, FlashAdam,
FlashSGD and FlashLion with ``master_weight_bits=24`` go on from the 24-bit masters. With ``--dtype float32`` weights
stay as they are, and there are no ``error_bits``. All else of the tree stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_names, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.sources.composite import Composite, cut, put
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.companded8 import GROUP
from ckpt8.container.frames import FRAME
from ckpt8.converting.casts import Caster
from ckpt8.converting.choice import choose_model, choose_optimizer, tensors_of
from ckpt8.converting.request import Report, Request
from ckpt8.converting.unpacked import step_number, unpack_tree
from ckpt8.converting.weights import FLOATS, WeightTypes
from ckpt8.converting.writers.torch_zip import TorchFile
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.atomic import AtomicFile
from ckpt8.core.tensors import DType
from ckpt8.optim.flashoptim_layout import error_bits, quantize
from ckpt8.optim.known_optimizers import MOMENT_SLOTS

_FP16 = 2
_BLOCK = 2 * FRAME
"""Elements that are quantized at once: it takes several times their size."""

_UNORDERED = "neither the optimizer has names, nor are the weights in the order of the model"
_RULES: Mapping[frozenset[str], tuple[str, ...]] = {
    frozenset({"exp_avg", "exp_avg_sq"}): ("lr", "betas", "eps", "weight_decay"),
    frozenset({"momentum_buffer"}): ("lr", "momentum", "dampening", "weight_decay"),
    frozenset({"exp_avg"}): ("lr", "betas", "weight_decay"),
}
"""What the optimizers that flashoptim has keep for a parameter, and the settings of their groups."""

_KEPT = ("params", "param_names", "initial_lr")
_REFUSED = ("amsgrad", "maximize", "decouple_lr")
_WIDTHS = {DType.BFLOAT16: 3, DType.FLOAT16: 3}
"""Bytes of a master weight: those of the parameter and one of ``error_bits``."""


@dataclass(frozen=True, slots=True)
class _Codes:
    """The int8 or uint8 codes of the moment ``name``."""

    source: Composite
    name: str
    ref: TensorRef

    @property
    def nbytes(self) -> int:
        """One byte an element."""
        return self.ref.numel

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``; the offset is that of the first element of a group. Raises InputError."""
        for start, stop, place in cut(offset, buffer, 1, _BLOCK):
            put(quantize(self.name, self.source.elements(self.ref, start, stop))[0], place)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The fp16 scales of the moment ``name``."""

    source: Composite
    name: str
    ref: TensorRef

    @property
    def nbytes(self) -> int:
        """Two bytes a group."""
        return -(-self.ref.numel // GROUP) * _FP16

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises InputError."""
        numel = self.ref.numel
        for first, last, place in cut(offset, buffer, _FP16, _BLOCK // GROUP):
            values = self.source.elements(self.ref, first * GROUP, min(last * GROUP, numel))
            put(quantize(self.name, values)[1], place)


@dataclass(frozen=True, slots=True)
class _ErrorBits:
    """What ``dtype`` does not hold of fp32 weights, in 127ths of half a step of it, cast to it by value."""

    source: Composite
    master: TensorRef
    dtype: DType

    @property
    def nbytes(self) -> int:
        """As many as the parameter has."""
        return self.master.numel * self.dtype.itemsize

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises InputError."""
        for start, stop, place in cut(offset, buffer, self.dtype.itemsize, _BLOCK):
            master = self.source.elements(self.master, start, stop)
            param = master.to(self.dtype.torch)
            put(error_bits(master, param, torch.int8).to(self.dtype.torch), place)


class FlashoptimWriter:
    """See the module."""

    id: ClassVar[str] = "flashoptim"
    directory: ClassVar[bool] = False

    def write(self, request: Request) -> Report:
        """Write the file. Raises Ckpt8Error; UsageError for an optimizer that flashoptim does not have."""
        report = Report(str(request.target), self.id)
        dtype = request.dtype or DType.BFLOAT16
        with request.open(report) as content:
            data = content.data
            optimizer = choose_optimizer(data)
            if optimizer is None:
                raise UsageError(f"{data.label}: holds no optimizer, whose layout flashoptim's is")
            unpack_tree(data)
            model = choose_model(data, request.key)
            tensors, _ = tensors_of(model)
            ordered = (content.ordered and not _is_sorted(tensors)) or saved_names(optimizer.node["param_groups"]) != {}
            flash = _Flash(data, model, dtype, ordered=ordered).state_dict(optimizer)
            types = WeightTypes(data, dtype, report)
            model.node.update({name: types(name, ref) for name, ref in tensors.items()})
            optimizer.node.update(flash)
            with AtomicFile(request.target, force=request.force) as output:
                pt = TorchFile(data, data.tree, report)
                progress = request.progress_to(pt.nbytes)
                pt.write(output.path, request.target.name, output.file.fileno(), output.guard, progress)
                data.check_unchanged()
                report.bytes = output.file.seek(0, 2)
                output.publish()
                report.replaced = output.replaced
        return report


class _Flash:
    """Makes the state dict for parameters of ``dtype``. ``ordered``: their order tells weights of one shape apart."""

    def __init__(self, data: Composite, model: Candidate, dtype: DType, *, ordered: bool) -> None:
        self._data = data
        self._dtype = dtype
        self._ordered = ordered
        self._fp32 = Caster(data)
        self._saved = {id(saved.state): saved for saved in saved_parameters(data.tree)}
        self._weights = {id(ref) for ref in tensors_of(model)[0].values()}
        places = {(ref.key, ref.offset, ref.shape) for ref in tensors_of(model)[0].values()}
        self._alike = Counter(shape for _, _, shape in places)

    def state_dict(self, optimizer: Candidate) -> dict[str, Any]:
        """The state of all parameters. Raises UsageError, and InputError for a state that is malformed."""
        states, groups = {}, []
        for group in optimizer.node["param_groups"]:
            saved = {i: state for i in group["params"] if (state := optimizer.node["state"].get(i))}
            settings = _settings(group, saved, f"{self._data.label}: {optimizer.path}")
            width = 0
            for i, state in saved.items():
                states[i] = self._state(state)
                width = _WIDTHS[self._dtype] if "error_bits" in states[i] else width
            groups.append({**settings, "master_bytewidth": width, "quantize": True})
        return {"state": states, "param_groups": groups}

    def _state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        try:
            made: dict[str, Any] = {"step": torch.tensor(step_number(self._data, state.get("step", 1)))}
        except (ValueError, TypeError, OverflowError) as exc:
            raise InputError(f"{self._data.label}: a step of its optimizer is not a whole number") from exc
        moments = _moments(state)
        if any(ref.dtype not in FLOATS for ref in moments.values()) or len({ref.shape for ref in moments.values()}) > 1:
            raise InputError(f"{self._data.label}: moments that are no floats, or of different shapes")
        for name, ref in moments.items():
            fp32 = self._fp32.cast(name, ref, DType.FLOAT32)
            self._data.check_extent(name, fp32)
            codes, scales = _Codes(self._data, name, fp32), _Scales(self._data, name, fp32)
            unsigned = MOMENT_SLOTS.get(name) == "moment2"
            made[f"{name}::quantized"] = self._data.tensor(codes, DType.UINT8 if unsigned else DType.INT8, ref.shape)
            # So that torch, which casts state to the type of the parameter, leaves its bits alone.
            kind = DType.BFLOAT16 if self._dtype is DType.BFLOAT16 else DType.FLOAT16
            made[f"{name}::scales"] = self._data.tensor(scales, kind, (scales.nbytes // _FP16,))
        if self._dtype is not DType.FLOAT32:
            weight = self._weight(self._saved[id(state)])
            if weight.dtype is DType.FLOAT32:
                bits = _ErrorBits(self._data, weight, self._dtype)
                made["error_bits"] = self._data.tensor(bits, self._dtype, weight.shape)
        return made

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
                f"{self._data.label}: {saved.name}: its weight cannot be told, since {why}; "
                "with --dtype float32 it need not be known"
            )
        return saved.weight


def _is_sorted(tensors: Mapping[str, TensorRef]) -> bool:
    """Whether a state dict stands in the order of a safetensors file, in which it then was once, and not of a model."""
    by_width = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    return list(tensors) in (sorted(tensors), by_width)


def _moments(state: Mapping[str, Any]) -> dict[str, TensorRef]:
    return {str(key): value for key, value in state.items() if key != "step" and isinstance(value, TensorRef)}


def _settings(group: Mapping[str, Any], states: Mapping[Any, Mapping[str, Any]], where: str) -> dict[str, Any]:
    """The settings of a group that flashoptim has. Raises UsageError for a group of another optimizer."""
    kinds = {frozenset(_moments(state)) for state in states.values()}
    found = [
        (keys, names)
        for keys, names in _RULES.items()
        if kinds <= {keys} and all(name in group for name in names) and ("eps" in group) == ("eps" in names)
    ]
    refused = [name for name in _REFUSED if group.get(name)]
    if not found or refused:
        what = f"with {refused[0]}" if refused else "of this kind"
        raise UsageError(f"{where}: flashoptim has no optimizer {what}; it has AdamW, Adam, SGD and Lion")
    names = found[0][1]
    settings = {key: group[key] for key in (*_KEPT, *names) if key in group}
    return {**settings, "initial_lr": group.get("initial_lr", group["lr"])}
