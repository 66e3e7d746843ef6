"""Read streams: pages with bodies, and the copies of one message. Writes nothing."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.store import scripts
from streamqd.store.scripts import Call, Reply

FIND_AT_ONCE = 500  # entries examined by one call


class Copy(NamedTuple):
    """A copy of a message in a stream. `fields` excludes payload, headers and traceback."""

    id: str
    fields: dict[bytes, bytes]


def page(stream: str, first: str, last: str, count: int, *, newest: bool) -> Call:
    """Read at most `count` entries from `first` to `last`.

    The page ends after the entry with which the bodies exceed BYTES_MAX. `first` and `last` have
    the format of XRANGE, or with `newest` that of XREVRANGE.
    """
    return scripts.get("stream_page").call(
        {"stream": stream}, first=first, last=last, count=count, newest=newest
    )


def find(stream: str, original: str, begin: str) -> Call:
    """Search for copies of the message with the ID `original`, from the ID `begin` on."""
    return _find(stream, "originalId", original, begin)


def find_send(stream: str, send_id: str, begin: str) -> Call:
    """Search for the entries of a send, from the ID `begin` on."""
    return _find(stream, "sendId", send_id, begin)


def _find(stream: str, field: str, value: str, begin: str) -> Call:
    return scripts.get("message_find").call(
        {"stream": stream}, field=field, value=value, **{"from": begin}, count=FIND_AT_ONCE
    )


def parse_copies(reply: Reply) -> tuple[list[Copy], str]:
    """Parse a reply to `find`: the copies, and the ID at which to continue, '' at the end."""
    copies, after = reply.values
    return [
        Copy(entry_id.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for entry_id, fields in copies
    ], after.decode()
