"""Values that no optimizer writes, in any place of a checkpoint: every command gives a result or a sensible line."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from run_kit import SmallRun

import ckpt8
from ckpt8.core.errors import Ckpt8Error

VALUES = {
    "10**400": 10**400,
    "nan": float("nan"),
    "2**63": 2**63,
    "text": "x",
    "None": None,
    "4000 digits": int("7" * 4000),
    "10^6 digits": 1 << 3_322_000,
    "a tensor": torch.zeros(3),
    "numpy": np.float64(0.1),
    "a pair": (10**400, 0.9),
}
PLACES = (
    ("optimizer", "state", 0, "step"),
    ("optimizer", "state", 0, "exp_avg"),
    ("optimizer", "param_groups", 0, "lr"),
    ("optimizer", "param_groups", 0, "betas"),
    ("optimizer", "param_groups", 0, "weight_decay"),
    ("optimizer", "param_groups", 0, "params"),
    ("step",),
    ("model", "weight"),
)


def base():
    checkpoint = SmallRun(1, (72, 72)).advance(1)
    weights = {name.removeprefix("0."): weight for name, weight in checkpoint["model"].items()}
    return {**checkpoint, "model": weights, "step": 3}


def with_value(path, value):
    tree = node = base()
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


def _moments(m, v):
    tree = base()
    tree["optimizer"]["state"][0].update(exp_avg=m, exp_avg_sq=v)
    return tree


def _key(key):
    tree = base()
    tree["optimizer"]["state"][key] = tree["optimizer"]["state"].pop(0)
    tree["optimizer"]["param_groups"][0]["params"][0] = key
    return tree


FLAT = torch.randn(72 * 72 * 2)
SHAPES = {
    "one storage for all moments": _moments(FLAT[:5184].view(72, 72), FLAT[:5184].view(72, 72)),
    "moments that overlap": _moments(FLAT[:5184].view(72, 72), FLAT[72 : 72 + 5184].view(72, 72)),
    "an expanded moment": _moments(torch.ones(1).expand(72, 72), torch.ones(72).expand(72, 72)),
    "a moment of integers": _moments(torch.ones(72, 72, dtype=torch.int32), torch.rand(72, 72)),
    "a moment of flags": _moments(torch.ones(72, 72, dtype=torch.bool), torch.rand(72, 72)),
    "a complex moment": _moments(torch.ones(72, 72, dtype=torch.complex64), torch.rand(72, 72)),
    "a moment of another shape": _moments(torch.ones(5, 5), torch.rand(72, 72)),
    "an expanded weight": with_value(("model", "weight"), torch.ones(1).expand(72, 72)),
    "a key of 400 digits": _key(10**400),
    "a key of 10^6 digits": _key(1 << 3_322_000),
    "a long key": _key("k" * 100_000),
}
CASES = SHAPES | {
    f"{'.'.join(map(str, path))} {name}": (path, name) for path, name in itertools.product(PLACES, VALUES)
}


def resume(path):
    model = torch.nn.Linear(72, 72)
    optimizer = torch.optim.AdamW(model.parameters())
    for strict in (True, False):
        try:
            ckpt8.resume(path, model=model, optimizer=optimizer, strict=strict)
        except Ckpt8Error as exc:
            assert str(exc).isprintable()  # noqa: PT017


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", range(6))
def test_no_value_ends_in_an_error_of_python(group, run_command, tmp_path):
    """0, or 1 where a replay does not hold, 2 or 3 with one line: never a defect, and never an exception."""
    for name in list(CASES)[group::6]:
        case = CASES[name]
        tree = with_value(case[0], VALUES[case[1]]) if type(case) is tuple else case
        source, packed, out = tmp_path / "run.pt", tmp_path / "run.ckpt8", tmp_path / "out"
        torch.save(tree, source)
        packed.unlink(missing_ok=True)
        commands = [
            ("inspect", source, "--tensors"),
            ("compress", source, "-o", packed, "--force"),
            ("inspect", packed, "--json"),
            ("verify", packed, "--against", source, "--resume-steps", "1"),
            ("restore", packed, "-o", out, "--force"),
            ("diff", source, packed),
            ("convert", source, out, "--to", "torch", "--force"),
            ("convert", source, tmp_path / "dcp", "--to", "dcp", "--force"),
            ("convert", source, out, "--to", "flashoptim", "--force"),
        ]
        for command in commands:
            if command[0] != "compress" and packed in command and not packed.exists():
                continue
            code, _, err = run_command(*command)
            assert code in (0, 1, 2, 3), (name, command, err)
            if code in (2, 3):
                assert re.fullmatch(r"ckpt8: [^\n]+\n", err), (name, command)
        for path in (source, packed):
            if path.exists():
                resume(path)
