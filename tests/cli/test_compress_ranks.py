"""``torchrun -m ckpt8 compress``: ranks share the slices of a plain directory and write a packed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, closing

import pytest
import torch
from dcp_kit import save_in_pieces
from disk_kit import flip_bit
from typer.testing import CliRunner

import ckpt8
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.cli.app import app
from ckpt8.core.errors import InputError, OutputError, UsageError
from ckpt8.integrations.dcp import Ckpt8StorageWriter
from ckpt8.integrations.dcp.sharing import SharingPlanner, share_of

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, WIDTH, LAYERS = 30, 40, 7


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Weights and moments in three boxes of rows each, scalars, and values that are no tensors."""
    boxes = [((0, 0), (10, WIDTH)), ((10, 0), (10, WIDTH)), ((20, 0), (10, WIDTH))]
    tensors, others = {}, {"epoch": 3, "note": "half way"}
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        name = f"layers.{layer}.weight"
        tensors[f"model.{name}"] = torch.randn(ROWS, WIDTH, generator=generator), boxes
        tensors[f"optimizer.state.{name}.exp_avg"] = torch.randn(ROWS, WIDTH, generator=generator), boxes
        tensors[f"optimizer.state.{name}.exp_avg_sq"] = torch.rand(ROWS, WIDTH, generator=generator), boxes
        tensors[f"optimizer.state.{name}.step"] = torch.tensor(5.0), [((), ())]
    return save_in_pieces(tensors, tmp_path_factory.mktemp("plain") / "run", others)


def call(*arguments, **environment):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", **environment})


@pytest.mark.slow
def test_torchrun(plain, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ckpt8", "compress", str(plain), "-o", str(tmp_path / "out"), "--preset", "lossless"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("rank 0 of 2: ") for line in lines) == 1
    assert sum(line.startswith("rank 1 of 2: ") for line in lines) == 1
    assert lines.count(str(tmp_path / "out")) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "__0_0.ckpt8",
        "__1_0.ckpt8",
        "ckpt8-dcp.json",
    ]
    assert ckpt8.diff(tmp_path / "out", plain).identical


def test_one_rank_writes_a_directory_of_one_file(plain, tmp_path):
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    done = call("compress", plain, "-o", tmp_path / "out", "--json", **rank)
    facts = json.loads(done.output)
    assert (facts["ranks"], facts["left_out"]) == ({"files": 1, "strays": []}, [])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["__0_0.ckpt8", "ckpt8-dcp.json"]
    assert ckpt8.verify(tmp_path / "out", plain).failures == ()
    again = call("compress", plain, "-o", tmp_path / "out", **rank)
    assert isinstance(again.exception, OutputError)
    assert call("compress", plain, "-o", tmp_path / "out", "--force", "--preset", "lossless", **rank).exit_code == 0
    assert ckpt8.diff(tmp_path / "out", plain).identical


@pytest.mark.parametrize("world", [1, 2, 3, 5, 40])
def test_shares_are_whole_balanced_and_keep_a_slice_together(plain, world):
    with open_source(plain, containers=False) as source:
        home = next(member.home for member in source.opened if isinstance(member, DcpMember))
        shares = [share_of(home, rank, world) for rank in range(world)]
        pieces = [piece for share in shares for piece in share.items]
        assert sorted(map(id, pieces)) == sorted(map(id, home.metadata.slices))
        of = {(piece.name, piece.place): rank for rank, share in enumerate(shares) for piece in share.items}
        for layer in range(LAYERS):
            for start in (0, 10, 20):
                place = (start, 0), (10, WIDTH)
                names = [f"optimizer.state.layers.{layer}.weight.{key}" for key in ("exp_avg", "exp_avg_sq")]
                ranks = {of[name, place] for name in (f"model.layers.{layer}.weight", *names)}
                assert len(ranks) == 1
        group = max(piece.length for piece in pieces) * 5
        loads = [sum(piece.length for piece in share.items) for share in shares]
        assert [share.size for share in shares] == loads
        assert max(loads) <= sum(loads) / world + group


