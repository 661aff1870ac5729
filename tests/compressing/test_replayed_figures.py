"""The update error of rules that need a gradient: ``compress`` states what ``verify --resume-steps 1`` finds."""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dcp_kit import save_in_pieces
from own_optimizer_kit import registered

import ckpt8
from ckpt8.checkpoint.meaning import replayed
from ckpt8.compressing import groups
from ckpt8.container import reader as container_reader
from ckpt8.container.manifest import Manifest
from ckpt8.container.reader import ContainerReader
from ckpt8.inspecting.container import inspect_container
from ckpt8.inspecting.distributions import checkpoint_distributions, container_distributions
from ckpt8.optim import known_optimizers as known
from ckpt8.optim.cards import Card, Form, StateTensor

SHAPE = (300, 260)
"""More than a block of seeds, and no multiple of one."""

STEP = 40


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """An odd polynomial of the whole matrix, as in Muon; five times."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def whole_matrix(blocks, whole, *, step, lr, momentum, weight_decay):
    (block,) = blocks
    param, grad, buffer = block.load("param", "grad", "whole_buffer")
    assert param.dim() == 2
    buffer.mul_(momentum).add_(grad)
    moved = lr * orthogonal(grad + momentum * buffer)
    yield {"param": param.mul_(1 - lr * weight_decay) - moved, "whole_buffer": buffer}


def clipped(blocks, whole, *, step, lr, momentum, weight_decay):
    """A step that is divided by its own RMS over the tensor, and takes a copy of the weight into account."""
    total = sum(float((b.load("grad")[0] + b.load("early")[0]).square().sum()) for b in blocks)
    for block in blocks:
        param, grad, early, late, z = block.load("param", "grad", "early", "late", "z")
        step_size = lr / math.sqrt(total)
        new = {"param": param - step_size * (grad + early + late + z), "early": early * momentum + grad}
        yield {**new, "late": late * 0.999 + grad * 1e-3, "z": z}


def card_of(name, form, **facts):
    facts |= {"settings": {"lr": 1, "momentum": 1, "weight_decay": 1}, "matrix": form, "needs": ("momentum",)}
    return Card(rule_id=name, name=name.title(), cls=f"test_replayed_figures:{name.title()}", **facts)


MATRIX = Form("test_replayed_figures:whole_matrix", (StateTensor("whole_buffer", "moment1"),), "replayed", "matrix")
SEVERAL = StateTensor("early", "moment1"), StateTensor("late", "moment1_2"), StateTensor("z", "weight", packable=False)
CLIPPED = Form("test_replayed_figures:clipped", SEVERAL, "replayed", "tensor")
CARDS = {
    "whole matrix": card_of("whole", MATRIX, average=lambda given: (given["momentum"], 1.0)),
    "several moments": card_of(
        "clipped", CLIPPED, gradient_rms=lambda state, given, step: state["early"].abs() + 1e-3 * step
    ),
}
"""Cards of this file alone: a step that takes the whole matrix, and one with a sum over the tensor and a weight."""

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.99), "momentum": 0.9, "dampening": 0.0, "nesterov": True, "eps": 1e-8}
SETTINGS |= {"weight_decay": 0.1, "momentum_decay": 4e-3}
"""Plausible settings for a card, by name."""


def settings_of(card: Card) -> dict[str, object]:
    """A group for a card: settings and the keys that it is recognised by, and no penalty that needs the weight."""
    betas = (0.9, 0.99, 0.999, 0.9999)
    group: dict[str, object] = {}
    for name, count in card.settings.items():
        value = SETTINGS.get(name, 0.5)
        group[name] = betas[:count] if name == "betas" else value if count == 1 else (value,) * count
    extra = dict.fromkeys(sorted(card.signs)[:1], 1)
    coupled = card.coupled or card.fixed.get("decoupled") is False
    return {**extra, **group, **({"weight_decay": 0.0} if coupled else {})}


def replayed_forms() -> list[tuple[Card, Form]]:
    cards = [*known.trained_cards(), *CARDS.values()]  # test_recognised has the others, with real runs
    return [(card, form) for card in cards for form in card.forms if form.update == "replayed"]


def checkpoint_of(card, form=None, *, shape=SHAPE, stored=lambda x: x, **changes) -> dict[str, object]:
    """State as a run leaves it: momenta of every scale, squares above them; ``stored`` gives it another layout.

    ``card`` may be a name; the form is that for matrices if none is given.
    """
    card = known.CARDS[card] if isinstance(card, str) else card
    form = form or card.matrix
    generator = torch.Generator().manual_seed(7)
    rows = 10 ** torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator)
    state: dict[str, object] = {"step": torch.tensor(float(STEP))}
    for tensor in form.tensors:
        noise = torch.randn(tensor.shape(shape), generator=generator)
        scale = 1e-3 * rows if tensor.is_moment else 1.0
        values = noise.square() * scale**2 if tensor.slot in ("moment2", "max_moment2", "statistic") else noise * scale
        state[tensor.key] = stored(values)
    for published in card.published[:1]:
        state |= {k: v(settings_of(card)) if callable(v) else v for k, v in published.state.items() if k not in state}
    group = {**settings_of(card), "params": [0], **changes}
    weight = torch.randn(shape, generator=generator)
    return {"model": {"w": weight}, "optimizer": {"state": {0: state}, "param_groups": [group]}}


@pytest.fixture(autouse=True)
def _cards():
    with registered(*CARDS.values()):
        yield


def compress(tmp_path: Path, tree: object, **options: object) -> Manifest:
    torch.save(tree, tmp_path / "run.pt")
    return ckpt8.compress(tmp_path / "run.pt", force=True, threads=2, **options)


def replay(tmp_path: Path, steps: int = 1):
    return ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt", resume_steps=steps, threads=2)


def agree(tmp_path: Path) -> dict[str, float]:
    """Check that the stated figure is the replayed one, and return it."""
    stated = inspect_container(tmp_path / "run.ckpt8")["errors"]
    assert stated["update"] is None
    assert stated["update_unknown"] == 0
    found = replay(tmp_path)
    assert found.failures == ()
    assert found.resume["skipped"] == {}
    [step] = found.resume["steps"]
    assert stated["replayed"]["nmse"] == pytest.approx(step["update_nmse"], rel=0.01)
    assert stated["replayed"]["max_error"] == pytest.approx(step["update_max"], rel=0.01)
    return stated["replayed"]


@pytest.mark.parametrize(
    ("card", "form"), replayed_forms(), ids=[f"{card.rule_id}-{form.rule}" for card, form in replayed_forms()]
)
def test_every_card_states_the_first_replayed_step(tmp_path, card, form):
    tree = checkpoint_of(card, form, shape=SHAPE if form is card.matrix else (70_000,))
    manifest = compress(tmp_path, tree, rules=["optimizer.*.z=split24"] if "z" in tree["optimizer"]["state"][0] else [])
    [parameter] = manifest.parameters
    assert (parameter.reason, parameter.rule["kind"]) == (None, "replayed")
    assert 0 < agree(tmp_path)["nmse"] < 0.5


@pytest.mark.parametrize("preset", ["flash", "compact"])
def test_lion(tmp_path, preset):
    """A sign turns a small error of the momentum into one as large as the update: this must be told."""
    compress(tmp_path, checkpoint_of("lion"), preset=preset)
    stated = agree(tmp_path)
    assert stated["max_error"] == 2.0
    errors = inspect_container(tmp_path / "run.ckpt8")["errors"]
    assert errors["moment1"]["nmse"] < stated["nmse"] / 5


LAYOUTS = {
    "several chunks": {"shape": (1100, 1000)},
    "another order": {"shape": (60, 40, 9, 5), "stored": lambda x: x.contiguous(memory_format=torch.channels_last)},
    "transposed": {"stored": lambda x: x.t().contiguous().t()},
    "bf16": {"stored": lambda x: x.bfloat16()},
    "fp64": {"stored": lambda x: x.double()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wherever_a_block_lies(tmp_path, layout):
    rules = ["optimizer.*.exp_avg=companded8"] if layout == "bf16" else []
    compress(tmp_path, checkpoint_of("lion", **LAYOUTS[layout]), rules=rules)
    if layout == "fp64":
        assert inspect_container(tmp_path / "run.ckpt8")["errors"]["moment1"] is None
    else:
        agree(tmp_path)


@pytest.mark.parametrize("layout", ["transposed", "another order"])
def test_a_whole_step_wherever_it_lies(tmp_path, layout):
    card = CARDS["several moments"] if layout == "another order" else CARDS["whole matrix"]
    rules = ["optimizer.*.z=split24"] if layout == "another order" else []
    compress(tmp_path, checkpoint_of(card, **LAYOUTS[layout]), rules=rules)
    agree(tmp_path)


@pytest.mark.parametrize("card", ["lion", "whole"])
@pytest.mark.parametrize("background", [False, True])
def test_objects_in_memory(tmp_path, card, background):
    """The figure is that of the tensors as they were when ``save`` returned."""
    tree = checkpoint_of(card)
    compress(tmp_path, tree)
    stated = agree(tmp_path)
    pending = ckpt8.save(tree, tmp_path / "run.ckpt8", background=background)
    if background:
        for each in tree["optimizer"]["state"][0].values():
            each.zero_()
        pending.result()
    assert inspect_container(tmp_path / "run.ckpt8")["errors"]["replayed"] == stated


NEEDS_WEIGHT = "its step needs the weight, which compression does not read beside it; verify --resume-steps replays it"
NO_SETTINGS = "hyperparameters are missing from the parameter group, or out of range"
UNKNOWN = {
    "too large": ("whole", {}, "its step takes the whole tensor, and that has more than 70,000 elements"),
    "a penalty": ("lion", {"weight_decouple": False}, NEEDS_WEIGHT),
    "no settings": ("whole", {"momentum": "much"}, NO_SETTINGS),
    "another optimizer": ("lion", {"betas": 0.9}, "the optimizer is not one whose update rule is known"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_step_is_told_and_stays_lossless_under_a_bound(tmp_path, monkeypatch, run_command, case):
    card, changes, reason = UNKNOWN[case]
    monkeypatch.setattr("ckpt8.compressing.parameters.LARGEST_MATRIX", 70_000)
    tree = checkpoint_of(card, **changes)
    [parameter] = compress(tmp_path, tree).parameters
    assert (parameter.rule, parameter.reason, parameter.error) == (None, reason, None)
    errors = inspect_container(tmp_path / "run.ckpt8")["errors"]
    assert (errors["update_unknown"], errors["update_reasons"]) == (1, {reason: 1})
    shown = run_command("inspect", "-v", tmp_path / "run.ckpt8")[1]
    assert f"unknown for 1 parameter: {reason}" in " ".join(shown.split())
    stored = compress(tmp_path, tree, max_update_error=1e9).storages
    assert [each.reason for each in stored if each.role.value == "moment1"] == [f"update error unknown: {reason}"]
    assert inspect_container(tmp_path / "run.ckpt8")["errors"]["update_unknown"] == 0


def test_the_bound_is_on_the_replayed_figure(tmp_path):
    tree = checkpoint_of("lion")
    assert [each.reason for each in compress(tmp_path, tree, max_update_error=2.0).storages if each.reason] == []
    stored = compress(tmp_path, tree, max_update_error=1.9).storages
    assert [each.reason for each in stored if each.reason] == ["update error exceeds 1.9"]
    assert replay(tmp_path).resume["replay_error"] < 1e-6


def test_reports_name_the_figure(tmp_path, run_command):
    """A file with both kinds: AdamW in update space, Lion replayed. Neither is added to the other."""
    one, other = checkpoint_of("lion"), checkpoint_of("adamw", amsgrad=False)
    del other["optimizer"]["state"][0]["max_exp_avg_sq"]
    compress(tmp_path, {"lion": one["optimizer"], "adamw": other["optimizer"]})
    errors = inspect_container(tmp_path / "run.ckpt8")["errors"]
    assert (errors["update"]["parameters"], errors["replayed"]["parameters"]) == (1, 1)
    assert errors["update"]["max_update"] != 1.0 == errors["replayed"]["max_update"]
    text = " ".join(run_command("inspect", "-v", tmp_path / "run.ckpt8")[1].split())
    assert "update space NMSE" in text
    assert "first replayed step NMSE" in text
    assert "lion.state.0 (first replayed step)" in text
    rows = inspect_container(tmp_path / "run.ckpt8", tensors=True)
    figures = {row["name"]: row["figure"] for row in rows["parameters"]}
    assert figures == {"lion.state.0": "replayed", "adamw.state.0": "update"}
    assert {row["figure"] for row in rows["worst"]["update"]} == {"update", "replayed"}
    for source in ("run.ckpt8", "run.pt"):
        run_command("inspect", tmp_path / source, "--html", tmp_path / f"{source}.html")
        page = re.sub("<[^>]+>", "", (tmp_path / f"{source}.html").read_text())
        assert "Update space and First replayed step, by layer" in page
        assert "first replayed stepNMSE of u" in page
        assert re.search(
            r"lion\.state\.0 first replayed step, NMSE of u [\d.]+, SNR of u -?[\d.]+ dB, max \|Δu\| 2,", page
        )


def test_a_file_of_before_is_measured_as_it_states(tmp_path, monkeypatch):
    """Files that call Lion's rule ``momentum`` state the error of its momentum, and still verify."""
    lion = known.CARDS["lion"]
    tree = checkpoint_of(lion)
    torch.save(tree, tmp_path / "run.pt")
    with monkeypatch.context() as patch:
        patch.setitem(known.CARDS, "lion", replace(lion, matrix=replace(lion.matrix, update="momentum")))
        [old] = compress(tmp_path, tree).parameters
    assert old.rule["kind"] == "momentum"
    found = replay(tmp_path)
    assert found.failures == ()
    assert 0 < old.error["max_error"] < 0.1
    assert found.resume["steps"][0]["update_max"] == 2.0
    errors = inspect_container(tmp_path / "run.ckpt8", original=tmp_path / "run.pt")["errors"]
    assert errors["replayed"] is None
    assert errors["update"]["max_error"] == old.error["max_error"]


