"""Roles of the tensors of real structures, written by torch.save and read back, and what the plan makes of them."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from ckpt8.checkpoint.meaning.nodes import is_bare_state_dict
from ckpt8.checkpoint.meaning.roles import classify, unique_name
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources.bundle import WithSkeleton
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.plan import Refusal
from ckpt8.compressing.planning import make_plan
from ckpt8.compressing.policy import Policy
from ckpt8.core.tensors import DType, Role

WEIGHT, MOMENT1, MOMENT2, OTHER = Role.WEIGHT, Role.MOMENT1, Role.MOMENT2, Role.OTHER


@pytest.fixture
def read(tmp_path):
    """Save an object and classify what is read back."""

    def inner(obj):
        path = tmp_path / "checkpoint.pt"
        torch.save(obj, path)
        with open_checkpoint(path) as checkpoint:
            return classify(checkpoint.tree)

    return inner


@pytest.fixture
def plan(tmp_path):
    """Save an object and plan it; gives streams by name."""

    def inner(obj, policy=None):
        path = tmp_path / "checkpoint.pt"
        torch.save(obj, path)
        with open_checkpoint(path) as checkpoint:
            made = make_plan(checkpoint, policy or Policy())
        return made, {stream.spec.name: stream for stream in made.streams}

    return inner


def roles(structure) -> dict[str, Role]:
    assert len({tensor.name for tensor in structure.tensors}) == len(structure.tensors)
    return {tensor.name: tensor.role for tensor in structure.tensors}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(fc=nn.Linear(6, 4), bn=nn.BatchNorm1d(4)))


def stepped(model, make=torch.optim.AdamW, **options):
    optimizer = make(model.parameters(), **options)
    model(torch.randn(3, 6)).square().sum().backward()
    optimizer.step()
    return optimizer


STATE_DICT = [
    "fc.weight",
    "fc.bias",
    "bn.weight",
    "bn.bias",
    "bn.running_mean",
    "bn.running_var",
    "bn.num_batches_tracked",
]


# --- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "model",
        "state_dict",
        "model_state_dict",
        "module",
        "state_dict_ema",
        "model_ema",
        "ema",
        "net",
        "params",
        "g_ema",
    ],
)
def test_state_dicts_under_the_usual_keys(read, key):
    found = roles(read({key: network().state_dict(), "epoch": 3, "loss": torch.tensor(0.5)}))
    assert found == {f"{key}.{name}": WEIGHT for name in STATE_DICT} | {"loss": OTHER}


def test_bare_state_dict(read):
    assert roles(read(network().state_dict())) == dict.fromkeys(STATE_DICT, WEIGHT)
    assert roles(read(dict(network().state_dict()))) == dict.fromkeys(STATE_DICT, WEIGHT)


def test_bare_state_dict_with_extra_states(read):
    tree = {**network().state_dict(), "fc._extra_state": {"amax": torch.zeros(3)}, "bn._extra_state": None}
    found = roles(read(tree))
    assert {found[name] for name in STATE_DICT} == {WEIGHT}
    assert len(found) == len(STATE_DICT) + 1


def test_what_is_no_bare_state_dict(read):
    weight = torch.ones(2)
    for tree in (
        {"w": weight, "epoch": 3},
        {"w": weight, 0: weight},
        {"w": weight, "list": [weight]},
        [weight],
        weight,
    ):
        assert set(roles(read(tree)).values()) == {OTHER}
    assert not is_bare_state_dict({})
    assert not is_bare_state_dict({"_extra_state": 3})
    assert not is_bare_state_dict(None)


def test_unknown_keys_are_other(read):
    tree = {
        "activations": {"w": torch.ones(2)},
        "MODEL": {"w": torch.ones(2)},
        "models": {"w": torch.ones(2)},
        "rng": [torch.get_rng_state()],
        "model": torch.ones(2),  # a tensor called model is not a model
        "args": argparse.Namespace(mean=torch.ones(3)),
    }
    found = roles(read(tree))
    assert len(found) == 6
    assert set(found.values()) == {OTHER}


# --- optimizers -------------------------------------------------------------------------------------------------


def test_nanogpt(read):
    """The keys of nanoGPT's train.py."""
    model = network()
    optimizer = stepped(model)
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": {"n_layer": 1},
        "iter_num": 7,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dtype": "bfloat16"},
    }
    structure = read(checkpoint)
    expected = {f"model.{name}": WEIGHT for name in STATE_DICT} | {"best_val_loss": OTHER}
    for i in range(4):
        place = f"optimizer.state.{i}"
        expected |= {f"{place}.step": OTHER, f"{place}.exp_avg": MOMENT1, f"{place}.exp_avg_sq": MOMENT2}
    assert roles(structure) == expected
    assert [found.name for found in structure.parameters] == [f"optimizer.state.{i}" for i in range(4)]
    for found in structure.parameters:
        assert set(found.state) == {"step", "exp_avg", "exp_avg_sq"}
        assert found.group["betas"] == (0.9, 0.999)


