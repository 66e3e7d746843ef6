"""The checks of `streamqd doctor`, which reads all facts once and then runs every check.

Nothing is written. `facts` gathers the facts, and `stream` measures the memory of a topic for
`doctor stream`. The other modules contain the checks. Reports list them in this order: server,
topics, partitions, schedules, outboxes, values, fleet and host. The checks of instances are in
`admin/instances.py`, because other views need them too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from streamqd.admin import instances
from streamqd.admin import permissions as rights_of
from streamqd.admin.checks import Check, Finding, Need, Severity, run_checks
from streamqd.admin.diagnosis import (
    fleet,
    host,
    outboxes,
    partitions,
    schedules,
    server,
    topics,
    values,
)
from streamqd.admin.diagnosis.facts import (
    BODIES_MAX,
    DiagnosisFacts,
    FleetHealth,
    ReadTable,
    ServerHealth,
    changed_runs,
    gather_assignments,
    gather_fleet,
    gather_partitions,
    gather_server,
    gather_topics,
    select_partitions,
)
from streamqd.admin.published import Fleet
from streamqd.admin.reading import ViewReader, server_unix_ms
from streamqd.config import Settings
from streamqd.errors import InvalidRequestError, RedisResponseError
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store

CHECKS: tuple[Check[DiagnosisFacts], ...] = tuple(
    each
    for area in (server, topics, partitions, schedules, outboxes, values, fleet, instances, host)
    for each in vars(area).values()
    if isinstance(each, Check)
)


@dataclass(frozen=True, slots=True)
class DiagnosisReport:
    """The report of `doctor`. `ok` is True if there is no problem and no warning.

    `checks` contains the IDs of the checks that ran. `unseen` contains a sentence for each part
    that could not be examined. If Redis did not reply, `server` is '', `now_unix_ms` is 0, and only
    this host was examined.
    """

    ok: bool
    server: str
    now_unix_ms: int
    checks: list[str]
    findings: list[Finding]
    unseen: list[str]


def select_checks(names: Sequence[str]) -> list[Check[DiagnosisFacts]]:
    """Return the checks with these IDs or areas, or all checks if none are given.

    Raises InvalidRequestError if a name is unknown.
    """
    if not names:
        return list(CHECKS)
    known = {check.id for check in CHECKS} | {check.area for check in CHECKS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "`streamqd doctor --list` shows them"
            raise InvalidRequestError(f"check {name} not found; {hint}")
    return [check for check in CHECKS if check.id in names or check.area in names]


def examine(
    link: Connection,
    settings: Settings,
    checks: Sequence[Check[DiagnosisFacts]],
    *,
    unit: str = "",
    read_table: ReadTable | None = None,
) -> DiagnosisReport:
    """Read the facts that the checks need, and run the checks. Writes nothing.

    `unit` is the name or the file of the daemon's systemd unit, or '' to look for the usual ones.
    `read_table` is a function that reads the tables of an outbox. If it is None, no database is
    read. Raises RedisUnavailableError, and RedisResponseError if the server rejects all commands.
    """
    needs = {need for check in checks for need in check.needs}
    facts = gather(link, settings, needs, unit, read_table)
    findings = [found for check in checks for found in _run_check(check, facts)]
    return DiagnosisReport(
        ok=not any(each.severity != Severity.NOTE for each in findings),
        server=link.address,
        now_unix_ms=facts.now_unix_ms,
        checks=[check.id for check in checks],
        findings=findings,
        unseen=list(facts.unseen),
    )


def examine_without_redis(
    settings: Settings, checks: Sequence[Check[DiagnosisFacts]], error: str, *, unit: str = ""
) -> DiagnosisReport:
    """Run the checks that do not need Redis. Call this if Redis does not answer."""
    some = [check for check in checks if set(check.needs) == {Need.HOST}]
    seen = host.gather(settings, unit, 0) if some else None
    facts = DiagnosisFacts(settings, 0, host=seen)
    unseen = [f"everything in Redis: {error}"]
    return DiagnosisReport(
        False, "", 0, [check.id for check in some], run_checks(some, facts), unseen
    )


def _run_check(check: Check[DiagnosisFacts], facts: DiagnosisFacts) -> Iterator[Finding]:
    """Yield the findings of a check.

    In a cluster, a check of the server runs once for each master.
    """
    if set(check.needs) != {Need.SERVER} or not facts.servers:
        yield from run_checks([check], facts)
        return
    for address, one in facts.servers.items():
        for found in run_checks([check], replace(facts, server=one)):
            yield replace(found, about=address)


def gather(
    link: Connection,
    settings: Settings,
    needs: set[Need],
    unit: str,
    read_table: ReadTable | None = None,
) -> DiagnosisFacts:
    """Read only the facts that these needs require."""
    store = Store(link, Keys(settings.keys.control, settings.keys.streams))
    name = settings.daemon.fleet
    reader = ViewReader(store, tolerant=True)  # checks in `values` report what it cannot read
    now = server_unix_ms(link)
    unseen: list[str] = []
    servers: dict[str, ServerHealth] = {}
    for node in link.masters() if Need.SERVER in needs else ():
        servers[node.address] = gather_server(reader.for_store(Store(node, store.keys)))
    missing_permissions, members, found = [], FleetHealth(), []
    if Need.PERMISSIONS in needs:
        try:
            missing_permissions = rights_of.find_missing(store, name)
        except RedisResponseError as error:
            missing_permissions = [rights_of.MissingPermission("MULTI", "")]
            unseen.append(f"the other permissions, because MULTI is refused: {error}")
    if needs & {Need.FLEET, Need.TOPICS, Need.ASSIGNMENTS}:
        members = gather_fleet(Fleet(store, name, settings.daemon.lease_ttl), reader)
    facts = DiagnosisFacts(settings, now, fleet=members)
    if needs & {Need.TOPICS, Need.ASSIGNMENTS}:
        found = gather_topics(reader, settings, [topic for topic, _ in facts.offered])
    places, total = select_partitions(found if Need.ASSIGNMENTS in needs else [])
    if len(places) < total:
        unseen.append(f"{total - len(places):,} of {total:,} partitions: the last of each topic")
    if Need.BODIES in needs and len(places) > BODIES_MAX:
        unseen.append(f"messages beyond {BODIES_MAX} partitions, for their size")
    looked = gather_partitions(reader, places, bodies=Need.BODIES in needs)
    assignments = gather_assignments(reader, looked)
    names = [(topic.name, number) for topic, number in places]
    if Need.VALUES in needs:
        long = values.gather(reader, found, names, [each.assignment for each in assignments])
        if long:
            unseen.append(f"the values of {len(long):,} long hashes, such as {long[0]}")
    if Need.FLEET in needs:
        members = replace(members, changed=changed_runs(reader, name, members.state.heartbeats))
    counts = {topic.name: topic.partitions or 0 for topic in found}
    owned = sum(counts.get(each.topic, 0) for each in settings.consumers)
    unseen += [
        f"everything that needs {words}, which this user may not run"
        for words in sorted(reader.forbidden)
    ]
    facts = DiagnosisFacts(
        settings=settings,
        now_unix_ms=now,
        server=next(iter(servers.values()), facts.server),
        servers=servers if len(servers) > 1 else {},
        missing_permissions=missing_permissions,
        fleet=members,
        topics=found,
        partitions=looked,
        assignments=assignments,
        schedules=schedules.gather(reader, unseen, wanted=Need.SCHEDULES in needs),
        outboxes=outboxes.gather(
            reader, unseen, settings, read_table, wanted=Need.OUTBOXES in needs
        ),
        host=host.gather(settings, unit, owned) if Need.HOST in needs else None,
        unseen=unseen,
    )
    if Need.VALUES in needs:
        facts = replace(facts, values=values.find_unreadable(reader, facts, names))
    return facts
