"""Send commands and receive replies on one socket, with one deadline for each exchange.

Each connection has its own `Transport`. A command that belongs to a WATCH or a transaction can
therefore never be sent on a different connection by mistake.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import hiredis

from streamqd.errors import RedisResponseError, RedisUnavailableError

if TYPE_CHECKING:
    from streamqd.store.endpoint import Endpoint
    from streamqd.store.idle_probe import IdleProbe

# Redis 6.2 wraps an error inside a script: "ERR Error running script (call to f_<sha>):
# @user_script:12: @user_script: 12: -OOM command not allowed …". The pattern only matches at the
# start of the text, because the rest may quote user data.
_IN_SCRIPT = r"Error running script \(call to \w+\): @\w+:\d+: (?:@\w+: ?\d+: )?"
_WRAPPED = re.compile(rf"ERR {_IN_SCRIPT}-?([A-Z][A-Z0-9]+) ")
# The user has no permission for a command inside a script. The first alternative is the text of
# Valkey and Redis 7.2, and the second one that of Redis 6.2 and 7.0.
_FORBIDDEN = re.compile(
    rf"ERR (?:ACL failure in script: |(?:{_IN_SCRIPT})?The user executing the script can't )"
)
# A transaction was queued before the state of the server changed: "EXECABORT Transaction discarded
# because of: READONLY You can't write …". If a command could not be queued, the text ends with "of
# previous errors" instead.
_ABORTED = re.compile(r"EXECABORT Transaction discarded because of: ([A-Z]+) ")
# With these values, a node that disappears silently is noticed after 14 seconds, even if no command
# is outstanding. An idle worker would otherwise wait longer than that.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}
_RECEIVE_BYTES = (16 * 1024, 256 * 1024)  # initial and maximum size of the receive buffer
_LEAST_SECONDS = 0.001  # time limit of a step that is still tried after the deadline
_NUMBERS = frozenset({int, float})
_BACKLOG_SECONDS = 0.01  # pause between attempts on a Unix socket whose backlog is full
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

# A function that resolves a host and a port to pairs of an address family and a socket address. Its
# third argument is the time limit in seconds. It raises OSError if there is no address, or no
# answer in time.
Lookup = Callable[[str, int, float], list[tuple[int, tuple[Any, ...]]]]


class ReplyTooLargeError(Exception):
    """Raised if a reply is larger than allowed."""


def resolve(host: str, port: int, _seconds: float) -> list[tuple[int, tuple[Any, ...]]]:
    """Resolve a host with the operating system.

    This does not respect the time limit. It may take 5 seconds for each name server that is silent.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def pack(command: Sequence[Any]) -> bytes:
    """Pack a command, whose parts may be strings, bytes and numbers, for sending."""
    # Numbers are converted here. If hiredis converted them, it would abort the process when a
    # signal handler raises an exception during the conversion.
    if not _NUMBERS.isdisjoint(map(type, command)):
        command = [str(each) if type(each) in _NUMBERS else each for each in command]
    packed: bytes = hiredis.pack_command(tuple(command))
    return packed


def error_code(text: str) -> str:
    """Return the code of an error reply, such as `OOM`.

    The result is the same for all server versions, even if the error comes from inside a script.
    """
    if _FORBIDDEN.match(text):
        return "NOPERM"
    wrapped = _WRAPPED.match(text) or _ABORTED.match(text)
    return wrapped[1] if wrapped else text.partition(" ")[0]


def reason(error: BaseException) -> str:
    """Return the text of an error without its error number."""
    text = isinstance(error, OSError) and error.strerror
    if text and error.filename:  # type: ignore[attr-defined]
        return f"{error.filename}: {text}"  # type: ignore[attr-defined]
    return (text or str(error)).rstrip(".")


