"""``SwitchBackLinear`` against its definition in float64, and as a layer beside ``nn.Linear``."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckpt8.core.errors import UsageError
from ckpt8.nn import SwitchBackLinear, reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {FP32: 2**-20, BF16: 2**-8, FP16: 2**-11}
"""Relative error of a sum that was rounded to a type; of fp32 its terms were rounded too."""

each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)


def normal(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(inputs, outputs, dtype=FP32, seed=1, **arguments):
    layer = SwitchBackLinear(inputs, outputs, dtype=dtype, **arguments)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(normal(*p.shape, seed=seed + i))
    return layer


def by_rows(x):
    """Codes and states of the definition, in float64."""
    x = x.detach().double()
    states = x.abs().amax(-1, keepdim=True)
    return torch.round(127 * x / states), states


def by_tensor(w):
    w = w.detach().double()
    return torch.round(127 * w / w.abs().max()), w.abs().max()


def definition(x, layer, grad):
    """Y, ∂X, ∂W and ∂b in float64."""
    (x_codes, x_states), (w_codes, w_state), (g_codes, g_states) = by_rows(x), by_tensor(layer.weight), by_rows(grad)
    y = x_states * w_state / 127**2 * (x_codes @ w_codes.T)
    if layer.bias is not None:
        y = y + layer.bias.detach().double()
    grad_x = g_states * w_state / 127**2 * (g_codes @ w_codes)
    flat_x, flat_grad = (t.detach().double().flatten(0, -2) for t in (x, grad))
    return y, grad_x, flat_grad.T @ flat_x, flat_grad.sum(0)


def assert_near(value, expected, dtype):
    """Within the rounding of ``dtype``, relative to the largest value: sums may cancel."""
    assert value.shape == expected.shape
    assert (value.double() - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


# --- the definition -----------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(1,), (40,), (3, 5), (2, 3, 4)], ids=str)
def test_output_and_gradients_are_those_of_the_definition(dtype, bias, batch):
    layer = layer_of(70, 33, dtype, bias=bias)
    x = normal(*batch, 70, seed=7, dtype=dtype).requires_grad_()
    grad = 1e-3 * normal(*batch, 33, seed=8, dtype=dtype)
    y = layer(x)
    y.backward(grad)
    expected, grad_x, grad_weight, grad_bias = definition(x, layer, grad)
    assert [t.dtype for t in (y, x.grad, layer.weight.grad)] == [dtype] * 3
    assert_near(y, expected, dtype)
    assert_near(x.grad, grad_x, dtype)
    assert_near(layer.weight.grad, grad_weight, dtype)
    if bias:
        assert_near(layer.bias.grad, grad_bias, dtype)


def test_it_differs_from_a_linear_layer_by_eight_bits():
    layer, x, grad = layer_of(256, 128), normal(64, 256, seed=7).requires_grad_(), normal(64, 128, seed=8)
    layer(x).backward(grad)
    exact = grad @ layer.weight
    for ours, theirs in ((layer(x), nn.functional.linear(x, layer.weight, layer.bias)), (x.grad, exact)):
        assert 0.002 < float(((ours - theirs).norm() / theirs.norm()).detach()) < 0.02
    assert_near(layer.weight.grad, grad.double().T @ x.detach().double(), FP32)


@each_dtype
def test_codes_are_the_nearest_and_halves_are_even(dtype):
    x = normal(50, 300, seed=3, dtype=dtype) * torch.logspace(-30, 30, 50).unsqueeze(1).to(dtype)
    x = x.nan_to_num(0)
    codes, states = reference.quantise_rows(x)
    assert same_bits(states, x.float().abs().amax(1))
    exact = torch.where(states > 0, 127 * x.double().T / states, 0).T
    assert (codes - exact).abs().max() <= 0.5 + 2**-15
    assert codes.abs().amax(1).tolist() == [127 if state else 0 for state in states]
    halves = torch.arange(-127, 127) + 0.5
    codes, _ = reference.quantise_rows(torch.cat([halves, torch.tensor([127.0])]).unsqueeze(0))
    assert codes[0, :-1].tolist() == [round(half) for half in halves.tolist()]


def test_a_transposed_matrix_has_the_same_codes():
    w = normal(300, 500, seed=2)
    state = reference.tensor_state(w)
    codes = reference.quantise_tensor(w, state)
    assert state == w.abs().max()
    assert torch.equal(codes, by_tensor(w)[0])
    turned = reference.quantise_tensor(w, state, transposed=True)
    assert turned.is_contiguous()
    assert torch.equal(turned, codes.T)


# --- exact sums ---------------------------------------------------------------------------------------------------

COLUMNS = (1, 2, 7, 8, 64, 1023, 1024, 1025, 5000)


def sums(a, b):
    """Through ``matmul`` with scales of one."""
    ones = torch.ones(len(a))
    return reference.matmul(a, ones, b, torch.tensor(127.0**2), None, FP32)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, 3, 17, 40])
def test_sums_of_codes_are_exact(columns, rows):
    generator = torch.Generator().manual_seed(columns)
    a = torch.randint(-127, 128, (rows, columns), generator=generator)
    b = torch.randint(-127, 128, (9, columns), generator=generator)
    b[0], b[1], a[0] = 127, -127, 127
    assert torch.equal(sums(a.to(torch.int8), b.to(torch.int8)), (a @ b.T).float())


def test_sums_beyond_int32():
    columns = 2 * reference.SLICE + 1000
    a = torch.full((2, columns), 127, dtype=torch.int8)
    b = torch.stack([a[0], -a[0], a[0] * 0])
    expected = columns * 127.0**2 * torch.tensor([1.0, -1.0, 0.0]).expand(2, 3)
    assert columns * 127**2 > 2**31
    torch.testing.assert_close(sums(a, b), expected, rtol=2**-23, atol=0)


@pytest.mark.slow
def test_sums_are_exact_where_torchs_own_saturate():
    """A CPU without VNNI adds products in 16 bits: oneDNN does so here when it is told of nothing newer than AVX2."""
    code = """
