"""The report in a real browser: it renders, asks for nothing, fits a phone, and its figures are those of the JSON."""

from __future__ import annotations

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
    _, page, tree = inspect(container, tmp_path / "r.html", "--against", original, "--replay", replay)
    seen = browse(page, tmp_path, width=PHONE, dark=True)
    assert_at_ease(seen, PHONE)
    assert seen["dark"]
    assert brightness(seen["paper"]) < 60 < 180 < brightness(seen["ink"])
    assert all(chart["size"][2] <= PHONE and chart["letters"] >= 9 for chart in seen["charts"])
    assert seen["title"] == "gpt.ckpt8 · ckpt8"
    assert_codes(seen, tree["distributions"]["codes"])
    assert_histograms(seen, tree["distributions"])


@pytest.mark.slow
def test_a_checkpoint_on_a_desk_in_the_light(inputs, inspect, tmp_path):
    facts, page, tree = inspect(inputs / "trainer-adamw", tmp_path / "r.html")
    seen = browse(page, tmp_path, width=DESK)
    assert_at_ease(seen, DESK)
    assert not seen["dark"]
    assert brightness(seen["ink"]) < 60 < 180 < brightness(seen["paper"])
    assert_codes(seen, tree["distributions"]["codes"])
    assert dict(seen["tiles"])["preset flash, predicted"] == size(facts["predicted"]["flash"]["bytes"])
    rows = {row["name"]: row for row in seen["rows"]["roles"]}
    for row in facts["roles"]:
        name = {"weight": "weights", "moment1": "first moments", "moment2": "second moments"}.get(row["role"])
        if name is not None:
            assert rows[f"{name} {row['dtype']}"]["value"].startswith(size(row["bytes"]) + " ")
    assert "as preset flash would give it back" in seen["text"]


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


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
