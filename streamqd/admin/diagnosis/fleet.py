"""Checks of the fleet: who lives, what they offer and publish, what operators ordered."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin.diagnosis.declaration import (
    Check,
    CheckResult,
    Need,
    Severity,
    lasting,
    plural,
    spans,
)
from streamqd.admin.diagnosis.facts import DiagnosisFacts
from streamqd.admin.diagnosis.letters import units_of
from streamqd.store.directives import EVERYBODY

PAUSED_SECONDS = 3_600.0
QUIET_SECONDS = 30.0  # of a housekeeper, which publishes every 2 s
YOUNG_SECONDS = 30.0  # an instance that has just started has published nothing yet
ROUND_TRIPS = 50  # of the server, which a lease should be worth: 10 for each renewal


def _empty(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    work = facts.configured or any(topic.groups for topic in facts.topics)
    if work and not facts.living:
        fleet = facts.settings.daemon.fleet
        yield CheckResult(
            f"no instance of the fleet {fleet} is alive: nothing is handled, moved on or trimmed",
            "start one: `systemctl start streamqd`, or `streamqd --config FILE`; if one runs,"
            " compare its daemon.fleet, keys and redis.url with this configuration's",
            about=fleet,
            evidence={"members": [beat.instance for beat in facts.fleet.beats][:16]},
        )


def _silent(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for beat in facts.fleet.beats:
        silence = (facts.now_unix_ms - beat.beat_unix_ms) / 1000
        if silence * 1000 > facts.stale_ms:
            yield CheckResult(
                f"the instance {beat.instance} has been silent for {lasting(silence)} without"
                " having left the fleet: it was killed, is stopped, or does not reach Redis",
                f"on {beat.info.get('host', 'its host')}: `systemctl status streamqd`; it is"
                " forgotten by itself after a while",
                about=beat.instance,
                evidence={
                    "silent_seconds": round(silence),
                    "host": beat.info.get("host"),
                    "pid": beat.info.get("pid"),
                },
            )


def _not_offered(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    if not facts.living:
        return
    for topic in facts.topics:
        if topic.partitions is None:
            continue
        mine = {group for name, group in facts.configured if name == topic.name}
        there = {
            group for each in facts.partitions if each.topic == topic.name for group in each.groups
        }
        for group in sorted(mine | (topic.groups & there)):
            if (topic.name, group) in facts.offered:
                continue
            yield CheckResult(
                f"no living instance runs the consumer {topic.name}/{group}, so its"
                f" {plural(topic.partitions, 'partition')} stand still",
                f"`streamqd reload` lets instances read their configuration again; an instance run"
                " with --only, or of an older version, needs a restart; if nobody needs the group:"
                f" `streamqd group delete {topic.name} {group}`",
                about=f"{topic.name}/{group}",
                evidence={"living": [beat.instance for beat in facts.living][:16]},
            )


def _twins(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for beat in facts.fleet.beats:
        told = facts.fleet.summaries.get(beat.instance, {})
        own = beat.info.get("host"), beat.info.get("pid")
        other = told.get("host"), told.get("pid")
        # A summary of the run before lives on for some seconds.
        began = beat.info.get("started")
        young = isinstance(began, int | float) and facts.now_unix_ms / 1000 - began < YOUNG_SECONDS
        differs = None not in (*own, *other) and own != other and not young
        if differs or beat.instance in facts.fleet.changed:
            yield CheckResult(
                f"two instances run under the one name {beat.instance}"
                + (
                    f": on {own[0]} (pid {own[1]}) and {other[0]} (pid {other[1]})"
                    if differs
                    else ": the run that beats changed while we looked"
                ),
                "give each a name of its own in daemon.instance (and a daemon.state_dir), and"
                " restart the second: `systemctl restart streamqd`",
                about=beat.instance,
                evidence={
                    "beats": {"host": own[0], "pid": own[1], "boot": beat.info.get("boot")},
                    "publishes": {"host": other[0], "pid": other[1]},
                    "changed": beat.instance in facts.fleet.changed,
                },
            )


def _orders_for_gone(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    known = {beat.instance for beat in facts.living} | {EVERYBODY}
    orders = facts.fleet.orders
    gone = {f"move:{unit}": order.to for unit, order in orders.moves.items()}
    gone |= {f"drain:{name}": name for name in orders.drains}
    gone |= {f"reload:{name}": name for name in orders.reloads}
    gone = {order: name for order, name in gone.items() if name not in known}
    if gone:
        names = sorted(set(gone.values()))
        yield CheckResult(
            f"{plural(len(gone), 'order')} of operators {'is' if len(gone) == 1 else 'are'} for"
            f" {', '.join(names[:4])}, which do not live: they take effect when one of that name"
            " comes back",
            "`streamqd control clear --gone --yes`",
            evidence={"orders": sorted(gone)[:16], "instances": names[:16]},
        )


def _strange_orders(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for name, problem in facts.fleet.orders.strange.items():
        yield CheckResult(
            f"the order {name!r} cannot be read ({problem}), so nobody obeys it",
            f"`streamqd control clear '{name}' --yes`, unless a later version of streamqd wrote it",
            about=name,
            evidence={"order": name, "problem": problem},
        )


def _paused(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for scope, order in facts.fleet.orders.pauses.items():
        since = (facts.now_unix_ms - order.at_unix_ms) / 1000
        if since > PAUSED_SECONDS:
            why = f" ({order.why})" if order.why else ""
            by = order.by or "nobody known"
            yield CheckResult(
                f"{scope} has been paused for {lasting(since)} by {by}{why}",
                "`streamqd resume --all`"
                if scope == (None, None, None)
                else f"`streamqd resume {scope}`",
                about=str(scope),
                evidence={"at_unix_ms": order.at_unix_ms, "by": order.by, "why": order.why},
            )


def _stopped(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for scope, order in facts.fleet.orders.stops.items():
        since = (facts.now_unix_ms - order.at_unix_ms) / 1000
        if since > PAUSED_SECONDS:
            why = f" ({order.why})" if order.why else ""
            yield CheckResult(
                f"the group {scope.group} of {scope.topic} has been stopped for {lasting(since)}"
                f" by {order.by or 'nobody known'}{why}",
                f"`streamqd group start {scope.topic} {scope.group}`",
                about=f"{scope.topic}/{scope.group}",
                evidence={"at_unix_ms": order.at_unix_ms, "by": order.by, "why": order.why},
            )


def _crash_loops(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    broken: dict[tuple[str, str], dict[int, str]] = {}
    for beat in facts.living:
        told = beat.info.get("broken")
        for unit in told if isinstance(told, list) else ():
            if isinstance(unit, list | tuple) and len(unit) == 3 and isinstance(unit[1], int):
                topic, partition, group = unit
                broken.setdefault((str(topic), str(group)), {})[partition] = beat.instance
    for instance, summary in facts.fleet.summaries.items():
        for each in units_of(summary):
            if each.get("state") == "broken" and isinstance(each.get("partition"), int):
                pair = str(each.get("topic")), str(each.get("group"))
                broken.setdefault(pair, {})[each["partition"]] = instance
    for (topic, group), where in broken.items():
        first = min(where)
        yield CheckResult(
            f"the workers of {topic}/{group} crash in a loop on {spans(where)}"
            f" ({', '.join(sorted(set(where.values()))[:4])}) and were given up for a while",
            f"`streamqd why {topic}/{first}/{group}` and `worker.` in the log of {where[first]} say"
            f" of what; mend the handler and `streamqd reload`",
            about=f"{topic}/{group}",
            evidence={"partitions": {str(number): who for number, who in where.items()}},
        )


def _limited(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for beat in facts.living:
        capacity, problem = beat.info.get("capacity"), beat.info.get("capacity_problem")
        if not isinstance(capacity, int):
            continue
        yield CheckResult(
            f"{beat.instance} can run no more than {plural(capacity, 'partition')}: the system"
            f" refuses it another process ({str(problem)[:200]})",
            f"on {beat.info.get('host', 'its host')}: raise LimitNOFILE and TasksMax of the service"
            " (`ulimit -n`, `ulimit -u`), or give it more memory; it takes partitions again by"
            " itself; until then start another instance",
            about=beat.instance,
            evidence={"capacity": capacity, "problem": problem, "host": beat.info.get("host")},
        )


def _housekeeper(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for beat in facts.living:
        began = beat.info.get("started")
        if isinstance(began, int | float) and facts.now_unix_ms / 1000 - began < YOUNG_SECONDS:
            continue
        told = facts.fleet.summaries.get(beat.instance)
        at = told.get("at_unix_ms") if told else None
        quiet = (facts.now_unix_ms - at) / 1000 if isinstance(at, int) else None
        if told and quiet is not None and quiet < QUIET_SECONDS and told.get("redis_up", True):
            continue
        since = f"for {lasting(quiet)}" if quiet is not None else "at all lately"
        yield CheckResult(
            f"{beat.instance} beats, but its housekeeper has not been heard {since}: retries are"
            " not moved on and nothing is trimmed on its partitions",
            f"see `housekeeper.` in its log; on {beat.info.get('host', 'its host')}:"
            " `systemctl restart streamqd` gives it a new one",
            about=beat.instance,
            evidence={
                "quiet_seconds": quiet,
                "host": beat.info.get("host"),
                "redis_up": told.get("redis_up") if told else None,
            },
        )


def _short_lease(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    trip, ttl = facts.server.round_trip_ms, facts.settings.daemon.lease_ttl
    if trip is not None and trip * ROUND_TRIPS > ttl * 1000:
        wanted = -(-trip * ROUND_TRIPS // 1000)
        yield CheckResult(
            f"a round trip to the server takes {trip:,.1f} ms, and daemon.lease_ttl is only"
            f" {ttl:g} s: renewals come too late, and partitions change owners",
            f'write `lease_ttl = "{wanted:.0f}s"` or more under [daemon] on every instance, or run'
            " nearer to the server",
            evidence={"round_trip_ms": trip, "lease_ttl_seconds": ttl},
        )


_PROBLEM, _WARNING, _FLEET = Severity.PROBLEM, Severity.WARNING, (Need.FLEET,)
_TOPICS = (Need.FLEET, Need.TOPICS)
CHECKS = (
    Check("fleet.empty", _PROBLEM, "No instance lives, but there is work.", _TOPICS, _empty),
    Check("fleet.silent", _WARNING, "An instance went without leaving.", _FLEET, _silent),
    Check(
        "fleet.not-offered",
        _PROBLEM,
        "Instances live, but none runs a consumer that is configured or was run before.",
        (Need.FLEET, Need.UNITS),
        _not_offered,
    ),
    Check("fleet.twins", _PROBLEM, "Two instances run under one name.", _FLEET, _twins),
    Check(
        "fleet.orders-for-gone",
        _WARNING,
        "An order is for an instance that does not live.",
        _FLEET,
        _orders_for_gone,
    ),
    Check("fleet.orders-unreadable", _WARNING, "An order cannot be read.", _FLEET, _strange_orders),
    Check("fleet.paused", _WARNING, "A pause is older than an hour.", _FLEET, _paused),
    Check(
        "fleet.stopped", _WARNING, "A group has been stopped for over an hour.", _FLEET, _stopped
    ),
    Check("fleet.crash-loop", _PROBLEM, "Workers crash in a loop.", _FLEET, _crash_loops),
    Check(
        "fleet.limited",
        _PROBLEM,
        "An instance serves fewer partitions, because the system refuses it processes.",
        _FLEET,
        _limited,
    ),
    Check(
        "fleet.housekeeper",
        _PROBLEM,
        "An instance lives, but its housekeeper has been silent for 30 s, or misses Redis.",
        _FLEET,
        _housekeeper,
    ),
    Check(
        "fleet.short-lease",
        _WARNING,
        "lease_ttl is worth fewer than 50 round trips to the server.",
        (Need.SERVER,),
        _short_lease,
    ),
)
