"""Checkpoints whose moments are as a run makes them, for containers under a budget; and what holds for all of these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt8
from ckpt8.compressing import lockstep
from ckpt8.core import backend

GROUP = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}


def run_of(shapes, seed=0, dtype=torch.float32):
    """A checkpoint of AdamW over random weights of these shapes, with zeros in all three."""
    generator = torch.Generator().manual_seed(seed)
    weights, state = {}, {}
    for k, shape in enumerate(shapes):
        rows = torch.randn(shape[0], generator=generator).exp().view(-1, *[1] * (len(shape) - 1))
        w, m, g = (torch.randn(shape, generator=generator) for _ in range(3))
        w, m, v = w * 0.05, m * rows * 1e-4, ((g.abs() + 0.05) * rows * 1e-3).square()
        unused = torch.rand(shape, generator=generator) < 0.02
        for x in (w, m, v):
            x[unused] = 0
        weights[f"layers.{k}.weight"] = w.to(dtype)
        state[k] = {"step": torch.tensor(90.0), "exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}
    names = list(range(len(shapes)))
    return {"model": weights, "optimizer": {"state": state, "param_groups": [{**GROUP, "params": names}]}}


OPTIONS = {"flash": {}, "archive": {"preset": "archive"}, ".15": {"budget": 0.15}, "5": {"budget": 5}}
"""Options of compress by the name of a case."""


def random_run(shapes, make, still, *, dtype=torch.float32, steps=12):
    """Random weights of ``shapes`` by name, and the optimizers that ``make`` makes of them, after so many steps.

    Each tensor has gradients of another size; the places in it that ``still`` has by its name have none.
    """
    generator = torch.Generator().manual_seed(3)
    weights = {name: nn.Parameter((torch.randn(shape, generator=generator) * 0.05).to(dtype)) for name, shape in shapes}
    optimizers = make(list(weights.values()))
    for _ in range(steps):
        for k, weight in enumerate(weights.values()):
            weight.grad = (torch.randn(weight.shape, generator=generator) * 10.0 ** (-k % 3 - 2)).to(dtype)
        for name, place in still.items():
            weights[name].grad[place] = 0
        for optimizer in optimizers:
            optimizer.step()
    return weights, optimizers


def check_against(folder: Path, tree, manifest, options):
    """``run.ckpt8`` in a folder holds against ``run.pt``; save makes of the tree what compress made of the file."""
    assert not ckpt8.verify(folder / "run.ckpt8", folder / "run.pt").failures
    live = ckpt8.save(tree, folder / "live.ckpt8", **options)
    assert [record.codec for record in live.storages] == [record.codec for record in manifest.storages]
    assert live.error_in_steps == pytest.approx(manifest.error_in_steps, rel=1e-9)


def as_chain(make, folder: Path):
    """Checkpoints of steps 24 and 26 that ``make`` makes, the later as a delta to the earlier under ``archive``.

    Each is a folder of model and optimizer. Returns the later tree, its manifest, and what its container gives back.
    """
    for step in (24, 26):
        tree, source = make(step), folder / str(step)
        source.mkdir()
        for name, part in tree.items():
            torch.save(part, source / f"{name}.pt")
        base = None if step == 24 else folder / "24.ckpt8"
        manifest = ckpt8.compress(source, folder / f"{step}.ckpt8", preset="archive", base=base)
    ckpt8.restore(folder / "26.ckpt8", folder / "back")
    return tree, manifest, {name: torch.load(folder / "back" / f"{name}.pt") for name in tree}


SMALL_TILE = 1 << 12


def each_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Set torch, numba, then torch with other tiles, one after the other; yield threads and the size of a tile."""
    for threads, least, tile in ((1, 1 << 28, lockstep.TILE), (3, 0, lockstep.TILE), (2, 1 << 28, SMALL_TILE)):
        monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", least)
        monkeypatch.setattr(backend, "SMALLEST_FOR_NUMBA", 1)
        monkeypatch.setattr(lockstep, "TILE", tile)
        yield threads, tile
