"""What a page is made of, taken apart by a parser of HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

TAGS = re.compile(
    "html|head|meta|link|title|style|body|main|header|footer|h[1-4]|p|section|div|span|small|b|code|figure|figcaption|"
    "table|tbody|tr|th|td|ul|li|article|script|svg|path|line|rect|circle|polyline|text"
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
        if tag not in ("meta", "link"):
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
