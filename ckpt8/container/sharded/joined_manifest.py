"""One manifest for the containers of all ranks, with the names of the state dict in place of those in each file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt8.codecs import codec_class
from ckpt8.container.manifest import Manifest, Pack, ParameterRecord, StorageRecord
from ckpt8.core.text import box_text

_PLACE = re.compile(r"@[\dx]*$")
"""The end of the name that a file gives to one of several slices of a parameter."""

_STATE = ".state."


def join_manifests(
    directory: str, manifests: Sequence[tuple[str, Manifest]], shapes: Mapping[str, Sequence[int]]
) -> Manifest:
    """The manifest of a directory, of files with these names; ``shapes`` are those of whole tensors by name.

    Storages have the numbers of their files, one file after the other. A slice has the name of its tensor and its
    place, such as ``weight[0:64,:]``; what belongs to a file alone has the name of the file before its own.
    """
    first = manifests[0][1] if manifests else Manifest("", "lossless", [], 0, 0)
    joined = Manifest(
        first.writer, first.preset, first.rules, first.slab, first.frame, directory=directory, budget=first.budget
    )
    optimizers: dict[str, int] = {}
    for file, manifest in manifests:
        _Joining(joined, file, manifest, shapes, optimizers).add()
    return joined


class _Joining:
    """Adds the manifest of one file. ``optimizers`` are the numbers of optimizers, by their place."""

    def __init__(
        self,
        joined: Manifest,
        file: str,
        manifest: Manifest,
        shapes: Mapping[str, Sequence[int]],
        optimizers: dict[str, int],
    ) -> None:
        self._joined, self._file, self._own = joined, file, manifest
        self._first = len(joined.storages)
        self._optimizers = optimizers
        self._names: dict[int, str] = {}
        self._places: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        for each in manifest.slices:
            tensor = manifest.tensors[each.tensor]
            place = box_text(each.offsets, tensor.shape, shapes.get(each.name, tensor.shape))
            self._tensors[each.tensor] = self._names[tensor.storage] = each.name + place
            self._places[tensor.storage] = place

    def add(self) -> None:
        """Add all records."""
        packs = {id(pack): self._pack(pack) for pack in self._own.packs}
        configs: dict[int, dict[str, Any]] = {}
        for index, record in enumerate(self._own.storages):
            if id(record.codec) not in configs:
                configs[id(record.codec)] = self._codec(record.codec)
            pack = None if record.pack is None else packs[id(record.pack)]
            codec = configs[id(record.codec)]
            self._joined.storages.append(replace(record, name=self._name(index, record), codec=codec, pack=pack))
        self._joined.packs += packs.values()
        first = self._first
        self._joined.tensors += [
            replace(each, name=self._tensors.get(at, f"{self._file}:{each.name}"), storage=each.storage + first)
            for at, each in enumerate(self._own.tensors)
        ]
        self._joined.members += [
            replace(
                each,
                path=self._file if len(self._own.members) == 1 else f"{self._file}/{each.path}",
                skeleton=each.skeleton + first,
                segments=[[offset, storage + first] for offset, storage in each.segments],
                crc_fields=[[offset, storage + first] for offset, storage in each.crc_fields],
            )
            for each in self._own.members
        ]
        self._joined.parameters += map(self._parameter, self._own.parameters)

    def _name(self, index: int, record: StorageRecord) -> str:
        return self._names.get(index) or f"{self._file}:{record.name}"

    def _pack(self, pack: Pack) -> Pack:
        storages = [index + self._first for index in pack.storages]
        return replace(pack, name=f"{self._file}:{pack.name}", codec=self._codec(pack.codec), storages=storages)

    def _codec(self, config: dict[str, Any]) -> dict[str, Any]:
        """A stored configuration with the numbers of storages in the joined manifest."""
        first, found = self._first, dict(config)
        for name in codec_class(config["id"]).companions:
            value = config.get(name)
            if isinstance(value, int):
                found[name] = value + first
            elif isinstance(value, (list, tuple)):  # row and column statistics, and the size of matrices
                found[name] = [value[0] + first, value[1] + first, *value[2:]]
        if "runs" in config:
            found["runs"] = [[None if run[0] is None else run[0] + first, *run[1:]] for run in config["runs"]]
        return found

    def _parameter(self, record: ParameterRecord) -> ParameterRecord:
        storage = min(record.moments.values(), default=-1)
        name = _PLACE.sub("", record.name) + self._places.get(storage, "")
        steps = record.steps
        if steps is not None:
            home = self._names.get(storage, "").partition(_STATE)[0]
            weight = steps.get("weight_storage")
            steps = steps | {
                "optimizer": self._optimizers.setdefault(home, len(self._optimizers)),
                "weight_storage": weight + self._first if isinstance(weight, int) else None,
            }
        moments = {slot: index + self._first for slot, index in record.moments.items()}
        return replace(record, name=name, moments=moments, steps=steps)
