"""A run in so much room: plans, what becomes of real checkpoints, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from chain_command_kit import age, make_run
from disk_kit import flip_bit, longest_file
from faults_kit import INPUTS, digest
from typer.testing import CliRunner

import ckpt8
from ckpt8.chaining import jobs
from ckpt8.chaining import thin as thinning
from ckpt8.cli.app import app
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, InputError, OutputError, UsageError


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, 5, width=128)
    return folder


@pytest.fixture
def run(originals, tmp_path):
    return shutil.copytree(originals, tmp_path / "run")


def taken(folder):
    """The bytes of all files, those with several names once."""
    files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sum(files.values())


def look(folder):
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def steps_of(folder):
    return [record.step for record in ckpt8.runs(folder)]


def check_kept(folder, originals, done):
    """Each that stays is sound, comes back as far as it states, and holds the step that its name says."""
    for record in done:
        path = folder / record.name
        container = path if path.exists() else path.with_suffix(".ckpt8")
        if record.becomes == "gone":
            assert not path.exists()
            assert not path.with_suffix(".ckpt8").exists()
            continue
        original = originals / f"step-{record.step}.pt"
        assert ckpt8.load(container)["step"] == record.step
        if container.suffix == ".ckpt8" and not record.twice:
            assert ckpt8.verify(container, original).failures == ()
        assert container.stat().st_size == record.then
    assert done.then == taken(folder)


# Rooms


@pytest.mark.parametrize(
    "share", [0.5, pytest.param(0.2, marks=pytest.mark.slow), pytest.param(0.1, marks=pytest.mark.slow), 0.06]
)
def test_a_run_fits_the_room_as_planned(share, run, originals):
    before, room = look(run), int(share * taken(run))
    plan = ckpt8.thin(run, to=room)
    assert look(run) == before
    assert plan.bytes == taken(run)
    done = ckpt8.thin(run, to=room, apply=True)
    assert taken(run) <= room
    # Of files of some 30 kB headers and manifests are a good part, which are predicted less well.
    assert done.then == pytest.approx(plan.then, rel=0.15)
    # What files really take may leave room for a finer one.
    for record, planned in zip(done, plan, strict=True):
        assert planned.becomes == "gone" or record.steps_then <= 1.1 * planned.steps_then
    check_kept(run, originals, done)
    assert done.records[-1].becomes != "gone"
    assert {record.name for record in done if not (run / record.name).exists()} == {
        record.name for record in done if record.drops_original or record.becomes == "gone"
    }
    # Once more: nothing is left to do.
    again = look(run)
    assert all(record.becomes == "as it is" for record in ckpt8.thin(run, to=room, apply=True))
    assert look(run) == again


def test_a_delta_is_one_of_its_neighbour_and_can_lose_it(run):
    done = ckpt8.thin(run, to=int(0.12 * taken(run)), apply=True)
    deltas = [record for record in done if record.base]
    assert deltas
    for record in deltas:
        with ContainerReader((run / record.name).with_suffix(".ckpt8")) as reader:
            assert reader.manifest.base.path == str((run / record.base).with_suffix(".ckpt8").name)
    base = (run / deltas[0].base).with_suffix(".ckpt8")
    base.unlink()
    assert ckpt8.load((run / deltas[0].name).with_suffix(".ckpt8"))["step"] == deltas[0].step


def test_rules_alone_change_nothing_that_stays(run):
    sums = look(run)
    done = ckpt8.thin(run, keep="last:2,every:15", apply=True)
    assert steps_of(run) == [15, 20, 25]
    assert look(run) == {name: sums[name] for name in look(run)}
    assert done.gone == [f"step-{step}.pt" for step in (5, 10)]


def test_what_rules_keep_does_not_go_for_the_lack_of_room(run):
    room = int(0.15 * taken(run))
    done = ckpt8.thin(run, keep="every:10", to=room, apply=True)
    assert steps_of(run) == [10, 20, 25]
    assert taken(run) <= room
    before = look(run)
    with pytest.raises(OutputError, match=r"what has to stay takes about .* kB at budget:5, more than 2\.00 kB"):
        ckpt8.thin(run, keep="every:10", to="2kB", apply=True)
    assert look(run) == before
    assert [record.name for record in done if record.becomes == "gone"] == ["step-5.pt", "step-15.pt"]


@pytest.mark.slow
def test_finest_coarsest_and_whole_files(run, originals):
    room = int(0.3 * taken(run))
    done = ckpt8.thin(run, to=room, finest="archive", coarsest="budget:3", delta=False, apply=True)
    assert {record.becomes for record in done} <= {"as it is", "archive", "budget:2", "budget:3", "gone"}
    assert not any(record.base for record in done)
    check_kept(run, originals, done)


def test_what_is_protected_stays_as_it_is(run):
    sums = look(run)
    ckpt8.thin(run, to=int(0.4 * taken(run)), protect=["step-5.*"], apply=True)
    assert look(run)["step-5.pt"] == sums["step-5.pt"]
    with pytest.raises(OutputError, match="what has to stay"):
        ckpt8.thin(run, to=1000, protect=["*"])


class Unknown(torch.optim.Optimizer):
    """An optimizer that nobody knows, with a state of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            total = self.state[parameter].setdefault("total", torch.zeros_like(parameter))
            parameter.data.sub_(1e-3 * total.add_(parameter.grad))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "momentum", "unknown", "distributed"])
