"""The connection to one Redis server, and what can be known when it fails.

Every command and script of streamqd goes through a `Connection`. It repeats nothing by itself: a
repeated XADD is a duplicate, a repeated XREADGROUP orphans messages. It says instead whether the
command can have been executed (`RedisUnavailable.sent`), and the caller, who knows what the command
means, decides.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind
from streamqd.store import scripts, transport
from streamqd.store.doubt import PROBE, Doubt
from streamqd.store.endpoint import Endpoint, endpoint_of
from streamqd.store.transport import Lookup, Transport, pack, reason, resolve

if TYPE_CHECKING:
    import socket

    from streamqd import config
    from streamqd.store.scripts import Call, Reply

# After these replies the connection serves us no more: it lost its login, or the node its role.
DROP_AFTER = frozenset({RefusalKind.LOGIN, RefusalKind.REPLICA})
NEVER = float("inf")  # of a time limit
Key = TypeVar("Key", bound=str | bytes)
_NAME = re.compile(r"[!-~]{1,200}")


def _nothing(*_: Any) -> None:
    """For what a route has no need of."""


@dataclass(frozen=True, slots=True)
class ServerRoute:
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


def route_to(endpoint: Endpoint) -> ServerRoute:
    """The route to a server that is known."""
    return ServerRoute(str(endpoint), lambda _end: endpoint)


class Connection:
    """One connection to one Redis server, opened on first use.

    Used by one thread of the process that created it (or that called `detach`). No automatic
    retries, RESP2, replies as raw bytes. After a `RedisUnavailable` the connection is closed and
    the next use opens a new one; `opened` counts them.
    """

    def __init__(
        self,
        settings: config.Redis,
        *,
        timeout: float,
        name: str,
        route: ServerRoute | None = None,
        lookup: Lookup = resolve,
    ) -> None:
        """Prepare, without connecting. `timeout` bounds one exchange, in seconds.

        Connecting is bounded by it too, and by `connect_timeout`, as far as `lookup` keeps to it.
        `name` is what CLIENT LIST shows. `route` leads to another server than the settings name.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a connection name: {name!r}")
        self.settings = settings
        self.opened = 0
        self.timeout = timeout
        self.name = name
        self.doubt: Doubt | None = None
        self.endpoint: Endpoint | None = None  # of the last connection that was tried
        self._pid = os.getpid()
        self._end = NEVER
        self._lookup = lookup
        self._route = route or route_to(endpoint_of(settings))
        self._drop_after = DROP_AFTER | self._route.not_now
        self._transport: Transport | None = None

    def execute(self, *args: Any) -> Any:
        """Run one command and return its reply. Raises RedisRefused or RedisUnavailable."""
        reply = self.exchange((args,))[0]
        if isinstance(reply, RedisRefused):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one write; error replies are RedisRefused elements of the result."""
        return self.exchange(commands) if commands else []

    def pipeline_each(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """`pipeline`, but where only some nodes answer, the others' share is RedisUnavailable.

        Those are elements of the result; it is raised when no node answers.
        """
        return self.pipeline(commands)

    def run(self, call: Call) -> Reply:
        """Run a script. Raises RedisRefused, RedisUnavailable, ContractError."""
        raw = self.exchange((scripts.command(call),))[0]
        if _unknown_script(raw):
            raw = self.exchange((scripts.command(call, by_source=True),))[0]
        if isinstance(raw, RedisRefused):
            raise raw
        return scripts.reply(call, raw)

    def run_many(self, calls: Sequence[Call]) -> list[Reply | RedisRefused]:
        """Run scripts in one write, in order, except scripts not loaded yet (NOSCRIPT).

        Calls must not depend on the order among themselves.
        """
        return whole(self.run_each(calls))

    def run_each(self, calls: Sequence[Call]) -> list[Reply | RedisRefused | RedisUnavailable]:
        """`run_many`, but where only some nodes answer, the others' share is RedisUnavailable."""
        if not calls:
            return []
        raws = self.exchange([scripts.command(call) for call in calls])
        missing = [index for index, raw in enumerate(raws) if _unknown_script(raw)]
        if missing:
            taught = [scripts.command(calls[index], by_source=True) for index in missing]
            try:
                again = self.exchange(taught)
            except RedisUnavailable as error:
                if len(missing) == len(calls):
                    raise
                again = [error] * len(missing)  # the others have been executed already
            for index, raw in zip(missing, again, strict=True):
                raws[index] = raw
        return [
            raw if isinstance(raw, RedisRefused | RedisUnavailable) else scripts.reply(call, raw)
            for call, raw in zip(calls, raws, strict=True)
        ]

    # --- several nodes: a link to one has simple answers ---

    def masters(self) -> list[Connection]:
        """A link to each node that takes writes: this one. They are closed with this one."""
        return [self]

    def node_of(self, key: str) -> str:  # noqa: ARG002 - it matters to a cluster
        """The name of the node that serves a key, as far as is known; '' when there is only one."""
        return ""

    def together(self, keys: Sequence[Key]) -> list[list[Key]]:
        """Cut keys into those that one command may name together."""
        return [list(keys)] if keys else []

    # --- the connection ---

    def open(self) -> None:
        """Connect, when not connected. Raises RedisUnavailable with `sent=False`."""
        self._check_process()
        if self._transport is not None:
            return
        endpoint = self.endpoint = self._route.find(self._end)
        end = time.monotonic() + self._left(min(self.timeout, self._route.patience))
        try:
            self._transport = self._connect(endpoint, end)
        except RedisRefused as error:
            self._route.failed(endpoint)
            text = f"{self.address} refused us: {str(error).rstrip('.')}{_advice(error)}"
            raise RedisUnavailable(text, sent=False) from error
        except (RedisUnavailable, OSError, UnicodeError) as error:
            self._route.failed(endpoint)
            raise RedisUnavailable(
                f"cannot connect to {self.address}: {reason(error.__cause__ or error)}", sent=False
            ) from error
        self._transport.doubt = self.doubt  # not before: whoever connects is patient already
        self.opened += 1

    def _connect(self, endpoint: Endpoint, end: float) -> Transport:
        patience = min(self.timeout, self.settings.connect_timeout)
        opened = transport.connect(endpoint, end, patience, self._lookup)
        try:
            opened.begin(end - time.monotonic())
            commands = [*endpoint.login(), ("CLIENT", "SETNAME", self.name)]
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
            self._route.verify(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    def ready(self) -> Transport:
        """The open connection, for an exchange of one's own; whoever leaves it half done closes it.

        It is a new one when there is none, or the server has closed it while it lay idle. Raises
        RedisUnavailable with `sent=False`.
        """
        self._check_process()
        try:
            if self._transport is None or self._transport.ended():
                self._drop()
                self.open()
        except RedisUnavailable:
            self._drop()
            raise
        assert self._transport is not None
        return self._transport

    def doubt_after(self, seconds: float) -> None:
        """From now on ask on another connection after an answer that is so many seconds overdue.

        When that one is answered, what is silent raises SilentConnection: it is dead.
        """
        self.doubt = Doubt(seconds, self._probe)

    def _probe(self, seconds: float) -> bool:
        """Whether the server answers a new connection in time, and would run a script."""
        seconds = min(seconds, self._end - time.monotonic())
        if seconds <= 0 or self.endpoint is None:
            return False
        link = Connection(
            self.settings,
            timeout=seconds,
            name=self.name,
            route=route_to(self.endpoint),
            lookup=self._lookup,
        )
        link.until(time.monotonic() + seconds)
        try:
            link.execute(*PROBE)
        except RedisUnavailable:
            return False
        except RedisRefused as error:
            return error.kind is not RefusalKind.BUSY
        finally:
            link.close()
        return True

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All that is done inside ends in time: finding the node, connecting, every exchange."""
        self.until(time.monotonic() + seconds)
        try:
            yield
        finally:
            self.until(NEVER)

    def until(self, end: float) -> None:
        """From now on nothing lasts beyond `end` (monotonic)."""
        self._end = end

    def _left(self, most: float) -> float:
        """How long the next step may take. Raises RedisUnavailable when the time is over."""
        left = min(most, self._end - time.monotonic())
        if left <= 0:
            raise RedisUnavailable(f"no time was left for {self.address}", sent=False)
        return left

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        if os.getpid() == self._pid:
            self._drop()
        else:
            self.detach()

    def detach(self) -> None:
        """In a forked child: forget the parent's socket without touching it.

        The descriptor itself stays open in the child until it closes it. Afterwards the connection
        belongs to the child, which may use it: it then opens one of its own.
        """
        if self._transport is not None:
            self._transport.forget()
        self._transport = None
        self._pid = os.getpid()

    def forsake(self) -> None:
        """In a forked child that must never use it: close the descriptor; any use is refused."""
        if self._transport is not None:
            os.close(self._transport.forget())
        self._transport = None

    def socket(self) -> socket.socket:
        """Return the open socket (opening it first), which never blocks."""
        self.open()
        assert self._transport is not None
        return self._transport.sock

    @property
    def transport(self) -> Transport | None:
        """The open connection, None while there is none."""
        return self._transport

    def fileno(self) -> int | None:
        """Return the descriptor, None while not connected."""
        return None if self._transport is None else self._transport.sock.fileno()

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def address(self) -> str:
        """Where it connects to, for people: never with credentials."""
        label, found = self._route.label, str(self.endpoint or "")
        return label if found in ("", label) else f"{label}, {found}"

    def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one write; error replies are elements, as of `pipeline_each`."""
        self.post(commands)
        return self.collect(len(commands))

    def post(self, commands: Iterable[Sequence[Any]]) -> None:
        """Send commands; `collect` must follow. Raises RedisUnavailable."""
        packed = [pack(command) for command in commands]
        self._check_process()
        try:
            opened = self.ready()
            opened.begin(self._left(self.timeout))
            opened.send(packed)
        except BaseException:
            self._drop()
            raise

    def collect(self, count: int) -> list[Any]:
        """Read the replies to what `post` has sent. Raises RedisUnavailable."""
        assert self._transport is not None
        replies: list[Any] = []
        try:
            self._transport.receive(count, replies)
        except BaseException:
            # Also when interrupted by an exception from a signal handler: a reply that is still
            # under way must never be taken for the answer to the next command.
            self._drop()
            raise
        if self.judge(replies):
            not_done = [each for each in replies if _kind_of(each) in self._route.not_now]
            if not_done:
                sent = len(not_done) < len(replies)
                raise RedisUnavailable(f"{self.address}: {not_done[0]}", sent=sent)
        return replies

    def judge(self, replies: Iterable[Any]) -> bool:
        """Close the connection when a reply says that it serves us no more; tell whether it did."""
        for reply in replies:
            if isinstance(reply, RedisRefused) and reply.kind in self._drop_after:
                self._drop()
                if self.endpoint is not None:
                    self._route.refused(self.endpoint, reply)
                return True
        return False

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"the link {self.name} belongs to process {self._pid}; detach it")


