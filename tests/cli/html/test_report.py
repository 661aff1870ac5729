"""``inspect --html`` and ``runs --html``: what the file holds, when it is written, and what is refused."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from disk_kit import flip_bit
from runs_kit import train
from safetensors.torch import save_file

import ckpt8
from ckpt8.chaining.keeping import Keep
from ckpt8.cli.show.report import page
from ckpt8.container.steps import error_in_words
from ckpt8.core.text import size

TAGS = re.compile(
    "html|head|meta|link|title|style|body|main|header|footer|h[1-4]|p|section|div|span|small|b|code|figure|figcaption|"
    "table|thead|tbody|tr|th|td|ul|li|br|wbr|details|summary|script|svg|path|line|rect|circle|polyline|text"
)


class Structure(HTMLParser):
    """Every element with its attributes, the text of scripts, and that outside of style and script."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.script, self.open = [], [], [], []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.script.append(data)
        elif self.open[-1:] != ["style"]:
            self.text.append(data)


def assert_inert(content, data=frozenset({"facts", "distributions", "replay"})):
    """Elements are those of the report, nothing runs, nothing is loaded, every element is closed; it has this data."""
    found = Structure(content.decode())
    assert [tag for tag, _ in found.elements if not TAGS.fullmatch(tag)] == []
    scripts = [attributes for tag, attributes in found.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "ckpt8-report"}]
    assert json.loads("".join(found.script)).keys() == data
    for tag, attributes in found.elements:
        assert not {"src", "style", "srcdoc", "action"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert "href" not in attributes or (tag, attributes["href"]) == ("link", "data:,")
    style = content.decode().partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    return "".join(found.text)


HOSTILE_NAME = "<img src=x onerror=alert(1)>&\"'</script>-40.pt"
HOSTILE = [
    "</script ><script>alert(1)</script>",
    '"><img src=http://example.com/x onerror=alert(1)>',
    "<svg/onload=alert(1)>",
    "&lt;b&gt;&amp;",
    "line\nline\x1b[31m\u202ereversed",
    "]]>--><!--",
]


def test_a_container_without_statistics(inputs, inspect, tmp_path):
    container = tmp_path / "x.ckpt8"
    ckpt8.compress(inputs / "gpt_adamw.pt", container, stats=False)
    facts, content, tree = inspect(container, tmp_path / "a.html")
    text = assert_inert(content)
    assert "unknown for 10 parameters: its error was not measured, or is not finite" in text
    assert "The worst tensors" not in text
    assert tree["distributions"]["worst"] == {"update": [], "weight": [], "lattice": []}
    facts, content, tree = inspect(container, tmp_path / "b.html", "--against", inputs / "gpt_adamw.pt")
    assert "unknown for 10 parameters" not in assert_inert(content)
    worst = tree["distributions"]["worst"]["update"]
    assert [row["name"] for row in worst] == [row["name"] for row in facts["worst"]["update"]]
    assert len(worst) == 5
    assert any(layer["update"] for layer in tree["distributions"]["layers"])


@pytest.mark.slow
def test_hostile_names_are_text(inspect, tmp_path):
    # Five of the six names are among the worst updates and five among the worst weights: with this seed, all are there.
    torch.manual_seed(1)
    weights = {name: torch.randn(96, 96) for name in HOSTILE}
    moments = {name: {"step": 3, "exp_avg": weight / 9, "exp_avg_sq": weight**2} for name, weight in weights.items()}
    group = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "params": HOSTILE}
    path = tmp_path / "<i>\u202e\x1b<.pt"
    torch.save({"model": weights, "optimizer": {"state": moments, "param_groups": [group]}}, path)
    container = tmp_path / "<i>\u202e\x1b<.ckpt8"
    ckpt8.compress(path, container)
    for source in (path, container):
        facts, content, tree = inspect(source, tmp_path / "a.html", "--force")
        text = assert_inert(content)
        facts.pop("replaced", None)
        assert {"schema": 1, **tree["facts"]} == facts
        assert len(tree["distributions"]["worst"]["update"]) == len(tree["distributions"]["worst"]["weight"]) == 5
        for name in HOSTILE:
            shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name)
            assert shown in text
        assert "\u202e" not in content.decode()
        assert "\x1b" not in content.decode()


