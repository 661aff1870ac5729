"""The new state of a live optimizer: what fills it, and how the packed state of ``ckpt8.optim`` is made of a saved one.

A live tensor takes what a checkpoint holds in one of three ways: copied, taken packed as it is stored, or encoded on
the way. Encoding rounds to nearest, on the device of the parameter, in pieces of bounded size.

``DeviceCopy`` fills tensors on a GPU from stored parts: it uploads these, 5 bytes a parameter of ``flash``, and decodes
them there.

``PackedPlanner`` plans the state of an optimizer of ``ckpt8.optim``.

    saved by the same packed optimizer    copies every tensor
    saved by the published optimizer      takes codes, scales and residuals of a ``.ckpt8`` as they are stored, where
                                          they have at least as many levels as the optimizer's; encodes all others, and
                                          those of a raw checkpoint, on the way

A group takes the codecs of the stored codes that go straight into it. A tensor that the file keeps exact for a reason
stays exact: as fp32 moments, or as a 16-bit residual. fp32 weights go into bf16 parameters and their residuals, or into
fp16 parameters and their masters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ckpt8.checkpoint.meaning.state_dicts import is_packed_group, weight_checks
from ckpt8.checkpoint.sources.composite import Fill, Streamer
from ckpt8.checkpoint.sources.objects import ValueBuilder
from ckpt8.checkpoint.sources.stored_member import EncodedChunk, StoredParts
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import Codec, codec_from_config, config_of
from ckpt8.codecs.base import StateKey
from ckpt8.codecs.companded8 import GROUP
from ckpt8.container.symbols import unpack_parts
from ckpt8.core.errors import RefusedError, UsageError, require
from ckpt8.core.gpu import CudaTransfer, Mark, copy_to_row, row_bytes, row_views
from ckpt8.core.log import log
from ckpt8.core.tensors import Parts
from ckpt8.core.workers import Buffers, assign
from ckpt8.optim import state_conversion as foreign
from ckpt8.optim.packed import PackedOptimizer, check_group, exact_names, layout_problem
from ckpt8.optim.packed_tensor import weight_check, write_master
from ckpt8.optim.state_conversion import bf16_from_planes
from ckpt8.restoring.resume.live import (
    NewState,
    OptimizerPlan,
    added_entries,
    copy_of,
    foreign_settings,
    length_problem,
    restored,
)

_ENCODED_AT_ONCE = 1 << 20
"""Elements."""


def _pieces(streamer: Streamer, ref: TensorRef) -> Iterator[tuple[int, torch.Tensor]]:
    """The saved values as flat float32, in pieces that are encoded at once, and where each starts."""
    for start, values in streamer.values(ref):
        for at in range(0, len(values), _ENCODED_AT_ONCE):
            yield start + at, values[at : at + _ENCODED_AT_ONCE]


def _residual_of(codec: Codec) -> tuple[str, torch.dtype]:
    """Name and element type of the part that completes a bf16 weight."""
    assert codec.residual is not None  # noqa: S101 - the group was checked
    return codec.residual[0], codec.residual[1].torch


def _split(weights: torch.Tensor, residual: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Write the residual of flat fp32 weights; return their bf16 upper half."""
    rounded = torch.empty_like(weights, dtype=torch.bfloat16)
    write_master(weights, rounded, residual, codec, None)
    return rounded


_BUFFERS = 2
"""Buffers in turn: the CPU fills one while the other is copied."""


class DeviceCopy:
    """Fills tensors on devices of the kind of ``make`` from the storages that ``stored`` keeps lossy."""

    def __init__(self, stored: StoredParts, make: type[CudaTransfer] = CudaTransfer) -> None:
        self._stored = stored
        self._make = make
        self._lanes: dict[torch.device, _Lane] = {}

    def copy(self, ref: TensorRef, target: torch.Tensor) -> bool:
        """Fill ``target`` with the values of ``ref``.

        Returns False, and fills nothing, on another device, or if ``ref`` is not stored lossy. Raises InputError for
        damage.
        """
        if target.device.type != self._make.kind or ref.conj or ref.neg:
            return False
        if (codec := self._stored.codec(ref)) is None or codec.measured_as is None:
            return False
        if target.device not in self._lanes:
            self._lanes[target.device] = _Lane(self._make(target.device))
        lane = self._lanes[target.device]
        with lane.transfer.active():
            for chunk in self._stored.encoded(ref):
                assign(target, chunk.first, _decode(chunk, lane))
        return True


