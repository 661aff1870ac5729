"""What an output is called and what it replaces.

An output that nobody named has the name of the input, never one that a container states. ``--force`` replaces a
checkpoint; of what else has the name of the output not one byte is lost.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from budget_kit import run_of
from hostile_kit import container_of
from safetensors.torch import save_file
from test_salvage import damage

import ckpt8
from ckpt8.checkpoint import replacing
from ckpt8.container.header import SEAL
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files import atomic

TREE = {"model": {"w": torch.arange(6400.0).reshape(80, 80)}}


def packed(folder, stored, container, write=torch.save):
    """A container in ``folder`` of a file that was called ``stored``; nothing else is there."""
    source = folder / "elsewhere" / stored
    source.parent.mkdir(parents=True)
    # torch writes to no name that is all suffix.
    write(TREE["model"] if write is save_file else TREE, source.with_name("new"))
    source.with_name("new").rename(source)
    ckpt8.compress(source, folder / container)
    shutil.rmtree(source.parent)
    return folder / container


def packed_directory(folder, stored, container):
    """A container of a directory that was called ``stored``."""
    root = folder / "elsewhere" / stored
    root.mkdir(parents=True)
    save_file(TREE["model"], root / "model.safetensors")
    (root / "config.json").write_text("{}")
    ckpt8.compress(root, folder / container)
    shutil.rmtree(root.parent)
    return folder / container


def legacy(tree, path):
    torch.save(tree, path, _use_new_zipfile_serialization=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


FILES = [  # name of the original, of the container, of the target
    ("run.pt", "run.ckpt8", "run.pt"), ("run.pt", "best.ckpt8", "best.pt"), ("run.ckpt", "best.ckpt8", "best.ckpt"),
    ("pytorch_model.bin", "pytorch_model.ckpt8", "pytorch_model.bin"), ("RUN.PTH", "RUN.CKPT8", "RUN.PTH"),
    ("epoch=1-loss=0.5.pt", "epoch=1-loss=0.5.ckpt8", "epoch=1-loss=0.5.pt"), ("weights", "w.ckpt8", "w.pt"),
    ("weights.model", "weights.ckpt8", "weights.pt"), ("torch.py", "run.ckpt8", "run.pt"),
    (".bashrc", "run.ckpt8", "run.pt"), (".profile.pt", "run.ckpt8", "run.pt"), ("run.ckpt8", "x.ckpt8", "x.pt"),
    ("last.pt", "last.ckpt", "last.pt"), ("run.pt", "downloaded", "downloaded.pt"), ("run.pt", "run.v2", "run.v2.pt"),
    ("last.ckpt", "last.ckpt.ckpt8", "last.ckpt"), ("last.ckpt", "best.pt.ckpt8", "best.pt"),
    ("run.pt", "a.safetensors.ckpt8", "a.safetensors.pt"), ("run.pt", ".ckpt8", ".ckpt8.pt"),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "container", "target"), FILES)
def test_a_file_has_the_name_of_its_container(stored, container, target, tmp_path):
    assert ckpt8.restore(packed(tmp_path, stored, container)) == tmp_path / target
    assert names(tmp_path) == sorted([container, target])
    restored = torch.load(tmp_path / target, weights_only=True)["model"]["w"]
    assert torch.allclose(restored, TREE["model"]["w"], rtol=1e-4)


@pytest.mark.parametrize(("write", "suffix"), [(torch.save, ".pt"), (legacy, ".pt"), (save_file, ".safetensors")])
def test_the_suffix_says_what_the_file_is(write, suffix, tmp_path):
    assert ckpt8.restore(packed(tmp_path, "weights.model", "x.ckpt8", write)) == tmp_path / f"x{suffix}"


def test_bytes_of_no_known_format(tmp_path):
    (tmp_path / "x.ckpt8").write_bytes(container_of(b"import os", "file", name="torch.py"))
    assert ckpt8.restore(tmp_path / "x.ckpt8") == tmp_path / "x.bin"
    assert names(tmp_path) == ["x.bin", "x.ckpt8"]


@pytest.mark.parametrize(("kind", "target"), [("file", "x.bin"), ("torch-zip", "x.pt")])
@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", ".", "..", "a\0b", "x/", "./x", "\ud800"])
def test_a_stored_name_that_is_a_path_is_not_used(name, kind, target, tmp_path):
    path = tmp_path / "folder" / "x.ckpt8"
    path.parent.mkdir()
    path.write_bytes(container_of(b"abc", kind, name=name))
    with pytest.raises(InputError) if name == "\ud800" else nullcontext():
        assert ckpt8.restore(path) == path.with_name(target)
        path.with_name(target).unlink()
    assert list(tmp_path.rglob("*")) == [path.parent, path]


DIRECTORIES = [
    ("checkpoint-1.5", "checkpoint-1.5.ckpt8", "checkpoint-1.5"), ("Documents", "run.ckpt8", "run"),
    (".ssh", "run.ckpt8", "run"), ("run", "best.CKPT8", "best"), ("torch", "run.v2.ckpt8", "run.v2"),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "container", "target"), DIRECTORIES)
def test_a_directory_has_the_name_of_its_container(stored, container, target, tmp_path):
    path = packed_directory(tmp_path, stored, container)
    assert ckpt8.restore(path) == tmp_path / target
    assert names(tmp_path) == sorted([container, target])
    assert names(tmp_path / target) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("container", ["..ckpt8", "...ckpt8", "run"])
def test_a_container_whose_name_is_no_name_for_a_directory(container, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = packed_directory(folder, "Documents", container)
    monkeypatch.chdir(tmp_path)
    for force in (False, True):
        with pytest.raises(OutputError, match="give"):
            ckpt8.restore(path, force=force)
    assert names(folder) == [container]
    assert ckpt8.restore(path, folder / "given") == folder / "given"


def damaged(path, entry):
    return damage(path, path, entry)


def test_what_is_salvaged_has_the_same_name(tmp_path):
    path = damaged(packed(tmp_path / "a", "torch.py", "best.ckpt8"), SEAL)
    found = ckpt8.restore(path, salvage=True)
    assert (found.path, found.original) == (tmp_path / "a" / "best.pt", "torch.py")
    path = damaged(packed_directory(tmp_path / "b", "Documents", "best.ckpt8"), SEAL)
    assert ckpt8.restore(path, salvage=True).path == tmp_path / "b" / "best"
    path = damaged(packed(tmp_path / "c", ".bashrc", "best.ckpt8"), "ckpt8.skeleton/bytes")
    assert ckpt8.restore(path, salvage=True).path == tmp_path / "c" / "best.pt.safetensors"


def test_the_command_says_what_the_original_was_called(run_command, tmp_path):
    path = packed(tmp_path, "run.pt", "best.ckpt8")
    code, out, err = run_command("restore", path)
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'best.pt'}: ")
    assert "the original was called 'run.pt'" in out
    code, out, err = run_command("restore", path, "--force", "--json")
    facts = json.loads(out)
    assert (facts["target"], facts["original"]) == (str(tmp_path / "best.pt"), "run.pt")
    path.rename(tmp_path / "run.ckpt8")
    code, out, err = run_command("restore", tmp_path / "run.ckpt8")
    assert "called" not in out
    code, out, err = run_command("restore", tmp_path / "run.ckpt8", "--salvage", "-o", tmp_path / "other.pt")
    assert "called" not in out


def test_a_stored_name_is_shown_as_text(run_command, tmp_path):
    (tmp_path / "x.ckpt8").write_bytes(container_of(b"abc", "file", name="\x1b[2J\n" + "x" * 5000))
    for option in ((), ("--salvage",)):
        code, out, _ = run_command("restore", tmp_path / "x.ckpt8", *option)
        assert code == 0
        assert "the original was called '\\x1b[2J" in out
        assert all(line.isprintable() and len(line) < 500 for line in out.split("\n"))
        (tmp_path / "x.bin").unlink()


def snapshot(folder):
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_symlink()]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def weights(path):
    save_file(TREE["model"], path)


def saved(path):
    torch.save(TREE, path)


def text(path):
    path.write_text("{}")


def mine(path):
    path.write_bytes(b"%PDF-1.7 the only copy")


def office(path):
    """A zip file is no checkpoint."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", "mine")


