"""A run of ``ckpt8.optim`` as the published optimizers would have saved it, computed when it is read.

The streaming form of ``restoring.unpack``: moments and weights are references to tensors whose values are decoded, or
joined from 16-bit weights and residuals, block by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, weight_checks
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.sources.composite import Composite, cut, put
from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.companded8 import GROUP
from ckpt8.converting.choice import check_optimizer
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.tensors import DType
from ckpt8.optim.known_optimizers import CARDS
from ckpt8.optim.master_weights import weight_check
from ckpt8.optim.packed_tensor import Moment
from ckpt8.optim.state_conversion import join_weight, unpack
from ckpt8.restoring.unpack import CompletedWeights, is_packed

_FP32 = DType.FLOAT32.itemsize
_MASK63 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class PackedMoment:
    """The fp32 moment ``name`` of its codes and scales."""

    source: Composite
    name: str
    codes: TensorRef
    scales: TensorRef
    codec: Codec

    @property
    def nbytes(self) -> int:
        """Size of the moment."""
        return self.codes.numel * _FP32

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``; the offset is that of the first element of a group. Raises InputError."""
        for start, stop, place in cut(offset, buffer, _FP32):
            state = {
                f"{self.name}_codes": self.source.elements(self.codes, start, stop),
                f"{self.name}_scales": self.source.elements(self.scales, start // GROUP, -(-stop // GROUP)),
            }
            put(Moment.of(self.name, self.codec, state).read(0, stop - start), place)


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """The fp32 weight of a 16-bit parameter and its residual."""

    source: Composite
    weight: TensorRef
    residual: TensorRef
    codec: Codec

    @property
    def nbytes(self) -> int:
        """Size of the weight."""
        return self.weight.numel * _FP32

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises InputError."""
        for start, stop, place in cut(offset, buffer, _FP32):
            weight = self.source.elements(self.weight, start, stop)
            put(join_weight(weight, self.source.elements(self.residual, start, stop), self.codec), place)


def unpack_tree(data: Composite) -> None:
    """Unpack all state of ``ckpt8.optim`` in the tree, in place: optimizers, and the weights that they complete.

    Raises UsageError and InputError as ``unpack_optimizer`` and ``joined_weights`` do; the tree is unchanged then.
    """
    models, optimizers = find(data.tree)
    packed = [each for each in optimizers if is_packed(each)]
    for each in packed:
        check_optimizer(data.label, each)
    plain = [(each, unpack_optimizer(data, each)) for each in packed]
    weights = [(model, joined_weights(data, model)) for model in models] if plain else []
    for model, joined in weights:
        model.node.update(joined)
    for each, state in plain:
        each.node.update(state)


def unpack_optimizer(data: Composite, optimizer: Candidate) -> dict[str, Any]:
    """A packed state dict in the layout of torch, optimi, came-pytorch or lion-pytorch, its moments computed.

    Raises UsageError where the published optimizer cannot express it, InputError for one that is malformed.
    """
    try:
        return unpack(optimizer.node, partial(step_number, data), partial(_moments, data))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InputError(f"{data.label}: {optimizer.path}: a malformed packed optimizer state ({exc})") from exc


def step_number(data: Composite, value: Any) -> int:
    """A step, saved as a number or a tensor, as an int. Raises ValueError where it is not whole."""
    number = read_scalar(data, data.storage(value.key), value) if isinstance(value, TensorRef) else value
    if number is None or number != int(number):
        raise ValueError("a step is not a whole number")
    return int(number)


def _moments(data: Composite, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, TensorRef]:
    found = {}
    tensors = CARDS[group["rule"]].tensors
    for name, each in tensors.items():
        if f"{name}_codes" in state:
            codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
            data.check_extent(name, codes)
            data.check_extent(name, scales)
            if -(-codes.numel // GROUP) != scales.numel:
                raise ValueError(f"{name} has {scales.numel} scales for {codes.numel} codes")
            region = PackedMoment(data, name, codes, scales, codec_from_config(group[each.slot]))
            found[name] = data.tensor(region, DType.FLOAT32, codes.shape)
        elif name in state:
            found[name] = state[name]
    return found


def joined_weights(data: Composite, model: Candidate) -> dict[str, TensorRef]:
    """The fp32 weights of a model that a packed optimizer completes, by name, tied names included.

    Raises UsageError where it is not certain which weight a residual completes.
    """
    return _StreamedWeights(data, model.node).join_all(saved_parameters(data.tree))


class _StreamedWeights(CompletedWeights[TensorRef]):
    """Weights that are joined block by block when they are read."""

    def __init__(self, data: Composite, saved: Mapping[str, Any]) -> None:
        super().__init__(saved)
        self._data = data
        self._refs: dict[str, TensorRef] = {name: ref for name, ref in saved.items() if isinstance(ref, TensorRef)}
        self._known: dict[str, int] = {}

    def weight_of(self, parameter: SavedParameter, part: TensorRef) -> str:
        """Names and order propose the weight; the check in the parameter's group decides, among all of its shape."""
        self._data.check_extent(parameter.name, part)
        expected = weight_checks(parameter.group).get(parameter.identifier)
        refs = self._refs
        alike = [name for name, ref in refs.items() if ref.shape == part.shape and ref.dtype.itemsize == 2]
        proposed = [name for name in alike if refs[name] is parameter.weight]
        for names in (proposed, alike):
            found = {refs[name].key: name for name in reversed(names) if self._check(name) == expected}
            if len(found) == 1:
                return next(iter(found.values()))
        what = "no weight" if not found else "more than one weight"
        raise UsageError(f"{self._data.label}: {parameter.name}: its optimizer state completes {what} of the model")

    def _check(self, name: str) -> int:
        """The ``weight_check`` of a weight, computed once."""
        if name not in self._known:
            self._data.check_extent(name, self.saved[name])
            total = first = 0
            for block in self._data.blocks(self.saved[name]):
                total += weight_check(block, first)
                first += len(block)
            self._known[name] = total & _MASK63
        return self._known[name]

    def join(self, name: str, parameter: SavedParameter, key: str, codec: Codec) -> TensorRef:
        """The master itself, or a tensor of the weight and its residual."""
        weight, part = self.saved[name], parameter.state[key]
        if part.dtype is DType.FLOAT32:
            master: TensorRef = part
            return master
        return self._data.tensor(JoinedWeight(self._data, weight, part, codec), DType.FLOAT32, weight.shape)

    def is_copy(self, name: str, other: str) -> bool:
        """Compares the bits, block by block."""
        mine, theirs = self.saved[name], self.saved[other]
        return any(bool(block.any()) for block in self._data.blocks(mine)) and Streamer(self._data).equal(mine, theirs)