def test_every_key_of_the_state(read):
    state = {
        "exp_avg": torch.ones(2),
        "exp_avg_sq": torch.ones(2),
        "max_exp_avg_sq": torch.ones(2),
        "momentum_buffer": torch.ones(2),
        "master_param": torch.ones(2),
        "exp_avg_diff": torch.ones(2),
        "square_avg": torch.ones(2),
        "step": torch.ones(()),
        "nested": {"exp_avg": torch.ones(2)},
        "list": [torch.ones(2)],
    }
    found = roles(read({"optimizer": {"state": {0: state}, "param_groups": [{"params": [0]}]}}))
    place = "optimizer.state.0"
    assert found == {
        f"{place}.exp_avg": MOMENT1,
        f"{place}.exp_avg_sq": MOMENT2,
        f"{place}.max_exp_avg_sq": MOMENT2,
        f"{place}.momentum_buffer": MOMENT1,
        f"{place}.master_param": WEIGHT,
        f"{place}.exp_avg_diff": OTHER,
        f"{place}.square_avg": OTHER,
        f"{place}.step": OTHER,
        f"{place}.nested.exp_avg": OTHER,
        f"{place}.list.0": OTHER,
    }


def test_an_optimizer_may_stand_anywhere(read):
    state = stepped(network()).state_dict()
    for tree, prefix in (
        (state, "state.0"),
        ({"trainer": {"opt": state}}, "trainer.opt.state.0"),
        ({"optimizer_states": [state]}, "optimizer_states.0.state.0"),
        ({"optimizer": [stepped(network()).state_dict(), state]}, "optimizer.1.state.0"),
        ({"model": {"inner_optimizer": state}}, "model.inner_optimizer.state.0"),
    ):
        structure = read(tree)
        found = roles(structure)
        assert found[f"{prefix}.exp_avg"] is MOMENT1
        assert found[f"{prefix}.exp_avg_sq"] is MOMENT2
        assert found[f"{prefix}.step"] is OTHER
        assert prefix in [parameter.name for parameter in structure.parameters]


def test_state_keyed_by_name(read):
    """FSDP and torch.distributed.checkpoint key the state by the name of the parameter, which may be any."""
    moment = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.ones(())}
    names = ["module.fc.weight", "module.fc.bias", "fp32_from_fp16_params", "model"]
    optimizer = {
        "state": {name: {k: v.clone() for k, v in moment.items()} for name in names},
        "param_groups": [{"params": names, "lr": 0.5}],
    }
    structure = read({"optimizer": optimizer})
    found = roles(structure)
    for name in names:
        assert found[f"optimizer.state.{name}.exp_avg"] is MOMENT1
        assert found[f"optimizer.state.{name}.exp_avg_sq"] is MOMENT2
    assert [parameter.name for parameter in structure.parameters] == names
    assert [parameter.group["lr"] for parameter in structure.parameters] == [0.5] * 4


def test_parameters_take_their_names_from_the_groups(read):
    model = network()
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(3, 6)).square().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert state["param_groups"][0]["param_names"] == names
    assert [parameter.name for parameter in read({"optimizer": state}).parameters] == names
    state["param_groups"][0]["param_names"] = names[:2]  # of a damaged file
    places = [f"optimizer.state.{i}" for i in range(4)]
    assert [parameter.name for parameter in read({"optimizer": state}).parameters] == places


