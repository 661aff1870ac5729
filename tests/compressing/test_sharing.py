"""Small storages share entries: how large a container is at most, what stays apart, and what falls back alone."""

from __future__ import annotations

import os
import random

import pytest
import torch
from disk_kit import flip_bit
from safetensors.torch import save_file
from small_kit import ALL_LOSSY, adamw_state, mixed

import ckpt8
from ckpt8.codecs.error_stats import read_error
from ckpt8.container import header
from ckpt8.container.header import PACK
from ckpt8.core.errors import InputError
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container
from ckpt8.restoring.salvage import DAMAGED


def source_bytes(path):
    """The bytes of a file; of a directory those of its files and of their paths."""
    if path.is_file():
        return path.stat().st_size
    files = [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size + len(str(each.relative_to(path))) for each in files)


def random_bytes(count):
    return torch.frombuffer(bytearray(random.Random(0).randbytes(count)), dtype=torch.uint8)


def many(count, numel, dtype=torch.float32):
    content = random_bytes(count * numel * dtype.itemsize).view(count, -1)
    return {f"blocks.{k // 7}.adapter_{k % 7}.weight": row.view(dtype).clone() for k, row in enumerate(content)}


TREES = {
    "one empty tensor": lambda: {"w": torch.empty(0)},
    "one number": lambda: torch.tensor(1.5),
    "twenty numbers": lambda: {f"n{k}": torch.tensor(float(k)) for k in range(20)},
    "800 numbers": lambda: many(800, 1),
    "800 of 8": lambda: many(800, 8),
    "300 of 1000 in bf16": lambda: many(300, 1000, torch.bfloat16),
    "40 of 65536": lambda: many(40, PACK),
    "30 of 65537": lambda: many(30, PACK + 1),
    "3000 empty": lambda: {f"blocks.{k}.none": torch.empty(0, 5) for k in range(3000)},
    "3000 empty and one": lambda: {"w": torch.ones(5), **{f"none.{k}": torch.empty(0) for k in range(3000)}},
    "long names": lambda: {f"{'layer' * 95}.{k}": w for k, w in enumerate(many(200, 16).values())},
    "state of AdamW": lambda: adamw_state(200),
    "all types": mixed,
}


@pytest.mark.by_default(most=4)
@pytest.mark.parametrize("writer", ["torch", "legacy", "safetensors"])
@pytest.mark.parametrize("name", TREES)
def test_a_container_is_hardly_longer_than_its_source(name, writer, tmp_path):
    tree, path = TREES[name](), tmp_path / ("a.safetensors" if writer == "safetensors" else "a.pt")
    if writer == "safetensors":
        if not isinstance(tree, dict) or "optimizer" in tree:
            tree = {"w": torch.ones(1)} if not isinstance(tree, dict) else tree["model"]
        tree = {name: w.contiguous().clone() for name, w in tree.items() if not w.is_conj()}
        save_file(tree, path)
    else:
        torch.save(tree, path, _use_new_zipfile_serialization=writer == "torch")
    if name in ("one empty tensor", "3000 empty"):
        with pytest.raises(InputError, match="holds no tensors"):
            ckpt8.compress(path, preset="lossless")
        return
    manifest = ckpt8.compress(path, preset="lossless")
    size = (tmp_path / "a.ckpt8").stat().st_size
    assert size <= 1.01 * source_bytes(path) + (16 << 10)
    payload = sum(record.stored_bytes for record in manifest.storages)
    if manifest.packs and len(manifest.tensors) >= 200:
        assert size - payload <= 60 * len(manifest.tensors)
    assert ckpt8.restore(tmp_path / "a.ckpt8", tmp_path / "back").read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100])
