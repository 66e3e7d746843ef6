"""Invisible characters are escaped in every printed name and message."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest

from streamqd.cli.output import json_text, printable
from streamqd.logs.lines import json_line
from streamqd.words import escape_unprintable

HIDING = {
    "zero width space": "or\u200bders",
    "byte order mark": "\ufefforders",
    "tag": "orders\U000e0041",
    "soft hyphen": "or\u00adders",
    "hangul filler": "orders\u3164",
    "joiner between Latin letters": "or\u200dders",
    "joiner between accented letters": "\u00e9\u200d\u00e9",
    "joiner at the end": "orders\u200d",
    "doubled joiner": "\U0001f468\u200d\u200d\U0001f469",
    "variation selector": "or\ufe0fders",
    "word joiner": "or\u2060ders",
    "right-to-left override": "or\u202eders",
}
SHAPING = {
    "Persian": "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "Hindi": "\u0928\u092e\u0938\u094d\u200d\u0924\u0947",
    "family": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "heart": "\u2764\ufe0f",
    "keycap": "1\ufe0f\u20e3",
    "ideographic variant": "\u845b\U000e0100",
}


@pytest.mark.parametrize("text", HIDING.values(), ids=HIDING)
def test_invisible_characters_are_escaped(text: str) -> None:
    """Because of the escapes, different names look different on a screen and in a log."""
    for shown in (printable(text), printable(text, lines=True), escape_unprintable(text)):
        assert "\\" in shown
        assert all(unicodedata.category(each) != "Cf" for each in shown.replace("\u200d", "", 1))
    assert len(printable(text)) > len(text)


@pytest.mark.parametrize("text", HIDING.values(), ids=HIDING)
def test_json_escapes_invisible_characters(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's text shows invisible characters, while a parser reads the original text."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    for document in (json_text({"name": text}), json_line({"name": text})):
        assert "\\u" in document
        assert json.loads(document) == {"name": text}


@pytest.mark.parametrize("text", SHAPING.values(), ids=SHAPING)
def test_joining_characters_are_kept(text: str) -> None:
    assert printable(text) == text
