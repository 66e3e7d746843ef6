"""Check the configuration and the state that each Redis master reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from streamqd.config import Settings, topology
from streamqd.errors import RedisResponseError, RedisUnavailableError, RefusalKind
from streamqd.store.client import Connection, ServerFacts, server_facts

_STARTING = (RefusalKind.NOT_READY, RefusalKind.BUSY)  # the server may be ready in a few seconds


def ask_servers(
    link: Connection,
    patience: float,
    interrupted: Callable[[], bool] = lambda: False,
    waits: Callable[[Exception], None] = lambda _error: None,
) -> list[ServerFacts]:
    """Return the properties of each master.

    While a server is unavailable or starting, try again for up to `patience` seconds, or until
    `interrupted` returns True. Before the first new attempt, `waits` is called with the error.
    Raises RedisUnavailableError if the last attempt fails too, or if a server rejects the commands.
    """
    deadline, waiting = time.monotonic() + patience, False
    while True:
        try:
            found = [server_facts(node) for node in link.masters()]
            if not any(facts.loading for facts in found):
                return found
            error: Exception = RedisUnavailableError("it is still loading its data", sent=False)
        except RedisUnavailableError as unavailable:
            error = unavailable
        except RedisResponseError as refused:
            error = refused
            if refused.kind not in _STARTING:
                raise RedisUnavailableError(str(refused), sent=False) from refused
        if time.monotonic() > deadline or interrupted():
            raise RedisUnavailableError(str(error), sent=False)
        if not waiting:
            waiting = True
            waits(error)
        time.sleep(0.1)


def check_servers(
    servers: Sequence[ServerFacts], settings: Settings
) -> tuple[list[str], list[str]]:
    """Check the configuration of the servers, and return (problems, warnings)."""
    problems: dict[str, list[str]] = {}
    warnings: dict[str, list[str]] = {}
    for facts in servers:
        for found, into in zip(_check(facts, settings), (problems, warnings), strict=True):
            for text in found:
                into.setdefault(text, []).append(facts.address)
    several = len(servers) > 1
    return _lines(problems, several=several), _lines(warnings, several=several)


def _lines(texts: Mapping[str, Sequence[str]], *, several: bool) -> list[str]:
    return [
        f"redis: {', '.join(addresses)}: {text}" if several else f"redis: {text}"
        for text, addresses in texts.items()
    ]


def _check(facts: ServerFacts, settings: Settings) -> tuple[list[str], list[str]]:
    problems = _check_kind(facts, settings)
    warnings: list[str] = []
    if facts.mode == "sentinel":
        return problems, warnings
    if facts.maxmemory_policy not in ("noeviction", ""):
        text = (
            f"the server's maxmemory-policy is {facts.maxmemory_policy}, so it may evict "
            "streams and leases, which loses messages; set it to noeviction (or, to accept the "
            "loss, redis.allow_eviction = true)"
        )
        (warnings if settings.redis.allow_eviction else problems).append(text)
    if facts.role not in ("master", ""):
        problems.append(f"the server is a {facts.role}, which refuses writes; name the primary")
    if not facts.aof:
        warnings.append(
            "append-only persistence is off: a restart of the server loses all messages since its "
            "last snapshot (set appendonly yes)"
        )
    if facts.replicas and not facts.needs_replicas:
        warnings.append(
            "it has replicas and accepts writes without them, so writes to a master that is cut off"
            " are lost at the failover (set min-replicas-to-write 1 and min-replicas-max-lag 10)"
        )
    skew = abs(facts.time - time.time())
    if skew > settings.daemon.lease_ttl / 2:
        warnings.append(
            f"its clock is {skew:.1f} s off this host's, so times in logs will not match"
        )
    return problems, warnings


def _check_kind(facts: ServerFacts, settings: Settings) -> list[str]:
    """Return a problem if the URL does not fit the kind of server at its address."""
    where = topology.parse(settings.redis.url)
    if facts.mode == "sentinel":
        return [
            f"the server is a Sentinel, which stores no messages ({topology.WRITE['sentinel']})"
        ]
    if facts.mode == "cluster" and where.kind != topology.CLUSTER:
        return [f"the server is a node of a Redis Cluster; {topology.WRITE['cluster']}"]
    return []
