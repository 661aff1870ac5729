"""Text that came from a file, on its way to a terminal or a log."""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    """``text`` with what is not printable escaped: one line, which no terminal takes for a command."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def printable_tree(tree: Any) -> Any:
    """A copy of a tree of plain values with every text in it made ``printable``."""
    if isinstance(tree, str):
        return printable(tree)
    if isinstance(tree, dict):
        return {key: printable_tree(value) for key, value in tree.items()}
    return [printable_tree(value) for value in tree] if isinstance(tree, (list, tuple)) else tree
