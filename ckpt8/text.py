"""Text that came from a file, on its way to a terminal or a log."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with ``\\x1b`` in place of what is not printable: one line that no terminal takes for a command."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
