"""A directory below a prefix is read as one on the disk: with one list, and each byte at most once.

The server counts. Every range names the version that the list has shown.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from itertools import count
from math import ceil
from pathlib import Path

import make_dcp
import packed_kit
import pytest
import torch
from members_kit import tree
from s3_kit import BUCKET

import ckpt8
from ckpt8.core.errors import InputError
from ckpt8.core.files.stores import contract, listing, reading, s3
from ckpt8.core.files.stores.folder import FolderOutput
from ckpt8.core.files.stores.s3 import S3Store

MB = 1 << 20


def shards(root):
    """What Trainer saves: sharded safetensors of 1 MB each, the state of the optimizer, small files."""
    from safetensors.torch import save_file

    root.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{k}.weight": torch.randn(512, 512, generator=generator) * 0.02 for k in range(3)}
    for k, (name, weight) in enumerate(weights.items()):
        save_file({name: weight}, root / f"model-0000{k + 1}-of-00003.safetensors", metadata={"format": "pt"})
    moments = {
        k: {"step": torch.tensor(3.0), "exp_avg": weight * 1e-2, "exp_avg_sq": (weight * 1e-2) ** 2}
        for k, weight in enumerate(weights.values())
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "weight_decay": 0.0}
    torch.save({"state": moments, "param_groups": [{**group, "params": [*moments]}]}, root / "optimizer.pt")
    (root / "trainer_state.json").write_text("{}")
    (root / "rng").mkdir()
    torch.save({"python": torch.arange(5000)}, root / "rng" / "rng_state.pth")


@pytest.fixture(scope="module")
def folder(scratch):
    net, optimizer = make_dcp.make()
    make_dcp.step(net, optimizer, 0)
    shards(scratch / "trainer")
    state = make_dcp.states(net, optimizer)
    make_dcp.save(state, scratch / "dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: without processes
        packed_kit.save(state, scratch / "packed")
    shutil.copytree(scratch / "packed", scratch / "both" / "ckpt8")
    (scratch / "both" / "trainer_state.json").write_text("{}")
    return scratch


@pytest.fixture
def remote(folder, bucket, monkeypatch, tmp_path):
    """A function that puts a directory into the bucket; its URL. The working directory is an empty one."""
    monkeypatch.chdir(tmp_path)

    def put(name):
        for path in (folder / name).rglob("*"):
            if path.is_file():
                bucket.put(f"run/{path.relative_to(folder)}", path)
        return f"s3://{BUCKET}/run/{name}"

    return put


def is_list(entry):
    return entry["method"] == "GET" and not entry["range"]


@pytest.mark.parametrize("name", ["trainer", "dcp", "packed", "both"])
@pytest.mark.parametrize(
    "command",
    [
        ("inspect",),
        ("inspect", "--readiness"),
        ("verify",),
        ("diff", "LOCAL"),
        ("convert", "OUT.pt"),
        ("compress", "-o", "OUT.ckpt8"),
        ("restore", "-o", "OUT"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_command_does_what_it_does_to_a_local_directory(name, command, remote, bucket, folder, run_command, tmp_path):
    local, url = folder / name, remote(name)
    files = [path for path in local.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)

    def run(source, target):
        words = (str(local) if word == "LOCAL" else word.replace("OUT", target) for word in command[1:])
        code, out, err = run_command(command[0], source, *words, columns=1000)
        places = {url: "SOURCE", str(local): "SOURCE", target: "OUT", "SOURCE/": "SOURCE"}
        for place, name_of_it in places.items():
            out, err = out.replace(place, name_of_it), err.replace(place, name_of_it)
        return code, [line.split() for line in out.splitlines()], err

    with bucket.counted() as log:
        far = run(f"{url}/", "away")
    near = run(local, "near")
    assert far[0] == near[0]
    if command[0] in ("inspect", "verify", "diff") or near[0]:
        assert far == near
    else:
        written = [path for path in tmp_path.iterdir() if path.name.startswith("away")]
        assert written
        for path in written:
            twin = path.with_name(path.name.replace("away", "near"))
            if path.is_dir():
                assert tree(path) == tree(twin)
            else:  # torch.save names the folder in its archive after the file
                assert path.read_bytes().replace(b"away/", b"near/") == twin.read_bytes()
    assert sum(map(is_list, log)) == 1
    read = [entry for entry in log if not is_list(entry)]
    assert sum(entry["bytes"] for entry in read if entry["status"] == 206) <= size
    assert all(entry["if_match"] for entry in read[1:])
    assert len(log) <= 2 + 2 * len(files) + 2 * ceil(size / MB)


def test_load_of_what_ranks_have_packed(remote, bucket, folder):
    with bucket.counted() as log:
        far = ckpt8.load(remote("both"))
    assert sum(map(is_list, log)) == 1
    near = ckpt8.load(folder / "both")
    assert far["model"].keys() == near["model"].keys()
    assert all(torch.equal(value, far["model"][key]) for key, value in near["model"].items())
    with ckpt8.open(f"s3://{BUCKET}/run/both") as file, ckpt8.open(folder / "both") as local:
        assert torch.equal(file["model.up.weight"], local["model.up.weight"])


def test_many_files_share_one_small_window(remote, bucket, folder, run_command, monkeypatch):
    for name, value in {"PIECE": 64 << 10, "_WINDOW": MB, "GAP": 4 << 10}.items():
        monkeypatch.setattr(reading, name, value)
    monkeypatch.setattr(listing, "HEAD", 16 << 10)
    monkeypatch.setattr(listing, "_LEAST_HEAD", 16 << 10)
    url, most = remote("trainer"), [0]
    hold = reading.Memory.hold

    def held(memory, *arguments):
        most[0] = max(most[0], memory.size)
        return hold(memory, *arguments)

    monkeypatch.setattr(reading.Memory, "hold", held)
    with bucket.counted() as log:
        assert run_command("compress", url, "-o", "far.ckpt8")[0] == 0
    size = sum(path.stat().st_size for path in (folder / "trainer").rglob("*") if path.is_file())
    assert sum(entry["bytes"] for entry in log if entry.get("status") == 206) <= 1.05 * size
    assert MB // 2 < most[0] <= 4 * MB < size / 2
    ckpt8.compress(folder / "trainer", "near.ckpt8")
    assert Path("far.ckpt8").read_bytes() == Path("near.ckpt8").read_bytes()


@pytest.mark.parametrize("name", ["trainer", "dcp", "packed"])
def test_a_directory_that_changes_while_it_is_read(name, remote, bucket, folder, run_command, monkeypatch, tmp_path):
    """It changes once it was listed: every file is of the version in the list, or there is an error."""
    url, objects = remote(name), S3Store.objects
    last = max((path for path in (folder / name).rglob("*") if path.stat().st_size > 5000), key=str)

    def list_and_replace(*arguments, **options):
        listed = objects(*arguments, **options)
        bucket.client.put_object(Bucket=BUCKET, Key=f"run/{last.relative_to(folder)}", Body=b"another")
        return listed

    monkeypatch.setattr(S3Store, "objects", list_and_replace)
    arguments = {"packed": ("restore", url, "-o", "out")}.get(name, ("compress", url, "-o", "out"))
    changed = f"s3://{BUCKET}/run/{last.relative_to(folder)}"
    err = run_command.refused(3, *arguments)
    assert err == f"ckpt8: {changed}: changed while it was read; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_what_no_directory_can_be(bucket, run_command, monkeypatch):
    bucket.put("odd/a/b.pt", b"x")
    bucket.put("odd/a", b"x")
    assert "s3://bucket/odd/a: is an object and a folder" in run_command.refused(3, "inspect", "s3://bucket/odd")
    bucket.put("holes/a//b.pt", b"x")
    assert "which is no path; rename it" in run_command.refused(3, "inspect", "s3://bucket/holes")
    monkeypatch.setattr(s3, "MOST_LISTED", 1)
    assert contract.MOST_LISTED > 10_000
    bucket.put("many/a.pt", b"x")
    bucket.put("many/b.pt", b"x")
    assert "holds more than 1 objects" in run_command.refused(3, "inspect", "s3://bucket/many")


def test_a_folder_that_may_not_be_listed(bucket, run_command):
    bucket.put("closed/a.pt", b"x")
    bucket.order({"method": "GET", "status": 403, "code": "AccessDenied", "times": 9, "after": 1})
    err = run_command.refused(3, "inspect", "s3://bucket/closed")
    assert "access denied (AccessDenied); a folder needs s3:ListBucket" in err
    bucket.order()
    with pytest.raises(InputError, match="no such object"):
        ckpt8.load("s3://bucket/none")
    assert len(bucket.order()) <= 4


LAST = {"trainer": "trainer_state.json", "dcp": ".metadata", "packed": ".metadata"}
"""The object that completes a directory."""

WRITING = [
    ("restore", "@trainer", "-o", "OUT"),
    ("restore", "@dcp", "-o", "OUT"),
    ("restore", "@packed", "-o", "OUT"),
    ("restore", "--salvage", "@dcp", "-o", "OUT"),
    ("restore", "--salvage", "@packed", "-o", "OUT"),
    ("restore", "--salvage", "@damaged", "-o", "OUT"),
    ("convert", "@dcp", "OUT", "--to", "dcp"),
    ("convert", "@dcp", "OUT", "--to", "trainer"),
]


@pytest.fixture
def written(bucket):
    """An empty prefix, and a function that gives the objects below it, by their names."""
    prefix = f"{secrets.token_hex(4)}/back"

    def objects():
        listed = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", ())
        get = bucket.client.get_object
        keys = [each["Key"] for each in listed]
        return {key[len(prefix) + 1 :]: get(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    bucket.order()
    return f"s3://{BUCKET}/{prefix}", objects


@pytest.fixture(scope="module")
def containers(folder):
    """What has the directories, by their names."""
    for name in ("trainer", "dcp"):
        ckpt8.compress(folder / name, folder / f"{name}.ckpt8", preset="lossless")
    damaged = bytearray((folder / "dcp.ckpt8").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / "damaged.ckpt8").write_bytes(damaged)
    files = {path.stem: path for path in folder.glob("*.ckpt8")}
    return {**files, "packed": folder / "packed"}


def files_in(root):
    return {path: content for path, content in tree(root).items() if content is not None}


def key_of(url, name):
    return f"{url.partition(f'{BUCKET}/')[2]}/{name}"


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_directory_is_written_as_to_the_disk(command, containers, written, bucket, run_command, tmp_path):
    url, objects = written
    places = {f"@{name}": str(path) for name, path in containers.items()}

    def run(target):
        return run_command(*(places.get(word, word).replace("OUT", target) for word in command))

    with bucket.counted() as log:
        code, _, err = run(f"{url}/")
    assert (code, err[:0] if "@damaged" in command else err) == (int("@damaged" in command), "")
    assert run(str(tmp_path / "near"))[0] == code
    assert objects() == files_in(tmp_path / "near")
    makes = [entry for entry in log if entry["what"] in ("put", "complete")]
    assert all(entry["if_none_match"] == "*" for entry in makes)
    assert not any(entry["method"] == "DELETE" for entry in log)
    before = objects()
    code, _, err = run(url)
    assert (code, f"ckpt8: {url}: exists; use --force" in err) == (4, True)
    assert objects() == before


def test_what_completes_a_directory_comes_last(containers, written, bucket, run_command):
    for name, last in LAST.items():
        with bucket.counted() as log:
            run_command.shown("restore", containers[name], "-o", f"{written[0]}/{name}")
        makes = [entry["path"] for entry in log if entry["what"] in ("put", "complete")]
        assert makes[-1].endswith(f"/{name}/{last}")
        # A question for the name, one list, another before the last one; of each object how it was received.
        assert len(log) <= 3 + 5 * len(makes)


def test_force_replaces_a_directory_that_is_a_checkpoint(containers, written, bucket, run_command, folder, tmp_path):
    url, objects = written
    run_command.shown("restore", containers["dcp"], "-o", url)
    with bucket.counted() as log:
        out = run_command.shown("restore", containers["trainer"], "-o", url, "--force")
    assert f"replaced {url}: {len(files_in(folder / 'dcp'))} files, " in " ".join(out.split())
    assert objects() == files_in(folder / "trainer")
    removed = [entry for entry in log if entry["method"] == "DELETE"]
    assert removed[0]["path"].endswith("/.metadata")
    assert all(entry["if_match"] for entry in removed)
    bucket.put(key_of(url, "notes.txt"), b"mine")
    before = objects()
    assert "holds 'notes.txt', which is no part of a checkpoint" in run_command.refused(
        4, "restore", containers["dcp"], "-o", url, "--force"
    )
    assert objects() == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["trainer", "dcp"])
def test_a_kill_leaves_no_directory_that_is_complete(name, force, containers, written, folder, bucket, monkeypatch):
    """Before every request that changes something."""
    url, objects = written
    if force:
        ckpt8.restore(containers["dcp"], url)
    states = []
    for number in range(100):
        child = os.fork()
        if not child:
            turns = count()

            def die_in_turn(change, turns=turns, number=number):
                def changing(*arguments):
                    if next(turns) == number:
                        os._exit(9)
                    return change(*arguments)

                return changing

            for change in ("put", "complete", "delete"):
                setattr(S3Store, change, die_in_turn(getattr(S3Store, change)))
            ckpt8.restore(containers[name], url, force=bool(states) or force)
            os._exit(0)
        states.append(objects())
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        found = objects()
        is_old = force and number == 0
        assert is_old or not {*LAST.values()} & found.keys()
    assert objects() == files_in(folder / name)
    assert number >= len(files_in(folder / name))


def test_an_error_removes_what_was_sent(containers, written, run_command, monkeypatch):
    """Of the source, found when most is there; and of another program that writes to the same place."""
    url, objects = written
    send = FolderOutput.send

    def send_some(output, name, file):
        if name == "trainer_state.json":
            raise InputError("the source is damaged")
        send(output, name, file)

    monkeypatch.setattr(FolderOutput, "send", send_some)
    assert "the source is damaged" in run_command.refused(3, "restore", containers["trainer"], "-o", url)
    assert objects() == {}


@pytest.mark.parametrize("theirs", ["other.txt", "model-00002-of-00003.safetensors", "trainer_state.json"])
def test_another_program_that_writes_there(theirs, containers, written, bucket, run_command, monkeypatch):
    url, objects = written
    send = FolderOutput.send

    def send_beside(output, name, file):
        if name == "model-00001-of-00003.safetensors":
            bucket.client.put_object(Bucket=BUCKET, Key=key_of(url, theirs), Body=b"theirs")
        send(output, name, file)

    monkeypatch.setattr(FolderOutput, "send", send_beside)
    err = run_command.refused(4, "restore", containers["trainer"], "-o", url)
    assert ("exists; use --force" if "model" in theirs else "another program writes or removes files there") in err
    assert objects() == {theirs: b"theirs"}


def test_what_a_store_cannot_hold(folder, containers, written, run_command, monkeypatch, tmp_path):
    url, objects = written
    shutil.copytree(folder / "trainer", tmp_path / "linked")
    (tmp_path / "linked" / "latest.pt").symlink_to("optimizer.pt")
    ckpt8.compress(tmp_path / "linked", tmp_path / "linked.ckpt8", preset="lossless")
    err = run_command.refused(4, "restore", tmp_path / "linked.ckpt8", "-o", url)
    assert err == f"ckpt8: {url}: has a link 'latest.pt', which a store cannot hold; give a local path\n"
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    err = run_command.refused(4, "restore", containers["trainer"], "-o", url)
    assert re.search(r"No space left on device; it needs [0-9.]+ MB, in .* \(TMPDIR\) first$", err.strip())
    assert objects() == {}
