"""Distributed checkpoints for tests: those of ``make_dcp``, and small ones whose metadata is changed."""

from __future__ import annotations

import json
import pickle
import warnings

import make_dcp
import torch
import torch.distributed.checkpoint as dcp
from make_dcp import save as save_small
from ranks import run_ranks
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata


def run_processes(action, root, *arguments, world=2):
    """Run an action of ``make_dcp`` in the ranks of a gloo job; the losses that it gives."""
    run_ranks(make_dcp.work, world, action, root, [str(each) for each in arguments])
    return json.loads((root / f"{action}.json").read_text())


def read_metadata(root):
    """The metadata as torch reads it."""
    return pickle.loads((root / ".metadata").read_bytes())


def change_metadata(root, change):
    """Let ``change`` alter the metadata of a checkpoint."""
    metadata = read_metadata(root)
    replacement = change(metadata)
    (root / ".metadata").write_bytes(pickle.dumps(metadata if replacement is None else replacement))


def load_all(root):
    """All values of a checkpoint by name: tensors whole, others as they are. Without processes."""
    metadata = read_metadata(root)
    loaded = {}
    for name, value in metadata.state_dict_metadata.items():
        tensor = isinstance(value, dcp.metadata.TensorStorageMetadata)
        loaded[name] = torch.zeros(value.size, dtype=value.properties.dtype) if tensor else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=root, no_dist=True)
    return loaded


def save_in_pieces(tensors, root, others=None):
    """A checkpoint of tensors that lie in boxes, {name: (tensor, [(offsets, sizes), ...])}, however they are cut.

    ``others`` are further values by name, which are not cut.
    """
    parts = {}
    for name, (tensor, boxes) in tensors.items():
        for number, (offsets, sizes) in enumerate(boxes):
            part = tensor
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            parts[f"{name}/{number}"] = part.clone()
    save_small(parts | (others or {}), root)

    def join(metadata):
        known, places = metadata.state_dict_metadata, metadata.storage_data
        for name, (tensor, boxes) in tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
            for number, chunk in enumerate(chunks):
                before = next(index for index in places if index.fqn == f"{name}/{number}")
                places[MetadataIndex(name, chunk.offsets)] = places.pop(before)
            properties = known[f"{name}/0"].properties
            known[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
            metadata.planner_data[name] = (name,)
        for name in parts:
            del known[name], metadata.planner_data[name]

    change_metadata(root, join)
    return root


def adam_state(weights, seed=3, step=7.0):
    """The state dict of an AdamW over ``weights`` by name."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, weight in weights.items():
        m = torch.randn(weight.shape, generator=generator) * 1e-3
        state[name] = {"step": torch.tensor(step), "exp_avg": m, "exp_avg_sq": m * m}
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False, "params": list(weights)}
    return {"state": state, "param_groups": [group]}


def gaps(root, files):
    """Of every file all bytes outside the storages of its slices, found with torch's metadata and Python's zipfile."""
    import io
    import zipfile

    metadata = read_metadata(root)
    holes = {name: [] for name in files}
    for index, info in metadata.storage_data.items():
        if index.offset is None:
            continue
        content = (root / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in archive.infolist():
                if "/data/" in entry.filename:
                    start = entry.header_offset + 30
                    name_length, extra_length = content[start - 4 : start - 2], content[start - 2 : start]
                    start += int.from_bytes(name_length, "little") + int.from_bytes(extra_length, "little")
                    holes[info.relative_path].append((info.offset + start, entry.file_size))
            if archive.testzip() is not None:
                raise AssertionError(f"{index}: {archive.testzip()}")
    return holes
