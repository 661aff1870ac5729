"""Checkpoints to begin with, written by the real libraries, and such of values that no training makes."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import decimal
import fractions
import functools
import io
import math
import pathlib
import pickle
import random
import uuid
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from fuzz_mutations import edit_tree
from safetensors.torch import save

import ckpt8

FIXTURES = Path(__file__).parents[3] / "fixtures"


def objects():
    """Small checkpoints of many shapes."""
    generator = torch.Generator().manual_seed(1)
    m, w = torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator)
    state = {0: {"step": torch.tensor(7.0), "exp_avg": m, "exp_avg_sq": m * m}}
    group = {"params": [0], "betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-3, "amsgrad": False, "param_names": ["w"]}
    flat = torch.arange(24.0)
    views = {"a.w": w, "b.w": w, "row": flat[:4], "t": flat.view(4, 6).t(), "conj": torch.ones(2) * 1j}
    return {
        "run": {"model": {"w": w, "n": torch.arange(3)}, "optimizer": {"state": state, "param_groups": [group]}},
        "state_dict": collections.OrderedDict(views),
        "typed": {"bf16": w.bfloat16(), "half": w.half(), "bool": w > 0, "f8": w.to(torch.float8_e4m3fn), "e": w[:0]},
        "objects": {"args": argparse.Namespace(lr=0.1), "set": {1, 2}, "nest": [[(1.5, "é", b"x", 2**70)]], "w": w},
        "wrapped": {"p": torch.nn.Parameter(w), "q": torch.nn.Linear(2, 3), "sparse": torch.eye(3).to_sparse()},
    }


@contextmanager
def numbered_storages():
    """Storages are numbered in the order in which they are saved: a legacy file names them by their addresses."""
    numbers, address = {}, torch._C.StorageBase._cdata
    number = property(lambda storage: 10**13 + numbers.setdefault(address.__get__(storage), len(numbers)))
    torch.UntypedStorage._cdata = number
    try:
        yield
    finally:
        del torch.UntypedStorage._cdata


def saved(tree, **options):
    """The bytes that ``torch.save`` writes."""
    stream = io.BytesIO()
    with numbered_storages():
        torch.save(tree, stream, **options)
    return stream.getvalue()


def network(kind):
    """A small model and an optimizer that a checkpoint may be loaded into."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 2, bias=False))
    return model, kind(model.parameters(), lr=1e-3, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))


def train(kind, **settings):
    """A model and an optimizer after a step; the first matrix is large enough for every codec."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 66), torch.nn.Linear(66, 8, bias=False))
    optimizer = kind(model.parameters(), lr=1e-3, **settings)
    model(torch.randn(3, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def run_of(kind, **settings):
    """The checkpoint of such a run."""
    model, optimizer = train(kind, **settings)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}


def mixed():
    """bf16 weights in one buffer with padding, and their fp32 masters."""
    run = run_of(torch.optim.AdamW)
    masters = list(run["model"].values())
    buffer = torch.cat([*(w.bfloat16().flatten() for w in masters), torch.zeros(5, dtype=torch.bfloat16)])
    views = buffer[:-5].split([w.numel() for w in masters])
    model = {name: view.view(w.shape) for (name, w), view in zip(run["model"].items(), views, strict=True)}
    return {"model": model, "optimizer": {"optimizer": run["optimizer"], "fp32_from_fp16_params": [masters]}}


@cache
def written():
    """By format, the bytes of small files by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"zip": _zips(), "legacy": _legacies(), "safetensors": _safetensors(), "resume": _resumed()}


def _zips():
    every = objects().items()
    return {name: saved(tree) for name, tree in every} | {
        f"{name} 4": saved(tree, pickle_protocol=4) for name, tree in every
    }


def _legacies():
    options = {"_use_new_zipfile_serialization": False}
    return {name: saved(tree, **options) for name, tree in objects().items() if name != "typed"}


def _safetensors():
    plain = {"a.w": torch.ones(3, 5), "b": torch.zeros(2, 2, dtype=torch.int8)}
    state = {f"state.0.{key}": torch.ones(4, 4) for key in ("exp_avg", "exp_avg_sq")}
    state |= {"state.0.step": torch.ones(()), "x": torch.ones(2, dtype=torch.bfloat16), "": torch.ones(0, 3)}
    layers = {f"layers.{k}.w": torch.ones(2, 2) for k in range(12)}
    return {"plain": save(plain, {"k": "v"}), "optimizer": save(state), "layers": save(layers)}


