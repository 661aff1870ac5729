"""CAME's slices under a budget: every figure is that of the same elements in the whole parameter."""

from __future__ import annotations

import pytest
import torch

import ckpt8

LR, BETA1 = 1e-3, 0.9
SHAPES = {"matrix": (400, 120), "stack": (3, 160, 64)}


def whole(shape):
    """Weight and state of a parameter. Its rows have gradients of three decades, so that few rows make the mean.

    Those of the columns of a stack have two, so that the bound on the update makes many of its steps.
    """
    generator = torch.Generator().manual_seed(sum(shape))
    rows = 10 ** torch.linspace(-3, 0, shape[-2]).unsqueeze(-1)
    columns = 10 ** torch.linspace(-1, 1, shape[-1]) if len(shape) > 2 else torch.ones(shape[-1])
    squares, residuals = (
        (torch.randn(shape, generator=generator) * rows * columns).square().double() + 1e-30 for _ in range(2)
    )
    return {
        "weight": torch.randn(shape, generator=generator) * 0.1,
        "exp_avg": torch.randn(shape, generator=generator) * rows,
        **averages("exp_avg_sq", squares),
        **averages("exp_avg_res", residuals),
    }


def averages(name, values):
    return {f"{name}_row": values.mean(-1).float(), f"{name}_col": values.mean(-2).float()}


def cut(state, dim, start, stop):
    """A slice: of averages over the dimension that is cut, all."""
    gone = {"row": -1, "col": -2}
    found = {}
    for name, value in state.items():
        own = gone.get(name.rpartition("_")[2])
        at = dim if own is None else -1
        found[name] = value if own == dim else value.narrow(at, start, stop - start).clone()
    return found


def packed(folder, state, shape, **options):
    """The one parameter in the container of a state, and the state that it gives back."""
    own = {key: value for key, value in state.items() if key != "weight"}
    if tuple(own["exp_avg"].shape) != shape:
        own["whole_shape"] = list(shape)
    group = {"params": ["w"], "lr": LR, "betas": (BETA1, 0.999, 0.9999), "eps": (1e-30, 1e-16), "clip_threshold": 1.0}
    optimizer = {"state": {"w": {"step": 5, "RMS": 0.0, **own}}, "param_groups": [group]}
    torch.save({"model": {"w": state["weight"]}, "optimizer": optimizer}, folder / "part.pt")
    ckpt8.compress(folder / "part.pt", **options, force=True)
    back = ckpt8.load(folder / "part.ckpt8")
    with ckpt8.open(folder / "part.ckpt8") as file:
        (parameter,) = file.manifest.parameters
    return parameter, {"weight": back["model"]["w"], **back["optimizer"]["state"]["w"]}


def factors(state, name):
    """(R / mean R) (x) C of a whole parameter in float64."""
    rows, columns = state[f"{name}_row"].double(), state[f"{name}_col"].double()
    return (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)


@pytest.mark.parametrize("budget", [{"preset": "archive"}, {"budget": 2.0}, {"preset": "flash"}], ids=str)
@pytest.mark.parametrize("dim", [-2, -1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", SHAPES)
def test_figures_of_slices_are_those_of_the_whole(name, dim, budget, tmp_path):
    shape = SHAPES[name]
    state = whole(shape)
    v, f = factors(state, "exp_avg_sq"), factors(state, "exp_avg_res")
    quarter, largest = shape[dim] // 4, []
    most = 1.0 if "budget" in budget else 0.5
    for start, stop in ((0, quarter), (quarter, 3 * quarter), (3 * quarter, 4 * quarter)):
        part = cut(state, dim, start, stop)
        found, back = packed(tmp_path, part, shape, **budget)
        there = {key: value.narrow(dim, start, stop - start) for key, value in (("v", v), ("f", f))}
        dm = (back["exp_avg"].double() - part["exp_avg"].double()) / there["f"].sqrt()
        update = part["exp_avg"].double() / there["f"].sqrt()
        assert found.error["sum_square_error"] == pytest.approx(float(dm.square().sum()), rel=1e-4)
        assert found.error["max_update"] == pytest.approx(float(update.abs().max()), rel=1e-4)
        if "flash" in budget.values():
            continue
        largest.append(float(dm.abs().max()))
        dw = back["weight"].double() - part["weight"].double()
        reach = LR * BETA1 / (1 - BETA1)
        expected = {
            "step": LR**2 * (there["v"] * update.square()).sum(),
            "weight": (there["v"] * dw.square()).sum(),
            "moment1": reach**2 * (there["v"] * dm.square()).sum(),
        }
        for key, value in expected.items():
            assert found.steps[key] == pytest.approx(float(value), rel=1e-4), key
        # Two thirds of the budget are for weights and first moments: these take what the steps of the weights, which
        # are rounded down, leave, and less where the bound on the update is finer.
        unit = found.steps["step"] * (4 if "budget" in budget else 1)
        taken = (found.steps["weight"] + found.steps["moment1"]) / unit
        assert (0.6 if name == "matrix" else 0.3) < taken <= 2 / 3
    assert name == "matrix" or "flash" in budget.values() or most * 0.9 < max(largest) <= most


def test_the_update_of_a_slice_cut_both_ways_is_unknown(tmp_path):
    """No rank has the mean of all its rows, nor all its columns, which have the same mean."""
    state = whole(SHAPES["matrix"])
    found, _ = packed(tmp_path, cut(cut(state, -2, 0, 200), -1, 0, 50), SHAPES["matrix"], preset="archive")
    assert found.rule is None
    assert "neither all rows nor all columns" in found.reason
    assert found.error is None
    assert found.steps is None
