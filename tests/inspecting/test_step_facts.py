"""What reports say of an error in steps: the sums of records worked out by hand, and the text that users read."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from ckpt8.cli.show.tables import (
    HEALS,
    drift_text,
    healing_line,
    measured_lines,
    show_optimizers,
    show_predictions,
    step_lines,
    steps_phrase,
)
from ckpt8.codecs import config_of
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.error_stats import LatticeError, StepError, UpdateError, WeightError, read_error, read_step_error
from ckpt8.codecs.lattice import Lattice
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.vscaled import VScaled
from ckpt8.container import steps as expected
from ckpt8.container.facts import total_errors
from ckpt8.container.manifest import Manifest, ParameterRecord, StorageRecord
from ckpt8.container.steps import CAPPED, step_facts, step_figures
from ckpt8.core.tensors import DType, Role

BUDGET = {"steps": 1.0, "u_max": 1.0, "cap": 0.25}


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    """Those that the figures here were worked out with."""
    for name, value in {"NOISE": 0.75, "RISE": 0.1, "WIDTH": 2.0}.items():
        monkeypatch.setattr(expected, name, value)


def manifest_of(parameters, budget=BUDGET) -> Manifest:
    """A container whose parameters are given as (optimizer or reason, lattice reason, sums of the error)."""
    manifest = Manifest("test", "archive", [], 1, 1, budget=budget)
    for k, (optimizer, reason, sums) in enumerate(parameters):
        known = not isinstance(optimizer, str)
        first = len(manifest.storages)
        codecs = [Lattice(), VScaled(second=first + 2), RowColumnLog()] if known else [Companded8()] * 3
        why = [reason, None, None] if known else [f"no budget: {optimizer}"] * 3
        errors = [LatticeError(0.01, 10.0 * (k + 1), 0.5).to_json() if known else None, None, None]
        for role, codec, said, error in zip(
            (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2), codecs, why, errors, strict=True
        ):
            name = f"{k}.{role.value}"
            manifest.storages.append(StorageRecord(name, DType.FLOAT32, 100, role, config_of(codec), said, error=error))
        steps = {"optimizer": optimizer, "weight_storage": first, **StepError(*sums).to_json()} if known else None
        error = UpdateError(0.2, 1.0, 0.4 + k, 3.0).to_json() if known else None
        moments = {"moment1": first + 1, "moment2": first + 2}
        manifest.parameters.append(ParameterRecord(f"p{k}", moments, None, None, error, steps))
    return manifest


def facts_of(parameters=None, *, manifest=None):
    return step_facts(manifest or manifest_of(parameters), lambda names: len(list(names)))


TWO = [
    (0, None, (4.0, 1.0, 0.5, 0.25)),
    (0, CAPPED, (4.0, 0.0, 0.5, 0.0)),
    (1, None, (2.0, 2.0, 0.0, 0.0)),
    ("its learning rate is missing", None, ()),
]


def test_an_error_in_steps_is_the_root_of_its_energy_over_that_of_a_step():
    facts = facts_of(TWO)
    first, second = facts["optimizers"]
    energies = {"steps": 4.25, "weight": 3, "moment1": 1, "moment2": 0.25}
    assert {part: facts[part] for part in energies} == pytest.approx(
        {part: math.sqrt(energy / 10) for part, energy in energies.items()}
    )
    assert (first["steps"], second["steps"]) == pytest.approx((math.sqrt(2.25 / 8), 1.0))
    snrs = [each["weight_snr_db"] for each in (facts, first, second)]
    assert snrs == pytest.approx([10 * math.log10(ratio) for ratio in (60 / 0.03, 30 / 0.02, 30 / 0.01)])
    assert (first["parameters"], second["parameters"]) == (2, 1)
    assert (first["max_error"], second["max_error"]) == (1.4, 2.4)
    assert first["update_nmse"] == pytest.approx(0.2)
    drift = expected.NOISE * math.sqrt(4.25) + expected.RISE * 4.25 / math.sqrt(10)
    assert facts["drift"]["mean"] == pytest.approx(drift)
    assert facts["parameters"] == 3
    assert facts["changed"] == {"elements": 900, "of": 1200}
    assert facts["capped"] == {"elements": 100, "of": 300}
    names = ["3.weight", "3.moment1", "3.moment2"]
    unreached = {"reason": "its learning rate is missing", "count": 3, "elements": 300, "names": names}
    assert facts["fallbacks"] == facts["outside"] == [unreached]
    assert facts["drift"]["is_open"]


def test_a_figure_over_none_of_what_changed_is_no_figure():
    """As of the matrices of an 8-bit optimizer, beside vectors that are kept exactly and measured."""
    manifest = manifest_of([(0, None, (4.0, 0.0, 0.0, 0.0)), ("unknown", None, ())])
    for record in manifest.storages[:3]:
        record.codec = {"id": "lossless/1"}
    facts = facts_of(manifest=manifest)
    assert facts["steps"] is facts["weight"] is facts["drift"] is None
    unknown = "steps         unknown for 3 tensors, 100 % of what changed: "
    assert step_lines(facts) == [f"{unknown}unknown", "loss drift    not predicted"]
    nothing = facts_of(TWO[3:])
    assert step_lines(nothing) == [f"{unknown}its learning rate is missing", "loss drift    not predicted"]
    assert measured_lines(nothing) == step_lines(nothing)
    assert step_lines(facts_of([])) == ["loss drift    not predicted"]


def test_an_average_is_no_part_of_a_drift():
    manifest = manifest_of(TWO[:3])
    manifest.storages.append(StorageRecord("ema", DType.FLOAT32, 100, Role.WEIGHT, config_of(Lattice()), CAPPED))
    facts = facts_of(manifest=manifest)
    assert [row["reason"] for row in facts["outside"]] == ["a copy of weights, which no optimizer updates"]
    assert not facts["drift"]["is_open"]


def test_the_rates_that_were_taken_are_stated():
    manifest = manifest_of(TWO[:3])
    for parameter, stated in zip(manifest.parameters, ({}, {}, {"stated_rate": 0.0}), strict=True):
        parameter.steps |= {"rate": 2e-4, **stated}
    facts = facts_of(manifest=manifest)
    assert facts["rates"] == [
        {"rate": 2e-4, "stated": 2e-4, "parameters": 2},
        {"rate": 2e-4, "stated": 0.0, "parameters": 1},
    ]
    assert [line for line in step_lines(facts) if "rate" in line] == [
        "learning rate 0.0002",
        "learning rate 0.0002 for 1 parameter, a tenth of the initial rate: the file has 0",
    ]


def test_an_expected_drift_is_noise_and_a_rise_within_an_interval():
    assert facts_of(manifest=manifest_of([], budget=None)) is None
    found = expected.expected_drift(StepError(1e-8, 4e-8))
    assert found.mean == pytest.approx(expected.NOISE * 2e-4 + expected.RISE * 4e-4)
    assert found.low < found.mean < found.high
    assert 1 < found.high / found.low <= 4


CIRCUMSTANCES = {
    "a plain run": ({}, "8.5e-05 expected, 4.25e-05 to 0.00017"),
    # Unstable runs of CAME drift further, and no checkpoint tells which are.
    "came": ({"kind": "came"}, "0.0014 expected, 4.25e-05 to 0.00281 or more"),
    "momentum alone": ({"momentum": "estimate"}, "0.000118 expected, 5.91e-05 to 0.000236"),
    "a usual decay": ({"rate": 1e-3, "decay": 0.1}, "8.5e-05 expected, 4.24e-05 to 0.00017"),
    "a decay that ends errors": ({"rate": 1e-3, "decay": 50.0}, "8.5e-05 expected, 1.35e-05 to 0.00017"),
    "a decay in the gradient": ({"rate": 1e-3, "coupled_decay": 1.0}, "8.5e-05 expected, up to 0.00017"),
    "a rate of zero": ({"rate": 1e-4, "stated_rate": 0.0}, "8.5e-05 expected, 2e-05 to 0.00017 or more"),
    "a run that has just begun": ({"age": 30}, "8.5e-05 expected, 4.25e-05 to 0.00017 or more"),
    "a run that is no longer young": ({"age": 100}, "8.5e-05 expected, 4.25e-05 to 0.00017"),
    "nonsense": ({"rate": "x", "decay": -1.0, "coupled_decay": None}, "8.5e-05 expected, 4.25e-05 to 0.00017"),
}


@pytest.mark.parametrize("case", CIRCUMSTANCES)
def test_an_interval_is_wider_where_a_file_tells_less(case):
    record, expected_text = CIRCUMSTANCES[case]
    error = StepError(1e-8, 0.25e-8, 0.5e-8, 0.25e-8)
    assert drift_text(step_figures(error, [{"kind": "adam"}, {"kind": "adam", **record}])["drift"]) == expected_text


def test_where_nothing_moves_nothing_is_predicted():
    nothing = dict.fromkeys(("steps", "weight", "moment1", "moment2", "drift"))
    assert step_figures(StepError(0.0, 1.0, 0.0, 0.0)) == nothing
    assert step_figures(StepError(2.0))["drift"]["mean"] == 0.0
    assert step_figures(StepError(1e-300, 1e300))["steps"] is None


@pytest.mark.parametrize(("key", "value"), [("optimizer", []), ("weight_storage", 10**9), ("weight_storage", "x")])
def test_a_record_that_states_nonsense_is_shown(key, value):
    manifest = manifest_of(TWO)
    manifest.parameters[0].steps[key] = value
    manifest.budget = {}
    assert step_lines(facts_of(manifest=manifest))[0].startswith("steps         0.652 over 3 parameters: ")


@pytest.mark.parametrize("value", [None, "1", -1.0, math.nan, math.inf, 1e400, 10**400])
def test_a_figure_that_is_no_energy_is_not_read(value):
    good = {"optimizer": 0, "weight_storage": 1, **StepError(1.0, 2.0, 3.0, 4.0).to_json()}
    assert read_step_error(good) == StepError(1.0, 2.0, 3.0, 4.0)
    assert read_step_error({**good, "moment1": value}) is None
    assert read_step_error(None) is read_step_error({}) is None


def test_the_lines_of_one_optimizer():
    """An error above the budget is named also where three digits hide it."""
    assert step_lines(facts_of([(0, None, (1e-4, 3e-5, 3e-5, 4e-5))])) == [
        "steps         1 (budget 1) over 1 parameter: weights 0.548, first moments 0.548, second moments 0.632",
        "loss drift    0.0085 expected, 0.00425 to 0.017",
    ]
    facts = facts_of([(0, None, (1e-4, 3e-5, 3e-5, 4.04e-5))])
    assert steps_phrase(facts) == "error 1 steps (budget 1, exceeded by 0.002)"
    assert step_lines(facts)[0].startswith("steps         1 (budget 1, exceeded by 0.002) over 1 parameter: ")


def test_the_lines_of_two_optimizers_and_of_what_is_left_out():
    facts = facts_of(TWO)
    lines = step_lines(facts)
    assert lines[0].startswith("steps         0.652 (budget 1) over 3 parameters: weights 0.548, ")
    assert lines[1] == "steps         not counted: 3 tensors, 25.0 % of what changed: its learning rate is missing"
    assert lines[2] == "loss drift    1.68 expected, 0.84 to 3.36 or more"
    assert lines[3] == "lattice       33.3 % of the weights have the largest step that their size allows"
    # verify states weights and updates as well, and explains a large error of these under a budget.
    assert (facts["update_nmse"], facts["max_error"]) == (pytest.approx(0.2), 2.4)
    said = ["weights       SNR 33 dB", "update space  NMSE 0.2, max |Δu| 2.4", f"              {HEALS}"]
    assert measured_lines(facts) == [*said, *lines]
    assert healing_line({"nmse": 0.2}, facts) == HEALS
    assert healing_line({"nmse": 1e-4}, facts) is healing_line({"nmse": 0.2}, None) is healing_line(None, facts) is None


def shown(show, facts) -> list[str]:
    """What a terminal of 200 columns gets."""
    console = Console(width=200, file=io.StringIO())
    show(console, facts)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_several_optimizers_have_a_table():
    facts = facts_of(TWO)
    _, header, first, second = shown(show_optimizers, facts)
    assert header.split("  ")[0] == "optimizer of"
    assert " ".join(first.split()) == "2 parameters 0.53 0.354 0.354 0.177 31.8 1.4 0.2 0.602 to 2.41"
    assert " ".join(second.split()) == "1 parameter 1 1 0 0 34.8 2.4 0.2 0.601 to 2.4"
    facts["optimizers"].pop()
    assert shown(show_optimizers, facts) == shown(show_optimizers, None) == []


def test_predictions_name_the_option_that_gives_them():
    exact, known, unknown = (step_figures(StepError(*sums)) for sums in ((1.0,), (4e-8, 1e-8), ()))
    rows = {"lossless": exact, "budget 0.3": known, "flash": unknown}
    predicted = {name: {"bytes": 2_000_000, "ratio": 6.0, **figures} for name, figures in rows.items()}
    lines = shown(show_predictions, {"predicted": predicted, "unpredicted": {"its learning rate is zero": 2}})
    assert [" ".join(line.split()) for line in lines] == [
        "option size ratio steps expected loss drift",
        "--preset lossless 2.00 MB 6.00x 0 0",
        "--budget 0.3 2.00 MB 6.00x 0.5 4e-05 to 0.00016",
        "--preset flash 2.00 MB 6.00x - -",
        "not in steps: 2 tensors: its learning rate is zero",
    ]


def test_moments_without_a_scale_state_no_largest_error_of_it():
    manifest = manifest_of(TWO[:1])
    manifest.storages[1].error = {"sum_square_error": 1.0, "sum_square": 100.0, "max_scaled": 0.0}
    errors = total_errors(manifest, lambda names: len(list(names)))
    assert errors["moment1"] == {"nmse": 0.01, "snr_db": pytest.approx(20), "max_scaled": None}
    assert errors["lattice"] == {"nmse": 0.001, "snr_db": pytest.approx(30), "max_distance": 0.5}
    assert errors["weight"] is None
    for error in (LatticeError(1.0, 2.0, 0.5), WeightError(3, 0.5, 0.7, 9)):
        assert read_error(error.to_json()) == error
