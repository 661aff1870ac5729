"""What one rank writes: the values of its plan as a model and an optimizer, compressed into one container."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt8.checkpoint.gate import refusal_of_bytes
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.live_object import LiveCheckpoint, live_checkpoint
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.compressor import Compressor, Options, within_budget
from ckpt8.compressing.gpu_encoder import choose_encoder
from ckpt8.compressing.plan import Measured
from ckpt8.compressing.policy import Policy
from ckpt8.container.facts import NO_BUDGET
from ckpt8.container.manifest import Manifest
from ckpt8.container.sharded.collecting import RankFile
from ckpt8.container.sharded.index import OBJECTS
from ckpt8.container.sharded.layouts import Shape
from ckpt8.container.sharded.slices import SliceKey, slices_of
from ckpt8.core.backend import part_of
from ckpt8.core.errors import UsageError
from ckpt8.core.text import listed, shown
from ckpt8.integrations.dcp.copied_statistics import Copy
from ckpt8.integrations.dcp.sources import Sources, is_plain
from ckpt8.integrations.dcp.tree import Naming, build, fill_slots, tensor_names

_SHOWN = 5


class RankPlan:
    """The values of a plan, sorted into tensors that are packed and bytes of torch.save. Empty slices are left out."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        state = getattr(planner, "state_dict", None)
        self._known: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        self._plan = plan
        self._sources = Sources(planner)
        self._tensors: list[torch.Tensor] = []
        self._slices: list[SliceKey] = []
        self._boxes: list[tuple[str, Shape, Shape]] = []
        self._objects: dict[str, tuple[int, int]] = {}
        self._pickled: dict[SliceKey, tuple[int, int]] = {}
        self._content = bytearray()
        for item in plan.items:
            value = self._sources.resolve(item)
            _check(item, value)
            if isinstance(item, Copy):
                self._add_copy(item.index.fqn, tuple(item.index.offset or ()), value)
            else:
                self._add(item.index.fqn, tuple(item.index.offset or ()), value)

    def _add_copy(self, name: str, offsets: Shape, value: torch.Tensor | io.BytesIO) -> None:
        """Add what the file holds beside its slices, and the index does not name."""
        if isinstance(value, torch.Tensor) and is_plain(value):
            self._slices.append((name, offsets))
            self._tensors.append(value)

    def _add(self, name: str, offsets: Shape, value: torch.Tensor | io.BytesIO) -> None:
        if not isinstance(value, torch.Tensor):
            self._objects[name] = self._place(value.getvalue())
        elif value.numel():
            self._boxes.append((name, offsets, tuple(value.shape)))
            if is_plain(value):
                self._slices.append((name, offsets))
                self._tensors.append(value)
            else:
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
        reasons: dict[str, None] = {}
        refused = []
        for name, content in contents.items():
            if (refusal := known[content]) is not None:
                reasons[refusal.reason] = None
                refused.append(f"{name} ({type(self._known[name]).__name__})" if name in self._known else name)
        if refused:
            warnings.warn(
                f"{where}: Ckpt8StorageReader will refuse {listed(refused, _SHOWN)}: {listed(reasons, _SHOWN)}; "
                "save numbers, texts, lists, dicts and tensors instead, or allow these classes with "
                "torch.serialization.add_safe_globals before loading",
                stacklevel=2,
            )

    def write(self, target: Path, policy: Policy, options: Options) -> RankFile:
        """Write the container. Raises OutputError."""
        tree = self._tree()
        names = tensor_names(tree)
        obj = fill_slots(tree, self._tensors.__getitem__)
        if self._content:
            obj[OBJECTS] = torch.frombuffer(self._content, dtype=torch.uint8)
        slices = {names[number]: each for number, each in enumerate(self._slices)}
        with part_of(self._whole_bytes()), live_checkpoint(obj, target.stem, self._sources.made) as checkpoint:
            bundle = Bundle.of(checkpoint, f"{target.stem}.pt")
            memory = checkpoint.memory if isinstance(checkpoint, LiveCheckpoint) else {}
            made = self._sources.made
            live = {key: storage for key, storage in memory.items() if storage.data_ptr() not in made}
            encoder = choose_encoder(bundle, live, None, measure=options.stats)

            def compress(options: Options, measured: Measured | None) -> tuple[Manifest, bytes | None]:
                compressor = Compressor(bundle, plan_bundle(bundle, policy, measured), options, encoder, slices=slices)
                return compressor.run(target, policy, force=False, tidy=False), compressor.seal

            manifest, seal = within_budget(options, compress)
        assert seal is not None  # noqa: S101 - it has written the file
        reasons = (manifest.storages[record.storage].reason or "" for record in slices_of(manifest).values())
        return RankFile.of(
            target.name,
            seal.hex(),
            self._boxes,
            objects=self._objects,
            pickled=self._pickled,
            unspent=_unspent(reasons),
        )

    def _whole_bytes(self) -> int:
        """Bytes of the tensors that all ranks save together, as far as this one knows of them."""
        sizes = {
            name: value.numel() * value.element_size()
            for name, value in self._known.items()
            if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")
        }
        planned = ((item.index.fqn, item.tensor_data) for item in self._plan.items)
        sizes |= {name: data.size.numel() * data.properties.dtype.itemsize for name, data in planned if data}
        return sum(sizes.values())

    def _tree(self) -> dict[str, Any]:
        objects = [item.index.fqn for item in self._plan.items if item.type is WriteItemType.BYTE_IO]
        objects += [
            name
            for name, value in self._known.items()
            if not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")  # one piece, or many
        ]
        naming = Naming([*self._known, *(name for name, _ in self._slices)], objects)
        sizes = {item.index.fqn: tuple(item.tensor_data.size) for item in self._plan.items if item.tensor_data}
        own = [tuple(value.shape) for value in self._tensors]
        shapes = [(shape, sizes.get(name, shape)) for (name, _), shape in zip(self._slices, own, strict=True)]
        tree = build(naming, self._slices, self._known, shapes)
        if OBJECTS in tree:
            # The bytes need this key, so a value of that name gets another one.
            tree[f"{OBJECTS}#"] = tree.pop(OBJECTS)
        return tree


def _check(item: WriteItem, value: Any) -> None:
    """Raise UsageError for a tensor that has no values, and for a plain one of another type or shape than planned."""
    if isinstance(value, torch.Tensor) and value.is_meta and value.numel():
        raise UsageError(f"{shown(item.index.fqn)}: is on the device meta and has no values; initialise it first")
    if item.tensor_data is None or not isinstance(value, torch.Tensor) or not is_plain(value):
        return
    planned = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
    if (value.dtype, tuple(value.shape)) != planned:
        raise UsageError(
            f"{shown(item.index.fqn)}: the planner gives {value.dtype} of {tuple(value.shape)} for {planned[0]} of "
            f"{planned[1]} in its plan; let create_local_plan say what resolve_data gives"
        )


def _unspent(reasons: Iterable[str]) -> dict[str, int]:
    """How many slices are not within the budget, by reason."""
    return Counter(why.removeprefix(NO_BUDGET) for why in reasons if why.startswith(NO_BUDGET))
