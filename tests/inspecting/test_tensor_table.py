"""verify compares the tensor table of a manifest with the members: checksums and the seal are valid in every attack."""

from __future__ import annotations

import copy

import pytest
import torch
from dcp_kit import save_small
from hostile_kit import pack, unpack
from members_kit import tampered
from safetensors.torch import save_file

import ckpt8
from ckpt8.core.errors import CheckFailedError, InputError

SHAPE = (72, 64)


def adamw(model, step=7.0):
    """The model's state dict, and the state of an AdamW over it."""
    generator = torch.Generator().manual_seed(5)
    state = {
        number: {
            "step": torch.tensor(step),
            "exp_avg": torch.randn(w.shape, generator=generator) * 1e-3,
            "exp_avg_sq": torch.rand(w.shape, generator=generator) * 1e-6,
        }
        for number, w in enumerate(model.values())
    }
    group = {"params": list(state), "betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-3, "amsgrad": False}
    return {"model": model, "optimizer": {"state": state, "param_groups": [group]}}


def weights():
    generator = torch.Generator().manual_seed(4)
    shapes = {"a.weight": SHAPE, "b.weight": SHAPE, "a.bias": SHAPE[:1]}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source and its container, by kind: a file, a directory, a distributed checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    tree = adamw(weights())
    torch.save({**tree, "note": torch.randn(SHAPE)}, folder / "file.pt")
    (folder / "run").mkdir()
    torch.save(tree["optimizer"], folder / "run" / "optimizer.pt")
    save_file(tree["model"], folder / "run" / "model.safetensors")
    named = dict(zip(tree["model"], tree["optimizer"]["state"].values(), strict=True))
    save_small({"model": tree["model"], "optimizer": {"state": named}}, folder / "dcp")
    sources = {"file": folder / "file.pt", "directory": folder / "run", "dcp": folder / "dcp"}
    for kind, source in sources.items():
        ckpt8.compress(source, folder / f"{kind}.ckpt8", threads=1)
    return {kind: (source, folder / f"{kind}.ckpt8") for kind, source in sources.items()}


def tensor(manifest, end):
    return next(each for each in manifest["tensors"] if end in each["name"])


def storage(manifest, end):
    return manifest["storages"][tensor(manifest, end)["storage"]]


def swap(key):
    """Let two weights have each other's fact."""

    def change(manifest):
        a, b = tensor(manifest, "a.weight"), tensor(manifest, "b.weight")
        a[key], b[key] = b[key], a[key]

    return change


def set_fact(key, value):
    return lambda manifest: tensor(manifest, "a.weight").update({key: value})


def to_role(role, end="a.weight"):
    return lambda manifest: storage(manifest, end).update(role=role)


def add(**changes):
    """List a weight once more, with ``changes``."""
    return lambda manifest: manifest["tensors"].append(tensor(manifest, "a.weight") | changes)


def swap_moments(manifest):
    one, other = manifest["parameters"][:2]
    one["moments"]["moment1"], other["moments"]["moment1"] = other["moments"]["moment1"], one["moments"]["moment1"]


def swap_slots(manifest):
    moments = manifest["parameters"][0]["moments"]
    moments["moment1"], moments["moment2"] = moments["moment2"], moments["moment1"]


def other_step(manifest):
    manifest["parameters"][0]["rule"]["step"] += 1


ATTACKS = {
    "tensors swapped": swap("storage"),
    "names swapped": swap("name"),
    "dropped": lambda manifest: manifest["tensors"].remove(tensor(manifest, "a.weight")),
    "renamed": set_fact("name", "renamed"),
    "doubled": add(),
    "invented": add(name="invented"),
    "transposed": lambda manifest: tensor(manifest, "a.weight")["shape"].reverse(),
    "shape": set_fact("shape", [1, SHAPE[0] * SHAPE[1]]),
    "stride": set_fact("stride", [1, SHAPE[0]]),
    "offset": set_fact("offset", 1),
    "dtype": set_fact("dtype", "int32"),
    "flags": set_fact("flags", ["neg"]),
    "weight to moment": to_role("moment1"),
    "weight to other": to_role("other"),
    "other to weight": to_role("weight", ".step"),
    "bias to moment": to_role("moment2", "a.bias"),
    "moments swapped": swap_moments,
    "slots swapped": swap_slots,
    "parameter doubled": lambda manifest: manifest["parameters"].append(copy.deepcopy(manifest["parameters"][0])),
    "moment to other": to_role("other", "exp_avg"),
    "moment to second moment": to_role("moment2", "exp_avg"),
    "step": other_step,
}


@pytest.mark.parametrize("kind", ["file", "directory", "dcp"])
def test_a_container_as_written_holds(kind, made):
    source, container = made[kind]
    assert not ckpt8.verify(container, threads=1).failures
    assert not ckpt8.verify(container, source, threads=1).failures


@pytest.mark.parametrize("kind", ["file", "directory", "dcp"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_table_is_found_and_the_tensor_named(attack, kind, made, tmp_path):
    if kind == "dcp" and attack == "step":
        pytest.skip("without groups no rule is known")
    target = tampered(made[kind][1], tmp_path / "x.ckpt8", lambda manifest, _: ATTACKS[attack](manifest))
    tables = [unpack(path.read_bytes())[2] for path in (made[kind][1], target)]
    changed = {
        each["name"]
        for key in ("tensors", "storages", "parameters")
        for each in [*tables[0][key], *tables[1][key]]
        if tables[0][key].count(each) != tables[1][key].count(each)
    }
    for original in (None, made[kind][0]):
        with pytest.raises((InputError, CheckFailedError)) as found:
            ckpt8.verify(target, original, threads=1)
        said = str(found.value)
        assert "\n" not in said
        assert any(f": {name}: " in said for name in changed), said


def test_a_storage_and_its_entries_under_another_name(made, tmp_path):
    metadata, entries, manifest = unpack(made["file"][1].read_bytes())
    storage(manifest, "a.bias")["name"] += "_"
    entries = {name.replace("model.a.bias/", "model.a.bias_/"): content for name, content in entries.items()}
    (tmp_path / "x.ckpt8").write_bytes(pack(manifest, entries, metadata))
    with pytest.raises(InputError, match=r"model.a.bias_: is the storage 'model.a.bias'"):
        ckpt8.verify(tmp_path / "x.ckpt8", threads=1)


GONE = {
    "optimizer.state.0.exp_avg: is a moment of no parameter": lambda manifest: manifest["parameters"].clear(),
    # What stays lossless unrecognised cannot be called a weight.
    "note: has the role weight": to_role("weight", "note"),
}


@pytest.mark.parametrize("words", GONE)
def test_parameters_that_are_gone_and_weights_that_are_none(words, made, tmp_path):
    target = tampered(made["file"][1], tmp_path / "x.ckpt8", lambda manifest, _: GONE[words](manifest))
    with pytest.raises(InputError, match=words):
        ckpt8.verify(target, threads=1)


def drop_field(member, fields):
    member["crc_fields"].remove(fields[0])


def drop_fields(member, fields):
    member["crc_fields"] = [field for field in member["crc_fields"] if field not in fields]


def move_field(member, fields):
    fields[0][0] -= 1


@pytest.mark.parametrize("change", [drop_field, drop_fields, move_field])
@pytest.mark.parametrize("kind", ["file", "dcp"])
def test_checksum_fields(kind, change, made, tmp_path):
    def change_first(manifest, _):
        member = next(each for each in manifest["members"] if each["crc_fields"])
        index = member["crc_fields"][0][1]
        change(member, [field for field in member["crc_fields"] if field[1] == index])

    target = tampered(made[kind][1], tmp_path / "x.ckpt8", change_first)
    with pytest.raises(InputError, match=r"field of its checksum|does not match its directory entry|damaged zip file"):
        ckpt8.verify(target, threads=1)


def test_a_changed_error_is_found_against_the_original(made, tmp_path):
    def change(manifest, _):
        storage(manifest, "a.weight")["error"]["max_relative"] *= 2

    source, container = made["file"]
    target = tampered(container, tmp_path / "x.ckpt8", change)
    assert [line.partition(":")[0] for line in ckpt8.verify(target, source, threads=1).failures] == ["model.a.weight"]


def test_an_original_with_other_names_differs_in_its_table(made, tmp_path):
    source, container = made["file"]
    tree = torch.load(source)
    tree["model"] = {name.replace("a.w", "A.w"): value for name, value in tree["model"].items()}
    torch.save(tree, tmp_path / "file.pt")
    failures = ckpt8.verify(container, tmp_path / "file.pt", threads=1).failures
    assert "model.A.weight: is a tensor of the original, and the container has no such name" in failures
    assert "model.a.weight: is a tensor of the container, and the original has no such name" in failures


def test_evidence_that_an_older_writer_did_not_have_is_no_difference(made, tmp_path, monkeypatch):
    from ckpt8.checkpoint.meaning import roles

    torch.save(adamw(weights()) | {"netG": weights()}, tmp_path / "x.pt")
    monkeypatch.setattr(roles, "evident_weights", lambda tree: set())
    monkeypatch.setattr(roles, "MODEL_KEYS", frozenset())
    ckpt8.compress(tmp_path / "x.pt", threads=1)
    monkeypatch.undo()
    assert not ckpt8.verify(tmp_path / "x.ckpt8", tmp_path / "x.pt", threads=1).failures


@pytest.mark.parametrize("preset", ["flash", "compact", "archive", "lossless"])
@pytest.mark.parametrize("rules", [(), ("*=lossless",), ("*exp_avg=split24", "*bias=split24", "*note=companded8")])
def test_rules_and_presets_are_no_difference(rules, preset, made, tmp_path):
    source, _ = made["file"]
    ckpt8.compress(source, tmp_path / "x.ckpt8", preset=preset, rules=rules, threads=1)
    assert not ckpt8.verify(tmp_path / "x.ckpt8", source, threads=1).failures


def test_saved_objects_and_packed_optimizers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 72), torch.nn.Linear(72, 64)).bfloat16()
    optimizer = ckpt8.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    tied = torch.randn(80, 80)
    obj = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "views": [tied, tied.t(), tied[3:5]],
        "empty": [torch.empty(0), torch.empty(0, 4)], "module": model,
        "complex": torch.randn(9, 9, dtype=torch.complex64).conj(),
    }  # fmt: skip
    with pytest.warns(UserWarning, match="will refuse it: module: holds torch.nn.modules.container.Sequential"):
        ckpt8.save(obj, tmp_path / "x.ckpt8", threads=1)
    assert not ckpt8.verify(tmp_path / "x.ckpt8", threads=1).failures
