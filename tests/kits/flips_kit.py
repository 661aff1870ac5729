"""Every single-bit flip of a small container, and whether ``verify`` notices it and names what is damaged."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from budget_kit import run_of
from chain_kit import delta, moved
from faults_kit import Outcome

import ckpt8
from ckpt8.container.chunks import check_frames
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.core.workers import Workers

RULES = ("*model.w=split24", "*.exp_avg=companded8", "*.exp_avg_sq=companded8(signed=False, Q=63, p=0.5)")
SAMPLES = ("file", "directory", "budget")


def make_sample(folder: Path, kind: str) -> Path:
    """A container of every codec, of a file or a directory, of the codecs with steps, or a delta to one of these."""
    if kind == "chain":
        key = make_sample(folder, "budget")
        return delta(moved(key, folder / "whole.ckpt8", 1), key, folder / "chain.ckpt8")
    if kind == "budget":
        torch.save(run_of([(64, 64)]), folder / "a.pt")
        ckpt8.compress(folder / "a.pt", folder / "budget.ckpt8", budget=10, threads=1)
        return folder / "budget.ckpt8"
    generator = torch.Generator().manual_seed(1)
    m, w = torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator)
    state = {0: {"step": torch.tensor(7.0), "exp_avg": m, "exp_avg_sq": m * m}}
    group = {"params": [0], "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    tree = {"model": {"w": w, "n": torch.arange(3)}, "optimizer": {"state": state, "param_groups": [group]}}
    source = folder / f"{kind}.pt"
    if kind == "directory":
        source = folder / "run"
        source.mkdir()
        (source / "note.txt").write_text("a note")
        (source / "link").symlink_to("note.txt")
    torch.save(tree, source / "a.pt" if kind == "directory" else source)
    ckpt8.compress(source, folder / f"{kind}.ckpt8", rules=RULES, threads=1)
    return folder / f"{kind}.ckpt8"


def places(data: bytes) -> list[tuple[str, int, int]]:
    """What the bytes of a container are: (name, start, stop), in order."""
    (length,) = struct.unpack_from("<Q", data)
    text = data[8 : 8 + length]
    header = json.loads(text)
    header.pop("__metadata__")
    end = 8 + len(text.rstrip(b" "))
    found = [("length of the header", 0, 8), ("header", 8, end), ("padding", end, 8 + length)]
    entries = {name: entry["data_offsets"] for name, entry in header.items()}
    return found + sorted(((n, 8 + length + a, 8 + length + b) for n, (a, b) in entries.items()), key=lambda x: x[1])


def complaint(path: Path, workers: Workers) -> str | None:
    """What ``verify`` says of a container; None where it finds nothing. Any other exception goes on."""
    try:
        with ContainerReader(path) as reader:
            check_frames(reader, workers)
    except InputError as exc:
        return str(exc)
    return None


def flip(path: Path, wanted: Iterable[tuple[int, int]], read: Path | None = None) -> Outcome:
    """Flip the bits at (byte, bit) of a container, each for itself, and verify that, or ``read``, whose base it is.

    Faults are those that were not noticed, or blamed on something else.
    """
    found, data = Outcome(), path.read_bytes()
    where = [name for name, start, stop in places(data) for _ in range(start, stop)]
    assert len(where) == len(data)
    with Workers(1) as workers, path.open("r+b", buffering=0) as file:
        assert complaint(read or path, workers) is None
        for place, bit in wanted:
            os.pwrite(file.fileno(), bytes([data[place] ^ 1 << bit]), place)
            said = complaint(read or path, workers)
            os.pwrite(file.fileno(), data[place : place + 1], place)
            name = where[place]
            tensor, slash, _ = name.rpartition("/")
            found.counts["flips"] += 1
            found.counts["in planes" if slash else f"in {name}"] += 1
            if said is None:
                found.faults.append(f"byte {place}, bit {bit}, in {name}: not noticed")
            elif slash and not said.startswith(f"{path}: {tensor}: "):
                found.faults.append(f"byte {place}, bit {bit}, in {name}: {said}")
    assert path.read_bytes() == data
    return found
