"""The figures of one tensor against rounding every element by itself."""

import math

import pytest
import torch
from readiness_kit import expected, same

from ckpt8.inspecting.readiness import FORMATS, RAW, SCALED, Casts, Extent, scaled_by
from ckpt8.inspecting.tensors import TILE, tiles


def measure(x, block=None):
    """Both passes over ``x``, in blocks."""
    blocks = x.split(block or max(len(x), 1))
    extent = Extent()
    for (tile,) in tiles(zip(blocks)):
        extent.add(tile)
    casts = Casts(extent)
    for (tile,) in tiles(zip(blocks)):
        casts.add(tile)
    return extent, casts.to_json()


def check(x):
    """Every figure of ``x``, which may hold NaN and infinities, is what its elements give one by one."""
    extent, figures = measure(x)
    finite = [value for value in x.tolist() if math.isfinite(value)]
    largest = max(map(abs, finite))
    rms = largest * math.sqrt(math.fsum((value / largest) ** 2 for value in finite) / len(finite))
    assert math.isclose(extent.rms, rms, rel_tol=1e-12)
    assert (extent.count, extent.nonfinite) == (len(finite), len(x) - len(finite))
    assert extent.unit == 2.0 ** round(-math.log2(rms))
    # In units of the RMS the search keeps clear of the ends of float64.
    for each in FORMATS:
        found = figures[each.id]
        scale = extent.unit if each.scaling == "unit" else 127 / largest
        for kind, by in ((RAW, 1.0), (SCALED, scale)):
            wanted = expected(each.id, finite, by, extent.unit)
            same(found[kind], wanted, each.id, kind)
    return extent, figures


def normal(count, scale=1.0, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [1e-43, 1e-30, 1e-6, 0.02, 1.0, 300.0, 1e20])
def test_scales(scale):
    check(normal(600, scale))


def test_float64_between_the_numbers_of_float32():
    """Values a hair beside the ties of fp16: by way of float32 they would fall onto them."""
    ties = 1 + (torch.arange(400, dtype=torch.float64) + 0.5) * 2.0**-10
    check(torch.cat([ties * (1 + 2.0**-45), ties * (1 - 2.0**-45)]))


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_float64_beyond_float32(scale):
    check(normal(200).double() * scale)


def test_outliers_and_subnormals():
    x = normal(500, 1e-6)
    x[::100] = 3e4
    x[7:12] = torch.tensor([2.0**-149, -(2.0**-140), 2.0**-127, 2.0**-133, 3.3e38])
    check(x)


def test_what_is_not_finite_is_counted_and_left_out():
    x = normal(300)
    clean = measure(x)
    dirty = torch.cat([torch.tensor([math.nan, math.inf]), x[:100], torch.tensor([-math.inf]), x[100:]])
    extent, figures = check(dirty)
    assert extent.nonfinite == 3
    assert figures == clean[1]


@pytest.mark.parametrize(
    "x", [torch.zeros(40), torch.full((3,), math.nan), torch.zeros(0)], ids=["zero", "nan", "none"]
)
def test_nothing_to_round(x):
    extent, figures = measure(x)
    assert (extent.nonzero, extent.unit, extent.rms) == (0, 1.0, 0.0)
    nothing = {"overflow": 0, "underflow": 0, "subnormal": 0, "snr_db": None}
    assert all(figures[each.id][kind] == nothing for each in FORMATS for kind in (RAW, SCALED))


def test_exact_values_make_no_noise():
    _, figures = measure(torch.tensor([0.0, 1.0, -2.0, 0.5]))
    assert all(figures[each.id][RAW]["snr_db"] is None for each in FORMATS if each.scaling == "unit")
    # 1/2 is a tie, and goes to 0: the noise is 1/4 of 21/4.
    assert figures["int8"][RAW]["underflow"] == 1 / 3
    assert math.isclose(figures["int8"][RAW]["snr_db"], 10 * math.log10(21))


@pytest.mark.parametrize("exponent", [-140, -60, -1, 0, 60, 126, 127, 149])
def test_scaling_rounds_nothing(exponent):
    low = max(-149, -126 - exponent - 20)
    x = torch.tensor([(1 + 2.0**-4 + 2.0**-23) * 2.0**k for k in range(low, 1, 7)]) * normal(1).sign()
    scaled = scaled_by(x, 2.0**exponent)
    assert all(math.ldexp(a, exponent) == b for a, b in zip(x.tolist(), scaled.tolist(), strict=True))


def test_blocks_and_tiles_do_not_matter():
    x = normal(2 * TILE + 999, 0.3)
    whole, cut = measure(x), measure(x, 1000)
    assert whole[0].unit == cut[0].unit
    for each in FORMATS:
        for kind in (RAW, SCALED):
            assert cut[1][each.id][kind] == pytest.approx(whole[1][each.id][kind], rel=1e-9)


def test_powers_of_two_only_move_the_exponent():
    """Unit scaling makes every scale the same scale."""
    x = normal(2000, 1e-3)
    figures = [measure(x * 2.0**k)[1] for k in (-60, -20, 0, 30)]
    for each in FORMATS:
        assert all(other[each.id][SCALED] == figures[0][each.id][SCALED] for other in figures)
