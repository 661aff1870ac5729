"""DeepSpeed universal checkpoints as named fp32 dicts: imitations by hand of what ds_to_universal 0.19.8 writes, and
one that it really wrote, compared with what DeepSpeed's own zero_to_fp32 makes of the partitions."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from converting_kit import assert_trees_equal, converted
from safetensors.torch import load_file

import ckpt8
from ckpt8.core.errors import InputError, UnsupportedError

SHAPES = {"embed.weight": (40, 16), "layer.0.weight": (16, 16), "norm.weight": (16,), "norm.bias": (16,)}
GROUPS = [["embed.weight", "layer.0.weight"], ["norm.weight", "norm.bias"]]
SETTINGS = [{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.0}]
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def values():
    generator = torch.Generator().manual_seed(2)
    return {name: {key: torch.randn(shape, generator=generator) for key in KEYS} for name, shape in SHAPES.items()}


def imitation(root, stage=2, **model):
    """``zero/`` with a folder for each parameter, the optimizer's groups, and the file of the first model rank."""
    found = values()
    for name, state in found.items():
        folder = root / "zero" / name
        folder.mkdir(parents=True)
        for key, tensor in state.items():
            torch.save({"param": tensor, "cat_dim": 0} if stage < 3 else tensor.flatten(), folder / f"{key}.pt")
        if stage < 3:
            torch.save(torch.tensor(7.0), folder / "step.pt")
    groups = [{**settings, "betas": (0.9, 0.999), "eps": 1e-8, "params": [k]} for k, settings in enumerate(SETTINGS)]
    settings = {"param_groups": groups, "zero_stage": stage, "clip_grad": 1.0}
    if stage == 3:
        flat = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(9), "exp_avg_sq": torch.zeros(9)}
        settings["optimizer_state_dict"] = {"state": {k: dict(flat) for k in range(2)}, "param_groups": groups}
    torch.save(settings, root / "zero" / "optimizer_state.pt")
    module = OrderedDict((name, state["fp32"].bfloat16()) for name, state in found.items())
    if stage == 3:
        module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in module)
    module["position_ids"] = torch.arange(5)
    module["frozen.weight"] = torch.ones(3, dtype=torch.bfloat16)
    module["lm_head.weight"] = module["embed.weight"]
    shapes = [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in GROUPS]
    shared = {"lm_head.weight": "embed.weight"}
    tree = {"module": module, "param_shapes": shapes, "shared_params": shared, "ds_version": "0.19.8", **model}
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    torch.save(tree, root / f"{prefix}mp_rank_00_model_states.pt")
    (root.parent / "latest_universal").write_text(root.name)
    return found


