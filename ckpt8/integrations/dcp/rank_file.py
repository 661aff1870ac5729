"""What one rank writes: the values of its plan as a model and an optimizer, compressed into one container.

Tensors are taken from the memory of the state where they lie there as they are, and else made when read. A value that
is not contiguous, or that the planner makes anew each time it is asked, has a stand-in in the object that is
compressed: a storage of its size that nobody writes to. Its elements are copied chunk by chunk, so that memory beside
the state does not grow with the number of such values.

A state dict has flat names: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``,
``optimizer.param_groups.0.lr``. ``build`` nests the slices again and adds settings and steps, so that compression
recognises roles and update rules as in any other checkpoint.
"""

import io
import mmap
import re
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers.dcp_metadata import GROUPS, PARAMETERS, STATE
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.gate import refusal_of_bytes
from ckpt8.checkpoint.sources.live_object import live_checkpoint
from ckpt8.checkpoint.tree import Components, TensorRef, format_path, is_setting
from ckpt8.checkpoint.vocabulary import model_path
from ckpt8.compressing.compressor import Compressor, Options, OverBudgetError
from ckpt8.compressing.device_encoder import choose_encoder
from ckpt8.compressing.plan import Measured
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.collecting import RankFile
from ckpt8.container.sharded import OBJECTS, Shape, SliceKey, slices_of
from ckpt8.container.steps import NO_BUDGET
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Box, DType
from ckpt8.core.text import listed, shown
from ckpt8.core.workers import rows, scratch
from ckpt8.optim.known_optimizers import SIDE_STATE, STATE_ROLES, TENSORS, WHOLE_SHAPE

_STATE = re.compile(r"(?:(?P<prefix>.*?)\.)?state\.(?P<owner>.+)\.(?P<key>[^.]+)", re.DOTALL)
_GROUP = re.compile(r"(?:(?P<prefix>.*?)\.)?param_groups\.(?P<owner>.+)\.(?P<key>[^.]+)", re.DOTALL)
WEIGHTS, OPTIMIZER, OTHER = "weights", "optimizer", "other"
"""Keys for values without one in their names: weights at the top level of a state dict, the state of an optimizer that
is the state dict itself, and everything else."""

Piece = tuple[str, Shape, Shape, Shape]
"""A slice of a tensor: its name, the offsets and sizes of the slice, and the shape of the whole."""


def slot(number: int) -> TensorRef:
    """A placeholder for the value of that number."""
    return TensorRef(str(number), DType.UINT8, 0, (), ())


class Naming:
    """Finds the place of a value in the object of a file. ``names`` are of all values, ``objects`` of non-tensors."""

    def __init__(self, names: Iterable[str], objects: Iterable[str] = ()) -> None:
        names = list(names)
        states = (match for match in map(_STATE.fullmatch, names) if match)
        matches = [each for each in states if each["key"] in STATE_ROLES or slot_of(each["key"]) == "statistic"]
        self._prefixes = {match["prefix"] for match in matches}
        self._trained = {match["owner"] for match in matches}
        self._bare = not (matches or any(True for _ in objects) or any(model_path(name.split(".")) for name in names))

    def split(self, name: str, pattern: re.Pattern[str] = _STATE) -> tuple[str, str, str] | None:
        """Optimizer, parameter and key of a value that is part of an optimizer's state, else None.

        With the pattern ``_GROUP``: optimizer, group or parameter, and key of a setting.
        """
        match = pattern.fullmatch(name)
        if match is None or match["prefix"] not in self._prefixes:
            return None
        return match["prefix"] or OPTIMIZER, match["owner"], match["key"]

    def place(self, name: str) -> Components:
        """The path of a tensor. Joined by dots it is its name in the file, unless names collide or are too long."""
        if (state := self.split(name)) is not None:
            return state[0], STATE, *state[1:]
        return model_path(name.split(".")) or (WEIGHTS if self._bare or name in self._trained else OTHER, name)


