"""What a connection is made of: sending, reading, errors, address and login.

redis-py's connection classes with the parser and the sending replaced where they hide what a `Link`
must know. Used by `streamqd.store.client` only.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import redis
from redis._parsers import _HiredisParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.credentials import CredentialProvider
from redis.retry import Retry

from streamqd.errors import ConfigError, RedisRefused, RedisUnavailable
from streamqd.store.doubt import Doubt

if TYPE_CHECKING:
    from streamqd import config
    from streamqd.config.topology import Address, Topology

# Redis 6.2 wraps what went wrong inside a script: "ERR Error running script (call to f_<sha>):
# @user_script:12: @user_script: 12: -OOM command not allowed …". Anchored, because the rest of the
# text may quote what a user sent.
_WRAPPED = re.compile(
    r"ERR Error running script \(call to \w+\): @\w+:\d+: (?:@\w+: ?\d+: )?-?([A-Z][A-Z0-9]+) "
)
SENTINEL_CREDENTIAL = "redis-sentinel-password"
# A node that vanished without a word is missed after 14 s of silence, also while nothing is asked:
# an idle worker waits for longer than that.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}

# Where a host and port are reached: (address family, address of the socket) each. The third
# argument is how many seconds it may take. OSError when there is none, or not in time.
Lookup = Callable[[str, int, float], list[tuple[int, tuple[Any, ...]]]]
_URL_OPTIONS = frozenset({"db", "host", "path", "port", "connection_class"})


def resolve(host: str, port: int, _seconds: float) -> list[tuple[int, tuple[Any, ...]]]:
    """Ask the system, which takes the time that it takes: 5 s for each silent name server."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def code_of(text: str) -> str:
    """Return the code of an error reply, as `OOM`, however the server's version wraps it."""
    wrapped = _WRAPPED.match(text)
    return wrapped[1] if wrapped else text.partition(" ")[0]


class _ErrorReply(RedisRefused, redis.ResponseError):
    """An error reply. It is a redis-py error too, so redis-py treats it as a mere answer."""


class _Parser(_HiredisParser):
    """redis-py's parser, but every error reply stays an answer, and one deadline spans all reads.

    The original turns LOADING, NOAUTH and the like into connection errors, which hides the other
    replies of the same pipeline; and its timeout begins anew with every received piece.
    """

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)  # type: ignore[no-untyped-call]
        self.deadline: float | None = None  # None: the socket's own timeout, for each piece
        self.doubt: Doubt | None = None  # of a silence before the deadline

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        return _ErrorReply(code_of(response), response)

    def read_from_socket(self, *args: Any, **kwargs: Any) -> bool:
        if self.deadline is None:
            return bool(super().read_from_socket(*args, **kwargs))  # type: ignore[no-untyped-call]
        # A reply that is already there is taken even when the deadline has passed: the process may
        # have been stopped in between, and the answer is worth more than the timeout.
        left = max(0.0, self.deadline - time.monotonic())
        doubt = self.doubt
        if doubt is None or left <= doubt.seconds:
            return bool(super().read_from_socket(timeout=left))  # type: ignore[no-untyped-call]
        try:
            return bool(super().read_from_socket(timeout=doubt.seconds))  # type: ignore[no-untyped-call]
        except redis.TimeoutError:
            doubt.wait(self._sock, self.deadline)
            return self.read_from_socket()

    def read_all(self, count: int, replies: list[Any]) -> None:
        """Append replies until there are `count`; those before an error are there then."""
        if self._reader is None:
            raise redis.ConnectionError("the connection is not open")
        gets = self._reader.gets
        for _ in range(count - len(replies)):
            while (reply := gets(False)) is NOT_ENOUGH_DATA:
                self.read_from_socket()
            replies.append(reply)


