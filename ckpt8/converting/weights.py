"""The weights to write: their names, their element types, and the one name that tied weights keep.

``unpack_tree`` gives a run of ``ckpt8.optim`` as the published optimizers would have saved it, and computes it on
reading.

Its moments and weights are references to tensors. Reading one decodes a moment, or joins a 16-bit weight and its
residual, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from ckpt8.checkpoint.meaning.optimizer_state import SavedParameter
from ckpt8.checkpoint.meaning.pairing import saved_parameters
from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.parameters import join_weights
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, is_packed, weight_checks
from ckpt8.checkpoint.sources.composite import Composite, Streamer, computed
from ckpt8.checkpoint.tree import TensorRef, read_scalar
from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.companded8 import GROUP
from ckpt8.converting.choice import (
    FLOATS,
    HEADS,
    cast,
    check_optimizer,
    choose_model,
    choose_optimizer,
    model_tensors,
    module_of,
)
from ckpt8.converting.request import Report
from ckpt8.core.arrays import as_tensor
from ckpt8.core.errors import InputError, UsageError, require
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType
from ckpt8.optim.known_optimizers import CARDS
from ckpt8.optim.packed_tensor import Moment, weight_check
from ckpt8.optim.state_conversion import join_weight, unpack


@dataclass(slots=True)
class WeightTypes:
    """Casts weights to the element type of the target, and counts the casts in ``report``.

    ``dtype`` None leaves all as they are. ``only`` are the types to cast, by default all floats of 16 to 64 bits.
    Buffers keep their type. Weights that are one tensor stay one.
    """

    data: Composite
    dtype: DType | None
    report: Report
    only: frozenset[DType] = FLOATS
    _made: dict[tuple[object, ...], TensorRef] = field(default_factory=dict)

    def __call__(self, name: str, ref: TensorRef) -> TensorRef:
        """The tensor to write."""
        is_cast = self.dtype != ref.dtype and ref.dtype in self.only and name.rpartition(".")[2] not in BUFFERS
        if self.dtype is None or not is_cast:
            return ref
        self.report.casts[f"{ref.dtype.label} -> {self.dtype.label}"] += 1
        identity = (ref.key, ref.offset, ref.shape, ref.stride, ref.neg, ref.dtype)
        if identity not in self._made:
            self._made[identity] = cast(self.data, name, ref, self.dtype)
        return self._made[identity]


def model_weights(data: Composite, model: Candidate, types: WeightTypes, report: Report) -> dict[str, TensorRef]:
    """The weights of a model as transformers loads them: names without wrappers, every tied weight once.

    Notes in ``report`` the names that it changes or leaves out. Raises UsageError for a state dict without tensors.
    """
    tensors = model_tensors(model)
    report.dropped += [f"{name}: not a tensor" for name in model.node if name not in tensors]
    require(tensors, f"{data.label}: {model.path} holds no tensors", UsageError)
    named = {plain: tensors[name] for name, plain in strip_wrappers(tensors, report).items()}
    names: dict[tuple[object, ...], list[str]] = {}
    for name, ref in named.items():
        # An empty tensor has no place that it could share.
        identity = (ref.key, ref.offset, ref.shape, ref.stride, ref.dtype) if ref.numel else (name,)
        names.setdefault(identity, []).append(name)
    # A tied weight keeps the first name that is not an output layer's.
    kept = {next((name for name in tied if module_of(name) not in HEADS), tied[0]) for tied in names.values()}
    report.aliases += [name for name in named if name not in kept]
    dtypes = {name: types(name, ref) for name, ref in named.items() if name in kept}
    for name, ref in dtypes.items():
        data.check_extent(name, ref)
    return dtypes


def strip_wrappers(names: Iterable[str], report: Report) -> dict[str, str]:
    """The names without wrappers, by the old names. Notes an example in ``report``."""
    plain = plain_names(names)
    changed = [f"{name} -> {short}" for name, short in plain.items() if name != short]
    if changed:
        report.notes.append(f"names without wrappers, as in {changed[0]}")
    return plain


def choose_run(data: Composite, key: str | None, advice: str) -> tuple[Candidate, Candidate]:
    """The model and the optimizer of a run, both unpacked in the tree.

    Raises UsageError that ends with ``advice`` for a source without an optimizer, and what the functions called raise.
    """
    optimizer = choose_optimizer(data)
    if optimizer is None:
        raise UsageError(f"{data.label}: holds no optimizer{advice}")
    unpack_tree(data)
    return choose_model(data, key), optimizer


def unpack_tree(data: Composite) -> None:
    """Unpack all state of ``ckpt8.optim`` in the tree, in place: optimizers, and the weights that they complete.

    Raises UsageError and InputError as ``unpack_optimizer`` and ``joined_weights`` do, before it changes the tree.
    """
    models, optimizers = find(data.tree)
    packed = [optimizer for optimizer in optimizers if is_packed(optimizer)]
    for candidate in packed:
        check_optimizer(data.label, candidate)
    plain = [(candidate, unpack_optimizer(data, candidate)) for candidate in packed]
    weights = [(model, joined_weights(data, model)) for model in models] if plain else []
    for model, joined in weights:
        model.node.update(joined)
    for candidate, state in plain:
        candidate.node.update(state)


def unpack_optimizer(data: Composite, optimizer: Candidate) -> dict[str, Any]:
    """A packed state dict in the layout of torch, optimi, came-pytorch or lion-pytorch, its moments computed.

    Raises UsageError where the published optimizer cannot express it, InputError for a malformed one.
    """
    try:
        return unpack(optimizer.node, partial(step_number, data), partial(_moments, data))
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InputError(f"{data.label}: {optimizer.path}: a malformed packed optimizer state ({exc})") from exc


def step_number(data: Composite, value: Any) -> int:
    """A step, saved as a number or a tensor, as an int. Raises ValueError where it is not whole."""
    number = read_scalar(data, data.places[value.key], value) if isinstance(value, TensorRef) else value
    if number is None or number != int(number):
        raise ValueError("a step is not a whole number")
    return int(number)


def _moments(data: Composite, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, TensorRef]:
    moments = {}
    for name, tensor in CARDS[group["rule"]].tensors.items():
        if f"{name}_codes" in state:
            codec = codec_from_config(group[tensor.slot])
            moments[name] = _decoded(data, name, state[f"{name}_codes"], state[f"{name}_scales"], codec)
        elif name in state:
            moments[name] = state[name]
    return moments


def _decoded(data: Composite, name: str, codes: TensorRef, scales: TensorRef, codec: Codec) -> TensorRef:
    """The fp32 moment ``name`` of its codes and scales. Raises ValueError where they do not belong together."""
    data.check_extent(name, codes)
    data.check_extent(name, scales)
    if -(-codes.numel // GROUP) != scales.numel:
        raise ValueError(f"{name} has {scales.numel} scales for {codes.numel} codes")

    def decode(start: int, stop: int) -> torch.Tensor:
        state = {
            f"{name}_codes": data.elements(codes, start, stop),
            f"{name}_scales": data.elements(scales, start // GROUP, -(-stop // GROUP)),
        }
        return Moment.of(name, codec, state).read(0, stop - start)

    return computed(data, DType.FLOAT32, codes.shape, decode)


def joined_weights(data: Composite, model: Candidate) -> dict[str, TensorRef]:
    """The fp32 weights of a model that a packed optimizer completes, by name, tied names included.

    Raises UsageError where it is not certain which weight a residual completes.
    """
    refs, streamer = model_tensors(model), Streamer(data)
    check = cache(lambda name: _weight_check(data, name, refs[name]))

    def join(parameter: SavedParameter, key: str, codec: Codec) -> tuple[str, TensorRef]:
        part: TensorRef = parameter.state[key]
        data.check_extent(parameter.name, part)
        name = _find_weight(data.label, refs, parameter, part, check)
        return name, part if part.dtype is DType.FLOAT32 else _joined(data, refs[name], part, codec)

    def is_copy(name: str, other: str) -> bool:
        is_zero = not any(bool(block.any()) for block in data.blocks(refs[name]))
        return not is_zero and streamer.equal(refs[name], refs[other])

    return join_weights(refs, saved_parameters(data.tree), join, is_copy)


def _find_weight(
    label: str,
    refs: Mapping[str, TensorRef],
    parameter: SavedParameter,
    part: TensorRef,
    check: Callable[[str], int],
) -> str:
    """The name of the 16-bit weight that ``part`` completes. Raises UsageError unless it is certain.

    Names and order propose a weight. The check in the parameter's group decides, among all weights of its shape.
    """
    expected = weight_checks(parameter.group).get(parameter.identifier)
    alike = [name for name, ref in refs.items() if ref.shape == part.shape and ref.dtype.itemsize == 2]
    for names in ([name for name in alike if refs[name] is parameter.weight], alike):
        by_key = {refs[name].key: name for name in reversed(names) if check(name) == expected}
        if len(by_key) == 1:
            return next(iter(by_key.values()))
    what = "more than one weight" if by_key else "no weight"
    raise UsageError(f"{label}: {parameter.name}: its optimizer state completes {what} of the model")


def _weight_check(data: Composite, name: str, ref: TensorRef) -> int:
    """The ``weight_check`` of a weight, block by block. Raises InputError."""
    data.check_extent(name, ref)
    total = first = 0
    for block in data.blocks(ref):
        total += weight_check(as_tensor(block, ref.dtype), first)
        first += len(block)
    return total & ((1 << 63) - 1)


def _joined(data: Composite, weight: TensorRef, residual: TensorRef, codec: Codec) -> TensorRef:
    """The fp32 weight of a 16-bit one and its residual."""

    def join(start: int, stop: int) -> torch.Tensor:
        return join_weight(data.elements(weight, start, stop), data.elements(residual, start, stop), codec)

    return computed(data, DType.FLOAT32, weight.shape, join)
