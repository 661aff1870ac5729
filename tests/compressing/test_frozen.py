"""Frozen weights: those that no optimizer updates, and that a file named for it holds bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear

import ckpt8
from ckpt8.compressing import chosen_base, compressor
from ckpt8.container.bases import kept_name
from ckpt8.container.header import stated_seal
from ckpt8.container.kept_bases import remove_container
from ckpt8.core.errors import InputError, UsageError

WIDTH, RANK, LAYERS = 320, 2, 3
FROZEN_BYTES = LAYERS * WIDTH * WIDTH * 4


def frozen_name(layer):
    return f"base_model.model.layers.{layer}.base_layer.weight"


class Adapted:
    """Frozen layers with trained adapters, named as peft names them."""

    def __init__(self, rank=RANK):
        self.random = torch.Generator().manual_seed(1)
        self.layers = [torch.randn(WIDTH, WIDTH, generator=self.random) * 0.05 for _ in range(LAYERS)]
        self.adapters = {}
        for layer in range(LAYERS):
            for name, shape in ("A", (rank, WIDTH)), ("B", (WIDTH, rank)):
                values = torch.randn(shape, generator=self.random) * 0.05
                self.adapters[f"base_model.model.layers.{layer}.lora_{name}.default.weight"] = nn.Parameter(values)
        self.optimizer = torch.optim.AdamW(self.adapters.values(), lr=1e-3)

    def advance(self, steps):
        """Train; return a checkpoint."""
        for _ in range(steps):
            inputs = torch.randn(16, WIDTH, generator=self.random)
            hidden, pairs = inputs, list(self.adapters.values())
            for layer, weight in enumerate(self.layers):
                down, up = pairs[2 * layer : 2 * layer + 2]
                hidden = torch.tanh(linear(hidden, weight) + linear(linear(hidden, down), up))
            (hidden - inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        model = {frozen_name(layer): weight.clone() for layer, weight in enumerate(self.layers)}
        model |= {name: value.detach().clone() for name, value in self.adapters.items()}
        return {"model": model, "optimizer": self.optimizer.state_dict()}


@pytest.fixture(scope="module")
def trained(scratch):
    """A run whose base is ``base.ckpt8``, with a checkpoint ``run.pt`` and a later one ``later.pt``."""
    adapted = Adapted()
    # Of other names, and in another order, than in the run.
    save_file({f"h.{9 - layer}": weight for layer, weight in enumerate(adapted.layers)}, scratch / "base.safetensors")
    ckpt8.compress(scratch / "base.safetensors", preset="lossless")
    torch.save(adapted.advance(20), scratch / "run.pt")
    torch.save(adapted.advance(3), scratch / "later.pt")
    return scratch


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """The same run in the working directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def restored(name):
    ckpt8.restore(name, "restored.pt", force=True)
    return torch.load("restored.pt")["model"]


def is_exact(name, source, layer):
    original = torch.load(source)["model"][frozen_name(layer)]
    return torch.equal(restored(name)[frozen_name(layer)].view(torch.int32), original.view(torch.int32))


@pytest.mark.parametrize("preset", ["flash", "archive", "lossless"])
def test_frozen_weights_are_exact_and_take_no_room(run, preset):
    checkpoint = torch.load("run.pt")
    for layer in range(LAYERS):
        del checkpoint["model"][frozen_name(layer)]
    torch.save(checkpoint, "adapters.pt")
    alone = ckpt8.compress("adapters.pt", preset=preset).stored_nbytes
    stored = ckpt8.compress("run.pt", "run.ckpt8", preset=preset, frozen_from="base.ckpt8").stored_nbytes
    assert stored < alone + FROZEN_BYTES / 200
    assert all(is_exact("run.ckpt8", "run.pt", layer) for layer in range(LAYERS))
    assert ckpt8.verify("run.ckpt8", "run.pt").failures == ()
    # Neither does the next of the chain store them.
    later = ckpt8.compress("later.pt", preset=preset, base="run.ckpt8").stored_nbytes
    assert later < alone + FROZEN_BYTES / 200
    assert all(is_exact("later.ckpt8", "later.pt", layer) for layer in range(LAYERS))
    chosen = ckpt8.compress("later.pt", "auto.ckpt8", preset=preset, base="auto", frozen_from="base.ckpt8")
    assert chosen.base is not None
    assert chosen.stored_nbytes < alone + FROZEN_BYTES / 200


