"""A format that exists in the tests alone, and its reader: what ``readers/__init__.py`` asks of a new one.

    8 bytes TINYCKPT | u32 little-endian length of the header | header | fp32 values, one tensor after the other

The header is JSON: the step, the options of AdamW, and by parameter its shape. Each parameter has three runs of values:
weight, exp_avg, exp_avg_sq.
"""

from __future__ import annotations

import json
from math import prod

from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, TensorRef
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType

MAGIC = b"TINYCKPT"
RUNS = ("weight", "exp_avg", "exp_avg_sq")
_START = len(MAGIC) + 4


def write(path, parameters, step, options):
    """``parameters`` are (weight, exp_avg, exp_avg_sq) by name, as fp32 tensors."""
    shapes = {name: list(runs[0].shape) for name, runs in parameters.items()}
    header = json.dumps({"step": step, "options": options, "shapes": shapes}).encode()
    values = [run.numpy().astype("<f4").tobytes() for runs in parameters.values() for run in runs]
    path.write_bytes(b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *values]))


def sniff(file):
    return file.source.length >= _START and file.read(0, len(MAGIC)) == MAGIC


def read(file):
    where, size = str(file.source), file.source.length
    end = _START + int.from_bytes(file.read(len(MAGIC), 4), "little")
    if end > size:
        raise InputError(f"{where}: cut off inside its header; copy it again")
    step, options, shapes = _header(file.read(_START, end - _START), where)
    storages, tensors = [], {}
    for name, shape in shapes.items():
        for run in RUNS:
            key, nbytes = f"{name}/{run}", 4 * prod(shape)
            if end + nbytes > size:
                raise InputError(f"{where}: cut off inside {key[:60]!r}; copy it again")
            storages.append(StorageInfo(key, DType.FLOAT32, end, nbytes))
            stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            tensors[name, run] = TensorRef(key, DType.FLOAT32, 0, tuple(shape), stride)
            end += nbytes
    if end != size:
        raise InputError(f"{where}: {size - end} bytes follow the last tensor; it is damaged")
    names = list(shapes)
    states = {k: {"step": step} | {run: tensors[name, run] for run in RUNS[1:]} for k, name in enumerate(names)}
    group = {**options, "params": list(range(len(names))), "param_names": names}
    tree = {
        "model": {name: tensors[name, "weight"] for name in names},
        "optimizer": {"state": states, "param_groups": [group]},
    }
    return OpenCheckpoint("tiny", file, storages, tree)


def _header(text, where):
    try:
        match json.loads(text):
            case {"step": int(step), "options": dict(options), "shapes": dict(shapes)}:
                counts = [number for shape in shapes.values() for number in shape]
                if all(type(number) is int and 0 <= number < 1 << 40 for number in counts):
                    return step, options, shapes
    except (ValueError, TypeError, RecursionError):
        pass
    raise InputError(f"{where}: its header is damaged")
