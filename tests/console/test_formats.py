"""How pages print times, reasons and settings."""

from __future__ import annotations

import pytest

from tests.support import optional

pytestmark = optional.need("markupsafe")

from streamqd.console import formats  # noqa: E402
from streamqd.dead_letter import REASONS  # noqa: E402

NOON = 1_795_867_200_000  # 2026-11-28 12:00:00 UTC
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("unix_ms", "text"),
    [
        (NOON - 59_000, ""),
        (NOON - 60_000, "11:59 UTC"),
        (NOON + HOUR, "13:00 UTC"),
        (NOON - 13 * HOUR, "Nov 27, 23:00 UTC"),
        (NOON - 400 * 24 * HOUR, "2025-10-24, 12:00 UTC"),
        (None, ""),
    ],
)
def test_an_older_instant_has_a_clock_with_its_zone(unix_ms, text):
    assert formats.clock(unix_ms, NOON) == text


def test_every_reason_of_a_dead_letter_has_words():
    found = [formats.reason(each) for each in REASONS]

    assert len({*found}) == len(REASONS)
    assert [each for each in found if " " not in each] == []
    assert formats.reason("later\x00") == "later\\x00"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (False, "false"),
        (True, "true"),
        (None, "\u2013"),
        ("", "\u2013"),
        (3, "3"),
        (["a", False], "a, false"),
        ({"x": True}, "x=true"),
    ],
)
def test_a_setting_is_printed_as_in_a_file(value, text):
    assert formats.setting(value) == text
