"""What holds for every format in the table of writers, from every form that a source can have; and the command."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from converting_kit import listing

import ckpt8
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.converting.writers import SUFFIXES, WRITERS, choose_format
from ckpt8.core.errors import Ckpt8Error, InputError, OutputError, UsageError

FORMATS = list(WRITERS)
DIRECTORIES = {"trainer", "dcp", "compressed-tensors"}
FORMS = ["zip", "legacy", "directory", "zip flash", "zip lossless", "directory flash", "directory lossless"]


def options(form, to):
    # A directory does not say which of its optimizer's parameters are which.
    if not form.startswith("directory"):
        return {}
    return {"flashoptim": {"dtype": "float32"}, "dcp": {"key": "model"}}.get(to, {})


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_every_source_becomes_every_format(form, to, forms, tmp_path):
    source, target = forms[form], tmp_path / "out"
    if to == "ckpt8" and " " in form:  # a container is not made one again
        with pytest.raises(InputError, match="already a"):
            ckpt8.convert(source, target, to=to)
        assert not any(tmp_path.iterdir())
        return
    before = listing(source.parent)
    done = []
    report = ckpt8.convert(source, target, to=to, progress=done.append, **options(form, to))
    assert listing(source.parent) == before
    assert (report.format, report.target) == (to, str(target))
    assert report.bytes == size_of(target)
    assert report.tensors > 5
    assert json.loads(json.dumps(report.to_json()))["format"] == to
    assert sum(done) == pytest.approx(size_of(source), abs=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert target.is_dir() is (to in DIRECTORIES)


@pytest.mark.parametrize("to", FORMATS)
def test_an_output_has_a_folder_and_is_replaced_by_force_alone(to, forms, tmp_path):
    target = tmp_path / "out"
    with pytest.raises(OutputError):
        ckpt8.convert(forms["zip"], tmp_path / "nowhere" / "out", to=to)
    ckpt8.convert(forms["zip"], target, to=to)
    first = listing(tmp_path)
    with pytest.raises(OutputError, match="force=True"):
        ckpt8.convert(forms["zip"], target, to=to)
    assert listing(tmp_path) == first
    ckpt8.convert(forms["zip"], target, to=to, force=True)
    assert listing(tmp_path) == first


@pytest.mark.parametrize("to", FORMATS)
def test_the_source_is_never_the_target(to, forms, tmp_path):
    file = tmp_path / "run.pt"
    shutil.copy(forms["zip"], file)
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(forms["directory"], folder)
    before = listing(tmp_path)
    for source, target in ((file, file), (folder, folder), (folder, folder / "out"), (folder, tmp_path)):
        with pytest.raises(OutputError):
            ckpt8.convert(source, target, to=to, force=True, **options("directory", to))
    assert listing(tmp_path) == before


@pytest.mark.parametrize("to", [name for name in FORMATS if name != "ckpt8"])
@pytest.mark.parametrize("form", ["zip flash", "directory flash"])
def test_damage_leaves_nothing_behind(form, to, forms, tmp_path):
    data = bytearray(forms[form].read_bytes())
    (length,) = (int.from_bytes(data[:8], "little"),)
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name.endswith(("up.weight/mantissa", ":mantissa")))
    data[8 + length + header[name]["data_offsets"][0] + 9] ^= 1
    source = tmp_path / "damaged.ckpt8"
    source.write_bytes(data)
    with pytest.raises(InputError, match="checksum"):
        ckpt8.convert(source, tmp_path / "out", to=to, **options(form, to))
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.ckpt8"]


def test_the_format_follows_from_the_name(tmp_path):
    for suffix, to in SUFFIXES.items():
        assert choose_format(tmp_path / f"x{suffix}", None, is_directory=False) == to
    for name in FORMATS:
        assert choose_format(tmp_path / "x.pt", name, is_directory=False) == name
    for name, directory in (("x.xyz", False), ("x", False), ("x.pt", True)):
        with pytest.raises(UsageError, match="choose one with --to"):
            choose_format(tmp_path / name, None, is_directory=directory)
    with pytest.raises(UsageError, match="expected one of torch"):
        choose_format(tmp_path / "x.pt", "onnx", is_directory=False)


def test_element_types_that_are_not_offered(forms, tmp_path):
    for dtype in ("int4", "float64", "bf17"):
        with pytest.raises(UsageError, match="expected one of float32"):
            ckpt8.convert(forms["zip"], tmp_path / "x.pt", dtype=dtype)


def test_a_container_takes_no_settings(forms, tmp_path):
    for given in ({"dtype": "float32"}, {"key": "model"}, {"member": "x"}):
        with pytest.raises(UsageError):
            ckpt8.convert(forms["zip"], tmp_path / "x.ckpt8", **given)


@pytest.mark.parametrize("to", FORMATS)
def test_what_holds_no_checkpoint(to, tmp_path):
    (tmp_path / "text.pt").write_text("learning_rate: 0.1\n" * 50)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("text.pt", "folder", "empty", "missing.pt"):
        with pytest.raises(Ckpt8Error) as caught:
            ckpt8.convert(tmp_path / name, tmp_path / "out", to=to)
        assert caught.value.exit_code == 3
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_json(run_command, forms, tmp_path):
    options = ("--to", "trainer", "--dtype", "bf16", "--json")
    code, out, err = run_command("convert", forms["zip"], f"{tmp_path}/out/", *options)
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert (facts["casts"], facts["aliases"]) == ({"float32 -> bfloat16": 7}, ["lm_head.weight"])
    assert (facts["format"], facts["tensors"] > 10) == ("trainer", True)
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
        assert (code, out, err.count("\n")) == (expected, "", 1), arguments
        assert err.startswith("ckpt8: ")
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
