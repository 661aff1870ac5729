"""The command: one line for every failure, a report, an exit code, and nothing imported before it is needed."""

from __future__ import annotations

import json

from converting_kit import listing


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
