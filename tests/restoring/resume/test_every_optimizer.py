"""Resume into every optimizer of every installed package: as its own load_state_dict would, or not at all."""

import importlib.util

import pytest
import torch
from every_optimizer_kit import classes, foreign, network, quiet, step, trained
from resume_kit import same, snapshot

import ckpt8
from ckpt8.core.errors import Ckpt8Error

PACKAGES = {
    "torch.optim": 14,
    "optimi": 8,
    "came_pytorch": 1,
    "lion_pytorch": 1,
    "pytorch_optimizer": 110,
    "bitsandbytes.optim": 37,
    "torchao.optim": 7,
    "transformers.optimization": 1,
    "ckpt8.optim": 7,
}
"""How many classes of each go on at least. What a class needs that is not there, such as a GPU, leaves it out."""

REFUSED = {
    "pytorch_optimizer": {
        # Objects in their state or groups.
        *("SCION", "SCIONLight", "ScalableShampoo"),
        # State dicts in a form of their own, or with entries beside those of the parameters.
        *("Lookahead", "Magma", "ScheduleFreeWrapper", "TRAC"),
        # State of as many elements as a random mask has, which cannot be told from that of another parameter.
        "SaRA",
    }
}


@pytest.mark.by_default("lion_pytorch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=[pytest.mark.slow] * (count > 30)) for name, count in PACKAGES.items()]
)
def test_it_goes_on_or_nothing_changes(tmp_path, package):
    pytest.importorskip(package.partition(".")[0])
    outcomes = {}
    with quiet():
        for name, kind in classes(package).items():
            try:
                model, optimizer = trained(kind, 0, 2)
            except Exception:
                continue
            outcomes[name] = resumed(tmp_path, kind, model, optimizer)
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome not in ("goes on", "refused")}
    assert not wrong
    assert {name for name, outcome in outcomes.items() if outcome == "refused"} == REFUSED.get(package, set())
    assert list(outcomes.values()).count("goes on") >= PACKAGES[package]


def resumed(folder, kind, model, optimizer):
    """``goes on`` where a run goes on from a file as it should, ``refused`` where it is refused, or what is wrong."""
    run = folder / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run)
    step(model, optimizer, 2)
    uninterrupted = weights(model)
    # What has no step to measure a budget by keeps the codecs of flash under the preset archive.
    for preset in ("lossless", "archive"):
        ckpt8.compress(run, folder / "run.ckpt8", preset=preset, force=True)
        other, fresh = trained(kind, 1, 0)
        before = snapshot(other, fresh)
        try:
            ckpt8.resume(folder / "run.ckpt8", other, fresh)
        except Ckpt8Error:
            unchanged = same(snapshot(other, fresh), before)
            step(other, fresh, 2)
            return "refused" if unchanged else "refused, but changed"
        if found := foreign([dict(fresh.state), fresh.param_groups]):
            return f"holds {found}"
        step(other, fresh, 2)
        restored = run if preset == "lossless" else ckpt8.restore(folder / "run.ckpt8", folder / "back.pt", force=True)
        expected = weights(loaded(kind, restored))
        exact = preset == "lossless" and same(weights(other), uninterrupted)
        # load_state_dict itself may lose something: then either is right.
        as_well = same(weights(other), expected) and (preset != "lossless" or not same(expected, uninterrupted))
        if not (exact or as_well):
            return f"{preset}: takes another step"
    return "goes on"


def loaded(kind, path):
    """A model one step after it, and its optimizer, took what torch loads."""
    tree = torch.load(path, weights_only=False)
    other, fresh = trained(kind, 1, 0)
    other.load_state_dict(tree["model"])
    fresh.load_state_dict(tree["optimizer"])
    step(other, fresh, 2)
    return other


def weights(model):
    return snapshot(model, None)[0]


_PROJECTED = {"rank": 8, "update_proj_gap": 50, "scale": 0.25}
"""What its groups need that gradients are projected."""

_PROJECTING = [
    ("pytorch_optimizer", "GaLore", {"projection_type": "std"}),
    ("pytorch_optimizer", "APOLLO", {"projection_type": "std", "scale_type": "channel"}),
    ("pytorch_optimizer", "Conda", {"projection_type": "std"}),
    ("galore_torch", "GaLoreAdamW", {"proj_type": "std"}),
    ("galore_torch", "GaLoreAdamW", {"proj_type": "full"}),
    ("apollo_torch", "APOLLOAdamW", {"proj_type": "std", "proj": "random", "scale_type": "channel"}),
]
"""Packages, classes and settings; no environment of the tests needs the packages of the last three."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("package", "name", "settings"),
    [case for case in _PROJECTING if case[0] == "pytorch_optimizer" or importlib.util.find_spec(case[0])],
)
def test_projected_gradients_go_on(package, name, settings, tmp_path):
    """Moments are smaller than their parameters, and the state holds the projector, an object of the package."""
    kind = getattr(pytest.importorskip(package), name)

    def made(seed):
        model = network(seed)
        parts = [[p for p in model.parameters() if (p.dim() > 1) is flag] for flag in (False, True)]
        return model, kind([{"params": parts[0]}, {"params": parts[1], **_PROJECTED, **settings}], lr=1e-3)

    model, optimizer = made(0)
    for number in range(3):
        step(model, optimizer, number)
    assert any(state["exp_avg"].shape != param.shape for param, state in optimizer.state.items()) or name == "Conda"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    step(model, optimizer, 3)
    expected = weights(model)
    for preset in ("lossless", "archive"):
        ckpt8.compress(tmp_path / "run.pt", tmp_path / f"{preset}.ckpt8", preset=preset)
        other, fresh = made(1)
        ckpt8.resume(tmp_path / f"{preset}.ckpt8", other, fresh)
        step(other, fresh, 3)
        found = weights(other)
        assert preset == "archive" or same(found, expected)
        assert max((found[key] - expected[key]).norm() / expected[key].norm() for key in found) < 1e-3
