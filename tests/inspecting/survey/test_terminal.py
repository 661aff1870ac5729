"""What ``inspect`` prints: whole at any width, and without colour where nobody looks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from survey_kit import healthy, plant
from typer.testing import CliRunner

import ckpt8
from ckpt8.cli.app import app
from ckpt8.cli.show.tables import Share, Table, bar, bars, pack, wrap
from ckpt8.core.text import percent

WIDTHS = [40, 80]
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("gpt_adamw.pt", "low_bit/bitsandbytes.pt")]


def shown(*arguments, width=None, **environment):
    columns = {} if width is None else {"COLUMNS": str(width)}
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={**columns, **environment})
    assert result.exit_code == 0, result.exception
    return result.output


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A checkpoint with every fault, and its container."""
    folder = tmp_path_factory.mktemp("planted")
    tree = healthy()
    plant(tree)
    torch.save(tree, folder / "run.pt")
    ckpt8.compress(folder / "run.pt")
    return folder


def squeezed(text):
    return "".join(text.split())


@pytest.mark.by_default("run.ckpt8-80")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["trainer-adamw", "run.ckpt8", *SLOW])
def test_every_line_fits_and_nothing_is_cut(name, width, inputs, planted):
    path = planted / name if name.startswith("run") else inputs / name
    out = shown(path, "--tensors", "--full", width=width)
    assert all(cell_len(line.rstrip()) <= width for line in out.splitlines())
    assert "…" not in out
    assert "\x1b" not in out
    whole = shown(path, "--tensors", "--full", width=400)
    assert all(title in squeezed(text) for title in ("Redflags", "Bytesbylayer") for text in (whole, out))
    for line in whole.splitlines():
        if line.startswith("    "):  # of flags: words that are broken between lines at most
            assert squeezed(line) in squeezed(out)


@pytest.mark.usefixtures("without_predictions")
@pytest.mark.parametrize(("count", "more"), [(3, None), (4, "    and 1 more"), (12, "    and 9 more")])
def test_what_is_not_listed_is_counted(count, more, tmp_path):
    rows = torch.rand(count, 64) + 0.5
    rows[:, 5] = float("nan")
    torch.save({"model": {f"w{k}": row.clone() for k, row in enumerate(rows)}}, tmp_path / "a.pt")
    lines = [*shown(tmp_path / "a.pt", "--html", str(tmp_path / "a.html"), width=120).splitlines(), ""]
    at = next(k for k, line in enumerate(lines) if line.strip() == f"NaN: {count} tensors")
    assert [line.strip().startswith("model.w") for line in lines[at + 1 : at + 5]] == [True, True, True, False]
    assert (lines[at + 4].rstrip() if "more" in lines[at + 4] else None) == more
    assert ("<li>and 2 more</li>" in (tmp_path / "a.html").read_text()) is (count == 12)
    weight = torch.rand(70, 70) + 0.5
    torch.save({"model": {f"w{k}": weight.clone() for k in range(count)}}, tmp_path / "a.pt")
    and_more = f" and {count - 3} more" if more else ""
    assert f"model.w0 = model.w1 = model.w2{and_more}: " in shown(tmp_path / "a.pt", width=200)


@pytest.mark.usefixtures("without_predictions")
def test_each_kind_is_said_in_words(planted):
    out = shown(planted / "run.pt", "--full", "--readiness", width=120)
    for words in (
        "NaN: 1 tensor",
        "Inf: 1 tensor",
        "second moments below zero: 1 tensor",
        "optimizer.state.3.exp_avg_sq: bias, 2 below zero in 40 elements",
        "moments that are all zero: 1 tensor",
        "dead rows: no moment that is not zero: 1 parameter",
        "fp32 that holds bf16 values: 1 tensor",
        "the same weights stored more than once: 1 time",
        "second moments that fp16 would flush to zero: <0.1 % of the values in 1 tensor",
        "moments that FlashOptim's fp16 scales would lose:",
        "model.embed.weight = model.head.weight: byte-identical; stored 2 times, 268.80 kB each",
        "embed.weight: 5 dead of 700 rows",
    ):
        assert words in out, words


def render(table, width):
    console = Console(width=width, color_system=None, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


NAMES = st.text(st.sampled_from("ab.:_/[]漢 "), min_size=1, max_size=60)


@given(st.lists(st.tuples(NAMES, NAMES, st.integers(0, 10**12)), min_size=1, max_size=4), st.sampled_from([24, 40, 80]))
def test_a_table_keeps_every_cell(rows, width):
    out = render(Table(("name", "codec", "count"), [(a, b, str(n)) for a, b, n in rows]), width)
    assert all(cell_len(line.rstrip()) <= width for line in out.splitlines())
    for cells in rows:
        for cell in cells:
            assert squeezed(str(cell)) in squeezed(out)


@pytest.mark.usefixtures("without_predictions")
def test_a_name_is_no_emoji(tmp_path):
    torch.save({"model": {":a:": torch.rand(70, 70)}}, tmp_path / "a.pt")
    for width in (30, 120):
        assert "model.:a:" in shown(tmp_path / "a.pt", "--tensors", width=width)


@given(st.text(st.sampled_from("abc.:/_ 漢"), max_size=200), st.integers(12, 60))
def test_wrapped_lines_fit_and_say_the_same(text, width):
    lines = list(wrap(text, width, first="  ", more="    "))
    assert all(cell_len(line) <= width for line in lines)
    assert squeezed("".join(lines)) == squeezed(text)
    assert all(cell_len(line) <= width for line in pack(text.split(), width, indent="  "))
    assert squeezed("".join(pack(text.split(), width))) == squeezed(text)


def test_names_are_broken_between_components_and_paragraphs_leave_out_what_is_empty():
    assert list(wrap("model.layers.10.self_attn", 16)) == ["model.layers.10.", "  self_attn"]
    assert list(wrap("it takes 43.2 kB, 12 % of it", 12)) == ["it takes", "  43.2 kB,", "  12 % of it"]
    table = Table(("name", "reason", "count"), [("a" * 20, "", "1")])
    assert render(table, 20).split() == ["name", "a" * 16, "a" * 4, "count", "1"]


def test_bars_are_as_long_as_they_say():
    for share, shown_bar in ((1, "█" * 10), (0.5, "█" * 5), (0.5625, "█" * 5 + "▋"), (0, ""), (1e-9, "▏")):
        assert bar(share, 10) == shown_bar
    assert bar(0.5, 10, ascii_only=True) == "#####"
    shares = [Share("all", 0.8, ("8 MB",)), Share("a.very.long.name", 0.2, ("20 MB",))]
    for width in (24, 40, 80):
        lines = list(bars(shares, width))
        assert all(cell_len(line) <= width for line in lines)
    assert [line.count("█") for line in bars(shares, 80)] == [40, 10]


@pytest.mark.parametrize(("fraction", "text"), [(0, "0 %"), (1e-9, "<0.1 %"), (0.9999, "99.9 %"), (1, "100 %")])
def test_what_is_not_all_is_not_called_all(fraction, text):
    assert percent(fraction) == text