def _resumed():
    found = {}
    torch.manual_seed(0)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam):
        model, optimizer = network(kind)
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        found[kind.__name__] = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1})
    return found


@cache
def seeds(kind):
    """The seeds of one format: mostly small ones, which are quick, and the committed files."""
    small = tuple(written()[kind].values())
    large = {"zip": ("module.pt", "crc_off.pt", "custom_objects.pt", "views.pt"), "legacy": ("legacy.pt",)}.get(
        kind, ()
    )
    return small * (60 // len(small)) + tuple((FIXTURES / "inputs" / name).read_bytes() for name in large)


def choose(rng, kind):
    """A seed to change and another to splice from."""
    return rng.choice(seeds(kind)), rng.choice(seeds(kind))


def small_tree():
    """A directory as a framework writes it: files, link targets as text, None for an empty directory."""
    files = written()
    return {
        "model.safetensors": files["safetensors"]["plain"],
        "optimizer.pt": files["zip"]["run"],
        "old/rng.pth": files["legacy"]["state_dict"],
        "trainer_state.json": b'{"epoch": 1}',
        "old/nothing": b"",
        "hollow": None,
        "latest": "old",
        "old/up": "../trainer_state.json",
    }


def make_tree(root, tree):
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


@cache
def distributed_seeds():
    """Directories that torch.distributed.checkpoint writes, one nested and one flat."""
    import torch.distributed.checkpoint as dcp

    flat = {"model.w": torch.ones(4, 4), "optimizer.state.w.exp_avg": torch.ones(4, 4)}
    trees = []
    with TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, state in enumerate((objects()["run"], flat)):
            root = Path(name) / str(number)
            dcp.save(state, checkpoint_id=root, no_dist=True)
            # The identity of the save and its folder are other ones each time.
            metadata = pickle.loads((root / ".metadata").read_bytes())
            metadata.storage_meta = type(metadata.storage_meta)("folder", "save")
            (root / ".metadata").write_bytes(pickle.dumps(metadata))
            trees.append({path.name: path.read_bytes() for path in sorted(root.iterdir())})
    return tuple(trees)


# Of odd values

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16",
        "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 100, 255, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, -(10**400),
    0.0, -0.0, 0.5, 0.9, 0.999, 1.0, 1e-8, 1e308, 5e-324, math.nan, math.inf, -math.inf, True, False, None,
)  # fmt: skip
TEXTS = (
    "", "x", "step", "exp_avg", "exp_avg_sq", "state", "param_groups", "params", "model", "a.b", "a/b", "a:b", "é",
    "\n", "x" * 600, "[bold]", "\x1b[2J", "\0", "*", "?", "weight", "optimizer", "ema", "module.w", "_orig_mod.w", "0",
    "-1", "\u202e", "😀", "..", "__class__", "storage", "ckpt8.skeleton", "w#2", "dtype", "state_dict",
)  # fmt: skip
WRAPPERS = (
    "model", "state_dict", "model_state_dict", "module", "optimizer", "optimizer_states", "opt", "net", "ema",
    "scheduler", "optimizer_state_dict", "base_optimizer_state", "fp32_from_fp16_params", "pytorch-lightning_version",
    "teacher", "param_slice_mappings", "current_model_state", "loops", "args", "epoch", "global_step", "netG",
)  # fmt: skip
STATES = (
    "exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq", "momentum_buffer", "exp_avg_res_row", "exp_avg_res_col",
    "exp_avg_sq_row", "exp_avg_sq_col", "square_avg", "sum", "z", "exp_avg_codes", "exp_avg_scales", "exp_inf", "prev",
    "state1", "absmax1", "qmap1", "n_avg", "row", 0, ("a", 1),
)  # fmt: skip
KEYS = (
    0, 1, -1, 2**70, 1.5, math.nan, None, True, (), (1, "a"), b"x", frozenset({1}), torch.float32, torch.Size([1]),
)  # fmt: skip
OBJECTS = (
    lambda: np.float64(1.5), lambda: np.float32(math.nan), lambda: np.int64(-7), lambda: np.uint8(3),
    lambda: np.bool_(1), lambda: np.arange(6.0).reshape(2, 3), lambda: np.zeros(0),
    lambda: np.array(["a", None], dtype=object), lambda: np.random.RandomState(1).get_state(), lambda: torch.float32,
    lambda: torch.device("cuda:1"), lambda: torch.Size([2, 3]), lambda: 1 + 2j, lambda: b"x" * 300,
    lambda: bytearray(b"y"), lambda: range(3), lambda: slice(1, 2), lambda: pathlib.PurePosixPath("a/b"),
    lambda: decimal.Decimal("1.5"), lambda: fractions.Fraction(1, 3), lambda: datetime.date(2020, 1, 2),
    lambda: uuid.UUID(int=5), lambda: argparse.Namespace(lr=0.5, w=torch.ones(3)),
    lambda: functools.partial(print, 1), lambda: Ellipsis, lambda: random.Random(1).getstate(),
    lambda: torch.Generator().get_state(), lambda: type, lambda: math.sqrt, lambda: torch.nn.Linear(2, 3),
    lambda: torch.strided, lambda: torch.channels_last, lambda: {1, 2}, lambda: frozenset({1}),
    lambda: collections.deque([1], 3), lambda: collections.Counter("aab"),
    lambda: collections.defaultdict(list, {"a": [1]}),
    lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 2, torch.qint8),
)  # fmt: skip


