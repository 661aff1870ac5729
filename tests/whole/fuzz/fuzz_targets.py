"""The targets: what is mutated, and everything of ckpt8 that then reads it. A target is one entry in ``TARGETS``."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_commands
import fuzz_environment
import fuzz_kinds
import fuzz_settings
import fuzz_sources
import torch
from fuzz_bytes import mutate_bytes, mutate_tree, render_json
from fuzz_checks import refused
from fuzz_container import mutate_container
from fuzz_pickle import cut_pickles, mutate_pickle
from fuzz_seeds import Tree, choose, distributed_seeds, make_tree, network, tree_seed
from fuzz_settings import Setting
from fuzz_zip import mutate_zip

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy


@dataclass(frozen=True)
class Target:
    """``mutate`` makes an input, ``write`` puts it at a path, ``run`` has ckpt8 read it.

    ``run`` gets the input too; it says whether it was read, and raises what is a finding. ``share`` is the part of all
    inputs that the target gets when all are run.
    """

    mutate: Callable[[random.Random], object]
    run: Callable[[Path, random.Random, Any], bool]
    share: float


def write(path: Path, data: object) -> None:
    """Put an input at ``path``: bytes as a file, a tree as a directory. Raises OSError or ValueError."""
    if path.is_dir():
        shutil.rmtree(path)
    if isinstance(data, fuzz_commands.Edited | Setting):
        data = data.content
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        make_tree(path, data)  # type: ignore[arg-type]


def read_source(path: Path, rng: random.Random, _: object) -> bool:
    """Open a checkpoint and plan it; of one in fifty that opens do all the rest, there and back."""
    plan: list[Plan] = []

    def look() -> None:
        with open_source(path, containers=False) as source:
            plan.append(plan_bundle(source, Policy.of(rng.choice(("flash", "archive")))))

    if refused(look):
        return False
    if rng.random() < 0.02:
        fuzz_sources.run(path, rng, None)
    return True


def read_container(path: Path, rng: random.Random, _: object) -> bool:
    """Some of the commands of the target ``manifest``, without an original that results are compared with."""
    good = not refused(lambda: ckpt8.verify(path, threads=1))
    reader = fuzz_commands.Reader(path, fuzz_kinds.Kind("any", b"", None, b""))
    for name in ("restore", "inspect", "tensors", *(("load", "unpack") if rng.random() < 0.5 else ())):
        with reader.output():
            fuzz_commands.COMMANDS[name][0](path, reader.folder, reader.kind)
    if rng.random() < 0.2:
        refused(lambda: ckpt8.resume(path, model=torch.nn.Linear(8, 5, bias=False)))
    return good


def resume(path: Path, rng: random.Random, _: object) -> bool:
    """Load a checkpoint into a model and an optimizer of one kind or another."""
    model, optimizer = network(rng.choice((torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam)))
    strict = rng.random() < 0.7
    return not refused(lambda: ckpt8.resume(path, model=model, optimizer=optimizer, strict=strict))


def _mutate_resume(rng: random.Random) -> bytes:
    return mutate_zip(rng, *choose(rng, "resume"))


def _mutate_legacy(rng: random.Random) -> bytes:
    seed, other = choose(rng, "legacy")
    return mutate_bytes(rng, seed, other) if rng.random() < 0.4 else _legacy_pickles(rng, seed)


def _legacy_pickles(rng: random.Random, seed: bytes) -> bytes:
    """Change one of the five pickles at the start of the file, by opcode."""
    pickles, rest = cut_pickles(seed)
    at = rng.choice((0, 1, 2, 3, 3, 3, 3, 4))
    pickles[at] = mutate_pickle(rng, pickles[at])
    return b"".join(pickles) + rest


def _mutate_zip(rng: random.Random) -> bytes:
    return mutate_zip(rng, *choose(rng, "zip"))


def _mutate_safetensors(rng: random.Random) -> bytes:
    seed, other = choose(rng, "safetensors")
    if rng.random() < 0.3:
        return mutate_bytes(rng, seed, other)
    length = int.from_bytes(seed[:8], "little")
    text = render_json(rng, mutate_tree(rng, json.loads(seed[8 : 8 + length])))
    stated = len(text) if rng.random() < 0.95 else rng.choice((0, 1, 2**63, 2**64 - 1, 10**8, len(text) + 1))
    return stated.to_bytes(8, "little") + text + seed[8 + length :]


def _mutate_container(rng: random.Random) -> bytes:
    return mutate_container(rng, *choose(rng, "container"))


NAMES = (
    "a\nb",
    "x" * 255,
    "é",
    "-o",
    "..x",
    "a/b/c/d",
    "model.safetensors.index.json",
    ".metadata",
    "\x1b[2J",
    "__0_0.distcp",
)


def _mutate_tree(rng: random.Random) -> Tree:
    tree = tree_seed()
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(tree))
        how = rng.randrange(8)
        if how == 0:
            tree[rng.choice(NAMES)] = tree.pop(name)
        elif how == 1:
            tree["link"] = rng.choice(
                ("old", "..", "../x", "/etc/passwd", "link", "old/up", "x" * 300, "old/./rng.pth", ".")
            )
        elif how == 2:
            tree[rng.choice(NAMES)] = rng.choice(
                (b"", b"{", b"PK\3\4", b"\x80\x02}.", None, b"\x08\0\0\0\0\0\0\0{}      ")
            )
        else:
            kind = rng.choice(("zip", "legacy", "safetensors", "container"))
            tree[rng.choice((name, "new.bin"))] = TARGETS[kind].mutate(rng)
        if how == 3:
            tree.pop(name, None)
    return tree


def _mutate_metadata(rng: random.Random) -> Tree:
    """A distributed checkpoint whose ``.metadata``, and sometimes its slices, are changed."""
    tree = dict(rng.choice(distributed_seeds()))
    content = tree[".metadata"]
    tree[".metadata"] = mutate_pickle(rng, content) if rng.random() < 0.7 else mutate_bytes(rng, content)
    if rng.random() < 0.1:
        tree["__0_0.distcp"] = mutate_bytes(rng, tree["__0_0.distcp"])
    return tree


TARGETS: dict[str, Target] = {
    "zip": Target(_mutate_zip, read_source, 0.07),
    "legacy": Target(_mutate_legacy, read_source, 0.15),
    "safetensors": Target(_mutate_safetensors, read_source, 0.3),
    "metadata": Target(_mutate_metadata, read_source, 0.29),
    "container": Target(_mutate_container, read_container, 0.02),
    "manifest": Target(fuzz_commands.mutate, fuzz_commands.run, 0.08),
    "values": Target(fuzz_sources.mutate, fuzz_sources.run, 0.05),
    "environment": Target(fuzz_settings.mutate, fuzz_environment.run, 0.019),
    "process": Target(fuzz_settings.mutate, fuzz_environment.run_process, 0.001),
    "directory": Target(_mutate_tree, read_source, 0.01),
    "resume": Target(_mutate_resume, resume, 0.01),
}
"""By name. A reader of another format is one more line."""
