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
    """Save an object; classify what is read back, or make something else of it."""

    def inner(obj, make=lambda checkpoint: classify(checkpoint.tree)):
        torch.save(obj, tmp_path / "checkpoint.pt")
        with open_checkpoint(tmp_path / "checkpoint.pt") as checkpoint:
            return make(checkpoint)

    return inner


@pytest.fixture
def plan(read):
    """Save an object and plan it; gives streams by name."""

    def inner(obj, policy=None):
        made = read(obj, lambda checkpoint: make_plan(checkpoint, policy or Policy()))
        return made, {stream.spec.name: stream for stream in made.streams}

    return inner


def roles(structure) -> dict[str, Role]:
    assert len({tensor.name for tensor in structure.tensors}) == len(structure.tensors)
    return {tensor.name: tensor.role for tensor in structure.tensors}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(fc=nn.Linear(6, 4), bn=nn.BatchNorm1d(4)))


def stepped(model, make=torch.optim.AdamW, given=None, **options):
    optimizer = make(model.parameters() if given is None else given, **options)
    model(torch.randn(3, model[0].in_features)).square().sum().backward()
    optimizer.step()
    return optimizer


MODEL = network().state_dict()
ONE, TWO = torch.ones(1), torch.ones(2)
SCALAR = torch.ones(())
NAMESPACE = argparse.Namespace(mean=torch.ones(3))
KEYS = "exp_avg exp_avg_sq max_exp_avg_sq momentum_buffer master_param exp_avg_diff square_avg step"
GROUP = {"params": [0], "lr": torch.tensor(0.1), "exp_avg": TWO, "weights": {"model": TWO}}
ROLES = {
    **{
        key: ({key: MODEL, "epoch": 3, "loss": SCALAR}, {f"{key}.{name}": WEIGHT for name in MODEL} | {"loss": OTHER})
        for key in (
            *("model", "state_dict", "model_state_dict", "module", "state_dict_ema", "model_ema", "ema", "net"),
            *("params", "g_ema"),
        )
    },
    "a bare state dict": (MODEL, dict.fromkeys(MODEL, WEIGHT)),
    "a plain dict": (dict(MODEL), dict.fromkeys(MODEL, WEIGHT)),
    "extra states": (
        {**MODEL, "fc._extra_state": {"amax": torch.zeros(3)}, "bn._extra_state": None},
        dict.fromkeys(MODEL, WEIGHT) | {"fc._extra_state.amax": WEIGHT},
    ),
    # These are no bare state dicts.
    "a number": ({"w": TWO, "epoch": 3}, {"w": OTHER}),
    "a key that is a number": ({"w": TWO, 0: TWO}, {"w": OTHER, "0": OTHER}),
    "a list beside it": ({"w": TWO, "list": [TWO]}, {"w": OTHER, "list.0": OTHER}),
    "a list": ([TWO], {"0": OTHER}),
    "a tensor": (TWO, {"tensor": OTHER}),
    "unknown keys": (
        {"activations": {"w": TWO}, "MODEL": {"w": TWO}, "models": {"w": TWO}, "rng": [TWO], "args": NAMESPACE},
        dict.fromkeys(["activations.w", "MODEL.w", "models.w", "rng.0", "args.mean"], OTHER),
    ),
    "a tensor called model": ({"model": TWO, "epoch": 3}, {"model": OTHER}),
    "models in others": (
        {"algo": {"policy": {"w": TWO}, "buffer": {"w": TWO, "x": ONE}}, "wrapped": {"model": {"module": {"w": TWO}}}},
        {"algo.policy.w": WEIGHT, "algo.buffer.w": OTHER, "algo.buffer.x": OTHER, "wrapped.model.module.w": WEIGHT},
    ),
    "an average as a list": (
        {"ema": {"decay": 0.9, "shadow_params": [TWO, ONE]}},
        {"ema.shadow_params.0": WEIGHT, "ema.shadow_params.1": WEIGHT},
    ),
    "every key of a state": (
        {
            "state": {0: {key: torch.ones(2) for key in KEYS.split()} | {"x": {"exp_avg": TWO}, "list": [TWO]}},
            "param_groups": [{"params": [0]}],
        },
        dict(zip(
            [f"state.0.{key}" for key in (*KEYS.split(), "x.exp_avg", "list.0")],
            [MOMENT1, MOMENT2, MOMENT2, MOMENT1, WEIGHT, OTHER, OTHER, OTHER, OTHER, OTHER], strict=True,
        )),
    ),
    # A learning rate may be a tensor, and a name mean something elsewhere.
    "tensors of a group": (
        {"model": {"o": {"state": {0: {"exp_avg": TWO}}, "param_groups": [GROUP], "state_dict": {"w": TWO}}}},
        {
            "model.o.state.0.exp_avg": MOMENT1,
            **dict.fromkeys([f"model.o.param_groups.0.{key}" for key in ("lr", "exp_avg", "weights.model")], OTHER),
            "model.o.state_dict.w": OTHER,
        },
    ),
    "moments outside an optimizer": (
        {"exp_avg": TWO, "x": {"exp_avg_sq": TWO}, "y": {"state": {0: {"exp_avg": TWO}}}},
        {"exp_avg": OTHER, "x.exp_avg_sq": OTHER, "y.state.0.exp_avg": OTHER},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROLES)
def test_roles_by_place(case, read):
    tree, expected = ROLES[case]
    assert roles(read(tree)) == expected


def test_what_holds_no_tensor_is_no_state_dict():
    assert not any(map(is_bare_state_dict, ({}, {"_extra_state": 3}, None)))


def test_nanogpt(read):
    """The keys of nanoGPT's train.py."""
    model = network()
    structure = read(
        {
            "model": model.state_dict(),
            "optimizer": stepped(model).state_dict(),
            "model_args": {"n_layer": 1},
            "iter_num": 7,
            "best_val_loss": torch.tensor(1.5),
            "config": {"dtype": "bfloat16"},
        }
    )
    expected = {f"model.{name}": WEIGHT for name in MODEL} | {"best_val_loss": OTHER}
    places = [f"optimizer.state.{i}" for i in range(4)]
    for place in places:
        expected |= {f"{place}.step": OTHER, f"{place}.exp_avg": MOMENT1, f"{place}.exp_avg_sq": MOMENT2}
    assert roles(structure) == expected
    assert [found.name for found in structure.parameters] == places
    assert all(found.state.keys() == {"step", "exp_avg", "exp_avg_sq"} for found in structure.parameters)
    assert all(found.group["betas"] == (0.9, 0.999) for found in structure.parameters)


STATE = stepped(network()).state_dict()


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        (STATE, "state.0"),
        ({"trainer": {"opt": STATE}}, "trainer.opt.state.0"),
        ({"optimizer_states": [STATE]}, "optimizer_states.0.state.0"),
        ({"optimizer": [stepped(network()).state_dict(), STATE]}, "optimizer.1.state.0"),
        ({"model": {"inner_optimizer": STATE}}, "model.inner_optimizer.state.0"),
    ],
)
def test_an_optimizer_may_stand_anywhere(tree, place, read):
    structure = read(tree)
    expected = {f"{place}.exp_avg": MOMENT1, f"{place}.exp_avg_sq": MOMENT2, f"{place}.step": OTHER}
    assert expected.items() <= roles(structure).items()
    assert place in [parameter.name for parameter in structure.parameters]