def build(naming: Naming, pieces: Sequence[Piece], known: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a file with a slot for each of ``pieces``.

    ``known`` are the values that the state dict of this rank has, by name. They give the settings and steps of the
    optimizer, whichever rank stores them. An average over rows or columns is with the moments of every slice that it
    belongs to.
    """
    tree: dict[str, Any] = {}
    states: dict[Components, list[tuple[Box, dict[str, Any]]]] = {}
    averages = []
    for number, (name, offset, sizes, whole) in enumerate(pieces):
        path = naming.place(name)
        kind = slot_of(path[-1]) if path[-3:-2] == (STATE,) else None
        if kind == "statistic":
            averages.append((number, path, (offset, sizes), whole))
            continue
        own = _put(tree, path, offset, number)
        if kind == "moment1":
            states.setdefault(path[:-1], []).append(((offset, sizes), own))
            if sizes != whole:
                own[WHOLE_SHAPE] = [*whole]
    for number, path, box, whole in averages:
        homes = [own for place, own in states.get(path[:-1], ()) if average_of(path[-1], place) == box]
        for own in homes:
            own[path[-1]] = slot(number)
        if not homes:
            _put(tree, path, box[0], number).update({} if box[1] == whole else {WHOLE_SHAPE: [*whole]})
    _add_settings(tree, naming, known)
    return tree


def slot_of(key: str) -> str | None:
    """The slot of a key of an optimizer's state; None for an unknown one."""
    return TENSORS[key].slot if key in TENSORS else None


def average_of(key: str, box: Box) -> Box | None:
    """The slice of the average ``key`` that belongs to a slice of a parameter; None where its shape is unknown."""
    offsets, sizes = box
    if len(offsets) != len(sizes):
        return None
    ends = TENSORS[key].shape(tuple(offset + size for offset, size in zip(offsets, sizes, strict=True)))
    sizes = TENSORS[key].shape(tuple(sizes))
    return tuple(end - size for end, size in zip(ends, sizes, strict=True)), sizes


def _put(tree: dict[str, Any], path: Components, offset: Shape, number: int) -> dict[str, Any]:
    """Put a slot at ``path``, or next to it for a further slice of the same tensor. Returns the node that holds it."""
    at = "x".join(map(str, offset))
    sliced = (*path[:-2], f"{path[-2]}@{at}", path[-1]) if STATE in path[-3:-2] else (*path[:-1], f"{path[-1]}@{at}")
    for candidate in (path, sliced, (OTHER, f"{number}:{format_path(path)}")):
        node: Any = tree
        for component in candidate[:-1]:
            node = node.setdefault(component, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and candidate[-1] not in node:
            node[candidate[-1]] = slot(number)
            return node
    raise AssertionError("the last candidate holds the number of the slot")


def _add_settings(tree: dict[str, Any], naming: Naming, known: Mapping[str, Any]) -> None:
    """Complete the optimizers in ``tree``: groups that name its parameters, and scalars that another rank stores."""
    states: dict[tuple[str, str], dict[str, Any]] = {}
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for name, value in known.items():
        state, setting = naming.split(name), naming.split(name, _GROUP)
        if state is not None:
            states.setdefault(state[:2], {})[state[2]] = value
        elif setting is not None:
            settings.setdefault(setting[0], {}).setdefault(setting[1], {})[setting[2]] = value
    for optimizer, node in tree.items():
        if not isinstance(node, dict) or not isinstance(node.get(STATE), dict):
            continue
        whole = []
        for name, own in node[STATE].items():
            complete = states.get((optimizer, _base(name)), {})
            for key in complete.keys() & SIDE_STATE - own.keys():
                own[key] = _number_of(complete[key])
            if complete.keys() <= own.keys():
                whole.append(name)
        node[GROUPS] = _groups(whole, settings.get(optimizer, {}))


def _base(parameter: str) -> str:
    """The name of a parameter without the place of its slice, as ``_put`` gives it."""
    return re.sub(r"@[\dx]*$", "", parameter)


def _groups(parameters: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of ``parameters``, which have their whole state here. The step of any other is unknown."""
    groups = []
    for owner, values in settings.items():
        listed = values.get(PARAMETERS)
        names = {str(parameter) for parameter in listed} if isinstance(listed, list) else {owner}
        here = [name for name in parameters if _base(name) in names]
        if here:
            plain = {key: _number_of(value) for key, value in values.items() if key != PARAMETERS}
            groups.append({PARAMETERS: here, **{key: value for key, value in plain.items() if is_setting(value)}})
    return groups


def _number_of(value: Any) -> Any:
    """The number in a tensor of one element; None for another tensor, other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.item() if type(value) is torch.Tensor and value.numel() == 1 else None
    return value


def fill_slots(node: Any, values: Sequence[Any]) -> Any:
    """A copy of ``node`` with the values in its slots."""
    if isinstance(node, TensorRef):
        return values[int(node.key)]
    return {key: fill_slots(child, values) for key, child in node.items()} if isinstance(node, dict) else node


@dataclass(frozen=True)
class Copy(WriteItem):
    """An average that another rank writes as well."""


def without_copies(plan: SavePlan) -> SavePlan:
    """The plan as it is of use where nothing depends on averages."""
    return replace(plan, items=[item for item in plan.items if not isinstance(item, Copy)])


_KEPT = 4
"""Values that stay in memory after the planner has made them: weight and moments of a parameter, and one more."""

_LARGE = 1 << 16
"""Bytes from which on a stand-in has pages of its own: a process has no more than some ten thousand mappings."""

_DTYPES = frozenset(dtype.label for dtype in DType)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sources:
    """Asks ``planner`` for the values of a plan. ``made`` reads stand-ins, by the address of their storages."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._storages: dict[tuple[object, ...], torch.UntypedStorage] = {}
        self._dtypes: dict[tuple[torch.device, int], torch.dtype] = {}
        self._last: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.made: dict[int, Callable[[int, memoryview], None]] = {}

    def resolve(self, item: WriteItem) -> Any:
        """The value of an item as the planner has it; a plain tensor, see ``is_plain``, in a storage that it fills."""
        value = self._planner.resolve_data(item)
        if not isinstance(value, torch.Tensor) or not is_plain(value) or not value.numel():
            return value
        shape, dtype, memory = value.shape, value.dtype, StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        del value
        if memory.expired():  # type: ignore[no-untyped-call]
            return _over(self._stand_in(shape, dtype, partial(self._last_made, item)), dtype, shape)
        value = _resolved(self._planner, item)
        # torch.save writes no two types that begin at one place.
        known = self._dtypes.setdefault((value.device, value.data_ptr()), dtype) is dtype
        flags = value.is_conj(), value.is_neg()
        if known and value.is_contiguous() and not any(flags):
            return self._in_place(value)
        key = value.device, value.data_ptr(), dtype, shape, value.stride(), flags
        if key not in self._storages:
            settled = _settled(value)
            self._storages[key] = self._stand_in(shape, dtype, lambda: settled)
        return _over(self._storages[key], dtype, shape)

    def _in_place(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor over its own memory, in a storage that holds nothing else; tensors in one place share it."""
        whole = value.untyped_storage()
        if value.nbytes == whole.nbytes():
            return value
        key = value.device, value.data_ptr(), value.nbytes
        if key not in self._storages:
            start = value.storage_offset() * value.element_size()
            self._storages[key] = whole[start : start + value.nbytes]
        return _over(self._storages[key], value.dtype, value.shape)

    def _stand_in(self, shape: torch.Size, dtype: torch.dtype, value: Callable[[], torch.Tensor]) -> Any:
        storage = _untouched(prod(shape) * dtype.itemsize)
        self.made[storage.data_ptr()] = partial(_read, value)
        return storage

    def _last_made(self, item: WriteItem) -> torch.Tensor:
        """The value of an item, which its plan keeps in memory; one of those made last. Thread-safe."""
        with self._lock:
            if id(item) not in self._last:
                while len(self._last) >= _KEPT:
                    self._last.popitem(last=False)
                self._last[id(item)] = _settled(_resolved(self._planner, item))
            self._last.move_to_end(id(item))
            return self._last[id(item)]


def _over(storage: torch.UntypedStorage, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A contiguous tensor that is all of a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage).view(shape)


def _untouched(nbytes: int) -> torch.UntypedStorage:
    """A storage that takes addresses, but no memory while nobody writes to it.

    The allocator would give a large one pages that the planner's values have used before.
    """
    if nbytes < _LARGE:
        return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The value of an item, without its gradient."""
    value: Any = planner.resolve_data(item)
    return cast("torch.Tensor", value.detach())


def _settled(value: torch.Tensor) -> torch.Tensor:
    """The value, once a GPU has computed it: other threads read it on streams of their own."""
    if value.is_cuda:
        torch.cuda.current_stream(value.device).synchronize()
    return value


def is_plain(value: torch.Tensor) -> bool:
    """Whether the elements are all there is to a tensor: no subclass, dense, of a known type."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and str(value.dtype).removeprefix("torch.") in _DTYPES
    )


def _read(get: Callable[[], torch.Tensor], first: int, buffer: memoryview) -> None:
    """Fill ``buffer`` with the bytes of a value from ``first`` on, in the order of its elements."""
    if not buffer:
        return
    value = get()
    size = value.element_size()
    start, stop = first // size, -(-(first + len(buffer)) // size)
    whole = buffer if len(buffer) == (stop - start) * size else scratch("stand-in", (stop - start) * size)
    if size in _INTEGERS and not (value.is_conj() or value.is_neg()):
        value = value.view(_INTEGERS[size])  # not every type can be copied
    out = torch.frombuffer(whole, dtype=torch.uint8).view(value.dtype)
    for part in rows(value, start, stop):
        out[: part.numel()].view(part.shape).copy_(part)
        out = out[part.numel() :]
    if whole is not buffer:
        buffer[:] = whole[first - start * size :][: len(buffer)]


_SHOWN = 5


class RankPlan:
    """The values of a plan, sorted into tensors that are packed and bytes of torch.save. Empty slices are left out."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        state = getattr(planner, "state_dict", None)
        self._known: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        self._plan = plan
        self._sources = Sources(planner)
        self._tensors: list[torch.Tensor] = []
        self._pieces: list[Piece] = []
        self._boxes: list[tuple[str, Shape, Shape]] = []
        self._objects: dict[str, tuple[int, int]] = {}
        self._pickled: dict[SliceKey, tuple[int, int]] = {}
        self._content = bytearray()
        for item in plan.items:
            self._add(item, self._sources.resolve(item))

    def _add(self, item: WriteItem, value: torch.Tensor | io.BytesIO) -> None:
        """Add a value. A copy is beside the slices of the file, and the index does not name it.

        Raises UsageError for a tensor that has no values, and for a plain one of another type or shape than planned.
        """
        name, offsets, data = item.index.fqn, tuple(item.index.offset or ()), item.tensor_data
        if not isinstance(value, torch.Tensor):
            self._objects[name] = self._place(value.getvalue())
            return
        if value.is_meta and value.numel():
            raise UsageError(f"{shown(name)}: is on the device meta and has no values; initialise it first")
        planned = None if data is None else (data.properties.dtype, tuple(data.chunk.sizes))
        if planned is not None and is_plain(value) and (value.dtype, tuple(value.shape)) != planned:
            raise UsageError(
                f"{shown(name)}: the planner gives {value.dtype} of {tuple(value.shape)} for {planned[0]} of "
                f"{planned[1]} in its plan; let create_local_plan say what resolve_data gives"
            )
        if not value.numel():
            return
        if not isinstance(item, Copy):
            self._boxes.append((name, offsets, tuple(value.shape)))
        if is_plain(value):
            whole = tuple(value.shape if data is None else data.size)
            self._pieces.append((name, offsets, tuple(value.shape), whole))
            self._tensors.append(value)
        elif not isinstance(item, Copy):
            content = io.BytesIO()
            torch.save(value, content)
            self._pickled[name, offsets] = self._place(content.getvalue())

    def _place(self, content: bytes) -> tuple[int, int]:
        place = len(self._content), len(content)
        self._content += content
        return place

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._boxes or self._objects)

    def warn_of_refusals(self, where: Path) -> None:
        """Warn of values that the reader will refuse."""
        places = self._objects | {name: place for (name, _), place in self._pickled.items()}
        contents = {name: bytes(self._content[start : start + length]) for name, (start, length) in places.items()}
        known = {content: refusal_of_bytes(content) for content in set(contents.values())}
        refusals = {name: refusal for name, content in contents.items() if (refusal := known[content]) is not None}
        if refusals:
            refused = [
                f"{name} ({type(self._known[name]).__name__})" if name in self._known else name for name in refusals
            ]
            reasons = dict.fromkeys(refusal.reason for refusal in refusals.values())
            warnings.warn(
                f"{where}: Ckpt8StorageReader will refuse {listed(refused, _SHOWN)}: {listed(reasons, _SHOWN)}; "
                "save numbers, texts, lists, dicts and tensors instead, or allow these classes with "
                "torch.serialization.add_safe_globals before loading",
                stacklevel=2,
            )

    def write(self, target: Path, policy: Policy, options: Options) -> tuple[RankFile, int]:
        """Write the container; what it holds, and its bytes. Raises OutputError."""
        tree = self._tree()
        names = {int(tensor.ref.key): tensor.name for tensor in classify(tree).tensors}
        slices = {name: self._pieces[number][:2] for number, name in names.items()}
        obj = fill_slots(tree, self._tensors)
        if self._content:
            obj[OBJECTS] = torch.frombuffer(self._content, dtype=torch.uint8)
        with live_checkpoint(obj, target.stem, self._sources.made) as checkpoint:
            bundle = Bundle.of(checkpoint, f"{target.stem}.pt")
            live = {
                key: storage
                for key, storage in getattr(checkpoint, "memory", {}).items()
                if storage.data_ptr() not in self._sources.made
            }
            encoder = choose_encoder(bundle, live, None, measure=options.stats)

            measured: Measured | None = None
            while True:
                compressor = Compressor(bundle, plan_bundle(bundle, policy, measured), options, encoder, slices=slices)
                try:
                    manifest = compressor.run(target, policy, force=False, tidy=False)
                except OverBudgetError as exc:
                    measured = exc.measured
                else:
                    break
        assert compressor.seal is not None  # noqa: S101 - it has written the file
        reasons = (manifest.storages[record.storage].reason or "" for record in slices_of(manifest).values())
        file = RankFile.of(
            target.name,
            compressor.seal.hex(),
            self._boxes,
            objects=self._objects,
            pickled=self._pickled,
            unspent=Counter(why.removeprefix(NO_BUDGET) for why in reasons if why.startswith(NO_BUDGET)),
        )
        return file, manifest.stored_nbytes or 0

    def _tree(self) -> dict[str, Any]:
        objects = [item.index.fqn for item in self._plan.items if item.type is WriteItemType.BYTE_IO]
        objects += [
            name
            for name, value in self._known.items()
            if not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")  # one piece, or many
        ]
        names = [*self._known, *(piece[0] for piece in self._pieces)]
        tree = build(Naming(names, objects), self._pieces, self._known)
        if OBJECTS in tree:
            # The bytes need this key, so a value of that name gets another one.
            tree[f"{OBJECTS}#"] = tree.pop(OBJECTS)
        return tree
