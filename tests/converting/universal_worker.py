"""One process of DeepSpeed on a CPU: trains three steps at ZeRO stage STAGE, saves, and makes it universal.

``python universal_worker.py FOLDER STAGE`` writes ``FOLDER/run/step``, ``FOLDER/run/step_universal``, and
``FOLDER/expected.pt``, which is what DeepSpeed's zero_to_fp32 makes of the former.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder, stage):
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # Compiling it takes minutes, and gloo does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 5))
    optimizer = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 33, dtype=torch.bfloat16)).square().mean())
        engine.step()
    run = folder / "run"
    engine.save_checkpoint(str(run), tag="step")
    ds_to_universal.main(
        Namespace(
            input_folder=str(run / "step"),
            output_folder=str(run / "step_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    state = get_fp32_state_dict_from_zero_checkpoint(str(run), tag="step")
    torch.save({name: tensor.clone() for name, tensor in state.items()}, folder / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
