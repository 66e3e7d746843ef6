"""The connection to one server. After a failure, it reports whether a command may have run.

No command is repeated automatically. A repeated XADD would write a duplicate, and a repeated
XREADGROUP would leave messages pending that no worker has received. Instead,
`RedisUnavailableError.sent` is True if the server may have executed the command. Only the caller
knows whether the command can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from streamqd.errors import RedisResponseError, RedisUnavailableError, RefusalKind
from streamqd.store import transport
from streamqd.store.endpoint import Endpoint
from streamqd.store.idle_probe import PROBE, Attempts, IdleProbe
from streamqd.store.replies import check_replies, refusal_kind
from streamqd.store.transport import Lookup, Transport, pack, reason, resolve

if TYPE_CHECKING:
    import socket

    from streamqd import config

# After one of these replies, the connection is closed, because its login is no longer valid or the
# node has become a replica.
DROP_AFTER = frozenset({RefusalKind.LOGIN, RefusalKind.REPLICA})
NEVER = float("inf")  # no time limit
Key = TypeVar("Key", bound=str | bytes)
_NAME = re.compile(r"[!-~]{1,200}")


def _ignore(*_: Any) -> None:
    """Do nothing. This is the default for the optional functions of a `Finder`."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The settings of a connection, which apply to all servers that it uses."""

    settings: config.Redis
    # Time limit of one exchange in seconds. It includes the time to connect, which is also limited
    # by `connect_timeout`. The limit is kept only if `lookup` respects its own time limit.
    timeout: float
    name: str  # the name that CLIENT LIST shows
    lookup: Lookup = resolve
    # Seconds of silence before a probe, or None to send no probes. See `store/idle_probe.py`.
    probe_after: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"not a connection name: {self.name!r}")


@dataclass(frozen=True, slots=True)
class Finder:
    """The functions that find the server to connect to. They run for each new connection."""

    label: str  # where the server is looked up, for display in errors
    # Returns the server. It takes a deadline (monotonic), and may raise RedisUnavailableError.
    find: Callable[[float], Endpoint]
    # Checks that the server is the right one. Raises RedisUnavailableError or RedisResponseError.
    verify: Callable[[Transport], None] = _ignore
    failed: Callable[[Endpoint], None] = _ignore  # called if no connection could be opened
    refused: Callable[[Endpoint, RedisResponseError], None] = (
        _ignore  # called with a reply that made the connection unusable
    )
    # Refusals which mean that the command was not executed, because the server cannot do so now,
    # for example because another one has become the master.
    not_executed: frozenset[RefusalKind] = frozenset()
    connect_seconds: float = (
        NEVER  # time limit for opening the connection after the server was found
    )


def fixed_finder(endpoint: Endpoint) -> Finder:
    """Return a finder that always returns the same server."""
    return Finder(str(endpoint), lambda _end: endpoint)