@pytest.mark.slow
def test_flags_are_shown_where_there_are_any(packed, inspect, tmp_path):
    facts, _, tree = inspect(packed[0], tmp_path / "a.html")
    flags = [{"kind": "nan", "tensor": "model.<i>", "message": "<b>NaN</b> in 3 of 4", "count": 3, "of": 4}]
    flags += [{"kind": "stored_twice", "tensors": ["one", "other"], "message": "32 elements", "count": 32, "of": 64}]
    facts |= {"flags": flags, "sample": {"elements": 50, "of": 200, "full": False}}
    shown = assert_inert(page(facts, tree["distributions"], None).encode())
    assert "looked at 25.0 % of 200 elements; --full reads all" in shown
    assert "NaN: 1 tensormodel.<i>: <b>NaN</b> in 3 of 4" in shown
    assert "one = other: 32 elements" in shown
    facts |= {"flags": [], "sample": {"elements": 0, "of": 200, "full": False}}
    shown = assert_inert(page(facts, tree["distributions"], None).encode())
    assert "not checked: inspect did not read the 200 elements; --full reads them" in shown


FLAGS = ["nan", "inf", "negative_moment2", "zero_moment", "dead_rows", "bf16_in_fp32", "moment2_fp16_zero"]


def test_at_most_five_flags_are_open_and_fp16_is_left_to_readiness(packed, inspect, tmp_path):
    facts, _, tree = inspect(packed[0], tmp_path / "a.html", "--readiness")
    facts["flags"] = [
        {"kind": kind, "tensor": f"t{k}", "message": f"{kind} {k}", "count": 1, "of": 4} for kind in FLAGS for k in "ab"
    ]
    for is_ready in (True, False):
        if not is_ready:
            del facts["readiness"]
        content = page(facts, tree["distributions"], None)
        flags = content.partition('<section id="flags">')[2].partition("</section>")[0]
        shown = re.findall(r"t[ab]: (\w+ [ab])", flags)
        assert shown == [f"{kind} {k}" for kind in FLAGS[: 7 if is_ready else 6] for k in "ab"]
        while "<details>" in flags:
            flags = re.sub(r"<details>(?:(?!<details>).)*?</details>", "", flags)
        assert re.findall(r"t[ab]: (\w+ [ab])", flags) == [f"{kind} a" for kind in FLAGS[:5]]
        assert ('<section id="readiness">' in content) is is_ready


def test_the_verdict_comes_first_and_adds_up(packed, inspect, tmp_path):
    facts, content, _ = inspect(packed[1], tmp_path / "a.html")
    _, verdict, *others = content.decode().split("<section id=")
    assert verdict.startswith('"verdict"')
    assert not any("<table id=" in section for section in others)
    figures = [size(facts["bytes"]), size(facts["stored_bytes"]), f"{facts['ratio']:.2f}x"]
    assert re.findall(r'<div class="tile"><b>([^<]+)</b>', verdict) == figures
    assert f"Error when resuming: {error_in_words(facts['steps'])}" in re.sub("<[^>]+>", "", verdict)
    table = verdict.partition('<table id="parts"')[2].partition("<tbody>")[2]
    rows = [re.findall("<t[hd]>([^<]*)<", row) for row in table.split("</tr>")[:-1]]
    assert {name: cells for name, *cells in rows}["whole checkpoint"] == figures
    for column in (1, 2):
        of_parts = [float(row[column].split()[0]) * UNITS[row[column].split()[1]] for row in rows]
        assert sum(of_parts[:-1]) == pytest.approx(of_parts[-1], rel=0.01)
    facts, content, _ = inspect(packed[0], tmp_path / "b.html")
    assert re.findall(r"<tr><th>(\w+(?: [\d.]+)?)</th><td>[\d.]+ [kM]B</td>", content.decode()) == [*facts["predicted"]]


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6}


def test_no_bar_is_wider_than_the_page(inspect, tmp_path):
    """Also where the container is larger than the checkpoint, as that of a few random bytes is."""
    noise = torch.randint(0, 256, (64,), dtype=torch.uint8)
    save_file({"model.weight": noise.view(torch.float32)}, tmp_path / "x.safetensors")
    ckpt8.compress(tmp_path / "x.safetensors", tmp_path / "x.ckpt8", preset="lossless")
    assert (tmp_path / "x.ckpt8").stat().st_size > (tmp_path / "x.safetensors").stat().st_size
    for name in ("x.safetensors", "x.ckpt8"):
        _, content, _ = inspect(tmp_path / name, tmp_path / "a.html", "--force")
        bars = re.findall(r'<rect class="[^"]*" x="([\d.-]+)%" y="\d+" width="([\d.-]+)%"', content.decode())
        assert bars
        assert all(float(x) >= 0 and float(x) + float(width) <= 100.01 for x, width in bars)