def cut_off(path):
    saved(path)
    path.write_bytes(path.read_bytes()[:3000])


def under(folder, files):
    return {f"{folder}/{name}": write for name, write in files.items()}


CHECKPOINT = {"model.safetensors": weights, "config.json": text}
TRAINER = CHECKPOINT | {
    **dict.fromkeys(("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"), saved),
    **dict.fromkeys(
        ("trainer_state.json", "tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json"), text
    ),
}
SHARDS = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
RANKS = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
DEEPSPEED = TRAINER | under("global_step500", dict.fromkeys(RANKS, saved)) | {"latest": text, "zero_to_fp32.py": text}
DISTRIBUTED = {".metadata": lambda path: path.write_bytes(b"\x80\x04."), "__0_0.distcp": saved, "__1_0.distcp": saved}
CHECKPOINTS = {
    "empty": {},
    "only empty directories": {"a/b": Path.mkdir},
    "Trainer": TRAINER,
    "shards": dict.fromkeys(SHARDS, weights) | {"model.safetensors.index.json": text},
    "DeepSpeed": DEEPSPEED,
    "distributed": DISTRIBUTED,
    "accelerate": CHECKPOINT
    | {"optimizer.bin": saved, "random_states_0.pkl": saved, "pytorch_model_fsdp_0": Path.mkdir}
    | under("optimizer_0", DISTRIBUTED),
    "Ckpt8StorageWriter": {"__0_0.ckpt8": lambda path: ckpt8.save(TREE, path), "ckpt8-dcp.json": text},
    "cut off": {"model.safetensors": lambda path: (weights(path), os.truncate(path, 500)), "config.json": text},
    "links": CHECKPOINT
    | {
        "latest.safetensors": lambda path: path.symlink_to("model.safetensors"),
        "nothing": lambda path: path.symlink_to("/nowhere"),
    },
}
DOCUMENTS = {"thesis.pdf": mine}
OTHERS = {
    "Documents": DOCUMENTS,
    "Downloads": CHECKPOINT | DOCUMENTS,
    "something deep": CHECKPOINT | {"a/b/model.safetensors": mine},
    "a repository": CHECKPOINT | {".git/config": mine},
    "several checkpoints": under("checkpoint-500", TRAINER) | under("checkpoint-1000", TRAINER),
    "several steps": under("global_step500", CHECKPOINT) | under("global_step1000", CHECKPOINT),
    "several models": CHECKPOINT | {"my_other_model.pt": saved},
    ".ssh": {"authorized_keys": mine, "config": mine},
    "names alone": {"config.json": text, "model.safetensors": mine},
    "a pipe": CHECKPOINT | {"model.bin": os.mkfifo},
    "a document": {"model.bin": office},
}


