"""``bench`` on small checkpoints: every row is there, adds up and is about what it says; nothing stays behind.

Jobs run in this process, but for the tests of processes. No test looks at how long anything took.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import zstandard
from rich.console import Console

import ckpt8
from ckpt8.cli.bench import files, library, probe
from ckpt8.cli.bench import run as sizes
from ckpt8.cli.bench.library import COPY, IN_MEMORY, survey
from ckpt8.cli.bench.probe import DCP, START, ZIPNN, SessionPeak, run_child
from ckpt8.cli.bench.run import MODULES, bench, show_bench
from ckpt8.core.errors import Ckpt8Error, InputError, OutputError, UsageError
from ckpt8.core.public import parse_size

MEASURED = [name for name in MODULES if name != ZIPNN]


def in_process(module, job, watch):
    """As the run of ``run_child``, here: what crosses to a process and back is JSON."""
    result = json.loads(json.dumps(probe.measured(module, json.loads(json.dumps(job)))))
    return result | ({"session_pss": 1, "processes": 1} if watch else {})


def content(folder):
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def _without_peers(monkeypatch):
    """Packages that are installed here and not there make no difference."""
    monkeypatch.setattr(sizes, "find_spec", lambda _: None)


@pytest.fixture
def scratch(tmp_path):
    """A folder that is empty afterwards."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def folder(inputs, tmp_path):
    """What Trainer saves: a directory."""
    return shutil.copytree(inputs / "trainer-adamw", tmp_path / "checkpoint-200")


# What the operations do


def job_of(name, source, packed, target, threads=2):
    """What a process is given to do; it keeps what it writes."""
    files = {"source": asdict(survey(source)), "container": str(packed), "target": str(target)}
    return {**files, "name": name, "threads": threads, "keep": True}


def done(name, source, packed, target):
    """Run one operation."""
    return in_process(MODULES[name], job_of(name, source, packed, target), False)


def test_copies_and_restored_files_are_the_files(folder, tmp_path):
    packed = tmp_path / "packed.ckpt8"
    ckpt8.compress(folder, packed, preset="lossless")
    for name in ("cp", "restore"):
        result = done(name, folder, packed, tmp_path / name)
        assert content(tmp_path / name) == content(folder)
        assert result["output_bytes"] == sum(map(len, content(folder).values()))
        assert result["peak_rss"] > 1 << 20


@pytest.mark.parametrize("name", ["zstd -1", "zstd -3"])
def test_zstd_holds_all_files_one_after_another(name, folder, tmp_path):
    result = done(name, folder, tmp_path, tmp_path / "out")
    stored = (tmp_path / "out").read_bytes()
    assert result["output_bytes"] == len(stored)
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(stored), read_across_frames=True)
    files = content(folder)
    assert reader.read() == b"".join(files[path] for path in sorted(files))