@pytest.mark.parametrize(
    ("preset", "places"),
    [("archive", [*range(1, 6)]), ("lossless", [4, 8, 12])],  # a new key each
)
def test_a_chain_stores_them_exactly_and_once(tmp_path, monkeypatch, preset, places):
    """Its first file does, and the keys after it refer to that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chosen_base, "LENGTH", 4)
    adapted = Adapted(rank=16)
    manifests = []
    embedding = torch.randn(100, 100)
    last = len(places)
    for number in range(last + 1):
        checkpoint = adapted.advance(3 if number else 20)
        torch.save({**checkpoint, "model": {**checkpoint["model"], "embedding": embedding}}, f"step-{number}.pt")
        manifests.append(ckpt8.compress(f"step-{number}.pt", preset=preset, base="auto"))
    first, *others = manifests
    assert [manifest.base.place for manifest in others] == places
    assert {other.base.path for other, place in zip(others, places, strict=True) if place % 4 == 0} == {"step-0.ckpt8"}
    for other, place in zip(others, places, strict=True):
        differences = {record.name for record in other.storages if record.base is not None}
        assert any("lora" in name for name in differences) == bool(place % 4)  # a key has what is trained as it is
    trained = first.stored_nbytes - sum(
        record.stored_bytes for record in first.storages if record.numel in (WIDTH * WIDTH, embedding.numel())
    )
    assert max(manifest.stored_nbytes for manifest in others) < 1.2 * trained + FROZEN_BYTES / 200
    assert all(is_exact("step-0.ckpt8", "step-0.pt", layer) for layer in range(LAYERS))
    # Whoever removes all but the newest loses nothing, and no more than what that needs is kept.
    for number in range(last):
        remove_container(tmp_path / f"step-{number}.ckpt8")
    newest, original = f"step-{last}.ckpt8", f"step-{last}.pt"
    assert all(is_exact(newest, original, layer) for layer in range(LAYERS))
    assert ckpt8.verify(newest, original).failures == ()
    assert len(list((tmp_path / "bases").iterdir())) == others[-1].base.links
    ckpt8.rebase(newest, "alone.ckpt8")
    remove_container(tmp_path / newest)
    assert not (tmp_path / "bases").exists()
    assert all(is_exact("alone.ckpt8", original, layer) for layer in range(LAYERS))


def write_trainer(checkpoint, folder, _):
    folder.mkdir()
    save_file(checkpoint["model"], folder / "model.safetensors")
    torch.save(checkpoint["optimizer"], folder / "optimizer.pt")


def write_distributed(checkpoint, folder, names):
    groups = [{**group, "params": names} for group in checkpoint["optimizer"]["param_groups"]]
    state = {names[number]: state for number, state in checkpoint["optimizer"]["state"].items()}
    whole = {"model": checkpoint["model"], "optim": {"state": state, "param_groups": groups}}
    torch.distributed.checkpoint.save(whole, checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_trainer, write_distributed])
def test_a_chain_of_directories_stores_them_exactly_and_once(tmp_path, write):
    adapted = Adapted(rank=16)
    for step in (10, 20, 30):
        write(adapted.advance(20), tmp_path / f"step-{step}", list(adapted.adapters))
    outcomes = ckpt8.chain(tmp_path, preset="archive", rest=0)
    assert max(outcome.stored for outcome in outcomes[1:]) < FROZEN_BYTES / 10
    with ckpt8.open(tmp_path / "step-30.ckpt8") as file:
        for layer, weight in enumerate(adapted.layers):
            name = next(name for name in file if name.endswith(frozen_name(layer)))
            assert torch.equal(torch.as_tensor(file[name]), weight)


@pytest.mark.parametrize("frozen_from", [None, "run.ckpt8"])
def test_a_damaged_first_file_of_a_chain_costs_no_later_checkpoint(run, frozen_from):
    ckpt8.compress("run.pt", base="auto")
    content = bytearray((run / "run.ckpt8").read_bytes())
    for at in range(len(content) // 4, len(content) // 2, 997):
        content[at] ^= 255
    (run / "run.ckpt8").write_bytes(content)
    with pytest.warns(UserWarning, match="is stored whole, as a file below it is damaged"):
        ckpt8.compress("later.pt", base="auto", frozen_from=frozen_from)
    assert all(is_exact("later.ckpt8", "later.pt", layer) for layer in range(LAYERS))


def test_what_may_be_trained_is_stored_as_its_preset_says(run):
    """Two weights of one shape, one of them trained, and no name that tells which; the third cannot be it."""
    model = {"a": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH, WIDTH), "c": torch.randn(WIDTH, WIDTH + 1)}
    model["d"] = torch.randn(RANK, WIDTH)
    trained = [nn.Parameter(model["b"].clone()), nn.Parameter(model["d"].clone())]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    sum(parameter.square().sum() for parameter in trained).backward()
    optimizer.step()
    model |= {"b": trained[0].detach(), "d": trained[1].detach()}
    average = {name: weight * 0.9 for name, weight in model.items()}
    torch.save({"model": model, "ema": average, "optimizer": optimizer.state_dict()}, "mixed.pt")
    manifest = ckpt8.compress("mixed.pt", base="auto")
    lossless = {record.name for record in manifest.storages if record.codec["id"] == "lossless/1"}
    large = {f"{owner}.{name}" for owner in ("model", "ema") for name in "abc"}
    assert lossless & large == {"model.c"}


def test_one_bit_is_enough_to_be_stored(run):
    checkpoint = torch.load("run.pt")
    checkpoint["model"][frozen_name(1)].view(torch.int32)[-1, -1] ^= 1
    torch.save(checkpoint, "run.pt")
    plain = ckpt8.compress("run.pt", "plain.ckpt8")
    manifest = ckpt8.compress("run.pt", "run.ckpt8", frozen_from="base.ckpt8")
    frozen = {record.name for record in manifest.storages if record.base is not None}
    assert frozen == {f"model.{frozen_name(layer)}" for layer in (0, 2)}
    changed = f"model.{frozen_name(1)}"
    one, other = (next(each for each in file.storages if each.name == changed) for file in (manifest, plain))
    assert one == other


def test_a_trained_weight_is_none(run):
    """An optimizer has state for it; that its bits are those of the file makes it no frozen weight."""
    original = torch.load("run.pt")["model"][frozen_name(0)]
    weight = nn.Parameter(original.clone())
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    weight.square().sum().backward()
    optimizer.step()
    torch.save({"model": {"h.9": original}, "optimizer": optimizer.state_dict()}, "full.pt")
    with pytest.raises(UsageError, match="holds none of the frozen weights"):
        ckpt8.compress("full.pt", frozen_from="base.ckpt8")
    assert not (run / "full.ckpt8").exists()


@pytest.mark.parametrize("kind", ["safetensors", "pt", "directory", "directory around the run"])
def test_a_plain_file_is_packed_once(run, kind):
    """Into ``bases/``, from where it goes with the last container that needs it."""
    folder = run / ("plain/runs/out" if "around" in kind else "out")
    folder.mkdir(parents=True)
    weights = load_file("base.safetensors")
    if kind == "pt":
        torch.save(weights, "plain")
    elif "directory" in kind:
        (run / "plain").mkdir(exist_ok=True)
        save_file({name: weights.pop(name) for name in list(weights)[:1]}, "plain/model-00001-of-00002.safetensors")
        save_file(weights, "plain/model-00002-of-00002.safetensors")
    else:
        save_file(weights, "plain")
    (run / "base.ckpt8").unlink()
    first = ckpt8.compress("run.pt", folder / "run.ckpt8", preset="archive", frozen_from="plain")
    ckpt8.save(torch.load("later.pt"), folder / "later.ckpt8", preset="archive", frozen_from="plain")
    last = ckpt8.save(torch.load("later.pt"), folder / "last.ckpt8", frozen_from="plain", background=True).result()
    (packed,) = (folder / "bases").iterdir()
    assert {first.base.path, last.base.path} == {f"bases/{packed.name}"}
    assert first.stored_nbytes < FROZEN_BYTES / 20
    folder.rename(run / "moved")
    for name, source in ("run", "run.pt"), ("later", "later.pt"), ("last", "later.pt"):
        assert all(is_exact(f"moved/{name}.ckpt8", source, layer) for layer in range(LAYERS))
        remove_container(run / "moved" / f"{name}.ckpt8")
    assert not (run / "moved" / "bases").exists()


@pytest.mark.parametrize("frozen_from", ["base.safetensors", "base.ckpt8", "other disk/base.ckpt8"])
def test_a_chain_begins_with_the_file(run, monkeypatch, frozen_from):
    """From then on it needs the file no more, nor any container but the newest."""
    link = os.link

    def link_on_one_disk(source, target, **how):
        if "other disk" in str(source):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, target, **how)

    monkeypatch.setattr(os, "link", link_on_one_disk)
    (run / "other disk").mkdir()
    shutil.copy("base.ckpt8", "other disk")
    adapted = Adapted(rank=16)
    for number in (1, 2, 3):
        torch.save(adapted.advance(20 if number == 1 else 1), f"step-{number}.pt")
    (run / "run.pt").unlink()
    (run / "later.pt").unlink()
    outcomes = ckpt8.chain(run, preset="archive", rest=0, frozen_from=frozen_from)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.base for outcome in outcomes[1:]] == ["step-1.ckpt8"] * 2
    for number in (1, 2, 3):
        assert (run / f"step-{number}.ckpt8").stat().st_size < FROZEN_BYTES / 5
    for path in (run / frozen_from, run / "base.ckpt8", run / "step-1.ckpt8", run / "step-2.ckpt8"):
        path.unlink(missing_ok=True)
    shutil.rmtree("other disk")
    assert all(is_exact("step-3.ckpt8", "step-3.pt", layer) for layer in range(LAYERS))


def damaged(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 255
    path.write_bytes(content)


@pytest.mark.by_default("missing-auto", "empty-None", "head-chain", "frame-auto")
@pytest.mark.parametrize(
    ("what", "again"),
    [("missing", "chain"), ("missing", "auto"), ("empty", None), ("head", "chain"), ("head", "auto")]
    + [("frame", again) for again in ("chain", "auto", None)],
)
def test_the_packed_file_is_made_again(run, what, again):
    """The containers that needed the lost one are read from the new one, whichever call makes it."""
    (run / "base.ckpt8").unlink()  # it is the same
    ckpt8.compress("run.pt", base="auto", frozen_from="base.safetensors")
    (packed,) = (run / "bases").iterdir()
    content = packed.read_bytes()
    if what == "missing":
        shutil.rmtree("bases")
    elif what == "empty":
        packed.write_bytes(b"")
    else:
        damaged(packed, 40 if what == "head" else len(content) // 2)
    with pytest.raises(InputError):
        ckpt8.restore("run.ckpt8", "restored.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if again == "chain":
            assert not any(outcome.error for outcome in ckpt8.chain(run, rest=0, frozen_from="base.safetensors"))
        else:
            ckpt8.save(torch.load("later.pt"), "later.ckpt8", base=again, frozen_from="base.safetensors")
    assert packed.read_bytes() == content
    for name in "run", "later":
        assert all(is_exact(f"{name}.ckpt8", f"{name}.pt", layer) for layer in range(LAYERS))


def test_what_is_left_of_a_packed_file_of_another_version_stays(run, monkeypatch):
    """A new one has another seal, so that the old containers need the old one."""
    (run / "base.ckpt8").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(compressor, "__version__", "0.0.9")
        ckpt8.compress("run.pt", frozen_from="base.safetensors")
    (packed,) = (run / "bases").iterdir()
    seal = stated_seal(packed)
    damaged(packed, packed.stat().st_size // 2)
    left = packed.read_bytes()
    ckpt8.compress("later.pt", frozen_from="base.safetensors")
    assert (run / "bases" / kept_name(seal)).read_bytes() == left
    assert all(is_exact("later.ckpt8", "later.pt", layer) for layer in range(LAYERS))
    ckpt8.restore("run.ckpt8", "restored.pt", salvage=True, force=True)
    original, model = (torch.load(name)["model"] for name in ("run.pt", "restored.pt"))
    assert sum(torch.equal(original[name], model[name]) for name in map(frozen_name, range(LAYERS))) == LAYERS - 1


@pytest.mark.parametrize("base", ["auto", None])
@pytest.mark.parametrize("why", ["gone", "matches nothing"])
def test_a_run_goes_on_without_the_file(tmp_path, monkeypatch, why, base):
    """With one warning. What it holds is in ``bases/``, and all that is frozen stays exact."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chosen_base, "LENGTH", last := 4)
    adapted = Adapted(rank=16)
    save_file({f"h.{layer}": weight for layer, weight in enumerate(adapted.layers)}, "base.safetensors")

    def save(number):
        checkpoint = adapted.advance(1)
        torch.save(checkpoint, f"step-{number}.pt")
        how = {"base": base, "frozen_from": "base.safetensors", "preset": "archive"}
        return ckpt8.save(checkpoint, f"step-{number}.ckpt8", **how).stored_nbytes

    save(0)
    if why == "gone":
        (tmp_path / "base.safetensors").unlink()
    else:
        adapted.layers = [weight * 1.5 for weight in adapted.layers]
    with pytest.warns(UserWarning, match="goes on without its file: base.safetensors: ") as warned:
        stored = [save(number) for number in range(1, last + 1)]
    assert len(warned) == 1
    # After the change those that have the file before it as their base: numbers 1, 2, and the next key.
    most = 0 if why == "gone" else 3 if base else last
    assert sum(nbytes > FROZEN_BYTES / 2 for nbytes in stored) <= most
    assert all(is_exact(f"step-{last}.ckpt8", f"step-{last}.pt", layer) for layer in range(LAYERS))
    # A run that begins with such a file is a mistake.
    torch.save(adapted.advance(1), "new.pt")
    (tmp_path / "new").mkdir()
    with pytest.raises((InputError, UsageError), match=r"base\.safetensors: (cannot be read|holds none of the frozen)"):
        ckpt8.compress("new.pt", "new/new.ckpt8", base=base, frozen_from="base.safetensors")
    assert not list((tmp_path / "new").rglob("*.ckpt8"))


