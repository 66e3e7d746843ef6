"""People see message bodies exact, masked or hidden."""

from __future__ import annotations

import pytest

from streamqd.console.bodies import BodyReader

SHOW = BodyReader("show")
MASKED = BodyReader("masked", ("/card/number", "/tags/0", "header:Authorization"))
HIDDEN = BodyReader("hidden")


@pytest.mark.parametrize("number", ["9007199254740993", "1e400", "-0.0", "1.10", "9" * 5_000])
def test_numbers_are_shown_exactly_as_written(number):
    assert SHOW.body(f'{{"n":{number}}}'.encode()).text == f'{{\n  "n": {number}\n}}'


def test_duplicate_names_are_all_shown_or_masked():
    twice = b'{"card":{"number":1},"card":{"number":2}}'

    assert SHOW.body(twice).text.count('"number"') == 2
    assert MASKED.body(twice).text.count('"number": "***"') == 2


def test_mask_matches_a_name_written_with_escapes():
    assert "42" not in MASKED.body(rb'{"c\u0061rd":{"num\u0062er":42}}').text


def test_mask_matches_an_element_of_an_array():
    assert MASKED.body(b'{"tags":["secret","open"]}').text.split()[-4:] == [
        '"***",',
        '"open"',
        "]",
        "}",
    ]


@pytest.mark.parametrize("payload", [b"4111", b"card 4111 1", b"\xff4111", b"[" * 100_000])
def test_mask_hides_payloads_without_members(payload):
    shown = MASKED.body(payload)

    assert shown.kind == "hidden" or payload == b"4111"  # a number has no room for a mask
    assert not shown.whole


def test_header_mask_ignores_case():
    headers = {"authorization": "secret", "AUTHORIZATION": "secret", "other": "open"}

    assert MASKED.headers(headers) == dict(headers, authorization="***", AUTHORIZATION="***")


def test_hidden_body_reveals_nothing():
    assert HIDDEN.key(b"key") == "***"
    assert HIDDEN.headers({"name": "value"}) == {}
    assert HIDDEN.row(b"payload") == "***"
    assert HIDDEN.text("told by the payload") == "***"
    assert HIDDEN.body(b'{"a":1}').text == ""


def test_msgpack_is_shown_as_json_and_masked():
    msgspec = pytest.importorskip("msgspec")
    payload = msgspec.msgpack.encode({"card": {"number": 2**53 + 1}, "id": 2**53 + 1})

    assert SHOW.body(payload).kind == "msgpack"
    assert SHOW.body(payload).text.count("9007199254740993") == 2
    assert MASKED.body(payload).text.count("9007199254740993") == 1


def test_bytes_are_shown_as_truncated_hex():
    shown = SHOW.body(b"\xff\x00A" * 100_000)

    assert shown.kind == "binary"
    assert shown.text.startswith("00000000  ff 00 41 ff")
    assert shown.text.splitlines()[0].endswith("..A..A..A..A..A.")
    assert shown.cut == 300_000 - 4_096
    assert shown.whole


def test_row_preview_is_one_line():
    assert SHOW.row("你好\n世界\t!".encode()) == "你好 世界 !"
    assert len(SHOW.row(b"a" * 1_000_000)) == 160