def test_other_optimizers_and_directories_fit_as_well(kind, run, tmp_path):
    folder = tmp_path / kind
    folder.mkdir()
    made = {"SGD": {"lr": 0.01}, "momentum": {"lr": 0.01, "momentum": 0.9}}.get(kind)
    weights = {f"layer.{k}": torch.nn.Parameter(torch.randn(128, 256)) for k in range(2)}
    optimizer = torch.optim.SGD(weights.values(), **made) if made else Unknown(weights.values())
    for step in range(5, 25, 5):
        if kind == "distributed":
            ckpt8.convert(run / f"step-{step}.pt", folder / f"step-{step}", to="dcp")
        else:
            sum((weight - 1).square().mean() for weight in weights.values()).backward()
            optimizer.step()
            states = {"model": {name: weight.detach() for name, weight in weights.items()}, "step": step}
            torch.save({**states, "optimizer": optimizer.state_dict()}, folder / f"step-{step}.pt")
        age(next(folder.glob(f"step-{step}*")), 100 - step)
    room = int(0.5 * taken(folder))
    done = ckpt8.thin(folder, to=room, apply=True)
    assert {"flash"} <= {record.becomes for record in done}
    assert done.then == taken(folder) <= room
    for record in ckpt8.runs(folder):
        assert ckpt8.verify(folder / record.name).failures == ()


def test_a_hard_link_counts_as_a_file_of_its_own(run):
    """Compressed each is one: so the run never takes more than the room."""
    (run / "copy-25.pt").hardlink_to(run / "step-25.pt")
    room, before = int(0.4 * taken(run)), taken(run)
    done = ckpt8.thin(run, to=room, apply=True)
    assert done.bytes == before + next(record.bytes for record in done if record.name == "step-25.pt")
    assert done.then == taken(run) <= room


# Compressed before


def test_errors_of_a_second_compression_add_up_and_are_an_upper_bound(run, originals):
    ckpt8.chain(run, preset="archive", delta=False, remove=True)
    first = {record.step: record.steps for record in ckpt8.runs(run)}
    done = ckpt8.thin(run, to=int(0.75 * taken(run)), apply=True)
    twice = [record for record in done if record.twice]
    assert twice
    check_kept(run, originals, done)
    for record in twice:
        container = run / record.name
        with ContainerReader(container) as reader:
            manifest = reader.manifest
        assert manifest.earlier == {"steps": pytest.approx(first[record.step])}
        own = ckpt8.inspect(container)["steps"]["steps"]
        assert record.steps_then == manifest.error_in_steps == pytest.approx(own + first[record.step])
        true = ckpt8.inspect(container, against=originals / f"step-{record.step}.pt")["steps"]["steps"]
        assert own < true <= record.steps_then * (1 + 1e-6)
        assert next(r.steps for r in ckpt8.runs(run) if r.step == record.step) == record.steps_then
        assert "after an earlier compression" in repr(manifest)


def test_nothing_is_compressed_twice_where_the_original_is_there(run, originals):
    ckpt8.chain(run, preset="flash", delta=False)
    done = ckpt8.thin(run, to=int(0.06 * taken(run)), apply=True)
    assert not any(record.twice for record in done)
    check_kept(run, originals, done)
    for path in run.glob("*.ckpt8"):
        with ContainerReader(path) as reader:
            assert reader.manifest.earlier is None