def test_a_chain_keeps_a_frozen_weight_that_was_edited(run):
    """Exactly, whether the file holds it or not, from one checkpoint to the next."""
    for name, edited in ("run.pt", 0), ("later.pt", 1):
        checkpoint = torch.load(name)
        checkpoint["model"][frozen_name(edited)][0, 0] += 1
        torch.save(checkpoint, name)
        ckpt8.compress(name, base="auto", frozen_from="base.safetensors")
        assert all(is_exact(name.replace(".pt", ".ckpt8"), name, layer) for layer in range(LAYERS))


@pytest.mark.parametrize("named", ["run.pt", "checkpoint-5/model.safetensors"])
def test_the_file_itself_is_never_removed(run, run_command, named):
    write_trainer(torch.load("run.pt"), run / "checkpoint-5", None)
    source = run / named.partition("/")[0]
    outcomes = ckpt8.chain(run, rest=0, remove=True, frozen_from=named)
    assert {outcome.source for outcome in outcomes if not outcome.removed} == {source}
    assert [outcome.error for outcome in outcomes] == [None] * 3
    # A run without ``frozen_from`` was about to.
    source.rename(run / f".{source.name}.{stated_seal(source.with_suffix('.ckpt8'))[:16]}.ckpt8-removed")
    (outcome, *_) = ckpt8.chain(run, rest=0, remove=True, frozen_from=named)
    assert f"--frozen-from names it; {source.name} is back" in str(outcome.error)
    status, out, _ = run_command("compress", source, "-o", "one.ckpt8", "--remove", "--frozen-from", named, "--json")
    assert (status, json.loads(out.splitlines()[-1])["removed"]) == (0, False)
    assert (run / named).is_file()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_between_the_packed_file_and_its_delta_leaves_a_run_that_goes_on(run):
    publish = compressor.Compressor.publish

    def killed(self, *arguments):
        if self.base is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(self, *arguments)

    if not (child := os.fork()):
        compressor.Compressor.publish = killed
        ckpt8.compress("run.pt", "run.ckpt8", frozen_from="base.safetensors")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (run / "run.ckpt8").exists()
    (packed,) = (run / "bases").glob("*.ckpt8")
    before = packed.stat()
    ckpt8.compress("run.pt", "run.ckpt8", frozen_from="base.safetensors")
    assert [path.stat() for path in (run / "bases").iterdir()] == [before]
    assert all(is_exact("run.ckpt8", "run.pt", layer) for layer in range(LAYERS))


