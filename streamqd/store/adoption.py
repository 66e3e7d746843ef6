"""Taking over the pending entries of a group that other clients have read until now."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Unit
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

BEGIN = "0-0"
PAGE = 256


def adopt(keys: Keys, unit: Unit, source: str, cursor: str = BEGIN, count: int = PAGE) -> Call:
    """Take a page of what is pending. `source` is m for the partition stream, r for retries."""
    stream = keys.source(*unit) if source == "m" else keys.retry_stream(*unit)
    return scripts.get("message_adopt").call(
        {"fence": keys.fence(*unit), "source": stream},
        group=unit.group,
        cursor=cursor,
        count=count,
    )


class Adopted(NamedTuple):
    """A page. `cursor` is that of the next one, `BEGIN` at the end."""

    cursor: str
    entries: int

    @classmethod
    def parse(cls, reply: Reply) -> Adopted:
        """Read OK."""
        return cls(reply.rest[0].decode(), int(reply.rest[1]))