def test_an_original_beside_its_container_goes_first(run, originals, monkeypatch):
    def refuse(*_):
        raise PermissionError  # the container is another user's

    monkeypatch.setattr(os, "utime", refuse)
    packed = ckpt8.chain(run, preset="flash", delta=False)
    done = ckpt8.thin(run, to=sum(outcome.stored for outcome in packed), apply=True)
    assert {record.becomes for record in done} == {".ckpt8 alone"}
    assert not list(run.glob("*.pt"))
    check_kept(run, originals, done)


def test_deltas_become_whole_before_what_they_need_goes(run, originals):
    ckpt8.chain(run, preset="archive", remove=True)
    assert any(record.base for record in ckpt8.runs(run))
    bits = {record.step: ckpt8.load(run / record.name) for record in ckpt8.runs(run)}
    plan = ckpt8.thin(run, keep="last:2", protect=["step-10*"])
    done = ckpt8.thin(run, keep="last:2", protect=["step-10*"], apply=True)
    assert steps_of(run) == [10, 20, 25]
    assert "whole" in {record.becomes for record in done}
    assert [record.then for record in done] == pytest.approx([record.then for record in plan], rel=0.05)
    assert not (run / "bases").exists()
    check_kept(run, originals, done)
    for record in ckpt8.runs(run):
        for name, weight in ckpt8.load(run / record.name)["model"].items():
            assert torch.equal(weight, bits[record.step]["model"][name])


@pytest.mark.slow
def test_a_chain_of_the_command_is_compressed_again(run, originals):
    ckpt8.chain(run, preset="archive", remove=True)
    room = int(0.6 * taken(run))
    done = ckpt8.thin(run, to=room, apply=True)
    assert taken(run) <= room
    check_kept(run, originals, done)


# What stops it


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_removal_that_a_kill_interrupted_is_finished(is_damaged, run, monkeypatch):
    """And its checkpoint gets its name back where the container does not hold."""
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "remove", lambda _: None)
        with pytest.raises(OutputError, match="remove it yourself"):
            ckpt8.thin(run, to=int(0.4 * taken(run)), apply=True)
    (aside,), sums = run.glob(".*.ckpt8-removed"), look(run)
    said = []
    if is_damaged:
        flip_bit(run / f"{aside.name.split('.')[1]}.ckpt8", 8 * 20_000)
    ckpt8.thin(run, keep="last:9", apply=True, tell=said.append)
    assert not aside.exists()
    if is_damaged:
        assert look(run)[f"{aside.name.split('.')[1]}.pt"] == sums[aside.name]
        assert "is back" in said[0]
    else:
        assert look(run) == {name: digits for name, digits in sums.items() if name != aside.name}
        assert said == []


def test_a_full_disk_and_a_wrong_figure_leave_each_checkpoint_whole(run, originals, monkeypatch):
    sums = look(run)
    with longest_file(10_000), pytest.raises(OutputError):
        ckpt8.thin(run, to=int(0.1 * taken(run)), apply=True)
    assert look(run).items() <= sums.items()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 5000))
    with pytest.raises(OutputError, match=r"run: has 5\.00 kB free, and .* are needed; nothing was changed"):
        ckpt8.thin(run, to=int(0.1 * taken(run)), apply=True)
    monkeypatch.undo()
    ckpt8.chain(run, preset="flash", delta=False, remove=True)
    packed = look(run)

    def doubt(*_, **__):
        raise CheckFailedError("no")

    monkeypatch.setattr(jobs, "verify", doubt)
    with pytest.raises(CheckFailedError):
        ckpt8.thin(run, to=int(0.5 * taken(run)), apply=True)
    assert look(run) == packed


def test_damaged_young_and_packed_by_ranks_stay_as_they_are(run):
    flip_bit(run / "step-25.pt", 10)
    (run / "step-20.pt").touch()
    sums = look(run)
    done = ckpt8.thin(run, keep="last:1", apply=True)
    assert {path.name for path in run.iterdir()} == {"step-20.pt", "step-25.pt"}
    assert look(run).items() <= sums.items()
    assert done.then == taken(run)


