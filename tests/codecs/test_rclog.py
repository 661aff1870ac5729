"""Second moments by rows and columns: the bound in integers, factors against exact fractions, zeros and ends."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from archive_kit import each_backend, each_dtype, integers, there_and_back

from ckpt8.codecs.rclog import LARGEST_STEP, OCTAVE, SMALLEST_STEP, RowColumnLog
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec

LAYOUTS = ((1, False), (3, True), (64, False), (384, True), (50257, False), (1 << 40, False))
MAGNITUDES = {
    "all": lambda rng, n: 10 ** rng.uniform(-38, 4, n),
    "subnormal": lambda rng, n: 10 ** rng.uniform(-45, -37, n),
    "narrow": lambda rng, n: 10 ** rng.normal(-12, 1, n),
    "huge": lambda rng, n: 10 ** rng.uniform(30, 38.5, n),
}


def bits(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy().view(np.int32).astype(np.int64)


def second_moments(kind, numel, dtype=torch.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(np.minimum(MAGNITUDES[kind](rng, numel), 3.38e38)).to(dtype)
    x[::50], x[1000:1600], x[7::90] = 0.0, 0.0, -0.0
    return x


@each_backend
@each_dtype
@pytest.mark.parametrize("kind", MAGNITUDES)
@pytest.mark.parametrize(("width", "columns"), LAYOUTS)
def test_the_bound_holds_everywhere(width, columns, kind, dtype, backend):
    v = second_moments(kind, 20_000, dtype)
    for step in (SMALLEST_STEP, OCTAVE // 3, LARGEST_STEP):
        parts, y = there_and_back(RowColumnLog(step, width, columns), v, backend, first=1_000_003)
        zero = (v == 0).numpy()
        # Rounding to bf16 adds half of its unit.
        slack = (1 << 16) if dtype is torch.bfloat16 else 0
        assert (2 * np.abs(bits(y) - bits(v))[~zero] <= step + slack).all()
        assert (bits(y)[zero] == 0).all()
        assert ((parts["codes"].numpy() == -1) == zero).all()
        assert (bits(y)[~zero] > 0).all()
        assert bool(y.isfinite().all())


@each_backend
@pytest.mark.parametrize(("width", "columns"), [(3, True), (37, True), (64, False), (5000, True)])
@pytest.mark.parametrize("first", [0, 36, 12345])
def test_factors_are_exact_means_rounded_halves_up(width, columns, first, backend):
    v = second_moments("narrow", 1500, seed=first)
    v[::2] = v[::2].where(torch.arange(750) % 7 > 0, 1e30)
    parts = RowColumnLog(1 << 20, width, columns).encode(v, backend=backend, first=first)
    index = first + np.arange(1500)
    x, row, column = bits(v.abs()), index // width - first // width, index % width

    def mean(values):
        return math.floor(Fraction(sum(values), max(len(values), 1) << 20) + Fraction(1, 2))

    rows = [mean([int(b) for b in x[(row == i) & (x > 0)]]) for i in range(parts["rows"].numel())]
    assert parts["rows"].tolist() == rows
    rest = x - (np.array(rows)[row] << 20)
    if columns:
        expected = [mean([int(b) for b in rest[(column == j) & (x > 0)]]) for j in range(width)]
        assert parts["columns"].tolist() == expected
        rest -= np.array(expected)[column] << 20
    q = integers(parts["codes"])
    assert (q == np.where(x > 0, np.floor_divide(rest + (1 << 19), 1 << 20), 0)).all()


def test_halves_are_rounded_up():
    low, high = (torch.tensor([b << 20], dtype=torch.int32).view(torch.float32) for b in (1000, 1001))
    v = torch.cat([low, high, high, high])
    parts = RowColumnLog(1 << 20, 2, columns=True).encode(v)
    # The means of the rows are 1000.5 and 1001, those of the columns -1/2 and 0.
    assert parts["rows"].tolist() == [1001, 1001, 0]
    assert parts["columns"].tolist() == [0, 0]


@each_backend
def test_rows_and_columns_take_away_what_they_share(backend):
    """Second moments that are a product of row and column take next to no codes."""
    rng = np.random.default_rng(0)
    v = np.outer(10 ** rng.uniform(-14, -6, 100), 10 ** rng.uniform(-2, 2, 200)).astype(np.float32)
    x = torch.from_numpy(v).flatten()
    with_columns = integers(RowColumnLog(OCTAVE // 2, 200, columns=True).encode(x, backend=backend)["codes"])
    without = integers(RowColumnLog(OCTAVE // 2, 200).encode(x, backend=backend)["codes"])
    assert np.abs(with_columns).max() <= 2
    assert np.abs(without).max() > 8


@each_backend
def test_the_index_of_a_chunk_counts_only_within_its_row(backend):
    v = second_moments("narrow", 1000)
    for width, columns in LAYOUTS[1:4]:
        codec = RowColumnLog(1 << 21, width, columns)
        one, other = (codec.encode(v, backend=backend, first=first) for first in (5, 5 + 1000 * width))
        assert all(torch.equal(one[name], other[name]) for name in one)


@each_backend
def test_the_relative_error_of_a_root_is_known(backend):
    v = second_moments("narrow", 20_000)
    _, y = there_and_back(RowColumnLog(OCTAVE // 2, 64), v, backend)
    some = v > 0
    ratio = (y[some].double() / v[some].double()).sqrt()
    assert 2**-0.18 < float(ratio.min()) < 0.95
    assert 1.05 < float(ratio.max()) < 2**0.18


@each_backend
@each_dtype
def test_what_is_refused(dtype, backend):
    for value in (math.nan, math.inf, -math.inf, -1.0, -1e-30):
        v = torch.ones(300, dtype=dtype)
        v[299] = value
        with pytest.raises(RefusedError, match="negative"):
            RowColumnLog().encode(v, backend=backend)


@each_backend
@each_dtype
@pytest.mark.parametrize(("width", "columns"), LAYOUTS)
def test_the_bound_holds_with_factors_of_other_second_moments(width, columns, dtype, backend):
    earlier, v = second_moments("narrow", 5000, dtype), second_moments("all", 5000, dtype, seed=1)
    for step in (SMALLEST_STEP, OCTAVE // 3, LARGEST_STEP):
        codec = RowColumnLog(step, width, columns)
        factors = codec.encode(earlier, backend="torch", first=777)
        parts = codec.encode(v, backend=backend, first=777, inherited=factors)
        y = codec.decode(parts, TensorSpec("v", Role.MOMENT2, DType.from_label(str(dtype)), (5000,)), first=777)
        some = (v != 0).numpy()
        slack = (1 << 16) if dtype is torch.bfloat16 else 0
        assert (2 * np.abs(bits(y) - bits(v))[some] <= step + slack).all()
        assert (bits(y)[~some] == 0).all()
        reference = codec.encode(v, backend="torch", first=777, inherited=factors)
        assert all(torch.equal(parts[name], reference[name]) for name in reference)


@each_backend
def test_refused_factors(backend):
    v = torch.ones(300)
    for name in ("rows", "columns"):
        for value in (4097, -4097, -32768):
            factors = RowColumnLog(C=30, columns=True).encode(v)
            factors[name][3] = value
            with pytest.raises(RefusedError, match="factors"):
                RowColumnLog(C=30, columns=True).encode(v, backend=backend, inherited=factors)
    factors = RowColumnLog().encode(v)
    v[7] = math.nan
    with pytest.raises(RefusedError, match="negative"):
        RowColumnLog().encode(v, backend=backend, inherited=factors)


def test_a_step_is_continued_within_half_an_octave():
    base = RowColumnLog(1 << 20, 384, columns=True)
    for step, kept in ((1 << 20, True), (1_482_910, True), (1_482_911, False), (741_456, True), (741_455, False)):
        assert (RowColumnLog(step, 384, columns=True).continued(base) == base) is kept
    assert RowColumnLog(1 << 20, 384).continued(base) is None
    assert RowColumnLog(1 << 20, 192, columns=True).continued(base) is None
