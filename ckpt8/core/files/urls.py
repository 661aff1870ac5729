"""Names a URL as a URL, where a path to a file is expected."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckpt8.core.errors import UsageError

# A path has lost one of the two slashes.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.IGNORECASE | re.DOTALL)
_TOOLS = {
    "http": "curl -LO",
    "https": "curl -LO",
    "s3": "aws s3 cp",
    "gs": "gcloud storage cp",
    "hf": "hf download",
}


def refuse_url(path: Path) -> None:
    """Raise UsageError for a URL, unless there is a folder of its first name."""
    found = _URL.fullmatch(os.fspath(path))
    if found is None or os.path.lexists(path.parts[0]):
        return
    scheme, rest = found.groups()
    tool = _TOOLS.get(scheme.lower())
    if scheme.lower() == "file":
        rest = f"/{rest}"
        what = f"give the path alone, {rest}"
    else:
        what = f"copy it to or from a local file{f' with {tool}' if tool else ''}"
    raise UsageError(f"{scheme}://{rest}: is a URL, and ckpt8 reads and writes local files; {what}")