def _decode(chunk: EncodedChunk, lane: _Lane) -> torch.Tensor:
    """The elements of a chunk on the device, its companions decoded there as well."""
    decoded = {name: _decode(other, lane).float() for name, other in chunk.companions.items()}
    packed, expanded = lane.send(chunk.parts, chunk.expanded)
    parts = unpack_parts(packed, chunk.packings, chunk.where)
    return chunk.codec.decode(parts, chunk.spec, first=chunk.first, companions=decoded | expanded)


class _Lane:
    """Uploads to one device through a few buffers."""

    def __init__(self, transfer: CudaTransfer) -> None:
        self.transfer = transfer
        self._buffers = Buffers(transfer.pinned)
        self._busy: deque[tuple[torch.Tensor, Mark]] = deque()

    def send(self, *parts: Parts) -> list[Parts]:
        """Upload the parts. The device can use them in everything that it computes from now on."""
        if len(self._busy) == _BUFFERS:
            buffer, mark = self._busy.popleft()
            mark.synchronize()
            self._buffers.give(buffer)
        total = row_bytes(parts)
        buffer = self._buffers.take(total)
        copy_to_row(parts, buffer)
        there, mark = self.transfer.upload(buffer[:total])
        self._busy.append((buffer, mark))
        self.transfer.receive(there, mark)
        return row_views(parts, there)


