"""The targets: what is mutated, and everything of ckpt8 that then reads it. A target is one entry in ``TARGETS``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import fuzz_environment as environment
from fuzz_checkpoints import choose, distributed_seeds, make_tree, odd_checkpoint, small_tree
from fuzz_commands import edited, read_source, resume_source, run_edited, there_and_back
from fuzz_mutations import mutate_bytes, mutate_header, mutate_legacy, mutate_pickle, mutate_zip


@dataclass(frozen=True)
class Target:
    """``mutate`` makes an input, ``run`` has ckpt8 read it.

    ``run`` gets the path and the input; it says whether that was read, and raises what is a finding. ``share`` is the
    part of all inputs that the target gets when all are run.
    """

    mutate: Callable
    run: Callable
    share: float


def write(path, data):
    """Put an input at ``path``: bytes as a file, a tree as a directory. Raises OSError or ValueError."""
    if path.is_dir():
        shutil.rmtree(path)
    data = getattr(data, "content", data)
    path.write_bytes(data) if isinstance(data, bytes) else make_tree(path, data)


def mutate_safetensors(rng, data, other=b""):
    """A file with changed bytes, or with another header."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, other)
    length = int.from_bytes(data[:8], "little")
    text = mutate_header(rng, data[8 : 8 + length])
    stated = len(text) if rng.random() < 0.95 else rng.choice((0, 1, 2**63, 2**64 - 1, 10**8, len(text) + 1))
    return stated.to_bytes(8, "little") + text + data[8 + length :]


NAMES = (
    "a\nb", "x" * 255, "é", "-o", "..x", "a/b/c/d", "model.safetensors.index.json", ".metadata", "\x1b[2J",
    "__0_0.distcp",
)  # fmt: skip
LINKS = ("old", "..", "../x", "/etc/passwd", "link", "old/up", "x" * 300, "old/./rng.pth", ".")
STARTS = (b"", b"{", b"PK\3\4", b"\x80\x02}.", None, b"\x08\0\0\0\0\0\0\0{}      ")


def mutate_directory(rng):
    """A directory of a framework in which files, links and names are others."""
    tree = small_tree()
    for _ in range(rng.choice((1, 1, 2, 3))):
        name, how = rng.choice(list(tree)), rng.randrange(8)
        if how == 0:
            tree[rng.choice(NAMES)] = tree.pop(name)
        elif how == 1:
            tree["link"] = rng.choice(LINKS)
        elif how == 2:
            tree[rng.choice(NAMES)] = rng.choice(STARTS)
        elif how == 3:
            del tree[name]
        else:
            made = TARGETS[rng.choice(("zip", "legacy", "safetensors", "container"))].mutate(rng)
            tree[rng.choice((name, "new.bin"))] = getattr(made, "content", made)
    return tree


def mutate_metadata(rng):
    """A distributed checkpoint whose ``.metadata``, and sometimes its slices, are changed."""
    tree = dict(rng.choice(distributed_seeds()))
    content = tree[".metadata"]
    tree[".metadata"] = mutate_pickle(rng, content) if rng.random() < 0.7 else mutate_bytes(rng, content)
    if rng.random() < 0.1:
        tree["__0_0.distcp"] = mutate_bytes(rng, tree["__0_0.distcp"])
    return tree


TARGETS = {
    "zip": Target(lambda rng: mutate_zip(rng, *choose(rng, "zip")), read_source, 0.07),
    "legacy": Target(lambda rng: mutate_legacy(rng, *choose(rng, "legacy")), read_source, 0.15),
    "safetensors": Target(lambda rng: mutate_safetensors(rng, *choose(rng, "safetensors")), read_source, 0.3),
    "metadata": Target(mutate_metadata, read_source, 0.29),
    "container": Target(partial(edited, blindly=True), run_edited, 0.02),
    "manifest": Target(partial(edited, blindly=False), run_edited, 0.08),
    "values": Target(odd_checkpoint, there_and_back, 0.05),
    "environment": Target(environment.mutate, environment.run, 0.02),
    "directory": Target(mutate_directory, read_source, 0.01),
    "resume": Target(lambda rng: mutate_zip(rng, *choose(rng, "resume")), resume_source, 0.01),
}
"""By name. A reader of another format is one more line."""