def test_without_its_file_one_line_says_what_is_missing(run, monkeypatch):
    ckpt8.compress("run.pt", "run.ckpt8", frozen_from="base.ckpt8")
    (run / "elsewhere").mkdir()
    (run / "base.ckpt8").rename(run / "elsewhere" / "kept.ckpt8")
    with pytest.raises(InputError, match=r"its base base\.ckpt8 .* is missing.*--base-dir"):
        ckpt8.restore("run.ckpt8", "restored.pt")
    ckpt8.compress("base.safetensors", "base.ckpt8", preset="flash")
    with pytest.raises(InputError, match=r"its base base\.ckpt8 .* is changed"):
        ckpt8.restore("run.ckpt8", "restored.pt")
    monkeypatch.setenv("CKPT8_BASE_DIR", "elsewhere")
    ckpt8.restore("run.ckpt8", "restored.pt")
    assert torch.equal(
        torch.load("restored.pt")["model"][frozen_name(2)], torch.load("run.pt")["model"][frozen_name(2)]
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frozen_from": "other.safetensors"}, UsageError, "other.safetensors: holds none of the frozen weights"),
        ({"frozen_from": "empty.pt"}, InputError, "empty.pt: an empty file"),
        ({"frozen_from": "notes.txt"}, InputError, "notes.txt: "),
        ({"frozen_from": "folder"}, InputError, "folder: "),
        ({"frozen_from": "lossy.ckpt8"}, UsageError, "holds none of the frozen weights"),
        ({"frozen_from": "gone.ckpt8"}, InputError, "gone.ckpt8: "),
        ({"frozen_from": "base.ckpt8", "base": "lossy.ckpt8"}, UsageError, "a file has one base"),
    ],
)
def test_what_is_refused(run, options, error, message):
    ckpt8.compress("base.safetensors", "lossy.ckpt8")
    save_file({"w": torch.zeros(WIDTH, WIDTH)}, "other.safetensors")
    (run / "empty.pt").touch()
    (run / "notes.txt").write_text("no checkpoint")
    (run / "folder").mkdir()
    before = sorted(run.rglob("*"))
    for save in partial(ckpt8.compress, "run.pt"), partial(ckpt8.save, torch.load("run.pt")):
        with pytest.raises(error) as caught:
            save("run.ckpt8", **options)
        assert message in str(caught.value)
        assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("frozen_from", ["base.ckpt8", None])
