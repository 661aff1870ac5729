"""accelerate under FSDP: every rank packs its slices, and accelerate goes on from them with more or fewer ranks."""

from __future__ import annotations

import os

import pytest
import torch
from sharded_kit import LAST, SAVED, batch, check_resumed, keep, loss_of, network, ranks_of, shard_on_cpu

import ckpt8
from ckpt8.core.errors import InputError, UsageError

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from ckpt8.integrations.accelerate import finish, load_state, save_state  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


def begin(version, kind, seed=0, *, cpu=True):
    """An accelerator that runs FSDP, with a network, its optimizer and its scheduler."""
    accelerate.state.AcceleratorState._reset_state(True)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=kind,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
        auto_wrap_policy="size_based_wrap",
        min_num_params=10,
        **({"use_orig_params": True} if version == 1 else {}),
    )
    # A step of the scheduler for every step of the run, and not for every rank.
    accelerator = accelerate.Accelerator(cpu=cpu, fsdp_plugin=plugin, step_scheduler_with_optimizer=False)
    assert accelerator.distributed_type == "FSDP"
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train(accelerator, model, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step).to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_and_load(folder):
    """Both kinds of FSDP: train to a checkpoint, go on, and from the checkpoint with another initialisation."""
    shard_on_cpu()
    for version in (1, 2):
        run = begin(version, KINDS[0])
        accelerator, model = run[:2]
        train(*run, range(SAVED))
        seen = []
        accelerator.register_save_state_pre_hook(lambda models, weights, place, seen=seen: seen.extend(models))
        place = f"{folder}/{version}-archive"
        assert save_state(accelerator, place, preset="archive", background=version == 2) == place
        assert seen == [model]  # hooks of the user's own get what accelerate gives them
        assert accelerator._models == [model]
        accelerator.save_state(f"{folder}/{version}-plain")
        keep(folder, f"{version}-expected", train(*run, range(SAVED, LAST)))
        finish(accelerator)
        run = begin(version, KINDS[0], seed=1)
        keep(folder, f"{version}-other", train(*run, range(LAST))[SAVED:])
    go_on(folder, [(1, "1-archive"), (2, "2-archive"), (2, "2-plain")])


def go_on(folder, cases):
    shard_on_cpu()
    for version, name in cases:
        run = begin(version, KINDS[0], seed=2)
        load_state(run[0], f"{folder}/{name}")
        keep(folder, f"{name}-{torch.distributed.get_world_size()}", train(*run, range(SAVED, LAST)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    ranks_of(save_and_load)(2, str(folder))
    ranks_of(go_on)(3, str(folder), [(1, "1-archive"), (2, "2-archive")])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("version", [1, 2])
def test_a_sharded_run_goes_on(version, ranks, saved):
    name, expected, other = f"{version}-archive-{ranks}", f"{version}-expected", f"{version}-other"
    check_resumed("archive", saved, name, expected=expected, other=other, moved=ranks == 3)
    place = saved / f"{version}-archive" / "ckpt8"
    assert sorted(path.name for path in place.iterdir()) == ["__0_0.ckpt8", "__1_0.ckpt8", "ckpt8-dcp.json"]
    for rank in (0, 1):
        with ckpt8.open(place / f"__{rank}_0.ckpt8") as file:
            manifest = file.manifest
        codecs = {manifest.storages[each.storage].codec["id"] for each in manifest.tensors if len(each.shape) == 2}
        assert codecs == {"lattice/1", "vscaled/1", "rclog/1"}  # weights and moments lie together


@pytest.mark.slow
def test_a_plain_checkpoint_is_left_to_accelerate(saved):
    check_resumed("lossless", saved, "2-plain-2", expected="2-expected", other="2-other", moved=False)


def test_without_fsdp_accelerate_is_named(tmp_path, monkeypatch):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(network())
    with monkeypatch.context() as ddp:
        ddp.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.MULTI_CPU)
        words = r"save_state: accelerate runs .*MULTI_CPU, not FSDP or one process; use accelerator\.save_state"
        with pytest.raises(UsageError, match=words):
            save_state(accelerator, tmp_path / "state")
    with pytest.raises(UsageError, match="is not a path of the file system"):
        save_state(accelerator, "s3://bucket/state")
    assert not (tmp_path / "state").exists()
    accelerator.save_state(str(tmp_path / "plain"))
    load_state(accelerator, tmp_path / "plain")
    ckpt8.compress(tmp_path / "plain")
    with pytest.raises(InputError, match=r"plain\.ckpt8: is a container; restore it"):
        load_state(accelerator, tmp_path / "plain.ckpt8")


def _on_gpu(rank, world, folder):
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"MASTER_ADDR": "127.0.0.1"}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world)) | {"MASTER_PORT": "29517"}
    for version in (1, 2):
        for kind in KINDS:
            run = begin(version, kind, cpu=False)
            train(*run, range(SAVED))
            place = save_state(run[0], f"{folder}/{version}-{kind}", preset="lossless")
            expected = train(*run, range(SAVED, LAST))
            run = begin(version, kind, seed=2, cpu=False)
            load_state(run[0], place)
            assert train(*run, range(SAVED, LAST)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_as_accelerate_runs_it_on_accelerators(tmp_path):
    """Without any pretence; whole state dicts under FSDP1 too, which torch offloads from accelerators alone."""
    world = torch.cuda.device_count()
    torch.multiprocessing.spawn(_on_gpu, (world, str(tmp_path)), nprocs=world)
