"""The command: exit codes, one line for what cannot be read, tables that fit the terminal, one JSON object."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from diff_kit import saved, trainer_directory
from disk_kit import flip_bit

import ckpt8


@pytest.fixture
def shown(run_command, monkeypatch):
    """What the command prints on a terminal of so many columns: (exit code, stdout, stderr)."""

    def call(*arguments, columns=120):
        monkeypatch.setenv("COLUMNS", str(columns))
        return run_command("diff", *arguments)

    return call


def assert_refused(result, *said):
    code, out, err = result
    assert (code, out) == (3, "")
    assert re.fullmatch(r"ckpt8: [^\n]+\n", err)
    assert all(each in err for each in said)


def test_settings_and_steps_are_told(shown, tmp_path, loaded):
    paths = [trainer_directory(tmp_path / f"checkpoint-{k}", tree, k) for k, tree in zip((3, 4), loaded, strict=True)]
    out = shown(*paths)[1]
    assert re.search(r"trainer_state\.json:global_step +3 +4 ", out)
    assert re.search(r"optimizer\.pt:state\.\*\.step \(\d+ of them\) +3 +4 ", out)
    lr = [f"{tree['optimizer']['param_groups'][0]['lr']:.6g}" for tree in loaded]
    assert re.search(rf"optimizer\.pt:param_groups\.\*\.lr \(2 of them\) +{lr[0]} +{lr[1]}\b", out)


def test_structure_and_what_is_not_finite_is_told(shown, tmp_path):
    a = {"model": {"w": torch.ones(3, 4), "only.here": torch.ones(5), "v": torch.ones(2)}}
    b = {"model": {"w": torch.ones(4, 3), "v": torch.tensor([1.0, float("nan")]), "\x1b[2J": torch.ones(1)}}
    out = shown(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))[1]
    assert "  model.only.here  float32 5\n" in out
    assert "  model.\\x1b[2J  float32 1\n" in out
    assert "  model.w  float32 3x4 -> float32 4x3\n" in out
    assert "  model.v  A: 0 NaN, 0 Inf; B: 1 NaN, 0 Inf\n" in out
    assert "\x1b" not in out


ODD = {
    "nan": (math.nan, 1.0, "nan", 1.0),
    "infinite": (math.inf, -math.inf, "inf", "-inf"),
    "close": (0.1, math.nextafter(0.1, 1), 0.1, math.nextafter(0.1, 1)),
    "many digits": (10**400, 10**401, *(f"a number of {(10**n).bit_length():,} bits" for n in (400, 401))),
    "beyond 64 bits": (2**63, 2**64, str(2**63), str(2**64)),
    "complex": (1 + 2j, 1 + 3j, "(1+2j)", "(1+3j)"),
    "text": ("a\x1b[2J\n", "b" * 5000, "a\x1b[2J\n", "b" * 1000 + "…"),
    "bytes": (bytes(20), bytes(21), "20 bytes", "21 bytes"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_json_and_text(shown, tmp_path, name):
    a, b, *told = ODD[name]
    paths = saved(tmp_path / "a.pt", {"x": a}), saved(tmp_path / "b.pt", {"x": b})
    codes, outputs, _ = zip(shown(*paths, "--json"), shown(*paths), strict=True)
    assert codes == (1, 1)
    assert json.loads(outputs[0])["values"]["changed"] == [{"name": "x", "a": told[0], "b": told[1]}]
    out = outputs[1]
    first, second = re.search(r"^x  +(\S.*?)  +(\S.*?) *$", out, re.MULTILINE).groups()
    assert first != second
    assert "\x1b" not in out


def test_what_cannot_be_read_is_one_line(shown, tmp_path, steps):
    good = steps[0]
    for folder in ("empty", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    (tmp_path / "text.pt").write_text("learning_rate: 0.1\n" * 100)
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-5000])
    for name in ("missing.pt", "text.pt", "empty", "other", "cut.pt"):
        bad = tmp_path / name
        assert_refused(shown(good, bad), name)
        code, out, err = shown(bad, good, "--json")
        assert json.loads(out) == {"schema": 1, "error": err.strip().removeprefix("ckpt8: "), "exit_code": 3}
        assert_refused((code, "", err), name)
    assert shown(good)[0] == 2
    # Pieces of ranks are not put together.
    folder = tmp_path / "zero"
    folder.mkdir()
    saved(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": {"x": torch.ones(3)}})
    assert_refused(shown(good, folder), "universal")
    assert shown(folder, folder)[0] == 0


def test_a_bit_that_flipped_is_found(shown, tmp_path, steps, loaded):
    bits = loaded[0]["model"]["transformer.wpe.weight"].flatten().view(torch.uint8).numpy().tobytes()
    damaged = Path(shutil.copy(steps[0], tmp_path / "damaged.pt"))
    flip_bit(damaged, damaged.read_bytes().index(bits) + 17)
    assert_refused(shown(steps[0], damaged), "damaged.pt", "model.transformer.wpe.weight", "checksum")
    packed = tmp_path / "run.ckpt8"
    ckpt8.compress(steps[0], packed)
    flip_bit(packed)
    assert_refused(shown(steps[0], packed), "run.ckpt8", "checksum")


@pytest.mark.slow
def test_hostile_files_are_read_or_refused_in_one_line(shown, inputs):
    hostile = [path for path in (inputs.parent / "hostile").iterdir() if path.suffix != ".md"]
    assert len(hostile) > 20
    codes = set()
    for path in sorted(hostile):
        result = shown(path, path)
        codes.add(result[0])
        if result[0]:
            assert_refused(result, path.name)
    assert codes == {0, 3}


@pytest.mark.slow
def test_what_is_held_ten_thousand_times_is_looked_at_once(shown, tmp_path):
    paths = []
    for k in range(2):
        numbers, letters = list(range(k, 10_000)), set(map(str, range(10_000)))
        tree = {"a": [numbers, None, *[[numbers, letters]] * 3, *([numbers] * 10_000), *([letters] * 10_000)]}
        tree["itself"] = tree
        paths.append(saved(tmp_path / f"{k}.pt", tree))
    code, out, err = shown(*paths)
    assert (code, err) == (1, "")
    assert "other values: 10,002 of 20,004 differ" in out