def test_a_damaged_one_stays_as_it_is_and_the_rest_is_thinned(run, originals):
    ckpt8.chain(run, preset="flash", delta=False, remove=True)
    flip_bit(run / "step-10.ckpt8")
    sums, room = look(run), int(0.5 * taken(run))
    result = CliRunner().invoke(app, ["thin", str(run), "--to", str(room), "--apply"])
    assert "1 checkpoint cannot be read whole and stay" in str(result.exception)
    assert result.exception.exit_code == 3
    assert "step-10.ckpt8: stays as it is: " in " ".join(result.output.split())
    assert taken(run) <= room
    assert look(run)["step-10.ckpt8"] == sums["step-10.ckpt8"]
    assert all(
        look(run)[name] != digits for name, digits in sums.items() if name != "step-10.ckpt8" and name in look(run)
    )
    for step in {*steps_of(run)} - {10}:
        true = ckpt8.inspect(run / f"step-{step}.ckpt8", against=originals / f"step-{step}.pt")["steps"]["steps"]
        assert true <= next(record.steps for record in ckpt8.runs(run) if record.step == step) * (1 + 1e-6)


@pytest.mark.by_default(most=2)
@pytest.mark.parametrize("case", ["a delta", "a key", "found late", "found late in a base"])
def test_damage_in_a_chain_holds_what_needs_it_and_what_it_needs(case, run, monkeypatch):
    later = [path.rename(run.parent / path.name) for path in (run / "step-20.pt", run / "step-25.pt")]
    ckpt8.chain(run, preset="flash", remove=True)
    for path in later:
        path.rename(run / path.name)
    ckpt8.chain(run, preset="flash", delta=False, remove=True)
    before = {record.step: record for record in ckpt8.runs(run)}
    deltas = [step for step, record in before.items() if record.base]
    bases = {before[step].base: step for step in deltas}
    broken = deltas[-1] if case in ("a delta", "found late") else before[deltas[0]].base
    broken = run / (before[broken].name if isinstance(broken, int) else broken)
    if case.startswith("found"):
        remove_abandoned = thinning.remove_abandoned_of

        def damage(*arguments):
            flip_bit(broken)
            remove_abandoned(*arguments)

        monkeypatch.setattr(thinning, "remove_abandoned_of", damage)
    else:
        flip_bit(broken)
    sums = look(run)
    # A base that has become another file already takes its old room as well.
    room = int((0.98 if case == "found late" else 0.9) * taken(run))
    done = ckpt8.thin(run, to=room, apply=True)
    sums[broken.name] = digest(broken)
    assert broken.name in bases or case in ("a delta", "found late")
    assert look(run)[broken.name] == sums[broken.name]
    assert done.problems
    for record in done:
        if record.becomes == "gone":
            assert record.held is None
        elif record.damage is None:
            assert ckpt8.load(run / record.name)["step"] == record.step
        else:
            # What a salvage of it needs is there, to the bit, if only in ``bases/``.
            assert record.becomes == "as it is"
            with ContainerReader(run / record.name) as reader:
                below = [digest(link.path) for link in reader.links()]
            assert set(below) <= set(sums.values())
    assert done.then == taken(run) <= room


def test_a_newest_that_does_not_hold_is_not_the_newest(run):
    ckpt8.chain(run, preset="flash", delta=False, remove=True)
    flip_bit(run / "step-25.ckpt8")
    done = ckpt8.thin(run, keep="last:1", apply=True)
    assert steps_of(run) == [20, 25]
    assert [record.damage is not None for record in done if record.becomes != "gone"] == [False, True]
    with pytest.warns(RuntimeWarning, match=r"step-25\.ckpt8: .*; it stays as it is"):
        thinning.upkeep("last:2", int(0.9 * taken(run)))(run)


def test_what_changes_after_it_was_listed_does_not_go(run, monkeypatch):
    remove_abandoned = thinning.remove_abandoned_of

    def overwrite(*arguments):
        shutil.copy(run / "step-25.pt", run / "step-10.pt")
        remove_abandoned(*arguments)

    monkeypatch.setattr(thinning, "remove_abandoned_of", overwrite)
    with pytest.raises(OutputError, match=r"step-10.*is kept: it, or what it was made from, changed"):
        ckpt8.thin(run, keep="last:1", apply=True)
    assert digest(run / "step-10.pt") == digest(run / "step-25.pt")


