"""Reports lead with the verdict: sizes, what resuming will notice, what is wrong; other figures come with ``-v``."""

from __future__ import annotations

import json
import pathlib
import random
import re
import shlex

import numpy as np
import pytest
import torch

from ckpt8.container.steps import error_in_words

FIGURES = ("NMSE", "SNR", "ULP", "|Δu|", "learning rate", "1st moments ")
"""What only ``-v`` shows."""


@pytest.fixture
def source(inputs, tmp_path, monkeypatch):
    """A checkpoint of a GPT in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.pt").write_bytes((inputs / "gpt_adamw.pt").read_bytes())
    return pathlib.Path("run.pt")


@pytest.mark.by_default("flash")
@pytest.mark.parametrize("setting", ["flash", "archive", "lossless"])
def test_compress_prints_a_verdict_and_a_command_that_runs(setting, source, run_command):
    out = run_command.shown("compress", source, "--preset", setting)
    facts = json.loads(run_command.shown("inspect", "run.ckpt8", "--json"))
    path, sizes, error, then = out.splitlines()
    assert path == "run.ckpt8"
    assert sizes.startswith(f"3.99 MB -> {facts['stored_bytes'] / 1e6:.2f} MB" if setting == "flash" else "3.99 MB -> ")
    assert f"{source.stat().st_size / pathlib.Path(path).stat().st_size:.2f}x, preset {setting}, in " in sizes
    if setting == "lossless":
        assert error == "error: none, every tensor comes back bit for bit"
    else:
        assert error.startswith(f"error: {facts['steps']['steps']:.3g} steps of the optimizer, expected loss drift ")
        assert error == f"error: {error_in_words(facts['steps'])}"
    assert then == "next: ckpt8 verify run.ckpt8 --against run.pt"
    held = " ".join(run_command.shown(*shlex.split(then)[2:]).split())
    assert "against run.pt: every lossless tensor is equal" in held
    whole = run_command.shown("compress", "-v", source, "--preset", setting, "--force")
    assert not any(figure in out for figure in FIGURES)
    assert setting == "lossless" or all(figure in whole for figure in ("NMSE", "SNR", "|Δu|"))
    assert re.search(r"^compressed in \d+\.\d\d s, \d+\.\d\d [kM]B/s$", whole, re.MULTILINE)


def test_a_source_that_goes_is_not_named_in_the_next_command(source, run_command):
    out = run_command.shown("compress", source, "--remove")
    assert "next: ckpt8 restore run.ckpt8\n" in out
    assert not source.exists()
    assert run_command("restore", "run.ckpt8")[0] == 0


def test_what_nobody_should_miss_needs_no_option(source, run_command):
    """A NaN, and a tensor whose name says nothing."""
    tree = torch.load(source, weights_only=True)
    weight = tree["model"]["transformer.wte.weight"]
    weight[3, 4] = float("nan")
    tree["mystery"] = {"table": torch.randn(300, 300)}
    torch.save(tree, source)
    for command in (("compress", source, "--preset", "archive"), ("inspect", "run.ckpt8")):
        out = " ".join(run_command.shown(*command).split())
        assert " model.transformer.wte.weight is kept lossless: its weights hold NaN or Inf" in out
        assert " 1 tensor of unknown role, 360.00 kB, kept lossless; to compress: --rule 'mystery.*=split24'" in out
        assert not any(figure in out for figure in FIGURES[:4])
    assert "--rule 'mystery.*=split24'" in run_command.shown("inspect", source)


def test_a_container_has_its_sizes_by_role_and_small_tensors_in_one_row(source, run_command):
    run_command.shown("compress", source)
    out, whole = (run_command.shown("inspect", *options, "run.ckpt8") for options in ((), ("-v",)))
    assert out.splitlines()[:2] == ["run.ckpt8", whole.splitlines()[1]]
    assert "-> " in whole.splitlines()[1]
    assert "/1" not in out
    assert {"companded8/1(Q=255)", "split24/1", "lossless/1"} <= set(whole.split())
    rows = re.findall(r"^(small tensors|weights|\S+ moments) +(\S+(?: \S+)?) +[\d.]+ [kM]?B", out, re.MULTILINE)
    assert [name for name, _ in rows] == ["weights", "first moments", "second moments", "small tensors"]
    assert [codec.strip() for _, codec in rows] == ["split24", "companded8", "companded8", "kept exactly"]
    assert "\n\nRed flags: not checked: " in out


def test_a_checkpoint_has_its_predictions_first_and_real_flags_alone(source, run_command):
    out = run_command.shown("inspect", source)
    places = [
        out.index(words) for words in ("--preset flash", "--budget 5", "optimizer state of", "by role", "by layer")
    ]
    assert places == sorted(places)
    assert "\n\nRed flags: none in " in out
    assert "fp16" not in out
    remarks = {flag["kind"] for flag in json.loads(run_command.shown("inspect", source, "--json"))["flags"]}
    assert remarks == {"moment2_fp16_zero", "fp16_scales"}
    ready = run_command.shown("inspect", source, "--readiness")
    assert "second moments that fp16 would flush to zero" in ready
    assert "moments that FlashOptim's fp16 scales would lose" in ready


def test_random_states_are_no_red_flag_and_other_classes_are(tmp_path, monkeypatch, run_command):
    monkeypatch.chdir(tmp_path)
    source = pathlib.Path("run.pt")
    tree = {"model": {"weight": torch.randn(64, 64)}}
    tree["rng"] = [torch.get_rng_state(), np.random.get_state(), random.getstate(), np.float64(3.0)]
    for value, flags in ((None, []), (pathlib.PurePosixPath("a"), ["pathlib.PurePosixPath"])):
        torch.save({**tree, "more": value}, source)
        run_command.shown("compress", source, "--force")
        for path in (source, "run.ckpt8"):
            found = json.loads(run_command.shown("inspect", path, "--json"))["flags"]
            names = [flag["globals"] for flag in found if flag["kind"] == "foreign_globals"]
            assert [name for each in names for name in each] == flags
    assert "pathlib.PurePosixPath" in run_command.shown("inspect", source)


@pytest.mark.parametrize("width", [60, 80])
def test_lines_fit_and_no_number_is_parted_from_its_unit(width, inputs, source, run_command):
    source.write_bytes((inputs / "crc_off.pt").read_bytes())  # the smallest with moments
    run_command("compress", source, "--budget", 5, columns=width)
    outputs = [
        run_command.shown("inspect", *options, path)
        for options in ((), ("-v",), ("--readiness",))
        for path in (source, "run.ckpt8")
    ]
    outputs += [run_command.shown("verify", "-v", "run.ckpt8", "--against", source)]
    outputs += [run_command("diff", source, "run.ckpt8")[1]]
    for out in outputs:
        assert max(map(len, out.splitlines())) <= width
        for line, after in zip(out.splitlines(), out.splitlines()[1:], strict=False):
            cut = re.search(r"\d$", line) and re.match(r" *(%|dB|[kMG]?B|steps)(\s|[,;.)]|$)", after)
            assert not cut, (line, after)
