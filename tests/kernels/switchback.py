"""SwitchBack's kernels against plain torch on a CPU, bit for bit: run by ``test_parity.py`` in a process of its own.

With ``TRITON_INTERPRET=1`` the kernels run on the CPU, else on a CUDA device. The interpreter's time goes by programs,
so that tiles of weights are larger here than on a device but for one test.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from ckpt8.nn import SwitchBackLinear, reference, triton

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = ((1, 1), (3, 40), (17, 33), (34, 129), (2, 4096), (2, 4097), (2, 8200), (0, 8), (4, 0))
"""Rows and columns: less than a tile, one, more; rows of one block and of several; nothing."""

PRODUCTS = ((1, 1, 1), (16, 128, 128), (17, 130, 5), (65, 128, 129), (130, 300, 257), (0, 8, 8))
PRODUCTS += ((4, 8, 0), (4, 0, 8))
"""Rows, columns and outputs: the tiles for few rows and for many."""

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}
each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP16, marks=pytest.mark.slow)], ids=str)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch, request):
    if DEVICE.type == "cpu" and request.function is not test_tiles_of_the_size_that_devices_have:
        monkeypatch.setattr(triton, "TILE", 256)


def normal(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes_of(*shape, seed=0):
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def assert_same(one, other):
    """The same bits; a NaN may be any."""
    one, other = one.cpu(), other.cpu()
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    if one.is_floating_point():
        assert torch.equal(one.isnan(), other.isnan())
        one, other = one.masked_fill(one.isnan(), 0), other.masked_fill(other.isnan(), 0)
    kind = _SAME_SIZE[one.element_size()]
    assert torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def assert_same_codes(codes, expected):
    columns = expected.shape[1]
    assert codes.shape[1] % triton.STEP == 0
    assert codes.shape[1] - columns < triton.STEP
    assert_same(codes[:, :columns], expected)
    assert not codes[:, columns:].any()


def assert_quantised_alike(x):
    there = x.to(DEVICE)
    (codes, states), (expected, expected_states) = triton.quantise_rows(there), reference.quantise_rows(x)
    assert_same_codes(codes, expected)
    assert_same(states, expected_states)
    state = reference.tensor_state(x)
    assert_same(triton.tensor_state(there), state)
    for transposed in (False, True):
        expected = reference.quantise_tensor(x, state, transposed=transposed)
        assert_same_codes(triton.quantise_tensor(there, state.to(DEVICE), transposed=transposed), expected)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrices_of_every_size(shape, dtype):
    assert_quantised_alike(normal(*shape, dtype=dtype))


def test_tiles_of_the_size_that_devices_have():
    assert_quantised_alike(normal(65, 130))


@each_dtype
def test_all_magnitudes_and_zero_rows(dtype):
    x = normal(40, 70) * torch.logspace(-45, 38, 40).unsqueeze(1)
    x[7], x[8] = 0, -0.0
    assert_quantised_alike(x.to(dtype).nan_to_num(0, posinf=1, neginf=-1))
    assert_quantised_alike(torch.zeros(3, 70, dtype=dtype))


def test_halves_and_their_neighbours():
    halves = (torch.arange(-127, 127, dtype=torch.float64) + 0.5) / 127
    near = (halves.float().view(torch.int32).unsqueeze(1) + torch.arange(-3, 4, dtype=torch.int32)).flatten()
    x = torch.cat([torch.ones(1), near.view(torch.float32)]).unsqueeze(0)
    assert_quantised_alike(x)
    assert_quantised_alike(x * 127)


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(dtype, bad):
    x = normal(3, 4200, dtype=dtype)
    x[1, 4150] = bad
    assert_quantised_alike(x)
    codes, states = triton.quantise_rows(x.to(DEVICE))
    assert states.isnan().tolist() == [False, True, False]
    assert not codes[1].any()


@each_dtype
def test_tensors_that_are_not_contiguous(dtype):
    x = normal(20, 30, dtype=dtype)
    for view in (x.T, x[:, 3:20], x[::3, ::2], x[:1].expand(9, 30)):
        assert_quantised_alike(view)


def assert_product_alike(a, states, b, state, bias, dtype):
    expected = reference.matmul(a, states, b, state, bias, dtype)
    there = [None if t is None else t.to(DEVICE) for t in (a, states, b, state, bias)]
    assert_same(triton.matmul(*there, dtype), expected)


@each_dtype
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products_of_every_size(shape, dtype):
    rows, columns, outputs = shape
    a, b = codes_of(rows, columns), codes_of(outputs, columns, seed=1)
    states, state = normal(rows, seed=2).abs(), torch.tensor(0.37)
    for bias in (None, normal(outputs, seed=3), normal(outputs, seed=3, dtype=dtype)):
        assert_product_alike(a, states, b, state, bias, dtype)


def test_more_tiles_of_rows_than_one_group():
    a, b = codes_of(1100, 16), codes_of(140, 16, seed=1)
    assert_product_alike(a, normal(1100, seed=2).abs(), b, torch.tensor(0.37), normal(140, seed=3), BF16)


@each_dtype
def test_products_with_states_of_all_magnitudes(dtype):
    a, b = codes_of(90, 64), codes_of(30, 64, seed=1)
    states = torch.logspace(-44, 38, 90)
    states[5], states[6], states[7] = 0, math.nan, 1e-45
    for state in (0.0, 1e-38, 1e-20, 1.0, 1e20, 3e38, math.nan):
        assert_product_alike(a, states, b, torch.tensor(state), None, dtype)


@pytest.mark.parametrize("slices", [256, reference.SLICE])
def test_sums_that_neither_fp32_nor_int32_holds(monkeypatch, slices):
    monkeypatch.setattr(reference, "SLICE", slices)
    for columns in (1600, 2 * slices, 2 * slices + 3) if slices == 256 or DEVICE.type == "cuda" else (5000,):
        a = torch.full((2, columns), 127, dtype=torch.int8)
        a[1, ::3] = -126
        b = a[:1].clone()
        b[:, 1] = 126
        assert_product_alike(a, torch.ones(2), b, torch.tensor(127.0**2), None, FP32)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer(autocast, bias):
    """Forward pass and input gradient to the bit; the other gradients are torch's own."""
    results = []
    for device, backend in ((torch.device("cpu"), "torch"), (DEVICE, "triton")):
        layer = SwitchBackLinear(70, 40, bias=bias, device=device, backend=backend)
        with torch.no_grad():
            for i, p in enumerate(layer.parameters()):
                p.copy_(normal(*p.shape, seed=i))
        x = normal(2, 12, 70, seed=5).to(device).requires_grad_()
        with torch.autocast(device.type, dtype=BF16, enabled=autocast):
            y = layer(x)
        y.backward(normal(2, 12, 40, seed=6, dtype=y.dtype).to(device))
        results.append((y.detach(), x.grad, [p.grad.cpu() for p in layer.parameters()]))
    (y, grad_x, grads), (our_y, our_grad_x, our_grads) = results
    assert_same(our_y, y)
    assert_same(our_grad_x, grad_x)
    tolerance = 2**-7 if autocast else 1e-5
    for ours, theirs in zip(our_grads, grads, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_the_backend_is_chosen_by_the_device():
    layer = SwitchBackLinear(40, 24, device=DEVICE)
    x = normal(3, 40).to(DEVICE)
    expected = SwitchBackLinear(40, 24, backend="torch")
    expected.load_state_dict(layer.state_dict())
    assert_same(layer(x).detach(), expected(x.cpu()).detach())
