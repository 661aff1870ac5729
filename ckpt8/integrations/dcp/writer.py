"""The storage writer of ``ckpt8.integrations.dcp``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt8.checkpoint.gate import refusal_of_bytes
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.live_object import LiveCheckpoint, live_checkpoint
from ckpt8.checkpoint.walk import format_path
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.compressor import Compressor, Options
from ckpt8.compressing.gpu_encoder import choose_encoder
from ckpt8.compressing.policy import Policy
from ckpt8.container.facts import NO_BUDGET
from ckpt8.container.sharded import INDEX
from ckpt8.container.sharded.collecting import RankFile
from ckpt8.container.sharded.index import OBJECTS, ShardedIndex
from ckpt8.container.sharded.layouts import Shape
from ckpt8.container.sharded.slices import SliceKey, slices_of
from ckpt8.core.arguments import checked
from ckpt8.core.errors import OutputError, UsageError
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import listed
from ckpt8.core.workers import threads_of_rank
from ckpt8.integrations import is_local
from ckpt8.integrations.dcp.families import count_parted
from ckpt8.integrations.dcp.metadata import InDirectory, index_of
from ckpt8.integrations.dcp.planner import Ckpt8SavePlanner
from ckpt8.integrations.dcp.slices import ExactStorages
from ckpt8.integrations.dcp.tree import Naming, build, fill_slots, tensor_names

_FILE = re.compile(r"__(\d+)_(\d+)\.ckpt8")
_SHOWN = 5
_DCP_VERSION = "1.0.0"
_DTYPES = frozenset(dtype.label for dtype in DType)


class Ckpt8StorageWriter(InDirectory, StorageWriter):
    """Writes a checkpoint into the directory ``path``, which every rank must reach.

    ``preset``, ``budget``, ``rules``, ``threads`` and ``stats`` are those of ``ckpt8.save``. Rules match the names of
    the state dict, with ``weights.`` before those of trained parameters at its top level and ``other.`` before those
    that belong to no model and no optimizer. The writer packs slices where they are, CPU or GPU. It replaces a
    checkpoint in the directory, unless ``overwrite`` is False.

    >>> from torch.distributed import checkpoint as dcp
    >>> from ckpt8.integrations.dcp import Ckpt8StorageWriter
    >>> saved = dcp.save({"model": model.state_dict()}, storage_writer=Ckpt8StorageWriter("step-1"), no_dist=True)
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        preset: str | None = None,
        budget: float | None = None,
        rules: Sequence[str] = (),
        threads: int | None = None,
        stats: bool = True,
        overwrite: bool = True,
    ) -> None:
        super().__init__(path)
        self._policy = Policy.of(preset, rules, budget)
        self._options = Options(threads or threads_of_rank(), stats)
        self._overwrite = overwrite
        self._spread = True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise UsageError for a save without one checkpoint of all ranks."""
        if not kwargs.get("use_collectives", True):
            raise UsageError("Ckpt8StorageWriter writes one checkpoint for all ranks; leave out use_collectives=False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory. Raises OutputError where it holds a checkpoint that must stay."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OutputError(f"{self.path}: cannot be written: {exc.strerror}") from exc
        if (self.path / ".metadata").exists():
            raise OutputError(f"{self.path}: holds a checkpoint of another format; give another directory")
        if not self._overwrite and (self.path / INDEX).exists():
            raise OutputError(f"{self.path}: holds a checkpoint, and overwrite is False; give another directory")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks. Raises UsageError for a rule that matches nothing in any of them."""
        if self._policy.rules and all(getattr(plan, "usable", True) for plan in plans):
            items = [item for plan in plans for item in plan.items]
            tensors = {item.index.fqn for item in items if item.type is not WriteItemType.BYTE_IO}
            naming = Naming(tensors, {item.index.fqn for item in items} - tensors)
            self._policy.check_rules([format_path(naming.place(name)) for name in tensors])
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. Raises OutputError."""
        self._spread = not isinstance(planner, Ckpt8SavePlanner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        exact, saved = ExactStorages(), bytearray()
        tensors: list[torch.Tensor] = []
        slices: list[SliceKey] = []
        boxes: list[tuple[str, Shape, Shape]] = []
        objects: dict[str, tuple[int, int]] = {}
        pickled: dict[SliceKey, tuple[int, int]] = {}
        contents: dict[str, bytes] = {}
        for item in plan.items:
            data, name = planner.resolve_data(item), item.index.fqn
            offsets = tuple(item.index.offset or ())
            if isinstance(data, torch.Tensor):
                if not data.numel():
                    continue
                boxes.append((name, offsets, tuple(data.shape)))
                if _is_plain(data):
                    slices.append((name, offsets))
                    tensors.append(exact.tensor(data))
                    continue
            content = contents[name] = _as_bytes(data)
            place = len(saved), len(content)
            saved += content
            if isinstance(data, torch.Tensor):
                pickled[name, offsets] = place
            else:
                objects[name] = place
        if not boxes and not objects:
            return []
        found = getattr(planner, "state_dict", None)
        known = found if isinstance(found, Mapping) else {}
        self._warn_of_refusals(contents, known)
        tree = self._tree(slices, plan, known)
        names = tensor_names(tree)
        obj = fill_slots(tree, tensors.__getitem__)
        if saved:
            obj[OBJECTS] = torch.frombuffer(saved, dtype=torch.uint8)
        target = self._new_file(plan.storage_data)
        seal, unspent = self._compress(obj, target, {names[number]: each for number, each in enumerate(slices)})
        written = RankFile.of(target.name, seal, boxes, objects=objects, pickled=pickled, unspent=unspent)
        return [WriteResult(MetadataIndex(target.name), target.stat().st_size, written)]

    def _warn_of_refusals(self, contents: Mapping[str, bytes], values: Mapping[str, Any]) -> None:
        """Warn of values that the reader will refuse, given as torch.save writes them."""
        known = {content: refusal_of_bytes(content) for content in set(contents.values())}
        reasons: dict[str, None] = {}
        refused = []
        for name, content in contents.items():
            if (refusal := known[content]) is not None:
                reasons[refusal.reason] = None
                refused.append(f"{name} ({type(values[name]).__name__})" if name in values else name)
        if refused:
            warnings.warn(
                f"{self.path}: Ckpt8StorageReader will refuse {listed(refused, _SHOWN)}: {listed(reasons, _SHOWN)}; "
                "save numbers, texts, lists, dicts and tensors instead, or allow these classes with "
                "torch.serialization.add_safe_globals before loading",
                stacklevel=2,
            )

    @staticmethod
    def _tree(slices: list[tuple[str, tuple[int, ...]]], plan: SavePlan, known: Mapping[str, Any]) -> dict[str, Any]:
        objects = [item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO]
        objects += [
            name
            for name, value in known.items()
            if not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")  # one piece, or many
        ]
        tree = build(Naming([*known, *(name for name, _ in slices)], objects), slices, known)
        if OBJECTS in tree:
            # The bytes need this key, so a value of that name gets another one.
            tree[f"{OBJECTS}#"] = tree.pop(OBJECTS)
        return tree

    def _new_file(self, rank: int) -> Path:
        """A name that no file of this rank has yet: the old checkpoint stays whole until the new one replaces it."""
        taken = [number for path, owner, number in self._files() if owner == rank]
        return self.path / f"__{rank}_{max(taken, default=-1) + 1}.ckpt8"

    def _compress(self, obj: object, target: Path, slices: Mapping[str, SliceKey]) -> tuple[str, dict[str, int]]:
        """Write ``target``. Returns its seal, and how many slices are not within the budget, by reason."""
        with live_checkpoint(obj, target.stem) as checkpoint:
            bundle = Bundle.of(checkpoint, f"{target.stem}.pt")
            live = checkpoint.memory if isinstance(checkpoint, LiveCheckpoint) else {}
            encoder = choose_encoder(bundle, live, None, measure=self._options.stats)
            compressor = Compressor(bundle, plan_bundle(bundle, self._policy), self._options, encoder, slices=slices)
            manifest = compressor.run(target, self._policy, force=False)
        assert compressor.seal is not None  # noqa: S101 - it has written the file
        reasons = Counter(manifest.storages[record.storage].reason or "" for record in slices_of(manifest).values())
        unspent = {why.removeprefix(NO_BUDGET): count for why, count in reasons.items() if why.startswith(NO_BUDGET)}
        return compressor.seal.hex(), unspent

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, which replaces an older checkpoint, and remove the files of that one."""
        written: list[RankFile] = [result.storage_data for each in results for result in each]
        metadata.version = _DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        index = index_of(self.path, metadata, written, self._run_id)
        metadata.storage_data = index
        index.write(self.path)
        self._warn_of_losses(index, written)
        for path, _, _ in self._files():
            if path.name not in index.files:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _warn_of_losses(self, index: ShardedIndex, written: Sequence[RankFile]) -> None:
        """Warn of what is larger, or less well known, because no rank has all of it. Once."""
        unspent: Counter[str] = sum((Counter(each.unspent) for each in written), Counter())
        slices = sum(len(each.layout) for each in index.tensors.values())
        kept = f"{unspent.total()} of {slices} slices are kept as flash keeps them, not within the budget"
        measured = self._options.stats and self._policy.preset != "lossless"
        roles = frozenset(Role) if measured or unspent else {Role.WEIGHT}
        parted, total = count_parted(index.tensors, roles)
        if parted:
            cost = (
                "the error of their updates is not measured" if measured else "weights do not share bits with masters"
            )
            advice = "save with Ckpt8SavePlanner()" if self._spread else "no rank has all of them"
            said = f"{parted} of {total} parameters have weight and moments in different ranks' files"
            warnings.warn(f"{self.path}: {said}, so {kept if unspent else cost}; {advice}", stacklevel=2)
        elif unspent:
            warnings.warn(f"{self.path}: {kept}: {listed(unspent, _SHOWN)}", stacklevel=2)

    def _files(self) -> list[tuple[Path, int, int]]:
        """The files of ranks in the directory: path, rank, number."""
        matches = [(path, _FILE.fullmatch(path.name)) for path in self.path.iterdir()]
        return [(path, int(match[1]), int(match[2])) for path, match in matches if match]

    def storage_meta(self) -> StorageMeta:
        """The directory and the id of this save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self._run_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path of the file system."""
        return is_local(checkpoint_id)


def _is_plain(value: torch.Tensor) -> bool:
    """Whether the elements are all there is to a tensor: no subclass, dense, of a known type."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return plain and not value.is_quantized and str(value.dtype).removeprefix("torch.") in _DTYPES


def _as_bytes(value: torch.Tensor | io.BytesIO) -> bytes:
    """A value as torch.save writes it. The planner has done that for values that are no tensors."""
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()