def test_tensors_of_the_groups_are_other(read):
    """A learning rate that is a tensor, even under names that mean something elsewhere."""
    group = {"params": [0], "lr": torch.tensor(0.1), "exp_avg": torch.ones(2), "weights": {"model": torch.ones(2)}}
    tree = {
        "model": {
            "o": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [group], "state_dict": {"w": torch.ones(2)}}
        }
    }
    assert roles(read(tree)) == {
        "model.o.state.0.exp_avg": MOMENT1,
        "model.o.param_groups.0.lr": OTHER,
        "model.o.param_groups.0.exp_avg": OTHER,
        "model.o.param_groups.0.weights.model": OTHER,
        "model.o.state_dict.w": OTHER,
    }


def test_strange_groups_do_no_harm(read):
    state = {0: {"exp_avg": torch.ones(2)}, 1: "not a dict", (2, 3): {"exp_avg": torch.ones(2)}}
    groups = [None, {"params": 3}, {"params": [None, [0], 0]}, {}]
    structure = read({"optimizer": {"state": state, "param_groups": groups}})
    assert [parameter.state.keys() for parameter in structure.parameters] == [{"exp_avg"}, {"exp_avg"}]
    assert set(roles(structure).values()) == {MOMENT1}


# --- names ------------------------------------------------------------------------------------------------------


def test_equal_paths_get_numbers(read):
    tree = {
        "model": {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}},
        "model.a": {"b": torch.ones(3)},
        1: torch.ones(4),
        "1": torch.ones(5),
    }
    structure = read(tree)
    assert [tensor.name for tensor in structure.tensors] == ["model.a.b", "model.a.b#2", "model.a.b#3", "1", "1#2"]
    assert [tensor.ref.shape for tensor in structure.tensors] == [(1,), (2,), (3,), (4,), (5,)]


def test_numbers_avoid_names_that_exist():
    taken: dict[str, int] = {}
    given = [unique_name(name, taken) for name in ["w#2", "w", "w", "w", "w#2", "w#3", "w"]]
    assert given[:4] == ["w#2", "w", "w#3", "w#4"]
    assert len(set(given)) == len(given)


def test_names_are_printable_and_short():
    taken: dict[str, int] = {}
    assert unique_name("a\nb\x00\x1b[31m", taken) == "a\\x0ab\\x00\\x1b[31m"
    assert unique_name("gewicht.\u00fc", taken) == "gewicht.\u00fc"
    long = [unique_name("x" * 5000, taken) for _ in range(3)]
    assert len(set(long)) == 3
    assert all(len(name) < 600 for name in long)
    assert all(unique_name(f"\u202e{i}\u2028", {}).isprintable() for i in range(3))


# --- the plan ---------------------------------------------------------------------------------------------------


