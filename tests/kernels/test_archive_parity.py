"""Kernels of the archive codecs against the references, bit for bit, as in ``test_codec_parity.py``.

At the end values at the ends of fp32 in every combination: what the reference refuses alone every backend refuses
alone; the rest comes back alike from one tensor.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import product

import pytest
import torch
from test_codec_parity import (
    BACKEND,
    DEVICE,
    assert_alike,
    assert_decodes_alike,
    assert_encodes_alike,
    assert_refused_alike,
    assert_same,
    of_bits,
    random_patterns,
    there,
)

from ckpt8.codecs.lattice import Lattice, MomentLattice, step_of
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.vscaled import VScaled
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec

SIZES = (0, 1, 33, 4096 + 5)
FIRSTS = (0, 77, (1 << 31) - 1000, (1 << 32) - 1000, (1 << 40) + 3)
"""Indexes of the first element; a hash is of the index modulo 2^32."""

LATTICES = (Lattice(-40, 7), MomentLattice(-37, (1 << 32) - 1), Lattice(-408, 1 << 31), Lattice(399, 0))
LOGS = (
    RowColumnLog(1 << 22, 64),
    RowColumnLog(7 * (1 << 23) // 5, 100, columns=True),
    RowColumnLog((1 << 14) + 1, 3, columns=True),
    RowColumnLog(1 << 20, 1),
    RowColumnLog(1 << 20, 1 << 40),
)
SCALED = VScaled(second=0, k=1e-3, u_max=0.125, bias1=0.9, root_bias2=0.3, eps=1e-8, salt=3)
SCALES = (
    SCALED,
    dataclasses.replace(SCALED, k=2.0**100, u_max=1.0, eps=0, salt=(1 << 32) - 1),
    dataclasses.replace(SCALED, k=1e-5, u_max=4.0, eps=1e-15),
    dataclasses.replace(SCALED, k=0.1, u_max=1 / 3, bias1=1, root_bias2=1, eps=1.0),
)
each_log, each_scale = (pytest.mark.parametrize("codec", codecs, ids=repr) for codecs in (LOGS, SCALES))
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def each_of(codecs, first=None):
    """Every codec with both types; slow are all but the ``first`` with fp32 and but one with bf16.

    They take the interpreter long; numba's kernels run them all.
    """
    quick = [*((codec, torch.float32) for codec in codecs[:first]), (codecs[0], torch.bfloat16)]
    cases = [(codec, dtype) for codec in codecs for dtype in (torch.float32, torch.bfloat16)]
    marked = [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(("codec", "dtype"), marked, ids=repr)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ANY_SYMBOL = torch.tensor(
    [-1, 0, 1, 2, 3, 254, 255, (1 << 19) - 1, 1 << 24, (1 << 30) + 7, (1 << 31) - 2, (1 << 31) - 1]
)


def normal(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# --- lattice ----------------------------------------------------------------------------------------------------


def weights(codec, numel, seed=0):
    """Weights of 1e-9 to 2^17 steps, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(47 * torch.rand(numel, generator=generator, dtype=torch.float64) - 30)
    x = (size * normal(numel, seed).sign() * step_of(codec.k)).float()
    x[::17], x[5::23] = 0.0, -0.0
    return x


@each_of(LATTICES)
def test_weights_of_every_size_and_place(codec, dtype):
    for numel in SIZES:
        assert_alike(codec, weights(codec, numel, seed=numel).to(dtype))
    for first in FIRSTS:
        assert_alike(codec, weights(codec, 2000, seed=1).to(dtype), first)


def test_weights_next_to_where_codes_change():
    """Within a few steps of fp32 of each boundary, where a fused or an approximate operation would show."""
    for codec in LATTICES[:2]:
        points = codec.decode({"codes": torch.arange(4096, dtype=torch.int32)}, _spec(4096), backend="torch")
        x = (points.double() + step_of(codec.k) / 2).float().view(torch.int32)
        for near in range(-3, 4):
            assert_alike(codec, (x + near).view(torch.float32))