class Values:
    """Makes values from a source of choices; what it made before may come again, as the same object."""

    def __init__(self, rng):
        self.rng = rng
        torch.manual_seed(0)
        self.made = []

    def shape(self):
        """Mostly small; large enough for the lossy codecs now and then."""
        rng = self.rng
        if rng.random() < 0.12:
            return rng.choice(((64, 64), (4096,), (70, 60), (1, 4100), (16, 16, 17)))
        return tuple(rng.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))))

    def tensor(self, shape=None):
        """A tensor, or a view of one that is there already."""
        rng = self.rng
        if self.made and shape is None and rng.random() < 0.25:
            return self._view(rng.choice(self.made))
        usual = torch.float32, torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16
        dtype = rng.choice(DTYPES if rng.random() < 0.3 else usual)
        tensor = torch.empty(self.shape() if shape is None else shape, dtype=dtype)
        self._fill(tensor)
        dice = rng.random()
        if dice < 0.2:
            tensor = self._view(tensor)
        elif dice < 0.3 and dtype.is_floating_point:
            tensor = torch.nn.Parameter(tensor, requires_grad=rng.random() < 0.5)
        elif dice < 0.33:
            eye = torch.eye(3)
            tensor = rng.choice((eye.to_sparse(), torch.empty(2, 3, device="meta"), eye.to_sparse_csr()))
        self.made.append(tensor)
        return tensor

    def _fill(self, tensor):
        """Random values, equal ones, random bits (NaN with payloads among them), or special ones."""
        rng, flat = self.rng, tensor.view(-1) if tensor.dim() else tensor.view(1)
        count, how = flat.numel(), rng.randrange(5)
        if count == 0:
            return
        if how <= 1 and tensor.dtype in (torch.float32, torch.bfloat16, torch.float64):
            generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
            flat.copy_(torch.randn(count, generator=generator) * rng.choice((1, 1e-3, 1e-30, 1e30, 1e-44)))
            if how:
                flat.abs_()
        else:
            nbytes = count * flat.element_size()
            content = rng.randbytes(nbytes) if how == 3 else bytes([rng.choice((0, 0, 0, 127, 128, 255))]) * nbytes
            bits = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            flat.view(torch.uint8).copy_(bits & (1 if tensor.dtype == torch.bool else 255))
        if tensor.dtype == torch.float32 and rng.random() < 0.2:
            flat[rng.randrange(count)] = rng.choice((math.nan, math.inf, -math.inf, -0.0, 1e-45, -1.0, 3.4e38))

    def _view(self, base):
        """The same storage under another shape, order, stride, offset, or as conjugate or negative."""
        rng, how = self.rng, self.rng.randrange(9)
        if base.layout is not torch.strided or base.is_meta or not base.dim():
            return base
        plain = base.detach()
        if how == 0:
            return base.transpose(0, -1)
        if how == 1 and base.shape[0] > 1:
            return base[1:]
        if how == 2:
            return base[..., ::2]
        if how == 3:
            return plain.unsqueeze(0).expand(rng.choice((1, 3, 10**6, 2**40)), *base.shape)
        if how == 4 and base.numel() >= 4:
            return plain.as_strided((2, 2), rng.choice(((1, 1), (2, 1), (0, 1), (1, 2))), base.storage_offset())
        if how == 5 and base.is_complex():
            return rng.choice((base.conj(), base.imag)) if base.dtype != torch.complex32 else base.conj()
        if how == 6 and base.is_floating_point() and base.element_size() > 1:
            return torch._neg_view(plain)
        if how == 7 and base.is_contiguous() and base.dtype == torch.float32:
            return plain.view(rng.choice((torch.int32, torch.uint8, torch.bfloat16)))
        return plain[..., :0]

    def scalar(self):
        """A plain value, or an object of a library."""
        dice = self.rng.random()
        made = NUMBERS if dice < 0.5 else TEXTS if dice < 0.7 else OBJECTS
        chosen = self.rng.choice(made)
        return chosen() if made is OBJECTS else chosen

    def key(self):
        """A key of a dictionary: mostly a text, and anything that has a hash."""
        return self.rng.choice(KEYS if self.rng.random() < 0.2 else self.rng.choice((TEXTS, WRAPPERS, STATES)))

    def tree(self, depth=0):
        """Anything."""
        rng, dice = self.rng, self.rng.random()
        if depth > 4 or dice < 0.2:
            return self.scalar()
        if dice < 0.55:
            return self.tensor()
        items = [self.tree(depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3, 6)))]
        if dice < 0.67:
            return items if dice < 0.62 else tuple(items)
        found = rng.choice((dict, dict, collections.OrderedDict))((self.key(), item) for item in items)
        if rng.random() < 0.02:
            found["self"] = found
        return found

    def replaced(self, _names, old):
        """A value for ``edit_tree``."""
        rng = self.rng
        if isinstance(old, torch.Tensor) and rng.random() < 0.4:
            return rng.choice((self._view(old), old.double(), old.bfloat16(), self.tensor()))
        return self.tree(4) if rng.random() < 0.3 else self.scalar()