def whole(
    answers: Sequence[Reply | RedisRefused | RedisUnavailable],
) -> list[Reply | RedisRefused]:
    """The answers, all of which came; raises the RedisUnavailable of one that did not."""
    there = [each for each in answers if not isinstance(each, RedisUnavailable)]
    if len(there) < len(answers):
        raise missing_of(answers)
    return there


def accepted(replies: Sequence[Any]) -> Sequence[Any]:
    """The replies. Raises the first RedisRefused among them."""
    for reply in replies:
        if isinstance(reply, RedisRefused):
            raise reply
    return replies


def missing_of(answers: Sequence[Any]) -> RedisUnavailable:
    """One error for answers of which some did not come: others may have been executed."""
    lost = [each for each in answers if isinstance(each, RedisUnavailable)]
    sent = len(lost) < len(answers) or any(each.sent for each in lost)
    return RedisUnavailable(str(lost[0]), sent=sent)


def _kind_of(reply: Any) -> RefusalKind | None:
    return reply.kind if isinstance(reply, RedisRefused) else None


def _unknown_script(raw: Any) -> bool:
    return _kind_of(raw) is RefusalKind.NO_SCRIPT


# --- what a server says of itself -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the start checks look at. `time` is the server's clock, in unix seconds."""

    product: str  # redis | valkey
    version: str
    mode: str  # standalone | sentinel | cluster
    role: str  # master | slave
    maxmemory: int
    maxmemory_policy: str
    aof: bool
    loading: bool
    pid: int
    time: float
    address: str = ""
    replicas: int = 0
    needs_replicas: bool = False  # min-replicas-to-write is set
    certificates: tuple[tuple[str, float], ...] = ()  # whose, and when it ends, in unix seconds