@pytest.mark.slow
def test_a_stated_figure_is_checked(tmp_path, monkeypatch):
    for name, factor, fails in (("lion", 1 + 1e-6, True), ("whole", 1.005, False), ("whole", 1.05, True)):
        read = container_reader.read_manifest

        def changed(*arguments, read=read, factor=factor):
            manifest = read(*arguments)
            manifest.parameters[0].error["sum_square_error"] *= factor
            return manifest

        compress(tmp_path, checkpoint_of(name))
        with monkeypatch.context() as patch:
            patch.setattr(container_reader, "read_manifest", changed)
            assert bool(replay(tmp_path).failures) == fails


def test_seeds_are_those_of_the_definition():
    """FORMAT.md states the gradients: here from integers, without numpy's distributions."""
    lion = known.CARDS["lion"]
    m = torch.randn(70_000, generator=torch.Generator().manual_seed(1)) * 1e-3
    rule = replayed.Replayed(lion, lion.matrix, 1, 1e-3, 0.0, False, {"betas": (0.9, 0.99)})
    for step in (0, 3):
        grad = replayed.Gradients(rule, {"exp_avg": m}).at(step)
        for start in (0, 1 << 16):
            block = m[start : start + (1 << 16)]
            bits = np.random.PCG64([0x5EED, zlib.crc32(block.numpy().tobytes()), step])
            for k in range(5):
                word = int(bits.random_raw())
                parts = [word >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
                noise = np.float32((sum(parts) - 131070) / math.sqrt((2**32 - 1) / 3))
                scale = float(block.double().square().mean().sqrt()) * math.sqrt(1 - 0.99**2) / 0.01
                assert float(grad[start + k]) == pytest.approx(float(noise) * scale, rel=1e-6)
    whole, last = (replayed.Gradients(rule, {"exp_avg": x}).at(0) for x in (m, m[1 << 16 :]))
    assert torch.equal(whole[1 << 16 :], last)
    noise = replayed._noise(5, 0, 1 << 20).double()
    assert abs(float(noise.mean())) < 5e-3
    assert float(noise.std()) == pytest.approx(1, abs=3e-3)


def test_a_vector_where_the_step_takes_a_matrix(tmp_path):
    """A flat buffer, say, or a bias: the rule is not called with it."""
    card = CARDS["whole matrix"]
    [parameter] = compress(tmp_path, checkpoint_of(card, shape=(70_000,))).parameters
    assert parameter.reason == "its step takes a matrix, and its state is a vector"
    assert set(replay(tmp_path).resume["skipped"].values()) == {parameter.reason}


def test_a_slice_where_the_step_takes_the_whole_tensor(tmp_path):
    """Two slices of a distributed checkpoint: each is half a matrix."""
    for name, reason in (("whole", "its step takes the whole tensor, and the file has a slice of it"), ("lion", None)):
        card = known.CARDS[name]
        tree = checkpoint_of(card, shape=(600, 260))
        key = card.matrix.tensors[0].key
        halves = [((start, 0), (300, 260)) for start in (0, 300)]
        cut = {f"optimizer.state.w.{key}": (tree["optimizer"]["state"][0][key], halves)}
        group = tree["optimizer"]["param_groups"][0]
        options = {f"optimizer.param_groups.w.{option}": value for option, value in group.items() if option != "params"}
        save_in_pieces(cut, tmp_path / name, options | {"model.w": tree["model"]["w"]})
        manifest = ckpt8.compress(tmp_path / name, tmp_path / f"{name}.ckpt8", threads=1)
        assert [each.reason for each in manifest.parameters] == [reason, reason]


@pytest.mark.parametrize("name", ["lion", "adagrad", "adadelta", "adan", "muon"])
def test_no_update_is_drawn_from_moments_alone(tmp_path, name):
    """A momentum was drawn as Lion's update, which is a sign."""
    card = known.CARDS[name]
    changes = {option: values[0] for option, values in card.choices.items()}
    compress(tmp_path, checkpoint_of(card, **changes))
    with ContainerReader(tmp_path / "run.ckpt8") as reader:
        drawn = [container_distributions(reader), checkpoint_distributions(tmp_path / "run.pt", full=True)]
    assert all({*each["histograms"]} & {"moment1", "moment2"} and "update" not in each["histograms"] for each in drawn)


SMALL_AND_LARGE = {
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),
    "Nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2),
}


