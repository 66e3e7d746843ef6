"""The hot path: one round trip that acknowledges and reads entries, fenced by WATCH.

    [XREAD COUNT 1 BLOCK b STREAMS retry stream …]      the long poll, only when idle
    MULTI; XACK …; XREADGROUP …; EXEC                   refused as a whole if the fence changed
    WATCH fence; HGET fence token                       prepares the next round

A round is executed only while the worker owns the assignment. The HGET of the previous round must
have returned the worker's token, and EXEC does nothing if the fence has changed since the WATCH of
that round. A script that compares the token first would give the same guarantee, but a native read
is cheaper. To save time, bytes pass directly between the socket and hiredis, without intermediate
objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.model import Lease, RawEntry
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.transport import Transport

if TYPE_CHECKING:
    import socket

# All workers use the same consumer name, because the fence already identifies the owner.
CONSUMER = "w"


def _pack(*command: str | bytes) -> bytes:
    # The type stub accepts only tuples of one element, but the function accepts any length.
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


_MULTI = _pack("MULTI")
_EXEC = _pack("EXEC")


class FetchResult(NamedTuple):
    """The result of one round.

    `executed` is False if EXEC was refused, either because the fence had changed or because the
    server rejected a command. In that case, nothing was acknowledged or read. `owned` is True if
    the fence still contains the worker's token. `error` is the code of the server's error, such as
    NOGROUP, or '' if there was none.

    `received` is the size of all replies in bytes, including that of the long poll, so the entries
    are never larger than this. `reported` holds the IDs that the long poll found, first in the
    retry stream and then in the partition. Each is b"" if it found nothing.
    """

    executed: bool
    owned: bool
    acked: int
    retried: list[RawEntry]
    main: list[RawEntry]
    error: str
    received: int = 0
    reported: tuple[bytes, bytes] = (b"", b"")


class Fetcher:
    """A reader of one assignment on one connection, fenced by the worker's token.

    Whenever a new connection was opened, call `watch` before the first round.
    """

    def __init__(self, link: Connection, keys: Keys, lease: Lease) -> None:
        assignment = lease.assignment
        self._node = link.node
        self._token = lease.token.encode()
        self._group = assignment.group
        self._stream = keys.source(*assignment)
        self._retry = keys.retry_stream(*assignment)
        fence = keys.fence(*assignment)
        self._retry_name = self._retry.encode()
        self._watch = _pack("WATCH", fence) + _pack("HGET", fence, "token")
        self._reads: dict[int, bytes] = {}
        # The connection on which the fence is watched. Rounds must use this connection, because on
        # any other one they would not be fenced.
        self._transport: Transport | None = None
        self._pending_acks = 0
        self._before = 0  # bytes that the connection had received before the last round was sent

    def watch(self) -> bool:
        """Start to WATCH the fence on the current connection.

        Return False if the fence contains another token, which means that the assignment is lost.
        """
        self._transport = self._node.open_transport()
        self._send([self._watch])
        return self._owns_fence(*self._receive(2))

    def send_round(
        self, main_acks: list[bytes], retry_acks: list[bytes], count: int, long_poll: bytes = b""
    ) -> None:
        """Send one round, which acknowledges entries and reads up to `count` more per stream.

        `main_acks` and `retry_acks` must be IDs of entries that are pending for this worker. To
        wait at the server for an entry before the read, pass the result of `self.long_poll`.
        """
        parts = [long_poll, _MULTI] if long_poll else [_MULTI]
        self._pending_acks = 0
        if main_acks:
            parts.append(_pack("XACK", self._stream, self._group, *main_acks))
            self._pending_acks += 1
        if retry_acks:
            parts.append(_pack("XACK", self._retry, self._group, *retry_acks))
            self._pending_acks += 1
        parts += [self._read(count), _EXEC, self._watch]
        self._send(parts)

    def long_poll(self, last_retry: bytes, last_main: bytes, block: float) -> bytes:
        """Return the packed long poll, a read that waits for an entry without changing any state.

        It waits for an entry after `last_retry` in the retry stream or after `last_main` in the
        partition, for up to `block` seconds.
        """
        return _pack(
            *("XREAD", "COUNT", "1", "BLOCK", str(max(1, int(block * 1000)))),
            *("STREAMS", self._retry, self._stream, last_retry, last_main),
        )

    def receive_round(self, *, polled: bool) -> FetchResult:
        """Read the replies to the last round.

        `polled` must be True if the round started with a long poll.
        """
        # The server sends one reply each to the long poll (if any), MULTI, each queued command,
        # EXEC, WATCH and HGET.
        replies = self._receive(polled + 2 + self._pending_acks + 3)
        executed, owned = replies[-3], self._owns_fence(*replies[-2:])
        if not isinstance(executed, list):
            # A nil reply means that the fence has changed. An error, such as OOM or MOVED for a
            # queued command, means that no command was executed.
            refusals = [
                each.code for each in replies[polled:-2] if isinstance(each, RedisResponseError)
            ]
            error = "" if executed is None else refusals[0]
            return FetchResult(False, owned, 0, [], [], error)
        reply = executed[-1]
        acked = sum(n for n in executed[:-1] if isinstance(n, int))
        if isinstance(reply, RedisResponseError):
            return FetchResult(True, owned, acked, [], [], reply.code)
        retried: list[RawEntry] = []
        main: list[RawEntry] = []
        for name, entries in reply or ():
            if name == self._retry_name:
                retried = entries
            else:
                main = entries
        reported = self._last_entries(replies[0]) if polled else (b"", b"")
        received = self._watched_on.received - self._before
        return FetchResult(True, owned, acked, retried, main, "", received, reported)

    def _last_entries(self, poll: Any) -> tuple[bytes, bytes]:
        # A nil reply means that no entry arrived in time. An error means that the server has
        # unblocked its clients, which it does when it turns from a master into a replica.
        found = {name: entries[0][0] for name, entries in poll} if isinstance(poll, list) else {}
        return found.get(self._retry_name, b""), found.get(self._stream.encode(), b"")

    def _owns_fence(self, watched: Any, fence: Any) -> bool:
        """Return True if the fence contains the worker's token.

        Raises RedisUnavailableError if the fence cannot be watched.
        """
        for reply in (watched, fence):
            if isinstance(reply, RedisResponseError):
                self._node.close()
                raise RedisUnavailableError(f"the fence cannot be watched: {reply}", sent=True)
        return bool(fence == self._token)

    @property
    def sock(self) -> socket.socket:
        """The socket, for a caller that waits for several file descriptors."""
        return self._watched_on.sock

    @property
    def _watched_on(self) -> Transport:
        assert self._transport is not None
        return self._transport

    def _read(self, count: int) -> bytes:
        packed = self._reads.get(count)
        if packed is None:
            packed = _pack(
                *("XREADGROUP", "GROUP", self._group, CONSUMER, "COUNT", str(count)),
                *("STREAMS", self._retry, self._stream, ">", ">"),
            )
            if len(self._reads) < 1024:
                self._reads[count] = packed
        return packed

    def _send(self, packed: list[bytes]) -> None:
        self._before = self._watched_on.received
        self._node.send(packed, on=self._watched_on)

    def _receive(self, count: int) -> list[Any]:
        replies: list[Any] = []
        self._node.receive(count, replies, on=self._watched_on, silence=self._node.timeout)
        return replies
