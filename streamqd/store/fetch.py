"""The hot path: one round trip that acknowledges, reads, and is fenced by WATCH.

    [XREAD COUNT 1 BLOCK b STREAMS retry stream …]      the doorbell, only when idle
    MULTI; XACK …; XREADGROUP …; EXEC                   refused as a whole when the fence changed
    WATCH fence; HGET fence token                       the ground for the next round

EXEC does nothing when the fence changed after the WATCH whose HGET showed our token; that is the
same guarantee as a script that compares the token first, at the price of a native read. Bytes go
straight between the socket and hiredis: nothing here builds what nobody reads.
"""

from __future__ import annotations

import socket
import time
from typing import Any, NamedTuple

import hiredis

from streamqd.errors import RedisUnavailable, SilentConnection
from streamqd.model import Lease
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

CONSUMER = "w"  # the one consumer name of every group: the fence says who owns

_RECEIVE_BYTES = 256 * 1024

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
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._reader = hiredis.Reader(notEnoughData=Ellipsis)
        self._socket: socket.socket | None = None
        self._pending_acks = 0
        self._received = 0  # bytes that came for the round sent last
        # After so many seconds without a byte the connection is doubted, if its link does that.
        self._patience = link.timeout if link.doubt is None else link.doubt.seconds

    def watch(self) -> bool:
        """Put the fence under WATCH on the present connection. False: it is not ours any more."""
        self._reader = hiredis.Reader(notEnoughData=Ellipsis)
        self._socket = self._link.socket()
        self._send(self._watch)
        return self._mine(self._receive(2)[1])

    def send_round(
        self, main_acks: list[bytes], retry_acks: list[bytes], count: int, doorbell: bytes = b""
    ) -> None:
        """Send one round; the acknowledged ids must be pending entries of ours."""
        parts = [doorbell, _MULTI]
        self._pending_acks = 0
        self._received = 0
        if main_acks:
            parts.append(_pack("XACK", self._stream, self._group, *main_acks))
            self._pending_acks += 1
        if retry_acks:
            parts.append(_pack("XACK", self._retry, self._group, *retry_acks))
            self._pending_acks += 1
        parts += [self._read(count), _EXEC, self._watch]
        self._send(b"".join(parts))

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
        executed, mine = replies[-3], self._mine(replies[-1])
        if not isinstance(executed, list):
            # nil: the fence changed. An error (OOM or MOVED while queueing): nothing was done.
            refusals = [each for each in replies[rang:-2] if isinstance(each, Exception)]
            error = "" if executed is None else str(refusals[0]).partition(" ")[0]
            return FetchResult(False, mine, 0, [], [], error)
        reply = executed[-1]
        acked = sum(n for n in executed[:-1] if isinstance(n, int))
        if isinstance(reply, Exception):
            return FetchResult(True, mine, acked, [], [], str(reply).partition(" ")[0])
        retried: list[Entry] = []
        main: list[Entry] = []
        for name, entries in reply or ():
            if name == self._retry_name:
                retried = entries
            else:
                main = entries
        rung = self._rung(replies[0]) if rang else (b"", b"")
        return FetchResult(True, mine, acked, retried, main, "", self._received, rung)

    def _rung(self, bell: Any) -> tuple[bytes, bytes]:
        # nil: the time was over. An error: the server has sent off who waited, as a replica does.
        found = {name: entries[0][0] for name, entries in bell} if isinstance(bell, list) else {}
        return found.get(self._retry_name, b""), found.get(self._stream.encode(), b"")

    def _mine(self, fence: Any) -> bool:
        """Whether the fence carries our token. A refusal to say so is no answer to that."""
        if isinstance(fence, Exception):
            self._link.close()
            raise RedisUnavailable(f"the fence cannot be read: {fence}", sent=True)
        return bool(fence == self._token)

    @property
    def sock(self) -> socket.socket:
        """For waiting on it together with other things."""
        assert self._socket is not None
        return self._socket

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

    def _send(self, raw: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(raw)
        except OSError as error:
            self._link.close()
            raise RedisUnavailable(f"sending to Redis failed: {error}", sent=True) from error

    def _receive(self, count: int) -> list[Any]:
        """Read so many replies, in one loop: a handler waits for the last of them."""
        reader, sock, buffer = self._reader, self._socket, self._buffer
        assert sock is not None
        if sock.gettimeout() != self._patience:
            sock.settimeout(self._patience)
        gets = reader.gets
        replies: list[Any] = []
        try:
            while len(replies) < count:
                reply = gets(False)
                if reply is not Ellipsis:
                    replies.append(reply)
                    continue
                try:
                    received = sock.recv_into(buffer)
                except TimeoutError:
                    self._doubt(sock)
                    continue
                if not received:
                    raise ConnectionResetError("the server closed the connection")
                self._received += received
                reader.feed(buffer, 0, received)  # type: ignore[arg-type]
        except (OSError, hiredis.ProtocolError) as error:
            self._link.close()
            raise RedisUnavailable(f"reading from Redis failed: {error}", sent=True) from error
        except SilentConnection:
            self._link.close()
            raise
        return replies

    def _doubt(self, sock: socket.socket) -> None:
        """Nothing came: wait on, as long as the server answers nobody else either."""
        if self._link.doubt is None:
            raise TimeoutError("timed out")
        self._link.doubt.wait(sock, time.monotonic() + self._link.timeout - self._patience)
