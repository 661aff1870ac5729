"""A run of ``ckpt8.optim`` as the published optimizers would have saved it, computed when it is read.

The streaming form of ``restoring.unpack``: moments are decoded from codes and scales, and weights joined from their
16-bit parameters and residuals, block by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, is_packed_group, weight_checks
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.sources.composite import Composite, cut, put
from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.split32 import Split32
from ckpt8.converting.choice import check_optimizer
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.tensors import DType
from ckpt8.optim import published_layouts as foreign
from ckpt8.optim.known_optimizers import CARDS
from ckpt8.optim.master_weights import weight_check
from ckpt8.optim.packed_tensor import Moment
from ckpt8.optim.state_conversion import join_weight

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


def is_packed(optimizer: Candidate) -> bool:
    """Whether a group of it was saved by one of ``ckpt8.optim``."""
    return any(is_packed_group(group) for group in optimizer.node["param_groups"] if isinstance(group, dict))


def unpack_tree(data: Composite) -> None:
    """Unpack all of ``ckpt8.optim`` in the tree, in place: optimizers, and the weights that they complete.

    Raises UsageError and InputError as the functions below do; the tree is then as it was.
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
    groups, state = [], {}
    try:
        for group in optimizer.node["param_groups"]:
            steps = {}
            for i in group["params"]:
                saved = optimizer.node["state"].get(i)
                step = step_number(data, saved["step"]) if saved else 0
                if step:
                    steps[i] = step
                    moments = _moments(data, saved, group)
                    # Only passed on: a reference stands for its tensor in the tree.
                    state[i] = foreign.plain_state(group, step, cast("Any", moments))
            groups.append(foreign.plain_group(group, set(steps.values())))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InputError(f"{data.label}: {optimizer.path}: a malformed packed optimizer state ({exc})") from exc
    return {"state": state, "param_groups": groups}


def step_number(data: Composite, value: Any) -> int:
    """A step, which may be a tensor, as a number. Raises ValueError where it is not whole."""
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

    Raises UsageError where it is not clear which weight a residual completes.
    """
    full: dict[str, TensorRef] = {}
    checks = _Checks(data, model)
    for parameter in saved_parameters(data.tree):
        part = parameter.state.get("residual", parameter.state.get("master"))
        if isinstance(part, TensorRef) and is_packed_group(parameter.group):
            data.check_extent(parameter.name, part)
            name = checks.weight_of(parameter, part)
            full[name] = _joined(data, model.node[name], parameter, part)
    aliases = {}
    for name, joined in full.items():
        for other, theirs in model.node.items():
            if other not in full and isinstance(theirs, TensorRef) and _alias(data, model.node[name], theirs):
                aliases[other] = joined
    return full | aliases


class _Checks:
    """Tells which weight of a model a state completes: names and order propose, the check in its group decides."""

    def __init__(self, data: Composite, model: Candidate) -> None:
        self._data = data
        self._weights: dict[str, TensorRef] = {
            name: ref for name, ref in model.node.items() if isinstance(ref, TensorRef)
        }
        self._known: dict[str, int] = {}

    def weight_of(self, parameter: SavedParameter, part: TensorRef) -> str:
        """The name of the weight. Raises UsageError where there is none, or several that are not the same."""
        expected = weight_checks(parameter.group).get(parameter.identifier)
        alike = [name for name, ref in self._weights.items() if ref.shape == part.shape and ref.dtype.itemsize == 2]
        proposed = [name for name in alike if self._weights[name] is parameter.weight]
        for names in (proposed, alike):
            found = {self._weights[name].key: name for name in reversed(names) if self._check(name) == expected}
            if len(found) == 1:
                return next(iter(found.values()))
        what = "no weight" if not found else "more than one weight"
        raise UsageError(f"{self._data.label}: {parameter.name}: its optimizer state completes {what} of the model")

    def _check(self, name: str) -> int:
        if name not in self._known:
            self._data.check_extent(name, self._weights[name])
            total = first = 0
            for block in self._data.blocks(self._weights[name]):
                total += weight_check(block, first)
                first += len(block)
            self._known[name] = total & _MASK63
        return self._known[name]


def _joined(data: Composite, weight: TensorRef, parameter: SavedParameter, part: TensorRef) -> TensorRef:
    if part.dtype is DType.FLOAT32:
        return part
    codec = Split32() if part.dtype is DType.INT16 else codec_from_config(parameter.group["master"])
    return data.tensor(JoinedWeight(data, weight, part, codec), DType.FLOAT32, weight.shape)


def _alias(data: Composite, mine: TensorRef, theirs: TensorRef) -> bool:
    """Whether it is the same tensor, or a matrix that was copied from it bit for bit."""
    if (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
        return False
    if (theirs.key, theirs.offset, theirs.stride) == (mine.key, mine.offset, mine.stride):
        return True
    if len(mine.shape) < 2 or not any(bool(block.any()) for block in data.blocks(mine)):
        return False
    return Streamer(data).equal(mine, theirs)
