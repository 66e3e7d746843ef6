"""Script calls that read pages of a stream, and find the copies of one message in it."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.store import scripts
from streamqd.store.scripts import Call, Reply

FIND_AT_ONCE = 500  # maximum number of entries that one call examines


class Copy(NamedTuple):
    """A copy of a message in a stream.

    `fields` contains its fields except payload, headers and traceback.
    """

    id: str
    fields: dict[bytes, bytes]


def page(stream: str, first: str, last: str, count: int, *, newest: bool) -> Call:
    """Build a call that reads up to `count` entries with their bodies.

    `first` and `last` are the arguments of XRANGE, or those of XREVRANGE if `newest` is True. The
    page also ends after the entry with which the total size of the bodies exceeds BYTES_MAX of
    `store.items`.
    """
    return scripts.get("stream_page").call(
        {"stream": stream}, first=first, last=last, count=count, newest=newest
    )


def find(stream: str, original: str, begin: str) -> Call:
    """Build a call that searches for copies of the message whose original ID is `original`.

    The search starts at the ID `begin`.
    """
    return _find(stream, "originalId", original, begin)


def find_send(stream: str, send_id: str, begin: str) -> Call:
    """Build a call that searches for the entries of a delayed send.

    The search starts at the ID `begin`.
    """
    return _find(stream, "sendId", send_id, begin)


def _find(stream: str, field: str, value: str, begin: str) -> Call:
    return scripts.get("message_find").call(
        {"stream": stream}, field=field, value=value, **{"from": begin}, count=FIND_AT_ONCE
    )


def parse_copies(reply: Reply) -> tuple[list[Copy], str]:
    """Parse the reply to `find` or `find_send`.

    Return the copies, and the ID at which the search must continue, or '' if it is complete.
    """
    copies, after = reply.values
    return [
        Copy(entry_id.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for entry_id, fields in copies
    ], after.decode()
