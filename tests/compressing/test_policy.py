"""Which codec a storage gets: presets, rules, and the tensors that stay exact."""

from __future__ import annotations

import pytest

from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.policy import PRESETS, Budget, Policy, Rule
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Role, TensorSpec, is_small

BIG = (300, 300)
ROLES = tuple(Role)


def choose(policy, role, *, dtype=DType.FLOAT32, names=("model.w",), shapes=(BIG,)):
    numel = max(_numel(shape) for shape in shapes)
    return policy.choose(TensorSpec(names[0], role, dtype, (numel,)), list(names), list(shapes))


def _numel(shape):
    total = 1
    for size in shape:
        total *= size
    return total


TABLE = {
    "flash": [Split24(R=127), Companded8(Q=127), Companded8(signed=False, Q=255, p=1), Lossless()],
    "compact": [Split24(), Companded8(), Companded8(signed=False, Q=255), Lossless()],
    "archive": [Split24(), Companded8(), Companded8(signed=False, Q=255), Lossless()],
    "lossless": [Lossless()] * 4,
}


@pytest.mark.parametrize("preset", TABLE)
def test_presets(preset):
    roles = [Role.WEIGHT, Role.MOMENT1, Role.MOMENT2, Role.OTHER]
    assert [choose(Policy.of(preset), role) for role in roles] == [(codec, None) for codec in TABLE[preset]]


def test_there_are_no_other_presets():
    assert set(PRESETS) == set(TABLE)
    assert Policy.of() == Policy() == Policy.of("flash")
    for name in ("", "Flash", "fast", "none"):
        with pytest.raises(UsageError, match="flash, compact, archive, lossless"):
            Policy.of(name)


def test_a_budget_is_a_preset_of_its_own():
    assert Policy.of("flash").budget is Policy.of("lossless").budget is None
    assert Policy.of("archive").budget == Budget(1, 1, 0.25)
    assert Policy.of("compact").budget == Budget(0.15, 0.125, 0.25)
    steps = {0.01: 2.0**-7, 0.15: 2.0**-3, 1: 1, 1.9: 1, 2: 2, 5: 4, 10: 4}
    assert {each: Policy.of(budget=each).budget for each in steps} == {
        each: Budget(each, u_max, 1) for each, u_max in steps.items()
    }
    for preset in PRESETS:
        with pytest.raises(UsageError, match=f"preset '{preset}' and budget 1 exclude each other"):
            Policy.of(preset, budget=1)


@pytest.mark.parametrize("steps", [0, -1, 0.0099, 10.01, float("nan"), float("inf"), 10**400])
def test_budgets_out_of_range(steps):
    with pytest.raises(UsageError, match=r"a budget is a number of steps from 0.01 to 10, not "):
        Policy.of(budget=steps)


def test_a_bound_on_the_update_error_is_the_reach_of_a_budget():
    assert Policy.of("archive", max_update_error=0.02).budget == Budget(1, 0.04, 0.25)
    assert Policy.of(budget=5, max_update_error=0.02).budget == Budget(5, 0.04, 1)
    assert Policy.of("flash", max_update_error=0.02).budget is None
    # Larger errors would save nothing, and not every number is one that a file can state.
    for bound in (2, 5, 1e300, 10**400, float("inf")):
        assert Policy.of("archive", max_update_error=bound).budget == Budget(1, 4.0, 0.25)


@pytest.mark.parametrize("dtype", DType)
def test_presets_only_touch_the_types_that_codecs_take(dtype):
    for preset in ("flash", "compact", "archive"):
        policy = Policy.of(preset)
        weight, moment1, moment2, other = (choose(policy, role, dtype=dtype) for role in ROLES)
        assert (weight[0] != Lossless()) is (dtype is DType.FLOAT32)
        assert (moment1[0] != Lossless()) is (dtype in (DType.FLOAT32, DType.BFLOAT16))
        assert (moment2[0] != Lossless()) is (dtype in (DType.FLOAT32, DType.BFLOAT16))
        # The type is what it is: no reason is given for what nobody asked for.
        assert weight[1] is moment1[1] is moment2[1] is None
        assert other == (Lossless(), None)


SMALL = [(), (0,), (0, 100_000), (1,), (4095,), (4096,), (65_535,), (1, 4095), (63, 65), (5, 9, 91)]
"""65 x 63 and 5 x 9 x 91 are 4095."""

