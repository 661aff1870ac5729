"""What the report counts, against the values as torch loads them and the formulas written again."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from updates_kit import adam_update

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.inspecting.container import inspect_container
from ckpt8.inspecting.distributions import LOWEST, Codes, Histogram, checkpoint_distributions, container_distributions
from ckpt8.inspecting.tensors import PER_CHART, ChunkSampling


def octaves(values):
    """Counts by exponent, from Python's own frexp."""
    return Counter(math.frexp(value)[1] - 1 for value in values if math.isfinite(value) and value)


def as_counter(side):
    """The counts that a histogram has as JSON."""
    return Counter({side["first"] + k: count for k, count in enumerate(side["counts"]) if count})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_are_counted_by_octave(dtype):
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(5000, generator=generator) * torch.logspace(-12, 3, 5000)).to(dtype)
    edges = torch.tensor([1.0, -1.0, 2.0, 1.9375, 0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-14]).to(dtype)
    x = torch.cat([x, edges])
    found = Histogram.of(x)
    values = x.double().tolist()
    assert as_counter(found.to_json()) == octaves(values)
    assert found.zero == sum(value == 0 for value in values)
    assert found.not_finite == 3
    assert found.negative == sum(value < 0 and math.isfinite(value) for value in values)
    assert found.to_json()["total"] == len(values)
    # Counts add up wherever they are cut.
    parts = Histogram()
    for part in x.split(1234):
        parts.merge(Histogram.of(part))
    assert parts == found


def test_subnormals_have_octaves_and_what_fp32_has_not_is_in_the_last_ones():
    tiny = Histogram.of(torch.tensor([2.0**-149, 3 * 2.0**-149, 2.0**-127])).to_json()
    assert as_counter(tiny) == {-149: 1, -148: 1, -127: 1}
    wide = Histogram.of(torch.tensor([1e-300, 1e300], dtype=torch.float64)).to_json()
    assert as_counter(wide) == {LOWEST: 1, 127: 1}


def test_entropy_of_codes():
    assert Codes.of(torch.arange(256, dtype=torch.uint8), range(256)).entropy == 8
    assert Codes.of(torch.zeros(9, dtype=torch.int8), range(-127, 128)).entropy == 0
    assert Codes.of(torch.tensor([-1, -1, 1, 1, 1, 1, 0, 0], dtype=torch.int8), range(-1, 2)).entropy == 1.5
    assert Codes.of(torch.tensor([], dtype=torch.int8), range(-1, 2)).to_json()["entropy_bits"] == 0


def test_codes_without_a_range_are_counted_where_they_are():
    """Symbols are zigzag codes, 0 -1 1 -2 2, and -1 for an exact zero."""
    values = [0, 0, -1, 1, -2, 2, 2, 700, -700]
    symbols = [2 * q if q >= 0 else -2 * q - 1 for q in values]
    codes = Codes.of_symbols(torch.tensor([*symbols, -1, -1, -1], dtype=torch.int32))
    codes.merge(Codes.of_symbols(torch.tensor([4, 2**31 - 1], dtype=torch.int32)))
    found = codes.to_json()
    assert (found["total"], found["reserved"], found["outside"], found["used"]) == (14, 3, 3, 8)
    assert (found["levels"], found["first"], found["counts"]) == (None, -2, [1, 1, 2, 1, 3])
    shares = [n / 14 for n in (2, 1, 1, 1, 3, 1, 1, 1, 3)]
    assert found["entropy_bits"] == pytest.approx(-sum(share * math.log2(share) for share in shares))
    empty = Codes.of_symbols(torch.tensor([], dtype=torch.int32)).to_json()
    assert (empty["total"], empty["counts"], empty["entropy_bits"]) == (0, [0], 0)


@pytest.mark.parametrize("numel", [0, 1, 31, 4096, PER_CHART, PER_CHART + 1, 1 << 20, (1 << 20) + 7, 40_000_001])
@pytest.mark.parametrize("tensors", [1, 500, 100_000])
def test_samples_are_bounded_aligned_and_spread(numel, tensors):
    for full in (False, True):
        places = ChunkSampling.of(tensors, full=full)(numel)
        spans = [(chunk * 2**20 + run.start, chunk * 2**20 + run.stop) for chunk, runs in places for run in runs]
        assert all(start % 32 == 0 and start < stop <= numel for start, stop in spans)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        seen = sum(stop - start for start, stop in spans)
        if full or numel <= PER_CHART <= 2**20:
            assert seen == numel
        else:
            assert seen <= PER_CHART
        if tensors == 1 and numel > 1 << 20:
            assert spans[0][0] < 2**20
            assert spans[-1][1] > (numel - 1) // 2**20 * 2**20


@pytest.fixture(scope="module")
def packed(inputs, tmp_path_factory):
    """The GPT with AdamW, compressed: (original, container)."""
    original, container = inputs / "gpt_adamw.pt", tmp_path_factory.mktemp("packed") / "gpt.ckpt8"
    ckpt8.compress(original, container)
    return original, container


@pytest.fixture(scope="module")
def found(packed):
    """The distributions of the container, against its original."""
    with ContainerReader(packed[1]) as reader:
        return container_distributions(reader, packed[0])


