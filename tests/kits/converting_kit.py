"""Small runs with everything that conversion meets: tied weights, buffers, wrappers' names, an optimizer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.core.errors import InputError, UsageError

WIDTH = 96


class Net(torch.nn.Module):
    """An embedding tied to the output layer, which comes last, as in language models."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = torch.nn.BatchNorm1d(2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, 64, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        return self.lm_head(self.down(self.norm(self.up(self.embed(tokens))).relu()))


def trained(make=torch.optim.AdamW, steps=3, dtype=torch.float32, **options):
    """A model and its optimizer after a few steps."""
    torch.manual_seed(3)
    model = Net().to(dtype)
    optimizer = make(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 64, (32,))).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def checkpoint(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 3}


def two_layers():
    """A model whose parameters all have a shape of their own, and its optimizer after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.Linear(7, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    return model, optimizer


def written(tree, folder, name="x.pt", **options):
    """The path of what a file of torch with this tree is converted to, and the report."""
    torch.save(tree, folder / "run.pt")
    report = ckpt8.convert(folder / "run.pt", folder / name, force=True, **options)
    return folder / name, report


def weights_of(tree, folder, **options):
    """The safetensors file of a tree, and the report."""
    path, report = written(tree, folder, "x.safetensors", **options)
    return load_file(path), report


def trainer_directory(root, model, optimizer):
    """What Trainer writes: the alias of the tied weight is not in the file."""
    root.mkdir()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    (root / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    (root / "config.json").write_text('{"hidden": 96}')
    torch.save({"last_epoch": 3}, root / "scheduler.pt")
    return root


def listing(folder):
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_trees_equal(found, expected):
    """Same structure and types, tensors equal in type, shape and bits."""
    # A Parameter comes as the tensor that it is.
    assert type(found) is type(expected) or isinstance(expected, torch.nn.Parameter)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_trees_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_trees_equal(one, other)
    else:
        assert found == expected


def converted(source, folder, **options):
    """What a source is as a ``.pt`` in ``folder``."""
    target = folder / "converted.pt"
    ckpt8.convert(source, target, force=True, **options)
    return torch.load(target, weights_only=True)


def refused(root, tmp_path, match, error=InputError, **options):
    """Conversion fails with one line that matches, and writes nothing."""
    for name in ("x.pt", "x.safetensors"):
        with pytest.raises(error, match=match) as caught:
            ckpt8.convert(root, tmp_path / name, **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / name).exists()


def refused_or_done(source, target, **options):
    """One line, or a conversion that went through."""
    refusal = None
    try:
        ckpt8.convert(source, target, force=True, **options)
    except (InputError, UsageError) as exc:
        refusal = str(exc)
    assert refusal is None or ("\n" not in refusal and len(refusal) < 500)
    assert target.exists() or refusal is not None