class Transport(AbstractConnection):
    """What a Link needs of a connection beyond redis-py. Mixed into its three classes."""

    counts_bytes = True  # whether send() tells what reached the kernel
    lookup: Lookup = staticmethod(resolve)
    _parser: _Parser
    _sock: Any

    @property
    def address(self) -> str:
        """Where it connects to, for people: never with credentials."""
        return f"{self.host}:{vars(self)['port']}"

    def begin(self, timeout: float) -> None:
        """Start an exchange: sending and all its replies together end within `timeout` seconds."""
        self._parser.deadline = time.monotonic() + timeout

    def watch(self, doubt: Doubt | None) -> None:
        """From now on a long silence is doubted, or not."""
        self._parser.doubt = doubt

    def left(self) -> float:
        """Seconds until the exchange must end; without one, those of the socket."""
        deadline = self._parser.deadline
        if deadline is None:
            return self._patience
        return max(0.001, deadline - time.monotonic())

    @property
    def _patience(self) -> float:
        return float(self.socket_timeout or 0)

    def finish(self) -> None:
        """End what `begin` started."""
        self._parser.deadline = None

    def transmit(self, packed: Sequence[bytes]) -> None:
        """Send packed commands in one write. `sent` stays False while the first is incomplete."""
        raw = packed[0] if len(packed) == 1 else b"".join(packed)
        sock = self._sock
        done = 0
        short = self.left() < self._patience / 2  # else it is not worth a system call
        try:
            if short:
                sock.settimeout(self.left())
            done = sock.send(raw)
            if done < len(raw):
                view = memoryview(raw)
                while done < len(raw):
                    sock.settimeout(self.left())
                    done += sock.send(view[done:])
                short = True
            if short:
                sock.settimeout(self.socket_timeout)
        except OSError as error:
            # A server does not execute half a command. TLS does not tell how much has left.
            sent = done >= len(packed[0]) or not self.counts_bytes
            raise RedisUnavailable(
                f"sending to {self.address} failed: {error}", sent=sent
            ) from error

    def receive(self) -> Any:
        """Read one reply; an error reply is returned, not raised."""
        try:
            return self._parser.read_response(disable_decoding=True)
        except (redis.RedisError, OSError) as error:
            raise RedisUnavailable(f"no reply from {self.address}: {error}", sent=True) from error

    def receive_all(self, count: int, replies: list[Any]) -> None:
        """Append replies, as `receive` returns them, until there are `count`.

        What came before an error is there then. A transaction has many replies.
        """
        try:
            self._parser.read_all(count, replies)
        except (redis.RedisError, OSError) as error:
            raise RedisUnavailable(f"no reply from {self.address}: {error}", sent=True) from error

    def ended(self) -> bool:
        """Tell whether the server has closed the connection while it lay idle."""
        try:
            if not self._parser.can_read(0):
                return False
            self._parser.deadline = 0.0
            self._parser.read_from_socket()
        except redis.TimeoutError:
            return False  # TLS speaks up between replies, without having anything for us
        except (redis.RedisError, OSError):
            return True
        # Somebody left a reply behind; what we would read next is not the answer to us.
        raise RedisUnavailable("the connection holds an unread reply", sent=False)

    def drop(self) -> None:
        """Close the socket for good."""
        self.disconnect()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Lose the socket without a word to the server and without closing the descriptor."""
        sock = self._sock
        self._sock = None
        self._parser.on_disconnect()  # type: ignore[no-untyped-call]
        if sock is not None:
            sock.detach()
        self.pid = os.getpid()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        # redis-py would connect here behind the caller's back; what belonged to the old connection
        # (WATCH, the session in the fence) would silently be gone.
        if self._sock is None:
            raise redis.ConnectionError("the connection is not open")
        super().send_packed_command(command, check_health=check_health)  # type: ignore[no-untyped-call]

    def raw_socket(self) -> Any:
        return self._sock


class _Reach(Connection):
    """redis-py's connecting, but one time limit spans the name and all its addresses."""

    def _connect(self) -> socket.socket:
        wire = cast("Transport", self)
        found = wire.lookup(self.host, self.port, wire.left())
        trouble = OSError("it has no address")
        end = time.monotonic() + min(wire.left(), float(self.socket_connect_timeout or 0))
        for follow, (family, address) in zip(range(len(found) - 1, -1, -1), found, strict=True):
            left = max(0.001, end - time.monotonic())
            sock = None
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)  # fails where IPv6 is disabled
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.socket_keepalive:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in self.socket_keepalive_options.items():
                        sock.setsockopt(socket.IPPROTO_TCP, option, value)
                # An address that hangs must leave time for those behind it.
                sock.settimeout(left / 2 if follow else left)
                sock.connect(address)
                sock.settimeout(wire.left())
            except OSError as error:
                trouble = error
                if sock is not None:
                    sock.close()
                continue
            return sock
        raise trouble


