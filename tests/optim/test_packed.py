"""What every registered optimizer keeps as a ``torch.optim.Optimizer``: a new one is tested by being registered."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch
from optim_cases import ARGUMENTS, advance, assert_same_state, build, clones, make_params, set_grads, trained

import ckpt8
from ckpt8.core.errors import UsageError
from ckpt8.optim import OPTIMIZERS
from ckpt8.optim.state_conversion import join_weight, moments_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MATRIX = ((80, 80),)


def assert_same_params(one, other):
    for p, q in zip(one, other, strict=True):
        assert p.dtype == q.dtype
        assert torch.equal(p, q)


def test_names_are_lazy_and_importing_does_not_import_torch():
    code = "import sys, ckpt8, ckpt8.optim as o; assert 'torch' not in sys.modules; print(len(dir(ckpt8.optim)))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(dir(ckpt8.optim)) >= {name for name, _ in OPTIMIZERS}
    assert set(ARGUMENTS) == {"Ema", *(name for name, _ in OPTIMIZERS)}
    with pytest.raises(AttributeError):
        _ = ckpt8.optim.Adagrad


# --- save, load, continue -----------------------------------------------------------------------------------------


def through_torch(tree, path):
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_ckpt8(tree, path):
    ckpt8.save(tree, path / "run.ckpt8", threads=1)
    return ckpt8.load(path / "run.ckpt8", threads=1)


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("through", [through_torch, through_ckpt8])
@pytest.mark.parametrize(
    ("dtype", "master"), [(BF16, "split24"), (BF16, "split32"), (FP16, "split24"), (FP32, "split24")]
)
def test_continuing_equals_not_stopping(name, dtype, master, through, tmp_path):
    params, optimizer = trained(name, 3, dtype, master=master)
    tree = through({"optimizer": optimizer.state_dict()}, tmp_path)
    assert_same_state(tree["optimizer"], optimizer.state_dict())
    again = clones(params)
    resumed = build(name, again, lr=123.0)
    resumed.load_state_dict(tree["optimizer"])
    advance(optimizer, params, 3, 6)
    advance(resumed, again, 3, 6)
    assert_same_params(params, again)
    assert_same_state(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.by_default(most=3)
def test_two_runs_are_equal_and_the_seed_matters(name):
    runs = [trained(name, 3, BF16, seed=seed) for seed in (0, 0, 1)]
    assert_same_params(runs[0][0], runs[1][0])
    first, other = (runs[at][1].state_dict()["state"][0]["residual"] for at in (0, 2))
    assert not torch.equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_tile_size_does_not_matter(name, threads):
    torch.set_num_threads(threads)
    results = []
    for tile in (1 << 18, 4096, 3 * 4096):
        params = make_params(BF16, shapes=((130, 257), (70_001,), (2, 100, 64)))
        optimizer = build(name, params)
        optimizer.tile = tile
        advance(optimizer, params, 0, 3)
        results.append((params, optimizer.state_dict()))
    for params, state in results[1:]:
        assert_same_params(results[0][0], params)
        assert_same_state(results[0][1], state)


def test_loading_copies_and_calls_the_hooks(name):
    params, optimizer = trained(name, 2, BF16)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    resumed, seen = build(name, clones(params)), []
    resumed.register_load_state_dict_pre_hook(lambda o, s: seen.append("before"))
    resumed.register_load_state_dict_post_hook(lambda o: seen.append("after"))
    resumed.load_state_dict(saved)
    assert seen == ["before", "after"]
    advance(optimizer, params, 2, 3)
    assert_same_state(resumed.state_dict(), kept)


DAMAGE = {
    "rule": lambda saved: saved["param_groups"][0].update(rule="adagrad"),
    "group": lambda saved: saved["param_groups"][0]["params"].pop(),
    "key": lambda saved: saved["state"][0].pop("residual"),
    "dtype": lambda saved: saved["state"][0].update(residual=saved["state"][0]["residual"].to(torch.int32)),
    "shape": lambda saved: saved["state"][0].update(residual=saved["state"][0]["residual"].t()),
    "codec": lambda saved: saved["param_groups"][0].update(master={"id": "split32/1"}),
    "extra": lambda saved: saved["state"].update({99: saved["state"][0]}),
}


def test_what_does_not_fit_changes_nothing(name):
    _, optimizer = trained(name, 2, BF16)
    before = copy.deepcopy(optimizer.state_dict())
    for damage in DAMAGE.values():
        bad = copy.deepcopy(before)
        damage(bad)
        with pytest.raises(UsageError):
            optimizer.load_state_dict(bad)
        assert_same_state(optimizer.state_dict(), before)


# --- the interface ------------------------------------------------------------------------------------------------


def test_closure(name):
    params = make_params(shapes=MATRIX)
    optimizer = build(name, params)

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_scheduler_survives_loading(name):
    def scheduled(params):
        optimizer = build(name, params)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    params = make_params()
    optimizer, scheduler = scheduled(params)
    for step in range(3):
        advance(optimizer, params, step, step + 1)
        scheduler.step()
    lr = optimizer.param_groups[0]["lr"]
    assert lr == pytest.approx(ARGUMENTS[name]["lr"] / 4)
    again = clones(params)
    other, resumed = scheduled(again)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert other.param_groups[0]["lr"] == lr
    advance(optimizer, params, 3, 4)
    advance(other, again, 3, 4)
    assert_same_params(params, again)


def test_learning_rate_may_be_a_tensor(name):
    one, _ = trained(name, 2)
    two, _ = trained(name, 2, lr=torch.tensor(ARGUMENTS[name]["lr"], dtype=torch.float64))
    assert_same_params(one, two)


@pytest.mark.by_default(most=3)
def test_maximize_negates_the_gradient(name):
    one, _ = trained(name, 3, BF16, maximize=True)
    two = make_params(BF16)
    down = build(name, two)
    for step in range(3):
        set_grads(two, step, scale=-0.01)
        down.step()
    assert_same_params(one, two)


def test_groups_have_their_own_arguments(name):
    params = make_params(BF16, shapes=MATRIX * 2)
    groups = [
        {"params": params[:1], "lr": 0.0, "master": "split32", "moment1": "lossless"},
        {"params": params[1:], "weight_decay": 0.5},
    ]
    before = clones(params[:1])
    optimizer = build(name, groups)
    advance(optimizer, params, 0, 2)
    assert_same_params(params[:1], before)
    first, second = optimizer.state_dict()["state"].values()
    assert (first["residual"].dtype, second["residual"].dtype) == (torch.int16, torch.int8)
    assert not any(key.endswith(("avg_codes", "buffer_codes")) for key in first)
    assert optimizer.param_groups[0]["master"] == {"id": "split32/1"}
    assert optimizer.param_groups[1]["master"] == {"id": "split24/1", "R": 127}


def test_a_cast_parameter_takes_no_step_without_what_completes_it(name):
    [param], optimizer = trained(name, 1, BF16, MATRIX)
    param.grad, param.data = None, param.data.float()
    advance(optimizer, [param], 1, 2)  # in fp32, which needs no residual
    [param], optimizer = trained(name, 1, FP32, MATRIX)
    param.grad, param.data = None, param.data.bfloat16()
    with pytest.raises(KeyError, match="residual"):
        advance(optimizer, [param], 1, 2)


def test_a_parameter_without_gradient_keeps_no_state(name):
    params = make_params()
    optimizer = build(name, params)
    set_grads(params, 0)
    params[1].grad = None
    before = clones(params)[1]
    optimizer.step()
    assert 1 not in optimizer.state_dict()["state"]
    assert torch.equal(params[1], before)


def test_memory_layout_does_not_matter(name):
    one, optimizer = trained(name, 3, BF16, ((80, 90),))
    two = [torch.nn.Parameter(make_params(BF16, ((80, 90),))[0].detach().t().contiguous().t())]
    assert not two[0].is_contiguous()
    other = build(name, two)
    advance(other, two, 0, 3)
    assert_same_params(one, two)
    assert_same_state(optimizer.state_dict(), other.state_dict())


def test_empty_parameters(name):
    params = [torch.nn.Parameter(torch.zeros(0, 5)), torch.nn.Parameter(torch.zeros(70, 70))]
    optimizer = build(name, params)
    advance(optimizer, params, 0, 2)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_grad_scaler(name, dtype):
    """Scaled by a power of two and back is exact; an overflow skips the step."""
    one, two = make_params(dtype), make_params(dtype)
    plain, scaled = build(name, one), build(name, two)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    scaler.scale(torch.zeros(1))
    for step in range(3):
        for params in (one, two):
            set_grads(params, step)
        for param in two:
            param.grad.mul_(scaler.get_scale())
        if step == 1:
            two[0].grad.view(-1)[3] = float("inf")
        before = clones(two)
        scaler.step(scaled)
        scaler.update()
        if step == 1:
            assert_same_params(two, before)
        else:
            plain.step()
    if dtype != FP16:  # there small gradients are subnormal, and scaling them is no more exact
        assert_same_params(one, two)


def test_gradient_release_equals_steps(name):
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(90, 90), torch.nn.Tanh(), torch.nn.Linear(90, 90)).to(BF16)
    two = copy.deepcopy(one)
    usual, released = build(name, one.parameters()), build(name, two.parameters())
    x = torch.randn(16, 90).to(BF16)
    with released.release_gradients():
        for _ in range(3):
            for net, optimizer in ((one, usual), (two, released)):
                net(x).square().mean().backward()
                optimizer.step()
            assert all(param.grad is None for param in two.parameters())
            usual.zero_grad()
    assert_same_params(one.parameters(), two.parameters())
    two(x).sum().backward()
    assert all(param.grad is not None for param in two.parameters())


@pytest.mark.by_default(most=3)
def test_narrow_parameters_are_the_rounded_master(name):
    for dtype, part in ((BF16, "residual"), (FP16, "master")):
        params, optimizer = trained(name, 3, dtype)
        for param, state in zip(params, optimizer.state.values(), strict=True):
            master = join_weight(param, state[part], optimizer.codec(optimizer.param_groups[0], "master", param))
            close = master.to(dtype).float() - param.detach().float()
            assert float(close.abs().max()) <= 2**-8 * float(param.detach().abs().max())
            assert float((close == 0).float().mean()) > 0.999


# --- refusals -----------------------------------------------------------------------------------------------------


def test_sparse_gradients_are_refused_before_anything_changes(name):
    params = make_params(shapes=((80, 80), (90, 90)))
    optimizer = build(name, params)
    set_grads(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    before = clones(params)
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    assert_same_params(params, before)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_types_are_refused(name, dtype):
    with pytest.raises(UsageError, match=str(dtype).removeprefix("torch.")):
        build(name, [torch.nn.Parameter(torch.zeros(4, dtype=dtype))])


SENSELESS = [
    *({"lr": -1.0}, {"weight_decay": float("nan")}, {"master": "companded8"}, {"master": "nonsense"}),
    *({"moment1": "companded8(signed=False)"}, {"moment2": "companded8"}, {"moment1": "split24"}),
]


@pytest.mark.parametrize("arguments", SENSELESS, ids=str)
def test_arguments_that_make_no_sense(name, arguments):
    with pytest.raises(UsageError):
        build(name, make_params(), **arguments)


@pytest.mark.parametrize(("which", "arguments"), [("AdamW", {"betas": (0.9, 1.0)}), ("SGD", {"nesterov": True})])
def test_arguments_that_make_no_sense_to_one(which, arguments):
    with pytest.raises(UsageError):
        getattr(ckpt8.optim, which)(make_params(), **arguments)


# --- the weights --------------------------------------------------------------------------------------------------


@pytest.mark.by_default("SGD", "Lion", "Ema")
def test_a_step_of_zero_changes_no_weight(name):
    params, optimizer = trained(name, 2, BF16)
    before, kept = copy.deepcopy(optimizer.state_dict()["state"]), clones(params)
    optimizer.param_groups[0]["lr"] = 0.0
    advance(optimizer, params, 2, 12)
    assert_same_params(params, kept)
    for i, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["residual"], before[i]["residual"])


@pytest.mark.slow
def test_weight_decay_below_half_a_code_is_not_lost():
    """1e-6 a step for 2000 steps: rounded to nearest, nothing would ever move."""
    params = [torch.nn.Parameter(torch.full((64, 128), 0.75, dtype=BF16))]
    optimizer = ckpt8.optim.SGD(params, lr=1e-3, weight_decay=1e-3)
    for _ in range(2000):
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
    codec = optimizer.codec(optimizer.param_groups[0], "master", params[0])
    mean = float(join_weight(params[0], optimizer.state[params[0]]["residual"], codec).double().mean())
    assert mean / 0.75 == pytest.approx(1 - 2e-3, abs=2e-4)


def test_what_is_not_finite_stays_visible(name):
    params = make_params(BF16, shapes=MATRIX)
    optimizer = build(name, params)
    set_grads(params, 0)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    # The sign of NaN is 0 to torch, so that Lion's weights show nothing, here as in lion-pytorch.
    moments = moments_of(optimizer.state[params[0]], optimizer.param_groups[0]).values()
    assert bool(params[0].isnan().any()) is (name != "Lion")
    assert any(bool(moment.isnan().any()) for moment in moments)


def test_a_parameter_set_to_zero_from_outside(name):
    [param], optimizer = trained(name, 2, BF16, MATRIX)
    with torch.no_grad():
        param.zero_()
    advance(optimizer, [param], 2, 3)
    assert bool(param.isfinite().all())
    assert float(param.detach().abs().max()) < 1