def test_a_directory_of_tiny_files(size, tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    for k in range(400):
        folder = root / f"part{k % 30}"
        folder.mkdir(exist_ok=True)
        (folder / f"shard-{k:05}.bin").write_bytes(random.Random(k).randbytes(size))
    torch.save({"w": torch.ones(3)}, root / "w.pt")
    ckpt8.compress(root)
    container = tmp_path / "run.ckpt8"
    assert container.stat().st_size <= 1.01 * source_bytes(root) + (16 << 10)
    back = ckpt8.restore(container, tmp_path / "back")
    found = {each.relative_to(back): each.read_bytes() for each in back.rglob("*") if each.is_file()}
    assert found == {each.relative_to(root): each.read_bytes() for each in root.rglob("*") if each.is_file()}


def test_the_room_for_the_header_is_what_the_longest_offsets_take():
    for names in ([], ["a"], ["a" * 500, 'ü\n"\\', "\U0001f600"], [f"w{k}/plane{k % 4}" for k in range(300)]):
        wide = header._WIDEST_OFFSET
        entries = [header.Entry(name, wide, 2 * wide) for name in (*names, header.MANIFEST, header.SEAL)]
        assert header.reserved_size(names) == len(header.render(entries, None, "1.3")) - header.LENGTH_BYTES


def test_files_whose_header_is_short_keep_the_entries_of_each_storage(tmp_path):
    torch.save({"w": torch.randn(2000, 2000), **many(30, 8)}, tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt")
    assert (manifest.version, manifest.packs) == ("1.0", [])


@pytest.mark.slow
def test_a_group_of_32_has_elements_of_one_storage(tmp_path):
    """Each storage gives the bits that it gives alone, and its own error."""
    tree = adamw_state(40)
    torch.save(tree, tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt", rules=ALL_LOSSY)
    assert {record.codec["id"] for record in manifest.storages if record.pack} >= {"companded8/1", "split24/1"}
    together = ckpt8.load(tmp_path / "a.ckpt8")
    names = {record.name: record for record in manifest.storages}
    for k in (0, 3, 17):
        alone = {"model": {f"layers.{k}.lora.weight": tree["model"][f"layers.{k}.lora.weight"]}}
        group = {**tree["optimizer"]["param_groups"][0], "params": [0]}
        alone["optimizer"] = {"state": {0: tree["optimizer"]["state"][k]}, "param_groups": [group]}
        torch.save(alone, tmp_path / "one.pt")
        own = ckpt8.compress(tmp_path / "one.pt", rules=ALL_LOSSY, force=True)
        assert not own.packs
        loaded = ckpt8.load(tmp_path / "one.ckpt8")
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded["optimizer"]["state"][0][key], together["optimizer"]["state"][k][key])
            errors = [
                read_error(record.error)
                for record in (names[f"optimizer.state.{k}.{key}"], own.storages[_index(own, f"state.0.{key}")])
            ]
            assert errors[0].disagreement(errors[1]) is None
        assert torch.equal(loaded["model"][f"layers.{k}.lora.weight"], together["model"][f"layers.{k}.lora.weight"])
        updates = [
            read_error(next(p for p in each.parameters if p.moments["moment1"] == index).error)
            for each, index in (
                (manifest, _index(manifest, f"state.{k}.exp_avg")),
                (own, _index(own, "state.0.exp_avg")),
            )
        ]
        assert updates[0].disagreement(updates[1]) is None
    assert not ckpt8.verify(tmp_path / "a.ckpt8", tmp_path / "a.pt").failures


def _index(manifest, ending):
    return next(k for k, record in enumerate(manifest.storages) if record.name.endswith(ending))


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_unit_that_is_refused_falls_back_alone(background, tmp_path):
    tree = adamw_state(60)
    tree["optimizer"]["state"][5]["exp_avg"][0] = float("nan")
    tree["model"]["layers.9.lora.weight"][0] = float("inf")
    path = tmp_path / "a.ckpt8"
    saved = ckpt8.save(tree, path, rules=ALL_LOSSY, max_update_error=0.05, background=background)
    manifest = saved.result() if background else saved
    reasons = {record.name: record.reason for record in manifest.storages if record.reason}
    assert {"optimizer.state.5.exp_avg", "optimizer.state.5.exp_avg_sq", "model.layers.9.lora.weight"} <= set(reasons)
    bounded = [p for p in manifest.parameters if p.error is not None]
    assert 10 < len(bounded) < 60
    assert all(parameter.error["max_error"] <= 0.05 for parameter in bounded)
    over = [p for p in manifest.parameters if p.error is None]
    assert all(manifest.storages[index].codec["id"] == "lossless/1" for p in over for index in p.moments.values())
    loaded = ckpt8.load(path)
    for name, reason in reasons.items():
        assert reason
        group, _, rest = name.partition(".")
        if group == "optimizer":
            _, k, key = rest.split(".")
            mine, theirs = loaded[group]["state"][int(k)][key], tree[group]["state"][int(k)][key]
        else:
            mine, theirs = loaded[group][rest], tree[group][rest]
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
    assert not ckpt8.verify(path).failures


@pytest.mark.parametrize("background", [False, True])
def test_units_of_a_group_are_refused_for_different_streams(background, tmp_path):
    """Weights alone, moments alone, both: what is not refused keeps its codec, and its pack."""
    tree = adamw_state(20)
    weights, state = tree["model"], tree["optimizer"]["state"]
    state[5]["exp_avg"][0], state[6]["exp_avg_sq"][3] = float("nan"), float("inf")
    weights["layers.9.lora.weight"][0] = float("inf")
    weights["layers.11.lora.weight"][2], state[11]["exp_avg"][1] = float("nan"), float("inf")
    saved = ckpt8.save(tree, tmp_path / "a.ckpt8", rules=ALL_LOSSY, background=background)
    manifest = saved.result() if background else saved
    exact = {(5, "m"), (5, "v"), (6, "m"), (6, "v"), (9, "w"), (11, "m"), (11, "v"), (11, "w")}
    lossless = {record.name for record in manifest.storages if record.reason}
    names = {
        "m": "optimizer.state.{}.exp_avg",
        "v": "optimizer.state.{}.exp_avg_sq",
        "w": "model.layers.{}.lora.weight",
    }
    assert lossless == {names[kind].format(k) for k, kind in exact}
    # One pack for each codec of each place, and that of the steps.
    assert len(manifest.packs) == 7
    loaded = ckpt8.load(tmp_path / "a.ckpt8")
    for k in range(20):
        name = f"layers.{k}.lora.weight"
        pairs = {
            "m": (loaded["optimizer"]["state"][k]["exp_avg"], state[k]["exp_avg"]),
            "v": (loaded["optimizer"]["state"][k]["exp_avg_sq"], state[k]["exp_avg_sq"]),
            "w": (loaded["model"][name], weights[name]),
        }
        for kind, (there, was) in pairs.items():
            if (k, kind) in exact:
                assert torch.equal(there.view(torch.int32), was.view(torch.int32))
            else:
                assert (there - was).abs().max() <= 0.01 * was.abs().max()
    assert not ckpt8.verify(tmp_path / "a.ckpt8").failures
    torch.save(tree, tmp_path / "b.pt")
    ckpt8.compress(tmp_path / "b.pt", rules=ALL_LOSSY)
    assert not ckpt8.verify(tmp_path / "b.ckpt8", tmp_path / "b.pt").failures


@pytest.mark.slow
def test_what_is_said_of_storages_in_packs_adds_up(tmp_path):
    torch.save(adamw_state(100), tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt", rules=ALL_LOSSY)
    facts = inspect_container(tmp_path / "a.ckpt8", tensors=True)
    size = (tmp_path / "a.ckpt8").stat().st_size
    assert sum(row["stored_bytes"] for row in facts["roles"]) == sum(facts["parts"].values())
    assert sum(facts["parts"].values()) + facts["overhead_bytes"] == size
    assert sum(member["stored_bytes"] for member in facts["members"]) == sum(facts["parts"].values())
    assert all(sum(row["parts"].values()) <= row["bytes"] + 8 for row in facts["tensors"])


@pytest.mark.slow
def test_the_prediction_knows_shared_entries(tmp_path):
    torch.save(many(1500, 20), tmp_path / "a.pt")
    predicted = inspect_checkpoint(tmp_path / "a.pt")["predicted"]["flash"]["bytes"]
    ckpt8.compress(tmp_path / "a.pt")
    assert predicted == pytest.approx((tmp_path / "a.ckpt8").stat().st_size, rel=0.1)


@pytest.mark.slow
def test_damage_in_a_pack_loses_its_storages_and_no_others(tmp_path):
    tree = many(2000, 40)  # two packs
    torch.save(tree, tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt")
    assert len(manifest.packs) == 2
    broken = manifest.packs[1]
    with ckpt8.open(tmp_path / "a.ckpt8") as file:
        place = file._reader.places[file.manifest.packs[1]]["plane2"].offsets[0]
    flip_bit(tmp_path / "a.ckpt8", place + 100)
    names = [manifest.storages[index].name for index in broken.storages]
    with pytest.raises(InputError, match="checksum does not match"):
        ckpt8.verify(tmp_path / "a.ckpt8")
    with ckpt8.open(tmp_path / "a.ckpt8") as file:
        assert torch.equal(
            file.get_tensor(next(iter(tree))).view(torch.int32), next(iter(tree.values())).view(torch.int32)
        )
        with pytest.raises(InputError, match=names[7].replace(".", r"\.")):
            file.get_tensor(names[7])
    result = ckpt8.restore(tmp_path / "a.ckpt8", tmp_path / "b.pt", salvage=True)
    assert sorted(each.name for each in result.lost) == sorted(names)
    assert all(each.elements == [[0, 40]] for each in result.lost)
    assert (result.tensors, result.members[0].state) == (len(tree) - len(names), DAMAGED)
    back = torch.load(tmp_path / "b.pt")
    for name, w in tree.items():
        if name in names:
            assert back[name].isnan().all()
        else:
            assert torch.equal(back[name].view(torch.int32), w.view(torch.int32))


def test_packs_are_found_without_the_header(tmp_path):
    tree = adamw_state(60)
    torch.save(tree, tmp_path / "a.pt")
    ckpt8.compress(tmp_path / "a.pt", rules=ALL_LOSSY)
    data = bytearray((tmp_path / "a.ckpt8").read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[60 : 8 + length] = os.urandom(length - 52)
    whole = ckpt8.restore(tmp_path / "a.ckpt8", tmp_path / "whole.pt").read_bytes()
    (tmp_path / "a.ckpt8").write_bytes(data)
    result = ckpt8.restore(tmp_path / "a.ckpt8", tmp_path / "b.pt", salvage=True)
    assert result.damage
    assert result.lost == []
    assert (tmp_path / "b.pt").read_bytes() == whole


def test_a_tensor_may_be_named_like_an_entry_of_a_pack(tmp_path):
    tree = {f"ckpt8.shared{k}:plane0": torch.full((k + 1,), float(k)) for k in range(40)}
    tree["ckpt8.shared0"] = torch.randn(300, 300)
    torch.save(tree, tmp_path / "a.pt")
    assert ckpt8.compress(tmp_path / "a.pt", preset="lossless").packs
    loaded = ckpt8.load(tmp_path / "a.ckpt8")
    assert all(torch.equal(loaded[name], w) for name, w in tree.items())
