"""What tests of the bench share."""

from __future__ import annotations

import pytest


@pytest.fixture
def scratch(tmp_path):
    """A folder that is empty afterwards."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []
