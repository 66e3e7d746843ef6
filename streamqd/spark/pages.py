"""One page of a stream, bounded by bytes while it comes in.

A count of entries says nothing of their size: a thousand small ones may be followed by a thousand
large ones. So what arrives is counted, and a reply that gets too heavy is left unread: the
connection is closed, and fewer entries are asked for on a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hiredis

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store.wire import code_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamqd.spark.entries import Entry
    from streamqd.store.client import Connection

_RECEIVE_BYTES = 1 << 18
_buffer = bytearray(_RECEIVE_BYTES)


class OverweightError(Exception):
    """The reply is larger than was allowed."""


def read_page(
    link: Connection, command: Sequence[str | int], bytes_max: int
) -> tuple[list[Entry], int]:
    """Run a command that answers entries; return them, and the bytes that came.

    Raises OverweightError when there are more than `bytes_max`, RedisRefused, RedisUnavailable.
    """
    sock = link.socket()
    reader = hiredis.Reader(notEnoughData=Ellipsis)
    received = 0
    reply: Any = Ellipsis
    try:
        packed: Any = tuple(map(str, command))
        sock.sendall(hiredis.pack_command(packed))
        while reply is Ellipsis:
            if received > bytes_max:
                raise OverweightError
            size = sock.recv_into(_buffer)
            if not size:
                raise ConnectionResetError("the server closed the connection")
            received += size
            reader.feed(_buffer, 0, size)  # type: ignore[arg-type]
            reply = reader.gets(False)
    except (OSError, hiredis.ProtocolError) as error:
        link.close()
        raise RedisUnavailable(f"no reply from {link.address}: {error}", sent=True) from error
    except BaseException:
        link.close()  # what is still under way must not be taken for the answer to the next
        raise
    if isinstance(reply, Exception):
        refused = RedisRefused(code_of(str(reply)), str(reply))
        link.judge([refused])
        raise refused
    return reply, received
