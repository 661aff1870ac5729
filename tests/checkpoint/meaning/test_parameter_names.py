"""Names of the parameters of optimizers: of real runs, where every name is checked against the live model."""

from __future__ import annotations

import json

import pytest
import torch
from members_kit import GROUP
from safetensors.torch import save_file

import ckpt8
from ckpt8.checkpoint.meaning.optimizer_state import parameter_shape
from ckpt8.checkpoint.meaning.parameter_names import display_names
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.container.reader import ContainerReader
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

ROWS = 12


def llama(**changes):
    """All projections of a block have one shape, as have all norms."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": ROWS, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True, **changes))


def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def train(model, folder):
    """One step of the Trainer: the checkpoint directory, and the live optimizer."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")
    rows = [{"input_ids": torch.arange(k, k + 16) % 64, "labels": torch.arange(k, k + 16) % 64} for k in range(8)]
    plain = {"optim": "adamw_torch", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    once = {"max_steps": 1, "save_steps": 1, "per_device_train_batch_size": 8}
    arguments = transformers.TrainingArguments(output_dir=str(folder), weight_decay=0.1, **once, **plain)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return folder / "checkpoint-1", trainer.optimizer


def named_moments(checkpoint, container):
    """The first moments of the checkpoint by the name that the container gives to their parameter."""
    tensors = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    found = {}
    for row in inspect_container(container, tensors=True)["parameters"]:
        _, number, *keys = row["moments"]["moment1"].removeprefix("optimizer.pt:").split(".")
        moment = tensors[int(number)]
        for key in keys:
            moment = moment[key]
        found[row["name"].removeprefix("optimizer.pt:")] = row["named"], moment
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [llama, gpt2])
def test_every_parameter_of_a_trainer_has_its_name(make, tmp_path):
    model = make()
    checkpoint, optimizer = train(model, tmp_path)
    ckpt8.compress(checkpoint, tmp_path / "a.ckpt8")
    found = named_moments(checkpoint, tmp_path / "a.ckpt8")
    live = dict(model.named_parameters())
    assert found.keys() == live.keys()
    assert all(named for named, _ in found.values())
    for name, (_, moment) in found.items():
        assert torch.equal(moment, optimizer.state[live[name]]["exp_avg"]), name
    assert not ckpt8.verify(tmp_path / "a.ckpt8", checkpoint).failures
    ckpt8.compress(checkpoint, tmp_path / "b.ckpt8", threads=2)
    assert (tmp_path / "a.ckpt8").read_bytes() == (tmp_path / "b.ckpt8").read_bytes()


NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"]
ALL_NAMES = [*NAMES, "model.norm.weight"]
CONFIG = {"model_type": "llama", "transformers_version": "5.23.0"}


