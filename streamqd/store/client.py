"""The connection to Redis, through which streamqd sends every command and script.

A `Connection` uses a route to reach the right server. The route is a `Node` if there is one server,
or a `Cluster` if the keys are spread over several masters.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamqd.config import topology
from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError, RefusalKind
from streamqd.store import scripts
from streamqd.store.cluster import Cluster
from streamqd.store.discovery import TopologyDiscovery, master_finder, slot_finder
from streamqd.store.endpoint import endpoint_at, make_endpoint, parse_topology, sentinel_at
from streamqd.store.node import NEVER, ConnectionOptions, Key, Node, fixed_finder
from streamqd.store.replies import check_valid, refusal_kind, require_all
from streamqd.store.transport import Lookup, resolve

if TYPE_CHECKING:
    from streamqd import config
    from streamqd.store.scripts import Answer, Call, Reply


def connect(
    settings: config.Redis,
    *,
    timeout: float,
    name: str,
    key: str = "",
    lookup: Lookup = resolve,
    probe_after: float | None = None,
) -> Connection:
    """Return a connection for the configured URL without opening it.

    See `ConnectionOptions` for `timeout`, `name`, `lookup` and `probe_after`. On a cluster, a
    connection with a `key` uses only the node that serves this key. WATCH, subscriptions and
    blocking reads need such a connection, because they are bound to one socket. Raises ConfigError
    if the URL is invalid.
    """
    where, options = (
        parse_topology(settings),
        ConnectionOptions(settings, timeout, name, lookup, probe_after),
    )
    if where.kind == topology.SENTINEL:
        return Connection(
            Node(options, master_finder(TopologyDiscovery(options, where, sentinel_at)))
        )
    if where.kind != topology.CLUSTER:
        return Connection(Node(options, fixed_finder(make_endpoint(settings, where))))
    discovery = TopologyDiscovery(options, where, endpoint_at)
    if key:
        return Connection(Node(options, slot_finder(discovery, key)))
    return Connection(Cluster(options, discovery))


class Connection:
    """A connection to Redis with the same operations for every topology.

    A connection belongs to one process and may be used by only one of its threads. After a fork,
    the child must call `detach` before it uses the connection.
    """

    def __init__(self, route: Node | Cluster) -> None:
        self._route = route

    def execute(self, *args: Any) -> Any:
        """Run one command and return its reply.

        Raises RedisResponseError or RedisUnavailableError.
        """
        reply = self._route.exchange((args,))[0]
        if isinstance(reply, RedisResponseError):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one write, and return their replies in the same order.

        If the server answers a command with an error, the reply is a RedisResponseError.
        """
        return self._route.exchange(commands) if commands else []

    def pipeline_each(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands as `pipeline` does, but keep the replies of other nodes if a node is silent.

        If a node does not answer a command, the result of that command is a RedisUnavailableError.
        Raises RedisUnavailableError if no node answers at all.
        """
        return self._route.exchange_each(commands) if commands else []

    def run(self, call: Call) -> Reply:
        """Run a script and return its reply.

        If the server has not loaded the script yet, the call is sent again with its source. Raises
        RedisResponseError, RedisUnavailableError, or ContractError if the reply is invalid.
        """
        raw = self._route.exchange((scripts.command(call),))[0]
        if _unknown_script(raw):
            raw = self._route.exchange((scripts.command(call, by_source=True),))[0]
        if isinstance(raw, RedisResponseError):
            raise raw
        return scripts.reply(call, raw)

    def run_many(self, calls: Sequence[Call]) -> list[Reply | RedisResponseError]:
        """Send all script calls in one write, and return their replies in the same order.

        The scripts may run in another order, because a call whose script the server has not loaded
        yet (NOSCRIPT) is sent again with its source after the others have run. If a script fails,
        its reply is a RedisResponseError. Raises RedisUnavailableError if a reply is missing, and
        ContractError if one is invalid.
        """
        answers: list[Reply | RedisResponseError | ContractError] = require_all(
            self.run_each(calls)
        )
        return [check_valid(each) for each in answers]

    def run_each(self, calls: Sequence[Call]) -> list[Answer]:
        """Run scripts as `run_many` does, but keep the other replies if a call fails.

        The result of a call is a RedisUnavailableError if its node did not answer, or a
        ContractError if the reply is invalid.
        """
        if not calls:
            return []
        raws = self._route.exchange_each([scripts.command(call) for call in calls])
        missing = [index for index, raw in enumerate(raws) if _unknown_script(raw)]
        if missing:
            taught = [scripts.command(calls[index], by_source=True) for index in missing]
            try:
                again = self._route.exchange_each(taught)
            except RedisUnavailableError as error:
                if len(missing) == len(calls):
                    raise
                again = [error] * len(missing)  # the other calls have run, so keep their replies
            for index, raw in zip(missing, again, strict=True):
                raws[index] = raw
        return [_answer(call, raw) for call, raw in zip(calls, raws, strict=True)]

    # --- the route ---

    @property
    def node(self) -> Node:
        """The node of the connection, for operations that are bound to one socket.

        Raises RuntimeError for a cluster connection that was made without a key.
        """
        return self._route.node

    def masters(self) -> list[Connection]:
        """Return a connection to each master. Closing this connection closes them too."""
        return [Connection(node) for node in self._route.masters()]

    def node_for_key(self, key: str) -> str:
        """Return the address of the node last known to serve a key, or '' if it is unknown.

        A connection to a single server always returns ''.
        """
        return self._route.node_for_key(key)

    def group_by_node(self, keys: Sequence[Key]) -> list[list[Key]]:
        """Divide keys into lists so that one command may use all keys in a list."""
        return self._route.group_by_node(keys)

    @property
    def address(self) -> str:
        """The address to display, which contains no credentials."""
        return self._route.address

    # --- lifetime ---

    @property
    def connected(self) -> bool:
        return self._route.connected

    def open(self) -> None:
        """Connect if necessary. Raises RedisUnavailableError with `sent=False`."""
        self._route.open()

    @contextlib.contextmanager
    def limit_time(self, seconds: float) -> Iterator[None]:
        """Limit all operations in the `with` block to `seconds` seconds in total.

        The limit includes the time to find the node and to connect.
        """
        self.set_deadline(time.monotonic() + seconds)
        try:
            yield
        finally:
            self.set_deadline(NEVER)

    def set_deadline(self, end: float) -> None:
        """Set the time (monotonic) by which every later operation must finish.

        The deadline applies until this method is called again.
        """
        self._route.set_deadline(end)

    def close(self) -> None:
        """Close all open sockets. The next operation opens new ones."""
        self._route.close()

    def detach(self) -> None:
        """Abandon the parent's sockets in a forked child, without affecting the parent.

        The connection then belongs to the child and opens its own sockets. The inherited file
        descriptors stay open in the child until the child closes them.
        """
        self._route.detach()

    def disable(self) -> None:
        """Close the inherited file descriptors in a forked child that must not use the connection.

        Any later use of the connection in this process raises an error.
        """
        self._route.disable()


def _answer(call: Call, raw: Any) -> Answer:
    if isinstance(raw, RedisResponseError | RedisUnavailableError):
        return raw
    try:
        return scripts.reply(call, raw)
    except ContractError as error:
        return error


def _unknown_script(raw: Any) -> bool:
    return refusal_kind(raw) is RefusalKind.NO_SCRIPT


# --- facts about a server -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The properties of a server that are checked at startup.

    `time` is the time in unix seconds on the server's clock when the properties were read.
    """

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
    needs_replicas: bool = False  # True if min-replicas-to-write is set


def server_facts(link: Connection) -> ServerFacts:
    """Return the server's version and settings. The user needs permission for INFO and TIME."""
    info_raw, time_raw = link.pipeline((("INFO",), ("TIME",)))
    if isinstance(info_raw, RedisResponseError):
        raise info_raw
    info: dict[str, str] = {}
    for line in info_raw.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            info[name] = value
    # For compatibility, Valkey reports redis_version 7.2.4, and its own version in another field.
    product = "valkey" if "valkey_version" in info else "redis"
    mode = info.get("server_mode") or info.get("redis_mode", "standalone")
    if isinstance(time_raw, RedisResponseError):
        if mode != "sentinel":  # sentinels do not support TIME, so their error is ignored
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
        # The server reports the number of good replicas only if min-replicas-to-write is set.
        needs_replicas="min_slaves_good_slaves" in info,
    )