def make(root, files):
    """A directory with what the functions write at these places."""
    root.mkdir(parents=True)
    for name, write in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write(root / name)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Containers of a directory: whole, and damaged."""
    folder = tmp_path_factory.mktemp("sources")
    whole = packed_directory(folder, "Documents", "whole.ckpt8")
    torch.save(run_of([(80, 80)]), folder / "run.pt")
    return {"whole": whole, "broken": damage(whole, folder / "broken.ckpt8", SEAL), "run": folder / "run.pt"}


WRITES = {
    "restore": lambda sources, target: ckpt8.restore(sources["whole"], target, force=True),
    "salvage": lambda sources, target: ckpt8.restore(sources["broken"], target, force=True, salvage=True),
    "trainer": lambda sources, target: ckpt8.convert(sources["run"], target, to="trainer", force=True),
    "dcp": lambda sources, target: ckpt8.convert(sources["run"], target, to="dcp", force=True),
    "int8": lambda sources, target: ckpt8.convert(sources["run"], target, dtype="int8", force=True),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("write", WRITES)
def test_a_checkpoint_is_replaced(write, name, sources, tmp_path):
    make(tmp_path / "out", CHECKPOINTS[name])
    WRITES[write](sources, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    WRITES[write](sources, tmp_path / "fresh")
    assert snapshot(tmp_path / "out").keys() == snapshot(tmp_path / "fresh").keys()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("write", WRITES)
def test_nothing_else_is_replaced(write, name, sources, tmp_path):
    make(tmp_path / "out", OTHERS[name])
    before = snapshot(tmp_path)
    with pytest.raises(OutputError) as caught:
        WRITES[write](sources, tmp_path / "out")
    assert snapshot(tmp_path) == before
    said = str(caught.value)
    assert str(tmp_path / "out") in said
    assert "remove" in said
    assert "\n" not in said


def test_a_container_that_calls_itself_documents_beside_documents(tmp_path, run_command):
    """And one that is called so."""
    make(tmp_path / "Documents", DOCUMENTS)
    path = packed_directory(tmp_path, "Documents", "run.ckpt8")
    before = snapshot(tmp_path / "Documents")
    assert run_command("restore", path, "--force")[0] == 0
    assert names(tmp_path) == ["Documents", "run", "run.ckpt8"]
    code, out, err = run_command("restore", path.rename(tmp_path / "Documents.ckpt8"), "--force")
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "'thesis.pdf'" in err
    assert snapshot(tmp_path / "Documents") == before


def test_what_comes_back_may_be_replaced_whatever_it_holds(tmp_path):
    """Files that no framework writes are written again."""
    root = tmp_path / "run"
    make(root, CHECKPOINT | DOCUMENTS)
    (root / "logs" / "a").mkdir(parents=True)
    (root / "logs" / "a" / "events").write_text("x")
    ckpt8.compress(root)
    (root / "thesis.pdf").write_text("damaged")
    (root / "rng_state.pth").touch()
    ckpt8.restore(tmp_path / "run.ckpt8", force=True)
    assert (root / "thesis.pdf").read_bytes() == b"%PDF-1.7 the only copy"
    (root / "logs" / "a" / "more").write_text("mine")
    with pytest.raises(OutputError, match="'logs/a/more'"):
        ckpt8.restore(tmp_path / "run.ckpt8", force=True)
    assert (root / "logs" / "a" / "more").exists()


@pytest.mark.parametrize("swap", [True, False], ids=["exchange", "two steps"])
def test_what_comes_in_meanwhile_is_kept(swap, sources, tmp_path, monkeypatch):
    if not swap:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    for there in (False, True):
        target = tmp_path / f"out {there}"
        if there:
            make(target, CHECKPOINT)

        def meanwhile(_, target=target):
            target.mkdir(exist_ok=True)
            (target / "thesis.pdf").write_text("mine")

        with pytest.raises(OutputError, match=r"thesis\.pdf"):
            ckpt8.restore(sources["whole"], target, force=True, progress=meanwhile)
        assert (target / "thesis.pdf").read_text() == "mine"
    assert names(tmp_path) == ["out False", "out True"]


def test_a_directory_that_another_run_exchanges_is_looked_at_again(tmp_path, monkeypatch):
    """What is replaced is what was looked at."""
    target, other = tmp_path / "out", tmp_path / "other"
    make(target, CHECKPOINT)
    make(other, DOCUMENTS)
    look, turns = replacing._is_checkpoint, []

    def exchanged(path):
        if not turns:
            turns.append(target.rename(tmp_path / "old"))
            other.rename(target)
        return look(path)

    monkeypatch.setattr(replacing, "_is_checkpoint", exchanged)
    with pytest.raises(OutputError, match=r"'thesis\.pdf'"):
        replacing.checkpoint_directory()(target)
    assert turns


def test_home_and_mount_points_are_never_replaced(sources, tmp_path, monkeypatch):
    home = tmp_path / "users" / "me"
    make(home, CHECKPOINT)
    monkeypatch.setenv("HOME", str(home))
    before = snapshot(tmp_path)
    (tmp_path / "link").symlink_to(home)
    for target in (home, home.parent, tmp_path / "link"):
        with pytest.raises(OutputError, match="home directory"):
            ckpt8.restore(sources["whole"], target, force=True)
    (tmp_path / "link").unlink()
    assert snapshot(tmp_path) == before
    with pytest.raises(OutputError, match="mount point"):
        ckpt8.restore(sources["whole"], "/proc", force=True)


def test_a_file_system_in_a_checkpoint_is_not_emptied(sources, tmp_path, monkeypatch):
    make(tmp_path / "out", DEEPSPEED)
    before = snapshot(tmp_path)
    inner = tmp_path / "out" / "global_step500"
    monkeypatch.setattr(Path, "is_mount", lambda path: path == inner)
    with pytest.raises(OutputError, match="another file system"):
        ckpt8.restore(sources["whole"], tmp_path / "out", force=True)
    assert snapshot(tmp_path) == before


def test_a_directory_in_which_the_container_is_a_link_stays(sources, tmp_path):
    make(tmp_path / "out", CHECKPOINT)
    (tmp_path / "out" / "x.ckpt8").symlink_to(sources["whole"])
    before = snapshot(tmp_path)
    with pytest.raises(OutputError, match="holds the file that is read"):
        ckpt8.restore(tmp_path / "out" / "x.ckpt8", tmp_path / "out", force=True)
    assert snapshot(tmp_path) == before


# Files that nobody named


def firmware(path):
    path.write_bytes(b"\x7fELF" + bytes(100))


def container(path):
    ckpt8.save(TREE, path.with_suffix(".x"))
    path.with_suffix(".x").rename(path)


@pytest.mark.parametrize("write", [text, firmware, office])
def test_a_file_that_is_no_checkpoint_is_replaced_only_by_name(write, tmp_path):
    path, mine = packed(tmp_path, "firmware.bin", "firmware.ckpt8"), tmp_path / "firmware.bin"
    write(mine)
    before = snapshot(tmp_path)
    for salvage in (False, True):
        with pytest.raises(OutputError, match=r"is no checkpoint.*-o"):
            ckpt8.restore(path, force=True, salvage=salvage)
        assert snapshot(tmp_path) == before
    ckpt8.restore(path, mine, force=True)
    assert torch.load(mine, weights_only=True)


@pytest.mark.parametrize("write", [saved, cut_off, Path.touch, container])
def test_a_checkpoint_of_the_default_name_is_replaced(write, tmp_path):
    path = packed(tmp_path, "run.bin", "run.ckpt8")
    write(tmp_path / "run.bin")
    ckpt8.restore(path, force=True)
    assert torch.load(tmp_path / "run.bin", weights_only=True)


def test_tensors_alone_replace_no_other_file(tmp_path):
    """Their name is made of the target's, and nobody gave it."""
    path = damaged(packed(tmp_path, "run.pt", "run.ckpt8"), "ckpt8.skeleton/bytes")
    mine = tmp_path / "out.pt.safetensors"
    mine.write_text("mine")
    with pytest.raises(OutputError, match="is no checkpoint"):
        ckpt8.restore(path, tmp_path / "out.pt", force=True, salvage=True)
    assert mine.read_text() == "mine"
    save_file(TREE["model"], mine)
    assert ckpt8.restore(path, tmp_path / "out.pt", force=True, salvage=True).path == mine


