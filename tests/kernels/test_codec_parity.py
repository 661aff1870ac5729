"""Kernels against the reference, bit for bit: numba's here, Triton's in a process that ``test_parity.py`` starts.

``PARITY_BACKEND`` is whose kernels. ``TRITON_INTERPRET`` decides what ``triton.jit`` gives, and is read when a kernel
is defined. Where it is set Triton's run on the CPU, else on a CUDA device.
"""

from __future__ import annotations

import math
import os

import former_presets
import pytest
import torch

from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.policy import PRESETS
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec

BACKEND = os.environ.get("PARITY_BACKEND", "numba")
pytest.importorskip(BACKEND, reason=f"{BACKEND} is not installed")
DEVICE = "cpu" if BACKEND == "numba" or os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SIZES = (0, 1, 31, 32, 33, 1000, 4096, 4096 + 5, 2 * 4096 + 33)
SPLIT = [Split24(R=levels) for levels in (127, 63, 7, 1)]
SIGNED = [Companded8(Q=levels) for levels in (127, 31, 1)]
LINEAR, FOURTH_ROOT = ([Companded8(signed=False, Q=levels, p=p) for levels in (255, 63)] for p in (1, 0.5))
UNSIGNED = [*LINEAR, *FOURTH_ROOT, Companded8(signed=False, Q=1)]
ONE_OF_EACH = [SPLIT[0], SIGNED[0], LINEAR[0], FOURTH_ROOT[0]]
IN_PRESETS = {*former_presets.COMPACT, *(codec for preset in PRESETS.values() for codec in preset.values())}


def each(codecs):
    """A test of every codec; those that no preset has or had are slow."""
    parameters = [codec if codec in IN_PRESETS else pytest.param(codec, marks=pytest.mark.slow) for codec in codecs]
    return pytest.mark.parametrize("codec", parameters, ids=repr)


