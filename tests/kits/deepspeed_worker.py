"""Runs of DeepSpeed on CPUs: ``python deepspeed_worker.py FOLDER WORLD CASE...`` trains, saves, and goes on.

A case is ``z1-bf16``, ``z2-fp32``, ... Every case is trained SAVED steps and saved to ``FOLDER/CASE``, compressed with
every preset, and restored. Then the run goes on from memory, and anew from restored checkpoints, which DeepSpeed itself
reads. A case that ends in ``-universal`` goes on from the universal form of its checkpoint. The losses of
rank 0 are written to ``FOLDER/losses-WORLD.json``: {case: {"none", preset or "no moments": [loss, ...]}}, the last for
a run that starts its moments anew.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

SAVED, LAST = 5, 9
PRESETS = ("lossless", "flash", "compact", "archive")
RESUMED = ("lossless", "flash")


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(300, 96), torch.nn.Linear(96, 601), torch.nn.LayerNorm(601), torch.nn.Linear(601, 301)
    )


def make_engine(stage, dtype, universal):
    import deepspeed

    model = make_model()
    groups = model.parameters()
    if stage == 2:  # as most trainers make them: what decays, and what does not
        matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"load_universal": universal},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def train(engine, rank, first, last):
    """The losses of steps ``first`` to ``last``, each of data of its own."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + rank)
        rows = torch.randint(0, 30, (4, 16), generator=generator).cumsum(1) % 300
        logits = engine(rows)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, 301), rows[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def to_universal(root, tag):
    from deepspeed.checkpoint.ds_to_universal import main

    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    folders = {"input_folder": str(root / tag), "output_folder": str(root / f"{tag}_universal")}
    main(Namespace(**folders, num_extract_workers=1, num_merge_workers=1, **flags))


def run_case(folder, case, rank):
    import ckpt8

    stage, dtype, *form = case.split("-")
    stage, universal = int(stage[1:]), bool(form)
    engine = make_engine(stage, dtype, universal=False)
    train(engine, rank, 0, SAVED)
    root, tag = folder / case, f"global_step{SAVED}"
    engine.save_checkpoint(str(root), tag=tag)
    losses = {"none": train(engine, rank, SAVED, LAST)}
    if rank == 0:
        if universal:
            to_universal(root, tag)
        for preset in PRESETS:
            ckpt8.compress(root, folder / f"{case}.{preset}.ckpt8", preset=preset)
            ckpt8.restore(folder / f"{case}.{preset}.ckpt8", folder / f"{case}.{preset}")
    dist.barrier()
    for preset in RESUMED:
        engine = make_engine(stage, dtype, universal)
        engine.load_checkpoint(str(folder / f"{case}.{preset}"), tag=f"{tag}_universal" if universal else tag)
        assert engine.global_steps == SAVED
        losses[preset] = train(engine, rank, SAVED, LAST)
    if stage == 1:
        engine = make_engine(stage, dtype, universal)
        engine.load_checkpoint(str(root), tag=tag, load_optimizer_states=False)
        losses["no moments"] = train(engine, rank, SAVED, LAST)
    return losses


def work(rank, world, folder, cases):
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "LOCAL_SIZE": world}
    os.environ.update({key: str(value) for key, value in local.items()})
    import deepspeed

    # Compiling it takes minutes, and gloo does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    losses = {case: run_case(folder, case, rank) for case in cases}
    if rank == 0:
        (folder / f"losses-{world}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    folder, world, *cases = sys.argv[1:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    run_ranks(work, int(world), int(world), Path(folder), cases)