@pytest.mark.parametrize("shared", [False, True], ids=["own entries", "shared entries"])
@pytest.mark.parametrize("name", SMALL_AND_LARGE)
@pytest.mark.filterwarnings("ignore")
def test_the_figure_counts_parameters_that_are_exact(name, shared, tmp_path, monkeypatch):
    """Biases, norms and small matrices take their steps too: a replay counts them, whoever shares entries."""
    monkeypatch.setattr(groups, "_ROOM", 0 if shared else 1 << 40)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 40))
    optimizer = SMALL_AND_LARGE[name](model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    stated = inspect_container(tmp_path / "run.ckpt8")["errors"]["replayed"]
    found = ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt", resume_steps=1)
    assert not found.failures
    assert stated["nmse"] == pytest.approx(found.resume["steps"][0]["update_nmse"], rel=0.01)
    assert stated["parameters"] == found.resume["parameters"] == len(optimizer.state)
    ckpt8.compress(tmp_path / "run.pt", preset="lossless", force=True)
    assert inspect_container(tmp_path / "run.ckpt8")["errors"]["replayed"] is None


@pytest.mark.filterwarnings("ignore")
def test_a_replay_tells_rules_that_need_a_gradient_from_others(tmp_path, run_command):
    """Muon for matrices and AdamW for the rest are two figures of a container, and a replay gives the first again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Embedding(100, 96))
    muon = torch.optim.Muon([model[0].weight], lr=1e-2)
    adamw = torch.optim.AdamW([model[0].bias, model[1].weight], lr=1e-3)
    for _ in range(3):
        loss = model[0](model[1](torch.arange(100))).square().mean()
        for optimizer in (muon, adamw):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": [muon.state_dict(), adamw.state_dict()]}
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    stated = inspect_container(tmp_path / "run.ckpt8")["errors"]
    found = ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt", resume_steps=2).resume
    first = found["first_of_gradient_rules"]
    assert (first["parameters"], found["parameters"]) == (1, 3)
    assert first["update_nmse"] == pytest.approx(stated["replayed"]["nmse"], rel=0.01)
    assert first["update_nmse"] != pytest.approx(found["steps"][0]["update_nmse"], rel=0.01)
    arguments = (tmp_path / "run.ckpt8", "--against", tmp_path / "run.pt", "--resume-steps", 1)
    assert "first step of the 1 parameter whose step needs a gradient: NMSE " in run_command("verify", *arguments)[1]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("rmsprop", partial(torch.optim.RMSprop, alpha=0.9)),
        ("adadelta", partial(torch.optim.Adadelta, rho=0.8)),
    ],
)
def test_the_size_of_gradients_that_never_changes_is_found_in_the_average_of_their_squares(name, make):
    sizes = torch.tensor([1e-3, 0.5, 7.0])
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = make([parameter])
    for step in range(1, 4):
        parameter.grad = sizes * (-1) ** step
        optimizer.step()
    card = next(card for card in known.CARDS.values() if card.rule_id == name)
    scale = card.gradient_rms(optimizer.state[parameter], optimizer.param_groups[0], 3)
    torch.testing.assert_close(scale, sizes)