def stepped(optimizer):
    """The state of an optimizer after a step with some gradients."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def directory(root, config=CONFIG, groups=1, trainer=False):
    """Two weights of one shape and a norm, in a file that is sorted by name, and their optimizer."""
    root.mkdir()
    weights = {name: torch.randn(70, 70) for name in NAMES} | {"model.norm.weight": torch.ones(70)}
    save_file(weights, root / "model.safetensors")
    live = [torch.nn.Parameter(weight) for weight in weights.values()]
    parts = [live] if groups == 1 else [live[:2], live[2:]] if groups == 2 else [[each] for each in live]
    adam = torch.optim.AdamW([{"params": part, "weight_decay": 0.1} for part in parts])
    adam.param_groups[-1]["weight_decay"] = 0.0
    torch.save(stepped(adam), root / "optimizer.pt")
    if config is not None:
        (root / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    if trainer:
        (root / "trainer_state.json").write_text("{}")
    return root


def names_of(root):
    rows = inspect_checkpoint(root, tensors=True)["parameters"]
    return [row["name"].removeprefix("optimizer.pt:") for row in rows], [row["named"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"groups": 2, "trainer": True}])
def test_the_configuration_tells_the_order(options, tmp_path):
    assert names_of(directory(tmp_path / "run", **options)) == (ALL_NAMES, [True] * 3)


CONFIGS = [{**CONFIG, "model_type": "unheard_of"}, {**CONFIG, "transformers_version": "3.0.0"}]
UNORDERED = [*({"config": each} for each in (None, *CONFIGS, b"\xff\x00not json", b"[" * 2_000_000)), {"groups": 3}]


@pytest.mark.slow
@pytest.mark.parametrize("options", UNORDERED)
def test_where_the_order_is_not_known_only_a_shape_of_its_own_tells(options, tmp_path):
    found = names_of(directory(tmp_path / "run", **options))
    assert found == (["state.0", "state.1", "model.norm.weight"], [False, False, True])


@pytest.mark.slow
def test_state_by_name_needs_no_weights(tmp_path):
    """As accelerate writes it for FSDP; wrappers are left out where a name is shown, and nowhere else."""
    root = directory(tmp_path / "run", config=None)
    state = torch.load(root / "optimizer.pt", weights_only=True)["state"]
    names = [f"module._fsdp_wrapped_module.{name}" for name in ALL_NAMES]
    tree = {"state": dict(zip(names, state.values(), strict=True)), "param_groups": [{**GROUP, "params": names}]}
    torch.save(tree, root / "optimizer.pt")
    assert names_of(root) == (ALL_NAMES, [True] * 3)
    manifest = ckpt8.compress(root)
    assert f"optimizer.pt:state.{names[0]}.exp_avg" in {storage.name for storage in manifest.storages}
    rows = inspect_container(tmp_path / "run.ckpt8", tensors=True)
    assert [row["name"] for row in rows["parameters"]] == [f"optimizer.pt:{n}" for n in ALL_NAMES]
    assert {row["name"] for row in rows["worst"]["update"]} == {f"optimizer.pt:{name}" for name in NAMES}


def test_factored_statistics_have_the_shape_of_their_parameter(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    root = directory(tmp_path / "run")
    shapes = {NAMES[0]: (70, 40), NAMES[1]: (40, 70), "model.layers.0.mlp.up_proj.weight": (70, 40)}
    shapes |= {"model.layers.0.input_layernorm.weight": (70,), "model.norm.weight": (70,)}
    live = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    save_file({name: parameter.data for name, parameter in live.items()}, root / "model.safetensors")
    adafactor = transformers.optimization.Adafactor(live.values(), lr=1e-3, relative_step=False, scale_parameter=False)
    state = stepped(adafactor)
    torch.save(state, root / "optimizer.pt")
    assert "exp_avg_sq_row" in state["state"][0]
    assert names_of(root)[0] == list(shapes)[3:]
    with open_checkpoint(root / "optimizer.pt") as checkpoint:
        states = checkpoint.tree["state"]
        assert [parameter_shape(states[k]) for k in range(5)] == list(shapes.values())


@pytest.mark.slow
def test_a_single_file_has_the_order_of_its_model(tmp_path):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.Linear(70, 70), torch.nn.LayerNorm(70))
    weights, state = model.state_dict(), stepped(torch.optim.AdamW(model.parameters()))
    lightning = {"state_dict": weights, "optimizer_states": [state]}
    two = {"a": {"model": weights}, "b": {"model": weights}, "optimizer": state}
    for tree in ({"model": weights, "optimizer": state}, lightning, two):
        torch.save(tree, tmp_path / "run.pt")
        assert names_of(tmp_path / "run.pt")[0] == list(weights)
        manifest = ckpt8.compress(tmp_path / "run.pt", force=True)
        assert [parameter.name for parameter in manifest.parameters] == list(weights)
    two["b"]["model"] = {f"other.{name}": tensor for name, tensor in weights.items()}
    torch.save(two, tmp_path / "run.pt")
    assert names_of(tmp_path / "run.pt") == ([f"optimizer.state.{k}" for k in range(6)], [False] * 6)


def test_wrappers_are_dropped_unless_names_become_one():
    given = [("m:_orig_mod.a.weight", ["m:state.0.exp_avg"]), ("m:a._orig_mod.bias", ["m:state.1.exp_avg"])]
    assert [row["name"] for row in display_names(given, directory=True)] == ["m:a.weight", "m:a.bias"]
    given.append(("m:a.weight", ["m:state.2.exp_avg"]))
    assert [row["name"] for row in display_names(given, directory=True)] == [name for name, _ in given]
    # A colon in a name is no member where there are none; a list of parameters has numbers for names.
    given = [("a:_orig_mod.0", ["state.0.exp_avg"]), ("3", ["state.3.exp_avg"]), ("state.4", ["state.4.exp_avg"])]
    expected = [("a:_orig_mod.0", True), ("3", True), ("state.4", False)]
    assert [(row["name"], row["named"]) for row in display_names(given, directory=False)] == expected


@pytest.mark.parametrize("name", ["lone \ud800 half", "line\nbreak", "x" * 5000], ids=["half", "line", "long"])
def test_a_name_that_no_manifest_holds_is_written_so_that_one_does(tmp_path, name):
    """The parameter of an optimizer with numbers takes the name of the only weight there is."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(96, 96), "exp_avg_sq": torch.ones(96, 96)}
    group = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "params": [0]}
    run = {"model": {name: torch.ones(96, 96)}, "optimizer": {"state": {0: state}, "param_groups": [group]}}
    torch.save(run, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt", tmp_path / "run.ckpt8")
    (back,) = ckpt8.load(tmp_path / "run.ckpt8")["model"]
    assert back == name
    with ContainerReader(tmp_path / "run.ckpt8") as reader:
        (parameter,) = reader.manifest.parameters
    assert parameter.name.isprintable()
    assert len(parameter.name) < 2000


@pytest.mark.slow
def test_a_state_dict_that_is_sorted_may_have_lost_its_order(tmp_path):
    live = {name: torch.nn.Parameter(torch.randn(70, 70)) for name in ("b", "a", "c")}
    state = stepped(torch.optim.AdamW(live.values()))
    for names, expected in ((list(live), list(live)), (sorted(live), [f"optimizer.state.{k}" for k in range(3)])):
        torch.save({"model": {n: live[n].data for n in names}, "optimizer": state}, tmp_path / "run.pt")
        assert names_of(tmp_path / "run.pt")[0] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_the_trainer_freezes_leaves_its_shape_without_names(tmp_path):
    model = llama()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad = False
    checkpoint, optimizer = train(model, tmp_path)
    ckpt8.compress(checkpoint, tmp_path / "a.ckpt8")
    found = named_moments(checkpoint, tmp_path / "a.ckpt8")
    live = dict(model.named_parameters())
    # All matrices have one shape, and all norms have another.
    assert {name for name, (named, _) in found.items() if named} == {name for name in live if "norm" in name}
    for name, (named, moment) in found.items():
        assert not named or torch.equal(moment, optimizer.state[live[name]]["exp_avg"]), name


@pytest.mark.slow
def test_shapes_that_differ_from_the_model_give_no_names(tmp_path):
    root = directory(tmp_path / "run")
    save_file({name: torch.randn(72, 70) for name in NAMES}, root / "model.safetensors")
    assert names_of(root) == (["state.0", "state.1", "state.2"], [False] * 3)
