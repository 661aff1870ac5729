"""What values are for, by their names alone: every layout that is saved with torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch
from dcp_kit import adam_state, change_metadata, save_small

import ckpt8
from ckpt8.inspecting.container import inspect_container

pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = {name: torch.randn(80, 80) for name in ("layers.0.state.weight", "layers.1.wq.weight")}


def roles(root, **options):
    """Roles by name without member, update rules by parameter."""
    manifest = ckpt8.compress(root, root.with_suffix(".ckpt8"), force=True, **options)
    assert not ckpt8.verify(root.with_suffix(".ckpt8"), root).failures
    found = {record.name.partition(":")[2]: record.role.value for record in manifest.storages if ":" in record.name}
    return found, {record.name.partition(":")[2]: record for record in manifest.parameters}


def flattened(weights, state):
    """What get_state_dict gives with ``flatten_optimizer_state_dict``."""
    group = {key: value for key, value in state["param_groups"][0].items() if key != "params"}
    flat = {f"state.{name}.{key}": value for name, each in state["state"].items() for key, value in each.items()}
    return flat | {f"param_groups.{name}.{key}": value for name in weights for key, value in group.items()}


@pytest.mark.parametrize("home", ["optimizer", "optim.0", ""])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("paths", [True, False], ids=["paths", "no-paths"])
def test_optimizers(home, flat, paths, tmp_path):
    """Nested or flattened, at the top or in a list of them, with the paths of the planner or without.

    A parameter has ``state`` in its name, as modules of state space models do.
    """
    state = adam_state(WEIGHTS)
    saved = flattened(WEIGHTS, state) if flat else state
    tree = {"optim": [saved, {}]} if home == "optim.0" else {home: saved} if home else saved
    root = save_small({**tree, "model": WEIGHTS}, tmp_path / "run")
    if not paths:
        change_metadata(root, lambda metadata: setattr(metadata, "planner_data", None))
    found, parameters = roles(root)
    prefix = f"{home}." if home else ""
    for name in WEIGHTS:
        assert found[f"model.{name}"] == "weight"
        expected = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "step": "other"}
        assert {key: found[f"{prefix}state.{name}.{key}"] for key in expected} == expected
        rule = parameters[name].rule
        assert (rule["kind"], rule["step"], rule["beta2"], rule["eps"]) == ("adam", 7, 0.99, 1e-8)
        assert parameters[name].error is not None
    assert set(parameters) == set(WEIGHTS)


def test_torchtitan(tmp_path):
    """Imitation: weights at the top, the optimizer flattened, state of the loop beside them."""
    saved = {
        **WEIGHTS,
        "pos_embed": torch.randn(80, 80),
        "optimizer": flattened(WEIGHTS, adam_state({**WEIGHTS, "pos_embed": torch.randn(80, 80)})),
        "lr_scheduler": {"last_epoch": 5},
        "train_state": {"step": torch.tensor(5), "ntokens_seen": torch.arange(9000)},
        "dataloader": {"rank0": torch.randn(80, 80)},
    }
    found, parameters = roles(save_small(saved, tmp_path / "run"))
    # The optimizer has state for the one without a dot in its name.
    assert {name for name, role in found.items() if role == "weight"} == {*WEIGHTS, "pos_embed"}
    assert set(parameters) == {*WEIGHTS, "pos_embed"}
    assert parameters["layers.1.wq.weight"].rule["kind"] == "adam"
    assert parameters["pos_embed"].rule is None


def test_an_optimizer_of_megatron_that_is_sharded_by_parameter(tmp_path):
    """Imitation: keys before parameters, groups elsewhere, fp32 copies of the weights in the state."""
    slots = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "fp32_param": "weight"}
    saved = {
        f"optimizer.state.{slot}.decoder.{name}": torch.rand(80, 80) + 0.1
        for slot in slots
        for name in ("a.weight", "b")
    }
    root = save_small({**saved, "decoder.a.weight": torch.randn(80, 80).bfloat16()}, tmp_path / "run")
    found, parameters = roles(root)
    assert {name: found[name] for name in saved} == {name: slots[name.split(".")[2]] for name in saved}
    assert found["decoder.a.weight"] == "weight"
    # Without a group nobody knows the rule.
    assert {name: record.rule for name, record in parameters.items()} == {"decoder.a.weight": None, "decoder.b": None}


def save_optimizer(folder, **values):
    """A distributed checkpoint of an optimizer with these values in every state."""
    state = adam_state(WEIGHTS)
    for each in state["state"].values():
        each.update(values)
    return save_small({"optimizer": state}, folder)


@pytest.mark.parametrize("step", [11, torch.tensor([11.0]), torch.tensor(11)], ids=["number", "vector", "integer"])
def test_steps(step, tmp_path):
    _, parameters = roles(save_optimizer(tmp_path / "run", step=step))
    assert [record.rule["step"] for record in parameters.values()] == [11, 11]


def test_state_that_is_not_understood_leaves_the_rule_unknown(tmp_path):
    found, parameters = roles(save_optimizer(tmp_path / "run", preconditioner={"left": torch.randn(80, 80)}))
    assert found["optimizer.state.layers.1.wq.weight.preconditioner.left"] == "other"
    assert {record.rule for record in parameters.values()} == {None}
    assert found["optimizer.state.layers.1.wq.weight.exp_avg"] == "moment1"


def _came():
    factors = {"exp_avg_sq_row": (80,), "exp_avg_sq_col": (80,), "exp_avg_res_row": (80,), "exp_avg_res_col": (80,)}
    each = {"step": 3, "RMS": torch.tensor(1.0), "exp_avg": torch.randn(80, 80)}
    each |= {key: torch.rand(shape) + 0.5 for key, shape in factors.items()}
    return {"state": {"w": each}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99, 0.999), "params": ["w"]}]}


def test_factored_statistics_are_of_whole_tensors_only(tmp_path):
    root = save_small({"optimizer": _came()}, tmp_path / "run")
    _, parameters = roles(root)
    assert parameters["w"].rule["kind"] == "came"
    assert parameters["w"].error is not None
    # The same as two halves: each half has its rows, but the mean is over the rows of both.
    halves = save_small({"optimizer": _came()}, tmp_path / "halves")
    change_metadata(halves, _halve)
    found, parameters = roles(halves)
    assert found["optimizer.state.w.exp_avg[0:80,:]"] == "moment1"
    assert parameters["w[0:80,:]"].rule is None


def _halve(metadata):
    """Say that a tensor is twice as high, and what is there its first half."""
    for name, value in metadata.state_dict_metadata.items():
        if name.endswith(("exp_avg", "row")):
            value.size = torch.Size((160, *value.size[1:]))


def test_buffers_and_the_rest(tmp_path):
    saved = {
        "model": {"bn.running_mean": torch.randn(80, 80), "w": torch.randn(80, 80)},
        "rng": torch.randn(80, 80),
        "extra": {"statistics": torch.randn(80, 80)},
    }
    found, _ = roles(save_small(saved, tmp_path / "run"))
    assert found["rng"] == found["extra.statistics"] == "other"
    rows = inspect_container(tmp_path / "run.ckpt8", tensors=True)["tensors"]
    assert {row["reason"] for row in rows if "running_mean" in row["name"]} == {"buffer"}