def test_state_keyed_by_name(read):
    """FSDP and torch.distributed.checkpoint key the state by the name of the parameter, which may be any."""
    names = ["module.fc.weight", "module.fc.bias", "fp32_from_fp16_params", "model"]
    states = {name: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": SCALAR} for name in names}
    structure = read({"optimizer": {"state": states, "param_groups": [{"params": names, "lr": 0.5}]}})
    expected = {f"optimizer.state.{name}.exp_avg": MOMENT1 for name in names}
    expected |= {f"optimizer.state.{name}.exp_avg_sq": MOMENT2 for name in names}
    assert expected.items() <= roles(structure).items()
    assert [(parameter.name, parameter.group["lr"]) for parameter in structure.parameters] == [(n, 0.5) for n in names]


def test_parameters_take_their_names_from_the_groups(read):
    model = network()
    state = stepped(model, given=model.named_parameters()).state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert state["param_groups"][0]["param_names"] == names
    assert [parameter.name for parameter in read({"optimizer": state}).parameters] == names
    state["param_groups"][0]["param_names"] = names[:2]  # of a damaged file
    places = [f"optimizer.state.{i}" for i in range(4)]
    assert [parameter.name for parameter in read({"optimizer": state}).parameters] == places


def test_strange_groups_do_no_harm(read):
    state = {0: {"exp_avg": torch.ones(2)}, 1: "not a dict", (2, 3): {"exp_avg": torch.ones(2)}}
    groups = [None, {"params": 3}, {"params": [None, [0], 0]}, {}]
    structure = read({"optimizer": {"state": state, "param_groups": groups}})
    assert [parameter.state.keys() for parameter in structure.parameters] == [{"exp_avg"}, {"exp_avg"}]
    assert set(roles(structure).values()) == {MOMENT1}


def test_equal_paths_get_numbers(read):
    ones = [torch.ones(k) for k in range(1, 6)]
    tree = {"model": {"a.b": ones[0], "a": {"b": ones[1]}}, "model.a": {"b": ones[2]}, 1: ones[3], "1": ones[4]}
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


def test_a_plain_checkpoint(plan):
    model = nn.Sequential(nn.Linear(128, 96))
    made, streams = plan({"model": model[0].state_dict(), "optimizer": stepped(model).state_dict()})
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
    names = ["model.wte", "model.lm_head", "ema.same"]
    assert [(tensor.name, index) for tensor, index in made.tensors] == [(name, 0) for name in names]


FLAT = torch.randn(3 * 8192)
A, B, C = (FLAT[i * 8192 : (i + 1) * 8192].view(64, 128) for i in range(3))
COVERED = [
    *(lambda x: x[0:], lambda x: x.t(), lambda x: x.view(64, 96, 2).permute(2, 0, 1)),
    *(lambda x: x.as_strided((96, 128), (1, 96)), lambda x: x.flatten().as_strided((12288, 1), (1, 7))),
]
PARTLY = [
    *(lambda x: x[1:], lambda x: x[:-1], lambda x: x[::2], lambda x: x[:, :-1]),
    *(lambda x: x.as_strided((95, 128), (128, 1), 128), lambda x: x.as_strided((96, 128), (127, 1))),
]
TOGETHER = [
    ({"c": C, "a": A, "b": B}, True),
    ({"c": C, "a": A}, False),
    ({"all": FLAT.view(192, 128), "a": A}, True),
    ({"a": A, "b": FLAT[8193:].view(1, -1)}, False),
    ({"a": FLAT[:10_000].view(100, 100), "b": FLAT[9_000:24_576].view(177, 88)}, True),
]


@pytest.mark.parametrize(("model", "covered"), [
    *(({"w": view(torch.randn(96, 128))}, views is COVERED) for views in (COVERED, PARTLY) for view in views),
    *TOGETHER,
])  # fmt: skip
def test_coverage_of_a_storage(plan, model, covered):
    [stream] = plan({"model": model})[1].values()
    assert stream.codec == (Split24() if covered else Lossless())
    assert covered or "not fully covered" in lossless(stream)
    assert stream.spec.numel == (96 * 128 if "w" in model else 3 * 8192)


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
    plan = make_plan(WithSkeleton(Fake(key)), Policy())
    assert [stream.codec for stream in plan.streams] == [Split24(), Lossless()]
    assert [(tensor.name, index) for tensor, index in plan.tensors] == [("model.w", 0)]


def test_moments_that_are_not_alike_are_not_read_in_lockstep(plan):
    state = {0: {"exp_avg": torch.randn(96, 128), "exp_avg_sq": torch.rand(128, 96).t()}}
    made, streams = plan({"optimizer": {"state": state, "param_groups": [{"params": [0], "amsgrad": False}]}})
    assert all(unit.parameter is None and len(unit.streams) == 1 for unit in made.units)
    assert streams["optimizer.state.0.exp_avg"].codec == Companded8()


def test_whole_module(read):
    """The parameters are weights under the names of the state dict; buffers are not."""
    found = roles(read(network()))
    weights = {name for name, role in found.items() if role is WEIGHT}
    assert weights == {name for name, _ in network().named_parameters()}
    others = {name.rpartition(".")[2] for name, role in found.items() if role is OTHER}
    assert others == {"running_mean", "running_var", "num_batches_tracked"}


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
    structure = read({"optimizer": stepped(model, given=groups).state_dict()})
    assert [parameter.group["lr"] for parameter in structure.parameters] == [0.5, 0.5, 0.25, 0.25]


def test_a_unit_made_lossless_keeps_its_reason(plan):
    model = nn.Sequential(nn.Linear(128, 96, bias=False))
    made, _ = plan({"optimizer": stepped(model).state_dict()})
    [unit] = [unit for unit in made.units if unit.parameter is not None]
    safe = unit.fallback(Refusal("holds NaN"))
    assert [(stream.codec, stream.reason) for stream in safe.streams] == [(Lossless(), "holds NaN")] * 2
    assert [stream.spec for stream in safe.streams] == [stream.spec for stream in unit.streams]
    assert unit.streams[0].lossy
    assert not safe.streams[0].lossy
