"""The error in steps of the optimizer: against the formulas of a budget in float64, on every path that measures it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, TensorRef
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.error_measures import lattice_error, moment_error, root, step_sums, update_error
from ckpt8.codecs.lattice import Lattice
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.split24 import Split24
from ckpt8.codecs.vscaled import VScaled
from ckpt8.compressing import lockstep, unit_errors
from ckpt8.compressing.measure import ErrorMeter
from ckpt8.compressing.plan import OptimizerStep, Parameter, Stream, Unit
from ckpt8.compressing.policy import carry
from ckpt8.compressing.unit_errors import BudgetedTiles, StepScales, UnitErrors
from ckpt8.core import backend as backends
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


DTYPES = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16}


def unit_of(values, codecs, rule: UpdateRule, **options) -> Unit:
    """A unit of these tensors, and its parameter."""
    places = {key: k for k, key in enumerate(values)}
    streams = tuple(
        Stream(
            k, TensorSpec(key, ROLES[key], DTYPES[x.dtype], (len(x),)), StorageInfo(key, DTYPES[x.dtype], 0, 0), codec
        )
        for (k, (key, x)), codec in zip(enumerate(values.items()), codecs, strict=True)
    )
    step = OptimizerStep(0, LR, BETA1, BETA2, places.get("weight"), None)
    moments = {key: k for key, k in places.items() if key != "weight"}
    numel = len(next(iter(values.values())))
    return Unit(streams, Parameter("p", moments, rule, None, (numel,), step=step, **options))


def measured(unit: Unit, values, meter: ErrorMeter | None = None) -> tuple[UnitErrors, dict[str, torch.Tensor]]:
    originals = list(values.values())
    meter = meter or ErrorMeter(SimpleNamespace(storages=[]))
    source = SimpleNamespace(storages=[])
    parts = lockstep.encode(unit.streams, originals, 0, "torch", source)
    decoded = lockstep.decode(unit.streams, parts, originals, 0, "torch", source)
    return meter.measure(unit, 0, originals, parts), dict(zip(values, decoded, strict=True))


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
def test_the_codecs_of_a_budget_take_chunks_whole(numel, dtype, backend, monkeypatch):
    """A chunk is decoded once and measured tile by tile, or by a kernel and the rest by tiles: the same figures."""
    fused, add = [], BudgetedTiles.add
    if backend == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
        monkeypatch.setattr(backends, "SMALLEST_FOR_NUMBA", 1)
        monkeypatch.setattr(BudgetedTiles, "add", lambda *given: fused.append(add(*given)) or fused[-1])
    keys = ("moment2", "weight", "moment1")
    values = {key: x.to(dtype) for key, x in state(numel).items() if key in keys}
    values = {key: values[key] for key in keys}
    unit = unit_of(values, archived(values), RULES["adam"])
    meter = ErrorMeter(SimpleNamespace(storages=[]))
    meter.backend = None if backend == "numba" else "torch"
    found, there = measured(unit, values, meter)
    assert sum(fused) == (numel // 256 * 256 if backend == "numba" else 0)
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
def test_a_chunk_encoded_in_the_memory_of_its_originals_has_the_same_parts_and_errors(dtype, monkeypatch):
    """Tiles and chunks begin in the middle of a row, and the last tile in the middle of a block."""
    pytest.importorskip("numba", reason="numba is not installed")
    numel, first = 256 * 1100 + 77, 1 << 20
    values = {key: x.to(dtype) for key, x in state(numel).items() if key in ("weight", "moment1", "moment2")}
    codecs = archived(values)
    unit = unit_of(values, [*codecs[:2], RowColumnLog(1 << 21, 300, columns=True)], RULES["adam"])
    meter = ErrorMeter(SimpleNamespace(storages=[]))
    meter.backend = "numba"
    originals = list(values.values())
    whole = lockstep.encode(unit.streams, originals, first, "numba", meter)
    expected = meter.measure(unit, first, originals, whole)
    for tile in (1 << 16, 1 << 20, 256 * 33):
        monkeypatch.setattr(unit_errors, "_TILE", tile)
        tiled, given = meter.tiled(unit, originals), [x.clone() for x in originals]
        parts = lockstep.encode_by_tile(unit.streams, given, first, [None] * 3, tiled)
        for mine, theirs in zip(parts, whole, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert tiled.result() == expected
    broken = [x.clone() for x in originals]
    broken[1][70_000] = math.nan
    with pytest.raises(RefusedError) as refusal:
        lockstep.encode_by_tile(unit.streams, broken, first, [None] * 3, None)
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
    assert StepScales.of(None) is None


@pytest.mark.parametrize("with_weight", [True, False])
def test_the_fused_kernel_finds_the_same(with_weight):
    pytest.importorskip("numba", reason="numba is not installed")
    from ckpt8.codecs.error_numba import BudgetedSums

    was = state()
    generator = torch.Generator().manual_seed(3)
    there = {key: x * (1 + 0.2 * (torch.rand(COUNT, generator=generator) - 0.5)) for key, x in was.items()}
    pairs = {key: (was[key], there[key]) for key in was}
    weight, rule = pairs["weight"] if with_weight else None, RULES["adam"]
    sums = BudgetedSums()
    for run in (slice(0, 512), slice(512, COUNT)):
        tile = {key: (x[run], y[run]) for key, (x, y) in pairs.items()}
        sums.add(tile["weight"] if with_weight else None, tile["moment1"], tile["moment2"], rule.divisor_eps)
    *streams, update, steps = sums.errors(rule.factor)
    roots = [root(x) for x in pairs["moment2"]]
    updates = [rule.apply(m, r, None) for m, r in zip(pairs["moment1"], roots, strict=True)]
    expected = [
        *([lattice_error(*weight)] if weight else []),
        moment_error(*pairs["moment1"], None),
        moment_error(*pairs["moment2"], None),
        update_error(*updates, rule.factor),
        step_sums(weight, pairs["moment1"], was["moment2"], roots),
    ]
    for mine, theirs in zip([*streams[not with_weight :], update, steps], expected, strict=True):
        assert theirs.disagreement(mine, tolerance=1e-12) is None
    if not with_weight:
        was = {key: was[key] for key in ("moment1", "moment2")}
    unit = unit_of(was, [Lossless()] * len(was), rule)
    assert_energies(StepScales.of(unit.parameter).apply(steps), energies(was, there, "adam"))


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