def _spec(numel):
    return TensorSpec("x", Role.OTHER, DType.FLOAT32, (numel,))


def test_weights_so_small_that_their_quotient_is_subnormal():
    codec = Lattice(0, 0)  # the dither of element 0 is 0
    assert_alike(codec, of_bits(torch.tensor([(1 << 31) + 1])))
    assert_alike(codec, of_bits(torch.tensor([1])))


@pytest.mark.parametrize("position", [0, 4095, 4100])
def test_weights_that_are_refused(position):
    codec = LATTICES[0]
    most = (1 << 18) * step_of(codec.k)
    for value in (math.nan, -math.nan, math.inf, -math.inf, 3e38, -3e38, most, -most * (1 + 2.0**-17)):
        x = torch.full((4101,), 0.5)
        x[position] = value
        assert_refused_alike(codec, x)
    x[position] = most * (1 - 2.0**-17)
    assert_alike(codec, x)


@each_dtype
def test_every_symbol_decodes_alike_even_those_never_written(dtype):
    for codec in LATTICES[:3]:
        symbols = torch.cat([torch.arange(-1, 4000), ANY_SYMBOL]).to(torch.int32)
        assert_decodes_alike(codec, {"codes": symbols}, dtype, first=11)


# --- rclog ------------------------------------------------------------------------------------------------------


