"""Files under a budget, from end to end: what reports state against float64 sums over the two checkpoints alone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hostile_kit import pack, unpack
from torch import nn

import ckpt8
from ckpt8.container import steps as expected
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

BETAS = (0.9, 0.95)
PARTS = ("steps", "weight", "moment1", "moment2")
STEPS = 12


def adamw(parameters, lr=1e-3, **options):
    return torch.optim.AdamW(parameters, lr, betas=BETAS, **options)


def stable_adamw(parameters):
    optimi = pytest.importorskip("optimi", reason="torch-optimi is not installed")
    return optimi.StableAdamW(parameters, 1e-3, betas=BETAS, triton=False)


def came(parameters):
    return pytest.importorskip("came_pytorch", reason="came-pytorch is not installed").CAME(parameters, 1e-3)


MAKERS = {
    "adamw": adamw,
    "amsgrad": lambda parameters: adamw(parameters, amsgrad=True),
    "stable_adamw": stable_adamw,
    "came": came,
}


def trained(make, seed=0):
    """A small network and its optimizer after some steps."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(96, 160), nn.Tanh(), nn.Linear(160, 96))
    optimizer = make(net.parameters())
    for _ in range(STEPS):
        x = torch.randn(32, 96)
        loss = (net(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint file of every optimizer, made once."""
    folder, found = tmp_path_factory.mktemp("budget"), {}

    def call(name):
        if name not in found:
            found[name] = folder / f"{name}.pt"
            torch.save(trained(MAKERS[name]), found[name])
        return found[name]

    return call


def outer(rows, columns):
    """What CAME makes of the means of rows and columns."""
    return (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)


def parts_of(original, restored, kind) -> dict[str, float]:
    """The error in steps and its parts, as the documentation of a budget has them."""
    sums = dict.fromkeys(("step", "weight", "moment1", "moment2"), 0.0)
    for number, name in enumerate(original["model"]):
        a, b = (
            {key: x.double() for key, x in side["optimizer"]["state"][number].items() if torch.is_tensor(x)}
            for side in (original, restored)
        )
        group = original["optimizer"]["param_groups"][0]
        lr, (beta1, beta2, *_) = group["lr"], group.get("betas", BETAS)
        bias1, bias2 = (1 - beta1**STEPS, 1 - beta2**STEPS) if kind in ("adamw", "amsgrad") else (1.0, 1.0)
        gain = 0.576**2 * (1 + beta1 * beta2) / ((1 - beta2**2) * (1 - beta1 * beta2))
        if kind == "came":
            if original["model"][name].dim() < 2:
                continue
            v = outer(a["exp_avg_sq_row"], a["exp_avg_sq_col"])
            push = v.sqrt() * outer(a["exp_avg_res_row"], a["exp_avg_res_col"]).rsqrt()
            relative = torch.zeros(())
        else:
            key = "max_exp_avg_sq" if kind == "amsgrad" else "exp_avg_sq"
            v, push = a[key] / bias2, torch.tensor(1 / bias1, dtype=torch.float64)
            relative = torch.where(a[key] > 0, (b[key] / a[key]).sqrt() - 1, 0.0)
        m, dm = a["exp_avg"] * push, (b["exp_avg"] - a["exp_avg"]) * push
        dw = restored["model"][name].double() - original["model"][name].double()
        sums["step"] += float((lr * m).square().sum())
        sums["weight"] += float((v * dw.square()).sum())
        sums["moment1"] += float((lr * beta1 / (1 - beta1) * dm).square().sum())
        sums["moment2"] += gain * float((lr * relative * m).square().sum())
    parts = {part: math.sqrt(sums[part] / sums["step"]) for part in ("weight", "moment1", "moment2")}
    energy = sums["weight"] + sums["moment1"] + sums["moment2"]
    return {**parts, "steps": math.sqrt(energy / sums["step"]), "energy": energy}


def drift_of(found) -> float:
    """The mean |Δloss| that is expected of what ``parts_of`` found."""
    noise = math.sqrt(found["energy"])
    return expected.NOISE * noise + expected.RISE * noise * found["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("budget", [0.3, 2.0])
def test_the_stated_error_is_that_of_the_restored_checkpoint(kind, budget, checkpoint, tmp_path):
    source, target = checkpoint(kind), tmp_path / "x.ckpt8"
    ckpt8.compress(source, target, budget=budget)
    stated = inspect_container(target)["steps"]
    original, restored = torch.load(source, weights_only=True), ckpt8.load(target)
    worked_out = parts_of(original, restored, kind)
    assert {part: stated[part] for part in PARTS} == pytest.approx(
        {part: worked_out[part] for part in PARTS}, rel=2e-3, abs=1e-9
    )
    assert 0.5 * budget < stated["steps"] <= budget
    assert max(stated[part] for part in PARTS[1:]) ** 2 <= 1.35 * budget**2 / 3, "each takes its third"
    drift = expected.AMPLIFIED.get(kind, 1.0) * drift_of(worked_out)
    assert stated["drift"]["mean"] == pytest.approx(drift, rel=5e-3)
    before, after = (
        torch.cat([side["model"][name].double().flatten() for name, w in original["model"].items() if w.dim() > 1])
        for side in (original, restored)
    )
    snr = float(before.square().sum() / (after - before).square().sum())
    assert stated["weight_snr_db"] == pytest.approx(10 * math.log10(snr), abs=1e-3)
    found = ckpt8.verify(target, source)
    assert found.failures == ()
    assert {part: found.steps[part] for part in PARTS} == pytest.approx(
        {part: stated[part] for part in PARTS}, rel=1e-9
    )
    again = inspect_container(target, original=source)["steps"]
    assert again["steps"] == pytest.approx(stated["steps"], rel=1e-9)


def test_a_stated_error_in_steps_that_does_not_hold_is_found(checkpoint, tmp_path):
    source, target = checkpoint("adamw"), tmp_path / "x.ckpt8"
    ckpt8.compress(source, target, preset="archive")
    content = target.read_bytes()
    changes = {
        "step is": lambda steps: steps.update(step=steps["step"] * (1 + 1e-8)),
        "moment2 is": lambda steps: steps.update(moment2=steps["moment2"] * 0.999),
        "its weight is another": lambda steps: steps.update(weight_storage=steps["weight_storage"] + 1),
        "its optimizer is another": lambda steps: steps.update(optimizer=1),
        "of another kind": lambda steps: steps.update(weight="none"),
    }
    for words, change in changes.items():
        metadata, entries, manifest = unpack(content)
        change(manifest["parameters"][0]["steps"])
        target.write_bytes(pack(manifest, entries, metadata))
        [failure] = ckpt8.verify(target, source).failures
        assert failure.startswith(f"{manifest['parameters'][0]['name']} (in steps): ")
        assert words in failure


@pytest.mark.slow
def test_predictions_come_true(checkpoint, tmp_path):
    source, target = checkpoint("adamw"), tmp_path / "x.ckpt8"
    facts = inspect_checkpoint(source)
    predicted = facts["predicted"]
    assert list(predicted) == ["flash", "compact", "archive", "lossless", "budget 0.3", "budget 2", "budget 5"]
    assert facts["unpredicted"] == {}
    for name, each in predicted.items():
        given = {"budget": float(name.split()[1])} if name.startswith("budget") else {"preset": name}
        ckpt8.compress(source, target, force=True, **given)
        assert abs(each["bytes"] - target.stat().st_size) < 0.01 * target.stat().st_size + 3000, name
        worked_out = parts_of(torch.load(source, weights_only=True), ckpt8.load(target), "adamw")
        assert each["steps"] == pytest.approx(worked_out["steps"], rel=0.02), name
        assert each["drift"]["mean"] == pytest.approx(drift_of(worked_out), rel=0.05)
    assert predicted["lossless"]["steps"] == predicted["lossless"]["drift"]["mean"] == 0


@pytest.mark.slow
def test_no_prediction_exceeds_its_budget(inputs, tmp_path):
    """Where a sample says so, such as of what was salvaged with NaN in one weight, the file is encoded again."""
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "run.ckpt8", preset="archive")
    tree = ckpt8.load(tmp_path / "run.ckpt8")
    tree["model"]["transformer.wte.weight"].fill_(math.nan)
    torch.save(tree, tmp_path / "run.pt")
    for name, each in inspect_checkpoint(tmp_path / "run.pt")["predicted"].items():
        assert not name.startswith("budget") or each["steps"] < float(name.split()[1]) * (1 + 1e-9), name


def test_weights_whose_size_caps_their_lattice_are_counted(checkpoint, run_command, tmp_path):
    """Where second moments of one layer are tiny, its steps would be larger than its weights."""
    tree = torch.load(checkpoint("adamw"), weights_only=True)
    state = tree["optimizer"]["state"][0]
    state["exp_avg_sq"] *= 1e-12
    state["exp_avg"] *= 1e-6
    torch.save(tree, tmp_path / "x.pt")
    code, out, _ = run_command("compress", tmp_path / "x.pt", "--preset", "archive", "--json")
    facts = json.loads(out)["steps"]
    assert code == 0
    assert facts["capped"] == {"elements": 96 * 160, "of": 2 * 96 * 160}
    assert "50.0 % of the weights have the largest step" in run_command("inspect", "-v", tmp_path / "x.ckpt8")[1]


def test_a_rate_of_zero_counts_a_tenth_of_the_initial_one_and_the_report_says_so(checkpoint, run_command, tmp_path):
    tree = torch.load(checkpoint("adamw"), weights_only=True)
    tree["optimizer"]["param_groups"][0] |= {"lr": 0.0, "initial_lr": 1e-2}
    torch.save(tree, tmp_path / "x.pt")
    code, out, _ = run_command("compress", "-v", tmp_path / "x.pt", "--preset", "archive")
    assert code == 0
    assert "learning rate 0.001 for 4 parameters, a tenth of the initial rate: the file has 0" in " ".join(out.split())
    facts = inspect_container(tmp_path / "x.ckpt8")["steps"]
    assert facts["rates"] == [{"rate": 1e-3, "stated": 0.0, "parameters": 4}]
    usual = tmp_path / "usual.ckpt8"
    ckpt8.compress(checkpoint("adamw"), usual, preset="archive")
    usual = inspect_container(usual)["steps"]
    assert facts["steps"] == usual["steps"]
    assert facts["drift"]["is_open"]
    assert facts["drift"]["low"] < usual["drift"]["low"]


def test_weights_of_the_lowest_snr_are_listed(checkpoint, run_command, tmp_path):
    run_command("compress", checkpoint("adamw"), "-o", tmp_path / "x.ckpt8", "--budget", 1)
    before, after = torch.load(checkpoint("adamw"))["model"], ckpt8.load(tmp_path / "x.ckpt8")["model"]
    expected = {}
    for name in ("0.weight", "2.weight"):
        error = (after[name].double() - before[name].double()).abs()
        snr = 10 * math.log10(float(before[name].double().square().sum() / error.square().sum()))
        expected[f"model.{name}"] = snr, float(error.max())
    found = inspect_container(tmp_path / "x.ckpt8")["worst"]["lattice"]
    assert [row["snr_db"] for row in found] == sorted(row["snr_db"] for row in found)
    assert {row["name"]: (row["snr_db"], row["max_distance"]) for row in found} == {
        name: pytest.approx(figures, rel=1e-6) for name, figures in expected.items()
    }
    code, out, _ = run_command("inspect", "-v", tmp_path / "x.ckpt8")
    assert code == 0
    assert "lowest SNR of weights" in out


@pytest.mark.slow
def test_every_optimizer_of_a_file_has_figures_of_its_own(checkpoint, run_command, tmp_path):
    """Two networks whose steps differ a hundredfold."""
    one, other = trained(adamw), trained(lambda parameters: adamw(parameters, 1e-5), seed=1)
    tree = {"g": one["model"], "g_optimizer": one["optimizer"], "d": other["model"], "d_optimizer": other["optimizer"]}
    torch.save(tree, tmp_path / "x.pt")
    code, out, _ = run_command("compress", tmp_path / "x.pt", "--budget", 1, "--json")
    assert code == 0
    facts = json.loads(out)["steps"]
    assert [each["parameters"] for each in facts["optimizers"]] == [4, 4]
    loaded = ckpt8.load(tmp_path / "x.ckpt8")
    for each, (model, optimizer) in zip(facts["optimizers"], (("g", one), ("d", other)), strict=True):
        restored = {"model": loaded[model], "optimizer": loaded[f"{model}_optimizer"]}
        assert each["steps"] == pytest.approx(parts_of(optimizer, restored, "adamw")["steps"], rel=2e-3)
    shown = run_command("verify", "-v", tmp_path / "x.ckpt8", "--against", tmp_path / "x.pt")[1]
    assert shown.count("4 parameters") == 2
    assert "expected loss drift" in shown
