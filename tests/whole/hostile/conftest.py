"""Files that somebody made to do harm are loaded where they can do none."""

import pytest
from gate_kit import Gates


@pytest.fixture(scope="session")
def attempt():
    """Try to load a path at a gate, in a process with little memory and time."""
    with Gates() as gates:
        yield gates.attempt