def _advice(error: RedisRefused) -> str:
    if error.kind is RefusalKind.LOGIN:
        return "; the password comes from redis.url or redis.password_file"
    return ""


def server_facts(link: Connection) -> ServerFacts:
    """Ask the server for its version and settings. Needs the rights to INFO and TIME."""
    info_raw, time_raw = link.pipeline((("INFO",), ("TIME",)))
    if isinstance(info_raw, RedisRefused):
        raise info_raw
    info: dict[str, str] = {}
    for line in info_raw.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            info[name] = value
    # Valkey calls itself redis 7.2.4 for old clients, and tells its own version beside that.
    product = "valkey" if "valkey_version" in info else "redis"
    mode = info.get("server_mode") or info.get("redis_mode", "standalone")
    if isinstance(time_raw, RedisRefused):
        if mode != "sentinel":  # those do not know the command
            raise time_raw
        time_raw = (0, 0)
    memory_limit = 0
    with contextlib.suppress(ValueError):
        memory_limit = int(info.get("maxmemory", "0"))
    return ServerFacts(
        product=product,
        version=info.get(f"{product}_version", ""),
        mode=mode,
        role=info.get("role", ""),
        maxmemory=memory_limit,
        maxmemory_policy=info.get("maxmemory_policy", ""),
        aof=info.get("aof_enabled") == "1",
        loading=info.get("loading") == "1",
        pid=int(info.get("process_id", "0")),
        time=int(time_raw[0]) + int(time_raw[1]) / 1e6,
        address=link.address,
        replicas=int(info.get("connected_slaves", "0")),
        # The server tells how many are good only when it asks for some.
        needs_replicas="min_slaves_good_slaves" in info,
    )
