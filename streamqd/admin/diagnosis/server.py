"""Checks of the server: what it may forget, how near its limits are, who answers there."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd import embedded, extras
from streamqd.admin.diagnosis.declaration import Check, CheckResult, Need, Severity, lasting, plural
from streamqd.admin.diagnosis.facts import DiagnosisFacts
from streamqd.admin.diagnosis.flaws import fix_of
from streamqd.store import certificates

OLDEST = {"redis": (6, 2), "valkey": (7, 2)}  # the first version that has every command
FULL, NEARLY_FULL = 0.95, 0.85  # of maxmemory
CLIENTS = 0.9  # of maxclients
SKEW_SECONDS = 2.0
IDLE_SECONDS = 60  # no connection of a daemon, a producer or a pool is silent for longer on purpose
SLOW_MS = 100.0  # for so long nobody else is served
SLOW_SECONDS = 86_400  # slow commands of longer ago are history


def _set(setting: str) -> str:
    now = f"`redis-cli CONFIG SET {setting}`"
    return f"write `{setting}` into the server's configuration, and set it now: {now}"


def _eviction(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    policy = facts.server.info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        allowed = facts.settings.redis.allow_eviction
        yield CheckResult(
            f"the server may evict keys (maxmemory-policy {policy}), and an evicted stream or"
            " lease is lost messages or work done twice",
            _set("maxmemory-policy noeviction"),
            evidence={"maxmemory_policy": policy, "redis.allow_eviction": allowed},
            severity=Severity.WARNING if allowed else None,
        )


def _persistence(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    info, sync = facts.server.info, facts.server.config.get("appendfsync", "")
    evidence = {
        "aof_enabled": info.get("aof_enabled", ""),
        "appendfsync": sync,
        "rdb_changes_since_last_save": info.get("rdb_changes_since_last_save", ""),
    }
    if info.get("aof_enabled") == "0":
        yield CheckResult(
            "append-only persistence is off: a restart of the server loses what was sent since its"
            f" last snapshot ({evidence['rdb_changes_since_last_save'] or 'unknown'} changes)",
            _set("appendonly yes"),
            evidence=evidence,
        )
    elif sync == "no":
        yield CheckResult(
            "the append-only file is written when the system likes (appendfsync no): a power loss"
            " takes up to half a minute of acknowledged writes with it",
            _set("appendfsync everysec"),
            evidence=evidence,
        )


def _failing_writes(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    names = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
    failing = {name: facts.server.info.get(name) for name in names}
    failing = {name: status for name, status in failing.items() if status not in (None, "ok")}
    if failing:
        yield CheckResult(
            f"the server failed to write its data to disk ({', '.join(failing)})",
            "read the server's log, make room or give it the rights to its directory"
            " (`redis-cli CONFIG GET dir`), then `redis-cli BGSAVE`",
            evidence=failing,
        )


def _memory_full(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    limit, used = facts.server.number("maxmemory"), facts.server.number("used_memory")
    if limit and used > limit * NEARLY_FULL:
        yield CheckResult(
            f"{used / limit:.0%} of the server's memory limit is used; when it is full, producers"
            " and retries are refused",
            "see who keeps it with `streamqd doctor stream TOPIC`, trim with `streamqd trim TOPIC`,"
            " or raise it: `redis-cli CONFIG SET maxmemory BYTES`",
            evidence={"used_memory": used, "maxmemory": limit},
            severity=Severity.PROBLEM if used > limit * FULL else None,
        )


def _memory_unlimited(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    if facts.server.info.get("maxmemory") == "0":
        yield CheckResult(
            "the server has no memory limit: when the host's memory is full the system kills it"
            " instead of producers being refused",
            "bound the topics: `streamqd topic settings TOPIC retention.max_bytes=1GiB`"
            if facts.settings.redis.url == embedded.URL
            else _set("maxmemory BYTES"),
            evidence={
                "maxmemory": 0,
                "used_memory": facts.server.number("used_memory"),
                "total_system_memory": facts.server.number("total_system_memory"),
            },
        )


def _clients(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    now = facts.server.number("connected_clients")
    told = facts.server.config.get("maxclients", facts.server.info.get("maxclients", ""))
    limit = int(told) if told.isdigit() else 0
    if limit and now > limit * CLIENTS:
        yield CheckResult(
            f"{now:,} of {limit:,} connections that the server allows are open; every worker needs"
            " one of its own",
            f"raise the limit: `redis-cli CONFIG SET maxclients {2 * limit}`, and the server's"
            " limit of open files with it",
            evidence={"connected_clients": now, "maxclients": limit},
        )


def _clock(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    skew = facts.server.skew_seconds
    if skew is not None and abs(skew) > SKEW_SECONDS:
        yield CheckResult(
            f"the server's clock is {abs(skew):.1f} s {'before' if skew > 0 else 'behind'} this"
            " host's: leases do not care, but ages and times in logs do not match",
            "synchronise both hosts' clocks: `timedatectl set-ntp true`",
            evidence={"skew_seconds": skew, "round_trip_ms": facts.server.round_trip_ms},
        )


def _replica(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    info = facts.server.info
    if info.get("role", "master") != "master":
        primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        yield CheckResult(
            f"the server is a replica of {primary} and refuses writes",
            f"name the primary in redis.url (`redis://{primary}`), or promote this one:"
            " `redis-cli REPLICAOF NO ONE`",
            evidence={
                "role": info["role"],
                "primary": primary,
                "link": info.get("master_link_status"),
            },
        )


def _min_replicas(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    info = facts.server.info
    # The server tells how many are good only when it asks for some.
    if facts.server.number("connected_slaves") and "min_slaves_good_slaves" not in info:
        yield CheckResult(
            "the server has replicas and takes writes without them: a master that is cut off goes"
            " on writing what is lost at the failover",
            f"{_set('min-replicas-to-write 1')}; then the same with `min-replicas-max-lag 10`",
            evidence={"connected_slaves": facts.server.number("connected_slaves")},
        )


def _product(facts: DiagnosisFacts) -> tuple[str, str]:
    """What answers, and its version. Valkey tells old clients that it is Redis 7.2.4."""
    info = facts.server.info
    product = "valkey" if "valkey_version" in info else "redis"
    return product, info.get(f"{product}_version", "")


def _flaws(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    product, told = _product(facts)
    fix = fix_of(product, told)
    if fix:
        yield CheckResult(
            f"the server is {product} {told}, whose known flaws let clients that may log in read"
            " what their rights forbid, or run code on its host, unless whoever built it has fixed"
            " them under the same number",
            f"update it to {product} {fix} or later, see `redis-cli INFO server`; until then let"
            " nobody log in but whom you trust (docs/how-to/secure.md)",
            evidence={f"{product}_version": told, "mended": fix},
        )


def _certificates(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    now = facts.now_unix_ms / 1000
    for name, end in facts.server.certificates.items():
        for what in certificates.warnings({name: end}, now):
            yield CheckResult(
                what,
                "renew it where it was issued, replace the file, and send SIGHUP to the daemon; the"
                " server reads its own anew by `redis-cli CONFIG SET tls-cert-file FILE`",
                evidence={"certificate": name, "ends_unix": end},
                severity=Severity.PROBLEM if end < now else None,
            )


def _version(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    product, told = _product(facts)
    numbers = tuple(int(part) for part in told.split(".")[:3] if part.isdigit())
    if numbers and numbers < OLDEST[product]:
        oldest = ".".join(map(str, OLDEST[product]))
        yield CheckResult(
            f"the server is {product} {told}, which lacks commands that streamqd needs",
            f'run {product} {oldest} or later, or use redis.url = "embedded:", which needs'
            f" {extras.hint('embedded')}",
            evidence={f"{product}_version": told, "oldest": oldest},
        )


def _idle_timeout(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    told = facts.server.config.get("timeout", "0")
    if told.isdigit() and 0 < int(told) < IDLE_SECONDS:
        yield CheckResult(
            f"the server closes connections that were silent for {told} s, shorter than workers"
            " and producers wait: they connect, and take over their own pending entries, again and"
            " again",
            _set("timeout 0"),
            evidence={"timeout": int(told)},
        )


def _message_limit(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    told = facts.server.config.get("proto-max-bulk-len", "")
    wanted = facts.settings.daemon.max_message_bytes
    if told.isdigit() and int(told) < wanted:
        yield CheckResult(
            f"producers may send messages of {wanted:,} bytes (daemon.max_message_bytes), but the"
            f" server takes no value above {int(told):,} bytes and cuts the connection",
            f"`redis-cli CONFIG SET proto-max-bulk-len {wanted}`, or lower"
            f" daemon.max_message_bytes to {told}",
            evidence={"proto-max-bulk-len": int(told), "daemon.max_message_bytes": wanted},
        )


def _slow(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    since = facts.now_unix_ms / 1000 - SLOW_SECONDS
    slow = [
        each for each in facts.server.slow if each.milliseconds >= SLOW_MS and each.at_unix >= since
    ]
    if slow:
        worst = max(slow, key=lambda each: each.milliseconds)
        ago = lasting(max(0.0, facts.now_unix_ms / 1000 - worst.at_unix))
        yield CheckResult(
            f"the server's slow log holds {plural(len(slow), 'command')} on keys of ours that"
            f" stopped everybody for {SLOW_MS:g} ms and more; the worst took"
            f" {worst.milliseconds:,.0f} ms {ago} ago, {worst.command} on {worst.key}",
            "see `redis-cli SLOWLOG GET` and `redis-cli LATENCY DOCTOR`; give the server a core of"
            " its own, and look for swapping and huge pages",
            evidence={
                "slow": [
                    {"command": each.command, "key": each.key, "milliseconds": each.milliseconds}
                    for each in slow[:8]
                ]
            },
        )


_NEEDS = (Need.SERVER,)
_PROBLEM, _WARNING, _NOTE = Severity.PROBLEM, Severity.WARNING, Severity.NOTE
CHECKS = (
    Check("server.eviction", _PROBLEM, "The server may evict keys.", _NEEDS, _eviction),
    Check(
        "server.persistence",
        _WARNING,
        "The append-only file is off, or not written through.",
        _NEEDS,
        _persistence,
    ),
    Check(
        "server.failing-writes",
        _PROBLEM,
        "The server failed to write its data to disk.",
        _NEEDS,
        _failing_writes,
    ),
    Check(
        "server.memory-full",
        _WARNING,
        "More than 85 % of maxmemory is used; a problem from 95 % on.",
        _NEEDS,
        _memory_full,
    ),
    Check("server.memory-unlimited", _NOTE, "There is no maxmemory.", _NEEDS, _memory_unlimited),
    Check(
        "server.clients",
        _WARNING,
        "More than 90 % of the allowed connections are open.",
        _NEEDS,
        _clients,
    ),
    Check(
        "server.clock",
        _WARNING,
        "The server's clock is more than 2 s off this host's.",
        _NEEDS,
        _clock,
    ),
    Check("server.replica", _PROBLEM, "The server is a replica.", _NEEDS, _replica),
    Check(
        "server.min-replicas",
        _WARNING,
        "The server has replicas, and takes writes without them.",
        _NEEDS,
        _min_replicas,
    ),
    Check("server.version", _PROBLEM, "The server is too old.", _NEEDS, _version),
    Check(
        "server.flaws",
        _WARNING,
        "The server's version has flaws by which clients get past their rights.",
        _NEEDS,
        _flaws,
    ),
    Check(
        "server.certificate",
        _WARNING,
        "A certificate on the way to the server ends within three weeks.",
        _NEEDS,
        _certificates,
    ),
    Check(
        "server.idle-timeout",
        _WARNING,
        "The server closes connections that are silent for less than a minute.",
        _NEEDS,
        _idle_timeout,
    ),
    Check(
        "server.message-limit",
        _PROBLEM,
        "The server takes no message as large as max_message_bytes.",
        _NEEDS,
        _message_limit,
    ),
    Check(
        "server.slow-commands",
        _WARNING,
        "The slow log of the last day holds commands of 100 ms and more on keys of ours.",
        _NEEDS,
        _slow,
    ),
)