def test_the_smaller_presets_and_saves_are_what_ckpt8_and_torch_write(inputs, tmp_path):
    source = inputs / "crc_off.pt"
    for name, options in {
        "compress": {},
        "compress --no-stats": {"stats": False},
        "compress --preset compact": {"preset": "compact"},
        "compress --preset archive": {"preset": "archive"},
    }.items():
        ckpt8.compress(source, tmp_path / "expected", force=True, **options)
        result = done(name, source, tmp_path, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()
        assert result["output_bytes"] == (tmp_path / "expected").stat().st_size
        (tmp_path / "out").unlink()
    tree = torch.load(source, weights_only=True)
    done("torch.save", source, tmp_path, tmp_path / "torch.pt")
    weights = torch.load(tmp_path / "torch.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in tree["model"].items())
    for name in ("save", "save in the background"):
        done(name, source, tmp_path, tmp_path / "own.ckpt8")
        assert ckpt8.load(tmp_path / "own.ckpt8").keys() == tree.keys()
        (tmp_path / "own.ckpt8").unlink()


def test_both_loads_are_given_the_same(folder, tmp_path, monkeypatch):
    ckpt8.compress(folder, tmp_path / "packed.ckpt8", preset="lossless")
    made = []
    for name in ("load", "torch.load"):
        job = probe.Job(survey(folder), tmp_path / "packed.ckpt8", tmp_path / "out", 1)
        made.append({**files.OPERATIONS, **library.OPERATIONS}[name](job)())
        assert not (tmp_path / "out").exists(), name
    ours, theirs = ({n: t for part in tree for n, t in part.items() if torch.is_tensor(t)} for tree in made)
    assert len(ours) > 5
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_zipnn_gives_back_what_it_was_given(inputs, tmp_path, monkeypatch):
    zipnn = pytest.importorskip("zipnn", reason="ZipNN is optional, and absent")
    source = inputs / "gpt_adamw.pt"
    assert done(ZIPNN, source, tmp_path, tmp_path / "out")["output_bytes"] < source.stat().st_size
    stored = (tmp_path / "out").read_bytes()
    length = int.from_bytes(stored[:8], "little")
    assert len(stored) == 8 + length
    opened = zipnn.ZipNN(bytearray_dtype="float32").decompress(stored[8:])
    assert bytes(opened)[: source.stat().st_size] == source.read_bytes()


@pytest.mark.parametrize(
    ("name", "loaded", "layout"),
    [
        ("gpt_adamw.pt", ("",), "float32"),
        ("gpt_bf16.pt", ("",), "bfloat16"),
        ("legacy.pt", ("",), "float32"),
        ("custom_objects.pt", (), "float32"),
        ("accelerate", ("model.safetensors", "optimizer.bin"), "float32"),
    ],
)
def test_what_can_be_loaded_is_known_beforehand(name, loaded, layout, inputs):
    source = survey(inputs / name)
    assert (source.loaded, source.layout) == (loaded, layout)
    assert source.nbytes == sum(len(data) for data in content(inputs / name).values()) or not source.directory


# The whole


def check_rows(result, nbytes):
    """Figures follow from each other, and the JSON has no NaN."""
    json.dumps(result, allow_nan=False)
    copy = next(row for row in result["results"] if row["operation"] == "cp")
    assert copy["output_bytes"] == nbytes == result["bytes"]
    for row in result["results"]:
        low, high = row["spread"]
        assert low == min(row["times"]) <= row["seconds"] <= max(row["times"]) == high
        assert len(row["times"]) == result["repeat"]
        assert row["bytes_per_second"] == pytest.approx(nbytes / row["seconds"])
        assert row["peak_memory"] == max(row["peak_rss"], row["session_pss"])
        assert row["to_cp"]["seconds"] == pytest.approx(row["seconds"] / copy["seconds"])
        assert row["to_cp"]["peak_memory"] == pytest.approx(row["peak_memory"] / copy["peak_memory"])
        if row["operation"] in (START, "verify", "load", "torch.load", COPY):
            assert row["output_bytes"] is row["ratio"] is row["to_cp"]["output_bytes"] is None
        else:
            assert row["ratio"] == pytest.approx(nbytes / row["output_bytes"])
    assert copy["to_cp"] == {"seconds": 1, "bytes_per_second": 1, "output_bytes": 1, "peak_memory": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "repeat"), [("legacy.pt", 1), ("trainer-adamw", 2)])
def test_a_checkpoint_of_either_kind(name, repeat, inputs, tmp_path, scratch):
    source = inputs / name
    said = []
    result = bench(source, repeat=repeat, threads=1, scratch=scratch, run=in_process, say=said.append)
    nbytes = sum(map(len, content(source).values())) if source.is_dir() else source.stat().st_size
    check_rows(result, nbytes)
    rows = {row["operation"]: row for row in result["results"]}
    assert list(rows) == MEASURED
    assert result["left_out"] == {ZIPNN: "is not installed"}
    assert (result["checkpoint"], result["threads"], result["synthetic"]) == (name, 1, None)
    ckpt8.compress(source, tmp_path / "packed.ckpt8")
    assert rows["compress"]["output_bytes"] == (tmp_path / "packed.ckpt8").stat().st_size
    assert rows["restore"]["output_bytes"] == nbytes
    ours, theirs = rows["load"], rows["torch.load"]
    assert result["load_to_torch"]["seconds"] == pytest.approx(ours["seconds"] / theirs["seconds"])
    assert result["load_to_torch"]["beyond_files"] == ours["peak_memory"] - nbytes
    copy = rows[COPY]["seconds"]
    assert result["blocked_to_copy"] == {
        name: pytest.approx(rows[name]["seconds"] / copy)
        for name in ("save in the background", DCP, "save", "torch.save")
    }
    assert len(said) == 1 + (1 + repeat) * len(MEASURED)


def test_what_torch_does_not_load_is_left_out_with_the_reason(inputs, scratch, monkeypatch):
    others = {name: MODULES[name] for name in ("cp", "compress")}
    monkeypatch.setattr(sizes, "MODULES", others | {name: MODULES[name] for name in IN_MEMORY})
    result = bench(inputs / "custom_objects.pt", repeat=1, scratch=scratch, run=in_process)
    assert {row["operation"] for row in result["results"]} == set(others)
    assert all("weights_only" in result["left_out"][name] for name in IN_MEMORY)
    assert result["load_to_torch"] is result["blocked_to_copy"] is None


@pytest.mark.slow
def test_a_peer_that_fails_is_left_out_and_anything_else_is_an_error(inputs, scratch, monkeypatch):
    monkeypatch.setattr(sizes, "find_spec", lambda _: True)
    bad = [ZIPNN]

    def run(module, job, watch):
        if job.get("name") in bad:
            Path(job["target"]).write_text("half")
            raise Ckpt8Error("was ended by SIGABRT")
        return in_process(module, job, watch)

    result = bench(inputs / "legacy.pt", repeat=1, scratch=scratch, run=run)
    assert result["left_out"] == {ZIPNN: "ZipNN: was ended by SIGABRT"}
    assert [row["operation"] for row in result["results"]] == MEASURED
    bad.append("verify")
    with pytest.raises(Ckpt8Error, match=r"^verify: was ended by SIGABRT$"):
        bench(inputs / "legacy.pt", repeat=1, scratch=scratch, run=run)


def test_a_synthetic_checkpoint_is_measured_and_shown_as_one(scratch, monkeypatch):
    monkeypatch.setattr(sizes, "MODULES", {name: MODULES[name] for name in ("cp", "compress", "load", "torch.load")})
    result = bench(size=2_000_000, repeat=1, scratch=scratch, run=in_process)
    check_rows(result, result["bytes"])
    assert abs(result["bytes"] / 2e6 - 1) < 0.03
    text = io.StringIO()
    show_bench(Console(file=text, width=200, highlight=False), result)
    assert f"{result['synthetic']['parameters']:,} parameters and moments of AdamW, drawn at random" in text.getvalue()
    assert all(f"\n{row['operation']}  " in text.getvalue() for row in result["results"])


@pytest.mark.parametrize("nbytes", [1, 3_000_000])
def test_a_synthetic_checkpoint_is_one_that_torch_could_have_saved(nbytes, tmp_path):
    paths = [tmp_path / name / "run.pt" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        facts = sizes.synthetic(path, nbytes)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert abs(paths[0].stat().st_size - nbytes) < max(8000, 0.03 * nbytes)
    with zipfile.ZipFile(paths[0]) as file:
        assert file.testzip() is None
    tree = torch.load(paths[0], weights_only=True)
    parameters = [torch.nn.Parameter(weight) for weight in tree["model"].values()]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.load_state_dict(tree["optimizer"])
    assert facts["parameters"] == sum(weight.numel() for weight in parameters)
    for weight, state in optimizer.state.items():
        assert (state["step"], state["exp_avg"].shape, state["exp_avg_sq"].shape) == (1000, weight.shape, weight.shape)
        assert (weight.detach().std(), state["exp_avg_sq"].min() > 0) == (pytest.approx(0.02, rel=0.5), True)
        steps = state["exp_avg"] / state["exp_avg_sq"].sqrt()
        assert 0.15 < steps.std() < 0.35


def test_a_folder_that_takes_no_file_ends_a_synthetic_checkpoint(tmp_path):
    with pytest.raises(OutputError, match=r"run\.pt: cannot be written: "):
        sizes.synthetic(tmp_path / "missing" / "run.pt", 10_000)


def test_names_reach_the_terminal_escaped():
    result = {
        "checkpoint": "a\x1b[2K\nb.pt",
        "bytes": 1,
        "threads": 1,
        "repeat": 1,
        "synthetic": None,
        "results": [],
        "left_out": {"torch.load": "a\x1b[2K\nb.pt: is no pickle"},
        "load_to_torch": None,
        "blocked_to_copy": None,
    }
    text = io.StringIO()
    show_bench(Console(file=text, width=200, highlight=False), result)
    assert r"a\x1b[2K\x0ab.pt, 1 B, 1 thread, one round, bytes of" in text.getvalue()
    assert r"torch.load: a\x1b[2K\x0ab.pt: is no pickle" in text.getvalue()
    assert "\x1b" not in text.getvalue()
    show_bench(Console(file=text, width=200, highlight=False), result | {"threads": 2, "repeat": 3})
    assert "2 threads, medians of 3 rounds, bytes of" in text.getvalue()


# What cannot be


def test_sizes_are_read_as_they_are_written():
    sizes = {"1.5GB": 1_500_000_000, "2.5e8": 250_000_000, "8 gib": 8 << 30, "100": 100, "3kB": 3000, "1MiB": 1 << 20}
    assert {text: parse_size(text, "--size") for text in sizes} == sizes
    for text in ("", "GB", "-1", "0", "1.2.3", "nan", "inf", "1e400", "5 parsecs", "1e999GB", "1e"):
        with pytest.raises(UsageError, match="--size"):
            parse_size(text, "--size")


def never(module, job, watch):
    raise AssertionError(module)


def test_room_on_the_disk_is_asked_for_before_anything_starts(inputs, scratch, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    for source in (inputs / "legacy.pt", inputs / "trainer-adamw", None):
        with pytest.raises(OutputError, match=r"--scratch$"):
            bench(source, scratch=scratch, run=never)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("MISSING",), 3),
        (("EMPTY",), 3),
        (("--scratch", "MISSING"), 4),
        (("--scratch", "PLAIN"), 4),
        (("--size", "-5"), 2),
        (("--repeat", "0"), 2),
        (("--device", "tpu"), 2),
    ],
)
def test_one_line_and_an_exit_code(arguments, code, inputs, tmp_path, run_command):
    (tmp_path / "empty").mkdir()
    paths = {"MISSING": tmp_path / "missing", "EMPTY": tmp_path / "empty", "PLAIN": inputs / "legacy.pt"}
    result = run_command("bench", *(paths.get(argument, argument) for argument in arguments))
    assert result[:2] == (code, "")
    assert "Traceback" not in result[2]
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# Processes

