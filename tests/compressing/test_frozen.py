"""Frozen weights: those that no optimizer updates, and that a file named for it holds bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear

import ckpt8
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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose base is ``base.ckpt8``, with a checkpoint ``run.pt`` and a later one ``later.pt``."""
    monkeypatch.chdir(tmp_path)
    adapted = Adapted()
    # Of other names, and in another order, than in the run.
    save_file({f"h.{9 - layer}": weight for layer, weight in enumerate(adapted.layers)}, "base.safetensors")
    ckpt8.compress("base.safetensors", preset="lossless")
    torch.save(adapted.advance(20), "run.pt")
    torch.save(adapted.advance(3), "later.pt")
    return tmp_path


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
    [("archive", [*range(1, 18)]), ("lossless", [16 * number for number in range(1, 18)])],  # a new key each
)
def test_a_chain_stores_them_exactly_and_once(tmp_path, monkeypatch, preset, places):
    """Its first file does, and the keys after it refer to that."""
    monkeypatch.chdir(tmp_path)
    adapted = Adapted(rank=16)
    manifests = []
    for number in range(18):
        torch.save(adapted.advance(3 if number else 20), f"step-{number}.pt")
        manifests.append(ckpt8.compress(f"step-{number}.pt", preset=preset, base="auto"))
    first, *others = manifests
    assert [manifest.base.place for manifest in others] == places
    assert others[15].base.path == "step-0.ckpt8"
    trained = first.stored_nbytes - sum(
        record.stored_bytes for record in first.storages if record.numel == WIDTH * WIDTH
    )
    assert max(manifest.stored_nbytes for manifest in others) < 1.2 * trained + FROZEN_BYTES / 200
    assert all(is_exact("step-0.ckpt8", "step-0.pt", layer) for layer in range(LAYERS))
    # Whoever removes all but the newest loses nothing, and no more than what that needs is kept.
    for number in range(17):
        remove_container(tmp_path / f"step-{number}.ckpt8")
    assert all(is_exact("step-17.ckpt8", "step-17.pt", layer) for layer in range(LAYERS))
    assert ckpt8.verify("step-17.ckpt8", "step-17.pt").failures == ()
    assert len(list((tmp_path / "bases").iterdir())) == others[-1].base.links
    ckpt8.rebase("step-17.ckpt8", "alone.ckpt8")
    remove_container(tmp_path / "step-17.ckpt8")
    assert not (tmp_path / "bases").exists()
    assert all(is_exact("alone.ckpt8", "step-17.pt", layer) for layer in range(LAYERS))


def test_a_damaged_first_file_of_a_chain_costs_no_later_checkpoint(run):
    ckpt8.compress("run.pt", base="auto")
    content = bytearray((run / "run.ckpt8").read_bytes())
    for at in range(len(content) // 4, len(content) // 2, 997):
        content[at] ^= 255
    (run / "run.ckpt8").write_bytes(content)
    with pytest.warns(UserWarning, match="is stored whole, as a file below it is damaged"):
        ckpt8.compress("later.pt", base="auto")
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
        ({"frozen_from": "base.safetensors"}, UsageError, "ckpt8 compress base.safetensors --preset lossless"),
        ({"frozen_from": "lossy.ckpt8"}, UsageError, "holds none of the frozen weights"),
        ({"frozen_from": "gone.ckpt8"}, InputError, "gone.ckpt8: "),
        ({"frozen_from": "base.ckpt8", "base": "lossy.ckpt8"}, UsageError, "a file has one base"),
    ],
)
def test_what_is_refused(run, options, error, message):
    ckpt8.compress("base.safetensors", "lossy.ckpt8")
    with pytest.raises(error) as caught:
        ckpt8.compress("run.pt", "run.ckpt8", **options)
    assert message in str(caught.value)
    assert not (run / "run.ckpt8").exists()


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
        (["--frozen-from", "base.safetensors"], 2, "ckpt8 compress base.safetensors --preset lossless"),
        (["--frozen-from", "base.ckpt8", "--base", "base.ckpt8"], 2, "a file has one base"),
    ],
)
def test_a_preview_looks_at_the_file(run, run_command, options, code, message):
    status, out, err = run_command("compress", "run.pt", "--dry-run", *options)
    assert status == code
    assert message in (err if code else out)
    assert not (run / "run.ckpt8").exists()