def test_a_file_whose_lossy_weight_was_refused_holds_against_its_original(run, frozen_from):
    """Steps were counted before the only weight that was to be lossy turned out to hold NaN."""
    parameter = nn.Parameter(torch.randn(RANK, WIDTH))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    parameter.square().sum().backward()
    optimizer.step()
    model = {"broken": torch.full((WIDTH, WIDTH), torch.nan), "A": parameter.detach()}
    if frozen_from is not None:
        model["h.9"] = torch.load("run.pt")["model"][frozen_name(0)]
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, "small.pt")
    assert not ckpt8.compress("small.pt", frozen_from=frozen_from).is_lossy
    assert ckpt8.verify("small.ckpt8", "small.pt").failures == ()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--frozen-from", "base.ckpt8"], 0, "less as a delta to base.ckpt8"),
        (["--frozen-from", "base.ckpt8", "--base", "auto"], 0, "would be written"),
        (["--frozen-from", "gone.ckpt8"], 3, "gone.ckpt8: "),
        (["--frozen-from", "base.safetensors"], 0, "less as a delta to base.safetensors"),
        (["--frozen-from", "empty.pt"], 3, "empty.pt: an empty file"),
        (["--frozen-from", "base.ckpt8", "--base", "base.ckpt8"], 2, "a file has one base"),
    ],
)
def test_a_preview_looks_at_the_file(run, run_command, options, code, message):
    (run / "empty.pt").touch()
    status, out, err = run_command("compress", "run.pt", "--dry-run", *options)
    assert status == code
    assert message in (err if code else out)
    assert not {run / "run.ckpt8", run / "bases"} & {*run.iterdir()}


@pytest.mark.parametrize("named", ["gone.ckpt8", "gone.pt", "empty.bin"])
@pytest.mark.parametrize("command", [["compress", "later.pt", "--base", "auto"], ["chain", "."]])
def test_a_preview_of_a_run_that_is_under_way_goes_on_without_the_file(run, run_command, command, named):
    """As the run itself does."""
    (run / "empty.bin").touch()
    ckpt8.compress("run.pt", base="auto")
    with pytest.warns(UserWarning, match=f"the run goes on without its file: {named}"):
        status, out, _ = run_command(*command, "--dry-run", "--frozen-from", named)
    assert (status, "later.ckpt8" in out) == (0, True)
    assert run_command(*command, "--frozen-from", named)[0] == 0
