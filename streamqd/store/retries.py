"""Script calls that let operators list, run or cancel waiting retries and delayed sends.

Both kinds are stored in the same format. The place of a retry is that of its failed entry. The
place of a delayed send is its send ID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.errors import ContractError
from streamqd.model import Assignment
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.messages import ITEMS_MAX
from streamqd.store.scripts import Call, Reply

Holder = (
    Assignment | tuple[str, int]
)  # assignment of retries, or topic and partition of delayed sends


class Delayed(NamedTuple):
    """A waiting retry or a delayed send.

    `fields` contains the fields of the message except its payload and headers. `payload_bytes` is
    the size of the payload, or -1 if the stored item cannot be read.
    """

    place: str
    due_unix_ms: int
    payload_bytes: int
    fields: dict[bytes, bytes]


def page(keys: Keys, holder: Holder, after: tuple[int, str], count: int) -> Call:
    """Build a call that lists up to `count` delayed messages by due time.

    The page starts after the position `after`, which is the due time and place of the last row of
    the previous page. The message in that row need not exist any longer. For the first page, pass
    (0, '').
    """
    due, place = after
    return scripts.build_call(
        "retry_page", keys, holder, after_due=due, after_place=place, count=_check_count(count)
    )


def rows(reply: Reply) -> tuple[list[Delayed], bool]:
    """Parse the reply to `page`. Return the rows, and True if there may be more.

    There may be more even if the page has fewer rows than requested, because its size is limited.
    """
    return [row(each) for each in reply.values[0]], bool(reply.values[1])


def row(raw: Sequence[Any], key: str = "due times") -> Delayed:
    """Parse a row of the reply to `page`. Raises InvalidValueError for an invalid due time."""
    place, due, size, fields = raw
    name = untrusted.label(place)
    printable = name.encode("unicode_escape").decode()
    return Delayed(
        name,
        untrusted.integer(due, key, printable, low=-untrusted.INTEGER_MAX),
        size,
        dict(zip(_texts(fields[::2]), _texts(fields[1::2]), strict=True)),
    )


def _texts(parts: Sequence[bytes | int]) -> list[bytes]:
    # Other clients may have packed numbers as integers instead of strings.
    return [part if isinstance(part, bytes) else b"%d" % part for part in parts]


def make_due(keys: Keys, holder: Holder, places: Sequence[str]) -> Call:
    """Build a call that makes delayed messages due immediately.

    The reply has the number of messages that are due now, and the number of those that were no
    longer waiting.
    """
    _check_count(len(places))
    return scripts.build_call("retry_make_due", keys, holder, places=places)


def cancel(
    keys: Keys,
    holder: Holder,
    items: Sequence[tuple[str, Mapping[bytes, bytes]]],
    *,
    drop: bool,
) -> Call:
    """Build a call that cancels waiting retries or delayed sends.

    Each item is a pair of the message's place and the fields to change. Retries are dead-lettered,
    unless `drop` is True, in which case they are removed without a dead letter. For delayed sends,
    `drop` must be True. For each item, the reply has one of these words: MOVED, GONE if the message
    was not waiting, or UNREADABLE if it cannot become a dead letter.
    """
    _check_count(len(items))
    flat: list[object] = []
    for place, fields in items:
        flat += (place, 2 * len(fields))
        for pair in fields.items():
            flat += pair
    return scripts.build_call("retry_cancel", keys, holder, drop=drop, entries=flat)


def _check_count(count: int) -> int:
    if not 1 <= count <= ITEMS_MAX:
        raise ContractError(f"{count} retries in one call, not 1 to {ITEMS_MAX}")
    return count
