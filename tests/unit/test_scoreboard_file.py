"""What a scoreboard's file says of itself: refused, not believed, and never the end of a start."""

from __future__ import annotations

import struct
import zlib

import pytest

from streamqd.supervisor import scoreboard_file


def test_a_header_is_read_as_it_was_written():
    assert scoreboard_file.unpacked(scoreboard_file.packed({"layout": 1})) == {"layout": 1}


@pytest.mark.parametrize("told", [b"{", b"\xff", b"[" * 900, b"[]", b"7", b""])
def test_a_header_whose_check_sum_is_right_and_whose_text_is_not_is_refused(told: bytes):
    """C5: it ended the start with the decoder's own error."""
    magic = scoreboard_file.packed({})[:20]
    raw = struct.pack("<20sII", magic, len(told), zlib.crc32(told)) + told
    with pytest.raises(scoreboard_file.ScoreboardFileRefused, match="not a scoreboard"):
        scoreboard_file.unpacked(raw)
