"""transformers loads what was converted of a Trainer checkpoint, and Trainer goes on from a converted directory."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpt_kit import training_arguments
from safetensors.torch import load_file

import ckpt8

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED, LAST = 3, 6
TOKENS = torch.arange(48).view(2, 24) * 7 % 256


def losses(folder, resume_from=None):
    """Train a tiny Llama with tied embeddings; the loss by step, the last ones first saved after."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (24,), generator=generator).cumsum(0) % 256 for _ in range(32)]
    arguments = training_arguments(
        folder,
        max_steps=LAST,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_steps=SAVED,
        logging_steps=1,
    )
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-(LAST - SAVED) :]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = losses(folder)
    checkpoint = folder / f"checkpoint-{SAVED}"
    ckpt8.compress(checkpoint)
    return found, checkpoint


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def loaded(folder, source, dtype):
    """A model that transformers loads from a folder of its config and one file of weights, all of one type."""
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    model, report = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


@pytest.mark.parametrize("form", ["directory", "container"])
def test_logits_are_those_of_the_bf16_cast(form, trained, tmp_path):
    _, checkpoint = trained
    source = checkpoint if form == "directory" else checkpoint.with_suffix(".ckpt8")
    ckpt8.convert(source, tmp_path / "model.safetensors")
    found = loaded(tmp_path, checkpoint, torch.bfloat16)
    expected = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for parameter in expected.parameters():
        parameter.data = parameter.data.bfloat16()
    assert torch.equal(logits(found), logits(expected))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}),
        ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}),
        ("BertForMaskedLM", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}),
        ("LlamaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}),
    ],
)
def test_names_are_those_that_save_pretrained_keeps(name, settings, tmp_path):
    kind = getattr(transformers, name)
    config = kind.config_class(**settings, tie_word_embeddings=True)
    model = kind(config)
    model.save_pretrained(tmp_path / "theirs")
    torch.save({"model": model.state_dict()}, tmp_path / "run.pt")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "ours.safetensors", dtype="float32")
    theirs, ours = load_file(tmp_path / "theirs" / "model.safetensors"), load_file(tmp_path / "ours.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


def test_trainer_goes_on_from_a_converted_directory(trained, tmp_path):
    expected, checkpoint = trained
    target = tmp_path / f"checkpoint-{SAVED}"
    report = ckpt8.convert(checkpoint, target, to="trainer")
    names = {path.name for path in target.iterdir()}
    assert names == {path.name for path in checkpoint.iterdir()}
    for path in checkpoint.iterdir():
        if path.name not in ("model.safetensors", "optimizer.pt"):
            assert (target / path.name).read_bytes() == path.read_bytes()
    assert not report.dropped
    assert losses(tmp_path / "again", target) == expected


def test_trainer_goes_on_from_one_file_with_everything(trained, tmp_path):
    """Through a .pt and back, with the files that a .pt does not hold put beside it."""
    expected, checkpoint = trained
    ckpt8.convert(checkpoint, tmp_path / "run.pt")
    target = tmp_path / f"checkpoint-{SAVED}"
    report = ckpt8.convert(tmp_path / "run.pt", target, to="trainer")
    assert any("trainer_state.json" in note for note in report.notes)
    for path in checkpoint.iterdir():
        if not (target / path.name).exists():
            (target / path.name).write_bytes(path.read_bytes())
    assert losses(tmp_path / "again", target) == expected