@cache
def _runs():
    """Valid checkpoints of several optimizers."""
    named = run_of(torch.optim.AdamW)
    named["optimizer"]["param_groups"][0]["param_names"] = list(named["model"])
    made = (torch.optim.AdamW, torch.optim.Adamax, ckpt8.optim.AdamW, ckpt8.optim.Lion)
    return (*map(run_of, made), run_of(torch.optim.SGD, momentum=0.9), named, mixed())


SAVE_ERRORS = (
    RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError, KeyError, pickle.PicklingError,
    RecursionError,
)  # fmt: skip
"""What torch and safetensors raise of what they do not save."""


def odd_checkpoint(rng):
    """A file of torch.save or safetensors, or a distributed checkpoint."""
    if rng.random() < 0.15:
        return odd_distributed(rng)
    values, kind = Values(rng), rng.random()
    protocol = {"pickle_protocol": rng.choice((3, 4, 5))}
    options = rng.choice(({}, {}, protocol, {"_use_new_zipfile_serialization": False}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if kind < 0.7:  # a run that was valid
                counts = rng.choice(((1, 1, 2, 3), (4, 8, 16)))
                return saved(edit_tree(rng, copy.deepcopy(rng.choice(_runs())), values.replaced, counts), **options)
            tensors = {rng.choice(TEXTS): values.tensor() for _ in range(rng.choice((0, 1, 2, 5, 9)))}
            return saved(values.tree(), **options) if kind < 0.85 else save(tensors, {"format": "pt"})
        except SAVE_ERRORS:
            return b""


def odd_distributed(rng):
    """A distributed checkpoint whose metadata state other places, sizes, names and types."""
    tree = dict(rng.choice(distributed_seeds()))
    metadata = pickle.loads(tree[".metadata"])  # torch wrote it
    for _ in range(rng.choice((0, 1, 1, 2))):
        _edit_metadata(rng, metadata)
    tree[".metadata"] = pickle.dumps(metadata)
    if rng.random() < 0.1:
        tree.pop(rng.choice(list(tree)))
    return tree


def _edit_metadata(rng, metadata):
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    number = rng.choice((-1, 0, 1, 2, 5, 2**31, 2**63, 10**400, 0.5, None, "1"))
    size = rng.choice(
        (torch.Size([2, 2]), torch.Size([2**40]), torch.Size([1, 0]), torch.Size([]), number, [number] * 2)
    )
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
        field, paths = rng.choice(("offset", "length", "relative_path")), ("../x", "", "/x", "__0_0.distcp")
        object.__setattr__(places[index], field, rng.choice((number, *paths)))
    elif how == 4:
        places[index] = places[rng.choice(list(places))]
    elif how == 5 and hasattr(entries[name], "size"):
        entries[name].size = size
    elif how == 6 and hasattr(entries[name], "chunks"):
        setattr(rng.choice(entries[name].chunks), rng.choice(("offsets", "sizes")), size)
    elif metadata.planner_data:
        metadata.planner_data[name] = rng.choice(((), (name, 0), (number,), number, ("a", "b", "c"), (2**70,)))
