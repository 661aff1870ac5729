"""Trees of values that no training makes: odd tensors, numbers, keys and objects where a checkpoint may have them."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import functools
import math
import pathlib
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fuzz_bytes import places

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16",
        "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
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


class Values:
    """Makes values from a source of choices; what it made before may come again, as the same object."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        torch.manual_seed(0)
        self.made: list[torch.Tensor] = []

    def shape(self) -> tuple[int, ...]:
        """Mostly small; large enough for the lossy codecs now and then."""
        rng = self.rng
        if rng.random() < 0.12:
            return rng.choice(((64, 64), (4096,), (70, 60), (1, 4100), (16, 16, 17)))
        return tuple(rng.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))))

    def tensor(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A tensor, or a view of one that is there already."""
        rng = self.rng
        if self.made and shape is None and rng.random() < 0.25:
            return self._view(rng.choice(self.made))
        shape = self.shape() if shape is None else shape
        dtype = (
            rng.choice(DTYPES)
            if rng.random() < 0.3
            else rng.choice((torch.float32,) * 4 + (torch.bfloat16, torch.float16))
        )
        tensor = torch.empty(shape, dtype=dtype)
        self._fill(tensor)
        dice = rng.random()
        if dice < 0.2:
            tensor = self._view(tensor)
        elif dice < 0.3 and dtype.is_floating_point:
            tensor = torch.nn.Parameter(tensor, requires_grad=rng.random() < 0.5)
        elif dice < 0.33:
            tensor = rng.choice(
                (torch.eye(3).to_sparse(), torch.empty(2, 3, device="meta"), torch.eye(3).to_sparse_csr())
            )
        self.made.append(tensor)
        return tensor

    def _fill(self, tensor: torch.Tensor) -> None:
        """Random values, equal ones, random bits (NaN with payloads among them), or special ones."""
        rng = self.rng
        flat = tensor.view(-1) if tensor.dim() else tensor.view(1)
        count, how = flat.numel(), rng.randrange(5)
        if count == 0:
            return
        if how <= 1 and tensor.dtype in (torch.float32, torch.bfloat16, torch.float64):
            generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
            flat.copy_(torch.randn(count, generator=generator) * rng.choice((1, 1e-3, 1e-30, 1e30, 1e-44)))
            if how:
                flat.abs_()
        elif how <= 3:
            content = rng.randbytes(count * flat.element_size()) if how == 3 else bytes(count * flat.element_size())
            flat.view(torch.uint8).copy_(
                torch.frombuffer(bytearray(content), dtype=torch.uint8) & (1 if tensor.dtype == torch.bool else 255)
            )
        else:
            flat.view(torch.uint8).fill_(0 if tensor.dtype == torch.bool else rng.choice((0, 127, 128, 255)))
        if tensor.dtype == torch.float32 and rng.random() < 0.2:
            flat[rng.randrange(count)] = rng.choice((math.nan, math.inf, -math.inf, -0.0, 1e-45, -1.0, 3.4e38))

    def _view(self, base: torch.Tensor) -> torch.Tensor:
        """The same storage under another shape, order, stride, offset, or as conjugate or negative."""
        rng, how = self.rng, self.rng.randrange(9)
        if base.layout is not torch.strided or base.is_meta:
            return base
        if how == 0 and base.dim() >= 2:
            return base.transpose(0, -1)
        if how == 1 and base.dim() and base.shape[0] > 1:
            return base[1:]
        if how == 2 and base.dim():
            return base[..., ::2]
        if how == 3:
            return base.detach().unsqueeze(0).expand(rng.choice((1, 3, 10**6, 2**40)), *base.shape)
        if how == 4 and base.numel() >= 4:
            return base.detach().as_strided((2, 2), rng.choice(((1, 1), (2, 1), (0, 1), (1, 2))), base.storage_offset())
        if how == 5 and base.is_complex():
            return rng.choice((base.conj(), base.imag)) if base.dtype != torch.complex32 else base.conj()
        if how == 6 and base.is_floating_point() and base.element_size() > 1:
            return torch._neg_view(base.detach())
        if how == 7 and base.is_contiguous() and base.dtype == torch.float32:
            return base.detach().view(rng.choice((torch.int32, torch.uint8, torch.bfloat16))) if base.dim() else base
        return base.detach()[..., :0] if base.dim() else base

    def scalar(self) -> Any:
        """A plain value, or an object of the library."""
        rng, number = self.rng, self.rng.choice(NUMBERS)
        dice = rng.randrange(24)
        if dice < 12:
            return number
        if dice < 17:
            return rng.choice(TEXTS)
        made: tuple[Callable[[], Any], ...] = (
            lambda: np.float64(1.5), lambda: np.float32(math.nan), lambda: np.int64(-7), lambda: np.uint8(3),
            lambda: np.bool_(1),
            lambda: np.arange(6.0).reshape(2, 3), lambda: np.zeros(0), lambda: np.array(["a", None], dtype=object),
            lambda: np.random.RandomState(1).get_state(), lambda: torch.float32, lambda: torch.device("cuda:1"),
            lambda: torch.Size([2, 3]), lambda: 1 + 2j, lambda: b"x" * rng.choice((0, 1, 300)), lambda: bytearray(b"y"),
            lambda: range(3), lambda: slice(1, 2), lambda: pathlib.PurePosixPath("a/b"), lambda: decimal.Decimal("1.5"),
            lambda: fractions.Fraction(1, 3), lambda: datetime.date(2020, 1, 2), lambda: uuid.UUID(int=5),
            lambda: argparse.Namespace(lr=number, w=self.tensor()), lambda: functools.partial(print, 1),
            lambda: Ellipsis,
            lambda: random.Random(1).getstate(), lambda: torch.Generator().get_state(), lambda: type, lambda: math.sqrt,
            lambda: torch.nn.Linear(2, 3), lambda: torch.strided, lambda: torch.channels_last, lambda: {1, 2},
            lambda: frozenset({1}), lambda: collections.deque([1], 3), lambda: collections.Counter("aab"),
            lambda: collections.defaultdict(list, {"a": [1]}),
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 2, torch.qint8),
        )  # fmt: skip
        return rng.choice(made)()

    def key(self) -> Any:
        """A key of a dictionary: mostly a text, and anything that has a hash."""
        rng = self.rng
        odd = (
            0,
            1,
            -1,
            2**70,
            1.5,
            math.nan,
            None,
            True,
            (),
            (1, "a"),
            b"x",
            frozenset({1}),
            torch.float32,
            torch.Size([1]),
        )
        return rng.choice(odd) if rng.random() < 0.2 else rng.choice(rng.choice((TEXTS, WRAPPERS, STATES)))

    def tree(self, depth: int = 0) -> Any:
        """Anything."""
        rng, dice = self.rng, self.rng.random()
        if depth > 4 or dice < 0.2:
            return self.scalar()
        if dice < 0.55:
            return self.tensor()
        items = [self.tree(depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3, 6)))]
        if dice < 0.62:
            return items
        if dice < 0.67:
            return tuple(items)
        found = rng.choice((dict, dict, collections.OrderedDict))((self.key(), each) for each in items)
        if rng.random() < 0.02:
            found["self"] = found
        return found

    def run(self) -> Any:
        """A model and its optimizer, or nearly so."""
        rng = self.rng
        weights = {
            f"{rng.choice(('', 'module.', 'layers.0.'))}w{k}": self.tensor(self.shape())
            for k in range(rng.choice((0, 1, 2, 4)))
        }
        state, groups = {}, [self.group(len(weights))]
        for index, (name, weight) in enumerate(weights.items()):
            keys = rng.choice((("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",), tuple(rng.sample(STATES, 3))))
            state[rng.choice((index, index, index, name, str(index), -1))] = {
                key: self.entry(key, weight) for key in keys
            }
        optimizer: Any = {"state": state, "param_groups": groups}
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            optimizer = rng.choice(
                ({"optimizer": optimizer}, [optimizer], (optimizer, None), {"base": optimizer, "x": self.scalar()})
            )
        found: dict[Any, Any] = {rng.choice(WRAPPERS[:5]): weights, rng.choice(WRAPPERS[4:12]): optimizer}
        if rng.random() < 0.3:
            found[self.key()] = self.tree(2)
        return rng.choice((found, found, found, tuple(found.values()), optimizer, {"trainer": found}))

    def edited(self, tree: Any) -> Any:
        """A valid checkpoint with one to three edits: entries and elements of any depth dropped, moved, replaced."""
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 3))):
            found = list(places(tree))
            node, key = rng.choice(found)
            how = rng.randrange(6)
            if how == 0:
                del node[key]
            elif how == 1:
                other, there = rng.choice(found)
                if other is node or not isinstance(node[key], dict | list):
                    other[there] = node[key]
            elif how == 2 and isinstance(node, dict):
                node[self.key()] = node[key] if rng.random() < 0.5 else node.pop(key)
            elif how == 3 and isinstance(node[key], torch.Tensor):
                node[key] = rng.choice((self._view(node[key]), node[key].double(), node[key].bfloat16(), self.tensor()))
            else:
                node[key] = self.tree(4) if rng.random() < 0.3 else self.scalar()
        return tree

    def entry(self, key: Any, weight: torch.Tensor) -> Any:
        """What one key of a parameter's state holds."""
        rng, dice = self.rng, self.rng.random()
        if dice < 0.12:
            return self.tree(3)
        if key == "step":
            return rng.choice(
                (torch.tensor(7.0), torch.tensor(7), 7, self.scalar(), torch.tensor([3.0]), torch.tensor(math.nan))
            )
        if self.made and dice < 0.2:
            return rng.choice(self.made)
        return self.tensor(tuple(weight.shape) if weight.numel() < 1 << 16 else None)

    def group(self, count: int) -> Any:
        """A parameter group with odd settings."""
        rng = self.rng
        params = rng.choice(
            (list(range(count)),) * 4 + ([0] * count, list(range(count + 2)), ["w0"], [10**400], None, [[0]], (0,))
        )
        group = {
            "params": params,
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "amsgrad": False,
        }
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            value = rng.choice(
                (
                    self.scalar(),
                    rng.choice(NUMBERS),
                    (0.9,),
                    (math.nan, 2),
                    [0.9, 0.99],
                    (10**400, 0),
                    torch.tensor(0.1),
                    ("a", "b"),
                    (),
                )
            )
            group[
                rng.choice(
                    (
                        *group,
                        "step",
                        "nesterov",
                        "momentum",
                        "rule",
                        "bias_correction",
                        "param_names",
                        "moment1",
                        "master",
                    )
                )
            ] = value
        return group