@pytest.mark.parametrize("form", ["folder", "above", "flash", "lossless"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names_values_and_groups(stage, form, tmp_path):
    root = tmp_path / "run" / "global_step7_universal"
    state = imitation(root, stage)
    source = {"folder": root, "above": root.parent}.get(form, tmp_path / "run.ckpt8")
    if form in ("flash", "lossless"):
        ckpt8.compress(root, source, preset=form)
    assert ckpt8.convert(source, tmp_path / "named.pt").layout == "deepspeed-universal"
    found = torch.load(tmp_path / "named.pt", weights_only=True)
    assert list(found["model"]) == [*SHAPES, "position_ids", "frozen.weight", "lm_head.weight"]
    for name, saved in state.items():
        assert torch.equal(found["model"][name], saved["fp32"])
        moments = found["optimizer"]["state"][name]
        assert set(moments) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(moments[key], saved[key]) for key in KEYS[1:])
        assert moments["step"] == 7.0
    assert found["model"]["lm_head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    assert torch.equal(found["model"]["position_ids"], torch.arange(5))
    assert found["model"]["frozen.weight"].dtype is torch.bfloat16
    expected = [
        {**settings, "betas": (0.9, 0.999), "eps": 1e-8, "params": names}
        for settings, names in zip(SETTINGS, GROUPS, strict=True)
    ]
    assert found["optimizer"]["param_groups"] == expected


def test_torch_takes_model_and_optimizer(tmp_path):
    root = tmp_path / "universal"
    state = imitation(root)
    found = converted(root, tmp_path)
    params = {name: torch.nn.Parameter(found["model"][name].clone()) for name in SHAPES}
    groups = [{"params": [params[name] for name in group]} for group in GROUPS]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(found["optimizer"])
    for name, param in params.items():
        assert torch.equal(optimizer.state[param]["exp_avg"], state[name]["exp_avg"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_weights_for_transformers(tmp_path):
    root = tmp_path / "universal"
    state = imitation(root)
    ckpt8.convert(root, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    expected = {name: saved["fp32"].bfloat16() for name, saved in state.items()}
    expected |= {"position_ids": torch.arange(5), "frozen.weight": torch.ones(3, dtype=torch.bfloat16)}
    assert_trees_equal(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_without_files_of_the_model_and_the_groups(tmp_path):
    root = tmp_path / "universal"
    state = imitation(root)
    (root / "mp_rank_00_model_states.pt").unlink()
    found = converted(root, tmp_path)
    assert set(found["model"]) == set(state)
    (group,) = found["optimizer"]["param_groups"]
    assert set(group.pop("params")) == set(state)
    assert group == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    (root / "zero" / "optimizer_state.pt").unlink()
    assert set(converted(root, tmp_path)["optimizer"]["param_groups"][0]) == {"params"}


def test_flat_tensors_that_do_not_fit(tmp_path):
    root = tmp_path / "universal"
    imitation(root, 3, param_shapes=[{"embed.weight": (40, 17)}])
    said = r"embed\.weight/\w+\.pt has the shape \(640,\), which does not become \(40, 17\)"
    with pytest.raises(InputError, match=said):
        ckpt8.convert(root, tmp_path / "x.pt")


@pytest.mark.parametrize(
    "model",
    [
        {"param_shapes": 3, "module": 4, "shared_params": 5},
        {"param_shapes": [{"embed.weight": (-1,)}, 3], "module": {1: 2}},
        {"shared_params": {"lm_head.weight": ["x"]}},
    ],
)
def test_a_strange_file_of_the_model(model, tmp_path):
    imitation(tmp_path / "universal", **model)
    assert set(SHAPES) <= set(converted(tmp_path / "universal", tmp_path)["model"])


def test_two_checkpoints_in_one_folder_and_missing_weights(tmp_path):
    for name in ("a", "b"):
        imitation(tmp_path / "run" / name)
    with pytest.raises(InputError, match="several universal checkpoints"):
        ckpt8.convert(tmp_path / "run", tmp_path / "x.pt")
    (tmp_path / "run" / "a" / "zero" / "norm.bias" / "fp32.pt").unlink()
    with pytest.raises(InputError, match=r"norm\.bias has no fp32\.pt"):
        ckpt8.convert(tmp_path / "run" / "a", tmp_path / "x.pt")


def test_partitions_by_rank_are_refused(tmp_path):
    folder = tmp_path / "global_step7"
    folder.mkdir()
    for rank in range(2):
        torch.save({"optimizer_state_dict": {}}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"module": {"w": torch.ones(3)}}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(UnsupportedError, match="ZeRO partitions of 2 ranks"):
        ckpt8.convert(folder, tmp_path / "x.pt")


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_wrote(stage, tmp_path):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    worker = Path(__file__).with_name("universal_worker.py")
    command = [sys.executable, str(worker), str(tmp_path), str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    ckpt8.compress(tmp_path / "run" / "step_universal", tmp_path / "run.ckpt8", preset="lossless")
    for source in (tmp_path / "run", tmp_path / "run.ckpt8"):
        found = converted(source, tmp_path)
        assert found["model"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert_trees_equal(found["model"][name], tensor)
            state = found["optimizer"]["state"][name]
            assert (state["step"], state["exp_avg"].shape) == (3, tensor.shape)
            assert float(state["exp_avg_sq"].min()) >= 0
        assert [name for group in found["optimizer"]["param_groups"] for name in group["params"]] == list(expected)
        assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
