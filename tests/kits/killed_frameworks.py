"""A run of Trainer or Lightning that keeps to rules and a room, and kills itself before its n-th change of a folder.

    python killed_frameworks.py trainer|lightning FOLDER NUMBER

It goes on from the newest checkpoint. It prints how many changes it made where it comes to its end: renames, links,
removals, and files of torch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from ckpt8.core.files import atomic

KEEP, ROOM, LAST = "last:2,every:3", {"trainer": 850_000, "lightning": 250_000}, 8


def count_changes(last: int) -> list[int]:
    """The number of changes so far, in a list; the process dies before the one of number ``last``."""
    changes = [0]

    def counted(change):
        def run(*arguments, **options):
            changes[0] += 1
            if changes[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return run

    for name in ("rename", "replace", "unlink", "link", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    atomic._renameat2, torch.save = counted(atomic._renameat2), counted(torch.save)
    return changes


def fit_trainer(folder: Path, resumed: Path) -> None:
    from trainer_kit import trainer as made

    from ckpt8.integrations.transformers import Ckpt8Callback, restored_checkpoint

    policy = Ckpt8Callback(keep_original=False, keep=KEEP, to=ROOM["trainer"], strict=True)
    start = restored_checkpoint(folder, resumed / str(os.getpid()))
    made(folder, [policy], save_steps=1, max_steps=LAST).train(resume_from_checkpoint=start)


def fit_lightning(folder: Path, resumed: Path) -> None:
    import lightning
    from test_lightning_io import Net, batches
    from test_lightning_io import trainer as made

    from ckpt8.integrations.lightning import Ckpt8CheckpointIO

    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    plugin = Ckpt8CheckpointIO(keep=KEEP, to=ROOM["lightning"])
    made(resumed, LAST, [plugin], [saving]).fit(Net(), batches(), ckpt_path=str(saved[-1]) if saved else None)


if __name__ == "__main__":
    place = Path(sys.argv[2])
    for name in ("run", "resumed"):
        (place / name).mkdir(exist_ok=True)
    count = count_changes(int(sys.argv[3]))
    {"trainer": fit_trainer, "lightning": fit_lightning}[sys.argv[1]](place / "run", place / "resumed")
    print(f"changes: {count[0]}")
