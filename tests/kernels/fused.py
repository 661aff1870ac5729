"""Fused steps against the torch path on a CPU, bit for bit: run by ``test_parity.py`` in a process of its own.

With ``TRITON_INTERPRET=1`` the kernels run on the CPU, else on a CUDA device. The interpreter's time goes by programs,
so that blocks are larger here than on a device but for one test.
"""

from __future__ import annotations

import os

import pytest
import torch
from optim_cases import assert_same_state, build, set_grads

from ckpt8.core.errors import UsageError
from ckpt8.optim.triton import launches

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ["AdamW", "Adam", "StableAdamW", "SGD", "Lion", "CAME"]
SHAPES = ((70, 97), (100,), ())
"""Packed, with a whole block and a short last group; small; a scalar."""

LINEAR = "companded8(signed=False)"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = ("AdamW", "StableAdamW", "SGD", "CAME")
each_kind = pytest.mark.parametrize("name", KINDS)


def kinds(*quick):
    """Each kind; slow, which is to say on a device alone, are those whose kernels have nothing of their own here."""
    marked = [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in KINDS]
    return pytest.mark.parametrize("name", marked)


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(launches, "BLOCK", 4096)


def make_params(dtype, shapes=SHAPES, device=None):
    generator = torch.Generator().manual_seed(0)
    values = [(torch.randn(shape, generator=generator) * 0.1).to(dtype) for shape in shapes]
    return [torch.nn.Parameter(value.to(device or "cpu")) for value in values]


def pair(name, dtype, shapes=SHAPES, **arguments):
    """The torch path and the kernels, with equal parameters: ((optimizer, parameters), (optimizer, parameters))."""
    ours, theirs = make_params(dtype, shapes), make_params(dtype, shapes, DEVICE)
    return (build(name, ours, **arguments), ours), (build(name, theirs, **{**arguments, "fused": True}), theirs)


def on_cpu(tree):
    if isinstance(tree, torch.Tensor):
        return tree.cpu()
    if isinstance(tree, dict):
        return {key: on_cpu(value) for key, value in tree.items()}
    return [on_cpu(value) for value in tree] if isinstance(tree, list) else tree


def same_grads(one, other, step, scale=0.01):
    set_grads(one, step, scale)
    for p, q in zip(one, other, strict=True):
        q.grad = p.grad.to(q.device)


def assert_same(one, other):
    for p, q in zip(one[1], other[1], strict=True):
        assert torch.equal(p, q.cpu())
    assert_same_state(on_cpu(other[0].state_dict()), one[0].state_dict())


def compare(one, other, steps=2):
    for step in range(steps):
        same_grads(one[1], other[1], step, scale=(0.01, 0.3, 1e-4)[step % 3])
        one[0].step()
        other[0].step()
        assert_same(one, other)


VARIANTS = [
    (BF16, {}),
    (BF16, {"master": "split32", "moment2": LINEAR, "maximize": True}),
    (FP16, {"weight_decay": 0.0}),
    (FP32, {"moment1": "companded8(Q=31)", "moment2": "lossless"}),
    (BF16, {"master": "split24(R=63)", "moment1": "lossless", "seed": 1 << 63}),
]


def variants():
    """All of AdamW's; of the others one here, and two more on a device."""
    for name in NAMES:
        for number, variant in enumerate(VARIANTS if name == "AdamW" else VARIANTS[:3]):
            quick = number == 0 or name == "AdamW"
            yield pytest.param(name, *variant, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "dtype", "arguments"), list(variants()), ids=str)
def test_equal_to_the_torch_path(name, dtype, arguments):
    compare(*pair(name, dtype, **arguments))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"momentum": 0.0}),
        ("SGD", {"nesterov": True}),
        ("SGD", {"dampening": 0.3, "weight_decay": 0.0}),
        ("AdamW", {"betas": (0.0, 0.9), "eps": 1e-3}),
    ],
    ids=str,
)
def test_other_arguments(name, arguments):
    compare(*pair(name, BF16, shapes=SHAPES[:2], **arguments))


@pytest.mark.parametrize(
    ("shapes", "arguments"),
    [
        (((2, 3, 33, 36), (2, 40, 96)), {}),
        (((300, 160), (2, 3)), {"clip_threshold": 0.5, "eps": (1e-8, 1e-6)}),
        (((70_000,), (9, 517)), {"moment1": "lossless", "master": "split32"}),
    ],
    ids=str,
)
def test_matrices(shapes, arguments, monkeypatch):
    """Batches, more than one tile and line each way, rows of uneven length, and the rule of vectors."""
    monkeypatch.setattr(launches, "BLOCK", 1 << 14)
    compare(*pair("CAME", BF16, shapes=shapes, **arguments))


@kinds("StableAdamW", "CAME")
def test_blocks_of_the_size_of_a_device(name, monkeypatch):
    monkeypatch.setattr(launches, "BLOCK", 1024)
    compare(*pair(name, BF16, shapes=((65, 64), (7,))))


@kinds("AdamW")
def test_gradients_that_come_and_go(name):
    """Those of other parameters in each step, in other places of memory; the tables stay when all have been there."""
    one, other = pair(name, BF16, shapes=((70, 70), (80, 64), (9,)))
    kept = []
    for step in range(4):
        same_grads(one[1], other[1], step)
        if step % 3 < 2:
            one[1][step % 3].grad = other[1][step % 3].grad = None
        one[0].step()
        other[0].step()
        assert_same(one, other)
        kept.append(list(other[0]._fused._plans.values()))
    assert kept[1] == kept[2] == kept[3]
    assert len({id(state["step"]) for state in other[0].state.values()}) == 3
    assert sorted(int(state["step"]) for state in other[0].state.values()) == [2, 3, 4]


