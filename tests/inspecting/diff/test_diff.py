"""Two sources of any kinds: what is matched with what; and the command: exit codes, lines, tables, one JSON object."""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import re
import shutil
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from dcp_kit import save_in_pieces
from diff_kit import LAYERS, by_name, expected, named, parameter_names, saved, tensors_of, trainer_directory
from disk_kit import flip_bit
from safetensors.torch import save_file

import ckpt8


def facts_of(a, b):
    return ckpt8.diff(a, b).to_json()


def assert_all_equal(facts, count):
    assert len(facts["tensors"]["both"]) == count
    assert all(each["identical"] for each in facts["tensors"]["both"])


def test_shards_are_one_model(tmp_path, loaded):
    one, other = (trainer_directory(tmp_path / str(k), tree, 3) for k, tree in enumerate(loaded))
    weights = {name: w.clone() for name, w in loaded[1]["model"].items() if name != "lm_head.weight"}
    (other / "model.safetensors").unlink()
    homes = {name: f"model-0000{1 + k % 2}-of-00002.safetensors" for k, name in enumerate(weights)}
    for shard in set(homes.values()):
        save_file({name: w for name, w in weights.items() if homes[name] == shard}, other / shard)
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    facts = facts_of(one, other)
    assert facts["tensors"]["only_a"] == facts["tensors"]["only_b"] == []
    found = by_name(facts)
    for name, shard in homes.items():
        each = found[f"model.safetensors:{name}"]
        assert each["name_b"] == f"{shard}:{name}"
        wanted = expected(loaded[0]["model"][name], weights[name])
        assert each["change"]["relative"] == pytest.approx(wanted["relative"])


def test_names_that_wrappers_add_to(tmp_path, loaded):
    tree = loaded[1]
    wrapped = {f"module._orig_mod.{name}": w for name, w in tree["model"].items()}
    bare = saved(tmp_path / "bare.pt", dict(loaded[0]["model"]))
    other = saved(tmp_path / "ddp.pt", {**tree, "model": wrapped})
    facts = facts_of(bare, other)
    assert facts["tensors"]["only_a"] == []
    assert len(facts["tensors"]["both"]) == len(wrapped)
    for each in facts["tensors"]["both"]:
        assert each["name_b"] == f"model.module._orig_mod.{each['name']}"
        wanted = expected(loaded[0]["model"][each["name"]], tree["model"][each["name"]])
        assert each["change"]["relative"] == pytest.approx(wanted["relative"])
    assert "A's model at the top is compared with B's at model" in facts["notes"]
    plain = {name: w.clone() for name, w in tree["model"].items() if name != "lm_head.weight"}
    save_file(plain, tmp_path / "model.safetensors")
    facts = facts_of(other, tmp_path / "model.safetensors")
    assert_all_equal(facts, len(plain))
    assert facts["tensors"]["only_b"] == []


def universal_directory(root, checkpoint):
    """The files of DeepSpeed's universal checkpoint, as far as a reader looks at them (an imitation)."""
    (root / "zero").mkdir(parents=True)
    optimizer = checkpoint["optimizer"]
    saved(root / "zero" / "optimizer_state.pt", {"param_groups": [{**optimizer["param_groups"][0], "params": []}]})
    for k, name in parameter_names(checkpoint).items():
        folder = root / "zero" / name
        folder.mkdir()
        saved(folder / "fp32.pt", {"param": checkpoint["model"][name].clone()})
        for key in ("exp_avg", "exp_avg_sq"):
            saved(folder / f"{key}.pt", {"param": optimizer["state"][k][key]})
        saved(folder / "step.pt", optimizer["state"][k]["step"])
    return root


def test_a_universal_checkpoint(tmp_path, loaded):
    paths = [universal_directory(tmp_path / str(k), tree) for k, tree in enumerate(loaded)]
    assert ckpt8.diff(paths[0], paths[0]).identical
    facts = facts_of(*paths)
    assert {row["layer"] for row in facts["layers"]["moment2"]} == LAYERS
    assert by_name(facts)["zero/transformer.wpe.weight/step.pt:tensor"]["values"] == [3.0, 4.0]
    against = facts_of(saved(tmp_path / "named.pt", named(loaded[1])), paths[1])
    assert_all_equal(against, 4 * len(parameter_names(loaded[1])))
    assert {each["name"] for each in against["tensors"]["only_a"]} == {"model.lm_head.weight", "best_val_loss"}


