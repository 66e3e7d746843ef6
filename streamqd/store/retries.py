"""Script calls that let operators list, run or cancel waiting retries and delayed sends.

Both kinds are stored in the same format, each under a name that is called its place. For a retry,
this is the place of its failed entry, and for a delayed send its send ID.
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

    `after` is the due time and the place of the last row on the previous page, or (0, '') for the
    first page. It does not matter if that message has been moved or canceled since.
    """
    due, place = after
    return scripts.build_call(
        "retry_page", keys, holder, after_due=due, after_place=place, count=_check_count(count)
    )


def rows(reply: Reply) -> tuple[list[Delayed], bool]:
    """Parse the reply to `page`. Return the rows, and True if there may be more.

    A short page does not mean that there are no more rows, because pages are also limited in bytes.
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

    The reply contains the number of messages that are now due, and the number of those that were
    not waiting any more.
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
    or removed without a trace if `drop` is True. For delayed sends, `drop` must be True. The reply
    contains a word for each item: MOVED, GONE if the message was not waiting, or UNREADABLE if its
    stored form cannot be converted to a dead letter.
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
