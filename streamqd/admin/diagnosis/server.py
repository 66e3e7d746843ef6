"""Checks of the server: durability, limits, product and version.

They also check that this Redis user has the permissions of a daemon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from streamqd import embedded, extras
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import DiagnosisFacts
from streamqd.admin.permissions import by_command
from streamqd.words import plural, rough_duration

# For each release line, the first version without a known vulnerability that lets clients run code
# on the host or bypass their permissions. Sources: the announcements of July 2026, which also fix
# the vulnerabilities of October 2025 (CVE-2025-49844, CVE-2025-46817, in scripting) and of May 2026
# (CVE-2026-23479, CVE-2026-25243, CVE-2026-23631). The versions of Redis 8 are later releases,
# which also fix an ACL bypass in XREAD and XREADGROUP (8.2.9, 8.4.6, 8.6.6, 8.8.2, 8.10.0) and more
# (8.10.1). Only this table depends on versions: the features of a server are found by trying.
#
# - Redis: github.com/docker-library/official-images/pull/21922 and the notes named there
# - Valkey: release notes of 7.2.14, 8.0.10, 8.1.9, 9.0.5 and 9.1.1 (CVE-2026-56684,
#   CVE-2026-63639)
#
# A release line that is not in the table and is older than the newest one no longer gets fixes.
Version = tuple[int, ...]
FIXED_VERSIONS: dict[str, dict[Version, int]] = {
    "redis": {
        (6, 2): 23,
        (7, 2): 15,
        (7, 4): 10,
        (8, 2): 9,
        (8, 4): 6,
        (8, 6): 6,
        (8, 8): 2,
        (8, 10): 1,
    },
    "valkey": {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
}
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def lowest_safe_version(product: str, version: str) -> str:
    """Return the lowest safe version that a server must be updated to, or '' if none is known.

    `product` is redis or valkey, and `version` is the server's current version, such as 7.2.4.
    Return '' as well if the server needs no update, or if the version cannot be parsed.
    """
    lines, found = FIXED_VERSIONS[product], _VERSION.match(version)
    if found is None:
        return ""
    line, patch = (int(found[1]), int(found[2])), int(found[3])
    if line > max(lines):
        return ""
    if patch >= lines.get(line, patch + 1):
        return ""
    to = min(each for each in lines if each >= line)
    return ".".join(map(str, (*to, lines[to])))


OLDEST = {"redis": (6, 2), "valkey": (7, 2)}  # the first version that has every command
FULL, NEARLY_FULL = 0.95, 0.85  # fractions of maxmemory
CLIENTS = 0.9  # fraction of maxclients
SKEW_SECONDS = 2.0
IDLE_SECONDS = 60  # a daemon, producer or pool never leaves a connection idle for longer
SLOW_MS = 100.0  # run time of a slow command, during which no other client is served
SYNC_MS = 100  # shortest slow sync of the append-only file
SLOW_COMMAND_SECONDS = 86_400  # older slow commands are ignored


def _advise_setting(setting: str) -> str:
    now = f"`redis-cli CONFIG SET {setting}`"
    return f"write `{setting}` into the server's configuration, and set it now: {now}"


@check("server.eviction", Severity.PROBLEM, Need.SERVER)
def _eviction(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server may evict keys."""
    policy = facts.server.info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        allowed = facts.settings.redis.allow_eviction
        yield CheckResult(
            f"the server may evict keys (maxmemory-policy {policy}): evicting a stream loses its"
            " messages, and evicting a lease can run messages twice",
            _advise_setting("maxmemory-policy noeviction"),
            evidence={"maxmemory_policy": policy, "redis.allow_eviction": allowed},
            severity=Severity.WARNING if allowed else None,
        )


