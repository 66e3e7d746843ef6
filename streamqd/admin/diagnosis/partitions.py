"""Checks of the partitions: keys, groups, due times, dead letters, lost messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from streamqd.admin.assignments import by_group
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import AssignmentFacts, Delays, DiagnosisFacts
from streamqd.admin.reading import SEQ_MAX, read_id
from streamqd.admin.why import FAILING_SHARE, share_failing
from streamqd.words import plural, rough_duration, spans

AHEAD_MS = 86_400_000  # ms by which no producer's clock is ahead of the server's clock
ROOM_MIN = 1 << 32  # number of IDs that should be left
HELD_SECONDS = 300.0  # tolerance after max_age, as trimming takes time and removes whole nodes


def numbers(assignments: Iterable[AssignmentFacts]) -> list[int]:
    """Return the partition number of each assignment."""
    return [each.assignment.partition for each in assignments]


@check("partitions.wrong-type", Severity.PROBLEM, Need.ASSIGNMENTS)
def _wrong_type(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A key has the wrong type."""
    wrong = {
        key: (topic, kind)
        for topic, keys in (
            *((each.topic, each.wrong_types) for each in facts.partitions),
            *((each.assignment.topic, each.wrong_types) for each in facts.assignments),
        )
        for key, kind in keys.items()
    }
    for key, (topic, kind) in wrong.items():
        yield CheckResult(
            f"the key {key} has the type {kind}, which streamqd did not write: commands on it fail",
            f"find the client that writes it (`redis-cli OBJECT ENCODING {key}` shows its form),"
            f" then rename it: `redis-cli RENAME {key} ELSEWHERE`",
            about=topic,
            evidence={"key": key, "type": kind},
        )


@check("partitions.group-missing", Severity.PROBLEM, Need.FLEET, Need.ASSIGNMENTS)
def _group_missing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A group is missing on a partition of its topic."""
    for topic in facts.topics:
        looked = [each for each in facts.partitions if each.topic == topic.name]
        expected = {
            group for name, group in facts.configured | facts.offered if name == topic.name
        } | topic.groups
        for group in sorted(expected):
            lacking = [each.partition for each in looked if group not in each.groups]
            if not lacking:
                continue
            yield CheckResult(
                f"group {group} does not exist on {spans(lacking)} of {topic.name}, so it receives"
                " no messages from there, and nothing is trimmed",
                "run `streamqd reload`, which creates the group again at its last known position."
                " If the group is not needed, remove it from the configuration and run"
                f" `streamqd group delete {topic.name} {group}`",
                about=f"{topic.name}/{group}",
                evidence={"partitions": lacking, "of": len(looked)},
            )


def _is_abandoned(facts: DiagnosisFacts, each: AssignmentFacts) -> bool:
    pair = each.assignment.topic, each.assignment.group
    wanted = pair in facts.offered or pair in facts.configured
    return each.blocking is not None and each.blocking.abandoned and not wanted


@check("partitions.group-abandoned", Severity.WARNING, Need.FLEET, Need.ASSIGNMENTS)
def _group_abandoned(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A group with messages has no owner and no consumer, and was not read for 10 minutes."""
    for (topic, group), assignments in by_group(
        each for each in facts.assignments if _is_abandoned(facts, each)
    ).items():
        again = "the Spark query" if assignments[0].assignment.is_of_query else "its consumer"
        yield CheckResult(
            f"group {group} has messages on {spans(numbers(assignments))} of {topic} and no reader"
            " for them, so they are never trimmed",
            f"start {again} again. If the group is not needed, run `streamqd group delete {topic}"
            f" {group} --yes`",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(assignments),
                "pending": sum(each.pending for each in assignments),
                "idle_seconds": min(
                    (
                        each.blocking.idle_seconds
                        for each in assignments
                        if each.blocking and each.blocking.idle_seconds is not None
                    ),
                    default=None,
                ),
            },
        )