@pytest.mark.slow
def test_the_report_is_written_as_every_output_is(run_command, packed, tmp_path):
    container = packed[1]
    target = tmp_path / "r.html"
    target.write_text("mine")
    assert "--force" in run_command.refused(4, "inspect", container, "--html", target)
    assert target.read_text() == "mine"
    assert f"{target}: is written" in run_command.shown("inspect", container, "--html", target, "--force")
    assert target.read_bytes().startswith(b"<!doctype html>")
    before = container.read_bytes()
    for refused in (container, tmp_path, tmp_path / "missing" / "r.html"):
        code, out, err = run_command("inspect", container, "--html", refused, "--force")
        assert (code, out, err.count("\n")) == (4, "", 1)
    assert container.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "run.ckpt8"]


def test_no_report_replaces_a_checkpoint(run_command, packed, tmp_path):
    """By its name or its content: whole, damaged, of a format that ckpt8 does not know, or a part of a directory."""
    raw, container = packed
    named = {
        "victim.pt": raw.read_bytes(),
        "renamed": raw.read_bytes(),
        "other.ckpt8": container.read_bytes(),
        "html.html": container.read_bytes(),
        "cut.safetensors": b"{}",
        "model.gguf": b"GGUF\3\0\0\0" + bytes(40),
        "old.pkl": b"\x80\x02}q.",
        "trainer_state.json": b"{}",
        "ckpt8-dcp.json": b"{}",
    }
    for name, content in named.items():
        (tmp_path / name).write_bytes(content)
        for command in (("inspect", container), ("runs", container.parent)):
            err = run_command.refused(4, *command, "--html", tmp_path / name, "--force")
            assert "a report never replaces one" in err
        assert (tmp_path / name).read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {*named, container.name}


@pytest.fixture
def replay(made, tmp_path):
    """What verify prints of three replayed steps."""
    path = tmp_path / "replay.json"
    path.write_text(made[1])
    return path


def changed(tree, **values):
    return {**tree, "resume": {**tree["resume"], **values}}


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: {**tree, "nbytes": 5}, "another container"),
        (lambda tree: {**tree, "resume": None}, "no replayed steps"),
        (lambda tree: changed(tree, steps=[{"update_nmse": "x"}]), "no replayed steps"),
        (lambda tree: changed(tree, steps=[dict.fromkeys(tree["resume"]["steps"][0], -1.0)]), "no replayed steps"),
        (lambda tree: changed(tree, replay_error=10**400), "no replayed steps"),
        (lambda tree: changed(tree, parameters="<b>"), "no replayed steps"),
        (lambda tree: [tree], "no replayed steps"),
    ],
)
def test_what_is_no_replay_of_this_container_is_refused(change, words, run_command, packed, replay, tmp_path):
    replay.write_text(json.dumps(change(json.loads(replay.read_text()))))
    assert words in run_command.refused(3, "inspect", packed[1], "--html", tmp_path / "r.html", "--replay", replay)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 200_000, b'{"resume": {"steps": [NaN'])
def test_what_is_no_json_is_refused(content, run_command, packed, replay, tmp_path):
    replay.write_bytes(content)
    err = run_command.said(3, "inspect", packed[1], "--html", tmp_path / "r.html", "--replay", replay)
    assert re.fullmatch(r"ckpt8: [^\n]+\n", err)


def test_figures_of_the_replay(inspect, packed, replay, tmp_path):
    tree = json.loads(replay.read_text())
    tree["resume"]["steps"][1]["update_nmse"] = 0.0
    tree["resume"]["steps"][2]["weight_rms"] = None
    replay.write_text(json.dumps(tree))
    _, content, found = inspect(packed[1], tmp_path / "r.html", "--replay", replay)
    text = assert_inert(content)
    assert found["replay"] == tree["resume"]
    assert f"3 optimizer steps of {tree['resume']['parameters']} parameters" in text
    assert "step 2:" in text
    assert content.decode().count('data-chart="replay"') == 4


INPUTS = Path(__file__).parents[3] / "fixtures" / "inputs"
REAL = sorted(
    path.relative_to(INPUTS).as_posix()
    for path in [*INPUTS.iterdir(), *(INPUTS / "low_bit").iterdir()]
    if path.suffix in (".pt", ".ckpt") or (path.is_dir() and path.name not in ("low_bit", "__pycache__"))
)


