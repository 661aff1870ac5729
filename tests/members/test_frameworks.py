"""Checkpoint directories that transformers and accelerate wrote: runs go on from the restored directory."""

from __future__ import annotations

import warnings

import pytest
import torch

import ckpt8

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED, LAST = 6, 12


def losses(folder, resume_from=None):
    """Train a tiny Llama with tied embeddings; the loss by step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (32,), generator=generator).cumsum(0) % 512 for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=LAST,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_steps=SAVED,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
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
        return losses(folder), folder / f"checkpoint-{SAVED}"


@pytest.mark.parametrize(("preset", "drift"), [("lossless", 0.0), ("flash", 1e-3), ("compact", 5e-3)])
def test_the_run_goes_on(preset, drift, trained, tmp_path):
    expected, checkpoint = trained
    container = tmp_path / f"checkpoint-{SAVED}.ckpt8"
    manifest = ckpt8.compress(checkpoint, container, preset=preset)
    formats = {member.path: member.format for member in manifest.members}
    assert formats["model.safetensors"] == "safetensors"
    assert formats["optimizer.pt"] == "torch-zip"
    assert formats["trainer_state.json"] == "file"
    assert not ckpt8.verify(container, checkpoint).failures
    restored = ckpt8.restore(container)
    assert restored.name == checkpoint.name
    for path in checkpoint.rglob("*.json"):
        assert (restored / path.name).read_bytes() == path.read_bytes()
    found = losses(tmp_path / "again", restored)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= drift
    names = {parameter.name for parameter in manifest.parameters}
    assert {"optimizer.pt:model.embed_tokens.weight", "optimizer.pt:model.layers.1.self_attn.v_proj.weight"} <= names
    assert not any(name.startswith("optimizer.pt:state.") for name in names)


def test_a_sharded_model(trained, tmp_path):
    _, checkpoint = trained
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="500KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    ckpt8.compress(tmp_path / "sharded")
    restored = transformers.LlamaForCausalLM.from_pretrained(
        ckpt8.restore(tmp_path / "sharded.ckpt8", tmp_path / "back")
    )
    for name, tensor in restored.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=2e-5, atol=0)


def test_a_state_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    data = torch.randn(16, 80, generator=torch.Generator().manual_seed(1))

    def step():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    step()
    accelerator.save_state(str(tmp_path / "state"))
    expected = [step() for _ in range(3)]
    manifest = ckpt8.compress(tmp_path / "state", preset="lossless")
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl"} <= {m.path for m in manifest.members}
    accelerator.load_state(str(ckpt8.restore(tmp_path / "state.ckpt8", tmp_path / "back")))
    assert [step() for _ in range(3)] == expected


def test_the_model_loads_from_the_restored_directory(trained, tmp_path):
    _, checkpoint = trained
    ckpt8.compress(checkpoint, tmp_path / "x.ckpt8")
    restored = ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "model")
    before = transformers.LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    model = transformers.LlamaForCausalLM.from_pretrained(restored)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=2e-5, atol=0)
    live = transformers.LlamaForCausalLM(model.config)
    ckpt8.resume(tmp_path / "x.ckpt8", model=live, member="model.safetensors")
    assert all(torch.equal(live.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