def test_any_alignment():
    """Parameters and gradients that are parts of one buffer."""
    one, other = pair("AdamW", BF16, shapes=((70, 70), (75, 64)))
    flat, grads = (torch.zeros(9701, dtype=BF16, device=DEVICE) for _ in range(2))
    at = 1
    for param in other[1]:
        flat[at : at + param.numel()].view(param.shape).copy_(param.detach())
        param.data = flat[at : at + param.numel()].view(param.shape)
        at += param.numel()
    for step in range(2):
        same_grads(one[1], other[1], step)
        at = 1
        for param in other[1]:
            view = grads[at : at + param.numel()].view(param.shape)
            param.grad = view.copy_(param.grad)
            at += param.numel()
        one[0].step()
        other[0].step()
        assert_same(one, other)


@kinds("CAME")
def test_learning_rate_on_the_device_and_groups(name):
    one, other = pair(name, BF16, shapes=((70, 70), (90, 64)))
    for optimizer, params in (one, other):
        del optimizer.param_groups[0]["params"][1]
        optimizer.add_param_group({"params": params[1:], "weight_decay": 0.3, "moment1": "lossless"})
    rate = torch.tensor(0.004, dtype=FP32)
    one[0].param_groups[0]["lr"], other[0].param_groups[0]["lr"] = rate, rate.to(DEVICE)
    compare(one, other)


@kinds("StableAdamW")
def test_grad_scaler(name):
    """A step whose gradients overflowed leaves everything as it was, the step counter too."""
    one, other = pair(name, BF16, shapes=((70, 70), (9,)))
    for step in range(3):
        same_grads(one[1], other[1], step)
        for optimizer, params in (one, other):
            device = params[0].device
            optimizer.grad_scale = torch.tensor(3.0, device=device)
            optimizer.found_inf = torch.tensor(float(step == 1), device=device)
            optimizer.step()
        assert_same(one, other)
    assert int(other[0].state[other[1][0]]["step"]) == 2


@kinds("SGD")
def test_a_saved_state_continues_either_way(name):
    one, other = pair(name, BF16, shapes=((70, 70), (9,)))
    compare(one, other, steps=1)
    saved = [copy_of(optimizer.state_dict()) for optimizer, _ in (one, other)]
    one[0].load_state_dict(on_cpu(saved[1]))
    other[0].load_state_dict(saved[0])
    compare(one, other)


def copy_of(tree):
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: copy_of(value) for key, value in tree.items()}
    return [copy_of(value) for value in tree] if isinstance(tree, list) else tree


@kinds("CAME")
def test_gradient_release(name):
    one, other = pair(name, BF16, shapes=((70, 70), (9,)))
    x = torch.randn(70, generator=torch.Generator().manual_seed(1)).to(BF16)
    with one[0].release_gradients(), other[0].release_gradients():
        for _ in range(2):
            for _, (matrix, vector) in (one, other):
                ((matrix * x.to(matrix.device)).square().sum() + vector.square().sum()).backward()
    assert one[1][0].grad is other[1][0].grad is None
    assert_same(one, other)


@kinds("AdamW")
def test_what_is_not_finite_stays_visible(name):
    one, other = pair(name, BF16, shapes=((70, 70),))
    same_grads(one[1], other[1], 0)
    for optimizer, params in (one, other):
        params[0].grad[0, 0], params[0].grad[2, 5] = float("nan"), float("inf")
        optimizer.step()
    p, q = one[1][0], other[1][0].cpu()
    assert torch.equal(p.isnan(), q.isnan())
    for key, value in one[0].state[p].items():
        if key.endswith("_scales"):
            assert torch.equal(value.to(torch.int32), other[0].state[other[1][0]][key].cpu().to(torch.int32))


def test_what_cannot_be_fused_is_refused_where_it_is_demanded():
    params = make_params(BF16, shapes=((70, 90),), device=DEVICE)
    turned = [torch.nn.Parameter(params[0].detach().t())]
    with pytest.raises(UsageError, match=r"parameter 0 .* not contiguous"):
        build("AdamW", turned, fused=True)
    optimizer = build("AdamW", params, fused=True)
    params[0].grad = torch.zeros(90, 70, dtype=BF16, device=DEVICE).t()
    with pytest.raises(UsageError, match="its gradient is not contiguous"):
        optimizer.step()
    assert build("AdamW", turned, fused=False).fused is False


if DEVICE.type == "cuda":

    @each_kind
    @pytest.mark.parametrize("rate_on_device", [False, True])
    def test_captured_in_a_cuda_graph(name, rate_on_device):
        """Nothing waits for the host: a replayed step counts, rounds anew and reads the learning rate."""
        one, other = pair(name, BF16, shapes=((70, 70), (300, 160), (9,)))
        rate = torch.tensor(0.01, dtype=FP32)
        if rate_on_device:
            one[0].param_groups[0]["lr"], other[0].param_groups[0]["lr"] = rate, rate.to(DEVICE)
        compare(one, other, steps=1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            other[0].step()
        for step in range(1, 4):
            set_grads(one[1], step)
            for p, q in zip(one[1], other[1], strict=True):
                q.grad.copy_(p.grad)
            if rate_on_device:
                rate.mul_(0.5)
                other[0].param_groups[0]["lr"].mul_(0.5)
            one[0].step()
            graph.replay()
            assert_same(one, other)

    @each_kind
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    def test_nothing_waits_for_the_host(name):
        _, other = pair(name, BF16)
        advance_there(other, 0)
        try:
            torch.cuda.set_sync_debug_mode("error")
            advance_there(other, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def advance_there(run, step):
        optimizer, params = run
        for param in params:
            param.grad = torch.full_like(param, 0.01 * (step + 1))
        optimizer.step()
