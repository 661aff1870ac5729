"""The target ``values``: checkpoints that the real libraries write, of values that no training writes.

What is compressed comes back byte for byte where nothing lossy is asked for, and always in the same length. All else is
a refusal by an error that the guide documents.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import random
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import torch
from fuzz_checks import REFUSED, BrokenError, attempt, digest, silent
from fuzz_seeds import Tree, distributed_seeds, numbered_storages
from fuzz_values import TEXTS, Values
from fuzz_watch import content_of

import ckpt8
from ckpt8.cli.show.inspect import show
from ckpt8.core.errors import CheckFailedError, InputError, OutputError, UsageError
from ckpt8.inspecting.checkpoint import inspect_checkpoint


def mutate(rng: random.Random) -> bytes | Tree:
    """A file of torch.save or safetensors, or a distributed checkpoint."""
    dice = rng.random()
    if dice < 0.15:
        return _safetensors(rng)
    if dice < 0.3:
        return _distributed(rng)
    values, stream = Values(rng), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = rng.choice(
            ({}, {}, {"pickle_protocol": rng.choice((3, 4, 5))}, {"_use_new_zipfile_serialization": False})
        )
        try:
            value = values.run() if rng.random() < 0.6 else values.tree()
            with numbered_storages():
                torch.save(value, stream, **options)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, pickle.PicklingError, RecursionError):
            return b""  # torch does not save it
    return stream.getvalue()


def run(path: Path, rng: random.Random, _: object) -> bool:
    """There and back; whether the source was read."""
    preset = rng.choice(("lossless", "lossless", "flash", "compact"))
    folder = path.parent / "out"
    folder.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _there_and_back(path, folder, preset, rng)
    finally:
        shutil.rmtree(folder)


def _there_and_back(path: Path, folder: Path, preset: str, rng: random.Random) -> bool:
    before, packed = content_of(path), folder / "x.ckpt8"
    rules = rng.choice(
        ((), (), ("*=lossless",), ("*w*=split24", "*=lossless"), ("*exp_avg=companded8",), ("*=split32",))
    )
    if rng.random() < 0.15:
        facts = attempt(lambda: inspect_checkpoint(path, tensors=True, full=rng.random() < 0.5), InputError)
        if facts is not REFUSED:
            json.dumps(facts, allow_nan=False)
            show(silent(), facts)
    # UsageError: a rule that fits nothing, or a codec that does not hold what it is given.
    made = attempt(
        lambda: ckpt8.compress(path, packed, preset=preset, rules=rules, threads=1), InputError, UsageError, OutputError
    )
    if made is REFUSED:
        if list(folder.iterdir()) or content_of(path) != before:
            raise BrokenError("a refused compression leaves or changes something")
        return False
    lossy = {record.codec["id"] for record in made.storages} - {"lossless/1", "split32/1", "reference/1"}
    found = ckpt8.verify(packed, path, threads=1)
    if found.failures:
        raise BrokenError(f"what was just compressed does not verify: {found.failures[0]}")
    back = ckpt8.restore(packed, folder / "back", threads=1)
    after = content_of(back)
    if not lossy and after != before:
        raise BrokenError("what is lossless comes back otherwise")
    if _sizes(after) != _sizes(before) or content_of(path) != before:
        raise BrokenError("what comes back has other files or lengths, or the source is changed")
    _look(path, packed, folder, rng, lossless=not lossy)
    return True


def _sizes(content: Any) -> Any:
    sized = (
        {name: each if each is None else len(each) for name, each in content.items()}
        if isinstance(content, dict)
        else {}
    )
    return sized or len(content)


def _look(path: Path, packed: Path, folder: Path, rng: random.Random, *, lossless: bool) -> None:
    """One more command on the container and its source."""
    how = rng.randrange(12)
    if how == 0:
        attempt(lambda: ckpt8.verify(packed, path, threads=1, resume_steps=1), CheckFailedError, UsageError, InputError)
    elif how == 1:
        found = attempt(lambda: ckpt8.diff(packed, path, threads=1), InputError)
        if found is not REFUSED:
            json.dumps(found.to_json(), allow_nan=False)
            if lossless and not found.identical:
                raise BrokenError("a lossless container differs from its source")
    elif how == 2 and path.is_file():
        _load(path, packed, lossless=lossless)
    elif how <= 4:
        to, name = rng.choice(
            (
                ("torch", "y.pt"),
                ("safetensors", "y.safetensors"),
                ("dcp", "y"),
                ("flashoptim", "y.pt"),
                ("trainer", "y"),
            )
        )
        source = rng.choice((path, packed))
        before = sorted(folder.iterdir())
        done = attempt(
            lambda: ckpt8.convert(source, folder / name, to=to, threads=1), InputError, UsageError, OutputError
        )
        if done is REFUSED and sorted(folder.iterdir()) != before:
            raise BrokenError("a refused conversion leaves something behind")
    elif how == 5 and path.is_file():
        _save(path, folder)
    elif how == 6:
        with ckpt8.open(packed) as file:
            for name in file.keys()[:20]:
                file.stats(name)
                attempt(lambda name=name: file.get_tensor(name), InputError)


def _load(path: Path, packed: Path, *, lossless: bool) -> None:
    """What torch loads, ckpt8 loads too."""
    found = attempt(lambda: ckpt8.load(packed, threads=1), InputError)
    try:
        expected = torch.load(path, weights_only=True)
    except Exception:
        return
    if found is REFUSED or (lossless and digest(found) != digest(expected)):
        raise BrokenError(f"torch loads the source, ckpt8 {'refuses it' if found is REFUSED else 'something else'}")


def _save(path: Path, folder: Path) -> None:
    """An object in memory: saved and loaded, or refused."""
    try:
        value = torch.load(path, weights_only=False)
        torch.save(value, io.BytesIO())
    except Exception:
        return
    target = folder / "saved.ckpt8"
    saved = attempt(
        lambda: ckpt8.save(value, target, preset="lossless", threads=1), InputError, UsageError, OutputError
    )
    if saved is REFUSED:
        if target.exists():
            raise BrokenError("a refused save leaves something behind")
        return
    loaded = attempt(lambda: ckpt8.load(target, threads=1), InputError)
    if loaded is not REFUSED and digest(loaded) != digest(value):
        raise BrokenError("what was saved loads as something else")


def _safetensors(rng: random.Random) -> bytes:
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


def _distributed(rng: random.Random) -> Tree:
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
