"""``ckpt8 inspect --readiness`` as it is typed: what is shown in wide and narrow terminals, JSON, refusals."""

import json
import re

import pytest
import safetensors.torch
import torch
from rich.cells import cell_len

pytestmark = pytest.mark.usefixtures("without_predictions")


def section(out):
    """What is printed about readiness."""
    return out[out.index("Low-precision readiness") :]


@pytest.fixture
def run(run_command, monkeypatch):
    """Run inspect in a terminal of that many columns."""

    def call(*arguments, columns=200):
        monkeypatch.setenv("COLUMNS", str(columns))
        return run_command("inspect", *arguments)

    return call


@pytest.mark.by_default("lightning.ckpt-200")
@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("name", ["gpt_came.pt", "trainer-adamw", "lightning.ckpt"])
def test_nothing_is_wider_than_the_terminal(run, inputs, name, columns):
    code, out, _ = run(inputs / name, "--readiness", "--tensors", columns=columns)
    assert code == 0
    lines = section(out).splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert "\x1b" not in out
    joined = "".join(lines)
    for label in ("fp16", "bf16", "fp8 e4m3fn", "fp8 e5m2", "int8"):
        assert label in joined
    assert "…" not in joined


def test_what_is_not_finite_is_said(run, tmp_path):
    path = tmp_path / "broken.safetensors"
    weights = {"a.weight": torch.tensor([1.0, float("nan"), float("inf")]), "b.weight": torch.ones(2, dtype=torch.int8)}
    safetensors.torch.save_file(weights, path)
    code, out, _ = run(path, "--readiness")
    assert code == 0
    assert "2 of them are NaN or infinite, and are left out" in section(out)
    assert "left out: 1 tensors of int8" in section(out)
    json.loads(run(path, "--readiness", "--json")[1])


def test_raw_checkpoints_compare_with_readiness_only(run, inputs, tmp_path):
    other = inputs / "gpt_stable_adamw.pt"
    code, out, err = run(inputs / "gpt_came.pt", "--against", other)
    assert (code, out) == (2, "")
    assert "--against compares a .ckpt8 with its original" in err
    code, out, _ = run(inputs / "gpt_came.pt", "--against", other, "--readiness", columns=300)
    assert code == 0
    assert "weights, 28 tensors: SNR" in section(out)


def test_names_cannot_command_the_terminal(run, tmp_path):
    path = tmp_path / "hostile.safetensors"
    safetensors.torch.save_file({"[red]a\x1b[2J.weight": torch.ones(9), "b[/].weight": torch.ones(9) * 1e-30}, path)
    for columns in (40, 200):
        code, out, _ = run(path, "--readiness", "--tensors", columns=columns)
        assert code == 0
        assert "\x1b" not in out
        assert "[red]a" in out


def test_one_line_for_what_does_not_compare(run, inputs):
    code, out, err = run(inputs / "lightning.ckpt", "--against", inputs / "gpt_came.pt", "--readiness")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"ckpt8: [^\n]*no weight or moment[^\n]*\n", err)
    code, out, err = run(inputs / "lightning.ckpt", "--against", inputs / "nothing.pt", "--readiness")
    assert (code, out) == (3, "")
    assert re.fullmatch(r"ckpt8: [^\n]*No such file or directory\n", err)
