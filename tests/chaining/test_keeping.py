"""Which checkpoints stay: each rule against its own words, and the one of ``log`` applied after each save."""

from __future__ import annotations

import pytest

from ckpt8.chaining.keeping import Keep
from ckpt8.core.errors import UsageError
from ckpt8.inspecting.runs import RunRecord


def run(steps, losses=None, validation=None):
    return [
        RunRecord(
            f"step={step}.ckpt",
            step=step,
            loss=losses[k] if losses else None,
            val_loss=validation[k] if validation else None,
        )
        for k, step in enumerate(steps)
    ]


def kept(rules, checkpoints):
    return [checkpoints[index].step for index in sorted(Keep.of(rules).kept(checkpoints))]


STEPS = list(range(100, 2100, 100))
LOSSES = [abs(step - 700) / 100 for step in STEPS]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, STEPS),
        ("last:3", [1800, 1900, 2000]),
        ("every:500", [500, 1000, 1500, 2000]),
        ("every:300,last:1", [300, 600, 900, 1200, 1500, 1800, 2000]),
        ("best:2", [600, 700, 2000]),
        ("last:2, best:1", [700, 1900, 2000]),
        ("last:99", STEPS),
    ],
)
def test_rules_add_up_and_the_newest_always_stays(rules, expected):
    # Of two equal losses the newer one is the better: 600 and 800 tie, and 600 is older.
    expected = [800 if rules == "best:2" and step == 600 else step for step in expected]
    assert kept(rules, run(STEPS, LOSSES)) == sorted(expected)


def test_the_validation_loss_decides_where_there_is_one():
    checkpoints = run(STEPS, LOSSES, [None] * 10 + [5.0, 1.0, *[9.0] * 8])
    assert kept("best:1", checkpoints) == [1200, 2000]


@pytest.mark.parametrize(("mode", "best"), [("max", [400, 700]), ("min", [600, 1000])])
def test_the_metric_that_a_framework_recorded_decides_in_its_direction(mode, best):
    checkpoints = run(STEPS, LOSSES, LOSSES)
    for record in checkpoints:
        record.metric, record.mode, record.score = (
            "acc",
            mode,
            {400: 0.9, 600: 0.1, 700: 0.8, 1000: 0.2}.get(record.step, 0.5),
        )
    # What is measured by another metric is not compared with it.
    checkpoints[0].metric, checkpoints[0].score = "loss", 99.0 if mode == "max" else -99.0
    assert kept("best:2", checkpoints) == [*best, 2000]
    # What the framework called the best last stays beside them, whatever it was compressed into.
    checkpoints[3].best, checkpoints[-2].best = ("step=100.ckpt",), ("step=500.ckpt",)
    checkpoints[4].name = "run/step=500.ckpt8"
    assert kept("best:2", checkpoints) == sorted([*best, 500, 2000])
    assert kept("last:1", checkpoints) == [2000]


def test_checkpoints_of_one_step_stay_together_and_those_without_a_step_stay():
    assert kept("last:1", run([100, 200, 200, None])) == [200, 200, None]


def test_log_keeps_the_same_ones_whether_applied_after_each_save_or_once():
    """It keeps the newest three, at most three between any age and its double, and always one in there."""
    left = []
    for number in range(1, 300):
        left = kept("log", run([*left, 50 * number]))
        assert left == kept("log", run([50 * n for n in range(1, number + 1)]))
        ages = [number - step // 50 for step in left]
        assert {0, min(1, number - 1), min(2, number - 1)} <= set(ages)
        for power in range(1, 8):
            inside = [age for age in ages if 2**power < age <= 2 ** (power + 1)]
            assert len(inside) <= 3
            assert inside or number <= 2 ** (power + 1) + 2**power


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("first:3", "'first:3' is no rule"),
        ("last", "'last' is no rule"),
        ("last:0", "'0' is no whole number"),
        ("last:-1", "'-1' is no whole number"),
        ("log:3", "'log:3' is no rule"),
        ("last:1,last:2", "last is given twice"),
    ],
)
def test_what_is_no_rule_is_one_line(rules, said):
    with pytest.raises(UsageError, match=said):
        Keep.of(rules)
