"""The arguments of torch's optimizers: what code written for them gives is taken, or refused by its name."""

from __future__ import annotations

import inspect

import pytest
import torch
from optim_cases import advance, make_params

import ckpt8.optim
from ckpt8.core.errors import UsageError

SAME = ("AdamW", "Adam", "SGD", "Adafactor")
"""The optimizers that torch has."""


@pytest.mark.parametrize("of_torch", SAME)
def test_all_of_torchs_arguments_with_torchs_defaults_change_nothing(of_torch):
    signature = inspect.signature(getattr(torch.optim, of_torch).__init__).parameters
    defaults = {key: parameter.default for key, parameter in signature.items() if key not in ("self", "params")}
    assert {"foreach", "maximize"} <= defaults.keys()
    places = [p.default for p in list(signature.values())[2:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    results = []
    for arguments, named in (((), {}), ((), defaults), (places, {}), ((), {**defaults, "foreach": True})):
        params = make_params(shapes=((70, 97), (100,)))
        optimizer = getattr(ckpt8.optim, of_torch)(params, *arguments, **named)
        advance(optimizer, params, 0, 2)
        assert (
            not {"foreach", "amsgrad", "capturable", "differentiable"}
            & optimizer.state_dict()["param_groups"][0].keys()
        )
        results.append(params)
    for params in results[1:]:
        assert all(map(torch.equal, params, results[0]))


@pytest.mark.parametrize(
    ("which", "arguments", "message"),
    [
        ("AdamW", {"amsgrad": True}, "amsgrad=True is not supported; its largest"),
        ("Adam", {"amsgrad": True}, "amsgrad=True is not supported"),
        ("Adam", {"decoupled_weight_decay": True}, "decoupled_weight_decay=True is not supported; ckpt8.optim.AdamW"),
        ("SGD", {"differentiable": True}, "differentiable=True is not supported"),
        ("Lion", {"differentiable": True}, "differentiable=True is not supported"),
        ("AdamW", {"capturable": True}, "parameter 0 cannot be updated by kernels: needs tensors on a CUDA device"),
        ("AdamW", {"capturable": True, "fused": False}, "capturable=True with fused=False is not supported"),
        ("AdamW", {"foreach": "yes"}, "foreach must be True or False, not 'yes'"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(which, arguments, message):
    with pytest.raises(UsageError, match=message):
        getattr(ckpt8.optim, which)(make_params(), **arguments)


def test_so_it_is_in_a_group():
    optimizer = ckpt8.optim.AdamW(make_params())
    with pytest.raises(UsageError, match="amsgrad=True is not supported"):
        optimizer.add_param_group({"params": make_params(), "amsgrad": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UsageError, match="amsgrad=True is not supported"):
        ckpt8.optim.AdamW([{"params": make_params(), "amsgrad": True}])


def test_groups_of_torch_are_taken_by_the_optimizer_that_decays_as_they_say():
    decayed = torch.optim.AdamW(make_params(), weight_decay=0.1).param_groups
    assert ckpt8.optim.AdamW(decayed).param_groups[0]["rule"] == "adamw"
    assert ckpt8.optim.Lion(decayed).param_groups[0]["rule"] == "lion"
    ckpt8.optim.AdamW(torch.optim.Adam(make_params()).param_groups)
    with pytest.raises(UsageError, match="decoupled_weight_decay=True is not supported"):
        ckpt8.optim.Adam(decayed)
    with pytest.raises(UsageError, match=r"decoupled_weight_decay=False .* ckpt8\.optim\.Adam decays so"):
        ckpt8.optim.AdamW(torch.optim.Adam(make_params(), weight_decay=0.1).param_groups)
