"""One page of a stream, bounded by bytes while it comes in.

A count of entries says nothing of their size: a thousand small ones may be followed by a thousand
large ones. So what arrives is counted, and a reply that gets too heavy is left unread: the
connection is closed, and fewer entries are asked for on a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamqd.errors import RedisRefused
from streamqd.store.transport import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamqd.spark.entries import Entry
    from streamqd.store.client import Connection


def read_page(
    link: Connection, command: Sequence[str | int], bytes_max: int
) -> tuple[list[Entry], int]:
    """Run a command that answers entries; return them, and the bytes that came.

    Raises OverweightError when there are more than `bytes_max`, RedisRefused, RedisUnavailable.
    """
    replies: list[Any] = []
    transport = link.ready()
    before = transport.received
    try:
        transport.begin(link.timeout)
        transport.send([pack(command)])
        transport.receive(1, replies, silence=link.timeout, bytes_max=bytes_max)
    except BaseException:
        link.close()  # what is still under way must not be taken for the answer to the next
        raise
    link.judge(replies)
    [reply] = replies
    if isinstance(reply, RedisRefused):
        raise reply
    return reply, transport.received - before
