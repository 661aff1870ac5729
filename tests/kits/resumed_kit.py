"""What is saved of a run of ``resume_kit``, what it is resumed into, and that a refusal changes nothing."""

import pytest
import torch
from resume_kit import Net, groups, same, snapshot

import ckpt8
import ckpt8.optim
from ckpt8.codecs.split24 import Split24, Split32
from ckpt8.core.errors import ResumeError
from ckpt8.optim.state_conversion import join_weight

PACKED = {
    "torch-adamw": "AdamW",
    "torch-adam": "Adam",
    "torch-sgd-momentum": "SGD",
    "optimi-stable-adamw": "StableAdamW",
    "pytorch-optimizer-stable-adamw": "StableAdamW",
    "came-pytorch": "CAME",
    "pytorch-optimizer-came": "CAME",
    "optimi-lion": "Lion",
    "pytorch-optimizer-lion": "Lion",
    "lion-pytorch": "Lion",
    "torch-adafactor": "Adafactor",
}
"""Published optimizer to packed class."""


def fresh(make, dtype=torch.float32, **settings):
    """Another model, and its optimizer before the first step: a published one, or the packed class of a name."""
    model = Net(seed=9, dtype=dtype)
    if not isinstance(make, str):
        return model, make(groups(model), 0.1)
    if make == "SGD":
        settings["momentum"] = 0.5
    return model, getattr(ckpt8.optim, make)(groups(model), lr=0.5 if make == "SGD" else 0.004, **settings)


def narrow_rest(model, dtype):
    """What is narrow in a narrow model, and no optimizer completes."""
    model.norm.to(dtype)
    model.frozen.data = model.frozen.data.to(dtype)


def masters(model, optimizer):
    """The weights in full, by name."""
    found = {}
    for name, param in model.named_parameters():
        state = optimizer.state.get(param) or {}
        part = state.get("residual", state.get("master"))
        codec = Split32() if part is not None and part.dtype == torch.int16 else Split24()
        found[name] = param.detach().float() if part is None else join_weight(param, part, codec)
    return found


def tree_of(model, optimizer, **more):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def save(path, model, optimizer, **settings):
    """A checkpoint at step 3, as torch saves it or, in a ``.ckpt8``, as ckpt8 does."""
    tree = tree_of(model, optimizer, step=3)
    if path.suffix == ".pt":
        torch.save(tree, path)
    else:
        ckpt8.save(tree, path, **settings)
    return path


def write(folder, tree, form="raw"):
    """``tree`` in a file that torch saves, or in the container of this file under the preset ``form``."""
    path = folder / "run.pt"
    torch.save(tree, path)
    if form == "raw":
        return path
    ckpt8.compress(path, preset=form, threads=1, force=True)
    path.unlink()
    return path.with_suffix(".ckpt8")


def refused(path, model, optimizer, match, error=ResumeError):
    """Resume fails with one line that names the file, and changes nothing."""
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=match) as caught:
        ckpt8.resume(path, model, optimizer)
    assert same(snapshot(model, optimizer), before)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return caught.value