def test_a_plain_checkpoint(plan):
    model = nn.Linear(128, 96)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    made, streams = plan({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert streams["model.weight"].codec == Split24()
    assert (streams["model.bias"].codec, streams["model.bias"].reason) == (Lossless(), "small")
    assert streams["optimizer.state.0.exp_avg"].codec == Companded8()
    assert streams["optimizer.state.0.exp_avg_sq"].codec == Companded8(signed=False, Q=255)
    assert (streams["optimizer.state.0.step"].codec, streams["optimizer.state.0.step"].reason) == (Lossless(), None)
    assert [stream.index for stream in made.streams] == list(range(len(streams)))
    units = {tuple(stream.spec.name for stream in unit.streams): unit for unit in made.units}
    moments = units["optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"]
    assert moments.parameter.name == "optimizer.state.0"
    assert moments.numel == 96 * 128
    assert sorted(stream.index for unit in made.units for stream in unit.streams) == list(range(len(streams)))
    firsts = [unit.streams[0].storage.offset for unit in made.units]
    assert firsts == sorted(firsts)


def lossless(stream) -> str:
    assert stream.codec == Lossless()
    assert stream.reason is not None
    return stream.reason


def test_roles_that_disagree_about_a_storage(plan):
    joint = torch.randn(2, 96, 128)
    state = {0: {"exp_avg": joint[1], "exp_avg_sq": torch.ones(96, 128)}}
    tree = {"model": {"w": joint[0]}, "optimizer": {"state": state, "param_groups": [{"params": [0]}]}}
    made, streams = plan(tree)
    assert "several roles" in lossless(streams["model.w"])
    assert streams["model.w"].spec.role is OTHER
    assert streams["optimizer.state.0.exp_avg_sq"].codec == Companded8(signed=False, Q=255)
    assert all(unit.parameter is None for unit in made.units)
    assert len(made.tensors) == 3
    # A rule cannot overrule it: the values mean two things.
    _, streams = plan(tree, Policy.of("flash", ["*=split24"]))
    assert "several roles" in lossless(streams["model.w"])


def test_one_role_twice_is_no_conflict(plan):
    weight = torch.randn(96, 128)
    made, streams = plan({"model": {"wte": weight, "lm_head": weight}, "ema": {"same": weight.t()}})
    assert list(streams) == ["model.wte"]
    assert streams["model.wte"].codec == Split24()
    assert [(tensor.name, index) for tensor, index in made.tensors] == [
        ("model.wte", 0),
        ("model.lm_head", 0),
        ("ema.same", 0),
    ]


@pytest.mark.parametrize(
    ("view", "covered"),
    [
        (lambda x: x[0:], True),
        (lambda x: x[1:], False),
        (lambda x: x[:-1], False),
        (lambda x: x[::2], False),
        (lambda x: x[:, :-1], False),
        (lambda x: x.t(), True),
        (lambda x: x.view(64, 96, 2).permute(2, 0, 1), True),
        (lambda x: x.as_strided((95, 128), (128, 1), 128), False),
        (lambda x: x.as_strided((96, 128), (1, 96)), True),
        (lambda x: x.as_strided((96, 128), (127, 1)), False),
        (lambda x: x.flatten().as_strided((12288, 1), (1, 7)), True),
    ],
)
def test_partial_coverage(plan, view, covered):
    weight = torch.randn(96, 128)
    _, streams = plan({"model": {"w": view(weight)}})
    [stream] = streams.values()
    if covered:
        assert stream.codec == Split24()
    else:
        assert "not fully covered" in lossless(stream)
    assert stream.spec.numel == 96 * 128


def test_several_views_may_cover_together(plan):
    flat = torch.randn(3 * 8192)
    parts = [flat[i * 8192 : (i + 1) * 8192].view(64, 128) for i in range(3)]
    _, streams = plan({"model": {"c": parts[2], "a": parts[0], "b": parts[1]}})
    assert [stream.codec for stream in streams.values()] == [Split24()]
    _, streams = plan({"model": {"c": parts[2], "a": parts[0]}})
    assert ["not fully covered" in lossless(stream) for stream in streams.values()] == [True]
    _, streams = plan({"model": {"all": flat.view(192, 128), "a": parts[0]}})
    assert [stream.codec for stream in streams.values()] == [Split24()]
    gap = {"a": flat[:8192].view(64, 128), "b": flat[8193:].view(1, -1)}
    _, streams = plan({"model": gap})
    assert ["not fully covered" in lossless(stream) for stream in streams.values()] == [True]
    overlapping = [flat[:10_000].view(100, 100), flat[9_000:24_576].view(177, 88)]
    _, streams = plan({"model": dict(zip("ab", overlapping, strict=True))})
    assert [stream.codec for stream in streams.values()] == [Split24()]


def test_two_types_over_one_storage(plan):
    bits = torch.randn(96, 128)
    _, streams = plan({"model": {"wide": bits.view(torch.uint32), "narrow": bits.view(torch.uint16)}})
    [stream] = streams.values()
    assert stream.codec == Lossless()
    assert stream.spec.dtype is DType.UINT8
    assert stream.spec.numel == 4 * 96 * 128


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_storages_that_something_else_holds_are_opaque(read, plan):
    weight = torch.randn(96, 128)
    tree = {"model": {"w": weight}, "raw": weight.storage()}
    structure = read(tree)
    assert structure.opaque == {tensor.ref.key for tensor in structure.tensors}
    _, streams = plan(tree)
    assert "other than a tensor" in lossless(streams["model.w"])
    _, streams = plan(tree, Policy.of("flash", ["*=split24"]))
    assert "other than a tensor" in lossless(streams["model.w"])
    other = {"model": {"w": weight}, "raw": weight.clone().storage()}
    _, streams = plan(other)
    assert streams["model.w"].codec == Split24()
    assert sum("other than a tensor" in (stream.reason or "") for stream in streams.values()) == 1


class Fake:
    """A checkpoint of one storage, as a reader gives it."""

    format, size = "fake", 1 << 18
    tree: Any = None

    def __init__(self, key: str) -> None:
        self.storages = (StorageInfo(key, DType.FLOAT32, 64, 4 * 96 * 128),)
        self.tree = {"model": {"w": TensorRef(key, DType.FLOAT32, 0, (96, 128), (128, 1))}}


@pytest.mark.parametrize("key", ["0", "ckpt8.skeleton"])
def test_no_key_of_a_source_stands_for_the_skeleton(key):
    """Keys come from the file, which may call a storage anything."""
    plan = make_plan(WithSkeleton(Fake(key)), Policy())
    assert [stream.codec for stream in plan.streams] == [Split24(), Lossless()]
    assert [(tensor.name, index) for tensor, index in plan.tensors] == [("model.w", 0)]


def test_moments_that_are_not_alike_are_not_read_in_lockstep(plan):
    state = {0: {"exp_avg": torch.randn(96, 128), "exp_avg_sq": torch.rand(128, 96).t()}}
    made, streams = plan({"optimizer": {"state": state, "param_groups": [{"params": [0], "amsgrad": False}]}})
    assert all(unit.parameter is None and len(unit.streams) == 1 for unit in made.units)
    assert streams["optimizer.state.0.exp_avg"].codec == Companded8()


def test_nested_models(read):
    sd = {"w": torch.ones(2)}
    algorithm = {"policy": dict(sd), "buffer": sd | {"x": torch.ones(1)}}
    found = roles(read({"algo": algorithm, "wrapped": {"model": {"module": dict(sd)}}}))
    assert found == {
        "algo.policy.w": WEIGHT,
        "algo.buffer.w": OTHER,
        "algo.buffer.x": OTHER,
        "wrapped.model.module.w": WEIGHT,
    }


def test_whole_module(read):
    """The parameters are weights under the names of the state dict; buffers are not."""
    found = roles(read(network()))
    weights = {name for name, role in found.items() if role is WEIGHT}
    assert weights == {name for name, _ in network().named_parameters()}
    others = {name.rpartition(".")[2] for name, role in found.items() if role is OTHER}
    assert others == {"running_mean", "running_var", "num_batches_tracked"}


def test_ema_as_a_list_of_parameters(read):
    found = roles(read({"ema": {"decay": 0.9, "shadow_params": [torch.ones(2), torch.zeros(3)]}}))
    assert found == {"ema.shadow_params.0": WEIGHT, "ema.shadow_params.1": WEIGHT}


def test_lists_of_optimizers_keep_their_groups_apart(read):
    first, second = stepped(network(), lr=0.1), stepped(network(), torch.optim.SGD, lr=0.2, momentum=0.5)
    structure = read({"optimizer": [first.state_dict(), second.state_dict()]})
    assert [parameter.group["lr"] for parameter in structure.parameters] == [0.1] * 4 + [0.2] * 4
    assert [parameter.name for parameter in structure.parameters] == [
        f"optimizer.{k}.state.{i}" for k in range(2) for i in range(4)
    ]


def test_groups_of_one_optimizer(read):
    model = network()
    groups = [{"params": list(model.fc.parameters()), "lr": 0.5}, {"params": list(model.bn.parameters()), "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(3, 6)).square().sum().backward()
    optimizer.step()
    structure = read({"optimizer": optimizer.state_dict()})
    assert [parameter.group["lr"] for parameter in structure.parameters] == [0.5, 0.5, 0.25, 0.25]


def test_moments_outside_an_optimizer_are_other(read):
    found = roles(
        read(
            {
                "exp_avg": torch.ones(2),
                "x": {"exp_avg_sq": torch.ones(2)},
                "y": {"state": {0: {"exp_avg": torch.ones(2)}}},
            }
        )
    )
    assert set(found.values()) == {OTHER}


def test_a_unit_made_lossless_keeps_its_reason(plan):
    model = nn.Linear(128, 96, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    made, _ = plan({"optimizer": optimizer.state_dict()})
    [unit] = [unit for unit in made.units if unit.parameter is not None]
    safe = unit.fallback(Refusal("holds NaN"))
    assert [(stream.codec, stream.reason) for stream in safe.streams] == [(Lossless(), "holds NaN")] * 2
    assert [stream.spec for stream in safe.streams] == [stream.spec for stream in unit.streams]
    assert unit.streams[0].lossy
    assert not safe.streams[0].lossy
