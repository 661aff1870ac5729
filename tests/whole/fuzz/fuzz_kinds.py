"""A small valid container of every kind, with what it was made from and what it restores to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fuzz_container import unpack
from fuzz_seeds import FIXTURES, Tree, _written, distributed_seeds, make_tree, numbered_storages, objects, small_tree
from fuzz_watch import Content, content_of

import ckpt8
from ckpt8.container.bases import looked_for_in

GOLDEN = FIXTURES / "golden"
"""Where the bases of deltas are."""


@dataclass(frozen=True)
class Kind:
    """``original`` is None where nobody has it: then there is nothing to verify against."""

    name: str
    content: bytes
    original: Content | None
    restored: Content
    cache: dict[str, Any] = field(default_factory=dict)

    def write_original(self, folder: Path) -> Path | None:
        """The original as a file or directory in ``folder``."""
        if self.original is None:
            return None
        path = folder / "originals" / self.name.replace(" ", "-")
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            if isinstance(self.original, bytes):
                path.write_bytes(self.original)
            else:
                make_tree(path, self.original)
        return path


def train(module: Any, **settings: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after a step; the first matrix is large enough for every codec."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 66), torch.nn.Linear(66, 8, bias=False))
    optimizer: torch.optim.Optimizer = module(model.parameters(), lr=1e-3, **settings)
    model(torch.randn(3, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def run_of(module: Any, **settings: Any) -> dict[str, Any]:
    """The checkpoint of such a run."""
    model, optimizer = train(module, **settings)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}


def mixed() -> dict[str, Any]:
    """bf16 weights in one buffer with padding, and their fp32 masters."""
    run = run_of(torch.optim.AdamW)
    masters = list(run["model"].values())
    buffer = torch.cat([*(w.bfloat16().flatten() for w in masters), torch.zeros(5, dtype=torch.bfloat16)])
    views = buffer[:-5].split([w.numel() for w in masters])
    model = {name: view.view(w.shape) for (name, w), view in zip(run["model"].items(), views, strict=True)}
    return {"model": model, "optimizer": {"optimizer": run["optimizer"], "fp32_from_fp16_params": [masters]}}


def tied() -> dict[str, Any]:
    """One storage under several names, transposed and cut."""
    run = run_of(torch.optim.SGD, momentum=0.9)
    weight = run["model"]["0.weight"]
    run["model"] |= {"head.weight": weight, "row": weight[3], "t": weight.t(), "c": torch.ones(2) * 1j}
    run["model"]["conj"] = run["model"]["c"].conj()
    return run


def many_small() -> dict[str, Any]:
    """So many small tensors that they share entries."""
    model = torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(20))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.stack([layer(torch.ones(3)).sum() for layer in model]).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@cache
def kinds() -> tuple[Kind, ...]:
    """All of them."""
    found, written = [], _written()
    with TemporaryDirectory() as name, looked_for_in([GOLDEN]):
        folder = Path(name)
        (folder / "back").mkdir()
        packed = folder / "x.ckpt8"

        def keep(name: str, original: Content | None) -> None:
            back = ckpt8.restore(packed, folder / "back" / name, threads=1)
            found.append(Kind(name, packed.read_bytes(), original, content_of(back)))

        def add(name: str, source: Any, **options: Any) -> None:
            path = folder / "source"
            if isinstance(source, dict) and any(isinstance(each, bytes) for each in source.values()):
                path = folder / f"tree {name}"
                make_tree(path, source)
            elif isinstance(source, bytes):
                path.write_bytes(source)
            else:
                with numbered_storages():
                    torch.save(source, path, **options.pop("save", {}))
            ckpt8.compress(path, packed, threads=1, force=True, **options)
            keep(name, content_of(path))

        run = run_of(torch.optim.AdamW)
        add("file", run)
        add("compact", run_of(torch.optim.AdamW, amsgrad=True), preset="compact")
        add("budget", run_of(torch.optim.AdamW), budget=1)
        add("budget of masters", mixed(), budget=7)
        add("legacy", run, save={"_use_new_zipfile_serialization": False})
        add("lossless", objects()["typed"], preset="lossless")
        add("objects", objects()["objects"])
        add("safetensors", written["safetensors"]["optimizer"])
        add("directory", small_tree(written))
        add("tied", tied())
        add("masters", mixed())
        add("packed", run_of(ckpt8.optim.AdamW))
        add("shared", many_small())
        trees: tuple[Tree, ...] = distributed_seeds()
        for number, tree in enumerate(trees):
            add(f"dcp {number}", tree)
        ckpt8.save(run, packed, force=True)
        keep("saved", None)
        for path in sorted(GOLDEN.glob("*.ckpt8")):
            source = FIXTURES / "inputs" / f"{path.name.partition('.')[0]}.pt"
            packed.write_bytes(path.read_bytes())
            keep(path.stem, source.read_bytes() if source.exists() else None)
    assert {unpack(kind.content)[2]["version"] for kind in found} >= {"1.0", "1.1", "1.2", "1.3", "1.4", "1.5", "1.6"}
    return tuple(found)
