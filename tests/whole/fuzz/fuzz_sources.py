"""The target ``values``: checkpoints that the real libraries write, of values that no training writes.

What is compressed comes back byte for byte where nothing lossy is asked for, and always in the same length. All else is
a refusal by an error that the guide documents.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz_checks import REFUSED, BrokenError, attempt, digest, silent
from fuzz_formats import distributed, safetensors_file
from fuzz_kinds import mixed, run_of, train
from fuzz_seeds import Tree, numbered_storages
from fuzz_values import Values
from fuzz_watch import content_of

import ckpt8
from ckpt8.cli.show.inspect import show
from ckpt8.core.errors import CheckFailedError, InputError, OutputError, UsageError
from ckpt8.inspecting.checkpoint import inspect_checkpoint


def _tree(rng: random.Random, values: Values) -> Any:
    """A run that was valid, or was never one."""
    dice = rng.random()
    if dice < 0.45:
        return values.edited(copy.deepcopy(rng.choice(_runs())))
    return values.run() if dice < 0.8 else values.tree()


@cache
def _runs() -> tuple[dict[str, Any], ...]:
    """Valid checkpoints of several optimizers."""
    made = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adamax, ckpt8.optim.AdamW, ckpt8.optim.Lion)
    named = run_of(torch.optim.AdamW)
    named["optimizer"]["param_groups"][0]["param_names"] = list(named["model"])
    return (*(run_of(each, **({"momentum": 0.9} if each is torch.optim.SGD else {})) for each in made), named, mixed())


def mutate(rng: random.Random) -> bytes | Tree:
    """A file of torch.save or safetensors, or a distributed checkpoint."""
    dice = rng.random()
    if dice < 0.15:
        return safetensors_file(rng)
    if dice < 0.3:
        return distributed(rng)
    values, stream = Values(rng), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = rng.choice(
            ({}, {}, {"pickle_protocol": rng.choice((3, 4, 5))}, {"_use_new_zipfile_serialization": False})
        )
        try:
            value = _tree(rng, values)
            with numbered_storages():
                torch.save(value, stream, **options)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, pickle.PicklingError, RecursionError):
            return b""  # torch does not save it
    return stream.getvalue()


def run(path: Path, rng: random.Random, _: object) -> bool:
    """There and back; whether the source was read."""
    preset = rng.choice(("lossless", "lossless", "flash", "compact", "archive"))
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
    elif how <= 7:
        _resume(packed, rng)
    elif how == 8:
        with ckpt8.open(packed) as file:
            for name in file.keys()[:20]:
                file.stats(name)
                attempt(lambda name=name: file.get_tensor(name), InputError)


def _resume(packed: Path, rng: random.Random) -> None:
    """Into a model and an optimizer that may not be those of the run: all of it or nothing."""
    model, optimizer = train(rng.choice((torch.optim.AdamW, torch.optim.SGD, ckpt8.optim.AdamW)))
    before = digest([model.state_dict(), optimizer.state_dict()])
    strict = rng.random() < 0.6
    done = attempt(
        lambda: ckpt8.resume(packed, model=model, optimizer=optimizer, strict=strict), InputError, UsageError
    )
    if done is REFUSED and digest([model.state_dict(), optimizer.state_dict()]) != before:
        raise BrokenError("a refused resume changes the model or the optimizer")


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
