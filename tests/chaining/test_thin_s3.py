"""A run in a bucket in so much room: what the local one does, and what only a bucket has.

The local command has tests of what it does; here the same run, local and in the bucket, becomes the same files.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from chain_command_kit import make_run
from disk_kit import longest_file
from packed_kit import INDEX
from s3_kit import BUCKET

import ckpt8
from ckpt8.chaining import choices, jobs
from ckpt8.chaining import thin as thinning
from ckpt8.chaining.chain import ChainRun, chain_options, is_there
from ckpt8.chaining.jobs import Settings
from ckpt8.core.errors import CheckFailedError, InputError, OutputError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.stores import writing
from ckpt8.core.files.stores.s3 import S3Store
from ckpt8.integrations.dcp import Ckpt8StorageWriter


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, 6)
    return folder


@pytest.fixture(scope="module")
def chained(originals, tmp_path_factory):
    """The same run as a chain of deltas."""
    folder = shutil.copytree(originals, tmp_path_factory.mktemp("chained") / "run")
    ckpt8.chain(folder, preset="archive", remove=True)
    shutil.rmtree(folder / "bases")
    return folder


@pytest.fixture(autouse=True)
def _at_rest(monkeypatch):
    """What was just put into the bucket is at rest."""
    monkeypatch.setattr(choices, "REST", 0.0)


class Run:
    """A run in the bucket."""

    def __init__(self, bucket, folder):
        self.bucket, self.key = bucket, os.urandom(4).hex()
        self.url = f"s3://{BUCKET}/{self.key}"
        for path in folder.iterdir():
            bucket.put(f"{self.key}/{path.name}", path)

    def objects(self):
        listed = self.bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self.key}/").get("Contents", ())
        return {each["Key"].removeprefix(f"{self.key}/"): self.content(each["Key"]) for each in listed}

    def content(self, key):
        return self.bucket.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, name, content):
        self.bucket.client.put_object(Bucket=BUCKET, Key=f"{self.key}/{name}", Body=content)

    def size(self):
        return sum(map(len, self.objects().values()))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def facts(done, *without):
    """What was planned or done, without where that was."""
    left = done.to_json()
    return {name: left[name] for name in left if name not in ("directory", "needs", "needs_in", *without)}


CASES = [
    pytest.param("originals", {"keep": "last:2"}, id="rules"),
    pytest.param("originals", {"to": 0.1}, id="a room"),
    pytest.param("chained", {"keep": "last:2"}, id="rules for a chain"),
    pytest.param("chained", {"to": 0.75}, id="a room for a chain", marks=pytest.mark.slow),
    pytest.param("chained", {"to": 0.6, "keep": "last:3,every:15"}, id="both for a chain"),
]


@pytest.mark.parametrize(("kind", "asked"), CASES)
def test_it_becomes_what_the_local_run_becomes(kind, asked, request, bucket, tmp_path):
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "run")
    run, before = Run(bucket, folder), files(folder)
    if "to" in asked:
        asked = asked | {"to": int(asked["to"] * sum(map(len, before.values())))}
    plan = ckpt8.thin(run.url, **asked)
    assert facts(plan) == facts(ckpt8.thin(folder, **asked))
    assert run.objects() == before
    done = ckpt8.thin(run.url, **asked, apply=True)
    assert facts(done) == facts(ckpt8.thin(folder, **asked, apply=True))
    assert run.objects() == files(folder)
    assert done.then == run.size()


# Kills


class Killed(BaseException):
    """Nothing of the process goes on."""


def kill_after(monkeypatch, number):
    """Have the process end after so many changes of the bucket."""
    left = [number]

    def ending(change):
        def call(*arguments):
            result = change(*arguments)
            left[0] -= 1
            if not left[0]:
                raise Killed
            return result

        return call

    for name in ("put", "complete", "delete"):
        monkeypatch.setattr(S3Store, name, ending(getattr(S3Store, name)))


def decoded(folder):
    """The weights and moments of each checkpoint, by its step."""
    found = {}
    for record in ckpt8.runs(folder):
        if record.kind != "raw":
            assert ckpt8.verify(f"{folder}/{record.name}").failures == ()
            assert record.problem is None
            tree = ckpt8.load(f"{folder}/{record.name}")
            states = [
                state[name] for state in tree["optimizer"]["state"].values() for name in ("exp_avg", "exp_avg_sq")
            ]
            found[record.step] = [*tree["model"].values(), *states]
    return found


def are_equal(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.by_default(most=1)
@pytest.mark.parametrize("number", range(1, 8))
def test_a_chain_that_is_killed_at_any_change_goes_on(number, chained, bucket, tmp_path, monkeypatch):
    """Every checkpoint is what it was or what it becomes, though bases change in place below what needs them."""
    folder, asked = shutil.copytree(chained, tmp_path / "run"), {"keep": "every:5", "apply": True}
    for name in ("step-25.ckpt8", "step-30.ckpt8"):
        (folder / name).unlink()
    asked["to"] = int(0.8 * sum(map(len, files(folder).values())))
    run, before = Run(bucket, folder), decoded(folder)
    ckpt8.thin(folder, **asked)
    after = decoded(folder)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "PART", 1 << 14)  # some go in several parts
        kill_after(patch, number)
        with pytest.raises(Killed):
            ckpt8.thin(run.url, **asked)
    for step, tensors in decoded(run.url).items():
        assert are_equal(tensors, before[step]) or are_equal(tensors, after[step])
    done = ckpt8.thin(run.url, **asked)
    assert list(decoded(run.url)) == list(before)
    assert done.then == run.size() <= asked["to"]


@pytest.mark.by_default(most=1)
@pytest.mark.parametrize("number", range(1, 9))
def test_a_run_that_is_killed_at_any_change_goes_on(number, originals, bucket, monkeypatch):
    run = Run(bucket, originals)
    asked = {"to": int(0.1 * run.size()), "apply": True}
    with monkeypatch.context() as patch:
        kill_after(patch, number)
        with pytest.raises(Killed):
            ckpt8.thin(run.url, **asked)
    stay = {f"step-{step}" for step in (20, 25, 30)}
    names = set(run.objects())
    assert stay <= {name.partition(".")[0] for name in names}
    done = ckpt8.thin(run.url, **asked)
    assert set(run.objects()) == {f"{name}.ckpt8" for name in stay}
    assert done.then == run.size() <= asked["to"]
    for name in stay:
        assert ckpt8.verify(f"{run.url}/{name}.ckpt8", originals / f"{name}.pt").failures == ()


# Others write there, too


def changed_meanwhile(monkeypatch, change):
    """Have ``change`` happen once all is planned."""
    remove_abandoned = thinning.remove_abandoned_of

    def call(*arguments):
        change()
        remove_abandoned(*arguments)

    monkeypatch.setattr(thinning, "remove_abandoned_of", call)


@pytest.mark.parametrize("honours", [True, False], ids=["conditions", "none"])
def test_only_what_was_planned_goes(honours, originals, bucket, monkeypatch):
    """Also in a store that ignores conditions, where it is looked at right before."""
    run = Run(bucket, originals)
    bucket.order(*([] if honours else [{"ignore_conditions": True, "times": 1 << 20}]))
    changed_meanwhile(monkeypatch, lambda: run.put("step-10.pt", b"another"))
    with pytest.raises(OutputError, match=r"step-10\.pt: changed meanwhile; it stays as it is"):
        ckpt8.thin(run.url, keep="last:1", apply=True)
    assert {"step-5.pt", "step-10.pt", "step-30.pt"} == set(run.objects())
    assert run.objects()["step-10.pt"] == b"another"
    deleted = [entry for entry in bucket.look() if entry["method"] == "DELETE"]
    assert len(deleted) == 3
    assert all(entry["if_match"] for entry in deleted)


def test_a_container_is_replaced_by_one_made_of_it(originals, bucket, tmp_path, monkeypatch):
    folder = shutil.copytree(originals, tmp_path / "run")
    ckpt8.chain(folder, preset="flash", delta=False, remove=True)
    run = Run(bucket, folder)
    verify = jobs.verify

    def replacing(*arguments, **options):
        result = verify(*arguments, **options)
        run.put("step-5.ckpt8", b"another")
        return result

    monkeypatch.setattr(jobs, "verify", replacing)
    with pytest.raises(OutputError, match=r"step-5\.ckpt8: "):
        ckpt8.thin(run.url, to=int(0.9 * run.size()), keep="every:5", apply=True)
    assert run.objects() == files(folder) | {"step-5.ckpt8": b"another"}


@pytest.mark.parametrize("asked", [{"keep": "last:1"}, {"to": 0.7, "keep": "every:5"}], ids=["goes", "changes"])
def test_what_somebody_needs_meanwhile_stays(asked, chained, originals, bucket, tmp_path, monkeypatch):
    run, before = Run(bucket, chained), files(chained)
    asked = asked | ({"to": int(asked["to"] * run.size())} if "to" in asked else {})
    target = tmp_path / "step-31.ckpt8"
    ckpt8.compress(originals / "step-30.pt", target, preset="archive", base=chained / "step-5.ckpt8")
    changed_meanwhile(monkeypatch, lambda: run.put("step-31.ckpt8", target.read_bytes()))
    with pytest.raises(OutputError, match=r"step-5\.ckpt8: is the base of step-31\.ckpt8"):
        ckpt8.thin(run.url, **asked, apply=True)
    assert run.objects()["step-5.ckpt8"] == before["step-5.ckpt8"]
    assert ckpt8.verify(f"{run.url}/step-31.ckpt8", originals / "step-30.pt").failures == ()


# What stops it


def test_a_full_disk_and_a_wrong_figure_leave_all_as_it_is(originals, bucket, tmp_path, monkeypatch):
    folder = shutil.copytree(originals, tmp_path / "run")
    ckpt8.chain(folder, preset="flash", delta=False, remove=True)
    run, before = Run(bucket, folder), files(folder)
    asked = {"to": int(0.8 * run.size()), "keep": "every:5"}
    plan = ckpt8.thin(run.url, **asked)
    largest = max(record.then for record in plan if record.twice)
    assert (plan.needs, plan.needs_in) == (largest + (1 << 20), tempfile.gettempdir())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 5000))
        with pytest.raises(OutputError, match=rf"^{tempfile.gettempdir()}: has 5\.00 kB free, and .*; nothing was"):
            ckpt8.thin(run.url, **asked, apply=True)
    with longest_file(10_000), pytest.raises(OutputError, match=r"it needs .*, in /.* \(TMPDIR\) first"):
        ckpt8.thin(run.url, **asked, apply=True)
    monkeypatch.setattr(jobs, "verify", lambda *_, **__: SimpleNamespace(failures=("no",)))
    with pytest.raises(CheckFailedError, match=r"is kept: .*: no"):
        ckpt8.thin(run.url, **asked, apply=True)
    assert run.objects() == before
    assert {entry["method"] for entry in bucket.order()} == {"GET"}


# Directories


@pytest.fixture
def directories(bucket, inputs, tmp_path):
    """A run of two directories of Trainer; the sound one is ``checkpoint-40``."""
    (tmp_path / "nothing").mkdir()
    run = Run(bucket, tmp_path / "nothing")
    for step in (3, 40):
        for path in (inputs / "trainer-adamw").iterdir():
            run.put(f"checkpoint-{step}/{path.name}", path.read_bytes())
        run.put(f"checkpoint-{step}/trainer_state.json", b'{"global_step": %d}' % step)
    return run


def test_a_directory_goes_or_stays_as_it_is(directories):
    done = ckpt8.thin(directories.url, to=directories.size() // 2 + 1000, apply=True)
    assert [record.becomes for record in done] == ["gone", "as it is"]
    assert {name.partition("/")[0] for name in directories.objects()} == {"checkpoint-40"}
    assert done.then == directories.size()


FILES = 8
"""Those of the directory."""


@pytest.mark.by_default(most=2)
@pytest.mark.parametrize("number", range(1, FILES + 3))
def test_a_directory_whose_removal_is_killed_goes_with_the_next_one(number, directories, monkeypatch):
    before = directories.objects()
    assert len(before) == 2 * FILES
    with monkeypatch.context() as patch:
        kill_after(patch, number)
        with pytest.raises(Killed):
            ckpt8.thin(directories.url, keep="last:1", apply=True)
    left = {name: content for name, content in directories.objects().items() if not name.startswith(".")}
    assert left.items() <= before.items()
    assert left == before or "checkpoint-3/trainer_state.json" not in left
    plan = ckpt8.thin(directories.url, keep="last:1")
    assert [record.name for record in plan if record.becomes != "gone"] == ["checkpoint-40"]
    done = ckpt8.thin(directories.url, keep="last:1", apply=True)
    after = {name: content for name, content in before.items() if name.startswith("checkpoint-40/")}
    assert directories.objects() == after
    assert done.then == directories.size()


@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.pt"], ids=["the last", "another"])
def test_a_directory_that_somebody_writes_is_not_removed_further(name, directories, monkeypatch):
    key, before = f"checkpoint-3/{name}", directories.objects()
    with monkeypatch.context() as patch:
        changed_meanwhile(patch, lambda: directories.put(key, b"another"))
        with pytest.raises(OutputError, match=rf"{key}: changed meanwhile; it stays as it is"):
            ckpt8.thin(directories.url, keep="last:1", apply=True)
    left = {name: content for name, content in directories.objects().items() if not name.startswith(".")}
    assert left[key] == b"another"
    assert (left == before | {key: b"another"}) == (name == "trainer_state.json")
    if name == "trainer_state.json":
        done = ckpt8.thin(directories.url, keep="last:2", apply=True)
        assert done.then == directories.size()
        assert directories.objects() == left
    else:
        with pytest.raises(InputError, match="holds several runs"):  # it is a checkpoint by its name
            ckpt8.thin(directories.url, keep="last:2", apply=True)
        assert set(directories.objects()) == {key, *(file for file in before if file.startswith("checkpoint-40/"))}


@pytest.mark.filterwarnings("ignore")
def test_what_ranks_have_packed_goes_beginning_with_its_index(bucket, tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    run = Run(bucket, tmp_path / "nothing")
    for step in (1, 2, 3):
        state = {"model": {"w": torch.randn(64, 64)}, "step": step}
        dcp.save(state, storage_writer=Ckpt8StorageWriter(f"{run.url}/step-{step}"), no_dist=True)
    before = run.objects()
    with monkeypatch.context() as patch:
        kill_after(patch, 2)
        with pytest.raises(Killed):
            ckpt8.thin(run.url, keep="last:2", apply=True)
    assert before.keys() - run.objects().keys() == {f"step-1/{INDEX}"}
    assert ckpt8.thin(run.url, keep="last:2", apply=True).gone == []
    assert set(run.objects()) == {name for name in before if not name.startswith("step-1/")}


def test_what_is_no_note_stays(directories):
    directories.put(".checkpoint-3.ckpt8-removal", b"[")
    directories.put(".checkpoint-40.ckpt8-removal", json.dumps({"optimizer.pt": "", "gone": "1"}).encode())
    before = directories.objects()
    ckpt8.thin(directories.url, keep="last:2", apply=True)
    assert directories.objects() == {
        name: content for name, content in before.items() if name != ".checkpoint-40.ckpt8-removal"
    }


# What it asks for


@pytest.mark.parametrize("kind", ["originals", "chained"])
def test_a_plan_by_rules_takes_a_list_and_both_ends_of_each_file(kind, request, bucket):
    folder = request.getfixturevalue(kind)
    run = Run(bucket, folder)
    with bucket.counted() as log:
        ckpt8.thin(run.url, keep="last:1")
    lists = [entry for entry in log if entry["method"] == "GET" and not entry["range"]]
    assert len(lists) == 1
    assert {entry["method"] for entry in log} == {"GET"}
    assert len(log) <= 1 + 2 * len(files(folder))


def test_requests(chained, bucket):
    run = Run(bucket, chained)
    with bucket.counted() as log:
        ckpt8.thin(run.url, keep="last:1", apply=True)
    changes = [entry for entry in log if entry["method"] in ("PUT", "DELETE")]
    assert len(changes) == 1 + len(files(chained)) - 1  # the last one becomes whole
    assert len(log) <= 2 + 2 * len(files(chained)) + 8 * len(changes)


# The command line


def test_the_command(originals, bucket, run_command):
    run = Run(bucket, originals)
    code, out, _ = run_command("thin", run.url, "--keep", "last:2")
    assert (code, "2 checkpoints stay, 4 go" in out, f"free in {tempfile.gettempdir()}" in out) == (0, True, True)
    code, out, _ = run_command("thin", f"{run.url}/", "--keep", "last:2", "--apply", "--json")
    assert code == 0
    assert json.loads(out)["gone"] == [f"step-{step}.pt" for step in (5, 10, 15, 20)]
    assert set(run.objects()) == {"step-25.pt", "step-30.pt"}
    assert "holds no checkpoint" in run_command.refused(3, "thin", f"{run.url}/nothing", "--keep", "last:1")
    assert "is on the Hub" in run_command.refused(2, "thin", "hf://owner/name", "--keep", "last:1")


def test_chain_keeps_to_rules_and_room_as_checkpoints_come(originals, bucket, tmp_path):
    (tmp_path / "nothing").mkdir()
    run = Run(bucket, tmp_path / "nothing")
    folder = as_path(run.url)
    assert not is_there(folder)
    options = chain_options("archive", None, (), "auto", None, None, delta=True)
    thins = thinning.upkeep("last:2", "1MB")
    watched = ChainRun(
        folder, Settings(options, remove=True), force=False, keep_raw=0, watch=True, rest=0, upkeep=thins
    ).jobs()
    for step in (5, 10, 15, 20):
        run.put(f"step-{step}.pt", (originals / f"step-{step}.pt").read_bytes())
        for job in next(watched):
            assert job.run().error is None
    run.put("step-25.pt", (originals / "step-25.pt").read_bytes())
    assert [job.source.name for job in next(watched)] == ["step-25.pt"]
    assert is_there(folder)
    assert set(run.objects()) == {"step-20.ckpt8", "step-25.pt"}
    assert ckpt8.verify(f"{run.url}/step-20.ckpt8", originals / "step-20.pt").failures == ()
