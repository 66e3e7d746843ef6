"""Script calls that take over the pending entries of other clients of a group."""

from __future__ import annotations

from typing import NamedTuple

from streamqd.model import Assignment
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

BEGIN = "0-0"
PAGE = 256


def adopt(
    keys: Keys, assignment: Assignment, source: str, cursor: str = BEGIN, count: int = PAGE
) -> Call:
    """Take over one page of pending entries. `source`: m = partition stream, r = retry stream."""
    stream = keys.source(*assignment) if source == "m" else keys.retry_stream(*assignment)
    return scripts.get("message_adopt").call(
        {"fence": keys.fence(*assignment), "source": stream},
        group=assignment.group,
        cursor=cursor,
        count=count,
    )


class Adopted(NamedTuple):
    """The result for one page. `cursor` is that of the next page, `BEGIN` after the last one."""

    cursor: str
    entries: int

    @classmethod
    def parse(cls, reply: Reply) -> Adopted:
        """Parse the reply OK."""
        return cls(reply.values[0].decode(), int(reply.values[1]))