def test_compress_replaces_no_other_file(run_command, tmp_path):
    torch.save(TREE, tmp_path / "run.pt")
    mine = tmp_path / "run.ckpt8"
    mine.write_text("mine")
    with pytest.raises(OutputError, match=r"is no checkpoint.*-o"):
        ckpt8.compress(tmp_path / "run.pt", force=True)
    assert run_command("compress", tmp_path / "run.pt", "--force")[0] == 4
    assert mine.read_text() == "mine"
    assert run_command("compress", tmp_path / "run.pt", "--force", "-o", mine)[0] == 0
    ckpt8.compress(tmp_path / "run.pt", force=True)


@pytest.mark.parametrize("force", [False, True])
def test_a_link_to_nothing_is_not_followed_from_a_default_name(force, tmp_path):
    (tmp_path / "dir").mkdir()
    path = packed(tmp_path, "run.pt", "run.ckpt8")
    whole = packed_directory(tmp_path / "dir", "run", "run.ckpt8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run.pt").symlink_to(elsewhere / "autostart.desktop")
    (tmp_path / "dir" / "run").symlink_to(elsewhere / "site-packages")
    (tmp_path / "x.ckpt8").symlink_to(elsewhere / "x")
    torch.save(TREE, tmp_path / "x.pt")
    for write in (
        lambda: ckpt8.restore(path, force=force),
        lambda: ckpt8.restore(path, force=force, salvage=True),
        lambda: ckpt8.restore(whole, force=force),
        lambda: ckpt8.compress(tmp_path / "x.pt", force=force),
    ):
        with pytest.raises(OutputError, match="is a link"):
            write()
    assert names(elsewhere) == []