LARGE = [(65_536,), (1, 4096), (64, 64), (4096, 1), (16, 16, 16), (1, 1, 65_535)]


@pytest.mark.parametrize(("shape", "small"), [*((each, True) for each in SMALL), *((each, False) for each in LARGE)])
def test_small_at_the_exact_thresholds(shape, small):
    assert is_small(shape) is small
    for role, codec in zip((Role.WEIGHT, Role.MOMENT1, Role.MOMENT2), TABLE["flash"], strict=False):
        expected = (Lossless(), "small") if small else (codec, None)
        assert choose(Policy(), role, shapes=[shape]) == expected


def test_one_small_view_keeps_a_storage_exact():
    """A bias that lies in a flat buffer with everything else is still a bias."""
    assert choose(Policy(), Role.WEIGHT, names=("w", "b"), shapes=(BIG, (300,))) == (Lossless(), "small")
    assert choose(Policy(), Role.WEIGHT, names=("w", "w.t"), shapes=(BIG, BIG)) == (Split24(), None)


def test_small_tensors_that_would_be_lossless_anyway_have_no_reason():
    assert choose(Policy(), Role.OTHER, shapes=[(3,)]) == (Lossless(), None)
    assert choose(Policy(), Role.WEIGHT, dtype=DType.BFLOAT16, shapes=[(3,)]) == (Lossless(), None)
    assert choose(Policy.of("lossless"), Role.WEIGHT, shapes=[(3,)]) == (Lossless(), None)


@pytest.mark.parametrize(
    "buffer", ["running_mean", "running_var", "inv_freq", "freqs_cis", "masked_bias", "cos_cached"]
)
def test_buffers_stay_exact(buffer):
    assert buffer in BUFFERS
    kept = Lossless(), "buffer"
    for name in (f"model.layer.{buffer}", f"state_dict.{buffer}", buffer):
        assert choose(Policy(), Role.WEIGHT, names=[name]) == kept
    for name in (f"model.{buffer}.weight", f"model.{buffer}_proj", f"model.my_{buffer}"):
        assert choose(Policy(), Role.WEIGHT, names=[name]) == (Split24(), None)
    assert choose(Policy(), Role.WEIGHT, names=("model.w", f"ema.{buffer}"), shapes=(BIG, BIG)) == kept


def test_the_first_rule_that_matches_any_name_of_a_storage_wins():
    policy = Policy.of("flash", ["model.head.*=lossless", "model.*=split24(R=7)", "*=split24(R=1)"])
    assert choose(policy, Role.WEIGHT, names=["model.head.weight"]) == (Lossless(), None)
    assert choose(policy, Role.WEIGHT, names=["model.body.weight"]) == (Split24(R=7), None)
    assert choose(policy, Role.WEIGHT, names=["ema.weight"]) == (Split24(R=1), None)
    reverse = Policy.of("flash", ["model.*=split24(R=7)", "model.head.*=lossless"])
    assert choose(reverse, Role.WEIGHT, names=["model.head.weight"]) == (Split24(R=7), None)
    assert choose(reverse, Role.WEIGHT, names=["ema.weight"]) == (Split24(), None)
    policy = Policy.of("flash", ["*.lm_head.weight=lossless"])
    names = ("model.wte.weight", "model.lm_head.weight")
    assert choose(policy, Role.WEIGHT, names=names, shapes=(BIG, BIG)) == (Lossless(), None)
    assert choose(policy, Role.WEIGHT, names=names[:1]) == (Split24(), None)


def test_a_rule_reaches_small_tensors_buffers_and_other():
    policy = Policy.of("lossless", ["*=split24"])
    assert choose(policy, Role.WEIGHT, shapes=[(3,)]) == (Split24(), None)
    assert choose(policy, Role.WEIGHT, names=["model.running_mean"]) == (Split24(), None)
    assert choose(policy, Role.OTHER) == (Split24(), None)