class Transport:
    """A connected socket with a parser for its replies. It cannot be reopened after it is closed.

    For each exchange, one thread calls `begin`, `send` and `receive`. The socket is nonblocking. A
    transport waits for it with a poller, and no wait continues after the deadline of the exchange.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        """Take over a connected socket. `address` is used only in messages."""
        sock.setblocking(False)
        self.sock = sock
        self.address = address
        self.received = 0  # number of bytes received since the connection was opened
        self.is_reply_due = False  # True if a reply is outstanding, even if it was given up
        self.idle_probe: IdleProbe | None = None  # sends a probe if the connection is silent
        self._deadline = 0.0
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._reader = hiredis.Reader(replyError=_response_error, notEnoughData=Ellipsis)
        self._buffer = bytearray(_RECEIVE_BYTES[0])

    def begin(self, seconds: float) -> None:
        """Start an exchange, in which all sending and receiving must finish within `seconds`."""
        self._deadline = time.monotonic() + seconds

    def send(self, packed: Sequence[bytes], needed: int = 1) -> None:
        """Send packed commands together.

        If sending fails, raises RedisUnavailableError. Its `sent` is True only if the first
        `needed` commands may have been sent completely. For a transaction, pass the number of
        commands up to and including its EXEC, because the server executes nothing before that.
        """
        raw = packed[0] if len(packed) == 1 else b"".join(packed)
        done = 0
        self.is_reply_due = True
        try:
            if self.sock.fileno() < 0:  # otherwise, TLS would write to a reused descriptor
                raise ConnectionAbortedError("the connection was closed")
            while done < len(raw):
                try:
                    done += self.sock.send(memoryview(raw)[done:] if done else raw)
                except ssl.SSLWantReadError:
                    self._wait_readable()
                except _WOULD_BLOCK:
                    self._wait_writable()
        except OSError as error:
            # A server executes only complete commands. TLS does not report how many bytes were
            # sent, so assume that all were.
            enough = sum(map(len, packed[:needed]))
            sent = done >= enough or (self._tls and self.sock.fileno() >= 0)
            raise RedisUnavailableError(
                f"sending to {self.address} failed: {reason(error)}", sent=sent
            ) from error

    def receive(
        self,
        count: int,
        replies: list[Any],
        *,
        silence: float | None = None,
        bytes_max: float = float("inf"),
    ) -> None:
        """Append replies to `replies` until it contains `count`.

        An error reply is appended as a RedisResponseError. If `silence` is given, the exchange has
        no total time limit, as long as data arrives at least every `silence` seconds. Raises
        ReplyTooLargeError if more than `bytes_max` bytes arrive, and RedisUnavailableError if a
        reply is missing. Replies that were received before the error stay in `replies`.
        """
        gets, most = self._reader.gets, self.received + bytes_max
        try:
            while len(replies) < count:
                reply = gets(False)
                if reply is not Ellipsis:
                    replies.append(reply)
                    continue
                if self.received > most:
                    raise ReplyTooLargeError
                if silence is not None:
                    self.begin(silence)
                self._read()
            self.is_reply_due = False
        except (OSError, hiredis.ProtocolError) as error:
            raise RedisUnavailableError(
                f"no reply from {self.address}: {reason(error)}", sent=True
            ) from error

    def is_closed(self) -> bool:
        """Return True if the connection can no longer be used.

        This is the case if the server has closed it while it was idle, or if a caller did not wait
        for all replies of the last exchange. Raises RedisUnavailableError if data has arrived that
        does not belong to any exchange.
        """
        if self.is_reply_due:
            return True
        if not self._reader.has_data():
            if not self._has_buffered_data() and not self._poller.poll(0):
                return False
            try:
                if not self.sock.recv(1):
                    return True
            except _WOULD_BLOCK:
                return False  # the data was a record of TLS itself
            except OSError:
                return True
        # Raise an error. Otherwise, the next exchange would take this data for its own reply.
        raise RedisUnavailableError("the connection holds an unread reply", sent=False)

    def close(self) -> None:
        """Close the connection, even if a forked child still has its file descriptor open."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def detach(self) -> int:
        """Abandon the socket without closing it, and return its file descriptor."""
        return self.sock.detach()

    def _read(self) -> None:
        """Wait for more data, and pass it to the parser."""
        size, again = None, False
        while size is None:
            if not again and not self._has_buffered_data():
                self._wait_readable()
            again = False
            try:
                size = self.sock.recv_into(self._buffer)
            except ssl.SSLWantWriteError:
                self._wait_writable()
                again = True  # the next attempt also sends the data that TLS has to write
            except _WOULD_BLOCK:
                continue
        if not size:
            raise ConnectionResetError("the server closed the connection")
        self.received += size
        self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]
        if size == len(self._buffer) < _RECEIVE_BYTES[1]:
            self._buffer = bytearray(4 * size)

    def _has_buffered_data(self) -> bool:
        """Return True if TLS has buffered decrypted data, which the poller cannot see."""
        return self._tls and bool(self.sock.pending())  # type: ignore[attr-defined]

    def _wait_readable(self) -> None:
        if self.sock.fileno() < 0:
            raise ConnectionAbortedError("the connection was closed")
        # Even after the deadline, check whether data has arrived. The process may have been stopped
        # in the meantime, and a late answer is better than a timeout.
        left = max(0.0, self._deadline - time.monotonic())
        probe = self.idle_probe
        if probe is not None and left > probe.seconds:
            if not self._poller.poll(probe.seconds * 1000):
                probe.await_reply(self.sock, self._deadline)
        elif not self._poller.poll(left * 1000):
            raise TimeoutError("it timed out")

    def _wait_writable(self) -> None:
        poller = select.poll()
        poller.register(self.sock, select.POLLOUT)
        if not poller.poll(max(0.0, self._deadline - time.monotonic()) * 1000):
            raise TimeoutError("it timed out")


