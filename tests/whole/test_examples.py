"""The examples in the docstrings of everything public: they run, and they print what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckpt8

INTEGRATIONS = {
    "transformers": ("Ckpt8Callback", "Ckpt8TrainerMixin", "restored_checkpoint", "temporary_checkpoint"),
    "lightning": ("Ckpt8CheckpointIO", "Ckpt8StrategyMixin", "opened"),
    "accelerate": ("save_state", "load_state"),
    "torchtitan": ("Ckpt8CheckpointManager",),
    "dcp": ("Ckpt8StorageReader", "Ckpt8StorageWriter"),
}
PUBLIC = [
    *((ckpt8, name) for name in ckpt8.__all__ if name not in ("__version__", "nn", "optim")),
    *((ckpt8.optim, name) for name in ckpt8.optim.__all__ if name != "OPTIMIZERS"),
    *((ckpt8.nn, name) for name in ckpt8.nn.__all__ if name != "HEADS"),
]


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What an example may use: ``run.pt`` and ``run.ckpt8`` in the working directory, their model and optimizer."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 128)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, "run.pt")
    ckpt8.compress("run.pt")
    return {"ckpt8": ckpt8, "torch": torch, "model": model, "optimizer": optimizer}


def check(thing, names):
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", names, thing.__name__, None, None)
    assert example.examples, f"{thing.__name__} has no example"
    out = []
    results = doctest.DocTestRunner(verbose=False).run(example, out=out.append)
    assert results.failed == 0, "".join(out)


@pytest.mark.parametrize(("home", "name"), PUBLIC, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_an_example(home, name, names):
    check(getattr(home, name), names)


def test_the_example_of_the_results(names):
    page = (Path(ckpt8.__file__).parent / "guide" / "python.md").read_text()
    example = re.search(r"```python\n(.*?)```", page[page.index("## Results") :], re.DOTALL)[1]
    check(SimpleNamespace(__doc__=example, __name__="Results"), names)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "framework",
    [pytest.param(each, marks=pytest.mark.torchtitan if each == "torchtitan" else ()) for each in INTEGRATIONS],
)
def test_an_example_of_an_integration(framework, names):
    if framework != "dcp":
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    module = importlib.import_module(f"ckpt8.integrations.{framework}")
    for name in INTEGRATIONS[framework]:
        check(getattr(module, name), names)
