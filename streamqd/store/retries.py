"""Script calls of the administration for waiting retries and delayed sends.

Both are stored in the same format. The place of a retry is that of its failed entry, and the place
of a delayed send is its send ID.
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
    """A waiting retry or send. `payload_bytes` is -1 if its item cannot be read.

    `fields` are the fields of the message without payload and headers.
    """

    place: str
    due_unix_ms: int
    payload_bytes: int
    fields: dict[bytes, bytes]


def page(keys: Keys, holder: Holder, after: tuple[int, str], count: int) -> Call:
    """Build the call for the messages after (due, place), by due time. Start with (0, '').

    The message at that position may have been removed.
    """
    due, place = after
    return scripts.build_call(
        "retry_page", keys, holder, after_due=due, after_place=place, count=_check_count(count)
    )


def rows(reply: Reply) -> tuple[list[Delayed], bool]:
    """Parse the reply to `page`: rows (fewer if they are large), and True if more may follow."""
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
    # Other clients may pack numbers as such, and not as strings.
    return [part if isinstance(part, bytes) else b"%d" % part for part in parts]


def make_due(keys: Keys, holder: Holder, places: Sequence[str]) -> Call:
    """Make messages due now. The reply has two counts: made due, and not delayed any longer."""
    _check_count(len(places))
    return scripts.build_call("retry_make_due", keys, holder, places=places)


def cancel(
    keys: Keys,
    holder: Holder,
    items: Sequence[tuple[str, Mapping[bytes, bytes]]],
    *,
    drop: bool,
) -> Call:
    """Dead-letter retries, each (place, changed fields). With `drop`, remove the retries.

    Delayed sends are always removed. The reply has a word for each item: MOVED, or GONE if it is
    not delayed.
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
