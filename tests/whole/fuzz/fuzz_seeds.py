"""What is mutated: small files written by the real libraries, and the committed checkpoints and containers."""

from __future__ import annotations

import argparse
import pickle
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

import ckpt8

FIXTURES = Path(__file__).parents[3] / "fixtures"
RULES = ("*.w=split24", "*.exp_avg=companded8", "*.exp_avg_sq=companded8(signed=False, Q=63, p=0.5)")

Tree = dict[str, "bytes | str | None"]
"""A directory: file contents, link targets as text, None for an empty directory."""


def objects() -> dict[str, object]:
    """Small checkpoints of many shapes."""
    generator = torch.Generator().manual_seed(1)
    m, w = torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator)
    state = {0: {"step": torch.tensor(7.0), "exp_avg": m, "exp_avg_sq": m * m}}
    group = {"params": [0], "betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-3, "amsgrad": False, "param_names": ["w"]}
    flat = torch.arange(24.0)
    tied = OrderedDict({"a.w": w, "b.w": w, "row": flat[:4], "t": flat.view(4, 6).t(), "conj": torch.ones(2) * 1j})
    return {
        "run": {"model": {"w": w, "n": torch.arange(3)}, "optimizer": {"state": state, "param_groups": [group]}},
        "state_dict": tied,
        "typed": {"bf16": w.bfloat16(), "half": w.half(), "bool": w > 0, "f8": w.to(torch.float8_e4m3fn), "e": w[:0]},
        "objects": {"args": argparse.Namespace(lr=0.1), "set": {1, 2}, "nest": [[(1.5, "é", b"x", 2**70)]], "w": w},
        "wrapped": {"p": torch.nn.Parameter(w), "q": torch.nn.Linear(2, 3), "sparse": torch.eye(3).to_sparse()},
    }  # fmt: skip


@contextmanager
def numbered_storages() -> Iterator[None]:
    """Storages are numbered in the order in which they are saved: a legacy file names them by their addresses."""
    numbers: dict[int, int] = {}
    address = torch._C.StorageBase._cdata
    number = property(lambda storage: 10**13 + numbers.setdefault(address.__get__(storage), len(numbers)))
    torch.UntypedStorage._cdata = number  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        del torch.UntypedStorage._cdata


@cache
def _written() -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {"zip": {}, "legacy": {}, "safetensors": {}, "container": {}}
    torch.manual_seed(0)
    with TemporaryDirectory() as name:
        path = Path(name) / "a"
        for kind, obj in objects().items():
            torch.save(obj, path)
            found["zip"][kind] = path.read_bytes()
            torch.save(obj, path, pickle_protocol=4)
            found["zip"][f"{kind} 4"] = path.read_bytes()
            if kind != "typed":
                with numbered_storages():
                    torch.save(obj, path, _use_new_zipfile_serialization=False)
                found["legacy"][kind] = path.read_bytes()
        save_file({"a.w": torch.ones(3, 5), "b": torch.zeros(2, 2, dtype=torch.int8)}, path, metadata={"k": "v"})
        found["safetensors"]["plain"] = path.read_bytes()
        state = {
            "state.0.exp_avg": torch.ones(4, 4),
            "state.0.exp_avg_sq": torch.ones(4, 4),
            "state.0.step": torch.ones(()),
        }
        save_file({**state, "x": torch.ones(2, dtype=torch.bfloat16), "": torch.ones(0, 3)}, path)
        found["safetensors"]["optimizer"] = path.read_bytes()
        save_file({f"layers.{k}.w": torch.ones(2, 2) for k in range(12)}, path)
        found["safetensors"]["layers"] = path.read_bytes()
        found["resume"] = {}
        for made in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam):
            model, optimizer = network(made)
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, path)
            found["resume"][made.__name__] = path.read_bytes()
        for source in ("zip", "legacy", "safetensors"):
            for kind in ("run", "state_dict", "plain"):
                if kind in found[source]:
                    found["container"][f"{source} {kind}"] = compressed(path, found[source][kind])
        found["container"]["directory"] = _directory_container(Path(name) / "run", small_tree(found))
    return found


