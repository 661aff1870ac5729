"""Save plans of many ranks without data: parameters by name and shape, cut by a mesh, as torch's planners get them."""

from __future__ import annotations

import itertools
from math import prod

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

MOMENTS = ("exp_avg", "exp_avg_sq")


def llama(layers=32, width=4096, hidden=14336, keys=1024, vocabulary=128256):
    """Shapes of a Llama, by name; those of the 8B unless told."""
    shapes = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (width, width) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (keys, width) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (width, hidden)
        shapes |= {f"{at}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def _cut(whole, parts, at):
    """Part ``at`` of a stretch (start, length), as torch.chunk cuts it."""
    start, length = whole
    step = -(-length // parts)
    first = min(at * step, length)
    return start + first, min(step, length - first)


def tensor_item(name, shape, box, dtype=torch.float32, sharded=True):
    offsets, sizes = (torch.Size(each) for each in box)
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), torch.Size(shape))
    kind = WriteItemType.SHARD if sharded else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)


def whole(shape):
    return (0,) * len(shape), tuple(shape)


def adam_items(name, shape, box, sharded=True):
    """Weight, step and moments of a slice."""
    items = [tensor_item(f"model.{name}", shape, box, torch.bfloat16, sharded)]
    state = f"optimizer.state.{name}"
    items.append(tensor_item(f"{state}.step", (), ((), ()), sharded=False))
    return [*items, *(tensor_item(f"{state}.{key}", shape, box, sharded=sharded) for key in MOMENTS)]


def mesh_plans(shapes, replicas=1, shards=1, tensor_parallel=1, items=adam_items):
    """Plans of replicas x shards x tensor_parallel ranks: FSDP2 cuts rows, tensor parallelism rows or columns.

    Vectors are whole on every rank of tensor_parallel, as norms are.
    """
    plans = []
    for _, shard, part in itertools.product(range(replicas), range(shards), range(tensor_parallel)):
        found = []
        for name, shape in shapes.items():
            spans = [(0, size) for size in shape]
            if len(shape) > 1:
                across = "down_proj" in name or ".o_proj" in name
                spans[int(across)] = _cut(spans[int(across)], tensor_parallel, part)
            spans[0] = _cut(spans[0], shards, shard)
            offsets, sizes = zip(*spans, strict=True)
            found += items(name, shape, (offsets, sizes), sharded=shards * tensor_parallel > 1)
        plans.append(SavePlan(found, planner_data={}))
    return plans


def homes(plans):
    """The ranks that write each slice: {(name, offsets): [rank, ...]}, without empty ones."""
    found = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None or prod(item.tensor_data.chunk.sizes):
                found.setdefault((item.index.fqn, item.index.offset), []).append(rank)
    return found


def together(plans, shapes, keys=MOMENTS):
    """The share of parameters of which every slice has its weight and its state in the plan of one rank."""
    places = {name: {} for name in shapes}
    for (name, offset), ranks in homes(plans).items():
        parameter = name.removeprefix("model.")
        if name.startswith("optimizer.state."):
            parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
            if key not in keys:
                continue
        places[parameter].setdefault(offset, set()).update(ranks)
    return sum(all(len(ranks) == 1 for ranks in slices.values()) for slices in places.values()) / len(shapes)


def loads(plans):
    """Bytes that each rank writes."""
    tensors = ([item.tensor_data for item in plan.items if item.tensor_data is not None] for plan in plans)
    return [sum(prod(each.chunk.sizes) * each.properties.dtype.itemsize for each in rank) for rank in tensors]