class TcpTransport(Transport, _Reach):
    pass


class TlsTransport(Transport, SSLConnection, _Reach):
    counts_bytes = False


class UnixTransport(Transport, UnixDomainSocketConnection):
    def _connect(self) -> Any:
        self.socket_connect_timeout = self.left()
        return super()._connect()  # type: ignore[no-untyped-call]

    @property
    def address(self) -> str:
        return f"unix://{self.path}"


# --- address and login ----------------------------------------------------------------------------


class _Login(CredentialProvider):
    """User and password, read at every connect, so that a rotated secret needs no restart."""

    def __init__(self, username: str, password: str, path: Path | None) -> None:
        self._username = username
        self._password = password
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str] | tuple[()]:  # type: ignore[override]
        password = self._password
        if self._path is not None:
            password = self._path.read_text(encoding="utf-8").strip("\r\n")
        if self._username:
            return (self._username, password)
        return (password,) if password else ()


def password_path(
    settings: config.Redis,
    environ: Mapping[str, str] = os.environ,
    *,
    credential: str = "redis-password",
) -> Path | None:
    """Return the file that holds the Redis password: systemd's credential, or the configured."""
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if directory:
        path = Path(directory) / credential
        if path.exists():
            return path
    stated = settings.password_file
    if credential == SENTINEL_CREDENTIAL:
        stated = settings.sentinel_password_file
    return Path(stated) if stated else None


@functools.cache
def _options(url: str) -> Mapping[str, Any]:
    """What a URL says. Read before the fork, it costs a worker nothing."""
    return dict(parse_url(url))  # type: ignore[no-untyped-call]


def wire_for(settings: config.Redis, timeout: float) -> Transport:
    """Prepare the connection to the one node that the URL names. Raises ConfigError."""
    try:
        options = dict(_options(settings.url))
    except ValueError as error:
        raise ConfigError([f"redis.url: {error}"]) from error
    username = settings.username or options.pop("username", "")
    password = options.pop("password", "")
    options.pop("username", None)
    foreign = sorted(
        name for name in options if name not in _URL_OPTIONS and not name.startswith("ssl_")
    )
    if foreign:
        raise ConfigError([f"redis.url: unknown option {name!r}" for name in foreign])
    kind: type[Transport] = {
        UnixDomainSocketConnection: UnixTransport,
        SSLConnection: TlsTransport,
    }.get(options.pop("connection_class", None), TcpTransport)
    login = _Login(username, password, password_path(settings))
    return _wire(kind, options, login, settings, timeout)


def wire_to(
    settings: config.Redis,
    where: Topology,
    address: Address,
    timeout: float,
    *,
    to_sentinel: bool = False,
) -> Transport:
    """Prepare the connection to one of several nodes, or to a sentinel, which has its own login."""
    if to_sentinel:
        path = password_path(settings, credential=SENTINEL_CREDENTIAL)
        login = _Login(settings.sentinel_username or "", "", path)
    else:
        username = settings.username or where.username
        login = _Login(username, where.password, password_path(settings))
    options: dict[str, Any] = {"host": address.host, "port": address.port}
    if where.db and not to_sentinel:
        options["db"] = where.db
    return _wire(TlsTransport if where.tls else TcpTransport, options, login, settings, timeout)


def _wire(
    kind: type[Transport],
    options: dict[str, Any],
    login: _Login,
    settings: config.Redis,
    timeout: float,
) -> Transport:
    if kind is not UnixTransport:
        options["socket_keepalive_options"] = KEEPALIVE
    if kind is TlsTransport:
        options.setdefault("ssl_min_version", ssl.TLSVersion.TLSv1_2)
        for option, path in (
            ("ssl_ca_certs", settings.ca_file),
            ("ssl_certfile", settings.cert_file),
            ("ssl_keyfile", settings.key_file),
        ):
            if path:
                options[option] = str(path)
    wire = kind(
        **options,
        credential_provider=login,
        protocol=2,
        decode_responses=False,
        parser_class=_Parser,
        socket_timeout=timeout,
        socket_connect_timeout=min(timeout, settings.connect_timeout),
        retry_on_timeout=False,
        health_check_interval=0,
        driver_info=None,
        maint_notifications_config=None,
    )
    wire.retry = Retry(NoBackoff(), 0)  # one that is given would be copied in depth
    return wire