def test_slices_are_put_together_whichever_way_they_were_cut(tmp_path):
    x = torch.randn(12, 10)
    cuts = {"rows": [((0, 0), (5, 10)), ((5, 0), (7, 10))], "columns": [((0, 0), (12, 3)), ((0, 3), (12, 7))]}
    paths = [save_in_pieces({"model.w": (x, boxes)}, tmp_path / name) for name, boxes in cuts.items()]
    assert ckpt8.diff(*paths).identical
    y = x.clone()
    y[7, 2] += 1
    other = save_in_pieces({"model.w": (y, cuts["rows"])}, tmp_path / "changed")
    change = facts_of(paths[1], other)["tensors"]["both"][0]["change"]
    assert (change["differ"], change["max_change"]) == (1, pytest.approx(1.0))


@pytest.mark.slow
def test_parameters_are_matched_by_their_names_and_not_by_their_numbers(tmp_path, loaded):
    names = list(parameter_names(loaded[0]).values())
    first = saved(tmp_path / "first.pt", named(loaded[0]))
    again = saved(tmp_path / "again.pt", named(loaded[0], order=names[::-1]))
    facts = facts_of(first, again)
    assert_all_equal(facts, len(tensors_of(loaded[0])))
    assert by_name(facts)["optimizer.state.0.exp_avg"]["name_b"] == f"optimizer.state.{len(names) - 1}.exp_avg"
    groups = {f"optimizer.param_groups.{k}.params" for k in range(2)}
    assert {each["name"] for each in facts["values"]["changed"]} == groups
    fewer = named(loaded[0])
    fewer["optimizer"]["param_groups"][0]["param_names"][1] = "another.weight"
    facts = facts_of(first, saved(tmp_path / "fewer.pt", fewer))
    gone = {f"optimizer.state.1.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {each["name"] for each in facts["tensors"]["only_a"]} == gone
    assert len(facts["tensors"]["only_b"]) == 3


def test_states_without_names_at_another_place_are_not_matched(tmp_path, loaded):
    tree = loaded[0]
    nameless = {"net": [tree["optimizer"]]}
    facts = facts_of(saved(tmp_path / "a.pt", {"optimizer": tree["optimizer"]}), saved(tmp_path / "b.pt", nameless))
    assert facts["tensors"]["both"] == []
    assert "the optimizers' states are not compared: their parameters have no names on one side" in facts["notes"]
    assert facts["values"]["equal"] > 10, "settings of groups are the same"


def test_a_counter_among_weights_is_none_of_them(tmp_path):
    """As ``AveragedModel`` has one."""
    for name, count in (("a.pt", 20), ("b.pt", 60)):
        ema = {"n_averaged": torch.tensor(count), "module.weight": torch.full((80, 80), 1.0 + count / 1000)}
        torch.save({"ema": ema}, tmp_path / name)
    facts = facts_of(tmp_path / "a.pt", tmp_path / "b.pt")
    weights = facts["roles"]["weight"]
    assert (weights["tensors"], weights["elements"]) == (1, 6400)
    assert weights["max_change"] == pytest.approx(0.04)


def test_of_two_models_none_is_guessed(tmp_path, loaded):
    model = loaded[0]["model"]
    two = saved(tmp_path / "two.pt", {"model": model, "ema": {name: w + 1 for name, w in model.items()}})
    facts = facts_of(two, saved(tmp_path / "bare.pt", dict(model)))
    assert facts["tensors"]["both"] == []
    assert ckpt8.diff(two, two).identical
    one = facts_of(two, saved(tmp_path / "one.pt", {"ema": dict(model)}))
    assert {each["name"].partition(".")[0] for each in one["tensors"]["both"]} == {"ema"}


def test_weights_that_are_tied_on_one_side_only(tmp_path, loaded, steps):
    untied = dict(loaded[0]["model"])
    untied["lm_head.weight"] = untied["lm_head.weight"].clone()
    other = saved(tmp_path / "untied.pt", {**loaded[0], "model": untied})
    facts = facts_of(steps[0], other)
    assert "model.lm_head.weight is tied to model.transformer.wte.weight in A only" in facts["notes"]
    assert all(each["identical"] for each in facts["tensors"]["both"])


OTHERS = {
    "number": (3, 4), "type": (3, 3.0), "truth": (True, 1), "nothing": (None, 0), "text": ("cosine", "linear"),
    "list": ([1, 2, 3], [1, 2, 4]), "tuple": ((0.9, 0.99), (0.9, 0.999)), "length": ([1], [1, 1]),
    "kind": ([1, 2], (1, 2)), "bytes": (b"a", b"b"), "empty": ({}, []), "sign": (0.0, -0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_values_that_are_no_tensors(tmp_path, name):
    trees = [{"deep": [{"x": value}], "same": float("nan")} for value in OTHERS[name]]
    paths = [saved(tmp_path / f"{k}.pt", tree) for k, tree in enumerate(trees)]
    facts = facts_of(*paths)
    assert [each["name"] for each in facts["values"]["changed"]] == ["deep.0.x"]
    assert facts["values"]["equal"] == 1
    assert not facts["identical"]
    assert ckpt8.diff(paths[0], paths[0]).identical


def test_a_set_has_no_order_and_an_object_has_a_class(tmp_path):
    sets = [saved(tmp_path / f"{k}.pt", {"x": list_}) for k, list_ in enumerate(({"a", "b"}, {"b", "a"}, {"a", "c"}))]
    assert ckpt8.diff(sets[0], sets[1]).identical
    assert not ckpt8.diff(sets[0], sets[2]).identical
    kinds = argparse.Namespace, types.SimpleNamespace
    objects = [saved(tmp_path / f"{kind.__name__}.pt", {"x": kind(lr=1)}) for kind in kinds]
    changed = facts_of(*objects)["values"]["changed"]
    assert changed[0] == {"name": "x.(class)", "a": "argparse.Namespace", "b": "types.SimpleNamespace"}


FILES = [
    *("custom_objects.pt", "views.pt", "module.pt", "legacy.pt", "lightning.ckpt"),
    *("low_bit/bitsandbytes.pt", "accelerate"),
]


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("name", FILES)
def test_odd_structures_are_like_themselves(tmp_path, inputs, name):
    source = inputs / name
    packed = tmp_path / "odd.ckpt8"
    ckpt8.compress(source, packed, preset="lossless")
    assert ckpt8.diff(source, source).identical
    assert ckpt8.diff(packed, source).identical


def test_the_json_of_a_file_may_be_no_json(tmp_path, loaded):
    paths = [trainer_directory(tmp_path / f"checkpoint-{k}", loaded[0], 3) for k in range(2)]
    (paths[1] / "config.json").write_text('{"hidden": 48')
    assert facts_of(*paths)["files"]["changed"] == ["config.json"]
    (paths[1] / "config.json").write_text(json.dumps({"hidden": 48}, indent=2))
    assert facts_of(*paths)["values"]["changed"] == []


def calls(folder, count):
    """Calls of functions in a comparison of two files with ``count`` empty tensors."""
    for name in ("a", "b"):
        save_file({f"layers.{k}.weight": torch.empty(0) for k in range(count)}, folder / f"{name}.safetensors")
    profile = cProfile.Profile()
    profile.runcall(ckpt8.diff, folder / "a.safetensors", folder / "b.safetensors", threads=1)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.slow
def test_many_empty_tensors_take_few_steps_each(tmp_path):
    """Steps are calls of functions. A walk for what holds tensors does not visit every tensor, so 450 are enough."""
    calls(tmp_path, 10)
    first, second, third = (calls(tmp_path, count) for count in (250, 500, 1000))
    assert (second - first) / 250 < 450
    assert third - second < 2.1 * (second - first)


# One dictionary at several paths: a walk meets it once, and both sides call it the same


def _state_of_two(run):
    run["optimizer"]["state"][2] = run["optimizer"]["state"][1]


def _state_elsewhere(run):
    run["first"] = run["optimizer"]["state"][1]
    run["model"], run["optimizer"] = run.pop("model"), run.pop("optimizer")


def _states_of_two_optimizers(run):
    run["other"] = {**run["optimizer"], "state": dict(run["optimizer"]["state"])}


@pytest.mark.parametrize("share", [_state_of_two, _state_elsewhere, _states_of_two_optimizers])
def test_a_file_is_identical_to_itself(tmp_path, share):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    run["optimizer"]["param_groups"][0]["param_names"] = list(run["model"])
    share(run)
    path = saved(tmp_path / "run.pt", run)
    assert ckpt8.diff(path, path).identical


# The command


@pytest.fixture
def shown(run_command):
    """What the command prints: (exit code, stdout, stderr)."""
    return partial(run_command, "diff", columns=120)


def assert_refused(result, *said):
    code, out, err = result
    assert (code, out) == (3, "")
    assert re.fullmatch(r"ckpt8: [^\n]+\n", err)
    assert all(each in err for each in said)


def test_settings_and_steps_are_told(shown, tmp_path, loaded):
    paths = [trainer_directory(tmp_path / f"checkpoint-{k}", tree, k) for k, tree in zip((3, 4), loaded, strict=True)]
    out = shown(*paths)[1]
    assert re.search(r"trainer_state\.json:global_step +3 +4 ", out)
    assert re.search(r"optimizer\.pt:state\.\*\.step \(\d+ of them\) +3 +4 ", out)
    lr = [f"{tree['optimizer']['param_groups'][0]['lr']:.6g}" for tree in loaded]
    assert re.search(rf"optimizer\.pt:param_groups\.\*\.lr \(2 of them\) +{lr[0]} +{lr[1]}\b", out)


def test_structure_and_what_is_not_finite_is_told(shown, tmp_path):
    a = {"model": {"w": torch.ones(3, 4), "only.here": torch.ones(5), "v": torch.ones(2)}}
    b = {"model": {"w": torch.ones(4, 3), "v": torch.tensor([1.0, float("nan")]), "\x1b[2J": torch.ones(1)}}
    out = shown(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))[1]
    assert "  model.only.here  float32 5\n" in out
    assert "  model.\\x1b[2J  float32 1\n" in out
    assert "  model.w  float32 3x4 -> float32 4x3\n" in out
    assert "  model.v  A: 0 NaN, 0 Inf; B: 1 NaN, 0 Inf\n" in out
    assert "\x1b" not in out


ODD = {
    "nan": (math.nan, 1.0, "nan", 1.0),
    "infinite": (math.inf, -math.inf, "inf", "-inf"),
    "close": (0.1, math.nextafter(0.1, 1), 0.1, math.nextafter(0.1, 1)),
    "many digits": (10**400, 10**401, *(f"a number of {(10**n).bit_length():,} bits" for n in (400, 401))),
    "beyond 64 bits": (2**63, 2**64, str(2**63), str(2**64)),
    "complex": (1 + 2j, 1 + 3j, "(1+2j)", "(1+3j)"),
    "text": ("a\x1b[2J\n", "b" * 5000, "a\x1b[2J\n", "b" * 1000 + "…"),
    "bytes": (bytes(20), bytes(21), "20 bytes", "21 bytes"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_json_and_text(shown, tmp_path, name):
    a, b, *told = ODD[name]
    paths = saved(tmp_path / "a.pt", {"x": a}), saved(tmp_path / "b.pt", {"x": b})
    codes, outputs, _ = zip(shown(*paths, "--json"), shown(*paths), strict=True)
    assert codes == (1, 1)
    assert json.loads(outputs[0])["values"]["changed"] == [{"name": "x", "a": told[0], "b": told[1]}]
    out = outputs[1]
    first, second = re.search(r"^x  +(\S.*?)  +(\S.*?) *$", out, re.MULTILINE).groups()
    assert first != second
    assert "\x1b" not in out


def test_what_cannot_be_read_is_one_line(shown, tmp_path, steps):
    good = steps[0]
    for folder in ("empty", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    (tmp_path / "text.pt").write_text("learning_rate: 0.1\n" * 100)
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-5000])
    for name in ("missing.pt", "text.pt", "empty", "other", "cut.pt"):
        bad = tmp_path / name
        assert_refused(shown(good, bad), name)
        code, out, err = shown(bad, good, "--json")
        assert json.loads(out) == {"schema": 1, "error": err.strip().removeprefix("ckpt8: "), "exit_code": 3}
        assert_refused((code, "", err), name)
    assert shown(good)[0] == 2
    # Pieces of ranks are not put together.
    folder = tmp_path / "zero"
    folder.mkdir()
    saved(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": {"x": torch.ones(3)}})
    assert_refused(shown(good, folder), "universal")
    assert shown(folder, folder)[0] == 0


def test_a_bit_that_flipped_is_found(shown, tmp_path, steps, loaded):
    bits = loaded[0]["model"]["transformer.wpe.weight"].flatten().view(torch.uint8).numpy().tobytes()
    damaged = Path(shutil.copy(steps[0], tmp_path / "damaged.pt"))
    flip_bit(damaged, damaged.read_bytes().index(bits) + 17)
    assert_refused(shown(steps[0], damaged), "damaged.pt", "model.transformer.wpe.weight", "checksum")
    packed = tmp_path / "run.ckpt8"
    ckpt8.compress(steps[0], packed)
    flip_bit(packed)
    assert_refused(shown(steps[0], packed), "run.ckpt8", "checksum")


@pytest.mark.slow
def test_hostile_files_are_read_or_refused_in_one_line(shown, inputs):
    hostile = [path for path in (inputs.parent / "hostile").iterdir() if path.suffix != ".md"]
    assert len(hostile) > 20
    codes = set()
    for path in sorted(hostile):
        result = shown(path, path)
        codes.add(result[0])
        if result[0]:
            assert_refused(result, path.name)
    assert codes == {0, 3}


@pytest.mark.slow
def test_what_is_held_ten_thousand_times_is_looked_at_once(shown, tmp_path):
    paths = []
    for k in range(2):
        numbers, letters = list(range(k, 10_000)), set(map(str, range(10_000)))
        tree = {"a": [numbers, None, *[[numbers, letters]] * 3, *([numbers] * 10_000), *([letters] * 10_000)]}
        tree["itself"] = tree
        paths.append(saved(tmp_path / f"{k}.pt", tree))
    code, out, err = shown(*paths)
    assert (code, err) == (1, "")
    assert "other values: 10,002 of 20,004 differ" in out
