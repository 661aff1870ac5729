"""``switchback`` and ``to_linear``: the same parameters before, between and after."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from gpt_kit import GPTConfig, Run, RunConfig, build_model
from torch import nn
from torch.nn.utils import parametrize

import ckpt8
from ckpt8.core.errors import UsageError
from ckpt8.nn import SwitchBackLinear, switchback, to_linear

TINY = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32)
BLOCK = [f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]


def of_class(model, kind):
    return [path for path, module in model.named_modules() if type(module) is kind]


def adamw(groups, lr):
    return torch.optim.AdamW(groups, lr=lr)


def test_parameters_stay_the_objects_they_are():
    run = Run(TINY, RunConfig(horizon=10), adamw)
    run.advance()
    before = dict(run.model.named_parameters(remove_duplicate=False))
    keys, state = list(run.model.state_dict()), {k: v.clone() for k, v in run.model.state_dict().items()}
    assert switchback(run.model) == BLOCK
    assert of_class(run.model, SwitchBackLinear) == BLOCK
    after = dict(run.model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(run.model.state_dict()) == keys
    assert all(torch.equal(state[key], run.model.state_dict()[key]) for key in keys)
    moments = [entry["exp_avg"].clone() for entry in run.optimizer.state.values()]
    run.advance()
    assert not any(map(torch.equal, moments, (entry["exp_avg"] for entry in run.optimizer.state.values())))
    assert all(p.grad is None for p in run.model.parameters())


def test_there_and_back():
    model = build_model(TINY, seed=0)
    x, y = (torch.randint(0, TINY.vocab_size, (2, 32), generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    plain = model(x, y)
    classes = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    assert switchback(model, backend="torch") == BLOCK
    assert not torch.equal(model(x, y), plain)
    assert switchback(model) == []
    assert to_linear(model) == BLOCK
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(model(x, y), plain)
    assert to_linear(model) == []


def test_what_else_refers_to_a_layer_sees_it_change():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    calls = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    shared.eval()
    shared.note = "kept"
    assert switchback(model) == ["0"]
    model(torch.ones(2, 8))
    assert model[0] is model[2] is shared
    assert (len(calls), shared.training, shared.note) == (2, False, "kept")
    assert type(shared) is SwitchBackLinear
    alone = nn.Linear(8, 8)
    assert switchback(alone) == [""]
    assert isinstance(alone, SwitchBackLinear)
    assert isinstance(alone, nn.Linear)


def test_what_is_left_alone():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.attention = nn.MultiheadAttention(8, 2)
            self.adapted = Adapted(8, 8)
            self.body = nn.Linear(8, 8)
            self.decoder = nn.Linear(8, 16, bias=False)
            self.decoder.weight = self.embed.weight
            self.classifier = nn.Linear(8, 2)
            self.parametrized = parametrize.register_parametrization(nn.Linear(8, 8), "weight", nn.Identity())

    model = Model()
    assert switchback(model, ()) == ["body", "classifier"]
    assert of_class(model, nn.Linear) == ["decoder"]
    attended = model.attention(*[torch.ones(3, 1, 8)] * 3)[0]
    assert attended.shape == (3, 1, 8)
    to_linear(model)
    assert switchback(model) == ["body"]


@pytest.mark.parametrize("path", ["lm_head", "module.lm_head", "_orig_mod.model.classifier"])
def test_heads_by_default(path):
    *outer, last = path.split(".")
    model = nn.ModuleDict({last: nn.Linear(4, 4), "overhead": nn.Linear(4, 4)})
    for name in reversed(outer):
        model = nn.ModuleDict({name: model})
    body = ".".join([*outer, "overhead"])
    assert switchback(copy.deepcopy(model)) == [body]
    assert switchback(copy.deepcopy(model), ()) == [path, body]
    assert switchback(copy.deepcopy(model), [f"*{last}", "*overhead"]) == []


def test_globs_that_are_given():
    model = build_model(TINY, seed=0)
    assert switchback(model, ["*.attn.*", "lm_head"]) == BLOCK[2:]
    assert of_class(model, nn.Linear) == [*BLOCK[:2], "lm_head"]


def test_refusals_change_nothing():
    model = build_model(TINY, seed=0)
    with pytest.raises(UsageError, match=r"skip='\*\.attention' matches none .* transformer\.h\.0\.attn\.c_attn"):
        switchback(model, ["lm_head", "*.attention"])
    model.transformer["h"][0].mlp["c_proj"].double()
    with pytest.raises(UsageError, match=r"h\.0\.mlp\.c_proj: SwitchBackLinear takes no torch\.float64"):
        switchback(model)
    for backend in ("foo", "numba", ""):
        with pytest.raises(UsageError, match=rf"no backend '{backend}'; use 'torch' or 'triton'"):
            switchback(model, ["*.c_proj"], backend=backend)
        with pytest.raises(UsageError, match="no backend"):
            SwitchBackLinear(2, 2, backend=backend)
    assert not of_class(model, SwitchBackLinear)
    assert not any("backend" in vars(module) for module in model.modules())
    with pytest.raises(UsageError, match=r"holds no nn\.Linear"):
        switchback(nn.Sequential(nn.Conv1d(4, 4, 1)))


@pytest.mark.parametrize("converted", ["before", "after"])
@pytest.mark.parametrize("kind", ["torch", "ckpt8"])
def test_a_run_is_resumed(tmp_path, converted, kind):
    """Weights and moments arrive whether the model was converted before or after, and both train on alike."""
    factory = adamw if kind == "torch" else (lambda groups, lr: ckpt8.optim.AdamW(groups, lr=lr))
    run = Run(TINY, RunConfig(horizon=10), adamw)
    for _ in range(3):
        run.advance()
    ckpt8.save(run.checkpoint(), tmp_path / "run.ckpt8", preset="lossless", threads=1)
    resumed = Run(TINY, RunConfig(horizon=10, seed=0), factory)
    with torch.no_grad():
        for p in resumed.model.parameters():
            p.zero_()
    if converted == "before":
        switchback(resumed.model)
    rest = ckpt8.resume(tmp_path / "run.ckpt8", resumed.model, resumed.optimizer)
    if converted == "after":
        switchback(resumed.model)
    resumed.step = rest["iter_num"]
    assert of_class(resumed.model, SwitchBackLinear) == BLOCK
    assert all(map(torch.equal, run.model.parameters(), resumed.model.parameters()))
    loss, ours = run.advance(), resumed.advance()
    assert loss != ours
    assert abs(loss - ours) < 0.01


def test_nothing_is_imported_before_it_is_used(run_program):
    code = "import sys, ckpt8; nn = ckpt8.nn; print(dir(nn)); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == str(["HEADS", "SwitchBackLinear", "switchback", "to_linear"])
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch, ckpt8
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
ckpt8.nn.switchback(model)
model(torch.ones(2, 8)).sum().backward()
"""
    run_program(code)
    with pytest.raises(AttributeError, match="no attribute 'abacus'"):
        ckpt8.nn.abacus  # noqa: B018