import torch
from ckpt8.nn import reference
a = torch.full((20, 64), 127, dtype=torch.int8)
y = reference.matmul(a, torch.ones(20), a, torch.tensor(127.0**2), None, torch.float32)
assert (y == 64 * 127**2).all(), y
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment)


# --- what is not finite, and what is not there --------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(dtype, bad):
    layer, x, grad = layer_of(40, 24, dtype), normal(6, 40, dtype=dtype), normal(6, 24, seed=5, dtype=dtype)
    good = layer(x)
    x[2, 3] = bad
    y = layer(x.requires_grad_())
    assert y[2].isnan().all()
    rest = torch.arange(6) != 2
    assert same_bits(y[rest], good[rest])
    y.backward(grad)
    assert x.grad.isfinite().all()
    assert not layer.weight.grad[:, 3].isfinite().any()

    spoiled = grad.clone()
    spoiled[4, 1] = bad
    fine, x.grad = x.grad, None
    layer(x).backward(spoiled)
    assert x.grad[4].isnan().all()
    assert same_bits(x.grad[:4], fine[:4])

    with torch.no_grad():
        layer.weight[0, 0] = bad
    x.grad = None
    y = layer(x)
    y.backward(grad)
    assert y.isnan().all()
    assert x.grad.isnan().all()


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_codes_of_what_is_not_finite(dtype, bad):
    x = normal(4, 30, dtype=dtype)
    x[2, 5] = bad
    codes, states = reference.quantise_rows(x)
    assert states.isnan().tolist() == [False, False, True, False]
    assert not codes[2].any()
    assert (state := reference.tensor_state(x)).isnan()
    assert not reference.quantise_tensor(x, state).any()


def test_a_gradient_that_overflows_reaches_the_loss_scaler():
    layer = layer_of(8, 8, FP16)
    x = normal(4, 8, dtype=FP16).requires_grad_()
    layer(x).backward(torch.full((4, 8), math.inf, dtype=FP16))
    assert not any(p.grad.isfinite().any() for p in layer.parameters())
    assert x.grad.isnan().all()


