"""Values at the ends of fp32 in every combination, on every backend: run by ``test_parity.py``, as ``parity.py``.

What the reference refuses alone every backend refuses alone; the rest comes back alike from one tensor.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from archive_parity import SCALED, each_of
from parity import assert_alike, assert_refused_alike, of_bits

from ckpt8.codecs.lattice import Lattice, step_of
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.core.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_SMALL = (0, 1, 2, 0x400000, 0x7FFFFF, 0x800000, 0x800001, 0x0D800000, 0x1E3CE508)
_LARGE = (0x33000001, 0x3F7FFFFF, 0x3F800000, 0x4B000001, 0x5F000000, 0x7E800000, 0x7F7FFFFE, 0x7F7FFFFF)
MAGNITUDES = of_bits(torch.tensor([*_SMALL, *_LARGE]))
"""Zero, subnormal numbers from the smallest to the largest, normal ones of all sizes to the largest."""

SIGNED = torch.cat([MAGNITUDES, -MAGNITUDES])
EVERY = 16
"""Of what is refused, one in so many is tried on a backend."""

HOSTILE = [
    dataclasses.replace(SCALED, u_max=u_max, eps=eps, k=k, bias1=bias1, root_bias2=root_bias2)
    for u_max, eps, k, bias1, root_bias2 in (
        (1 / 128, 0.0, 1e-3, 1.0, 1.0),
        (4.0, 0.0, 2.0**100, 0.1, 0.0316),
        (4.0, 1e-8, 2.0**-100, 1.0, 1.0),
        (1 / 128, 1e-45, 1e-6, 2.0**-20, 2.0**-10),
        (1.0, 1e-300, 0.3, 1.0, 1.0),
        (0.125, 1.0, 30.0, 0.9, 1.0),
        (2.0**100, 2.0**100, 2.0**100, 1.0, 1.0),
        (2.0**-100, 1e-30, 2.0**-60, 1.0, 2.0**-100),
    )
]


def taken(encode, cases):
    """The numbers of the cases that the reference takes alone, and of those that it refuses."""
    found, refused = [], []
    for k in range(cases):
        try:
            encode(slice(k, k + 1))
        except RefusedError:
            refused.append(k)
        else:
            found.append(k)
    return found, refused


@each_of(HOSTILE, 4)
def test_first_moments_beside_any_second_moments(codec, dtype):
    """The decoded second moment is near to the original, or far from it, as only a damaged file has it."""
    second = [(v, v * share) for v, share in product(MAGNITUDES.tolist(), (1.0, 0.7, 1.4, 0.0))]
    second += [(0.0, 1e-45), (1e-45, 3e-45), (1e-30, 1e30)]
    pairs = [(v, w) for v, w in second if w <= 3.4028234663852886e38]
    divisors = [(v**0.5 / codec.root_bias2 + codec.eps) * codec.bias1 for v, _ in pairs]
    shares = (0.0, -0.0, 0.25, -0.5, 0.5, 1.0, -1.5, 30.0, -4000.0, 5000.0)
    rows = [(u * codec.u_max * divisor, v, w) for (v, w), divisor in zip(pairs, divisors, strict=True) for u in shares]
    rows += [(m, v, w) for m in SIGNED.tolist() for v, w in pairs[::5]]
    m, v, w = (torch.tensor(each, dtype=torch.float64).float() for each in zip(*rows, strict=True))
    m = m.to(dtype)
    companions = {"second": w, "original_second": v}

    def of(cases):
        return m[cases], {name: x[cases] for name, x in companions.items()}

    def encode(cases):
        x, there = of(cases)
        codec.encode(x, backend="torch", companions=there)

    found, refused = taken(encode, len(rows))
    assert len(found) > 20
    assert len(refused) > 20
    for k in refused[::EVERY]:
        x, there = of(slice(k, k + 1))
        assert_refused_alike(codec, x, 0, there)
    x, there = of(torch.tensor(found))
    assert_alike(codec, x, 0, there)


@each_of([Lattice(k, 5) for k in (-408, -407, -1, 0, 2, 399, 400)])
def test_weights_of_any_size_on_any_lattice(codec, dtype):
    steps = torch.tensor([0.5, 1.0, 1.5, 2.0**-24, 2.0**-130, 2.0**17, 2.0**18 - 1, 2.0**18]) * step_of(codec.k)
    x = torch.cat([SIGNED, steps.float(), -steps.float()]).to(dtype)
    found, refused = taken(lambda cases: codec.encode(x[cases], backend="torch"), len(x))
    for case in refused[:: EVERY // 4]:
        assert_refused_alike(codec, x[case : case + 1])
    for first in (0, 1 << 40):
        assert_alike(
            codec, x[torch.tensor([case for case in found if abs(x[case]) < (1 << 17) * step_of(codec.k)])], first
        )


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_second_moments_of_any_size_side_by_side(columns, dtype):
    finite = MAGNITUDES.to(dtype)
    finite = finite[finite.isfinite()]
    for step, row in product((1 << 14, 7 * (1 << 23) // 5), (1, 5, 64)):
        assert_alike(RowColumnLog(step, row, columns), finite[torch.arange(400) % len(finite)], 3)