class Node:
    """The route to one server. The connection is opened when it is first used.

    A node belongs to one process and may be used by only one of its threads. After a fork, the
    child must call `detach` first. A node uses RESP2, returns replies as raw bytes and never
    repeats a command. After a RedisUnavailableError, the connection is closed, and the next use
    opens a new one. `opened` is the number of connections opened so far.
    """

    def __init__(self, options: ConnectionOptions, finder: Finder) -> None:
        """Prepare the route without connecting."""
        self.options = options
        self.timeout = options.timeout
        self.opened = 0
        self.idle_probe = (
            None if options.probe_after is None else IdleProbe(options.probe_after, self._probe)
        )
        self._attempts = None if options.probe_after is None else Attempts()
        self.endpoint: Endpoint | None = None  # the server of the last attempt to connect
        self.transport: Transport | None = None  # the open connection
        self._pid = os.getpid()
        self._end = NEVER
        self._finder = finder
        self._drop_after = DROP_AFTER | finder.not_executed

    # --- the interface of a route: see `Connection` ---

    def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one write, and return their replies in the same order.

        An error reply is a RedisResponseError in the result. Raises RedisUnavailableError.
        """
        self.post(commands)
        return self.collect(len(commands))

    exchange_each = exchange  # a single node answers all commands or none

    def masters(self) -> list[Node]:
        return [self]

    def node_for_key(self, key: str) -> str:  # noqa: ARG002 - only a cluster uses the key
        return ""

    def group_by_node(self, keys: Sequence[Key]) -> list[list[Key]]:
        return [list(keys)] if keys else []

    @property
    def node(self) -> Node:
        return self

    @property
    def connected(self) -> bool:
        return self.transport is not None

    @property
    def address(self) -> str:
        label, found = self._finder.label, str(self.endpoint or "")
        return label if found in ("", label) else f"{label}, {found}"

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._drop()
        else:
            self.detach()

    def detach(self) -> None:
        if self.transport is not None:
            self.transport.detach()
        self.transport = None
        self._pid = os.getpid()

    def disable(self) -> None:
        if self.transport is not None:
            os.close(self.transport.detach())
        self.transport = None

    def set_deadline(self, end: float) -> None:
        """Set the time (monotonic) by which every later operation must finish."""
        self._end = end

    def open(self) -> None:
        check_process(self._pid, self.options.name)
        if self.transport is not None:
            return
        endpoint = self.endpoint = self._finder.find(self._end)
        end = time.monotonic() + self._seconds_left(min(self.timeout, self._finder.connect_seconds))
        try:
            self.transport = self._connect(endpoint, end)
        except RedisResponseError as error:
            self._finder.failed(endpoint)
            answer = str(error).rstrip(".")
            text = f"{self.address} refused the connection: {answer}{_advice(error)}"
            raise RedisUnavailableError(text, sent=False) from error
        except (RedisUnavailableError, OSError, UnicodeError) as error:
            self._finder.failed(endpoint)
            raise RedisUnavailableError(
                f"cannot connect to {self.address}: {reason(error.__cause__ or error)}", sent=False
            ) from error
        # The probe is set only after the login, because the login has its own time limit.
        self.transport.idle_probe = self.idle_probe
        self.opened += 1

    # --- the connection ---

    def _connect(self, endpoint: Endpoint, end: float) -> Transport:
        addresses = transport.resolve_addresses(endpoint, end, self.options.lookup)
        started = time.monotonic()
        if self._attempts is not None:
            end = min(end, started + self._attempts.limit())
        try:
            return self._log_in(endpoint, addresses, end)
        finally:
            if self._attempts is not None:
                self._attempts.record(time.monotonic() - started)

    def _log_in(
        self, endpoint: Endpoint, addresses: Sequence[tuple[int, Any]], end: float
    ) -> Transport:
        connect_seconds = min(self.timeout, self.options.settings.connect_timeout)
        opened = transport.connect(endpoint, addresses, end, connect_seconds)
        try:
            opened.begin(end - time.monotonic())
            commands = [*endpoint.login(), ("CLIENT", "SETNAME", self.options.name)]
            replies: list[Any] = []
            try:
                opened.send([pack(command) for command in commands])
                opened.receive(len(commands), replies)
            except RedisUnavailableError:
                # A server that rejects a client sends the reason and closes the connection, without
                # reading the commands. Report that reason if it has arrived.
                with contextlib.suppress(RedisUnavailableError):
                    opened.receive(len(replies) + 1, replies)
                check_replies(replies)
                raise
            if (
                isinstance(replies[-1], RedisResponseError)
                and replies[-1].kind is RefusalKind.FORBIDDEN
            ):
                # A restricted user may have no permission to set the name of the connection. The
                # name is optional, so ignore the error.
                del replies[-1]
            check_replies(replies)
            self._finder.verify(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    def open_transport(self) -> Transport:
        """Return the open connection, for a caller that sends and receives on it directly.

        If there is no connection, or if the server has closed it while it was idle, a new one is
        opened. If the caller is interrupted before it has read all replies, it must close the
        connection. Raises RedisUnavailableError with `sent=False` if no connection can be opened.
        """
        check_process(self._pid, self.options.name)
        try:
            if self.transport is None or self.transport.is_closed():
                self._drop()
                self.open()
        except RedisUnavailableError:
            self._drop()
            raise
        assert self.transport is not None
        return self.transport

    def socket(self) -> socket.socket:
        """Return the socket, which is nonblocking. Connect first if necessary."""
        self.open()
        assert self.transport is not None
        return self.transport.sock

    def fileno(self) -> int | None:
        """Return the file descriptor of the socket, or None if there is no connection."""
        return None if self.transport is None else self.transport.sock.fileno()

    def post(self, commands: Iterable[Sequence[Any]]) -> None:
        """Send commands, whose replies the caller must then read with `collect`.

        Raises RedisUnavailableError if the commands cannot be sent.
        """
        self.send([pack(command) for command in commands])

    def execute_limited(self, *args: Any, bytes_max: float) -> tuple[Any, int]:
        """Run a command whose reply may be large. Return the reply and its size in bytes.

        The reply may take any time, as long as some data arrives at least every `timeout` seconds.
        Raises ReplyTooLargeError if the reply is larger than `bytes_max`. The connection is then
        closed, because the rest of the reply is not read. Also raises RedisResponseError and
        RedisUnavailableError.
        """
        self.post((args,))
        assert self.transport is not None
        opened = self.transport
        before = opened.received
        [reply] = self.collect(1, silence=self.timeout, bytes_max=bytes_max)
        if isinstance(reply, RedisResponseError):
            raise reply
        return reply, opened.received - before

    def collect(
        self, count: int, *, silence: float | None = None, bytes_max: float = NEVER
    ) -> list[Any]:
        """Read the replies to the commands that `post` has sent.

        See `Transport.receive` for the arguments and errors. Also raises RedisUnavailableError if a
        reply shows that this server can no longer execute the commands, for example because it has
        become a replica.
        """
        replies: list[Any] = []
        self.receive(count, replies, silence=silence, bytes_max=bytes_max)
        if self.close_if_unusable(replies):
            not_done = [each for each in replies if refusal_kind(each) in self._finder.not_executed]
            if not_done:
                sent = len(not_done) < len(replies)
                raise RedisUnavailableError(f"{self.address}: {not_done[0]}", sent=sent)
        return replies

    def send(
        self, packed: Sequence[bytes], needed: int = 1, *, on: Transport | None = None
    ) -> None:
        """Send packed commands. The caller must then call `receive`.

        The commands are sent on the current connection, which is opened if necessary. To send them
        only on a particular connection, such as the one on which a key is watched, pass it as `on`.
        Raises RedisUnavailableError. See `Transport.send` for `needed`, which affects its `sent`.
        """
        check_process(self._pid, self.options.name)
        try:
            opened = on or self.open_transport()
            opened.begin(self._seconds_left(self.timeout))
            opened.send(packed, needed)
        except BaseException:
            self._drop()
            raise

    def receive(
        self,
        count: int,
        replies: list[Any],
        *,
        on: Transport | None = None,
        silence: float | None = None,
        bytes_max: float = NEVER,
    ) -> None:
        """Read `count` replies and append them to `replies`.

        After an error, `replies` contains the replies that arrived before it, and the connection is
        closed. See `Transport.receive` for the arguments and errors.
        """
        opened = on or self.transport
        assert opened is not None
        try:
            opened.receive(count, replies, silence=silence, bytes_max=bytes_max)
        except BaseException:
            # Drop the connection even if the exception comes from a signal handler. Otherwise, a
            # late reply could be mistaken for the answer to the next command.
            self._drop()
            raise

    def close_if_unusable(self, replies: Iterable[Any]) -> bool:
        """Close the connection and return True if a reply shows that it is no longer usable."""
        for reply in replies:
            if isinstance(reply, RedisResponseError) and reply.kind in self._drop_after:
                self._drop()
                if self.endpoint is not None:
                    self._finder.refused(self.endpoint, reply)
                return True
        return False

    def _probe(self, seconds: float) -> bool:
        """Return True if the server answers on a new connection in time and can run a script.

        `seconds` is the time limit of the probe.
        """
        seconds = min(seconds, self._end - time.monotonic())
        if seconds <= 0 or self.endpoint is None:
            return False
        probing = Node(
            replace(self.options, timeout=seconds, probe_after=None), fixed_finder(self.endpoint)
        )
        probing.set_deadline(time.monotonic() + seconds)
        try:
            check_replies(probing.exchange((PROBE,)))
        except RedisUnavailableError:
            return False
        except RedisResponseError as error:
            return error.kind is not RefusalKind.BUSY
        finally:
            probing.close()
        return True

    def seconds_left(self) -> float:
        """Return the time limit for an exchange that starts now, in seconds (at least 0.001)."""
        return max(0.001, min(self.timeout, self._end - time.monotonic()))

    def _seconds_left(self, most: float) -> float:
        """Return the smaller of `most` and the seconds until the deadline.

        Raises RedisUnavailableError if the deadline has passed.
        """
        left = min(most, self._end - time.monotonic())
        if left <= 0:
            raise RedisUnavailableError(f"no time was left for {self.address}", sent=False)
        return left

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.transport = None


def check_process(pid: int, name: str) -> None:
    """Raise RuntimeError if this process is not `pid`, the one that owns the connection."""
    if os.getpid() != pid:
        raise RuntimeError(f"the connection {name} belongs to process {pid}; detach it")


def _advice(error: RedisResponseError) -> str:
    if error.kind is RefusalKind.LOGIN:
        return "; the password comes from redis.url or redis.password_file"
    return ""
