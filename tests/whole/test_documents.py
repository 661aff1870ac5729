"""README and guide: every link, file and command that they name is there, and the wheel ships them."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

import ckpt8

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "ckpt8" / "guide").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_to_files(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    named = re.findall(r"(?<![\w/])((?:ckpt8|fixtures|tests)/[\w./-]+\.\w+)", text)
    assert [link for link in links if not (page.parent / link).is_file()] == []
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_readme_is_for_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_command_is_in_the_readme_and_no_other():
    from ckpt8.cli.app import app

    table = re.findall(r"^\| `ckpt8 (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert table == [command.name or command.callback.__name__ for command in app.registered_commands]


@pytest.mark.slow
def test_the_recipes_run_as_they_are_written(run_command, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = (inputs / "gpt_adamw.pt").read_bytes()
    Path("run").mkdir()
    for path in ("run.pt", "best.pt", "run/step-200.pt", "run/step-300.pt"):
        Path(path).write_bytes(content)
        os.utime(path, (0, 0))  # a chain leaves alone what may still be written
    ckpt8.compress("run.pt", "broken.ckpt8")
    damaged = bytearray(Path("broken.ckpt8").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    Path("broken.ckpt8").write_bytes(damaged)
    text = (ROOT / "ckpt8" / "guide" / "commands.md").read_text()
    recipes = [
        line.partition("#") for line in re.findall(r"^    (ckpt8 .+)", text, re.MULTILINE) if "--watch" not in line
    ]
    assert len(recipes) > 10
    for recipe, _, said in recipes:
        command, _, then = recipe.partition("&&")
        code, _, err = run_command(*command.split()[1:])
        stated = re.search(r"exit code (\d)", said)
        assert code == (int(stated[1]) if stated else "diff" in command), (command, err)
        if words := then.split():
            assert words[0] == "rm"
            Path(words[1]).unlink()
    assert {path.name for path in tmp_path.iterdir()} > {
        "alone.pt",
        "model-fp8",
        "model.safetensors",
        "rest.pt",
        "run.pt",
    }


def test_the_python_reference_is_that_of_the_docstrings():
    make = runpy.run_path(str(ROOT / "fixtures" / "make_reference.py"))
    assert make["TARGET"].read_text() == make["page"](), "run python fixtures/make_reference.py"


def test_the_wheel_ships_licence_guide_and_format():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["ckpt8"]
    shipped = {path.relative_to(ROOT / "ckpt8") for pattern in patterns for path in (ROOT / "ckpt8").glob(pattern)}
    rest = {path.relative_to(ROOT / "ckpt8") for path in (ROOT / "ckpt8").rglob("*") if path.is_file()}
    assert shipped == {path for path in rest if path.suffix not in (".py", ".pyc")}
    assert project["project"]["license-files"] == ["ckpt8/LICENSE"]
