"""A real browser without a window: what it makes of a page that a local server gives it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
  const box = e => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] };
  const found = {
    width: root.clientWidth,
    scroll: root.scrollWidth,
    beyond: all("body *", e => e).filter(e => e.getBoundingClientRect().right > root.clientWidth + 0.5).length,
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
