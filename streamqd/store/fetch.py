"""The hot path: one round trip that acknowledges, reads, and is fenced by WATCH.

    [XREAD COUNT 1 BLOCK b STREAMS retry stream …]      the doorbell, only when idle
    MULTI; XACK …; XREADGROUP …; EXEC                   refused as a whole when the fence changed
    WATCH fence; HGET fence token                       the ground for the next round

EXEC does nothing when the fence changed after the WATCH whose HGET showed our token; that is the
same guarantee as a script that compares the token first, at the price of a native read. Bytes go
straight between the socket and hiredis: nothing here builds what nobody reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.model import Lease
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.transport import Transport

if TYPE_CHECKING:
    import socket

CONSUMER = "w"  # the one consumer name of every group: the fence says who owns

Entry = list[Any]  # [id, [name, value, …]]


def _pack(*command: str | bytes) -> bytes:
    # The stub takes a tuple of one element only; the function takes any.
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


_MULTI = _pack("MULTI")
_EXEC = _pack("EXEC")


class FetchResult(NamedTuple):
    """The answer of one round.

    `executed` is False when EXEC refused (the fence changed in between) or when the read could not
    be done; then nothing was acknowledged either. `mine` tells whether the fence carries our token
    now. `error` is the code of an error reply of the read, as NOGROUP. `received` are the bytes
    that came, with those of the doorbell, and never fewer than the entries have. `rung` are the ids
    for which the doorbell rang, of the retry stream and of the partition, b"" where it did not.
    """

    executed: bool
    mine: bool
    acked: int
    retried: list[Entry]
    main: list[Entry]
    error: str
    received: int = 0
    rung: tuple[bytes, bytes] = (b"", b"")


class Fetcher:
    """The fenced reader of one unit on one connection. Needs `watch` after each new connection."""

    def __init__(self, link: Connection, keys: Keys, lease: Lease) -> None:
        unit = lease.unit
        self._link = link
        self._token = lease.token.encode()
        self._group = unit.group
        self._stream = keys.source(*unit)
        self._retry = keys.retry_stream(*unit)
        fence = keys.fence(*unit)
        self._retry_name = self._retry.encode()
        self._watch = _pack("WATCH", fence) + _pack("HGET", fence, "token")
        self._reads: dict[int, bytes] = {}
        # Where the fence is watched. Rounds go there only: on a new connection none is fenced.
        self._transport: Transport | None = None
        self._pending_acks = 0
        self._before = 0  # bytes that had come on it before the round sent last

    def watch(self) -> bool:
        """Put the fence under WATCH on the present connection. False: it is not ours any more."""
        self._transport = self._link.ready()
        self._send([self._watch])
        return self._mine(*self._receive(2))

    def send_round(
        self, main_acks: list[bytes], retry_acks: list[bytes], count: int, doorbell: bytes = b""
    ) -> None:
        """Send one round; the acknowledged ids must be pending entries of ours."""
        parts = [doorbell, _MULTI] if doorbell else [_MULTI]
        self._pending_acks = 0
        if main_acks:
            parts.append(_pack("XACK", self._stream, self._group, *main_acks))
            self._pending_acks += 1
        if retry_acks:
            parts.append(_pack("XACK", self._retry, self._group, *retry_acks))
            self._pending_acks += 1
        parts += [self._read(count), _EXEC, self._watch]
        self._send(parts)

    def doorbell(self, last_retry: bytes, last_main: bytes, block: float) -> bytes:
        """Return the packed doorbell: a read that moves no state and answers when there is one."""
        return _pack(
            *("XREAD", "COUNT", "1", "BLOCK", str(max(1, int(block * 1000)))),
            *("STREAMS", self._retry, self._stream, last_retry, last_main),
        )

    def receive_round(self, *, rang: bool) -> FetchResult:
        """Read the answers of the round sent last; `rang` when it began with the doorbell."""
        # The bell; MULTI, and QUEUED of each command; EXEC; WATCH, HGET.
        replies = self._receive(rang + 2 + self._pending_acks + 3)
        executed, mine = replies[-3], self._mine(*replies[-2:])
        if not isinstance(executed, list):
            # nil: the fence changed. An error (OOM or MOVED while queueing): nothing was done.
            refusals = [each.code for each in replies[rang:-2] if isinstance(each, RedisRefused)]
            error = "" if executed is None else refusals[0]
            return FetchResult(False, mine, 0, [], [], error)
        reply = executed[-1]
        acked = sum(n for n in executed[:-1] if isinstance(n, int))
        if isinstance(reply, RedisRefused):
            return FetchResult(True, mine, acked, [], [], reply.code)
        retried: list[Entry] = []
        main: list[Entry] = []
        for name, entries in reply or ():
            if name == self._retry_name:
                retried = entries
            else:
                main = entries
        rung = self._rung(replies[0]) if rang else (b"", b"")
        received = self._watched_on.received - self._before
        return FetchResult(True, mine, acked, retried, main, "", received, rung)

    def _rung(self, bell: Any) -> tuple[bytes, bytes]:
        # nil: the time was over. An error: the server has sent off who waited, as a replica does.
        found = {name: entries[0][0] for name, entries in bell} if isinstance(bell, list) else {}
        return found.get(self._retry_name, b""), found.get(self._stream.encode(), b"")

    def _mine(self, watched: Any, fence: Any) -> bool:
        """Whether the fence is watched and carries our token. A refusal is no answer to that."""
        for reply in (watched, fence):
            if isinstance(reply, RedisRefused):
                self._link.close()
                raise RedisUnavailable(f"the fence cannot be watched: {reply}", sent=True)
        return bool(fence == self._token)

    @property
    def sock(self) -> socket.socket:
        """For waiting on it together with other things."""
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
        transport = self._watched_on
        self._before = transport.received
        transport.begin(self._link.timeout)
        try:
            transport.send(packed)
        except RedisUnavailable:
            self._link.close()
            raise

    def _receive(self, count: int) -> list[Any]:
        replies: list[Any] = []
        try:
            self._watched_on.receive(count, replies, silence=self._link.timeout)
        except RedisUnavailable:
            self._link.close()
            raise
        return replies