@check("partitions.floor-held", Severity.WARNING, Need.FLEET, Need.ASSIGNMENTS)
def _floor_held(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A group still needs messages that are at least 5 minutes older than the topic's max_age."""
    limits = {
        topic.name: facts.now_unix_ms - (topic.holds.retention.max_age + HELD_SECONDS) * 1000
        for topic in facts.topics
        if topic.holds.retention.max_age is not None
    }

    def holds(each: AssignmentFacts) -> bool:
        needs = each.blocking.needs_unix_ms if each.blocking else None
        limit = limits.get(each.assignment.topic)
        return (
            needs is not None
            and limit is not None
            and needs < limit
            and not _is_abandoned(facts, each)
        )

    for (topic, group), assignments in by_group(filter(holds, facts.assignments)).items():
        oldest = min(
            each.blocking.needs_unix_ms or 0 for each in assignments if each.blocking is not None
        )
        ago = rough_duration((facts.now_unix_ms - oldest) / 1000)
        yield CheckResult(
            f"group {group} still needs messages that are {ago} old on"
            f" {spans(numbers(assignments))} of {topic}, so retention cannot delete them",
            f"run `streamqd why {topic}/{assignments[0].assignment.partition}/{group}` to see the"
            f" reason, and `streamqd doctor stream {topic}` to see the memory",
            about=f"{topic}/{group}",
            evidence={"partitions": numbers(assignments), "oldest_unix_ms": oldest},
        )


@check("partitions.archive-lag", Severity.WARNING, Need.ASSIGNMENTS)
def _archive_behind(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Messages older than max_age are not archived yet, so they cannot be trimmed."""
    for topic in facts.topics:
        age = topic.holds.retention.max_age
        if topic.holds.archive != "required" or age is None:
            continue
        limit = facts.now_unix_ms - (age + HELD_SECONDS) * 1000
        held = [
            each.partition
            for each in facts.partitions
            if each.topic == topic.name
            and each.positions is not None
            and each.positions.unarchived
            and read_id(each.positions.unarchived).ms < limit
        ]
        if held:
            yield CheckResult(
                f"retention cannot delete messages on {spans(held)} of {topic.name}, because they"
                f" are not archived",
                f"run `streamqd pipeline archive --topic {topic.name}`. If you do not need an"
                f" archive, run `streamqd topic settings {topic.name} archive=off`",
                about=topic.name,
                evidence={"partitions": held},
            )


@check("partitions.other-client", Severity.WARNING, Need.ASSIGNMENTS)
def _other_clients(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Another client has pending entries of a group."""
    for (topic, group), assignments in by_group(
        each for each in facts.assignments if each.other_clients
    ).items():
        names = sorted({name for each in assignments for name in each.other_clients})
        held = sum(sum(each.other_clients.values()) for each in assignments)
        yield CheckResult(
            f"another client ({', '.join(names[:4])}) has {plural(held, 'pending message')} in"
            f" group {group} on {spans(numbers(assignments))} of {topic}",
            "stop that client, or give it a separate group. A running daemon takes over idle"
            f" messages. If no daemon runs, use `streamqd group adopt {topic} {group}`",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(assignments),
                "consumers": names[:16],
                "pending": held,
            },
        )


@check("partitions.missing-entries", Severity.PROBLEM, Need.ASSIGNMENTS)
def _missing_entries(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The oldest pending entry of a group is no longer in the stream."""
    firsts = {
        (each.topic, each.partition): each.figures.first_id
        for each in facts.partitions
        if each.figures is not None
    }

    def has_missing_entry(each: AssignmentFacts) -> bool:
        if each.figures is None:
            return False
        main, retry = each.figures.main, each.figures.retry
        if retry.pending and not retry.length:
            return True
        if not main.pending:
            return False
        if each.assignment.reads_dead_letters or not main.length:
            return not main.length
        first = firsts.get((each.assignment.topic, each.assignment.partition), "")
        return bool(first) and read_id(main.oldest_pending_id) < read_id(first)

    for (topic, group), assignments in by_group(
        filter(has_missing_entry, facts.assignments)
    ).items():
        yield CheckResult(
            f"group {group} has pending entries on {spans(numbers(assignments))} of {topic} that no"
            " longer exist, because a client trimmed or deleted them; those messages are lost",
            "find the client that trims (`XADD … MAXLEN`, `XTRIM`, `XDEL`) and let only streamqd"
            f" trim (`streamqd topic settings {topic}`). A running daemon acknowledges and counts"
            " the entries",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(assignments),
                "oldest_pending": {
                    str(each.assignment.partition): each.figures.main.oldest_pending_id
                    for each in assignments[:16]
                    if each.figures is not None
                },
            },
        )


@check("partitions.no-room", Severity.PROBLEM, Need.ASSIGNMENTS)
def _no_room(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The last ID of a partition is the highest possible, or is a day ahead of the clock."""
    for each in facts.partitions:
        if each.figures is None or not each.figures.last_id:
            continue
        last = read_id(each.figures.last_id)
        ahead = last.ms - facts.now_unix_ms
        if ahead < AHEAD_MS:
            continue
        place = f"{each.topic}/{each.partition}"
        full = last.ms == SEQ_MAX and SEQ_MAX - last.seq < ROOM_MIN
        what = (
            (
                f"the last ID of {place} is {last}, the highest possible, so no client can write"
                " there"
            )
            if full
            else f"the last ID of {place} is {last}, which is {rough_duration(ahead / 1000)} ahead"
            " of the server's clock: every later message gets an ID ahead of the clock, so ages"
            " are wrong"
        )
        yield CheckResult(
            f"{what}, because a client chose the ID (`XADD` without `*`)",
            f"create a topic under another name and send to it. Once {each.topic} has no lag, no"
            f" pending messages and no retries, run `streamqd topic delete {each.topic}`",
            about=place,
            evidence={"partition": each.partition, "last_id": str(last), "full": full},
            severity=None if full else Severity.WARNING,
        )


@check("partitions.unowned", Severity.WARNING, Need.ASSIGNMENTS)
def _unowned(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Pending messages belong to no Redis consumer."""
    for (topic, group), assignments in by_group(
        each for each in facts.assignments if each.unowned
    ).items():
        held = sum(each.unowned for each in assignments)
        yield CheckResult(
            f"{plural(held, 'message')} of group {group} of {topic} on"
            f" {spans(numbers(assignments))}"
            " are pending without a consumer (a client returned them with XNACK)",
            "a running daemon takes them over within 15 s. While none runs, `streamqd pending"
            f" {topic} --group {group}` shows them as unowned",
            about=f"{topic}/{group}",
            evidence={"partitions": numbers(assignments), "unowned": held},
        )


@check("partitions.oversize", Severity.WARNING, Need.ASSIGNMENTS, Need.BODIES)
def _oversize(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The first or last entry of a partition is larger than max_message_bytes."""
    limit = facts.settings.daemon.max_message_bytes
    large: dict[str, dict[int, int]] = {}
    for each in facts.partitions:
        if each.large_bytes is not None and each.large_bytes > limit:
            large.setdefault(each.topic, {})[each.partition] = each.large_bytes
    for topic, sizes in large.items():
        yield CheckResult(
            f"{topic} contains a message of {max(sizes.values()):,} bytes, but max_message_bytes"
            f" is {limit:,}. A client bypasses the limit, and workers fetch fewer entries at a time"
            f" to limit their memory",
            "change that client to store the body elsewhere and send a reference, or set"
            f" `max_message_bytes = {max(sizes.values())}` under [daemon]",
            about=topic,
            evidence={"bytes": {str(number): size for number, size in sizes.items()}},
        )


OVERDUE_SECONDS = 60.0
NAMES_SHOWN = 8


class _DueSet(NamedTuple):
    """The waiting retries of a group on one partition, or its delayed sends if `group` is ''."""

    topic: str
    partition: int
    group: str
    delays: Delays

    @property
    def about(self) -> str:
        return f"{self.topic}/{self.group}" if self.group else self.topic

    @property
    def kind(self) -> str:
        return f"retries of {self.group}" if self.group else "delayed sends"


def _due_sets(facts: DiagnosisFacts) -> list[_DueSet]:
    sends = [
        _DueSet(each.topic, each.partition, "", each.delayed_sends) for each in facts.partitions
    ]
    return sends + [_DueSet(*each.assignment, each.delays) for each in facts.assignments]


@check("partitions.waiting-lost", Severity.PROBLEM, Need.ASSIGNMENTS)
def _lost(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The message of a waiting retry or delayed send is missing."""
    for each in _due_sets(facts):
        delays = each.delays
        count = len(delays.lost) or max(0, delays.excess)
        if count:
            lost = " ".join(delays.lost[:NAMES_SHOWN]) or "MEMBER"
            yield CheckResult(
                f"{plural(count, 'message')} ({each.kind}) on partition {each.partition} of"
                f" {each.topic} are lost: only their due times are left",
                "find the client that deleted the messages. streamqd removes each due time when it"
                f" is due. To remove them now, run `redis-cli ZREM {delays.key} {lost}`",
                about=each.about,
                evidence={"partition": each.partition, "members": list(delays.lost[:NAMES_SHOWN])},
            )


@check("partitions.waiting-stuck", Severity.PROBLEM, Need.ASSIGNMENTS)
def _stuck(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A waiting retry or delayed send has no due time."""
    for each in _due_sets(facts):
        delays = each.delays
        count = len(delays.stuck) or max(0, -delays.excess)
        if count:
            pairs = " ".join(f"0 {name}" for name in delays.stuck[:NAMES_SHOWN]) or "0 NAME"
            yield CheckResult(
                f"{plural(count, 'message')} ({each.kind}) on partition {each.partition} of"
                f" {each.topic} have no due time, so they never run",
                f"add due times: `redis-cli ZADD {delays.key} {pairs}`",
                about=each.about,
                evidence={"partition": each.partition, "members": list(delays.stuck[:NAMES_SHOWN])},
            )


@check("partitions.overdue", Severity.PROBLEM, Need.ASSIGNMENTS)
def _overdue(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A waiting retry or delayed send was due more than a minute ago."""
    limit = facts.now_unix_ms - OVERDUE_SECONDS * 1000
    late: dict[tuple[str, str], list[_DueSet]] = {}
    for each in _due_sets(facts):
        due = each.delays.next_due_unix_ms
        if due is not None and due < limit:
            late.setdefault((each.topic, each.group), []).append(each)
    for (topic, _), some in late.items():
        oldest = min(each.delays.next_due_unix_ms or 0 for each in some)
        waiting = rough_duration((facts.now_unix_ms - oldest) / 1000)
        yield CheckResult(
            f"{some[0].kind} on {spans(each.partition for each in some)} of {topic} were due up to"
            f" {waiting} ago, but no housekeeper moves them to their streams",
            f"find the owner with `streamqd partitions {topic}`, and look for `housekeeper.failed`"
            " in its log. If there is no owner, start an instance",
            about=some[0].about,
            evidence={
                "partitions": [each.partition for each in some],
                "oldest_due_unix_ms": oldest,
                "waiting": sum(each.delays.count for each in some),
            },
        )


MANY = 1_000
LATE_SECONDS = 3_600.0  # tolerance after dlq_retention, as deletion is done in small steps
GROWING = 0.01  # dead letters per second, an average of about 10 s


@check("partitions.dead-letters-many", Severity.WARNING, Need.ASSIGNMENTS)
def _many(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A topic has more than 1,000 dead letters."""
    counts: dict[str, int] = {}
    for each in facts.partitions:
        if each.figures is not None:
            counts[each.topic] = counts.get(each.topic, 0) + each.figures.dead
    for topic, count in counts.items():
        if count > MANY:
            yield CheckResult(
                f"{topic} has {count:,} dead letters, which use memory until they are replayed or"
                f" purged",
                f"run `streamqd dlq stats {topic}` to see their causes. Then run `streamqd dlq"
                f" replay {topic}` or `streamqd dlq purge {topic}`",
                about=topic,
                evidence={"dead_letters": count},
            )


@check("partitions.dead-letters-old", Severity.WARNING, Need.ASSIGNMENTS)
def _old(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Dead letters are at least an hour older than dlq_retention."""
    for topic in facts.topics:
        age = topic.holds.dlq_retention
        if age is None:
            continue
        limit = facts.now_unix_ms - (age + LATE_SECONDS) * 1000
        old = {
            each.partition: each.oldest_dead_letter_unix_ms
            for each in facts.partitions
            if each.topic == topic.name
            and each.oldest_dead_letter_unix_ms is not None
            and each.oldest_dead_letter_unix_ms < limit
        }
        if old:
            required = topic.holds.archive == "required"
            yield CheckResult(
                f"{spans(old)} of {topic.name} contain dead letters older than its dlq_retention of"
                f" {rough_duration(age)}: "
                + ("they are not archived, or " if required else "")
                + "no housekeeper deletes them",
                (
                    f"run `streamqd pipeline archive --topic {topic.name}` first. Then "
                    if required
                    else ""
                )
                + f"look for `housekeeper.failed` in the log of the owners (`streamqd partitions"
                f" {topic.name}`), or run `streamqd dlq purge {topic.name} --older-than {age:g}s`",
                about=topic.name,
                evidence={"oldest_unix_ms": {str(n): at for n, at in old.items()}},
            )


@check("partitions.dead-letters-growing", Severity.WARNING, Need.FLEET)
def _growing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A group produced more than 0.6 dead letters per minute in the last 10 s."""
    for (topic, group), rows in by_group(facts.published).items():
        rate = sum(row.dead_lettered or 0.0 for row in rows)
        if rate >= GROWING:
            share = share_failing(
                sum(row.acked or 0.0 for row in rows), sum(row.failed or 0.0 for row in rows)
            )
            yield CheckResult(
                f"group {group} produces {rate * 60:,.1f} dead letters per minute on {topic}",
                f"run `streamqd dlq stats {topic}` to see their errors. To stop the group until the"
                f" cause is fixed, run `streamqd pause {topic}/{group}`",
                about=f"{topic}/{group}",
                evidence={"dead_letters_per_second": round(rate, 3)},
                severity=Severity.PROBLEM if share >= FAILING_SHARE else None,
            )
