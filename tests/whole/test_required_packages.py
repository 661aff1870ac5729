"""A test whose package is missing is skipped; it fails where CKPT8_REQUIRE_PACKAGES says that none may be missing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

MODULE = """
import pytest
pytest.importorskip("no_such_thing", reason="no_such_thing is not installed")
"""
REST = """
import pytest

@pytest.fixture
def it():
    pytest.importorskip("no_such_thing", reason="no_such_thing is not installed")

def test_with_it(it):
    pass

def test_that_skips_itself():
    pytest.importorskip("no_such_thing")

@pytest.mark.skip(reason="no GPU")
def test_other():
    pass

def test_that_passes():
    pass
"""
MARKED = """
import pytest

@pytest.mark.no_such_thing
def test_that_skips_itself():
    pytest.importorskip("no_such_thing", reason="no_such_thing is not installed")

@pytest.mark.no_such_thing
@pytest.mark.skipif(True, reason="no_such_thing is not installed")
def test_that_is_skipped():
    pass

@pytest.mark.no_such_thing
def test_that_needs_something_else_too():
    pytest.importorskip("no_such_thing_either", reason="no_such_thing_either is not installed")

def test_without_the_mark():
    pytest.importorskip("no_such_thing", reason="no_such_thing is not installed")
"""


@pytest.mark.parametrize("required", [False, True])
def test_a_missing_package(required, pytester, monkeypatch):
    monkeypatch.setenv("CKPT8_REQUIRE_PACKAGES", str(int(required)))
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makepyfile(test_module=MODULE, test_rest=REST)
    result = pytester.runpytest_inprocess("--continue-on-collection-errors")
    if required:
        # A module and a fixture are errors, as they would be if they raised.
        result.assert_outcomes(errors=2, failed=1, skipped=1, passed=1)
        result.stdout.fnmatch_lines(["*no_such_thing is not installed; CKPT8_REQUIRE_PACKAGES asks for it*"])
    else:
        result.assert_outcomes(skipped=4, passed=1)


@pytest.mark.parametrize("absent", ["no_such_thing", "another_thing"])
def test_a_package_that_may_be_absent(absent, pytester, monkeypatch):
    """Its tests bear its name as a mark; a test that does not would run nowhere."""
    monkeypatch.setenv("CKPT8_REQUIRE_PACKAGES", "1")
    monkeypatch.setenv("CKPT8_ABSENT_PACKAGES", f"{absent} a_third")
    pytester.makeini("[pytest]\nmarkers =\n    no_such_thing: x\n    another_thing: x")
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makepyfile(MARKED)
    result = pytester.runpytest_inprocess()
    # The last two fail in any case.
    result.assert_outcomes(**({"skipped": 2, "failed": 2} if absent == "no_such_thing" else {"errors": 1, "failed": 3}))