def network(kind: type[torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that a checkpoint may be loaded into."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 2, bias=False))
    return model, kind(model.parameters(), lr=1e-3, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))


def compressed(path: Path, content: bytes) -> bytes:
    """A container of one file, with every codec where that can be."""
    path.write_bytes(content)
    rules = [rule for rule in RULES if b"exp_avg" in content or "exp_avg" not in rule]
    rules = rules if b"w" in content and b"exp_avg" in content and b"model" in content else ["*=lossless"]
    target = path.with_name("a.ckpt8")
    ckpt8.compress(path, target, rules=rules, threads=1, force=True)
    return target.read_bytes()


def _directory_container(root: Path, tree: Tree) -> bytes:
    make_tree(root, tree)
    ckpt8.compress(root, threads=1, force=True)
    return root.with_name(root.name + ".ckpt8").read_bytes()


def make_tree(root: Path, tree: Tree) -> None:
    """Write a directory. Raises OSError and ValueError for names that no file can have."""
    root.mkdir()
    for name, content in tree.items():
        path = root / name
        if not path.resolve().is_relative_to(root.resolve()) or "\0" in name:
            raise ValueError(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def small_tree(written: dict[str, dict[str, bytes]]) -> Tree:
    """A directory as a framework writes it: weights, optimizer, plain files, links."""
    return {
        "model.safetensors": written["safetensors"]["plain"],
        "optimizer.pt": written["zip"]["run"],
        "old/rng.pth": written["legacy"]["state_dict"],
        "trainer_state.json": b'{"epoch": 1}',
        "old/nothing": b"",
        "hollow": None,
        "latest": "old",
        "old/up": "../trainer_state.json",
    }


@cache
def distributed_seeds() -> tuple[Tree, ...]:
    """Directories that torch.distributed.checkpoint writes, one nested and one flat."""
    import torch.distributed.checkpoint as dcp

    flat = {"model.w": torch.ones(4, 4), "optimizer.state.w.exp_avg": torch.ones(4, 4)}
    trees: list[Tree] = []
    with TemporaryDirectory() as name:
        for number, state in enumerate((objects()["run"], flat)):
            root = Path(name) / str(number)
            dcp.save(state, checkpoint_id=root, no_dist=True)
            # The identity of the save and its folder are other ones each time.
            metadata = pickle.loads((root / ".metadata").read_bytes())
            metadata.storage_meta = type(metadata.storage_meta)("folder", "save")
            (root / ".metadata").write_bytes(pickle.dumps(metadata))
            trees.append({path.name: path.read_bytes() for path in sorted(root.iterdir())})
    return tuple(trees)


@cache
def seeds(kind: str) -> tuple[bytes, ...]:
    """The seeds of one format: mostly small ones, which are quick, and the committed files."""
    written = tuple(_written()[kind].values())
    inputs = {
        "zip": ("module.pt", "crc_off.pt", "custom_objects.pt", "views.pt"),
        "legacy": ("legacy.pt",),
    }.get(kind, ())
    golden = (
        ("gpt_bf16_part.compact", "gpt_bf16_part.archive", "crc_off.flash", "directory.flash")
        if kind == "container"
        else ()
    )
    files = [FIXTURES / "inputs" / name for name in inputs] + [FIXTURES / "golden" / f"{name}.ckpt8" for name in golden]
    return written * (60 // len(written)) + tuple(path.read_bytes() for path in files)


def choose(rng: random.Random, kind: str) -> tuple[bytes, bytes]:
    """A seed to change and another to splice from."""
    return rng.choice(seeds(kind)), rng.choice(seeds(kind))


def tree_seed() -> Tree:
    """The directory that is changed."""
    return dict(small_tree(_written()))
