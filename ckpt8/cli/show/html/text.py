"""Text and figures on their way into a page."""

from __future__ import annotations

from html import escape
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import shown
from ckpt8.core.text import printable

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def text(value: object) -> str:
    """Any text as it is to be read: nothing in it is markup, and nothing in it turns the text around it."""
    return escape(printable(str(value)), quote=True)


def power(base: int, exponent: int) -> str:
    """Such as 10⁻⁶."""
    return f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"


def shown_name(row: dict[str, Any]) -> str:
    """The name of a tensor or parameter, as it goes into the page."""
    return text(shown(row))
