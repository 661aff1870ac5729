"""The report in a real browser: it renders, asks for nothing, fits a phone, and its figures are those of the JSON."""

from __future__ import annotations

import math
import re

import pytest
from browser_kit import BROWSER, browse

from ckpt8.cli.show.tables import number
from ckpt8.core.text import size

pytestmark = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")

PHONE, DESK = 360, 1200
BROKEN = b"""<!doctype html><script>console.error("an error")</script><img src="/picture.png">
<div style="width:500px">wide</div><p style="width:900px">wider</p>"""


def assert_at_ease(seen, width):
    """Nothing was asked for, nothing said, nothing is wider than the page, and no label is outside of its chart."""
    assert seen["console"] == []
    assert seen["asked"] == ["/", "/page.html"]
    assert seen["resources"] == []
    assert (seen["width"], seen["scroll"], seen["beyond"]) == (width, width, 0)
    assert seen["cut"] == []
    assert seen["embedded"] == ["facts", "distributions", "replay"]


@pytest.mark.slow
def test_a_broken_page_is_seen_to_be_broken(tmp_path):
    seen = browse(BROKEN, tmp_path, width=PHONE)
    assert any("an error" in line for line in seen["console"])
    assert "/picture.png" in seen["asked"]
    assert [name.rpartition("/")[2] for name in seen["resources"]] == ["picture.png"]
    assert seen["scroll"] > seen["width"] == PHONE
    assert seen["beyond"] == 2


@pytest.mark.slow
def test_a_container_on_a_phone_and_in_the_dark(packed, inspect, run_command, tmp_path):
    original, container = packed
    replay = tmp_path / "replay.json"
    code, out, _ = run_command("verify", container, "--against", original, "--resume-steps", 12, "--json")
    assert code == 0
    replay.write_text(out)
    facts, page, tree = inspect(container, tmp_path / "r.html", "--against", original, "--replay", replay)
    seen = browse(page, tmp_path, width=PHONE, dark=True)
    assert_at_ease(seen, PHONE)
    assert seen["dark"]
    assert brightness(seen["paper"]) < 60 < 180 < brightness(seen["ink"])
    assert all(chart["size"][2] <= PHONE and chart["letters"] >= 9 for chart in seen["charts"])
    assert seen["title"] == "gpt.ckpt8 · ckpt8"
    assert_heads(seen, facts)
    assert_sizes(seen, facts, tree["distributions"]["layers"])
    assert_layer_errors(seen, tree["distributions"]["layers"])
    assert_worst(seen, facts["worst"])
    assert_codes(seen, tree["distributions"]["codes"])
    assert_histograms(seen, tree["distributions"])
    assert_replay(seen, tree["replay"])


@pytest.mark.slow
def test_a_container_under_a_budget_on_a_phone(inputs, inspect, tmp_path):
    import ckpt8

    container = tmp_path / "x.ckpt8"
    ckpt8.compress(inputs / "gpt_adamw.pt", container, budget=2)
    facts, page, tree = inspect(container, tmp_path / "r.html", "--against", inputs / "gpt_adamw.pt")
    seen = browse(page, tmp_path, width=PHONE)
    assert_at_ease(seen, PHONE)
    tiles, steps = dict(seen["tiles"]), facts["steps"]
    assert tiles["error in steps"] == number(steps["steps"])
    assert tiles["loss drift to expect"] == number(steps["drift"]["mean"])
    assert f"SNR {number(steps['weight_snr_db'])} dB, max error" in seen["text"]
    assert_worst(seen, facts["worst"])
    assert {row["codec"] for row in tree["distributions"]["codes"]} == {"lattice/1", "vscaled/1", "rclog/1"}
    charts = [chart for chart in seen["charts"] if chart["section"] == "codes"]
    assert len(charts) == 3


@pytest.mark.slow
def test_a_checkpoint_on_a_desk_in_the_light(inputs, inspect, tmp_path):
    facts, page, tree = inspect(inputs / "trainer-adamw", tmp_path / "r.html")
    seen = browse(page, tmp_path, width=DESK)
    assert_at_ease(seen, DESK)
    assert not seen["dark"]
    assert brightness(seen["ink"]) < 60 < 180 < brightness(seen["paper"])
    distributions = tree["distributions"]
    assert dict(seen["tiles"])["preset flash, predicted"] == size(facts["predicted"]["flash"]["bytes"])
    rows = {row["name"]: row for row in seen["rows"]["roles"]}
    for row in facts["roles"]:
        name = {"weight": "weights", "moment1": "first moments", "moment2": "second moments"}.get(row["role"])
        if name is not None:
            assert rows[f"{name} {row['dtype']}"]["value"].startswith(size(row["bytes"]) + " ")
    assert_layer_errors(seen, distributions["layers"])
    assert_worst(seen, distributions["worst"])
    assert_codes(seen, distributions["codes"])
    assert_histograms(seen, distributions)
    assert "as preset flash would give it back" in seen["text"]