@dataclass(frozen=True, slots=True)
class PackedPlanner:
    """Plans the state of one packed optimizer; changes nothing.

    ``weights`` are the saved tensors of live parameters, by ``id``; ``stored`` the parts of a container, or None.
    """

    optimizer: PackedOptimizer
    builder: ValueBuilder
    streamer: Streamer
    weights: Mapping[int, TensorRef]
    stored: StoredParts | None

    def class_problem(self, saved: Mapping[Any, Any]) -> str | None:
        """Why this optimizer cannot have saved a group, or None."""
        rule = self.optimizer.rule_id
        if is_packed_group(saved):
            return None if saved["rule"] == rule else f"it was saved by the rule {saved['rule']!r}, here it is {rule!r}"
        arguments = self.optimizer.rule_arguments
        return (
            foreign_settings(saved, arguments)
            or foreign.class_problem(saved, rule, arguments)
            or length_problem(foreign.packed_group(saved, rule, arguments), self.optimizer.defaults)
        )

    def plan(self, node: Mapping[str, Any], plan: OptimizerPlan) -> None:
        """Plan the states of the saved optimizer ``node``; ``plan`` pairs its parameters."""
        checks = {key: check for group in node["param_groups"] for key, check in weight_checks(group).items()}
        for paired in plan.pairs:
            if paired.saved is None:
                continue
            live = paired.live
            hyper = {key: self.builder.build(value) for key, value in paired.saved.items() if key != "params"}
            states = [node["state"].get(pair.identifier) for pair in paired.pairs]
            try:
                group = self._group(live, hyper, states)
            except UsageError as exc:
                plan.wrong = plan.wrong or str(exc)
                continue
            plan.groups.append((live, {key: value for key, value in group.items() if key != "params"}))
            for pair, state in zip(paired.pairs, states, strict=True):
                try:
                    self._check_weight(pair.parameter, state, checks.get(pair.identifier))
                    plan.states.append((pair.parameter, self._plan_state(pair.parameter, state, group, hyper)))
                except UsageError as exc:
                    plan.problems.append(f"{pair.name}: {exc}")
                if (rounded := self._round_weight(pair.parameter, group)) is not None:
                    plan.rounded[id(pair.parameter)] = rounded
            replaced = {id(parameter) for parameter, _ in plan.states}
            is_kept = any(id(p) not in replaced and self.optimizer.state.get(p) for p in live["params"])
            if is_kept and any(group[key] != live[key] for key in ("master", "moment1", "moment2")):
                mixes = "the codecs of its state are not those of parameters that would be left alone"
                plan.wrong = plan.wrong or mixes

    def _check_weight(self, param: torch.Tensor, state: Any, expected: Any) -> None:
        """Raise UsageError where a state belongs to another 16-bit weight than the one that this parameter takes."""
        ref = self.weights.get(id(param))
        if not state or ref is None or expected is None or ref.dtype.itemsize != 2:
            return
        weight = torch.empty(ref.shape, dtype=ref.dtype.torch, device="cpu")
        self.streamer.copy(ref, weight)
        require(
            weight_check(weight) == expected,
            "its optimizer state belongs to another weight; give the optimizer its parameters in the saved order",
            UsageError,
        )

    def _group(self, live: dict[str, Any], hyper: Mapping[str, Any], states: Sequence[Any]) -> dict[str, Any]:
        """The new values of the group ``live``, codecs included. Raises UsageError.

        A codec is the most frequent one of stored codes that is no coarser than the group's own; else the group's own.
        """
        if is_packed_group(hyper):
            group = {**live, **restored(hyper, live)}
        else:
            taken = foreign.packed_group(hyper, self.optimizer.rule_id, self.optimizer.rule_arguments)
            group = {**live, **restored({**added_entries(hyper), **taken}, live)}
            kinds: tuple[StateKey, ...] = ("moment1", "moment2")
            refs = [ref for state in states if isinstance(state, dict) for ref in state.values()]
            for kind in kinds:
                mine = codec_from_config(group[kind]).codes
                codecs = Counter(
                    codec
                    for codec in map(self._codec, refs)
                    if mine and codec and codec.trains(kind) and codec.codes and codec.codes.highest >= mine.highest
                )
                group[kind] = config_of(codecs.most_common(1)[0][0]) if codecs else dict(group[kind])
        check_group(group)
        return group

    def _codec(self, ref: object) -> Codec | None:
        return self.stored.codec(ref) if self.stored is not None and isinstance(ref, TensorRef) else None

    def _if_stored(self, ref: TensorRef, codec: Codec) -> StoredParts | None:
        """The stored parts, if ``codec`` made those of ``ref``; else None."""
        return self.stored if self._codec(ref) == codec else None

    def _weight_to_halve(self, param: torch.Tensor) -> TensorRef | None:
        """The saved fp32 weights that a live 16-bit parameter takes, or None."""
        ref = self.weights.get(id(param))
        return ref if ref is not None and ref.dtype.torch == torch.float32 and param.element_size() == 2 else None

    def _plan_state(
        self, param: torch.Tensor, saved: Any, group: dict[str, Any], hyper: Mapping[str, Any]
    ) -> Callable[[], NewState] | None:
        """A function that allocates the state of one parameter. Raises UsageError where ``saved`` does not fit."""
        require(saved is None or isinstance(saved, dict), "its optimizer state is malformed", UsageError)
        saved = {key: value for key, value in (saved or {}).items() if value is not None or key == "kahan_comp"}
        for key, value in saved.items():
            if isinstance(value, TensorRef) and (value.conj or value.neg):
                raise UsageError(f"{key} was saved as a conjugate or negative view, which resume does not support")
        if not saved and self._weight_to_halve(param) is None:
            return None
        if saved and is_packed_group(hyper):
            content = _types_and_shapes(saved)
            if id(param) in self.weights and not {"residual", "master"} & content.keys():
                layout = self.optimizer.state_layout(group, param, exact_names(content))
                content |= {key: what for key, what in layout.items() if key in ("residual", "master")}
            if problem := layout_problem(self.optimizer, group, param, content):
                raise UsageError(problem)
            return partial(self._copy_state, param, saved, group)
        step = 0
        if saved:
            self._check_published(param, saved, group, hyper)
            step = foreign.step_of({k: self.builder.build(v) for k, v in saved.items() if k == "step"}, hyper)
        return partial(self._pack_state, param, saved, group, step)

    def _check_published(
        self, param: torch.Tensor, saved: Mapping[str, Any], group: dict[str, Any], hyper: Mapping[str, Any]
    ) -> None:
        shape = tuple(param.shape)
        shapes = {**dict.fromkeys(self.optimizer.moments(group, shape), shape), **self.optimizer.factored(shape)}
        if problem := foreign.state_problem(saved.keys(), shapes.keys(), self.optimizer.rule_id, hyper):
            raise UsageError(problem)
        for key, expected in shapes.items():
            ref = saved[key]
            if not isinstance(ref, TensorRef) or not ref.dtype.torch.is_floating_point:
                raise UsageError(f"{key} is not a tensor of floating-point numbers")
            if ref.shape != expected:
                raise UsageError(f"{key} was saved with shape {list(ref.shape)}, here it has {list(expected)}")
        if isinstance(kahan := saved.get("kahan_comp"), TensorRef) and kahan.shape == shape != (1,):
            raise UsageError(
                "has a Kahan compensation, which packed state cannot keep; resume into the class that saved it"
            )
        require(
            param.element_size() != 2 or id(param) in self.weights,
            "its residual or master comes from its weight, which is not in model=; give the model that has it",
            UsageError,
        )

    def _copy_state(self, param: torch.Tensor, saved: Mapping[str, TensorRef], group: dict[str, Any]) -> NewState:
        """New state, to be copied from saved state of the same layout."""
        exact = exact_names(_types_and_shapes(saved))
        state = self.optimizer.initial_state(group, param, exact)
        fills = [copy_of(ref, state[key]) for key, ref in saved.items()]
        if not {"residual", "master"} & saved.keys():
            fills += self._complete_weight(param, group, state, exact)
        return state, fills

    def _pack_state(self, param: torch.Tensor, saved: Mapping[str, Any], group: dict[str, Any], step: int) -> NewState:
        """New state, to be packed from plain moments and weights; without saved moments they are zero."""
        shape = tuple(param.shape)
        moments = self.optimizer.moments(group, shape)
        exact = {name for name in moments if self._is_exact(saved.get(name))}
        if self._is_exact(self._weight_to_halve(param)):
            exact.add("residual")
        state = self.optimizer.initial_state(group, param, exact)
        state["step"].fill_(step)
        fills = [
            copy_of(saved[name], state[name])
            if name in state
            else self._moment(saved[name], self.optimizer.codec(group, moments[name], param), name, state)
            for name in ((*moments, *self.optimizer.factored(shape)) if saved else ())
        ]
        return state, fills + self._complete_weight(param, group, state, exact)

    def _moment(self, ref: TensorRef, codec: Codec, name: str, state: dict[str, torch.Tensor]) -> Fill:
        """Fills the codes and scales of moment ``name``: takes the stored parts, or encodes the values.

        Values that the codec refuses stay in fp32, as they would in a file.
        """
        stored = self._if_stored(ref, codec)

        def write(streamer: Streamer) -> None:
            codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
            encoded = ((start, codec.encode(piece.to(codes.device))) for start, piece in _pieces(streamer, ref))
            try:
                for start, parts in encoded if stored is None else stored.chunks(ref, "codes", "scales"):
                    assign(codes.view(-1), start, parts["codes"])
                    assign(scales, start // GROUP, parts["scales"])
            except RefusedError as exc:
                log.info("%s of a parameter stays in fp32: %s", name, exc)
                del state[f"{name}_codes"], state[f"{name}_scales"]
                state[name] = torch.empty(ref.shape, dtype=torch.float32, device=codes.device)
                streamer.copy(ref, state[name])

        return Fill(ref, write)

    def _complete_weight(
        self, param: torch.Tensor, group: dict[str, Any], state: dict[str, torch.Tensor], exact: set[str]
    ) -> list[Fill]:
        """The fill for the master of a parameter, or for the residual of one that takes half of its fp32 weights."""
        weight = self.weights.get(id(param))
        if weight is not None and "master" in state:
            return [copy_of(weight, state["master"])]
        if weight is None or self._weight_to_halve(param) is None:
            return []
        codec, residual = self.optimizer.codec(group, "master", param, exact), state["residual"].view(-1)
        stored, name = self._if_stored(weight, codec), _residual_of(codec)[0]

        def write(streamer: Streamer) -> None:
            for start, parts in () if stored is None else stored.chunks(weight, name):
                assign(residual, start, parts[name])
            for start, piece in _pieces(streamer, weight) if stored is None else ():
                part = residual[start : start + len(piece)]
                _split(piece.to(part.device), part, codec)

        return [Fill(weight, write)]

    def _is_exact(self, ref: object) -> bool:
        return self.stored is not None and isinstance(ref, TensorRef) and self.stored.is_exact(ref)

    def _round_weight(self, param: torch.Tensor, group: dict[str, Any]) -> Fill | None:
        """The upper half of fp32 weights into a bf16 parameter of any strides, rounded as its residual expects."""
        weight = self._weight_to_halve(param)
        if weight is None or param.dtype != torch.bfloat16:
            return None
        codec = self.optimizer.codec(group, "master", param, {"residual"} if self._is_exact(weight) else ())
        stored, kind = self._if_stored(weight, codec), _residual_of(codec)[1]

        def write(streamer: Streamer) -> None:
            target = param.detach() if param.dim() else param.detach().view(1)
            for start, parts in () if stored is None else stored.chunks(weight, "exponent", "mantissa"):
                assign(target, start, bf16_from_planes(parts))
            for start, piece in _pieces(streamer, weight) if stored is None else ():
                assign(target, start, _split(piece, torch.empty_like(piece, dtype=kind), codec))

        return Fill(weight, write)


def _types_and_shapes(saved: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]] | None]:
    """Element type and shape of saved state; None for anything but a tensor."""
    return {key: (ref.dtype.torch, ref.shape) if isinstance(ref, TensorRef) else None for key, ref in saved.items()}