def test_what_is_damaged_or_never_finished_is_not_the_newest(run):
    """As a process leaves it that is killed while it saves."""
    newest = run / "step-25.pt"
    with newest.open("r+b") as file:
        file.truncate(100_000)
    unfinished = run / "checkpoint-30"
    shutil.copytree(INPUTS / "trainer-adamw", unfinished)
    (unfinished / "trainer_state.json").unlink()
    for path in (newest, unfinished):
        age(path)
    ckpt8.thin(run, keep="last:1", apply=True)
    assert {path.name for path in run.iterdir()} == {"step-20.pt", "step-25.pt", "checkpoint-30"}


def test_the_newest_stays_beside_one_without_a_step(run):
    for step in (5, 10, 15, 20):
        (run / f"step-{step}.pt").rename(run / f"step-{step}.txt")
    torch.save({"model": torch.load(run / "step-25.pt")["model"]}, run / "best.pt")
    age(run / "best.pt")
    with pytest.raises(OutputError, match="what has to stay"):
        ckpt8.thin(run, to=(run / "best.pt").stat().st_size + 1000, protect=["best.pt"])


def test_what_a_resume_asks_for_and_what_is_named_stay_as_they_are(run):
    (run / "best.pt").symlink_to("step-5.pt")
    (run / "latest").write_text("step-10.pt\n")
    (run / "last.ckpt").write_bytes((run / "step-15.pt").read_bytes())
    age(run / "last.ckpt")
    ckpt8.compress(run / "step-20.pt")
    sums, arguments = look(run), ["thin", str(run.parent), "--keep", "last:1", "--protect", "step-20.pt"]
    shown = CliRunner().invoke(app, [*arguments, "--apply"]).output
    assert look(run) == {name: sum_ for name, sum_ in sums.items() if name != "step-15.pt"}
    said = " ".join(shown.split())
    for line in ("step-5.pt: stays as it is: best.pt leads to it", "step-10.pt: stays as it is: latest names it"):
        assert line in said
    assert "last.ckpt: stays as it is: Lightning resumes from this name" in said
    refused = str(CliRunner().invoke(app, ["thin", str(run), "--to", "2kB"]).exception)
    assert "last.ckpt (Lightning resumes from this name)" in refused
    # A run that goes on moves its pointer.
    (run / "latest").write_text("step-25.pt")
    assert ckpt8.thin(run, keep="last:1").gone == ["step-10.pt", "step-20.ckpt8"]  # by its original it is old


def test_what_was_saved_last_stays_where_a_run_began_again(run):
    """Its steps are lower than those of the run before. What thin compresses is not saved by that."""
    torch.save(torch.load(run / "step-5.pt") | {"step": 7}, run / "step-7.pt")
    age(run / "step-7.pt", 1800)
    saved = (run / "step-7.pt").stat().st_mtime
    ckpt8.thin(run, keep="last:2", to=int(0.2 * taken(run)), apply=True)
    assert steps_of(run) == [7, 20, 25]
    assert (run / "step-7.ckpt8").stat().st_mtime == pytest.approx(saved)
    age(run / "step-25.ckpt8", -3600)
    assert ckpt8.thin(run, keep="last:1").gone == ["step-7.ckpt8", "step-20.ckpt8"]


def test_each_of_two_with_one_name_becomes_a_container_of_its_own(run):
    for step in (5, 10, 15, 20):
        (run / f"step-{step}.pt").unlink()
    shutil.copy2(run / "step-25.pt", run / "step-25.bin")
    done = ckpt8.thin(run, to=int(0.45 * taken(run)), apply=True)
    assert {record.becomes for record in done} == {"flash"}
    assert [ckpt8.load(path)["step"] for path in run.glob("*.ckpt8")] == [25, 25]


def test_a_container_of_another_checkpoint_of_that_name_stays(run):
    """A run that begins anew writes the names of the one before."""
    for step in (5, 10, 15, 20):
        ckpt8.compress(run / f"step-{step}.pt", preset="lossless")
    other = torch.load(run / "step-25.pt")
    for step in (5, 10):
        torch.save(other | {"step": 3 if step == 10 else step}, run / f"step-{step}.pt")
        age(run / f"step-{step}.pt")
    sums = look(run)
    with pytest.raises(CheckFailedError, match=r"step-5\.pt: is kept: .*step-5\.ckpt8: .*differs"):
        ckpt8.thin(run, to=int(0.3 * taken(run)), apply=True)
    assert look(run) == sums
    ckpt8.thin(run, keep="every:10", apply=True)
    assert {path.name for path in run.glob("step-1*")} == {"step-10.ckpt8"}
    assert look(run).items() <= sums.items()


