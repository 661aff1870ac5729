"""The GPT of tests and scripts: it learns, and it is reproducible."""

from __future__ import annotations

import io

import pytest
import torch
from gpt_kit import SIZES, VOCABULARY, GPTConfig, Run, RunConfig, batch, build_model, config_for_bytes, corpus, train

TINY = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32)


def adamw(groups, lr):
    return torch.optim.AdamW(groups, lr=lr)


def stored(checkpoint):
    """What torch.load gives of it."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
def test_the_loss_falls():
    losses = []
    checkpoint = train(TINY, adamw, 40, lr=5e-3, on_step=lambda _, loss: losses.append(loss))
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    assert checkpoint["iter_num"] == len(losses) == 40
    assert 1 < checkpoint["best_val_loss"].item() < losses[0] - 1


def test_the_checkpoint_is_nanogpts():
    checkpoint = train(TINY, adamw, 2)
    model, groups = checkpoint["model"], checkpoint["optimizer"]["param_groups"]
    assert list(checkpoint) == ["model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"]
    block = [f"h.0.{name}" for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")]
    modules = {name.removesuffix(".weight").removesuffix(".bias") for name in model}
    assert modules == {"lm_head", *(f"transformer.{name}" for name in ("wte", "wpe", "ln_f", *block))}
    assert model["transformer.wte.weight"].data_ptr() == model["lm_head.weight"].data_ptr()
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    dims = [checkpoint["optimizer"]["state"][i]["exp_avg"].dim() for group in groups for i in group["params"]]
    assert dims == sorted(dims, reverse=True)
    assert dims.count(2) == len(groups[0]["params"])
    assert stored(checkpoint)["model_args"]["n_embd"] == 32


def test_weights_and_batches_depend_on_seed_and_step_alone():
    state = torch.get_rng_state()
    first, again, other = (build_model(TINY, seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    sizes = {"batch_size": 4, "block_size": 16}
    x, y = batch(3, seed=1, **sizes)
    assert torch.equal(x, batch(3, seed=1, **sizes)[0])
    assert torch.equal(x[:, 1:], y[:, :-1])
    for step, seed, held_out in ((4, 1, False), (3, 2, False), (3, 1, True)):
        assert not torch.equal(x, batch(step, seed=seed, held_out=held_out, **sizes)[0])
    assert torch.equal(state, torch.get_rng_state())
    assert b"def " in bytes(VOCABULARY[i] for i in corpus()[:100_000].tolist())


def test_a_run_in_two_parts_equals_one_run():
    whole = train(TINY, adamw, 6, seed=2)
    resumed = train(TINY, adamw, 6, seed=2, start=stored(train(TINY, adamw, 3, seed=2, horizon=6)))
    assert all(torch.equal(whole["model"][name], resumed["model"][name]) for name in whole["model"])


def test_learning_rates():
    cosine = RunConfig(horizon=10, lr=1.0, warmup=3)
    assert [round(cosine.lr_at(step), 4) for step in (0, 2, 3, 10, 12)] == [0.25, 0.75, 1.0, 0.1, 0.1]
    constant = RunConfig(horizon=10, lr=1.0, schedule="constant")
    assert constant.lr_at(0) == constant.lr_at(9) == 1.0


def test_a_bfloat16_run_has_bfloat16_moments():
    run = Run(TINY, RunConfig(horizon=2, dtype="bfloat16"), adamw)
    run.advance()
    state = run.checkpoint()["optimizer"]["state"]
    assert {entry["exp_avg_sq"].dtype for entry in state.values()} == {torch.bfloat16}


def test_sizes():
    assert sum(p.numel() for p in build_model(TINY, seed=1).parameters()) == TINY.n_params
    assert SIZES["10m"].n_params == 10_782_720
    assert 300_000 < SIZES["tiny"].n_params < 400_000
    for nbytes in (10**6, 3 * 10**6, 10**8, 25 * 10**7, 5 * 10**8, 15 * 10**8, 4 * 10**9, 8 * 10**9):
        config = config_for_bytes(nbytes)
        assert 12 * config.n_params == pytest.approx(nbytes, rel=0.05)
        assert config.n_embd % config.n_head == 0
    with pytest.raises(ValueError, match="no network"):
        config_for_bytes(1000)
