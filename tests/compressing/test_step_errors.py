"""The error in steps of the optimizer: against the formulas of a budget in float64, on every path that measures it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, TensorRef
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lattice import Lattice
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.split24 import Split24
from ckpt8.codecs.vscaled import VScaled
from ckpt8.compressing import lockstep as lockstep_module
from ckpt8.compressing.lockstep import Lockstep
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.measure_torch import ErrorMeter
from ckpt8.compressing.plan import OptimizerStep, Parameter, Stream, Unit
from ckpt8.compressing.policy import carry
from ckpt8.core.arrays import as_array, as_tensor
from ckpt8.core.errors import RefusedError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType, Role, TensorSpec

LR, BETA1, BETA2, STEP, EPS = 3e-3, 0.9, 0.95, 20, 1e-8
COUNT = 256 * 40
ROLES = {"weight": Role.WEIGHT, "moment1": Role.MOMENT1, "moment2": Role.MOMENT2, "max_moment2": Role.MOMENT2}
RULES = {"adam": UpdateRule("adam", STEP, BETA1, BETA2, EPS), "stable_adamw": UpdateRule("stable_adamw", eps=EPS)}


def state(numel: int = COUNT) -> dict[str, torch.Tensor]:
    """Weights and moments of many magnitudes; some of the moments are zero."""
    generator = torch.Generator().manual_seed(numel)
    size = 10 ** (torch.rand(numel, generator=generator) * 3 - 5)
    found = {
        "weight": torch.randn(numel, generator=generator) * 0.1,
        "moment1": torch.randn(numel, generator=generator) * size,
        "moment2": (torch.randn(numel, generator=generator).square() + 0.05) * size.square(),
    }
    for key in ("moment1", "moment2"):
        found[key][5::97] = 0.0
    found["max_moment2"] = found["moment2"] * (1 + torch.rand(numel, generator=generator))
    return found


def energies(was, there, rule: str, denominator: str = "moment2") -> dict[str, float]:
    """The formulas of a budget, in float64 from beginning to end."""
    bias1, bias2 = (1 - BETA1**STEP, 1 - BETA2**STEP) if rule == "adam" else (1.0, 1.0)
    wide, found = ({key: x.double() for key, x in side.items()} for side in (was, there))
    m, v = wide["moment1"] / bias1, wide[denominator] / bias2
    roots = wide[denominator].sqrt(), found[denominator].sqrt()
    relative = torch.where(roots[0] > 0, (roots[1] - roots[0]) / roots[0], 0.0)
    both = BETA1 * BETA2
    gain = 0.576**2 * (1 + both) / ((1 - BETA2**2) * (1 - both))
    dm = (found["moment1"] - wide["moment1"]) / bias1
    weight = v * (found["weight"] - wide["weight"]).square() if "weight" in was else torch.zeros(1)
    return {
        "step": float((LR * m).square().sum()),
        "weight": float(weight.sum()),
        "moment1": float((LR * BETA1 / (1 - BETA1) * dm).square().sum()),
        "moment2": gain * float((LR * relative * m).square().sum()),
    }


def unit_of(values, codecs, rule: UpdateRule, **options) -> Unit:
    """A unit of these tensors, and its parameter."""
    places, streams = {key: k for k, key in enumerate(values)}, []
    for (key, x), codec in zip(values.items(), codecs, strict=True):
        dtype = DType.from_label(str(x.dtype))
        spec = TensorSpec(key, ROLES[key], dtype, (len(x),))
        streams.append(Stream(places[key], spec, StorageInfo(key, dtype, 0, 0), codec))
    step = OptimizerStep(0, LR, BETA1, BETA2, places.get("weight"), None)
    moments = {key: k for key, k in places.items() if key != "weight"}
    numel = len(next(iter(values.values())))
    return Unit(tuple(streams), Parameter("p", moments, rule, None, (numel,), step=step, **options))


def measured(unit: Unit, values, backend="torch") -> tuple[UnitErrors, dict[str, torch.Tensor]]:
    lockstep, originals = Lockstep(SimpleNamespace(storages=[])), [as_array(x) for x in values.values()]
    lockstep.backend = backend
    parts, errors = lockstep.encode(unit, 0, originals, measure=True)
    assert lockstep.measure(unit, 0, originals, parts) == errors
    decoded = zip(unit.streams, lockstep.decode(unit, 0, originals, parts), strict=True)
    return errors, dict(zip(values, (as_tensor(x, stream.spec.dtype) for stream, x in decoded), strict=True))


def assert_energies(steps, expected):
    for name, value in expected.items():
        assert getattr(steps, name) == pytest.approx(value, rel=1e-4, abs=0), name


@pytest.mark.slow
def test_an_error_of_the_second_moment_is_carried_by_its_decay_and_by_the_momentum():
    """G is g times the norm of errors that decay by b2, of updates that correlate by b1 from step to step."""
    for beta1, beta2, steps in ((0.9, 0.99, 2500), (0.9, 0.95, 600), (0.0, 0.9, 300)):
        age = torch.arange(steps, dtype=torch.float64)
        apart = (age[:, None] - age).abs()
        energy = (beta2 ** age[:, None] * beta2**age * beta1**apart).sum()
        assert carry(beta1, beta2) == pytest.approx(0.576 * math.sqrt(float(energy)), rel=1e-6)
    assert carry(0.9, 0.99) == pytest.approx(17.0, rel=2e-3)


@pytest.mark.parametrize("rule", ["adam", "stable_adamw"])
@pytest.mark.parametrize("keys", [("weight", "moment1", "moment2"), ("moment1", "moment2")], ids=len)
def test_the_codecs_of_flash(rule, keys):
    values = {key: x for key, x in state(70_001).items() if key in keys}
    codecs = {"weight": Split24(R=7), "moment1": Companded8(), "moment2": Companded8(signed=False, Q=255)}
    unit = unit_of(values, [codecs[key] for key in keys], RULES[rule])
    found, there = measured(unit, values)
    expected = energies(values, there, rule)
    assert (expected["weight"] > 0) == ("weight" in keys)
    assert min(expected[name] for name in ("step", "moment1", "moment2")) > 0
    assert_energies(found.steps, expected)


def archived(values) -> list:
    """The codecs of a budget for these tensors, in the order of the dict."""
    second, root_bias2 = list(values).index("moment2"), math.sqrt(1 - BETA2**STEP)
    first = VScaled(second=second, k=0.02, bias1=1 - BETA1**STEP, root_bias2=root_bias2)
    codecs = {"weight": Lattice(-28, 7), "moment1": first, "moment2": RowColumnLog(1 << 21, 256, columns=True)}
    return [codecs[key] for key in values]


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [256 * 1100 + 77, 300])
def test_the_codecs_of_a_budget(numel, dtype, backend):
    """A chunk is decoded and measured tile by tile, in torch or by kernels, which fill up the last block."""
    if backend == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
    keys = ("moment2", "weight", "moment1")
    values = {key: x.to(dtype) for key, x in state(numel).items() if key in keys}
    values = {key: values[key] for key in keys}
    unit = unit_of(values, archived(values), RULES["adam"])
    found, there = measured(unit, values, backend)
    assert_energies(found.steps, energies(values, there, "adam"))
    wide, decoded = ({key: x.double() for key, x in side.items()} for side in (values, there))
    for k, key in enumerate(values):
        error = decoded[key] - wide[key]
        assert found.streams[k].sum_square_error == pytest.approx(float(error.square().sum()), rel=1e-5, abs=0)
        assert found.streams[k].sum_square == pytest.approx(float(wide[key].square().sum()), rel=1e-9, abs=0)
        if key == "weight":
            assert found.streams[k].max_distance == pytest.approx(float(error.abs().max()), rel=1e-6)
        else:
            assert found.streams[k].max_scaled == 0.0
    u, v = (
        (side["moment1"] / (1 - BETA1**STEP)) / ((side["moment2"] / (1 - BETA2**STEP)).sqrt() + EPS)
        for side in (wide, decoded)
    )
    assert found.update.max_error == pytest.approx(float((v - u).abs().max()), rel=1e-4)
    assert found.update.sum_square_error == pytest.approx(float((v - u).square().sum()), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_any_length_have_the_parts_and_errors_of_the_chunk(dtype, monkeypatch):
    """Tiles and chunks begin in the middle of a row, and the last tile in the middle of a block."""
    pytest.importorskip("numba", reason="numba is not installed")
    first, keys = 1 << 20, ("weight", "moment1", "moment2")
    values = {key: x.to(dtype) for key, x in state(256 * 1100 + 77).items() if key in keys}
    unit = unit_of(values, [*archived(values)[:2], RowColumnLog(1 << 21, 300, columns=True)], RULES["adam"])
    lockstep, seen = Lockstep(SimpleNamespace(storages=[])), []
    lockstep.backend, originals = "numba", [as_array(x) for x in values.values()]
    for tile in (1 << 20, 1 << 16, 256 * 33):
        monkeypatch.setattr(lockstep_module, "TILE", tile)
        seen.append(lockstep.encode(unit, first, originals, measure=True))
    for parts, errors in seen[1:]:
        assert errors == seen[0][1]
        assert all(
            np.array_equal(mine[key], x)
            for mine, whole in zip(parts, seen[0][0], strict=True)
            for key, x in whole.items()
        )
    values["moment1"][70_000] = math.nan  # the memory of the original
    with pytest.raises(RefusedError) as refusal:
        lockstep.encode(unit, first, originals)
    assert refusal.value.storage == unit.streams[1].index


def test_the_step_of_an_exact_parameter_counts():
    values = {key: state()[key] for key in ("weight", "moment1", "moment2")}
    unit = unit_of(values, [Lossless()] * 3, RULES["adam"])
    assert unit.measured
    found, there = measured(unit, values)
    assert_energies(found.steps, energies(values, there, "adam"))
    assert found.steps.weight == found.steps.moment1 == found.steps.moment2 == 0 < found.steps.step
    assert found.streams == {}
    assert found.update is None


def test_without_a_known_step_nothing_is_measured_in_steps():
    values = {key: state()[key] for key in ("moment1", "moment2")}
    unit = unit_of(values, [Companded8(), Companded8(signed=False, Q=255)], UpdateRule("momentum"))
    assert measured(unit, values)[0].steps is None


FLASH = {"weight": Split24(), "moment1": Companded8(), "moment2": Companded8(signed=False, Q=255)}
UNITS = {
    "weight": ({"weight": FLASH["weight"]}, None),
    "flash": ({key: FLASH[key] for key in ("moment1", "moment2")}, "adam"),
    "flash with its weight": (FLASH, "stable_adamw"),
    "fourth roots": ({"moment1": FLASH["moment1"], "moment2": Companded8(signed=False, Q=63, p=0.5)}, "adam"),
    "largest second moments": ({**FLASH, "max_moment2": FLASH["moment2"]}, "adam"),
    "exact": (dict.fromkeys(FLASH, Lossless()), "adam"),
    "weight alone is lossy": ({**dict.fromkeys(FLASH, Lossless()), "weight": Lattice(-28, 7)}, "adam"),
    "moments alone are lossy": ({**FLASH, "weight": Lossless()}, "adam"),
    "budget": (None, "adam"),
    "no rule": ({"moment2": FLASH["moment2"]}, None),
}


@pytest.mark.parametrize("low", [0, -18, 12])
@pytest.mark.parametrize("name", UNITS)
def test_the_kernels_measure_what_torch_does(name, low):
    """Maxima are equal, and sums to the last digits: of many magnitudes, zeros, and groups of nothing else."""
    pytest.importorskip("numba", reason="numba is not installed")
    codecs, rule = UNITS[name]
    if (codecs is None and low) or (name == "weight alone is lossy" and low > 0):
        pytest.skip("the steps of these codecs fit the magnitudes of weights")
    values = {
        key: x * 10.0 ** (low if key != "moment2" else 2 * low)
        for key, x in state().items()
        if key in (codecs or FLASH)
    }
    for x in values.values():
        x[7 * 32 : 8 * 32] = 0.0
    codecs = list(codecs.values()) if codecs else archived(values)
    unit = unit_of(values, codecs, RULES[rule or "adam"])
    units = (
        [Unit(unit.streams)] if rule is None else [unit, replace(unit, parameter=replace(unit.parameter, step=None))]
    )
    for unit in units:
        plain, kernels = (measured(unit, values, backend)[0] for backend in ("torch", "numba"))
        assert kernels.streams.keys() == plain.streams.keys()
        pairs = [(kernels.streams[key], error) for key, error in plain.streams.items()]
        for mine, theirs in [*pairs, (kernels.update, plain.update), (kernels.steps, plain.steps)]:
            assert (mine is None) == (theirs is None)
            assert theirs is None or theirs.disagreement(mine, tolerance=1e-12) is None


def test_a_thread_gets_the_statistics_of_its_own_parameter(tmp_path):
    """The meter keeps CAME's statistics of one parameter, and another thread may replace them at once."""
    shapes = ((2,), (3,), (4,), (5,))
    values = [torch.rand(shape) for shape in shapes]
    path = tmp_path / "statistics"
    path.write_bytes(b"".join(x.numpy().tobytes() for x in values))
    places = [sum(x.nbytes for x in values[:k]) for k in range(4)]
    storages = [StorageInfo(str(k), DType.FLOAT32, places[k], values[k].nbytes) for k in range(4)]
    refs = [TensorRef.whole(str(k), DType.FLOAT32, shape) for k, shape in enumerate(shapes)]
    factors = list(zip(storages, refs, strict=True))
    mine, other = (
        Parameter(name, {}, UpdateRule("came"), None, shape, part)
        for name, shape, part in (("mine", (2, 3), factors[:2]), ("other", (4, 5), factors[2:]))
    )

    class Raced(ErrorMeter):
        """As if another thread ran after every assignment."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_last" and value is not None and value[0] is mine:
                super().__setattr__(name, (other, self._factors(other)))

    file = SourceFile(ByteRange.of(path))
    meter = Raced(OpenCheckpoint("file", file, storages))
    for _ in range(2):
        found = meter._factors(mine).confidence
        assert torch.equal(found.rows, values[0])
        assert torch.equal(found.columns, values[1])
    file.close()