def test_zero_rows_give_the_bias():
    layer, x = layer_of(40, 24), normal(5, 40)
    x[1], x[3] = 0, -0.0
    y = layer(x.requires_grad_())
    assert same_bits(y[1], layer.bias.detach())
    assert same_bits(y[3], layer.bias.detach())
    y.backward(torch.zeros_like(y))
    assert not any(t.grad.any() for t in (x, *layer.parameters()))
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(layer(x), layer.bias.expand(5, 24))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("shape", "outputs"), [((0, 40), 24), ((3, 0, 40), 24), ((5, 0), 24), ((5, 40), 0), ((0, 0), 0)], ids=str
)
def test_empty_tensors(shape, outputs):
    layer, plain = layer_of(shape[-1], outputs), nn.Linear(shape[-1], outputs)
    plain.load_state_dict(layer.state_dict())
    results = []
    for module in (layer, plain):
        x = torch.ones(shape, requires_grad=True)
        module(x).sum().backward()
        results.append([module(x), x.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_smallest_and_the_largest_numbers():
    x = torch.tensor([[1e-45, -3e-45], [3.4e38, -1e38], [1e-38, 2e-39]])
    layer = SwitchBackLinear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    y = layer(x).detach()
    half_a_code = x.abs().amax(1, keepdim=True).double() / 254
    assert ((y.double() - x.double()).abs() <= half_a_code * (1 + 1e-6) + 1.5e-45).all()
    assert y[0, 0] == x[0, 0]


# --- as a layer ---------------------------------------------------------------------------------------------------


def test_one_vector_and_tensors_that_are_not_contiguous():
    layer, x = layer_of(40, 24), normal(6, 40)
    y = layer(x)
    assert torch.equal(layer(x[0]), y[0])
    assert torch.equal(layer(x.T.contiguous().T), y)
    turned = layer_of(40, 24)
    turned.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    turned.bias = layer.bias
    assert not turned.weight.is_contiguous()
    for module in (layer, turned):
        one, two = (x.clone().requires_grad_() for _ in range(2))
        module(one).sum().backward()  # the gradient of a sum is one number, expanded
        module(two).backward(torch.ones(6, 24))
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_autocast(weight_dtype, inside):
    layer, x = layer_of(64, 24, weight_dtype), normal(9, 64, seed=3).requires_grad_()
    grad = normal(9, 24, seed=4, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        y = layer(x)
        if inside:
            y.backward(grad)
    if not inside:
        y.backward(grad)
    expected, grad_x, grad_weight, grad_bias = definition(x.to(BF16), layer, grad)
    assert y.dtype == BF16
    assert [t.grad.dtype for t in (x, *layer.parameters())] == [FP32, weight_dtype, weight_dtype]
    for value, correct in ((y, expected), (x.grad, grad_x), (layer.weight.grad, grad_weight)):
        assert_near(value, correct, BF16)
    assert_near(layer.bias.grad, grad_bias, weight_dtype)


@pytest.mark.parametrize("outputs", [5, 24])
def test_gradients_of_fp32_stay_fp32_under_autocast(outputs):
    """Those of five columns are not products of int8 matrices to torch: see ``reference``."""
    results = []
    for enabled in (False, True):
        layer, x = layer_of(64, outputs), normal(40, 64, seed=3).requires_grad_()
        y = layer(x)
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            y.backward(normal(40, outputs, seed=4))
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(map(same_bits, *results))


def results_of(call, autocast):
    """What ``call`` of two layers and their input gives, and all gradients."""
    layers, x = nn.Sequential(layer_of(40, 40), nn.GELU(), layer_of(40, 8)), normal(9, 40).requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        y = call(layers, x)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad for p in layers.parameters())]


def plainly(layers, x):
    return layers(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_gradient_checkpointing(reentrant, autocast):
    found = results_of(lambda layers, x: checkpoint(layers, x, use_reentrant=reentrant), autocast)
    assert all(map(same_bits, found, results_of(plainly, autocast)))


def test_only_the_gradients_that_are_needed():
    layer, x = layer_of(40, 24), normal(9, 40)
    layer.weight.requires_grad_(False)
    y = layer(x)
    assert y.grad_fn.saved_tensors[:2] == (None, None)
    y.sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((24,), 9.0))
    layer(x.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert torch.equal(layer.eval()(x), y)


def test_a_weight_that_changed_before_the_gradient_is_an_error():
    layer, x = layer_of(40, 24), normal(9, 40).requires_grad_()
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_it_is_differentiable_once():
    layer, x = layer_of(40, 24), normal(9, 40).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@each_dtype
def test_it_is_saved_and_copied_as_a_linear_layer(dtype):
    layer, plain = layer_of(40, 24, dtype), nn.Linear(40, 24, dtype=dtype)
    assert list(layer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    again = SwitchBackLinear(40, 24, dtype=dtype)
    again.load_state_dict(plain.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = normal(9, 40, dtype=dtype)
    copies = [again, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    for other in copies:
        assert type(other) is SwitchBackLinear
        assert other.weight is not layer.weight
        assert same_bits(other(x), layer(x))
    assert copy.deepcopy(SwitchBackLinear(2, 2, backend="torch")).backend == "torch"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        ours = SwitchBackLinear(40, 24)
        torch.manual_seed(3)
        theirs = nn.Linear(40, 24)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_shapes_are_known_without_values():
    layer = SwitchBackLinear(40, 24, device="meta", dtype=BF16)
    y = layer(torch.empty(3, 5, 40, device="meta", dtype=BF16, requires_grad=True))
    assert (y.shape, y.dtype, y.device.type) == ((3, 5, 24), BF16, "meta")
    y.sum().backward()
    assert layer.weight.grad.shape == (24, 40)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("autocast", [True, False])
def test_a_compiled_model_computes_the_same(autocast):
    found = results_of(lambda layers, x: torch.compile(layers, backend="aot_eager")(x), autocast)
    assert all(map(same_bits, found, results_of(plainly, autocast)))


def test_inputs_that_are_refused():
    layer = layer_of(40, 24)
    wide = torch.zeros(3, 40, dtype=torch.float64)
    for shape in ((3, 39), (39,), ()):
        with pytest.raises(UsageError, match=r"in_features=40.* shape \("):
            layer(torch.zeros(shape))
    for dtype in (BF16, torch.float64, torch.int64):
        with pytest.raises(UsageError, match=f"{str(dtype).removeprefix('torch.')} for weights of float32"):
            layer(wide.to(dtype))
    with pytest.raises(UsageError, match="float64 for weights of float64"):
        SwitchBackLinear(40, 24, dtype=torch.float64)(wide)
    with pytest.raises(UsageError, match="float64 for weights"), torch.autocast("cpu", dtype=BF16):
        layer(wide)
    layer.backend = "abacus"
    with pytest.raises(UsageError, match="'abacus' does not exist"):
        layer(torch.zeros(3, 40))


def test_kernels_that_cannot_run_are_an_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="CUDA device, not on 'cpu'"):
        SwitchBackLinear(40, 24, backend="triton")(torch.zeros(3, 40))
