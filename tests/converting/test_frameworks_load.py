"""transformers loads what was converted of a Trainer checkpoint, and Trainer goes on from a converted directory."""

import pytest
import torch
from frameworks_kit import quiet
from safetensors.torch import load_file

import ckpt8

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import trainer_kit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED, LAST = 3, 6
TOKENS = torch.arange(48).view(2, 24) * 7 % 256


def losses(folder, resume_from=None):
    """Train a tiny Llama with tied embeddings; the losses of the steps after the first checkpoint."""
    trainer = trainer_kit.trainer(folder, max_steps=LAST, weight_decay=0.1, save_steps=SAVED)
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return list(trainer_kit.losses(trainer).values())[-(LAST - SAVED) :]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    with quiet():
        found = losses(folder)
    checkpoint = folder / f"checkpoint-{SAVED}"
    ckpt8.compress(checkpoint)
    return found, checkpoint


@pytest.mark.parametrize("form", ["directory", "container"])
def test_logits_are_those_of_the_bf16_cast(form, trained, tmp_path):
    _, checkpoint = trained
    source = checkpoint if form == "directory" else checkpoint.with_suffix(".ckpt8")
    ckpt8.convert(source, tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    kind = transformers.LlamaForCausalLM
    found, report = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = kind.from_pretrained(checkpoint, dtype=torch.float32)
    for parameter in expected.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}),
        ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}),
        *(
            (name, {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99})
            for name in ("BertForMaskedLM", "LlamaForCausalLM")
        ),
    ],
)
def test_names_are_those_that_save_pretrained_keeps(name, settings, tmp_path):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings, tie_word_embeddings=True))
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
