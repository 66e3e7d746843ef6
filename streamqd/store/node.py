"""One server: the connection to it, and what can be known when that fails.

It repeats nothing by itself: a repeated XADD is a duplicate, a repeated XREADGROUP orphans
messages. It says instead whether the command can have been executed (`RedisUnavailable.sent`), and
the caller, who knows what the command means, decides.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind
from streamqd.store import transport
from streamqd.store.doubt import PROBE, Attempts, Doubt
from streamqd.store.endpoint import Endpoint
from streamqd.store.replies import accepted, kind_of
from streamqd.store.transport import Lookup, Transport, pack, reason, resolve

if TYPE_CHECKING:
    import socket

    from streamqd import config

# After these replies the connection serves us no more: it lost its login, or the node its role.
DROP_AFTER = frozenset({RefusalKind.LOGIN, RefusalKind.REPLICA})
NEVER = float("inf")  # of a time limit
Key = TypeVar("Key", bound=str | bytes)
_NAME = re.compile(r"[!-~]{1,200}")


def _nothing(*_: Any) -> None:
    """For what a finder has no need of."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a connection deals with its servers, whichever they are."""

    settings: config.Redis
    # Seconds of one exchange. They bound connecting too, as `connect_timeout` does, as far as
    # `lookup` keeps to them.
    timeout: float
    name: str  # what CLIENT LIST shows
    lookup: Lookup = resolve
    doubt: float | None = None  # seconds of silence after which to ask elsewhere: `store/doubt.py`

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"not a connection name: {self.name!r}")


@dataclass(frozen=True, slots=True)
class Finder:
    """How to find the server to connect to: anew for each connection."""

    label: str  # where it looks, for people
    find: Callable[[float], Endpoint]  # until an instant (monotonic); raises RedisUnavailable
    # Looks whether the server is what we need. Raises RedisUnavailable, RedisRefused.
    verify: Callable[[Transport], None] = _nothing
    failed: Callable[[Endpoint], None] = _nothing  # no connection could be opened
    refused: Callable[[Endpoint, RedisRefused], None] = _nothing  # so the connection was closed
    # What is refused so was not done: the server is not the right one any more, or not at present.
    not_now: frozenset[RefusalKind] = frozenset()
    patience: float = NEVER  # seconds that opening may take once it is found


def known(endpoint: Endpoint) -> Finder:
    """Finds a server that is known."""
    return Finder(str(endpoint), lambda _end: endpoint)


