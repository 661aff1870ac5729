"""The figures of ``diff`` against float64 maths on whole tensors."""

from __future__ import annotations

import math

import pytest
import torch
from diff_kit import LAYERS, by_name, expected, parameter_names, saved, tensors_of

import ckpt8
from ckpt8.container.frames import FRAME

FIGURES = ("elements", "differ", "max_change", "relative", "rms_change", "rms")


def compared(tmp_path, a, b):
    """What is told of two trees, and of the tensor ``x`` in both."""
    found = ckpt8.diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))
    return found, by_name(found.to_json()).get("x")


def joined(tensors, paths):
    return torch.cat([tensors[path.rstrip(".")].reshape(-1) for path in paths])


def assert_figures(change, wanted):
    assert {key: change[key] for key in FIGURES} == pytest.approx({key: wanted[key] for key in FIGURES}, rel=1e-12)


def test_layers_are_the_sums_of_their_parameters(steps, loaded):
    facts = ckpt8.diff(*steps).to_json()
    names = {f"model.{name}": name for name in loaded[0]["model"]}
    for k, name in parameter_names(loaded[0]).items():
        names |= {f"optimizer.state.{k}.exp_avg.": name, f"optimizer.state.{k}.exp_avg_sq.": name}
    first, second = map(tensors_of, loaded)
    for role, key in (("weight", "model."), ("moment1", ".exp_avg."), ("moment2", ".exp_avg_sq.")):
        rows = {row["layer"]: row for row in facts["layers"][role]}
        assert set(rows) == LAYERS
        relative = [row["relative"] for row in rows.values()]
        assert relative == sorted(relative, reverse=True)
        for layer, row in rows.items():
            inside = [path for path, name in names.items() if key in path and name.startswith(f"{layer}.")]
            assert_figures(row, expected(*(joined(side, inside) for side in (first, second))))
        # A tied weight counts once.
        inside = [path for path in names if key in path and path != "model.lm_head.weight"]
        assert_figures(facts["roles"][role], expected(*(joined(side, inside) for side in (first, second))))


@pytest.mark.by_default(most=2)
@pytest.mark.parametrize("at", [0, FRAME - 1, FRAME, 4 * FRAME, 4 * FRAME + 6])
def test_one_element_of_many(tmp_path, at):
    x = torch.full((4 * FRAME + 7,), 0.5)
    y = x.clone()
    y[at] += 2.0**-20
    found, facts = compared(tmp_path, {"x": x, "same": x[:100]}, {"x": y, "same": x[:100].clone()})
    assert [each.a.name for each in found.changed] == ["x"]
    assert_figures(facts["change"], {**expected(x, y), "differ": 1, "max_change": 2.0**-20})


def test_what_is_not_finite_is_counted_and_left_out(tmp_path):
    x, y = torch.randn(1000), torch.randn(1000)
    x[[1, 2]], y[[2, 3]] = math.nan, math.nan
    x[7], y[7], y[9] = math.inf, math.inf, -math.inf
    _, facts = compared(tmp_path, {"x": x}, {"x": y})
    change = facts["change"]
    assert (change["nan"], change["infinite"], change["excluded"]) == ([2, 2], [1, 2], 5)
    kept = x.isfinite() & y.isfinite()
    assert_figures(change, {**expected(x[kept], y[kept]), "elements": 1000, "differ": 998})


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float32", "00a0807f"), ("bfloat16", "817f"), ("float16", "017c"), ("complex64", "00a0807f" * 2)],
)
def test_a_nan_that_signals_is_a_nan_without_a_warning(tmp_path, dtype, bits):
    x = torch.frombuffer(bytearray.fromhex(bits) * 3, dtype=torch.uint8).view(getattr(torch, dtype))
    y = x.clone()
    y[0] = 1
    facts = compared(tmp_path, {"x": x}, {"x": y})[1]
    assert (facts["change"]["differ"], facts["change"]["nan"]) == (1, [3, 2])


def test_bits_decide_what_is_identical(tmp_path):
    nan, other = torch.tensor([[0x7FC00000], [0x7FC00001]], dtype=torch.int32).view(torch.float32)
    assert compared(tmp_path, {"x": nan}, {"x": nan.clone()})[0].identical
    found, facts = compared(tmp_path, {"x": nan}, {"x": other})
    assert (found.identical, facts["change"]["differ"], facts["change"]["relative"]) == (False, 1, None)
    found, facts = compared(tmp_path, {"x": torch.tensor([0.0, 1.0])}, {"x": torch.tensor([-0.0, 1.0])})
    assert (found.identical, facts["change"]["differ"], facts["change"]["max_change"]) == (False, 1, 0.0)
    # A change from zero has no relative size.
    _, facts = compared(tmp_path, {"x": torch.zeros(5)}, {"x": torch.ones(5)})
    assert (facts["change"]["relative"], facts["change"]["rms_change"]) == (None, 1.0)


TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_element_types(tmp_path, dtype):
    x, y = (torch.randint(0, 2 if dtype is torch.bool else 100, (500,)).to(dtype) for _ in range(2))
    _, facts = compared(tmp_path, {"x": x}, {"x": y})
    assert (facts["dtype"], facts["identical"]) == (str(dtype).removeprefix("torch."), False)
    assert_figures(facts["change"], expected(x, y))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_that_float64_does_not_hold(tmp_path, dtype):
    x = torch.tensor([2**60, 5, 2**62 + 1], dtype=torch.int64)
    y = torch.tensor([2**60 + 1, 3, 2**62 + 1], dtype=torch.int64)
    _, facts = compared(tmp_path, {"x": x.view(dtype)}, {"x": y.view(dtype)})
    assert (facts["change"]["differ"], facts["change"]["max_change"]) == (2, 2.0)
    assert facts["change"]["rms_change"] == pytest.approx(math.sqrt(5 / 3))
    extremes = torch.tensor([-(2**63)]), torch.tensor([2**63 - 1])
    assert compared(tmp_path, {"x": extremes[0]}, {"x": extremes[1]})[1]["change"]["max_change"] == 2.0**64


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(tmp_path, dtype):
    x, y = (torch.randn(300, dtype=dtype) for _ in range(2))
    change = compared(tmp_path, {"x": x}, {"x": y})[1]["change"]
    wide = x.to(torch.complex128)
    d = y.to(torch.complex128) - wide
    assert change["max_change"] == pytest.approx(float(d.abs().max()))
    assert change["relative"] == pytest.approx(float(d.abs().square().sum() / wide.abs().square().sum()) ** 0.5)
    assert compared(tmp_path, {"x": x.conj()}, {"x": x.conj().resolve_conj()})[0].identical


def test_a_type_without_numbers_is_compared_by_its_bits(tmp_path):
    x = torch.arange(64, dtype=torch.uint8)
    y = x.clone()
    y[[3, 60]] = 200
    kind = torch.float4_e2m1fn_x2
    assert compared(tmp_path, {"x": x.view(kind)}, {"x": x.clone().view(kind)})[0].identical
    _, facts = compared(tmp_path, {"x": x.view(kind)}, {"x": y.view(kind)})
    change = facts["change"]
    assert (change["elements"], change["differ"], change["relative"], change["max_change"]) == (64, 2, None, None)
    found, facts = compared(tmp_path, {"x": x.view(kind)}, {"x": x})
    assert (found.identical, facts["change"]) == (False, None)


def test_another_type_or_shape(tmp_path):
    x = torch.randn(40, 30)
    _, facts = compared(tmp_path, {"x": x}, {"x": x.bfloat16()})
    assert (facts["identical"], facts["dtype_b"]) == (False, "bfloat16")
    assert_figures(facts["change"], expected(x, x.bfloat16()))
    exact = x.bfloat16()
    found, facts = compared(tmp_path, {"x": exact}, {"x": exact.float()})
    assert (found.identical, facts["change"]["differ"], facts["change"]["relative"]) == (False, 0, 0.0)
    found, facts = compared(tmp_path, {"x": x}, {"x": x.t().contiguous()})
    assert (found.identical, facts["change"], facts["shape_b"]) == (False, None, [30, 40])


VIEWS = {
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(20, 6, 50).permute(2, 0, 1),
    "strided": lambda x: x[::3, 1::2],
    "expanded": lambda x: x[0].expand(7, 50),
    "windows": lambda x: x.view(-1).unfold(0, 16, 1),
    "negated": torch._neg_view,
    "a part of a storage": lambda x: x[3:9],
    "scalar": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_it_is_the_values_that_count_and_not_where_they_lie(tmp_path, view):
    x = torch.randn(120, 50)
    seen = VIEWS[view](x)
    plain = seen.clone(memory_format=torch.contiguous_format).resolve_neg()
    assert compared(tmp_path, {"x": seen}, {"x": plain})[0].identical
    assert compared(tmp_path, {"x": plain}, {"x": seen})[0].identical
    if seen.numel():
        y = x + torch.randn_like(x)
        other = VIEWS[view](y)
        found, facts = compared(tmp_path, {"x": seen}, {"x": other.clone()})
        assert not found.identical
        assert_figures(facts["change"], expected(seen, other))
        assert_figures(compared(tmp_path, {"x": seen}, {"x": other})[1]["change"], expected(seen, other))


def test_storages_in_another_order_and_an_older_format(tmp_path):
    tensors = {name: torch.randn(30, 20) for name in "abcd"}
    flat = torch.cat([tensors[name].reshape(-1) for name in "dbca"])
    views = {name: flat[600 * k : 600 * k + 600].view(30, 20) for k, name in enumerate("dbca")}
    paths = [
        saved(tmp_path / "plain.pt", tensors),
        saved(tmp_path / "reversed.pt", dict(reversed(tensors.items()))),
        saved(tmp_path / "flat.pt", views),
        saved(tmp_path / "old.pt", views, _use_new_zipfile_serialization=False),
    ]
    assert all(ckpt8.diff(paths[0], path).identical for path in paths)
    views["c"][29, 19] += 1
    found = ckpt8.diff(paths[0], saved(paths[2], views))
    assert [each.a.name for each in found.changed] == ["c"]


def test_more_elements_than_any_disk_holds(tmp_path):
    x, y = (torch.tensor([[value]]).expand(2**40, 3) for value in (1.0, 1.5))
    _, facts = compared(tmp_path, {"x": x}, {"x": y})
    assert facts["change"]["differ"] == facts["change"]["elements"] == 3 * 2**40
    assert (facts["change"]["relative"], facts["change"]["rms"]) == (0.5, 1.0)
    windows = [torch.randn(2**21).as_strided((2**20, 2**20), (1, 1)) for _ in range(2)]
    assert compared(tmp_path, {"x": windows[0]}, {"x": windows[0]})[0].identical
    assert not compared(tmp_path, {"x": windows[0]}, {"x": windows[1]})[0].identical
    other = windows[0].as_strided((2**20, 2**20), (1, 0))
    with pytest.raises(ckpt8.core.errors.InputError, match="more elements than are stored"):
        compared(tmp_path, {"x": windows[0]}, {"x": other})


def test_figures_do_not_depend_on_the_number_of_threads(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(5 * FRAME // 2)
    paths = saved(tmp_path / "a.pt", {"x": x}), saved(tmp_path / "b.pt", {"x": x + 1e-3 * torch.randn_like(x)})
    assert ckpt8.diff(*paths, threads=1).to_json() == ckpt8.diff(*paths, threads=3).to_json()