@pytest.mark.slow
def test_names_that_would_be_markup_are_text(inspect, tmp_path):
    import torch

    name = '"><img src=/x.png onerror=console.error(1)></script ><script >console.error(2)</script ><b>&amp;'
    weights = {name: torch.randn(96, 96), "a" * 400: torch.randn(96, 96)}
    path = tmp_path / "hostile<b>.pt"
    torch.save({"model": weights}, path)
    _, page, tree = inspect(path, tmp_path / "r.html")
    assert any(name in row["name"] for row in tree["distributions"]["worst"]["weight"])
    seen = browse(page, tmp_path, width=PHONE)
    assert_at_ease(seen, PHONE)
    assert f"model.{name}" in seen["headings"]
    assert seen["headings"][0] == "hostile<b>.pt"


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def assert_heads(seen, facts):
    update = facts["errors"]["update"]
    assert dict(seen["tiles"]) == {
        "original": size(facts["bytes"]),
        "stored": size(facts["stored_bytes"]),
        "ratio": f"{facts['ratio']:.2f}x",
        "bytes per weight": f"{facts['bytes_per_weight']:.3f}",
        "NMSE of the update": number(update["nmse"]),
        "max |Δu|": number(update["max_error"]),
    }
    for role in ("moment1", "moment2"):
        error = facts["errors"][role]
        assert f"NMSE {number(error['nmse'])}, SNR {number(error['snr_db'])} dB" in seen["text"]
    weight = facts["errors"]["weight"]
    assert f"max relative {number(weight['max_relative'])}, mean {number(weight['mean_relative'])}" in seen["text"]


def assert_sizes(seen, facts, layers):
    """Figures beside the bars, and bars as long as the figures."""
    expected = sorted(f"{size(row['bytes'])} → {size(row['stored_bytes'])}" for row in facts["roles"])
    assert sorted(row["value"] for row in seen["rows"]["roles"]) == expected
    largest = max(row["bytes"] for row in facts["roles"])
    lengths = sorted(box[2] for row in seen["rows"]["roles"] for box in row["bars"])
    shares = sorted(row[key] / largest for row in facts["roles"] for key in ("bytes", "stored_bytes"))
    whole = seen["rows"]["roles"][0]["width"]
    assert lengths == pytest.approx([whole * share for share in shares], abs=0.1)
    for row, layer in zip(seen["rows"]["layers"], layers, strict=True):
        both = [sum(layer[key].values()) for key in ("bytes", "stored_bytes")]
        assert (row["name"], row["value"]) == (layer["layer"], " → ".join(map(size, both)))


def assert_layer_errors(seen, layers):
    """Figures, and dots where the axis says that they are."""
    known = [layer for layer in layers if layer["update"]]
    assert known
    middles = [box[0] + box[2] / 2 for _, box in seen["axis"]]
    exponents = [int(label[2:].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))) for label, _ in seen["axis"]]
    decade = (middles[-1] - middles[0]) / (exponents[-1] - exponents[0])
    for row, layer in zip(seen["rows"]["layer-errors"], known, strict=True):
        update = layer["update"]
        figures = f"{number(update['nmse'])} max |Δu| {number(update['max_error'])}"
        assert (row["name"], row["value"]) == (layer["layer"], figures)
        for box, value in zip(row["dots"], (update["nmse"], update["max_error"]), strict=True):
            place = middles[0] + (math.log10(value) - exponents[0]) * decade
            assert box[0] + box[2] / 2 == pytest.approx(place, abs=1)


def assert_worst(seen, worst):
    for row in worst["update"]:
        assert row["name"] in seen["headings"]
        assert (
            f"{row['name']} max |Δu| {number(row['max_error'])} where max |u| is {number(row['max_update'])}, "
            f"NMSE {number(row['nmse'])}, SNR {number(row['snr_db'])} dB"
        ) in seen["text"]
    for row in worst["weight"]:
        figures = f"mean relative error {number(row['mean_relative'])}, max {number(row['max_relative'])}"
        assert f"{row['name']} {figures}" in seen["text"]
    for row in worst["lattice"]:
        figures = f"SNR {number(row['snr_db'])} dB, max |Δw| {number(row['max_distance'])}"
        assert f"{row['name']} {figures}" in seen["text"]
    charts = [chart["kind"] for chart in seen["charts"] if chart["section"] == "worst"]
    weights = worst["weight"] + worst["lattice"]
    assert charts == ["moment1", "moment2", "update"] * len(worst["update"]) + ["weight"] * len(weights)
    assert len(charts) > 4


def assert_codes(seen, codes):
    charts = [chart for chart in seen["charts"] if chart["section"] == "codes"]
    for chart, row in zip(charts, codes, strict=True):
        numbers = [int(re.match(r"code -?\d+: ([\d,]+) ", title)[1].replace(",", "")) for title in chart["titles"]]
        assert numbers == row["counts"]
        entropy = number(row["entropy_bits"])
        assert (
            chart["note"] == f"{row['codec']}: {row['used']} of {row['levels']} codes used, entropy {entropy} bits of 8"
        )
        assert chart["axes"].count("0 %") == 1


def assert_histograms(seen, distributions):
    charts = {chart["kind"]: chart for chart in seen["charts"] if chart["section"] == "values"}
    assert charts.keys() == distributions["histograms"].keys()
    for what, pair in distributions["histograms"].items():
        told = [re.search(r"before ([\d.e-]+) %", title) for title in charts[what]["titles"]]
        shares = [float(each[1]) for each in told if each]
        counts = [100 * count / pair["before"]["total"] for count in pair["before"]["counts"]]
        assert shares == pytest.approx([share for share in counts if share >= 1e-4], rel=5e-3)
        assert f"{pair['after']['zero']:,} zeros" in charts[what]["note"]
        assert "share of values" in charts[what]["axes"]


def assert_replay(seen, replay):
    charts = [chart for chart in seen["charts"] if chart["section"] == "replay"]
    assert len(charts) == 4
    for chart, figure in zip(charts, ("update_nmse", "update_max", "weight_rms", "weight_max"), strict=True):
        values = [step[figure] for step in replay["steps"]]
        assert chart["titles"] == [f"step {k}: {number(value)}" for k, value in enumerate(values, 1)]
        assert "replayed step" in chart["axes"]
    assert f"the largest NMSE of a step: {number(replay['replay_error'])}" in seen["text"]
