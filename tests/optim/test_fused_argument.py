"""Who takes a step, kernels or torch: what is demanded, what is told, what is saved. The kernels: ``tests/kernels``."""

from __future__ import annotations

import copy
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from optim_cases import advance, build, make_params, trained

from ckpt8.core import backend
from ckpt8.core.errors import UsageError
from ckpt8.optim.packed_tensor import power

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter takes CPU tensors", allow_module_level=True)


def test_demanded_where_it_cannot_be(name):
    without = {"Adafactor": "the rule 'adafactor' has no kernels", "Ema": "the rule 'ema' has no kernels"}
    why = without.get(name, "needs tensors on a CUDA device")
    with pytest.raises(UsageError, match=f"parameter 0 cannot be updated by kernels: {why}"):
        build(name, make_params(), fused=True)
    optimizer = build(name, make_params())
    optimizer.fused = True
    with pytest.raises(UsageError, match="parameter 0"):
        advance(optimizer, optimizer.param_groups[0]["params"], 0, 1)


def test_it_is_no_part_of_the_state(name):
    _, optimizer = trained(name, 1, shapes=((80, 80),), fused=False)
    assert "fused" not in optimizer.state_dict()["param_groups"][0]
    other = copy.deepcopy(optimizer)
    [twin] = other.param_groups[0]["params"]
    advance(other, [twin], 1, 2)
    assert int(other.state[twin]["step"]) == 2


def test_training_on_a_cpu_imports_no_kernels(run_program):
    code = (
        "import sys, torch, ckpt8.optim as o; p = torch.nn.Parameter(torch.zeros(80, 80)); p.grad = p.data.clone();"
        "o.AdamW([p]).step(); assert 'ckpt8.optim.triton.launches' not in sys.modules"
    )
    run_program(code)


def test_a_parameter_on_a_device_that_is_not_fused_is_told_of_once(monkeypatch):
    monkeypatch.setattr(backend, "obstacle", lambda device: None)
    fusion = build("AdamW", make_params())._fused
    turned = SimpleNamespace(device=torch.device("cuda"), grad=None, is_contiguous=lambda: False)
    with pytest.warns(UserWarning, match="parameter 3 is not updated by fused kernels: it is not contiguous"):
        assert not fusion.takes(3, turned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fusion.takes(3, turned)
        assert fusion.takes(4, SimpleNamespace(device=turned.device, grad=None, is_contiguous=lambda: True))


def test_powers_of_betas_are_those_of_python_nearly():
    for beta in (0.0, 0.5, 0.9, 0.999, 0.9999):
        for step in (0, 1, 2, 3, 10, 1000, 123_457):
            assert power(beta, step) == pytest.approx(beta**step, rel=1e-10)
