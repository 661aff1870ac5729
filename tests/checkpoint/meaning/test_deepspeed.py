"""Checkpoints that DeepSpeed wrote, ZeRO 1 to 3 and universal: its own ``load_checkpoint`` goes on from the restored.

Real runs on CPUs, of two processes and of one, see ``deepspeed_worker``.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import deepspeed_worker
import pytest
import torch
from deepspeed_worker import LAST, PRESETS, SAVED, make_model
from reference_kit import adamw

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs.split24 import REFUSAL
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.decoding import decode_storage
from ckpt8.container.reader import ContainerReader
from ckpt8.core.tensors import DType, Role

# Not imported here: that takes seconds, and the processes do it themselves.
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

LAUNCHES = {
    (2, "fast"): ("z1-bf16", "z2-fp32", "z3-bf16", "z2-bf16-universal"),
    (2, "slow"): ("z3-bf16-universal",),
    (1, "slow"): ("z1-bf16", "z3-fp32"),
}
RUNS = [
    pytest.param((*launch, case), id=f"{case}-{launch[0]}", marks=[pytest.mark.slow] if launch[1] == "slow" else [])
    for launch, cases in LAUNCHES.items()
    for case in cases
]
each_run = pytest.mark.parametrize("run", RUNS, indirect=True)
MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
PADDED = ("z1-bf16-2", "z2-fp32-2", "z3-bf16-2")
UNIVERSAL = {"fp32.pt": Role.WEIGHT, "exp_avg.pt": Role.MOMENT1, "exp_avg_sq.pt": Role.MOMENT2}


@dataclass(frozen=True)
class Run:
    """A case in the folder of its launch."""

    world: int
    case: str
    folder: Path

    @property
    def source(self):
        return self.folder / self.case

    def container(self, preset):
        return self.folder / f"{self.case}.{preset}.ckpt8"

    def restored(self, preset):
        return self.folder / f"{self.case}.{preset}"


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Start the processes of a launch when it is first asked for; its folder."""
    found = {}

    def launch(world, speed):
        if (world, speed) not in found:
            folder = found[world, speed] = tmp_path_factory.mktemp(f"{speed}-{world}")
            command = [sys.executable, deepspeed_worker.__file__, str(folder), str(world), *LAUNCHES[world, speed]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
        return found[world, speed]

    return launch


@pytest.fixture
def run(request, launched):
    world, speed, case = request.param
    return Run(world, case, launched(world, speed))


@pytest.fixture
def manifest(run):
    with ckpt8.open(run.container("flash")) as file:
        return file.manifest


def largest(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@each_run
def test_the_run_goes_on(run):
    losses = json.loads((run.folder / f"losses-{run.world}.json").read_text())[run.case]
    assert len(losses["none"]) == LAST - SAVED
    assert losses["lossless"] == losses["none"]
    drift = largest(losses["flash"], losses["none"])
    assert drift <= 1e-3
    if "no moments" in losses:
        assert drift < largest(losses["no moments"], losses["none"]) / 5


@each_run
def test_what_is_restored_is_what_was_measured(run):
    for preset in PRESETS:
        assert not ckpt8.verify(run.container(preset), run.source).failures
    for path in run.source.rglob("*"):
        if path.is_file():
            name = path.relative_to(run.source)
            back = {preset: (run.restored(preset) / name).read_bytes() for preset in PRESETS}
            assert back["lossless"] == path.read_bytes()
            if path.suffix != ".pt":
                assert set(back.values()) == {path.read_bytes()}
            # The model of a bf16 run is what its masters round to in flash, whatever becomes of these.
            if "bf16" in run.case and path.name.endswith("_model_states.pt"):
                assert back["flash"] == path.read_bytes()


@each_run
def test_masters_are_paired_with_their_moments(run):
    """All of them: those of the last rank may end before their moments do, with the padding in their storage.

    Ranks share one optimizer. The universal form is another; of stage 3 its common file keeps the state of rank 0.
    """
    with open_source(run.source) as source:
        plan = plan_bundle(source, Policy.of("archive"))
    streams = {stream.index: stream for stream in plan.streams}
    places = set()
    for unit in plan.units:
        if unit.parameter is None:
            continue
        step = unit.parameter.step
        assert (step.lr, step.beta1, step.beta2, step.unpaired) == (1e-3, 0.9, 0.95, None)
        assert any(key in streams[step.weight].spec.name for key in (*MASTERS, "fp32.pt"))
        assert {stream.spec.numel for stream in unit.streams} == {streams[step.weight].spec.numel}
        path = unit.parameter.name.partition(":")[0]
        places.add((step.optimizer, "ranks" if path.endswith("_optim_states.pt") else path.rpartition("/")[2]))
    expected = {"ranks"}
    if run.case.endswith("universal"):
        expected |= {"zero", "optimizer_state.pt"} if run.case.startswith("z3") else {"zero"}
    assert {place for _, place in places} == expected
    assert len({optimizer for optimizer, _ in places}) == len(places) == len(expected)


@each_run
def test_roles_and_codecs(manifest):
    seen = set()
    for record in manifest.storages:
        member, _, name = record.name.partition(":")
        last, file, expected = name.rpartition(".")[2], member.rpartition("/")[2], Role.OTHER
        if name == "ckpt8.skeleton":
            assert record.dtype is DType.UINT8
        elif "/zero/" in member and file in UNIVERSAL:
            expected = UNIVERSAL[file]
        elif name.startswith("module.") or any(key in name for key in MASTERS):
            expected = Role.WEIGHT
        elif last in ("exp_avg", "exp_avg_sq"):
            expected = Role.MOMENT1 if last == "exp_avg" else Role.MOMENT2
        assert record.role is expected, record.name
        if REFUSAL in (record.reason or ""):  # DeepSpeed pads partitions with memory that it does not set
            assert record.role is Role.WEIGHT
        elif record.numel > 70_000:  # nothing else of that size is kept as it is
            codec = {Role.WEIGHT: "split24/1", Role.MOMENT1: "companded8/1", Role.MOMENT2: "companded8/1"}[record.role]
            assert record.codec["id"] == ("reference/1" if record.dtype is DType.BFLOAT16 else codec)
            seen.add(record.role)
        if last == "step" or record.role is Role.OTHER:
            assert record.codec["id"] == "lossless/1"
    assert seen == {Role.WEIGHT, Role.MOMENT1, Role.MOMENT2}


@each_run
def test_update_space(run, manifest):
    flat = {p.name: p for p in manifest.parameters if "optimizer_state_dict" in p.name}
    large = {name for name, p in flat.items() if manifest.storages[p.moments["moment1"]].numel >= 65_536}
    assert len(large) >= run.world
    universal = {name.partition(":")[2] for name in {p.name for p in manifest.parameters} - set(flat)}
    named = {name for name, _ in make_model().named_parameters()}
    assert universal == (named if "universal" in run.case else set())
    with ckpt8.open(run.container("lossless")) as original, ckpt8.open(run.container("flash")) as stored:
        tensor_of = {tensor.storage: tensor.name for tensor in manifest.tensors}
        for parameter in manifest.parameters:
            rule = parameter.rule
            assert (rule["kind"], rule["step"], rule["beta1"], rule["beta2"]) == ("adam", SAVED, 0.9, 0.95)
            if parameter.error is None:
                assert manifest.storages[parameter.moments["moment1"]].codec["id"] == "lossless/1"
                continue
            names = [tensor_of[parameter.moments[slot]] for slot in ("moment1", "moment2")]
            u, v = (step_of(*(file.get_tensor(name) for name in names), rule) for file in (original, stored))
            error = parameter.error
            assert error["sum_square_error"] == pytest.approx(float((u - v).square().sum()), rel=1e-3)
            assert error["sum_square"] == pytest.approx(float(u.square().sum()), rel=1e-4)
            assert error["max_error"] == pytest.approx(float((u - v).abs().max()), rel=1e-4)


def step_of(m, v, rule):
    """AdamW's step per unit of learning rate, in float64."""
    m, v = m.double().flatten(), v.double().flatten()
    m_hat = m / (1 - rule["beta1"] ** rule["step"])
    v_hat = v / (1 - rule["beta2"] ** rule["step"])
    return m_hat / (v_hat.sqrt() + rule["eps"])


@pytest.mark.parametrize("run", [run for run in RUNS if run.id in PADDED], indirect=True)
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_is_exact(preset, run):
    """Every element that no parameter has is zero, and stays zero."""
    found = 0
    with ContainerReader(run.container("lossless")) as original, ContainerReader(run.container(preset)) as reader:
        for index, record in enumerate(reader.manifest.storages):
            if record.role is Role.OTHER or not record.numel:
                continue
            before, after = (decode_storage(each, index) for each in (original, reader))
            assert not after[before == 0].any()
            assert not torch.signbit(after[before == 0].float()).ne(torch.signbit(before[before == 0].float())).any()
            held = sum(math.prod(tensor.shape) for tensor in reader.manifest.tensors if tensor.storage == index)
            assert not before[held:].any()
            found += record.numel - held
    # Of stage 3 the padding is part of its tensors.
    assert found > 0 or "z3" in run.case


def test_lists_of_states(tmp_path):
    """Imitation: elastic checkpoints of stages 1 and 2 hold a list of states without their groups."""
    states = [adamw([torch.randn(300, 300)])["state"][0] for _ in range(2)]
    torch.save({"optimizer_state_dict": {"base_optimizer_state": states}}, tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt")
    roles = {record.name.rpartition(".")[2]: record.codec["id"] for record in manifest.storages if record.numel > 1000}
    assert roles["exp_avg"] == roles["exp_avg_sq"] == "companded8/1"