each_split, each_companded = each(SPLIT), each(SIGNED + UNSIGNED)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Not a number is what some of these tests are about; numpy, which interprets, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def pattern(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(_SAME_SIZE[x.element_size()])


def assert_same(one: torch.Tensor, other: torch.Tensor, what: object) -> None:
    assert one.dtype == other.dtype
    assert torch.equal(pattern(one), pattern(other)), what


def there(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def assert_encodes_alike(codec, x: torch.Tensor, first=0, companions=None) -> dict[str, torch.Tensor]:
    companions = companions or {}
    expected = codec.encode(x, backend="torch", first=first, companions=companions)
    parts = codec.encode(x.to(DEVICE), backend=BACKEND, first=first, companions=there(companions))
    assert list(parts) == list(expected)
    for name, part in parts.items():
        assert_same(part, expected[name], name)
    return expected


def assert_decodes_alike(codec, parts, dtype: torch.dtype, first=0, companions=None) -> torch.Tensor:
    companions = {name: x for name, x in (companions or {}).items() if not name.startswith("original_")}
    numel = parts["rho" if "rho" in parts else "codes"].numel()
    spec = TensorSpec("x", Role.OTHER, DType.from_label(str(dtype)), (numel,))
    expected = codec.decode(parts, spec, backend="torch", first=first, companions=companions)
    values = codec.decode(there(parts), spec, backend=BACKEND, first=first, companions=there(companions)).cpu()
    # NaN comes only of parts that are never written, and devices differ in its bits.
    assert torch.equal(values.isnan(), expected.isnan())
    assert_same(values.masked_fill(values.isnan(), 0), expected.masked_fill(expected.isnan(), 0), "values")
    return expected


def assert_alike(codec, x: torch.Tensor, first=0, companions=None) -> torch.Tensor:
    parts = assert_encodes_alike(codec, x, first, companions)
    return assert_decodes_alike(codec, parts, x.dtype, first, companions)


def assert_refused_alike(codec, x: torch.Tensor, first=0, companions=None) -> None:
    companions = companions or {}
    with pytest.raises(RefusedError) as expected:
        codec.encode(x, backend="torch", first=first, companions=companions)
    with pytest.raises(RefusedError) as caught:
        codec.encode(x.to(DEVICE), backend=BACKEND, first=first, companions=there(companions))
    assert str(caught.value) == str(expected.value)


def of_bits(bits: torch.Tensor) -> torch.Tensor:
    """fp32 of bit patterns given as int64 in 0 .. 2^32 - 1."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def random_patterns(count: int, seed: int) -> torch.Tensor:
    """Any finite fp32 whose bf16 is finite, denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 32, (count,), generator=generator)
    bits[::7] &= 0x80FFFFFF  # exponents 0 and 1
    return of_bits(torch.where((bits & 0x7FFFFFFF) < 0x7F7F8000, bits, bits & 0x80FFFFFF))


def moments(codec, count: int, seed: int, low: float = -45, high: float = 37) -> torch.Tensor:
    """Groups of all magnitudes and many spreads, zeros of both signs, an outlier here and there."""
    generator = torch.Generator().manual_seed(seed)
    rows = -(-count // 32)
    centre = low + (high - low) * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    spread = 8 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    x = 10 ** (centre - spread * torch.rand(rows, 32, generator=generator, dtype=torch.float64))
    x[torch.rand(rows, 32, generator=generator) < 0.03] = 0.0
    x[::9] *= 1e-30
    if codec.signed:
        x *= torch.randn(rows, 32, generator=generator).sign()
    x = x.float()
    x[::5, 3] = -0.0
    return x.flatten()[:count]


# --- split24 ----------------------------------------------------------------------------------------------------


@each_split
def test_weights_of_every_size(codec):
    for numel in SIZES:
        assert_alike(codec, random_patterns(numel, seed=numel))
        assert_alike(codec, torch.randn(numel, generator=torch.Generator().manual_seed(numel)))


@each_split
def test_weights_at_every_edge(codec):
    near = torch.tensor([base + k for base in (-65536, -32768, -16384, 0, 16384, 32768) for k in (-2, -1, 0, 1, 2)])
    mag = ((torch.arange(1, 255) << 23).unsqueeze(1) + near).flatten()
    mag = torch.cat([torch.arange(0, 4096), mag[mag < 0x7F7F8000], torch.tensor([0x7F7F7FFF])])
    assert_alike(codec, of_bits(mag))
    assert_alike(codec, of_bits(mag | 1 << 31))


@each_split
def test_every_offset_from_a_bf16(codec):
    assert_alike(codec, of_bits((0x3F80 << 16) + torch.arange(-32768, 32769)))


@each_split
def test_every_residual_decodes_alike_even_those_never_written(codec):
    """Also over zero, and beyond the number of levels."""
    rho = torch.arange(-128, 128).repeat(4)
    parts = {
        "exponent": torch.tensor([0, 0, 127, 254]).repeat_interleave(256).to(torch.uint8),
        "mantissa": torch.tensor([0, 128, 200, 127]).repeat_interleave(256).to(torch.uint8),
        "rho": rho.to(torch.int8),
    }
    assert_decodes_alike(codec, parts, torch.float32)


@pytest.mark.parametrize("position", [0, 4095, 4096, 4100])
def test_weights_that_are_refused(position):
    for bits in (0x7F7F8000, 0xFF7F8000, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF):
        x = torch.full((4101,), 0.5)
        x[position] = of_bits(torch.tensor([bits]))[0]
        assert_refused_alike(SPLIT[0], x)


# --- companded8 -------------------------------------------------------------------------------------------------


@each_companded
@each_dtype
def test_moments_of_every_size(codec, dtype):
    for numel in SIZES:
        assert_alike(codec, moments(codec, numel, seed=numel).to(dtype))


@each_companded
@each_dtype
def test_moments_of_all_magnitudes(codec, dtype):
    assert_alike(codec, moments(codec, 20_000, seed=1).to(dtype))
    assert_alike(codec, moments(codec, 9_000, seed=2, low=-4, high=-2).to(dtype))
    x = random_patterns(20_000, seed=3)
    x[x.abs() > 2.0**126] *= 2.0**-10
    assert_alike(codec, (x if codec.signed else x.abs()).to(dtype))


@each_companded
@each_dtype
def test_awkward_groups(codec, dtype):
    sign = -1.0 if codec.signed else 1.0
    floor = 2.0**-100
    below, above = (float(of_bits(torch.tensor([(27 << 23) + k]))) for k in (-1, 1))
    groups = [
        [0.0] * 32,
        [-0.0] * 32,
        [-0.0, 0.0] * 16,
        [1e-45] * 32,
        [1e-45] * 31 + [1e38],
        [sign * 1e38] + [1e-3] * 31,
        [1.0] + [0.0] * 31,
        [k * 1.4e-45 for k in range(32)],
        [sign * k * 1.3e-39 for k in range(32)],
        [below] * 16 + [0.0] * 16,
        [floor] + [below] * 31,
        [sign * floor] + [floor / 3] * 31,
        [above] + [1e-44] * 31,
        [2.0**k for k in range(-16, 16)],
        [sign * 2.0**-k for k in range(32)],
        [sign * 1.5 * 2.0 ** (-4 * k) for k in range(32)],
        [510 / 256 * 2.0 ** (127 if codec.signed else 126)] + [2.0] * 31,
        [0.1, 0.2, sign * 0.3, 1e-9, 0.0],
    ]
    assert_alike(codec, torch.tensor([value for group in groups for value in group]).to(dtype))


@each_companded
def test_where_codes_and_scales_change(codec):
    """Within a few steps of each boundary, where a fused or an approximate operation would show."""
    y = (torch.arange(codec.Q, dtype=torch.float64) + 0.5) / codec.Q
    at = y / (2 - y) if codec.signed else (y if codec.p == 1 else y * y) ** 2
    near = at.float().view(torch.int32).unsqueeze(1) + torch.arange(-5, 6, dtype=torch.int32)
    rows = torch.nn.functional.pad(near.flatten().view(torch.float32), (0, -near.numel() % 31)).view(-1, 31)
    x = torch.cat([torch.ones(len(rows), 1), rows], 1)
    assert_alike(codec, x.flatten())
    if codec.signed:
        assert_alike(codec, -x.flatten())
    ties = (torch.arange(127 << 23, 128 << 23, 1 << 14).unsqueeze(1) + torch.arange(-1, 2)).flatten()
    x = torch.zeros(len(ties), 32)
    x[:, 5] = of_bits(ties) if codec.signed else of_bits(ties).square()
    x[:, 6] = x[:, 5] / 3
    assert_alike(codec, x.flatten())


@each_companded
@each_dtype
def test_every_code_under_every_scale_decodes_alike(codec, dtype):
    """Codes that are never written among them."""
    codes = torch.arange(-128, 128) if codec.signed else torch.arange(256)
    scales = torch.cat([torch.tensor([0, 1, 255, 256, 0xBEFF, 0xFEFF]), torch.arange(0, 0xFF00, 2311)])
    parts = {
        "codes": codes.repeat(len(scales)).to(torch.int8 if codec.signed else torch.uint8),
        "scales": scales.repeat_interleave(8).to(torch.int32).to(torch.uint16),
    }
    assert_decodes_alike(codec, parts, dtype)


BAD = (math.nan, -math.nan, math.inf, -math.inf, float(of_bits(torch.tensor([0x7F800001]))), 3.4e38)
BAD_BITS = (0x7FFFFFFF, 0xFFFFFFFF, 0xFFC12345)


@pytest.mark.parametrize("codec", ONE_OF_EACH[1:], ids=repr)
@each_dtype
@pytest.mark.parametrize("position", [31, 4100])
def test_moments_that_are_refused(codec, dtype, position):
    values = [*BAD, *of_bits(torch.tensor(BAD_BITS)), *([] if codec.signed else [-1e-45, -1.0, -3e38])]
    for value in values:
        x = torch.full((4101,), 0.5, dtype=dtype)
        x[position] = value
        if dtype == torch.bfloat16 and value == -1e-45:
            continue  # a zero there
        assert_refused_alike(codec, x)
    x = torch.full((4101,), 0.5, dtype=dtype)
    x[position] = -0.0
    assert_alike(codec, x)


def test_the_last_values_that_are_not_refused():
    first = 511.5 / 256 * 2.0**127
    assert_refused_alike(SIGNED[0], torch.tensor([first]))
    assert_alike(SIGNED[0], torch.tensor([first]).nextafter(torch.zeros(1)))
    square = torch.tensor([511.5 / 256 * 2.0**63]).nextafter(torch.zeros(1)).square()
    steps = square.view(torch.int32) + torch.arange(-6, 7, dtype=torch.int32)
    refused = 0
    for codec in (LINEAR[0], FOURTH_ROOT[0]):
        for v in steps.view(torch.float32).split(1):
            try:
                codec.encode(v, backend="torch")
            except RefusedError:
                assert_refused_alike(codec, v)
                refused += 1
            else:
                assert_alike(codec, v)
    assert 0 < refused < 2 * len(steps)


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ONE_OF_EACH, ids=repr)
def test_views_of_any_stride_and_alignment(codec):
    base = torch.rand(3 * 4200, generator=torch.Generator().manual_seed(4))
    for cut in (slice(1, 4200), slice(0, None, 3), slice(3, 4103)):
        expected = codec.encode(base[cut].clone(), backend="torch")
        for name, part in codec.encode(base.to(DEVICE)[cut], backend=BACKEND).items():
            assert_same(part, expected[name], (name, cut))
    square = base[: 90 * 91].view(90, 91)
    expected = codec.encode(square.t().contiguous(), backend="torch")
    for name, part in codec.encode(square.to(DEVICE).t(), backend=BACKEND).items():
        assert_same(part, expected[name], name)


@pytest.mark.parametrize("codec", ONE_OF_EACH, ids=repr)
@each_dtype
def test_decoding_writes_its_elements_and_no_others(codec, dtype):
    if codec is SPLIT[0] and dtype != torch.float32:
        return
    x = torch.rand(4131, generator=torch.Generator().manual_seed(5)).to(dtype)
    parts = codec.encode(x, backend="torch")
    spec = TensorSpec("x", Role.OTHER, DType.from_label(str(dtype)), (4131,))
    expected = codec.decode(parts, spec, backend="torch")
    around = torch.full((4140,), 77.0, dtype=dtype, device=DEVICE)
    out = around[3:4134]
    result = codec.decode(there(parts), spec, out=out, backend=BACKEND)
    assert result.data_ptr() == out.data_ptr()
    assert_same(out, expected, "values")
    assert around[:3].tolist() + around[4134:].tolist() == [77.0] * 9


def test_a_cuda_tensor_takes_the_kernels_by_itself():
    from ckpt8.core.backend import resolve

    assert resolve(None, torch.device("cuda")) == "triton"
    assert resolve(BACKEND, torch.device(DEVICE)) == BACKEND