def test_a_nan_in_a_neighbour_makes_it_no_base(run):
    for step in (5, 10, 15):
        (run / f"step-{step}.pt").unlink()
    checkpoint = torch.load(run / "step-20.pt")
    next(iter(checkpoint["model"].values())).fill_(torch.nan)
    torch.save(checkpoint, run / "step-20.pt")
    age(run / "step-20.pt")
    with pytest.raises(OutputError, match="what has to stay"):
        ckpt8.thin(run, to=int(0.31 * taken(run)), keep="last:2", coarsest="flash")


def test_bad_input_is_one_line(run, tmp_path):
    with pytest.raises(UsageError, match="give rules"):
        ckpt8.thin(run)
    with pytest.raises(UsageError, match="to fifty: expected a number of bytes"):
        ckpt8.thin(run, to="fifty")
    with pytest.raises(UsageError, match="'fast' is neither"):
        ckpt8.thin(run, to=1, finest="fast")
    with pytest.raises(UsageError, match="budget is a number of steps"):
        ckpt8.thin(run, to=1, coarsest="budget:50")
    with pytest.raises(UsageError, match="the finest, budget:5, is coarser than the coarsest, flash"):
        ckpt8.thin(run, to=1, finest="budget:5", coarsest="flash")
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="holds no checkpoint"):
        ckpt8.thin(tmp_path / "other", to=1)
    shutil.copytree(run, tmp_path / "other" / "a")
    shutil.copytree(run, tmp_path / "other" / "b")
    with pytest.raises(InputError, match="holds several runs, in a, b; give the folder of one"):
        ckpt8.thin(tmp_path / "other", to=1)


def test_directories_of_trainer(tmp_path):
    for step in (12, 24, 36):
        shutil.copytree(INPUTS / "trainer-adamw", tmp_path / f"checkpoint-{step}")
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": step}))
        age(tmp_path / f"checkpoint-{step}")
    ckpt8.thin(tmp_path, keep="last:2", to=int(0.5 * taken(tmp_path)), apply=True)
    assert steps_of(tmp_path) == [24, 36]
    ckpt8.thin(tmp_path, keep="last:1", apply=True)
    assert steps_of(tmp_path) == [36]
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())


def test_the_folder_of_the_run_is_no_checkpoint_to_remove(run):
    """What Trainer leaves there at the end is a checkpoint in the folder itself."""
    for path in (INPUTS / "trainer-adamw").iterdir():
        shutil.copy(path, run)
    sums = look(run)
    ckpt8.thin(run, keep="last:1", apply=True)
    left = look(run)
    assert left.items() <= sums.items()
    assert {path.name for path in (INPUTS / "trainer-adamw").iterdir()} <= left.keys()


# The command line


@pytest.mark.slow
def test_chain_keeps_to_rules_and_room_as_checkpoints_come(run):
    room = int(0.3 * taken(run))
    arguments = ["chain", str(run), "--preset", "archive", "--remove", "--rest", "0", "--keep", "last:3"]
    done = CliRunner().invoke(app, [*arguments, "--to", str(room), "--leave-reader"])
    assert done.exit_code == 0, done.output
    assert steps_of(run) == [15, 20, 25]
    assert (run / "read_ckpt8.py").is_file()
    assert taken(run) - (run / "read_ckpt8.py").stat().st_size <= room
    refused = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert "--dry-run does not foresee --keep and --to" in str(refused.exception or refused.output)


def test_the_command_shows_a_table_and_one_object(run):
    before = look(run)
    shown = CliRunner().invoke(app, ["thin", str(run), "--to", f"{int(0.05 * taken(run))}"])
    assert shown.exit_code == 0, shown.output
    assert "to be removed, each once its .ckpt8 was verified against it" in " ".join(shown.output.split())
    assert "nothing was changed; --apply does it, and needs" in shown.output
    assert shown.output.count("step-") >= 5
    printed = CliRunner().invoke(app, ["thin", str(run), "--keep", "last:1", "--json"])
    facts = json.loads(printed.output)
    assert facts["gone"] == [f"step-{step}.pt" for step in range(5, 25, 5)]
    assert not facts["applied"]
    assert look(run) == before
    assert CliRunner().invoke(app, ["thin", str(run), "--keep", "last:1", "--apply"]).exit_code == 0
    assert [path.name for path in run.iterdir()] == ["step-25.pt"]