@pytest.mark.slow
def test_a_container_against_values_that_torch_loads(packed, found):
    original, container = packed
    assert found["sample"]["full"]
    for side, tree in (("before", torch.load(original)), ("after", ckpt8.load(container))):
        states = tree["optimizer"]["state"].values()
        values = {
            "weight": [w.flatten() for w in tree["model"].values() if w.is_floating_point()],
            "moment1": [state["exp_avg"].flatten() for state in states],
            "moment2": [state["exp_avg_sq"].flatten() for state in states],
        }
        # Tied weights are stored once.
        values["weight"] = list({w.data_ptr(): w for w in values["weight"]}.values())
        rule = tree["optimizer"]["param_groups"][0]
        values["update"] = [adam_update(state, rule).flatten() for state in states]
        for what, tensors in values.items():
            all_values = torch.cat(tensors).tolist()
            counted = found["histograms"][what][side]
            assert counted["total"] == len(all_values)
            assert counted["zero"] == all_values.count(0.0)
            differing = as_counter(counted)
            differing.subtract(octaves(all_values))
            # An update that is a rounding error away from a power of two may be counted on its other side.
            assert sum(map(abs, differing.values())) <= (20 if what == "update" else 0)


@pytest.mark.parametrize("most", [PER_CHART, 1024])
def test_what_is_refused_comes_back_as_it_is(most, tmp_path, monkeypatch):
    """Also where a codec refuses one window of it and takes the others."""
    monkeypatch.setattr("ckpt8.inspecting.tensors.PER_CHART", most)
    generator = torch.Generator().manual_seed(1)
    # Seventh powers: many values that codes would make zero.
    weight, moment = (torch.randn(96, 64, generator=generator) for _ in range(2))
    moment = moment**7
    state = {"step": 3, "exp_avg": moment, "exp_avg_sq": moment**2}
    groups = [{"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "params": [0]}]
    tree = {"model": {"a.weight": weight}, "optimizer": {"state": {0: state}, "param_groups": groups}}
    torch.save(tree, tmp_path / "sound.pt")
    moment[0, 7] = math.nan
    torch.save(tree, tmp_path / "spoilt.pt")
    sound, spoilt = (checkpoint_distributions(tmp_path / name) for name in ("sound.pt", "spoilt.pt"))
    assert sound["refused"]["count"] == 0
    assert sound["histograms"]["moment1"]["before"] != sound["histograms"]["moment1"]["after"]
    assert [row["name"] for row in sound["worst"]["update"]] == ["a.weight"]
    assert spoilt["refused"]["count"] == 1
    assert spoilt["refused"]["first"][0]["name"] == "a.weight"
    for what in ("moment1", "moment2", "update"):
        pair = spoilt["histograms"][what]
        assert pair["before"] == pair["after"]
        assert pair["after"]["not_finite"] == (what != "moment2")
    assert [row["role"] for row in spoilt["codes"]] == ["weight"]
    assert spoilt["worst"]["update"] == []
    assert spoilt["errors"]["update"] is None


def test_an_original_that_is_another_is_refused(packed, inputs):
    _, container = packed
    with ContainerReader(container) as reader, pytest.raises(InputError, match="changed while it was read"):
        container_distributions(reader, inputs / "gpt_stable_adamw.pt")


@pytest.mark.slow
def test_codes_are_those_that_the_definition_gives(packed, found):
    codes = {row["role"]: row for row in found["codes"]}
    with ContainerReader(packed[1]) as reader:
        assert container_distributions(reader)["codes"] == found["codes"]
    counts = Counter()
    for state in torch.load(packed[0])["optimizer"]["state"].values():
        if state["exp_avg"].numel() >= 4096:
            groups = state["exp_avg"].view(-1, 32)
            bits = groups.abs().amax(1).view(torch.int32)
            scale = (((bits + 0x3FFF + ((bits >> 15) & 1)) >> 15) << 15).view(torch.float32).unsqueeze(1)
            n = groups / scale
            code = (127 * (2 * n / (1 + n.abs())) + 0.5).floor().clamp(-127, 127)
            counts.update(code.int().flatten().tolist())
    row = codes["moment1"]
    assert as_counter(row) == counts
    assert (row["levels"], row["total"]) == (255, sum(counts.values()))
    assert codes["weight"]["part"] == "rho"
    assert codes["moment2"]["counts"][0] == 0


@pytest.mark.slow
def test_what_a_preset_would_do_is_what_it_does(packed, found):
    """Everything of so small a checkpoint is looked at, so that the prediction is exact."""
    raw = checkpoint_distributions(packed[0])
    assert raw["sample"]["full"]
    assert (raw["histograms"], raw["codes"]) == (found["histograms"], found["codes"])
    for what, error in inspect_container(packed[1])["errors"].items():
        assert raw["errors"][what] == (None if error is None else pytest.approx(error, rel=1e-9))
    for mine, theirs in zip(raw["worst"]["update"], found["worst"]["update"], strict=True):
        assert (mine["name"], mine["histograms"]) == (theirs["name"], theirs["histograms"])
    for mine, theirs in zip(raw["layers"], found["layers"], strict=True):
        assert mine["bytes"] == theirs["bytes"]
        assert mine["update"] == (theirs["update"] and pytest.approx(theirs["update"], rel=1e-9))
