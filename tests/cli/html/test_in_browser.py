"""The report in a real browser: it renders, asks for nothing, fits a phone, and its figures are those of the JSON."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from ckpt8.cli.show.tables import codec_text, number
from ckpt8.core.text import size

BROWSER = shutil.which("chromium")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)

# The page under test is in a frame of the width that is wanted; the script is that of the page around it.
_AROUND = """<!doctype html><link rel="icon" href="data:,"><style>body{margin:0}</style>
<iframe src="/page.html" style="border:0;width:%(width)dpx;height:900px"></iframe><pre id="found"></pre><script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, root = page.documentElement;
  const all = (where, what) => [...page.querySelectorAll(where)].map(what);
  const shown = e => e.innerText.replace(/\\s+/g, " ").trim();
  const style = e => frame.contentWindow.getComputedStyle(e);
  const ground = e => e.closest("section") ? style(e.closest("section")).backgroundColor
    : style(page.body).backgroundColor;
  const ink = e => e.matches("svg text") ? style(e).fill : style(e).color;
  const paint = e => style(e).stroke === "none" ? style(e).fill : style(e).stroke;
  const light = colour => colour.match(/\\d+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const contrast = (one, other) => { const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) };
  const box = e => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] };
  const found = {
    width: root.clientWidth,
    scroll: root.scrollWidth,
    beyond: all("body *", e => e).filter(e => !e.closest(".wide table") &&
      e.getBoundingClientRect().right > root.clientWidth + 0.5).length,
    broken: all(".whole, .figures td, .tile b, .value", e => [...e.childNodes]).flat().filter(node => {
      const range = page.createRange(); range.selectNodeContents(node);
      return node.nodeType === 3 && range.getClientRects().length > 1 }).map(node => node.textContent),
    pale: all("p, h1, h2, h3, th, td, b, span, summary, li, .note, svg text", e => e).filter(e =>
      e.textContent.trim() && contrast(ink(e), ground(e)) < 4.5).map(e => e.textContent.slice(0, 40)),
    faint: all("rect, circle, .line", e => e).filter(e => !e.matches(".hit, .faint, .ring") &&
      contrast(paint(e), ground(e)) < 3).map(e => e.getAttribute("class")),
    cut: all("figure text", e => [e.textContent, box(e), box(e.closest("svg"))]).filter(([_, t, s]) =>
      t[0] < s[0] || t[1] < s[1] || t[0] + t[2] > s[0] + s[2] || t[1] + t[3] > s[1] + s[3]).map(([words]) => words),
    resources: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
    dark: frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches,
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    ink: frame.contentWindow.getComputedStyle(page.body).color,
    title: page.title,
    embedded: (text => { try { return Object.keys(JSON.parse(text)) } catch { return text.slice(0, 200) } })(
      page.querySelector("script")?.textContent ?? ""),
    headings: all("h1, h2, h3, h4", shown),
    text: shown(page.body),
    tiles: all(".tile", e => [shown(e.querySelector("span")), shown(e.querySelector("b"))]),
    rows: Object.fromEntries(all("section div[id]", e => [e.id, [...e.querySelectorAll(".row")].map(r => ({
      name: shown(r.querySelector(".name")), value: shown(r.querySelector(".value")),
      width: r.querySelector(".bar").getBoundingClientRect().width,
      bars: [...r.querySelectorAll("rect")].map(box), dots: [...r.querySelectorAll("circle")].map(box) }))])),
    axis: all(".axis text", e => [e.textContent, box(e)]),
    charts: all("figure", e => ({ kind: e.dataset.chart, section: e.closest("section").id,
      size: box(e.querySelector("svg")),
      titles: [...e.querySelectorAll("title")].map(t => t.textContent), note: shown(e.querySelector(".note")),
      letters: Math.min(...[...e.querySelectorAll("text")].map(t => t.getBoundingClientRect().height)),
      axes: [...e.querySelectorAll("text")].map(t => t.textContent) })),
  };
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        content = self.server.pages.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_):
        pass


