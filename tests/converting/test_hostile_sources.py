"""Sources that are damaged or made to harm: one line, nothing written, no time or disk wasted.

Damage, and codes without what they mean, are not passed on.
"""

import copy
import struct
import sys
import time
import zipfile

import pytest
import torch
from converting_kit import checkpoint, refused_or_done, trained, trainer_directory
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.checkpoint.sources.composite import add_prefix
from ckpt8.checkpoint.tree import TensorRef, iter_leaves
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.tensors import DType
from ckpt8.inspecting.checkpoint import inspect_checkpoint

TARGETS = {
    "out.pt": "torch",
    "out.safetensors": "safetensors",
    "out": "trainer",
    "flash.pt": "flashoptim",
    "dist": "dcp",
}


def plain_checkpoint(run):
    """A copy whose dictionaries may be changed."""
    tree = checkpoint(*run)
    state = {key: dict(value) for key, value in tree["optimizer"]["state"].items()}
    groups = copy.deepcopy(tree["optimizer"]["param_groups"])
    return {"model": dict(tree["model"]), "optimizer": {"state": state, "param_groups": groups}}


def nested(depth):
    tree = torch.ones(3)
    for _ in range(depth):
        tree = [tree]
    return tree


def in_itself():
    one = []
    one.append(one)
    return one


def save(tree, path):
    """As torch.save, nested however deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        torch.save(tree, path)
    finally:
        sys.setrecursionlimit(before)


CHANGES = {
    "a group is no dictionary": lambda tree: tree["optimizer"].update(param_groups=[3]),
    "a group without parameters": lambda tree: tree["optimizer"]["param_groups"][0].pop("params"),
    "parameters that are no list": lambda tree: tree["optimizer"]["param_groups"][0].update(params=5),
    "parameters listed twice": lambda tree: tree["optimizer"]["param_groups"][0]["params"].append(0),
    "a state is no dictionary": lambda tree: tree["optimizer"]["state"].update({0: 7}),
    "a state of None": lambda tree: tree["optimizer"]["state"].update({0: None}),
    "names that are as many as nothing": lambda tree: tree["optimizer"]["param_groups"][0].update(param_names=["a"]),
    "betas of text": lambda tree: tree["optimizer"]["param_groups"][0].update(betas="x", lr="y", eps=None),
    "moments of other shapes": lambda tree: tree["optimizer"]["state"][0].update(exp_avg=torch.ones(2, 2)),
    "moments of integers": lambda tree: tree["optimizer"]["state"][0].update(exp_avg=torch.ones(64, 96).int()),
    "moments of complex numbers": lambda tree: tree["optimizer"]["state"][0].update(
        exp_avg=torch.ones(64, 96, dtype=torch.complex64)
    ),
    "an expanded moment": lambda tree: tree["optimizer"]["state"][0].update(exp_avg=torch.ones(1).expand(1 << 40)),
    "an expanded weight": lambda tree: tree["model"].update({"up.weight": torch.ones(1).expand(1 << 20, 1 << 20)}),
    "a structure in itself": lambda tree: tree.update(loop=tree),
    "a setting in itself": lambda tree: tree["optimizer"]["param_groups"][0].update(loop=in_itself()),
    "nested deep": lambda tree: tree.update(deep=nested(900)),
    "no state at all": lambda tree: tree["optimizer"].update(state={}, param_groups=[]),
    "a model without tensors": lambda tree: tree.update(model={}),
}


@pytest.mark.by_default(most=9)
@pytest.mark.parametrize("change", CHANGES)
def test_one_line_or_a_file(change, run, tmp_path):
    tree = plain_checkpoint(run)
    CHANGES[change](tree)
    save(tree, tmp_path / "run.pt")
    for name, to in TARGETS.items():
        for dtype in (None, "float32"):
            started = time.process_time()
            refused_or_done(tmp_path / "run.pt", tmp_path / name, to=to, dtype=dtype)
            assert not list(tmp_path.glob(".*"))
            assert time.process_time() - started < 20


def test_what_holds_itself_or_is_shared_gets_a_prefix_once():
    ref = TensorRef("0", DType.FLOAT32, 0, (1,), (1,))
    loop, shared = in_itself(), [ref]
    for _ in range(60):
        shared = [shared, (shared,)]
    found = add_prefix({"loop": loop, "shared": shared}, "x/")
    assert found["loop"][0] is found["loop"] is not loop
    assert [leaf.key for _, leaf in iter_leaves(found)] == ["x/0"]


def test_nothing_in_a_pickle_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "trapped"), "w")

    torch.save({"model": {"w": torch.ones(4)}, "trap": Trap(), "list": [Trap()]}, tmp_path / "run.pt")
    report = ckpt8.convert(tmp_path / "run.pt", tmp_path / "out.pt")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "trapped").exists()
    assert len(report.dropped) == 2
    assert torch.load(tmp_path / "out.pt", weights_only=True)["list"] == [None]


def test_names_of_storages_that_are_taken(tmp_path):
    """A file that names its storages as conversion names computed ones, or as those of another file."""
    torch.save({"model": {"w": torch.ones(64)}}, tmp_path / "plain.pt")
    for name in ("computed/1", "computed/0"):
        renamed(tmp_path / "plain.pt", tmp_path / "run.pt", name)
        ckpt8.convert(tmp_path / "run.pt", tmp_path / "out.safetensors", force=True)
        assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], torch.ones(64).bfloat16())
    folder = trainer_directory(tmp_path / "checkpoint-3", *trained())
    torch.save({"state": {0: {"exp_avg": torch.ones(64)}}, "param_groups": [{"params": [0]}]}, tmp_path / "plain.pt")
    renamed(tmp_path / "plain.pt", folder / "optimizer.pt", "model.safetensors/up.weight")
    with pytest.raises(InputError, match="two storages"):
        ckpt8.convert(folder, tmp_path / "out.pt")


def renamed(source, target, key):
    """A copy of a file of torch whose only storage has another key."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("/data.pkl"):
                short = b"X\x01\x00\x00\x000"
                assert content.count(short) == 1
                content = content.replace(short, b"X" + struct.pack("<I", len(key)) + key.encode())
            name = f"plain/data/{key}" if info.filename.endswith("/data/0") else info.filename
            new.writestr(name, content)


