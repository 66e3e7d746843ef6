"""sink_append: the rows of a task, each once, however often they come."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import spark
from streamqd.store.scripts import Call
from streamqd.store.spark import Marker, SinkRow
from tests.contract.desk import Desk

WRITER = "4f5a:0"


def rows(*texts: str) -> list[SinkRow]:
    """Rows whose digests are those of all texts so far."""
    return [
        SinkRow("".join(texts[: at + 1]), [b"payload", text.encode(), b"key", b"\x00\xff"])
        for at, text in enumerate(texts)
    ]


def append(
    desk: Desk, made: list[SinkRow], *, batch: int = 7, first: int = 0, writer: str = WRITER
) -> Call:
    return spark.append(desk.keys, "access", 0, writer, batch, first, made)


def written(desk: Desk) -> list[bytes]:
    return [fields[1] for _, fields in desk.do("XRANGE", desk.stream, "-", "+")]


def marker(desk: Desk, writer: str = WRITER) -> Marker | None:
    return Marker.parse(desk.do("HGET", desk.keys.sink("access", 0), writer))


def test_writes_and_remembers(desk: Desk) -> None:
    assert desk.expect("sink_append", "OK", append(desk, rows("a", "b"))) == [2]
    assert [fields for _, fields in desk.do("XRANGE", desk.stream, "-", "+")] == [
        [b"payload", b"a", b"key", b"\x00\xff"],
        [b"payload", b"b", b"key", b"\x00\xff"],
    ]
    assert marker(desk) == Marker(7, 2, "ab")
    assert desk.do("PTTL", desk.keys.sink("access", 0)) == -1


def test_the_same_again_writes_nothing(desk: Desk) -> None:
    desk.expect("sink_append", "OK", append(desk, rows("a", "b")))
    before = desk.dump()
    assert desk.expect("sink_append", "OK", append(desk, rows("a", "b"))) == [0]
    assert desk.dump() == before


def test_goes_on_where_it_was_interrupted(desk: Desk) -> None:
    """Chunks need not be those of the first try."""
    whole = rows("a", "b", "c", "d", "e")
    desk.expect("sink_append", "OK", append(desk, whole[:2]))
    desk.expect("sink_append", "OK", append(desk, whole[2:3], first=2))
    assert desk.expect("sink_append", "OK", append(desk, whole[:1])) == [0]
    assert desk.expect("sink_append", "OK", append(desk, whole[1:4], first=1)) == [1]
    assert desk.expect("sink_append", "OK", append(desk, whole[4:], first=4)) == [1]
    assert written(desk) == [b"a", b"b", b"c", b"d", b"e"]
    assert marker(desk) == Marker(7, 5, "abcde")


def test_the_next_batch_begins_anew(desk: Desk) -> None:
    desk.expect("sink_append", "OK", append(desk, rows("a", "b")))
    assert desk.expect("sink_append", "OK", append(desk, rows("a"), batch=8)) == [1]
    assert written(desk) == [b"a", b"b", b"a"]
    assert marker(desk) == Marker(8, 1, "a")


def test_a_batch_with_a_longer_number_is_later(desk: Desk) -> None:
    desk.expect("sink_append", "OK", append(desk, rows("a"), batch=9))
    assert desk.expect("sink_append", "OK", append(desk, rows("b"), batch=10)) == [1]
    assert desk.expect("sink_append", "PAST", append(desk, rows("a"), batch=9)) == [b"10"]
    assert written(desk) == [b"a", b"b"]


def test_writers_do_not_meet(desk: Desk) -> None:
    desk.expect("sink_append", "OK", append(desk, rows("a")))
    assert desk.expect("sink_append", "OK", append(desk, rows("b"), writer="4f5a:1")) == [1]
    assert written(desk) == [b"a", b"b"]


def test_other_rows_are_refused(desk: Desk) -> None:
    desk.expect("sink_append", "OK", append(desk, rows("a", "b")))
    assert desk.expect("sink_append", "OTHER", append(desk, rows("b", "a", "c"))) == [2]
    assert written(desk) == [b"a", b"b"]


def test_rows_before_the_first_must_be_there(desk: Desk) -> None:
    """A failover to a copy that lagged behind: the task must start again, and does it right."""
    whole = rows("a", "b", "c")
    desk.expect("sink_append", "OK", append(desk, whole[:1]))
    assert desk.expect("sink_append", "GAP", append(desk, whole[2:], first=2)) == [1]
    assert desk.expect("sink_append", "OK", append(desk, whole)) == [2]
    assert written(desk) == [b"a", b"b", b"c"]


def test_many_rows_and_a_wide_one(desk: Desk) -> None:
    many = [SinkRow("x", [b"payload", b"%d" % number]) for number in range(spark.ROWS_MAX)]
    assert desk.expect("sink_append", "OK", append(desk, many)) == [spark.ROWS_MAX]
    wide = [SinkRow("y", [b"n"] * spark.FIELDS_MAX)]
    assert desk.expect("sink_append", "OK", append(desk, wide, first=spark.ROWS_MAX)) == [1]
    assert desk.do("XLEN", desk.stream) == spark.ROWS_MAX + 1


def test_what_cannot_be_written_is_refused_here(desk: Desk) -> None:
    one = SinkRow("a", [b"payload", b"1"])
    for wrong in ([], [one] * 1001, [SinkRow("a", [])], [SinkRow("a", [b"odd"])]):
        with pytest.raises(ContractError):
            append(desk, wrong)
