"""Flat files of optimizers, as people write them with safetensors: roles by the components of names and by shapes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import ckpt8
from ckpt8.core.tensors import Role

NAMES = {"model.layer.0.weight": (96, 80), "model.layer.0.bias": (96,), "model.head.weight": (80, 96)}
WAYS = {
    "key last": lambda name, key: f"{name}.{key}",
    "key first": lambda name, key: f"{key}.{name}",
    "key first, numbered": lambda name, key: f"{key}.{list(NAMES).index(name)}",
    "in the middle": lambda name, key: f"optimizer.{key}.{name}",
    "numbered": lambda name, key: f"optimizer.state.{list(NAMES).index(name)}.{key}",
    "slashes": lambda name, key: f"state/{list(NAMES).index(name)}/{key}",
    "slashes and a name": lambda name, key: f"optimizer/{name}/{key}",
    "without a prefix": lambda name, key: f"{key}/{name.removeprefix('model.')}",
}


def roles(tensors, path):
    save_file(tensors, path)
    ckpt8.compress(path, force=True)
    with ckpt8.open(path.with_suffix(".ckpt8")) as file:
        return {each.name: each.role for each in file.manifest.storages}, file.manifest.parameters


def states(way, keys=("exp_avg", "exp_avg_sq")):
    return {way(name, key): torch.rand(shape) for name, shape in NAMES.items() for key in keys}


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_moments_are_found_in_every_order_of_the_name(way, with_weights, tmp_path):
    tensors = states(WAYS[way]) | {WAYS[way](name, "step"): torch.tensor(3.0) for name in NAMES}
    weights = {name: torch.randn(shape) for name, shape in NAMES.items()} if with_weights else {}
    found, parameters = roles({**tensors, **weights}, tmp_path / "optimizer.safetensors")
    for name in NAMES:
        assert found[WAYS[way](name, "exp_avg")] is Role.MOMENT1
        assert found[WAYS[way](name, "exp_avg_sq")] is Role.MOMENT2
        assert found[WAYS[way](name, "step")] is Role.OTHER
        assert found.get(name, Role.WEIGHT) is Role.WEIGHT
    assert len(parameters) == len(NAMES)
    assert all(set(each.moments) == {"moment1", "moment2"} for each in parameters)


@pytest.mark.parametrize("way", ["key first", "in the middle", "without a prefix"])
def test_one_moment_counts_beside_its_weight(way, tmp_path):
    tensors = states(WAYS[way], ["momentum_buffer"])
    weights = {name: torch.randn(shape) for name, shape in NAMES.items()}
    found, _ = roles({**tensors, **weights}, tmp_path / "run.safetensors")
    assert all(found[name] is Role.MOMENT1 for name in tensors)
    assert all(found[name] is Role.WEIGHT for name in weights)


def test_a_name_alone_shows_nothing(tmp_path):
    """A component of a model may have any name; a tensor beside the state that nothing fits is no weight."""
    model = {"exp_avg.encoder.weight": torch.randn(96, 80), "step.weight": torch.randn(80, 96)}
    found, parameters = roles(model, tmp_path / "model.safetensors")
    assert set(found.values()) - {Role.OTHER} == {Role.WEIGHT}
    assert not parameters
    tensors = {**states(WAYS["key last"]), "seen": torch.randn(300, 300), "head.weight.more": torch.randn(80, 96)}
    found, _ = roles(tensors, tmp_path / "run.safetensors")
    assert found["seen"] is found["head.weight.more"] is Role.OTHER


def test_extra_states_beside_the_state(tmp_path):
    """They are no tensors, whatever their names; that had been an AttributeError."""
    tensors = {**states(WAYS["key last"]), "b._extra_state": None, "a.exp_avg._extra_state": None}
    torch.save(tensors, tmp_path / "run.pt")
    moments = {
        f"{name}.{key}": role
        for name in NAMES
        for key, role in (("exp_avg", Role.MOMENT1), ("exp_avg_sq", Role.MOMENT2))
    }
    assert moments.items() <= {each.name: each.role for each in ckpt8.compress(tmp_path / "run.pt").storages}.items()
