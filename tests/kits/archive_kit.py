"""What tests of the archive codecs share: backends, specifications, numbers of all magnitudes."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from ckpt8.core.tensors import DType, Role, TensorSpec

_numba = pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed"))
each_backend = pytest.mark.parametrize("backend", ["torch", _numba])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def spec_of(x: torch.Tensor) -> TensorSpec:
    return TensorSpec("x", Role.OTHER, DType.from_label(str(x.dtype)), (x.numel(),))


def there_and_back(codec, x, backend, first=0, companions=None):
    """The symbols, and the values that come back."""
    companions = companions or {}
    parts = codec.encode(x, backend=backend, first=first, companions=companions)
    given = {name: companion for name, companion in companions.items() if not name.startswith("original_")}
    return parts, codec.decode(parts, spec_of(x), backend=backend, first=first, companions=given)


def integers(symbols: torch.Tensor) -> np.ndarray:
    """The integers that symbols stand for, by the definition of zigzag; 0 for the reserved one."""
    s = symbols.numpy().astype(np.int64)
    return np.where(s < 0, 0, np.where(s % 2, -(s + 1) // 2, s // 2))


def half_units(*values: torch.Tensor) -> np.ndarray:
    """Half a unit in the last place of bf16 at the largest of the values."""
    largest = np.max([np.abs(x.float().numpy()) for x in values], axis=0)
    return np.spacing(largest).astype(np.float64) * 2.0**15