def test_a_link_is_followed_to_a_checkpoint_alone(tmp_path):
    path = packed(tmp_path, "run.pt", "run.ckpt8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "bashrc").write_text("mine")
    torch.save({}, elsewhere / "real.pt")
    link = tmp_path / "run.pt"
    link.symlink_to(elsewhere / "bashrc")
    with pytest.raises(OutputError, match="is no checkpoint"):
        ckpt8.restore(path, force=True)
    assert (elsewhere / "bashrc").read_text() == "mine"
    link.unlink()
    link.symlink_to(elsewhere / "real.pt")
    ckpt8.restore(path, force=True)
    assert link.is_symlink()
    assert "model" in torch.load(elsewhere / "real.pt", weights_only=True)


@pytest.mark.parametrize(("force", "name"), [(True, "circle"), (False, "circle/x")])
def test_links_in_a_circle_are_no_target(force, name, sources, tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    target = tmp_path / name
    for write in (
        lambda: ckpt8.compress(sources["run"], target, force=force),
        lambda: ckpt8.restore(sources["whole"], target, force=force),
        lambda: ckpt8.convert(sources["run"], target, to="torch", force=force),
    ):
        with pytest.raises(OutputError, match="levels of symbolic links"):
            write()
    assert names(tmp_path) == ["circle"]
    assert (tmp_path / "circle").is_symlink()


def test_the_commands_say_what_they_replaced(sources, run_command, tmp_path):
    target = tmp_path / "out"
    make(target, TRAINER)
    nbytes = sum(path.stat().st_size for path in target.iterdir())
    said = f"{target}: {len(names(target))} files, {nbytes:,} bytes"
    restore, salvage = (("restore", sources[name], "-o", target) for name in ("whole", "broken"))
    convert = "convert", sources["run"], target, "--to"
    for command in (
        restore, (*restore, "--json"), (*salvage, "--salvage", "--json"), (*salvage, "--salvage"),
        (*convert, "trainer"), (*convert, "dcp", "--json"),
    ):  # fmt: skip
        _, out, _ = run_command(*command, "--force")
        if "--json" in command:
            assert json.loads(out)["replaced"].startswith(said)
        else:
            assert f"replaced {said}" in out
        said = f"{target}: 2 files, "
    _, out, _ = run_command("restore", sources["whole"], "-o", tmp_path / "new", "--json")
    assert json.loads(out)["replaced"] is None
    link = tmp_path / "link"
    link.symlink_to(target)
    _, out, _ = run_command("restore", sources["whole"], "-o", link, "--force")
    assert f"replaced {target}: " in out