posix = pytest.mark.skipif(sys.platform == "win32", reason="sessions of POSIX")


@pytest.mark.slow
@posix
def test_errors_of_a_process_arrive_as_they_are(tmp_path):
    run = run_child(tmp_path)
    source = {"path": str(tmp_path / "none.pt"), "nbytes": 1, "directory": False, "loaded": [], "layout": "float32"}
    job = {"name": "compress", "source": source, "container": "", "target": str(tmp_path / "out"), "threads": 1}
    with pytest.raises(InputError, match=r"^/[^\n]*none\.pt: cannot be read: No such file or directory$"):
        run(MODULES["compress"], job, False)
    with pytest.raises(Ckpt8Error, match="ModuleNotFoundError"):
        run("ckpt8.cli.bench.nothing", {}, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGINT, "ckpt8-bench-*", id="SIGINT at the start"),
        pytest.param(signal.SIGTERM, "ckpt8-bench-*/container.ckpt8", id="SIGTERM later"),
    ],
)
def test_an_interrupt_leaves_neither_files_nor_processes(number, moment, inputs, scratch):
    command = [sys.executable, "-m", "ckpt8", "bench", str(inputs / "gpt_adamw.pt"), "--scratch", str(scratch)]
    with subprocess.Popen(
        [*command, "--repeat", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        deadline = time.monotonic() + 60
        while not list(scratch.glob(moment)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, b"")
    assert b"Traceback" not in err
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(scratch).encode() in _bytes(path)]


def _bytes(path):
    """What a file of the kernel holds, unless its process is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


WITHOUT = "import sys; sys.path.remove(''); "
"""Leaves the working directory, which may hold a ``torch.py``, out of the path, as a console script does."""
BENCH = """
import json, sys
from pathlib import Path
from ckpt8.cli.bench.probe import run_child
run_child(Path.cwd())(sys.argv[1], json.loads(sys.argv[2]), False)
"""


@pytest.fixture
def run(tmp_path):
    """Do a job of a module in a process of ``bench``, from ``tmp_path``."""

    def run(program, module, job):
        done = subprocess.run(
            [sys.executable, "-c", program, module, json.dumps(job)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(ckpt8.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    return run


@pytest.mark.slow
def test_nothing_in_the_working_directory_is_imported(run, inputs, tmp_path):
    for name in ("ckpt8", "torch", "numba", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    run(WITHOUT + BENCH, probe.__name__, job_of(START, inputs / "legacy.pt", "", tmp_path / "out", 1))
    assert not (tmp_path / "ran").exists()


def test_what_the_command_itself_can_import_its_processes_can(run, inputs, tmp_path):
    (tmp_path / "only_here.py").write_text("OPERATIONS = {'it': lambda _: lambda: open('ran', 'w').close()}\n")
    run(BENCH, "only_here", job_of("it", inputs / "legacy.pt", "", tmp_path / "out", 1))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["cp", "zstd -1"])
def test_the_memory_of_others_does_not_count_torch(run, inputs, tmp_path, name):
    program = (
        "import json, sys; from ckpt8.cli.bench.probe import measured; measured(sys.argv[1], json.loads(sys.argv[2]));"
        "assert not {'torch', 'numba', 'numpy'} & sys.modules.keys()"
    )
    run(program, probe.__name__, job_of(name, inputs / "legacy.pt", "", tmp_path / "out", 1))


BEFORE, AFTER = 96 << 20, 48 << 20
PROGRAM = f"""
import os, sys
shared = bytearray(b"a") * {BEFORE}
ends = os.pipe()
if os.fork() == 0:
    own = bytearray(b"b") * {AFTER}
    os.write(ends[1], b"x")
    sys.stdin.read()
    os._exit(0)
os.read(ends[0], 1)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system has no PSS")
def test_shared_pages_count_once_and_the_peak_stays():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        peak = SessionPeak(process.pid)
        assert process.stdout.readline() == b"ready\n"
        peak.sample()
        process.stdin.close()
        process.wait(30)
        peak.sample()
    assert peak.processes == 2
    assert BEFORE + AFTER < peak.nbytes < BEFORE + AFTER + BEFORE // 2