class Node:
    """The route to one server: a connection that is opened on first use.

    Used by one thread of the process that created it (or that called `detach`). No automatic
    retries, RESP2, replies as raw bytes. After a `RedisUnavailable` the connection is closed and
    the next use opens a new one; `opened` counts them.
    """

    def __init__(self, terms: Terms, finder: Finder) -> None:
        """Prepare, without connecting."""
        self.terms = terms
        self.timeout = terms.timeout
        self.opened = 0
        self.doubt = None if terms.doubt is None else Doubt(terms.doubt, self._probe)
        self._attempts = None if terms.doubt is None else Attempts()
        self.endpoint: Endpoint | None = None  # of the last connection that was tried
        self.transport: Transport | None = None  # the open connection
        self._pid = os.getpid()
        self._end = NEVER
        self._finder = finder
        self._drop_after = DROP_AFTER | finder.not_now

    # --- the interface of a route: see `Connection` ---

    def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one write; error replies are elements. Raises RedisUnavailable."""
        self.post(commands)
        return self.collect(len(commands))

    exchange_each = exchange  # one node answers all of it or nothing

    def masters(self) -> list[Node]:
        return [self]

    def node_of(self, key: str) -> str:  # noqa: ARG002 - it matters to a cluster
        return ""

    def together(self, keys: Sequence[Key]) -> list[list[Key]]:
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
            self.transport.forget()
        self.transport = None
        self._pid = os.getpid()

    def forsake(self) -> None:
        if self.transport is not None:
            os.close(self.transport.forget())
        self.transport = None

    def until(self, end: float) -> None:
        """From now on nothing lasts beyond `end` (monotonic)."""
        self._end = end

    def open(self) -> None:
        check_process(self._pid, self.terms.name)
        if self.transport is not None:
            return
        endpoint = self.endpoint = self._finder.find(self._end)
        end = time.monotonic() + self._left(min(self.timeout, self._finder.patience))
        try:
            self.transport = self._connect(endpoint, end)
        except RedisRefused as error:
            self._finder.failed(endpoint)
            text = f"{self.address} refused us: {str(error).rstrip('.')}{_advice(error)}"
            raise RedisUnavailable(text, sent=False) from error
        except (RedisUnavailable, OSError, UnicodeError) as error:
            self._finder.failed(endpoint)
            raise RedisUnavailable(
                f"cannot connect to {self.address}: {reason(error.__cause__ or error)}", sent=False
            ) from error
        self.transport.doubt = self.doubt  # not before: a login has a limit of its own
        self.opened += 1

    # --- the connection ---

    def _connect(self, endpoint: Endpoint, end: float) -> Transport:
        addresses = transport.addresses_of(endpoint, end, self.terms.lookup)
        started = time.monotonic()
        if self._attempts is not None:
            end = min(end, started + self._attempts.limit())
        try:
            return self._log_in(endpoint, addresses, end)
        finally:
            if self._attempts is not None:
                self._attempts.ended(time.monotonic() - started)

    def _log_in(
        self, endpoint: Endpoint, addresses: Sequence[tuple[int, Any]], end: float
    ) -> Transport:
        patience = min(self.timeout, self.terms.settings.connect_timeout)
        opened = transport.connect(endpoint, addresses, end, patience)
        try:
            opened.begin(end - time.monotonic())
            commands = [*endpoint.login(), ("CLIENT", "SETNAME", self.terms.name)]
            replies: list[Any] = []
            try:
                opened.send([pack(command) for command in commands])
                opened.receive(len(commands), replies)
            except RedisUnavailable:
                # A server that takes nobody in says why, and closes before it has read a word.
                with contextlib.suppress(RedisUnavailable):
                    opened.receive(len(replies) + 1, replies)
                accepted(replies)
                raise
            if isinstance(replies[-1], RedisRefused) and replies[-1].kind is RefusalKind.FORBIDDEN:
                # A restricted user may be forbidden to name itself; that is no reason not to work.
                del replies[-1]
            accepted(replies)
            self._finder.verify(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    def ready(self) -> Transport:
        """The open connection, for an exchange of one's own; whoever leaves it half done closes it.

        It is a new one when there is none, or the server has closed it while it lay idle. Raises
        RedisUnavailable with `sent=False`.
        """
        check_process(self._pid, self.terms.name)
        try:
            if self.transport is None or self.transport.ended():
                self._drop()
                self.open()
        except RedisUnavailable:
            self._drop()
            raise
        assert self.transport is not None
        return self.transport

    def socket(self) -> socket.socket:
        """Return the open socket (opening it first), which never blocks."""
        self.open()
        assert self.transport is not None
        return self.transport.sock

    def fileno(self) -> int | None:
        """Return the descriptor, None while not connected."""
        return None if self.transport is None else self.transport.sock.fileno()

    def post(self, commands: Iterable[Sequence[Any]]) -> None:
        """Send commands; `collect` must follow. Raises RedisUnavailable."""
        self.send([pack(command) for command in commands])

    def execute_weighed(self, *args: Any, bytes_max: float) -> tuple[Any, int]:
        """Run a command whose reply may be long; return that, and how many bytes came.

        It may last as long as something comes, `timeout` after the last. A reply of more than
        `bytes_max` is left unread: raises OverweightError, and the next use connects anew. Raises
        RedisRefused, RedisUnavailable.
        """
        self.post((args,))
        assert self.transport is not None
        opened = self.transport
        before = opened.received
        [reply] = self.collect(1, silence=self.timeout, bytes_max=bytes_max)
        if isinstance(reply, RedisRefused):
            raise reply
        return reply, opened.received - before

    def collect(
        self, count: int, *, silence: float | None = None, bytes_max: float = NEVER
    ) -> list[Any]:
        """Read the replies to what `post` has sent. Raises as `Transport.receive`."""
        replies: list[Any] = []
        self.receive(count, replies, silence=silence, bytes_max=bytes_max)
        if self.judge(replies):
            not_done = [each for each in replies if kind_of(each) in self._finder.not_now]
            if not_done:
                sent = len(not_done) < len(replies)
                raise RedisUnavailable(f"{self.address}: {not_done[0]}", sent=sent)
        return replies

    def send(
        self, packed: Sequence[bytes], needed: int = 1, *, on: Transport | None = None
    ) -> None:
        """Send packed commands; `receive` must follow. Raises RedisUnavailable, as a Transport.

        They go on the present connection or a new one; whose WATCH stands on one names it.
        """
        check_process(self._pid, self.terms.name)
        try:
            opened = on or self.ready()
            opened.begin(self._left(self.timeout))
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
        """Append the replies to what was sent. What came before an error is in `replies`."""
        opened = on or self.transport
        assert opened is not None
        try:
            opened.receive(count, replies, silence=silence, bytes_max=bytes_max)
        except BaseException:
            # Also when interrupted by an exception from a signal handler: a reply that is still
            # under way must never be taken for the answer to the next command.
            self._drop()
            raise

    def judge(self, replies: Iterable[Any]) -> bool:
        """Close the connection when a reply says that it serves us no more; tell whether it did."""
        for reply in replies:
            if isinstance(reply, RedisRefused) and reply.kind in self._drop_after:
                self._drop()
                if self.endpoint is not None:
                    self._finder.refused(self.endpoint, reply)
                return True
        return False

    def _probe(self, seconds: float) -> bool:
        """Whether the server answers a new connection in time, and would run a script."""
        seconds = min(seconds, self._end - time.monotonic())
        if seconds <= 0 or self.endpoint is None:
            return False
        beside = Node(replace(self.terms, timeout=seconds, doubt=None), known(self.endpoint))
        beside.until(time.monotonic() + seconds)
        try:
            accepted(beside.exchange((PROBE,)))
        except RedisUnavailable:
            return False
        except RedisRefused as error:
            return error.kind is not RefusalKind.BUSY
        finally:
            beside.close()
        return True

    def seconds_left(self) -> float:
        """Return how long an exchange may take from now on; at least a millisecond."""
        return max(0.001, min(self.timeout, self._end - time.monotonic()))

    def _left(self, most: float) -> float:
        """How long the next step may take. Raises RedisUnavailable when the time is over."""
        left = min(most, self._end - time.monotonic())
        if left <= 0:
            raise RedisUnavailable(f"no time was left for {self.address}", sent=False)
        return left

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.transport = None


def check_process(pid: int, name: str) -> None:
    """Raises RuntimeError in another process than `pid`, whose connection it is."""
    if os.getpid() != pid:
        raise RuntimeError(f"the connection {name} belongs to process {pid}; detach it")


def _advice(error: RedisRefused) -> str:
    if error.kind is RefusalKind.LOGIN:
        return "; the password comes from redis.url or redis.password_file"
    return ""
