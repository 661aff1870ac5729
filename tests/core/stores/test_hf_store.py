"""Files of a Hub: read at one commit, in ranges, with a token that stays there; faults end in one line."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from hub_kit import running
from safetensors.torch import save_file

import ckpt8
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.stores import attempts
from ckpt8.core.files.stores.hf import HfStore

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
NAME, CONTENT = "owner/name", bytes(range(256)) * 40


@pytest.fixture(scope="module")
def servers():
    with running() as servers:
        yield servers


@pytest.fixture
def hub(servers, monkeypatch):
    hub, endpoint = servers
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(attempts.Attempts, "wait", lambda self, asked=0.0: None)
    hub.commits.clear()
    hub.gated.clear()
    hub.order()
    hub.commit(NAME, model__pt=CONTENT, empty=b"")
    hub.log.clear()
    return hub


def store(name=NAME):
    from ckpt8.core.files.stores.hf import HfStore

    return HfStore(name)


def read(found, version, start, length, key="model.pt"):
    buffer = bytearray(length)
    found.fill(key, version.tag, start, memoryview(buffer))
    return bytes(buffer)


def test_first_bytes_and_a_range(hub):
    found = store()
    version, head = found.first("model.pt", 100)
    assert (version.size, head) == (len(CONTENT), CONTENT[:100])
    assert read(found, version, 5000, 300) == CONTENT[5000:5300]
    assert [entry["method"] for entry in hub.log] == ["HEAD", "GET", "GET"]
    assert found.first("empty", 10) == (found.stat("empty"), b"")
    assert found.stat("nothing") is None


def test_ranges_are_of_the_first_commit(hub):
    found = store()
    version, _ = found.first("model.pt", 10)
    hub.commit(NAME, other=b"1")
    assert found.stat("model.pt") == version
    hub.commit(NAME, model__pt=CONTENT[::-1])
    assert read(found, version, 100, 50) == CONTENT[100:150]
    assert found.stat("model.pt") != version
    hub.signature += 1  # what was signed is signed anew, for the same bytes
    assert read(found, version, 100, 50) == CONTENT[100:150]


def test_revisions_and_kinds(hub):
    first = hub.commits[NAME][0][0]
    hub.commit(NAME, model__pt=b"new")
    assert store(f"{NAME}@{first}").first("model.pt", 3)[1] == CONTENT[:3]
    assert store(f"datasets/{NAME}").first("model.pt", 3)[1] == b"new"
    assert "/datasets/owner/name/resolve/main/model.pt" in [entry["path"] for entry in hub.log]


def test_passing_faults_and_a_cut_body(hub):
    found = store()
    hub.order(503, 429, None, 503, -1000, None)
    _, head = found.first("model.pt", 4000)
    assert head == CONTENT[:4000]
    starts = [int(entry["range"][6:].split("-")[0]) for entry in hub.log if entry["method"] == "GET"]
    assert starts == sorted(starts)
    assert 1000 in starts


@pytest.mark.parametrize(
    ("prepare", "name", "line"),
    [
        (lambda hub: hub.order(*[503] * 9), NAME, "hf://owner/name/model.pt: cannot be read: .*503"),
        (lambda hub: hub.gated.add(NAME), NAME, "owner/name is gated; accept its terms"),
        (lambda hub: hub.commits.clear(), NAME, "there is no model owner/name, or it is private: run hf auth login"),
        (lambda hub: None, f"{NAME}@v2", "owner/name has no revision v2"),
        (lambda hub: hub.order(None, *[403] * 9), NAME, "access|cannot be read|private"),
    ],
    ids=["lasting", "gated", "none", "revision", "forbidden"],
)
def test_what_cannot_be_read_ends_in_one_line(hub, prepare, name, line):
    prepare(hub)
    with pytest.raises(InputError, match=line) as caught:
        store(name).first("model.pt", 10)
    assert "\n" not in str(caught.value)
    assert len(hub.log) <= 12


def test_names_that_are_none():
    for name in ("owner", "a/b/c", "owner/name@", "@main"):
        with pytest.raises(UsageError, match="names no repository"):
            store(name)


@pytest.fixture
def run(hub, tmp_path):
    """A checkpoint and its container, here and on the Hub."""
    torch.manual_seed(0)
    torch.save({"model": {f"layers.{k}.weight": torch.randn(300, 300) for k in range(4)}}, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    hub.commit(NAME, **{f"run__{suffix}": (tmp_path / f"run.{suffix}").read_bytes() for suffix in ("pt", "ckpt8")})
    hub.log.clear()
    return tmp_path


URL = f"hf://{NAME}/run"


def test_commands_give_what_they_give_for_a_file(run, hub, run_command):
    assert run_command("inspect", f"{URL}.ckpt8")[0] == 0
    assert [entry["method"] for entry in hub.log] == ["HEAD", "GET", "GET"]
    assert run_command("restore", f"{URL}.ckpt8", "-o", run / "back.pt")[0] == 0
    assert run_command("restore", run / "run.ckpt8", "-o", run / "local.pt")[0] == 0
    assert (run / "back.pt").read_bytes() == (run / "local.pt").read_bytes()
    assert run_command("verify", f"{URL}.ckpt8", "--against", f"{URL}.pt")[0] == 0
    assert run_command("compress", f"{URL}.pt", "-o", run / "made.ckpt8")[0] == 0
    assert (run / "made.ckpt8").read_bytes() == (run / "run.ckpt8").read_bytes()
    with ckpt8.open(f"{URL}.pt") as there, ckpt8.open(run / "run.pt") as here:
        assert torch.equal(there["model.layers.2.weight"], here["model.layers.2.weight"])


@pytest.fixture
def sharded(hub, tmp_path):
    """A repository of sharded safetensors in a folder and at its top, here and on the Hub."""
    folder = tmp_path / "name"
    (folder / "last").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        name = f"model-0000{number + 1}-of-00003.safetensors"
        for place in (folder, folder / "last"):
            save_file({f"layers.{number}.weight": torch.randn(200, 200, generator=generator)}, place / name)
    (folder / "config.json").write_text("{}")
    hub.commits[NAME] = [("c" * 40, {str(path.relative_to(folder)): path.read_bytes() for path in files_in(folder)})]
    hub.log.clear()
    return folder


def files_in(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("inside", ["", "last"])
def test_a_repository_is_a_directory_of_one_commit(inside, sharded, hub, run_command, tmp_path):
    url, local = f"hf://{NAME}/{inside}".rstrip("/"), sharded / inside
    far = run_command("inspect", url, "--json")
    near = run_command("inspect", local, "--json")
    assert far[0] == 0
    assert {**json.loads(far[1]), "path": ""} == {**json.loads(near[1]), "path": ""}
    asked = [entry["path"] for entry in hub.log]
    assert sum("/api/models/" in path for path in asked) == 1
    assert all(f"/resolve/{'c' * 40}/" in path for path in asked if "/resolve/" in path and "/last/" in path)
    assert run_command("diff", url, local)[0] == 0
    assert run_command("verify", url)[0] == 0
    assert run_command("compress", url, "-o", tmp_path / "far.ckpt8")[0] == 0
    assert run_command("compress", local, "-o", tmp_path / "near.ckpt8")[0] == 0
    assert (tmp_path / "far.ckpt8").read_bytes() == (tmp_path / "near.ckpt8").read_bytes()


def test_what_somebody_pushes_while_a_repository_is_read_is_not_seen(sharded, hub, run_command, tmp_path, monkeypatch):
    run_command("compress", sharded, "-o", tmp_path / "near.ckpt8")
    objects = HfStore.objects

    def list_and_push(*arguments, **options):
        listed = objects(*arguments, **options)
        before = hub.commits[NAME][-1][1]
        hub.commits[NAME].append(("d" * 40, {name: body[::-1] for name, body in before.items()}))
        return listed

    monkeypatch.setattr(HfStore, "objects", list_and_push)
    assert run_command("compress", f"hf://{NAME}", "-o", tmp_path / "far.ckpt8")[0] == 0
    assert (tmp_path / "far.ckpt8").read_bytes() == (tmp_path / "near.ckpt8").read_bytes()


def test_what_the_hub_is_not_for(run, hub, run_command):
    code, _, err = run_command("compress", f"{URL}.pt")
    assert (code, err.count("\n")) == (2, 1)
    assert "write a local file, and push it with hf upload" in err
    with pytest.raises(UsageError, match="push it with hf upload"):
        ckpt8.save({"x": torch.ones(3)}, f"{URL}2.ckpt8")
    code, _, err = run_command("inspect", f"hf://{NAME}/nothing.pt")
    assert (code, err.count("\n")) == (3, 1)
    assert f"hf://{NAME}/nothing.pt: cannot be read" in err
    assert run_command("inspect", "hf://owner")[0] == 2
    code, _, err = run_command("restore", run / "run.ckpt8", "-o", f"{URL}2.pt")
    assert (code, err.count("\n")) == (2, 1)
    assert not [entry for entry in hub.log if entry["method"] not in ("HEAD", "GET")]


@pytest.mark.parametrize(
    ("url", "repository", "key"),
    [
        ("hf://a/b/c.pt", "a/b", "c.pt"),
        ("hf://a/b@v1/d/c.pt", "a/b@v1", "d/c.pt"),
        ("hf:/datasets/a/b/c.pt", "datasets/a/b", "c.pt"),
        ("hf://a/b@refs/pr/1/c.pt", "a/b@refs/pr/1", "c.pt"),
        ("hf://datasets/a/b@refs/convert/x/d/c.pt", "datasets/a/b@refs/convert/x", "d/c.pt"),
    ],
)
def test_urls(url, repository, key, monkeypatch):
    asked = []
    monkeypatch.setattr("ckpt8.core.files.stores.path._repository", asked.append)
    monkeypatch.setattr("ckpt8.core.files.stores.path.Content.at", lambda name, store, key: asked.append((name, key)))
    path = as_path(url)
    assert not path.exists()
    assert asked == [repository, (f"hf://{repository}/{key}", key)]


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with pytest.raises(UsageError, match=r"pip install 'ckpt8\[hf\]'"):
        store().stat("model.pt")


@pytest.mark.parametrize("place", ["hf://owner/base/model.safetensors", "hf://owner/base"])
def test_frozen_weights_of_a_file_of_the_hub(place, hub, tmp_path):
    """The run has its own base then, and asks for no bytes of that file again."""
    weight = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    save_file({"w": weight}, tmp_path / "base.safetensors")
    hub.commit("owner/base", model__safetensors=(tmp_path / "base.safetensors").read_bytes())
    adapter = torch.ones(4, 4)
    state = {"step": torch.tensor(1.0), "exp_avg": adapter * 1e-3, "exp_avg_sq": adapter * 1e-6}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    tree = {"model": {"base.w": weight, "lora": adapter}, "optimizer": {"state": {0: state}, "param_groups": [group]}}
    for number in (1, 2):
        ckpt8.save(tree, tmp_path / f"{number}.ckpt8", frozen_from=place)
        assert (tmp_path / f"{number}.ckpt8").stat().st_size < weight.nbytes / 10
    hub.commits.clear()
    assert torch.equal(ckpt8.load(tmp_path / "2.ckpt8")["model"]["base.w"], weight)
    assert len([*(tmp_path / "bases").iterdir()]) == 1