def browse(content, folder, *, width=1200, dark=False):
    """What the browser shows of a page: see ``found`` above; ``asked`` of the server, and lines of its ``console``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.pages = {"/page.html": content, "/": (_AROUND % {"width": width}).encode()}
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    profile = folder / f"profile-{width}-{dark}"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    url = f"http://127.0.0.1:{server.server_port}/"
    command = [BROWSER, *_FLAGS, *scheme, f"--user-data-dir={profile}", "--window-size=1300,1000", "--dump-dom", url]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, encoding="utf-8")
    finally:
        server.shutdown()
        server.server_close()
        shutil.rmtree(profile, ignore_errors=True)
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    found["asked"] = server.asked
    found["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return found


pytestmark = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")

PHONE, DESK = 360, 1200
BROKEN = b"""<!doctype html><body style="background:#fff">
<script>console.error("an error")</script><img src="/picture.png">
<div style="width:500px">wide</div><p style="width:900px">wider</p>
<div style="width:9px"><i class="whole">12.34 kB</i></div>
<h1 style="color:#999">pale</h1><svg><rect fill="#ddd" width="9" height="9"/></svg>"""


def assert_at_ease(seen, width):
    """Nothing was asked for, nothing said, nothing is wider than the page, and no label is outside of its chart."""
    assert seen["console"] == []
    assert seen["asked"] == ["/", "/page.html"]
    assert seen["resources"] == []
    assert (seen["width"], seen["scroll"], seen["beyond"]) == (width, width, 0)
    assert seen["cut"] == []
    assert seen["broken"] == seen["pale"] == seen["faint"] == []
    for chart in seen["charts"]:
        assert sum(not re.search(r"\d", words) for words in chart["axes"]) == 1
    assert seen["embedded"] == ["facts", "distributions", "replay"]


@pytest.mark.slow
def test_a_broken_page_is_seen_to_be_broken(tmp_path):
    seen = browse(BROKEN, tmp_path, width=PHONE)
    assert any("an error" in line for line in seen["console"])
    assert "/picture.png" in seen["asked"]
    assert [name.rpartition("/")[2] for name in seen["resources"]] == ["picture.png"]
    assert seen["scroll"] > seen["width"] == PHONE
    assert seen["beyond"] == 2
    assert seen["broken"] == ["12.34 kB"]
    assert [len(seen["pale"]), len(seen["faint"])] == [1, 1]


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
    assert seen["title"] == "run.ckpt8 · ckpt8"
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
    assert dict(seen["tiles"])["flash, predicted"] == size(facts["predicted"]["flash"]["bytes"])
    rows = {row["name"]: row for row in seen["rows"]["roles"]}
    for row in facts["roles"]:
        name = {"weight": "weights", "moment1": "first moments", "moment2": "second moments"}.get(row["role"])
        if name is not None:
            assert rows[f"{name} {row['dtype']}"]["value"] == size(row["bytes"])
    assert "as preset flash would give it back" in seen["text"]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_long_names_and_every_section_on_a_phone(dark, inspect, tmp_path):
    """Names as long as the page is wide times five, red flags, and the readiness report."""
    weights = {f"encoder{'_and_more' * 20}.{k}.weight": torch.rand(80, 64) * 1e-9 + (k < 2) for k in range(3)}
    for weight in weights.values():
        weight[0, 0] = math.nan
    torch.save({"model": weights}, tmp_path / "run.pt")
    shutil.copy(tmp_path / "run.pt", tmp_path / "copy.pt")
    options = "--readiness", "--full", "--against", tmp_path / "copy.pt"
    _, page, _ = inspect(tmp_path / "run.pt", tmp_path / "r.html", *options)
    seen = browse(page, tmp_path, width=PHONE, dark=dark)
    assert_at_ease(seen, PHONE)
    assert seen["dark"] is dark
    assert "Low-precision readiness" in seen["headings"]
    assert "elements of 3 weights and moments; 3 of them are NaN or infinite, and are left out" in seen["text"]
    assert f"The SNR of this file against {tmp_path / 'copy.pt'}, tensors in units of their own RMS" in seen["text"]
    assert "weights, 3 tensors: exact" in seen["text"]


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def assert_codes(seen, codes):
    charts = [chart for chart in seen["charts"] if chart["section"] == "codes"]
    for chart, row in zip(charts, codes, strict=True):
        numbers = [int(re.match(r"code -?\d+: ([\d,]+) ", title)[1].replace(",", "")) for title in chart["titles"]]
        assert numbers == row["counts"]
        entropy = number(row["entropy_bits"])
        assert (
            chart["note"]
            == f"{codec_text(row['codec'])}: {row['used']} of {row['levels']} codes used, entropy {entropy} bits of 8"
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
        assert "magnitude" in charts[what]["axes"]
