"""The command: one line for every failure, a report, an exit code, and nothing imported before it is needed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import torch
from converting_kit import listing


def test_the_report(run_command, forms, tmp_path):
    target = tmp_path / "model.safetensors"
    code, out, err = run_command("convert", forms["zip flash"], target)
    assert (code, err) == (0, "")
    assert out.startswith(f"{target}: safetensors of 10 tensors, ")
    assert "7 tensors float32 -> bfloat16" in out
    assert "lm_head.weight" in out


def test_json(run_command, forms, tmp_path):
    code, out, err = run_command(
        "convert", forms["zip"], f"{tmp_path}/out/", "--to", "trainer", "--dtype", "bf16", "--json"
    )
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["casts"] == {"float32 -> bfloat16": 7}
    assert facts["aliases"] == ["lm_head.weight"]
    assert facts["format"] == "trainer"
    assert facts["tensors"] > 10
    assert facts["bytes"] > 10_000
    assert facts["seconds"] > 0


def test_exit_codes_and_single_lines(run_command, forms, tmp_path):
    (tmp_path / "there.pt").write_text("x")
    cases = [
        (2, (forms["zip"], tmp_path / "x.xyz")),
        (2, (forms["zip"], tmp_path / "x", "--to", "onnx")),
        (2, (forms["zip"], f"{tmp_path}/new/")),
        (2, (forms["zip"], tmp_path / "x.pt", "--dtype", "int4")),
        (2, (forms["zip"], tmp_path / "x.pt", "--key", "nothing")),
        (2, (forms["directory"], tmp_path / "x.pt", "--member", "nothing")),
        (2, (forms["directory"], tmp_path / "x.pt", "--to", "flashoptim")),
        (3, (tmp_path / "missing.pt", tmp_path / "x.pt")),
        (3, (tmp_path / "there.pt", tmp_path / "x.pt")),
        (4, (forms["zip"], tmp_path / "there.pt")),
        (4, (forms["zip"], tmp_path / "no" / "x.pt")),
        (4, (forms["zip"], forms["zip"], "--force")),
    ]
    before = listing(tmp_path)
    for expected, arguments in cases:
        code, out, err = run_command("convert", *arguments)
        assert (code, out) == (expected, ""), arguments
        assert err.startswith("ckpt8: ")
        assert err.count("\n") == 1
        assert listing(tmp_path) == before


@pytest.mark.slow
def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    torch.save({"model": {f"w{k}": torch.randn(1 << 20) for k in range(40)}}, tmp_path / "run.pt")
    script = (
        "import sys, time, ckpt8\n"
        "def slowly(_):\n    print('writing', flush=True)\n    time.sleep(0.2)\n"
        "import ckpt8.__main__ as command, signal\nsignal.signal(signal.SIGTERM, command._interrupt)\n"
        "ckpt8.convert(sys.argv[1], sys.argv[2], progress=slowly)\n"
    )
    started = [sys.executable, "-c", script, str(tmp_path / "run.pt"), str(tmp_path / "out.pt")]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.iterdir())) == 2
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
