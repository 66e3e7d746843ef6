"""Script calls that take over entries which other clients of a group left pending."""

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
    """Build a call that takes over one page of the entries that other clients left pending.

    `source` is "m" for the partition stream or "r" for the retry stream. To take over the next
    page, pass the cursor that the previous call returned.
    """
    stream = keys.source(*assignment) if source == "m" else keys.retry_stream(*assignment)
    return scripts.get("message_adopt").call(
        {"fence": keys.fence(*assignment), "source": stream},
        group=assignment.group,
        cursor=cursor,
        count=count,
    )


class Adopted(NamedTuple):
    """The number of entries taken over from one page, and the cursor of the next page.

    After the last page, `cursor` is `BEGIN` again.
    """

    cursor: str
    entries: int

    @classmethod
    def parse(cls, reply: Reply) -> Adopted:
        """Parse an OK reply."""
        return cls(reply.values[0].decode(), int(reply.values[1]))