def flip_a_bit(path, record):
    """In the middle of a record of a zip file."""
    with zipfile.ZipFile(path) as file:
        info = next(each for each in file.infolist() if each.filename.endswith(record))
    data = bytearray(path.read_bytes())
    name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
    data[info.header_offset + 30 + name + extra + info.file_size // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def damaged(tmp_path):
    path = tmp_path / "run.pt"
    torch.save({"model": {"a.weight": torch.ones(40, 40), "b.weight": torch.ones(8, 8)}}, path)
    flip_a_bit(path, "data/1")
    return path


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "out.ckpt8", "dcp/"])
def test_a_flipped_bit_is_not_converted(damaged, tmp_path, name):
    with pytest.raises(InputError, match=r"run\.pt: .*(damaged|do not match)"):
        ckpt8.convert(damaged, f"{tmp_path}/{name}", to="dcp" if name == "dcp/" else None)
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]


def test_a_flipped_bit_in_a_directory_names_the_file(damaged, tmp_path):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file({"a.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    inspect_checkpoint(damaged)
    with pytest.raises(InputError, match=r"run\.pt: storage '1' is damaged"):
        inspect_checkpoint(damaged, full=True)
    damaged.rename(folder / "optimizer.pt")
    for look in (lambda: ckpt8.convert(folder, tmp_path / "out.pt"), lambda: inspect_checkpoint(folder, full=True)):
        with pytest.raises(InputError, match=r"checkpoint-5: optimizer\.pt: storage '1' is damaged"):
            look()


@pytest.fixture
def exported(tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{k}.mlp.weight": torch.randn(24, 16, generator=generator) for k in range(2)}
    torch.save(state | {"norm.weight": torch.ones(16)}, tmp_path / "run.pt")
    ckpt8.convert(tmp_path / "run.pt", f"{tmp_path}/export/", dtype="float8_e4m3fn")
    return tmp_path / "export"


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_codes_are_not_converted_without_what_they_mean(exported, tmp_path, to):
    said = r"export.*layers\.0\.mlp\.weight and 1 more are quantised for inference"
    with pytest.raises(UnsupportedError, match=said):
        ckpt8.convert(exported, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_inspect_counts_codes_as_parameters_without_their_scales_and_diff_says_that_it_compares_them(
    exported, tmp_path
):
    assert sum(group["parameters"] for group in inspect_checkpoint(exported)["layers"]) == 2 * 24 * 16 + 16
    found = ckpt8.diff(tmp_path / "run.pt", exported / "model.safetensors").to_json()
    assert any("quantised for inference" in note for note in found["notes"])


@pytest.mark.by_default(most=8)
@pytest.mark.parametrize("change", [each for each in CHANGES if "weight" not in each and "model" not in each])
def test_directories_too(change, tmp_path):
    model, optimizer = trained()
    folder = trainer_directory(tmp_path / "checkpoint-3", model, optimizer)
    tree = plain_checkpoint((model, optimizer))
    CHANGES[change](tree)
    if "loop" in tree:
        tree["optimizer"]["loop"] = tree["optimizer"]
    save(tree["optimizer"], folder / "optimizer.pt")
    for name, to in TARGETS.items():
        refused_or_done(folder, tmp_path / name, to=to, dtype="float32")