@check("server.persistence", Severity.WARNING, Need.SERVER)
def _persistence(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The append-only file is off, or its writes are not synced."""
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
            _advise_setting("appendonly yes"),
            evidence=evidence,
        )
    elif sync == "no":
        yield CheckResult(
            "the append-only file is synced only by the kernel (appendfsync no): a power loss"
            " loses up to half a minute of acknowledged writes",
            _advise_setting("appendfsync everysec"),
            evidence=evidence,
        )


@check("server.slow-disk", Severity.WARNING, Need.SERVER)
def _slow_disk(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Syncs of the append-only file take at least 0.1 s."""
    server = facts.server
    delayed = server.number("aof_delayed_fsync")
    worst = max(server.disk_latency_ms.values(), default=0)
    seen = []
    if delayed:
        seen.append(
            f"{plural(delayed, 'write')} waited more than 2 s for a sync (aof_delayed_fsync)"
        )
    if worst >= SYNC_MS:
        event = max(server.disk_latency_ms, key=server.disk_latency_ms.__getitem__)
        seen.append(f"the slowest sync took {worst:,} ms ({event})")
    if server.syncing_seconds * 1000 >= SYNC_MS:
        seen.append(f"the current sync has taken {server.syncing_seconds:.1f} s so far")
    if not seen:
        return
    at_risk = server.config.get("appendfsync") != "always"
    lost = " acknowledged writes of up to 2 s are lost if the server's process dies then;"
    yield CheckResult(
        f"the server's disk is slow:{lost if at_risk else ''} {', '.join(seen)}",
        "move the server's directory (`redis-cli CONFIG GET dir`) to a faster disk, or to a disk"
        " that no other program writes to",
        evidence={
            "aof_delayed_fsync": delayed,
            "latency_ms": dict(server.disk_latency_ms),
            "syncing_seconds": round(server.syncing_seconds, 2),
        },
    )


@check("server.failing-writes", Severity.PROBLEM, Need.SERVER)
def _failing_writes(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server failed to write its data to disk."""
    names = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
    failing = {name: facts.server.info.get(name) for name in names}
    failing = {name: status for name, status in failing.items() if status not in (None, "ok")}
    if failing:
        yield CheckResult(
            f"the server failed to write its data to disk ({', '.join(failing)})",
            "read the server's log, make room, or give it write permission for its directory"
            " (`redis-cli CONFIG GET dir`), then `redis-cli BGSAVE`",
            evidence=failing,
        )


@check("server.memory-full", Severity.WARNING, Need.SERVER)
def _memory_full(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server uses more than 85% of maxmemory. Above 95%, this is a problem."""
    limit, used = facts.server.number("maxmemory"), facts.server.number("used_memory")
    if limit and used > limit * NEARLY_FULL:
        yield CheckResult(
            f"{used / limit:.0%} of the server's memory limit is used; when it is full, producers"
            " and retries are rejected",
            "to see what holds the memory, run `streamqd doctor stream TOPIC`. Then run `streamqd"
            " trim TOPIC`, or raise the limit with `redis-cli CONFIG SET maxmemory BYTES`",
            evidence={"used_memory": used, "maxmemory": limit},
            severity=Severity.PROBLEM if used > limit * FULL else None,
        )


@check("server.memory-unlimited", Severity.NOTE, Need.SERVER)
def _memory_unlimited(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """No maxmemory is set."""
    if facts.server.info.get("maxmemory") == "0":
        yield CheckResult(
            "the server has no memory limit: when the host runs out of memory, the kernel kills the"
            " server. With a limit, producers would get an error instead",
            "bound the topics: `streamqd topic settings TOPIC retention.max_bytes=1GiB`"
            if facts.settings.redis.url == embedded.URL
            else _advise_setting("maxmemory BYTES"),
            evidence={
                "maxmemory": 0,
                "used_memory": facts.server.number("used_memory"),
                "total_system_memory": facts.server.number("total_system_memory"),
            },
        )


@check("server.clients", Severity.WARNING, Need.SERVER)
def _clients(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """More than 90% of the allowed connections are open."""
    now = facts.server.number("connected_clients")
    most = facts.server.config.get("maxclients", facts.server.info.get("maxclients", ""))
    limit = int(most) if most.isdigit() else 0
    if limit and now > limit * CLIENTS:
        yield CheckResult(
            f"{now:,} of {limit:,} connections that the server allows are open, and every worker"
            " needs its own",
            f"raise the limit: `redis-cli CONFIG SET maxclients {2 * limit}`, and the server's"
            " limit of open files with it",
            evidence={"connected_clients": now, "maxclients": limit},
        )


@check("server.clock", Severity.WARNING, Need.SERVER)
def _clock(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The clocks of the server and this host differ by more than 2 s."""
    skew = facts.server.skew_seconds
    if skew is not None and abs(skew) > SKEW_SECONDS:
        yield CheckResult(
            f"the server's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this"
            " host's: leases are not affected, but message ages and log times do not match",
            "synchronize both hosts' clocks: `timedatectl set-ntp true`",
            evidence={"skew_seconds": skew, "round_trip_ms": facts.server.round_trip_ms},
        )


@check("server.replica", Severity.PROBLEM, Need.SERVER)
def _replica(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server is a replica."""
    info = facts.server.info
    if info.get("role", "master") != "master":
        primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        yield CheckResult(
            f"the server is a replica of {primary} and rejects writes",
            f"name the primary in redis.url (`redis://{primary}`), or promote this one:"
            " `redis-cli REPLICAOF NO ONE`",
            evidence={
                "role": info["role"],
                "primary": primary,
                "link": info.get("master_link_status"),
            },
        )


@check("server.min-replicas", Severity.WARNING, Need.SERVER)
def _min_replicas(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server has replicas, but accepts writes while they are disconnected."""
    info = facts.server.info
    # The server reports the number of good replicas only when it requires some.
    if facts.server.number("connected_slaves") and "min_slaves_good_slaves" not in info:
        yield CheckResult(
            "the server has replicas and accepts writes without them: a master that is cut off"
            " keeps accepting writes, which are lost at the failover",
            f"{_advise_setting('min-replicas-to-write 1')}, then the same with"
            " `min-replicas-max-lag 10`",
            evidence={"connected_slaves": facts.server.number("connected_slaves")},
        )


def _product(facts: DiagnosisFacts) -> tuple[str, str]:
    """Return the product and the version. (Valkey reports itself as Redis 7.2.4 to old clients.)"""
    info = facts.server.info
    product = "valkey" if "valkey_version" in info else "redis"
    return product, info.get(f"{product}_version", "")


@check("server.vulnerabilities", Severity.WARNING, Need.SERVER)
def _vulnerabilities(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server's version has known vulnerabilities."""
    product, version = _product(facts)
    fix = lowest_safe_version(product, version)
    if fix:
        yield CheckResult(
            f"{product} {version} has known vulnerabilities that let logged-in clients bypass their"
            f" permissions or run code on the server's host. A distribution may have fixed them"
            f" without a new version number",
            f"update it to {product} {fix} or later, see `redis-cli INFO server`. Until then,"
            f" allow only trusted clients to log in (docs/how-to/secure.md)",
            evidence={f"{product}_version": version, "fixed_in": fix},
        )


@check("server.version", Severity.PROBLEM, Need.SERVER)
def _version(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server is too old."""
    product, version = _product(facts)
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers and numbers < OLDEST[product]:
        oldest = ".".join(map(str, OLDEST[product]))
        yield CheckResult(
            f"the server is {product} {version}, which lacks commands that streamqd needs",
            f'run {product} {oldest} or later, or use redis.url = "embedded:", which needs'
            f" {extras.hint('embedded')}",
            evidence={f"{product}_version": version, "oldest": oldest},
        )


@check("server.idle-timeout", Severity.WARNING, Need.SERVER)
def _idle_timeout(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server closes idle connections after less than a minute."""
    limit = facts.server.config.get("timeout", "0")
    if limit.isdigit() and 0 < int(limit) < IDLE_SECONDS:
        yield CheckResult(
            f"the server closes connections that were silent for {limit} s, which is less than"
            f" workers and producers wait: they reconnect and list their pending entries again"
            f" and again",
            _advise_setting("timeout 0"),
            evidence={"timeout": int(limit)},
        )


@check("server.message-limit", Severity.PROBLEM, Need.SERVER)
def _message_limit(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The server rejects messages as large as max_message_bytes."""
    limit = facts.server.config.get("proto-max-bulk-len", "")
    wanted = facts.settings.daemon.max_message_bytes
    if limit.isdigit() and int(limit) < wanted:
        yield CheckResult(
            f"producers may send messages of {wanted:,} bytes (daemon.max_message_bytes), but the"
            f" server accepts no value above {int(limit):,} bytes and cuts the connection",
            f"`redis-cli CONFIG SET proto-max-bulk-len {wanted}`, or lower"
            f" daemon.max_message_bytes to {limit}",
            evidence={"proto-max-bulk-len": int(limit), "daemon.max_message_bytes": wanted},
        )


@check("server.slow-commands", Severity.WARNING, Need.SERVER)
def _slow(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The slow log of the last day has commands on streamqd's keys that took at least 100 ms."""
    since = facts.now_unix_ms / 1000 - SLOW_COMMAND_SECONDS
    slow = [
        each for each in facts.server.slow if each.milliseconds >= SLOW_MS and each.at_unix >= since
    ]
    if slow:
        worst = max(slow, key=lambda each: each.milliseconds)
        ago = rough_duration(max(0.0, facts.now_unix_ms / 1000 - worst.at_unix))
        yield CheckResult(
            f"the server's slow log contains {plural(len(slow), 'command')} on streamqd's keys that"
            f" blocked every client for at least {SLOW_MS:g} ms; the worst took"
            f" {worst.milliseconds:,.0f} ms {ago} ago, {worst.command} on {worst.key}",
            "see `redis-cli SLOWLOG GET` and `redis-cli LATENCY DOCTOR`. Reserve a core for the"
            " server, and check for swapping and huge pages",
            evidence={
                "slow": [
                    {"command": each.command, "key": each.key, "milliseconds": each.milliseconds}
                    for each in slow[:8]
                ]
            },
        )


KEYS_SHOWN = 4


@check("permissions.missing", Severity.PROBLEM, Need.PERMISSIONS)
def _missing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The Redis user lacks a permission that a daemon needs."""
    user = facts.settings.redis.username or "default"
    for command, shown in by_command(facts.missing_permissions).items():
        name = command.lower().replace(" ", "|")
        where = f" on {shown[0]}" if shown else ""
        more = f" and {len(shown) - 1} other keys" if len(shown) > 1 else ""
        patterns = f"{facts.settings.keys.control}:*", f"{facts.settings.keys.streams}:*"
        yield CheckResult(
            f"the Redis user {user} may not run {command}{where}{more}",
            f"`redis-cli ACL SETUSER {user} +{name} ~{patterns[0]} ~{patterns[1]}`",
            about=command,
            evidence={"command": command, "keys": shown[:KEYS_SHOWN]},
        )