def _response_error(text: str) -> RedisResponseError:
    return RedisResponseError(error_code(text), text)


# --- connecting -----------------------------------------------------------------------------------


def resolve_addresses(endpoint: Endpoint, end: float, lookup: Lookup) -> list[tuple[int, Any]]:
    """Return the addresses of a server, each as an address family and a socket address.

    Raises OSError if the name cannot be resolved, or UnicodeError for some invalid names.
    """
    if endpoint.path:
        return [(socket.AF_UNIX, endpoint.path)]
    return list(lookup(endpoint.host, endpoint.port, _seconds_left(end)))


def connect(
    endpoint: Endpoint, addresses: Sequence[tuple[int, Any]], end: float, patience: float
) -> Transport:
    """Connect to a server before `end` (monotonic).

    Opening the TCP connection may take up to `patience` seconds of this time. Raises OSError, for
    example if the certificate is not trusted, or UnicodeError for some invalid names.
    """
    # A Unix socket whose backlog is full may have room later, so use all the time for it.
    sock = _dial(addresses, end if endpoint.path else min(end, time.monotonic() + patience))
    if endpoint.tls:
        sock = _start_tls(sock, endpoint, end)
    return Transport(sock, str(endpoint))


def _dial(addresses: Sequence[tuple[int, Any]], end: float) -> socket.socket:
    """Connect to the first address that answers. All attempts share one time limit."""
    last_error = OSError("it has no address")
    for follow, (family, address) in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)  # fails for IPv6 where it is disabled
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE.items():
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
            # Use only half of the remaining time if there are more addresses, so that some is left
            # for them if this one does not answer.
            sock.settimeout(_seconds_left(end) / 2 if follow else _seconds_left(end))
            _reach(sock, address, end)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if not isinstance(error, OSError):
                raise
            last_error = error
            continue
        return sock
    raise last_error


def _reach(sock: socket.socket, address: Any, end: float) -> None:
    """Connect a socket to an address.

    If the address is a Unix socket whose backlog is full, try again until `end` (monotonic),
    because it may have room later.
    """
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:
            if time.monotonic() + _BACKLOG_SECONDS >= end:
                raise TimeoutError("it accepts no connections: its backlog is full") from None
        time.sleep(_BACKLOG_SECONDS)


def _start_tls(sock: socket.socket, endpoint: Endpoint, end: float) -> ssl.SSLSocket:
    """Perform the TLS handshake.

    The certificate files are read each time, so a new file takes effect with the next connection.
    """
    try:
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if endpoint.cert_file or endpoint.key_file:
            context.load_cert_chain(endpoint.cert_file or "", endpoint.key_file)
        if endpoint.ca_file:
            context.load_verify_locations(endpoint.ca_file)
        sock.settimeout(_seconds_left(end))
        return context.wrap_socket(sock, server_hostname=endpoint.host)
    except BaseException:
        sock.close()
        raise


def _seconds_left(end: float) -> float:
    return max(_LEAST_SECONDS, end - time.monotonic())