@pytest.mark.parametrize("world", [1, 3])
def test_a_rank_opens_its_share_and_numbers_alone(plain, world, monkeypatch):
    opened = []
    open_slice = DcpCheckpoint._open_slice
    monkeypatch.setattr(DcpCheckpoint, "_open_slice", lambda *args: (opened.append(args[1]), open_slice(*args))[1])
    for rank in range(world):
        opened.clear()
        with closing(SharingPlanner(plain, rank, world)) as planner:
            planner.set_up_planner({})
            names = {(each.name, each.place) for each in planner.share.items if each.place is not None}
            steps = {(f"optimizer.state.layers.{layer}.weight.step", ((), ())) for layer in range(LAYERS)}
            assert {(each.name, each.place) for each in opened} == names | steps
            assert all(planner.state_dict[name] == 5 for name, _ in steps)
            for item in planner.create_local_plan().items:
                assert planner.resolve_data(item) is not None


def came(tmp_path):
    """Two parameters of CAME in three boxes of rows each; averages over rows are whole."""
    generator = torch.Generator().manual_seed(1)
    starts, height, width = (0, 100, 200), 100, 50
    tensors, names = {}, ("0.weight", "1.weight")
    for name in names:
        rows = [((start, 0), (height, width)) for start in starts]
        tensors[f"model.{name}"] = torch.randn(300, width, generator=generator), rows
        tensors[f"optimizer.state.{name}.exp_avg"] = torch.randn(300, width, generator=generator), rows
        for key in ("exp_avg_sq", "exp_avg_res"):
            squares = torch.rand(300, width, generator=generator)
            kept = [((start,), (height,)) for start in starts]
            tensors[f"optimizer.state.{name}.{key}_row"] = squares.mean(1), kept
            tensors[f"optimizer.state.{name}.{key}_col"] = squares.mean(0), [((0,), (width,))]
    others = {f"optimizer.state.{name}.{key}": 5.0 for name in names for key in ("step", "RMS")}
    group = {"lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "eps": (1e-30, 1e-16), "clip_threshold": 1.0}
    others |= {f"optimizer.param_groups.{name}.{key}": value for name in names for key, value in group.items()}
    return save_in_pieces(tensors, tmp_path / "plain", others)


def test_ranks_have_the_averages_that_their_slices_depend_on(tmp_path):
    source, world = came(tmp_path), 3
    planners = [SharingPlanner(source, rank, world) for rank in range(world)]
    with ExitStack() as stack:
        for planner in planners:
            stack.callback(planner.close)
            planner.set_up_planner({})
        plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
        writer = Ckpt8StorageWriter(tmp_path / "packed", preset="archive")
        plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        results = [writer.write_data(plan, planner).value() for plan, planner in zip(plans, planners, strict=True)]
    assert [each[0].storage_data.unspent for each in results] == [{}, {}, {}]
    writer.finish(metadata, results)
    assert ckpt8.verify(tmp_path / "packed", source).failures == ()


@pytest.mark.parametrize(
    ("arguments", "rank", "message"),
    [
        ("", "1", "2 ranks write a directory"),
        ("-o x.ckpt8", "1", "2 ranks write a directory"),
        ("-o x --device cuda", "1", "--device is not for ranks"),
        ("-o x --base auto", "1", "--base is not for ranks"),
        ("-o x --max-update-error 1", "1", "--max-update-error is not for ranks"),
        ("-o x --frozen-from x.ckpt8", "1", "--frozen-from is not for ranks"),
        ("-o x --remove", "1", "--remove is not for ranks"),
        ("-o x", "2", "start the ranks with torchrun"),
        ("-o x", "x", "start the ranks with torchrun"),
    ],
)
def test_what_ranks_do_not_take(plain, tmp_path, monkeypatch, arguments, rank, message):
    monkeypatch.chdir(tmp_path)
    done = call("compress", plain, *arguments.split(), RANK=rank, WORLD_SIZE="2")
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_damage_leaves_nothing(plain, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in plain.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip_bit(next(copy.glob("*.distcp")))
    done = call("compress", copy, "-o", tmp_path / "out", RANK="0", WORLD_SIZE="1")
    assert isinstance(done.exception, InputError)
    assert "is damaged" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_without_ranks_or_around_another_source_a_job_becomes_one_file(plain, tmp_path):
    assert call("compress", plain, "-o", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out").is_file()
    torch.save({"w": torch.ones(3)}, tmp_path / "run.pt")
    assert call("compress", tmp_path / "run.pt", RANK="0", WORLD_SIZE="2").exit_code == 0
    assert (tmp_path / "run.ckpt8").is_file()