def second_moments(numel, seed=0, low=-45, high=38.5):
    """Second moments of all magnitudes, by rows and columns of 100 and at random, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(numel)
    logs = torch.rand(numel, generator=generator, dtype=torch.float64)
    logs += torch.rand(numel, generator=generator, dtype=torch.float64)[index // 100]
    logs += torch.rand(100, generator=generator, dtype=torch.float64)[index % 100]
    x = (10 ** (low + (high - low) * logs / 3)).clamp_max(3.3e38).float()
    x[::19], x[5::29], x[300:520] = 0.0, -0.0, 0.0
    return x


@each_of(LOGS, first=2)
def test_second_moments_of_every_size_and_place(codec, dtype):
    for numel in SIZES:
        assert_alike(codec, second_moments(numel, seed=numel).to(dtype))
    for first in (1, 63, 99, FIRSTS[-1]):
        assert_alike(codec, second_moments(600, seed=1, low=-14, high=-8).to(dtype), first)
    assert_alike(codec, random_patterns(1000, seed=2).abs().to(dtype))


@each_log
def test_second_moments_at_the_ends_of_fp32(codec):
    ends = torch.tensor([1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F7FFFFE]).repeat(200)
    assert_alike(codec, of_bits(ends))
    assert_alike(codec, of_bits(ends.sort().values))
    assert_alike(codec, torch.zeros(300))


def test_second_moments_that_are_refused():
    for value in (math.nan, -math.nan, math.inf, -math.inf, -1e-45, -1.0):
        for position in (0, 700, 1100):
            x = torch.full((1101,), 0.5)
            x[position] = value
            assert_refused_alike(LOGS[1], x, 5)


@each_of(LOGS)
def test_any_symbols_and_factors_decode_alike_even_those_never_written(codec, dtype):
    generator = torch.Generator().manual_seed(3)
    numel = 1200
    symbols = ANY_SYMBOL.repeat(numel // len(ANY_SYMBOL)).to(torch.int32)
    parts = {"codes": symbols[torch.randperm(numel, generator=generator)]}
    for name, part in codec.layout(_spec(numel)).items():
        if name != "codes":
            parts[name] = torch.randint(-32768, 32768, (part.numel,), generator=generator).to(torch.int16)
    assert_decodes_alike(codec, parts, dtype, first=11)


# --- vscaled ----------------------------------------------------------------------------------------------------


def moments(codec, numel, dtype, seed=0, *, low=-14, high=-6, spread=2.0):
    """First moments and their companions: updates of some u_max at most, zeros in both, separately and together."""
    generator = torch.Generator().manual_seed(seed)
    original = second_moments(numel, seed, low, high).abs()
    original[7::31] = 0.0
    second = (original.double() * (1 + 0.2 * torch.rand(numel, generator=generator))).clamp_max(3.3e38).float()
    divisor = (original.double().sqrt() / codec.root_bias2 + codec.eps) * codec.bias1
    # At most so many steps as a code reaches.
    most = torch.where(second > 0, codec.k * second.double() ** 0.25, math.inf) * 2**15
    m = (normal(numel, seed).double() * torch.minimum(spread * codec.u_max * divisor, most)).to(dtype)
    m[::13] = 0.0
    return m, {"second": second, "original_second": original}


@each_of(SCALES)
def test_first_moments_of_every_size_and_place(codec, dtype):
    for numel in SIZES:
        m, companions = moments(codec, numel, dtype, seed=numel)
        assert_alike(codec, m, 0, companions)
    m, companions = moments(codec, 2000, dtype, spread=50)
    for first in FIRSTS:
        assert_alike(codec, m, first, companions)


@each_scale
def test_first_moments_of_all_magnitudes(codec):
    for low, high in ((-45, -36), (-20, 0)):
        m, companions = moments(codec, 3000, torch.float32, low=low, high=high)
        assert_alike(codec, m, 5, companions)


def test_first_moments_that_are_refused():
    codec = SCALES[0]
    m, companions = moments(codec, 1000, torch.float32)
    infinite = torch.full((1000,), math.inf)
    for value in (math.nan, math.inf, -math.inf, 1e30):
        x = m.clone()
        x[700] = value
        assert_refused_alike(codec, x, 0, companions)
    for name in companions:
        for value in (-1.0, math.nan):
            wrong = companions[name].clone()
            wrong[33] = value
            assert_refused_alike(
                codec, m.clone().index_fill_(0, torch.tensor([33]), 1e-9), 0, companions | {name: wrong}
            )
    assert_refused_alike(codec, m, 0, companions | {"second": infinite})
    without_eps = SCALES[1]
    zeros = {name: torch.zeros(1000) for name in companions}
    assert_alike(without_eps, torch.zeros(1000), 0, zeros)
    assert_refused_alike(without_eps, torch.full((1000,), 1e-40), 0, zeros)
    assert_refused_alike(
        codec, torch.full((1000,), 1.0), 0, companions | {"original_second": torch.full((1000,), 1e-30)}
    )


@each_of(SCALES)
def test_any_symbols_beside_any_second_moment_decode_alike(codec, dtype):
    symbols = ANY_SYMBOL.repeat(100).to(torch.int32)
    assert_decodes_alike(codec, {"codes": symbols}, dtype, 5, {"second": second_moments(1200, low=-45, high=20)})


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [LATTICES[0], LOGS[1], SCALED], ids=repr)
def test_views_of_any_stride_and_nothing_beside_the_elements(codec):
    base = torch.rand(3 * 1100, generator=torch.Generator().manual_seed(4)) + 1e-3
    for cut in (slice(1, 1100), slice(0, None, 3), slice(3, 1003)):
        numel = base[cut].numel()
        original = torch.rand(2 * numel + 3, generator=torch.Generator().manual_seed(5))[3:]
        given = {"second": original[:numel], "original_second": original[numel:]} if codec.companions else {}
        parts = assert_encodes_alike(codec, base[cut], 3, given)
        given.pop("original_second", None)
        expected = assert_decodes_alike(codec, parts, torch.float32, 3, given)
        around = torch.full((numel + 9,), 77.0, device=DEVICE)
        out = around[3 : numel + 3]
        codec.decode(there(parts), _spec(numel), out=out, backend=BACKEND, first=3, companions=there(given))
        assert_same(out, expected, "values")
        assert around[:3].tolist() + around[numel + 3 :].tolist() == [77.0] * 9


# --- the ends of fp32 -------------------------------------------------------------------------------------------

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
