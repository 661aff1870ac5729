"""Headers of safetensors and metadata of distributed checkpoints, of values that no program writes."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
from typing import Any

import torch
from fuzz_seeds import Tree, distributed_seeds
from fuzz_values import TEXTS


def safetensors_file(rng: random.Random) -> bytes:
    """A header whose entries are valid one by one, over data of that length, with or without holes."""
    sizes = {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "I64": 8,
        "I32": 4,
        "U8": 1,
        "BOOL": 1,
        "F8_E4M3": 1,
        "U16": 2,
        "C64": 8,
    }
    header: dict[str, Any] = {}
    at = 0
    names = [
        *TEXTS,
        "state.0.exp_avg",
        "state.0.exp_avg_sq",
        "state.0.step",
        "w",
        "model.w",
        "lm_head.weight",
        "x" * 3000,
    ]
    for name in rng.sample(names, rng.choice((0, 1, 2, 5, 9))):
        dtype = rng.choice(list(sizes))
        shape = [rng.choice((0, 1, 2, 3, 8, 64, 70)) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
        size = math.prod(shape) * sizes[dtype]
        if at + size > 1 << 16:
            continue
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if rng.random() < 0.4:
        header["__metadata__"] = rng.choice(
            ({}, {"format": "pt"}, {"a": "b" * 999}, {"": ""}, {"a": 1}, {"a": None}, [], None, "x")
        )
    if header and rng.random() < 0.2:
        entry = header[rng.choice(list(header))]
        if isinstance(entry, dict) and "shape" in entry:
            entry[rng.choice(("dtype", "shape", "data_offsets", "x"))] = rng.choice(
                (
                    [0, at],
                    [at, 0],
                    [2**63, 2**63],
                    [-1, 3],
                    [[1]],
                    [1.0, 2],
                    "F4",
                    "x",
                    None,
                    [2**31, 2**31, 2],
                    [10**400],
                    {},
                    True,
                )
            )
    items = list(header.items())
    rng.shuffle(items)
    text = json.dumps(dict(items), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + rng.randbytes(at)


def distributed(rng: random.Random) -> Tree:
    """A distributed checkpoint whose metadata state other places, sizes, names and types."""
    tree = dict(rng.choice(distributed_seeds()))
    metadata = pickle.loads(tree[".metadata"])  # torch wrote it
    for _ in range(rng.choice((0, 1, 1, 2))):
        _edit_metadata(rng, metadata)
    tree[".metadata"] = pickle.dumps(metadata)
    if rng.random() < 0.1:
        tree.pop(rng.choice(list(tree)))
    return tree


def _edit_metadata(rng: random.Random, metadata: Any) -> None:
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    number = rng.choice((-1, 0, 1, 2, 5, 2**31, 2**63, 10**400, 0.5, None, "1"))
    if not entries or not places:
        return
    name, index, how = rng.choice(list(entries)), rng.choice(list(places)), rng.randrange(8)
    if how == 0:
        del entries[name]
    elif how == 1:
        entries[rng.choice(TEXTS)] = entries.pop(name)
    elif how == 2:
        del places[index]
    elif how == 3:
        object.__setattr__(
            places[index],
            rng.choice(("offset", "length", "relative_path")),
            rng.choice((number, "../x", "", "/x", "__0_0.distcp")),
        )
    elif how == 4:
        places[index] = places[rng.choice(list(places))]
    elif how == 5 and hasattr(entries[name], "size"):
        entries[name].size = rng.choice((torch.Size([2, 2]), torch.Size([2**40]), torch.Size([]), number, [number]))
    elif how == 6 and hasattr(entries[name], "chunks"):
        chunk = rng.choice(entries[name].chunks)
        setattr(
            chunk,
            rng.choice(("offsets", "sizes")),
            rng.choice((torch.Size([1, 0]), torch.Size([2**40, 8]), [number, number], number)),
        )
    elif metadata.planner_data:
        metadata.planner_data[name] = rng.choice(((), (name, 0), (number,), number, ("a", "b", "c"), (2**70,)))
