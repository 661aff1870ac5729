import pytest
import torch
from converting_kit import checkpoint, trained, trainer_directory
from dcp_kit import run_processes

import ckpt8


@pytest.fixture(scope="session")
def run():
    """A trained model and its optimizer that no test may change."""
    return trained()


@pytest.fixture(scope="session")
def forms(run, tmp_path_factory):
    """The run in every form that can be read, by name. No test may change them."""
    folder = tmp_path_factory.mktemp("forms")
    found = {name: folder / f"{name}.pt" for name in ("zip", "legacy")}
    torch.save(checkpoint(*run), found["zip"])
    torch.save(checkpoint(*run), found["legacy"], _use_new_zipfile_serialization=False)
    found["directory"] = trainer_directory(folder / "checkpoint-3", *run)
    for source in ("zip", "directory"):
        for preset in ("flash", "lossless"):
            found[f"{source} {preset}"] = folder / f"{source}.{preset}.ckpt8"
            ckpt8.compress(found[source], found[f"{source} {preset}"], preset=preset)
    return found


@pytest.fixture(scope="session")
def distributed(tmp_path_factory):
    """What two ranks of FSDP2 saved in every layout, by name of the folder, and the losses of the steps that followed.

    No test may change it.
    """
    root = tmp_path_factory.mktemp("distributed")
    return root, run_processes("train", root)