@pytest.mark.parametrize(
    ("glob", "matches", "others"),
    [
        ("model.w", ["model.w"], ["model.w2", "xmodel.w", "MODEL.W", "model/w"]),
        ("*.weight", ["a.weight", "a.b.weight"], ["weight", "a.weight_g"]),
        ("h.?.w", ["h.0.w"], ["h.10.w", "h..w"]),
        ("h.[0-3].w", ["h.0.w", "h.3.w"], ["h.4.w"]),
        ("h.[!0].w", ["h.1.w"], ["h.0.w"]),
        ("a=b", ["a=b"], ["a"]),
        ("*", ["", "a", "a.b\\x0a"], []),
    ],
)
def test_globs(glob, matches, others):
    policy = Policy.of("flash", [f"{glob}=split24(R=3)"])
    for name in matches:
        assert choose(policy, Role.WEIGHT, names=[name]) == (Split24(R=3), None), name
    for name in others:
        assert choose(policy, Role.WEIGHT, names=[name]) == (Split24(), None), name


def test_what_a_rule_leaves_open_follows_the_role():
    policy = Policy.of("lossless", ["*=companded8"])
    assert choose(policy, Role.MOMENT1) == (Companded8(), None)
    assert choose(policy, Role.MOMENT2) == (Companded8(signed=False, Q=255), None)
    assert choose(policy, Role.MOMENT2, dtype=DType.BFLOAT16) == (Companded8(signed=False, Q=255), None)
    policy = Policy.of("lossless", ["*=companded8(Q=31)"])
    assert choose(policy, Role.MOMENT1) == (Companded8(Q=31), None)
    assert choose(policy, Role.MOMENT2) == (Companded8(signed=False, Q=31), None)
    for text, codec in {
        "signed=False, Q=63, p=0.5": Companded8(signed=False, Q=63, p=0.5),
        "Q=200": Companded8(signed=False, Q=200),
    }.items():
        # Second moments are unsigned without being told: 200 levels are none of a signed codec.
        policy = Policy.of("flash", [f"*.exp_avg_sq=companded8({text})"])
        assert choose(policy, Role.MOMENT2, names=["o.exp_avg_sq"]) == (codec, None)


def test_a_rule_that_fits_no_second_moment_is_not_an_error_later():
    """Every rule is checked when it is read; what does not fit a tensor is lossless with a reason."""
    for text in ("*=companded8(signed=True)", "*=companded8(signed=True, Q=31)"):
        policy = Policy.of("flash", [text])
        codec, reason = choose(policy, Role.MOMENT2)
        assert codec == Lossless()
        assert text in reason
        assert choose(policy, Role.MOMENT1)[1] is None


@pytest.mark.parametrize(
    ("text", "role", "dtype"),
    [
        ("*=split24", Role.WEIGHT, DType.BFLOAT16),
        ("*=split24", Role.MOMENT1, DType.FLOAT16),
        ("*=companded8", Role.MOMENT1, DType.FLOAT16),
        ("*=companded8", Role.MOMENT2, DType.FLOAT64),
        ("*=companded8(signed=False, Q=255)", Role.MOMENT1, DType.FLOAT32),
        ("*=companded8", Role.OTHER, DType.INT64),
    ],
)
def test_a_rule_that_does_not_fit_leaves_lossless_and_a_reason(text, role, dtype):
    codec, reason = choose(Policy.of("flash", [text, "*=split24(R=7)"]), role, dtype=dtype)
    assert codec == Lossless()
    for part in (text, dtype.label, role.value):
        assert part in reason


@pytest.mark.parametrize("dtype", DType)
def test_lossless_as_a_rule_fits_everything(dtype):
    for role in Role:
        assert choose(Policy.of("flash", ["*=lossless"]), role, dtype=dtype) == (Lossless(), None)


MALFORMED = """
    = lossless =lossless *= *=gzip *=split24( *=split24(R=8) *=split24(R=129) *=split24(Q=7) *=split24(7)
    *=companded8(Q=0) *=companded8(p=0.3) *=companded8(bits=8) *=lossless(level=3) *=split24(id='x')
    *=companded8(Q=1)(Q='x') *=lossless(measured_as=None) *:lossless
"""


@pytest.mark.parametrize("text", ["", *MALFORMED.split(), "*=companded8(Q=256, signed=False)", "* lossless"])
def test_malformed_rules(text):
    with pytest.raises(UsageError) as caught:
        Policy.of("flash", [text])
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_keep_their_text():
    rule = Rule.parse("  *.w = split24( R = 7 )".replace(" = split24", "=split24"))
    assert rule.glob == "*.w"
    assert rule.codec_for(Role.WEIGHT) == Split24(R=7)
    assert rule.codec is Split24