@pytest.mark.by_default("low_bit/torchao_8.pt")
@pytest.mark.parametrize("name", REAL)
def test_every_real_checkpoint_and_its_container(name, inspect, inputs, tmp_path):
    path, container = inputs / name, tmp_path / "x.ckpt8"
    facts, content, tree = inspect(path, tmp_path / "raw.html")
    assert_inert(content)
    assert {"schema": 1, **tree["facts"]} == facts
    counted = sum(
        side["after"]["total"] for what, side in tree["distributions"]["histograms"].items() if what != "update"
    )
    assert counted == tree["distributions"]["sample"]["elements"]
    ckpt8.compress(path, container)
    facts, content, tree = inspect(container, tmp_path / "packed.html", "--against", path)
    text = assert_inert(content)
    assert {"schema": 1, **tree["facts"]} == facts
    assert "Where the bytes are" in text
    assert tree["distributions"]["sample"]["full"]
    if facts["errors"]["weight"]:
        assert "The worst tensors" in text


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(packed, inspect, tmp_path):
    original, container = packed
    for path, options in ((original, ()), (container, ("--against", original))):
        once, again = (inspect(path, tmp_path / name, "--force", *options)[1] for name in ("a.html", "b.html"))
        assert once == again


def test_a_weight_of_zeros(inspect, tmp_path):
    torch.save({"zero": torch.zeros(64, 64)}, tmp_path / "x.pt")
    _, content, _ = inspect(tmp_path / "x.pt", tmp_path / "a.html")
    text = assert_inert(content)
    assert "no value other than zero" in text
    assert "4,096 zeros (100 %) after" in text


def test_nothing_is_predicted_for_what_holds_no_tensors(inspect, run_command, tmp_path):
    """As ``compress`` refuses it."""
    path = tmp_path / "x.pt"
    torch.save({"epoch": 3, "empty": torch.zeros(0)}, path)
    said = "holds no tensors; there is nothing to compress"
    assert said in run_command.said(3, "compress", path)
    facts, content, _ = inspect(path, tmp_path / "a.html")
    assert facts["predicted"] == {}
    assert said in assert_inert(content)
    assert said in run_command.shown("inspect", path)


def test_a_report_in_the_checkpoint_itself_is_refused(run_command, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"a": torch.ones(64, 64)}, folder / "x.pt")
    assert "outside of it" in run_command.said(4, "inspect", folder, "--html", folder / "r.html")
    assert [path.name for path in folder.iterdir()] == ["x.pt"]


def test_damage_leaves_no_report(run_command, packed, tmp_path):
    _, container = packed
    flip_bit(container)
    code, out, err = run_command("inspect", container, "--html", tmp_path / "r.html")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert [path.name for path in tmp_path.iterdir()] == [container.name]


@pytest.fixture
def run_page(tmp_path, run_command):
    """A run with a key, raw files, a damaged one and a hostile name: its records, and its page."""
    folder = tmp_path / "run"
    folder.mkdir()
    train(folder, (1, 2, 3), compressed=(2,), val_loss=1.25)
    (folder / "step-30.pt").rename(folder / HOSTILE_NAME.replace("/", "_"))
    (folder / "step-50.ckpt8").write_bytes((folder / "step-20.ckpt8").read_bytes()[:-1])
    code, _, _ = run_command("runs", folder, "--html", tmp_path / "page.html")
    assert code == 3
    return ckpt8.runs(folder), (tmp_path / "page.html").read_bytes()


def test_the_page_is_inert_and_holds_the_facts(run_page):
    run, content = run_page
    text = assert_inert(content, {"facts"})
    assert HOSTILE_NAME.replace("/", "_") in text
    _, _, rest = content.decode().partition('<script type="application/json" id="ckpt8-report">')
    facts = json.loads(rest.partition("</script>")[0])["facts"]
    stay = [list(run)[index] for index in Keep.of("log").kept(list(run))]
    assert facts.pop("keep_log") == {"stay": len(stay), "bytes": sum(r.stored_bytes + r.raw_bytes for r in stay)}
    assert "Room over time" in text
    assert facts == json.loads(json.dumps(run.to_json()))
    for record in run:
        assert record.name in text
        if record.loss is not None:
            assert f"{record.name}: step {record.step:,}, loss {record.loss:.3g}" in text
            assert f"{record.name}: step {record.step:,}, {size(record.stored_bytes)}" in text
    assert next(record.damage for record in run if record.damage) in text
