"""Every optimizer with a card, and others whose steps are counted: chains, slices, ranks, resume, replayed steps.

A class that a card publishes is tested here as it is registered. What a container states is worked out in float64.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import load_all, save_in_pieces
from ranks import run_ranks
from step_kit import RULES, USUAL, Run, energies, errors_in_steps, quiet
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt8
from ckpt8.container.steps import COUNTED, NO_BUDGET, UNMOVED
from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter
from ckpt8.optim.cards import TRAINED
from ckpt8.optim.recognised_cards import RECOGNISED

pytestmark = pytest.mark.filterwarnings("ignore")

REFUSED = {
    **dict.fromkeys(
        [("optimi", "AdamW"), ("optimi", "Adam")],
        "optimi's Adam, AdamW and RAdam write the same, and their steps still differ at this step",
    ),
    ("bitsandbytes.optim", "Lion8bit"): UNMOVED,
}
"""Why the weights of a young run have no budget."""

NOT_REPLAYED = {
    "its state has no first moment",
    "its state is in low precision already, which is not replayed",
    "its step depends on all parameters together, and is not replayed",
}


def check_figure(key, manifest, expected):
    """What a container states is what was worked out, and within the budget; or it says why there is no figure."""
    large = [each for each in manifest.storages if each.name.startswith("model") and each.numel > 4096]
    if key in REFUSED:
        assert manifest.error_in_steps is None
        assert {each.codec["id"] for each in large} == {"split24/1"}
        assert all(each.reason.startswith(NO_BUDGET + REFUSED[key]) for each in large)
        return
    assert {each.codec["id"] for each in large} == {"lattice/1"}
    assert manifest.error_in_steps == pytest.approx(expected, rel=1e-5)
    assert 0.4 < manifest.error_in_steps <= 1


def test_every_card_whose_steps_are_counted_has_a_run():
    names = {name for _, name in RULES}
    counted = [card for card in RECOGNISED if card.matrix.update in COUNTED or card.name == "Muon"]
    assert [card.rule_id for card in (*TRAINED, *counted) if card.name not in names] == []


@pytest.mark.by_default(*map(".".join, USUAL))
@pytest.mark.parametrize("key", RULES, ids=".".join)
def test_a_chain_is_within_its_budget_and_goes_on(key, tmp_path):
    run, trees = Run(key), {}
    for first, step in ((0, 12), (12, 14)):
        run.train(first, step)
        trees[step] = run.tree()
        torch.save(trees[step], tmp_path / f"{step}.pt")
    ckpt8.chain(tmp_path, preset="archive", rest=0)
    for step, tree in trees.items():
        back = ckpt8.load(path := tmp_path / f"{step}.ckpt8")
        with ckpt8.open(path) as file:
            manifest = file.manifest
        check_figure(key, manifest, errors_in_steps(run.rule, tree, back, run.names()))
        lattices = [each for each in manifest.storages if each.codec["id"] == "lattice/1"]
        assert all((each.base is not None) == (step > 12) for each in lattices)
    (tmp_path / "12.ckpt8").unlink()
    checked = ckpt8.verify(path, tmp_path / "14.pt", resume_steps=2, max_replay_error=0.1)
    replayed = checked.resume["parameters"]
    assert set(checked.resume["skipped"].values()) <= {*NOT_REPLAYED, *REFUSED.values()}
    assert replayed + len(checked.resume["skipped"]) == sum(map(len, run.names()))
    assert [line[:30] for line in checked.failures] == ([] if replayed else ["no parameter could be replayed"])

    resumed, loaded = Run(key, seed=1), Run(key, seed=2)
    with quiet():
        ckpt8.resume(path, model=resumed.model, optimizer=resumed.optimizer)
        loaded.model.load_state_dict(back["model"])
        states = back["optimizer"] if isinstance(back["optimizer"], list) else [back["optimizer"]]
        for optimizer, state in zip(loaded.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    expected, losses = run.train(14, 44), resumed.train(14, 44)
    assert loaded.train(14, 18) == losses[:4]
    drift = sum(abs(a - b) for a, b in zip(expected, losses, strict=True)) / 30
    assert drift < 2 * (manifest.expected_drift or (0.0, 1e-3))[1]


WHOLE_FILES = ("bitsandbytes.optim", "torchao.optim")
"""Packages whose state is known in whole files and not in distributed checkpoints."""


def flat(tree, names):
    """Values of a tree by their names in a distributed checkpoint."""
    found = {f"model.{name}": x for name, x in tree["model"].items()}
    states = tree["optimizer"] if isinstance(tree["optimizer"], list) else [tree["optimizer"]]
    groups = [(group, named) for state, named in zip(states, names, strict=True) for group in state["param_groups"]]
    for number, (group, named) in enumerate(groups):
        listed = {"params": [named[key] for key in group["params"]]}
        found |= {f"optimizer.param_groups.{number}.{key}": value for key, value in {**group, **listed}.items()}
    for state, named in zip(states, names, strict=True):
        for number, values in state["state"].items():
            nested = values.get("__bnb_optimizer_quant_state__", {})
            own = {**values, **{f"__bnb_optimizer_quant_state__.{key}": x for key, x in nested.items()}}
            found |= {f"optimizer.state.{named[number]}.{key}": x for key, x in own.items() if x is not nested}
    return found


def rows(x, shape):
    """The parts that two ranks have of a tensor that belongs to a parameter of a shape: half of its rows, or all."""
    return x.chunk(2) if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == shape[0] else (x,)


def columns(x, shape):
    """The same for columns of matrices."""
    return x.chunk(2, 1) if isinstance(x, torch.Tensor) and x.ndim == 2 and tuple(x.shape) == shape else (x,)


def error_by_name(run, was, there, cut):
    """The error in steps from values by name; each slice that ``cut`` makes is counted by its own momentum."""
    total = [0.0, 0.0, 0.0, 0.0]
    # Other energies are sums over elements, whatever a slice is.
    parts = cut if run.rule in ("sgd", "lion", "muon") else lambda x, _: (x,)
    for name, param in run.model.named_parameters():
        shape, place = tuple(param.shape), f"optimizer.state.{name}."
        state, back = (
            {key.removeprefix(place): parts(x, shape) for key, x in side.items() if key.startswith(place)}
            for side in (was, there)
        )
        weights = zip(*(parts(side[f"model.{name}"], shape) for side in (was, there)), strict=True)
        for at, pair in enumerate(weights):
            own = ({key: x[at % len(x)] for key, x in side.items()} for side in (state, back))
            found = energies(run.rule, run.group_of(name), *own, pair, shape)
            total = [a + b for a, b in zip(total, found, strict=True)]
    return math.sqrt(sum(total[1:]) / total[0]) if total[0] else None


def check_error(key, run, steps, was, there, cut, reason=None):
    """What is stated of a distributed checkpoint is right; or there is no figure, for a ``reason``."""
    if (reason := reason or REFUSED.get(key) or (UNMOVED if key[0] in WHOLE_FILES else None)) is not None:
        assert steps["steps"] is None
        assert {row["reason"] for row in steps["outside"]} == {reason}
    else:
        assert steps["steps"] == pytest.approx(error_by_name(run, was, there, cut), rel=1e-5)
        assert 0.4 < steps["steps"] <= 1


@pytest.mark.by_default(*map(".".join, USUAL))
@pytest.mark.parametrize("key", [key for key in RULES if key[0] != "torchao.optim"], ids=".".join)
def test_slices_count_on_their_own(key, tmp_path):
    run = Run(key)
    run.train(0, 12)
    was, shapes = flat(run.tree(), run.names()), {name: tuple(p.shape) for name, p in run.model.named_parameters()}
    pieces = {}
    for name, x in was.items():
        owner = next((each for each in shapes if f".{each}." in f"{name}."), None)
        if owner is not None and isinstance(x, torch.Tensor) and x.ndim:
            parts = columns(x, shapes[owner])
            places = [(0,) * x.ndim, (0, parts[0].shape[-1])][: len(parts)]
            pieces[name] = x, [(place, tuple(part.shape)) for place, part in zip(places, parts, strict=True)]
    save_in_pieces(pieces, tmp_path / "run", {name: x for name, x in was.items() if name not in pieces})
    ckpt8.compress(tmp_path / "run", tmp_path / "run.ckpt8", preset="archive")
    ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    steps = ckpt8.inspect(tmp_path / "run.ckpt8")["steps"]
    # Of a plain directory nobody knows which averages over rows belong to a slice.
    reasons = {"came": "the optimizer is not one whose update rule is known", "adafactor": UNMOVED}
    check_error(key, run, steps, was, load_all(tmp_path / "back"), columns, reasons.get(run.rule))


def _save_and_go_on(rank, folder):
    """Save what two ranks have of every run: slices, or replicas where a package cannot step a DTensor."""
    mesh = init_device_mesh("cpu", (2,))
    for key in RULES:
        place, is_sharded = folder / ".".join(key), True
        try:
            run = Run(key, shard=lambda model: fully_shard(model, mesh=mesh))
            run.train(0, 12)
        except (RuntimeError, AssertionError):
            is_sharded, run = False, Run(key)
            run.train(0, 12)
        state = dict(zip(("model", "optimizer"), get_state_dict(run.model, run.optimizers), strict=True))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place / "plain"))
        writer = Ckpt8StorageWriter(place / "packed", preset="archive")
        dcp.save(state, storage_writer=writer, planner=Ckpt8SavePlanner())
        losses = run.train(12, 16)
        if rank == 0:
            (place / "losses.json").write_text(json.dumps([is_sharded, losses]))


@pytest.mark.slow
def test_ranks_save_and_one_process_goes_on(tmp_path):
    run_ranks(_save_and_go_on, 2, tmp_path)
    sharded = set()
    for key in RULES:
        place = tmp_path / ".".join(key)
        is_sharded, expected = json.loads((place / "losses.json").read_text())
        sharded |= {key} if is_sharded else set()
        run, other = Run(key), Run(key, seed=1)
        run.train(0, 12)
        other.train(0, 1)
        state = dict(zip(("model", "optimizer"), get_state_dict(other.model, other.optimizers), strict=True))
        dcp.load(state, storage_reader=Ckpt8StorageReader(place / "packed"), no_dist=True)
        set_state_dict(
            other.model, other.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert other.train(12, 16) == pytest.approx(expected, abs=0.01)
        if key[0] == "torchao.optim":
            continue  # torch reads its tensors with its classes alone
        was = load_all(place / "plain")
        there = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for name, x in was.items()}
        dcp.load(there, storage_reader=Ckpt8StorageReader(place / "packed"), no_dist=True)
        steps, cut = ckpt8.inspect(place / "packed")["steps"], rows if is_sharded else lambda x, _: (x,)
        reason = UNMOVED if is_sharded and run.rule == "adafactor" else None
        check_error(key, run, steps, was, there, cut, reason)
        for file in place.glob("packed/*.ckpt8"):
            with ckpt8.open(file) as container:
                assert container.manifest.error_in_steps is None or container.manifest.error_in_steps <= 1
        assert not ckpt8.verify(place / "packed", place / "plain", resume_steps=1).failures
    assert {("torch.optim", "AdamW"), ("torch.optim", "SGD"), ("pytorch_optimizer", "Muon")} <= sharded
