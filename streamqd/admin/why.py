"""Explain why a partition makes no progress, as a list of causes with the most likely one first.

Each cause has one sentence and one fix. The order of the rule tables matters, because one cause can
hide another. For example, while a partition is paused, its handler cannot be the cause, and while a
partition has no owner, no handler runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from streamqd.admin import groups, named_fields, outboxes, owners, snapshot, topics
from streamqd.admin.assignments import (
    RECENT_SECONDS,
    AssignmentRow,
    RecentFailure,
    dependency_failures,
)
from streamqd.admin.backlog import count_other_clients
from streamqd.admin.checks import Severity
from streamqd.admin.condition import ALARMING, RUNNING_SECONDS, STEADY, STUCK_SECONDS, recovery
from streamqd.admin.growth import OWNER as GROWTH
from streamqd.admin.instances import InstanceRow
from streamqd.admin.owners import OwnerPeriod
from streamqd.admin.published import Fleet
from streamqd.admin.reading import Unreadable, ViewReader
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.errors import RequestRefusedError
from streamqd.failures import HOUSEKEEPING
from streamqd.model import Assignment
from streamqd.store import statistics
from streamqd.store.directives import Directive, Directives
from streamqd.store.outbox import OutboxView
from streamqd.words import plural, precise_duration, short_duration, spans

FAILING_SHARE = 0.5  # share of failed runs from which on `failing` is reported
MOVING = 0.05  # messages per second that count as progress
LATE_MS = 60_000  # age of the oldest unread message at which a group is late
QUERY_SILENT_SECONDS = 60.0  # seconds without a report, which a query sends every 10 s or trigger
OUTBOX_SECONDS = 10.0  # seconds that a relay is blocked, or a row waits, before it is a cause


@dataclass(frozen=True, slots=True)
class WaitCause:
    """One reason why a partition makes no progress.

    If `moves` is True, the partition does make progress, and the cause describes how. `word`
    identifies the cause and is stable across versions.
    """

    word: str
    sentence: str
    advice: str
    moves: bool = False


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """All facts about one assignment.

    `other_clients` maps each other client in the group to its number of pending entries. Entries
    that no consumer holds are counted under ''. `shown_seconds` is the number of seconds since a
    Spark query last reported its position, or None if it is unknown.
    """

    row: AssignmentRow
    now_unix_ms: int
    control: Directives
    members: Mapping[str, InstanceRow]
    other_clients: Mapping[str, int] = field(default_factory=dict)
    shown_seconds: float | None = None

    @property
    def pair(self) -> str:
        """The topic and the group, written `topic/group`."""
        return f"{self.row.assignment.topic}/{self.row.assignment.group}"

    # --- which members could own it ---

    @property
    def holder(self) -> InstanceRow | None:
        """The member that owns the assignment, or that owned it last."""
        return self.members.get(self.row.owner)

    @property
    def alive(self) -> list[InstanceRow]:
        """All live members."""
        return [each for each in self.members.values() if each.state != "silent"]

    @property
    def offering(self) -> list[InstanceRow]:
        """The live members that have a consumer for the assignment."""
        return [each for each in self.alive if self.row.assignment[::2] in each.offers]

    @property
    def eligible(self) -> list[InstanceRow]:
        """The members in `offering` on which the assignment's worker is not crashing in a loop."""
        return [each for each in self.offering if self.row.assignment not in each.broken]

    @property
    def present(self) -> list[InstanceRow]:
        """The members in `eligible` that are neither leaving nor drained."""
        return [
            each
            for each in self.eligible
            if not (each.leaving or each.instance in self.control.drains)
        ]

    # --- figures of its worker, 0 when not published -------------

    @property
    def waits(self) -> bool:
        """True if any message is unread, pending or waiting for a retry."""
        return bool(self.row.oldest_unread_unix_ms or self.row.pending or self.row.waiting_retries)

    @property
    def acked(self) -> float:
        """Messages acknowledged per second."""
        return self.row.acked or 0.0

    @property
    def failed(self) -> float:
        """Failed runs per second."""
        return self.row.failed or 0.0

    @property
    def failing_share(self) -> float:
        """The share of runs that fail."""
        return share_failing(self.row.acked, self.row.failed)

    @property
    def slope(self) -> float:
        """Growth of the lag in messages per second.

        If the lag is unknown, its growth is estimated from the rates at which messages arrive and
        are handled.
        """
        if self.row.lag is not None:
            return self.row.lag_per_second or 0.0
        return (self.row.arriving or 0.0) - self.acked - self.failed

    @property
    def late(self) -> bool:
        """True if the oldest unread message is at least LATE_MS old."""
        since = self.row.oldest_unread_unix_ms
        return since is not None and self.now_unix_ms - since >= LATE_MS

    @property
    def run_seconds(self) -> float:
        """Age of the longest current run in seconds, 0 if nothing is running."""
        return self.row.longest_run_seconds or 0.0

    def recent(self, kind: str) -> list[RecentFailure]:
        """Return the failures of the last 5 minutes whose error starts with `kind`."""
        found = self.row.failures
        return [
            each
            for each in found
            if each.seconds_ago <= RECENT_SECONDS and each.error.startswith(kind)
        ]

    @property
    def crashes(self) -> list[RecentFailure]:
        """Recent failures in which a process crashed."""
        return self.recent("process terminated")

    @property
    def housekeeping(self) -> list[RecentFailure]:
        """Recent failures of the housekeeper's tasks on the assignment."""
        return self.recent(f"{HOUSEKEEPING} ")


@dataclass(frozen=True, slots=True)
class Answer:
    """The reasons why one assignment makes no progress, most likely first.

    `unreadable` lists invalid values in Redis, of this assignment and of the fleet, which are
    treated as missing. `owners` lists the last owners, newest first, or is None if they were not
    requested.
    """

    row: AssignmentRow
    causes: list[WaitCause]
    unreadable: list[Unreadable]
    owners: list[OwnerPeriod] | None = None

    @property
    def moves(self) -> bool:
        """True if the assignment makes progress according to its first cause."""
        return self.causes[0].moves

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return named_fields(
            self.row,
            "topic partition group owner moves causes lag pending waiting_retries oldest_unix_ms"
            " lag_per_second",
            moves=self.moves,
            causes=self.causes,
        ) | {"unreadable": self.unreadable, "owners": self.owners}


def answer(
    fleet: Fleet,
    topic: str,
    partition: int | None = None,
    group: str | None = None,
    configured: Collection[str] = (),
    *,
    with_owners: bool = False,
) -> list[Answer]:
    """Explain one partition of a topic or all partitions, for one group or for every group.

    The answers are sorted by group. `configured` contains the names of the outboxes in the
    configuration. If such an outbox never had a relay, its topics are unknown, so it is reported
    only for a whole topic and not for a single partition. If `with_owners` is True, the last owners
    are listed, which takes another command for each assignment. Raises TopicNotFoundError and
    RequestRefusedError.
    """
    store, reader = fleet.store, ViewReader(fleet.store)
    if group is not None:
        groups.partition_count(store, topic, group)
    seen = snapshot.read(fleet, topic, group, partition, reader=reader)
    if not seen.assignments:
        raise RequestRefusedError(f"no group reads topic {topic}; start a consumer of it")
    assignments = [row.assignment for row in seen.assignments]
    free = [row.assignment for row in seen.assignments if not row.owner]
    # This view does not read the values of leases, so it would mistake a lease key of the wrong
    # type for a missing owner. The types of these keys are therefore checked.
    reader.keep_mistyped({store.keys.lease(*assignment): "string" for assignment in free})
    shown = _query_idle_seconds(
        reader, [assignment for assignment in assignments if assignment.is_of_query]
    )
    held = dict(zip(assignments, count_other_clients(reader, assignments), strict=True))
    feeding = outboxes.read_for_topic(reader, topic, () if partition is not None else configured)
    late = [
        cause
        for view in feeding
        if (cause := _outbox_causes(view, topic, configured, seen.now_unix_ms)) is not None
    ]
    return [
        Answer(
            row,
            _add_outbox_causes(
                causes(
                    replace(
                        facts,
                        other_clients=held[row.assignment],
                        shown_seconds=shown.get(row.assignment),
                    )
                ),
                late,
            ),
            reader.rows,
            owners.read(reader, row.assignment, row.owner, seen.now_unix_ms)
            if with_owners
            else None,
        )
        for row, facts in zip(seen.assignments, wait_facts(seen), strict=True)
    ]


def _add_outbox_causes(found: list[WaitCause], late: list[WaitCause]) -> list[WaitCause]:
    """Combine the causes of a group with those of the outboxes that feed its topic.

    If the group has no messages, it is waiting for the outboxes, so their causes replace its own.
    Otherwise, its own causes come first.
    """
    return late or found if found[0].word == "idle" else [*found, *late]


def _outbox_causes(
    view: OutboxView, topic: str, configured: Collection[str], now_unix_ms: int
) -> WaitCause | None:
    """Return the reason why an outbox's rows do not reach a topic, or None if there is none."""
    rows = f"{view.rows:,}{' or more' if view.more else ''} rows" if view.rows != 1 else "1 row"
    oldest = precise_duration(view.oldest_age(now_unix_ms))
    waiting = f"{rows} for all of its topics, the oldest {oldest} old"
    name = f"outbox {view.name}, which sends to {topic}"
    if not view.relayed:
        if view.rows:
            text = f"no relay owns {name}; it last had {waiting}"
        elif view.name in configured:
            # Rows may have been committed since the last relay reported, but their number is
            # unknown here.
            text = f"no relay owns outbox {view.name}, so rows for {topic} may wait in its table"
        else:
            return None
        return WaitCause("outbox-no-relay", text, outboxes.start(view, configured))
    failing = outboxes.failing_seconds(view, now_unix_ms)
    if failing >= OUTBOX_SECONDS and view.topic in ("", topic):
        text = (
            f"the relay of {name}, has been blocked for {precise_duration(failing)}, with"
            f" {waiting}:"
            f" {view.error}"
        )
        return WaitCause("outbox-blocked", text, outboxes.advice(view))
    if not view.error and view.rows and view.oldest_age(now_unix_ms) >= OUTBOX_SECONDS:
        return WaitCause(
            "outbox-late",
            f"the relay of {name}, is late, with {waiting}",
            f"run `streamqd outbox status {view.name}` to see whether the number of rows falls",
            moves=True,
        )
    return None


def _query_idle_seconds(
    reader: ViewReader, assignments: list[Assignment]
) -> dict[Assignment, float]:
    """Return the number of seconds since each Spark query last reported its position."""
    calls = [
        statistics.measure_partition(reader.keys, *assignment[:2]) for assignment in assignments
    ]
    found = {}
    for assignment, reply in zip(assignments, reader.measure(calls), strict=True):
        figures = topics.parse_partition_figures(reader, assignment[:2], reply)
        for query in figures.queries:
            if query.group == assignment.group and query.idle_ms is not None:
                found[assignment] = query.idle_ms / 1000
    return found


def wait_facts(seen: FleetSnapshot) -> list[WaitFacts]:
    """Return the facts about each assignment, without those on other clients and Spark queries."""
    members = {each.instance: each for each in seen.instances}
    control, now = seen.state.control, seen.now_unix_ms
    return [WaitFacts(row, now, control, members) for row in seen.assignments]


# --- many assignments
# -----------------------------------------------------------------------------------


class AssignmentCause(NamedTuple):
    """An assignment, and the first of the causes that apply to it."""

    row: AssignmentRow
    cause: WaitCause


def problems(seen: FleetSnapshot) -> Iterator[AssignmentCause]:
    """Yield the first problem of each assignment that has one.

    Directives are not problems here, because an operator has chosen their effect.
    """
    for facts in wait_facts(seen):
        for rule in _applicable_rules(facts):
            if rule.word in _PROBLEMS:
                yield AssignmentCause(facts.row, _cause(rule, _sentence_values(facts)))
                break


def summarize(found: Iterable[AssignmentCause]) -> list[tuple[AssignmentCause, str]]:
    """Return a clause for each group and cause, with the assignment that has waited longest."""
    by_cause: dict[tuple[str, str, str], list[AssignmentCause]] = {}
    for each in found:
        by_cause.setdefault((each.row.topic, each.row.group, each.cause.word), []).append(each)
    clauses = []
    for (topic, group, word), some in by_cause.items():
        worst = min(some, key=lambda each: each.row.oldest_unix_ms or math.inf)
        text, others = worst.cause.sentence, [e.row.partition for e in some if e is not worst]
        if word == "idle" and others:
            where = spans(each.row.partition for each in some)
            text = f"{where} of {topic}/{group}: no messages waiting"
        elif word != "stopped" and not word.startswith("outbox-") and others:
            text += f"; the same in {spans(others)}"
        clauses.append((worst, text))
    return clauses


# --- the causes -----------------------------------------------------------------------------------


class CauseRule(NamedTuple):
    """One rule in a table of causes.

    The cause applies if `holds` returns a true value. `sentence` and `advice` are format strings,
    which are filled with the values from `_sentence_values`.
    """

    word: str
    holds: Callable[[WaitFacts], object]
    sentence: str
    advice: str = ""


def causes(facts: WaitFacts) -> list[WaitCause]:
    """Return all causes that apply, most likely first. The list is never empty."""
    texts = _sentence_values(facts)
    return [_cause(rule, texts) for rule in _applicable_rules(facts)]


def _cause(rule: CauseRule, texts: Mapping[str, object]) -> WaitCause:
    sentence, advice = rule.sentence.format(**texts), rule.advice.format(**texts)
    return WaitCause(rule.word, sentence, advice, rule.word in _MOVES)


def _applicable_rules(facts: WaitFacts) -> list[CauseRule]:
    if facts.row.lease == "query":
        return _first_matching_rule(_QUERY, facts)
    rules = _first_matching_rule(_DIRECTIVES, facts)
    if not facts.row.stopped:  # a stop already explains why there is no owner
        if facts.row.lease != "owned":
            rules += _first_matching_rule(_EXPIRED, facts) + _first_matching_rule(_UNOWNED, facts)
        else:
            rules += _first_matching_rule(_OWNED, facts) or _matching_rules(_AT_WORK, facts)
    rules += _matching_rules(_OTHER_CLIENTS, facts)
    if not rules or not (facts.waits or any(rule.word in _ALWAYS_REPORTED for rule in rules)):
        rules = _first_matching_rule(_FALLBACK, facts)
    return rules


def _matching_rules(rules: Iterable[CauseRule], facts: WaitFacts) -> list[CauseRule]:
    return [rule for rule in rules if rule.holds(facts)]


def _first_matching_rule(rules: Iterable[CauseRule], facts: WaitFacts) -> list[CauseRule]:
    return _matching_rules(rules, facts)[:1]


def _in_states(*states: str) -> Callable[[WaitFacts], bool]:
    """Return a predicate that is true if the worker is in one of these states."""
    return lambda f: f.row.worker in states


def _keeps_messages(f: WaitFacts) -> bool:
    """Return True if messages wait for an earlier one with their key, and no others are handled."""
    held = f.row.held or 0
    others = f.row.oldest_unread_unix_ms or (f.row.pending or 0) > held
    other_state = _in_states("blocked", "halted", "probing", "flooded", "throttled")
    return bool(held) and not other_state(f) and not (others and f.acked > MOVING)


def _fails(f: WaitFacts) -> bool:
    return f.failed > MOVING and f.failing_share >= FAILING_SHARE


def _dead_letters_failures(f: WaitFacts) -> bool:
    """Return True if failed messages are dead-lettered and none is waiting for a retry."""
    return bool(f.row.dead_letters) and not f.row.waiting_retries


_LATER = "check again in a few seconds"
_FIX_INTERNAL = (
    "report the traceback of assignment.given_up in the log of {owner}. `streamqd drain {owner}`"
    " moves the partition to another instance"
)
_FIX_CRASHES = (
    "read the last worker.crashed events in the log, fix the handler, then run `streamqd reload`"
)
_FIX_LIMITS = (
    "raise LimitNOFILE, TasksMax or the memory of that service, or start another instance. It"
    " takes partitions again automatically"
)
_FIX_CIRCUIT = "repair the dependency of the handler. The circuit closes when a message succeeds"

# States of a Spark query, which no instance runs. The first rule that holds applies.
_QUERY = (
    CauseRule(
        "idle",
        lambda f: not f.waits,
        "the Spark query of {assignment} has read all messages, and reported its position {shown}"
        " ago",
    ),
    CauseRule(
        "query-silent",
        lambda f: (f.shown_seconds or math.inf) >= QUERY_SILENT_SECONDS,
        "the Spark query of {assignment} has not reported its position for {shown}; {waiting}",
        "start the query again. If it is not needed, run `streamqd group delete {topic} {group}"
        " --yes`",
    ),
    CauseRule(
        "moving",
        lambda _: True,
        "the Spark query of {assignment} reported its position {shown} ago; {waiting}",
    ),
)

# Directives that operators have written. The first rule that holds applies.
_DIRECTIVES = (
    CauseRule(
        "stopped",
        lambda f: f.row.stopped,
        "group {group} of {topic} is stopped{by}",
        "`streamqd group start {topic} {group}`",
    ),
    CauseRule(
        "paused",
        lambda f: f.row.paused,
        "{assignment} is paused{by} (directive pause:{scope})",
        "`streamqd resume {scope_argument}`",
    ),
    CauseRule(
        "paused",
        lambda f: f.holder and f.holder.state == "paused",
        "instance {owner}, which owns {assignment}, is paused by a signal",
        "send SIGCONT to the supervisor of {owner}",
    ),
    CauseRule(
        "paused",
        _in_states("paused"),
        "the worker of {assignment} on {owner} is paused",
        "`streamqd resume {assignment}`",
    ),
)

_EXPIRED = (
    CauseRule(
        "owner-silent",
        lambda f: f.row.lease == "expired",
        "{owner}, the owner of {assignment}, does not renew its lease{and_silence}",
        "another instance with a consumer of {pair} takes over automatically. If there is none,"
        " check that the host of {owner} is up and reaches Redis",
    ),
)

# Reasons why no instance owns the assignment. The first rule that holds applies.
_UNOWNED = (
    CauseRule(
        "no-instance",
        lambda f: not f.alive,
        "no instance owns {assignment}: no instance of the fleet is live",
        "start streamqd",
    ),
    CauseRule(
        "no-consumer",
        lambda f: not f.offering,
        "no instance owns {assignment}: none of {alive} has a consumer of {pair}",
        "start an instance whose configuration has a consumer of {pair}",
    ),
    CauseRule(
        "internal-error",
        _in_states("failed"),
        "{owner} released {assignment} temporarily after an internal error of streamqd{last}",
        _FIX_INTERNAL,
    ),
    CauseRule(
        "crash-loop",
        lambda f: not f.eligible,
        "the worker of {assignment} crashes in a loop on {offering} and is backing off{last}",
        _FIX_CRASHES,
    ),
    CauseRule(
        "no-capacity",
        lambda f: all(each.full for each in f.eligible),
        "no instance owns {assignment}: the operating system refuses more processes ({limits})",
        _FIX_LIMITS,
    ),
    CauseRule(
        "drained",
        lambda f: not f.present,
        "no instance owns {assignment}: all instances with a consumer of {pair} are drained or"
        " leaving ({fit})",
        "start another instance, or run `streamqd drain INSTANCE --undo`",
    ),
    CauseRule(
        "max-partitions",
        lambda f: all(each.cap and each.owned >= each.cap for each in f.present),
        "no instance owns {assignment}: every instance with a consumer of {pair} has reached its"
        " max_partitions ({caps})",
        "raise daemon.max_partitions, or start another instance",
    ),
    CauseRule(
        "changing-hands",
        lambda f: f.row.lease == "free",
        "no instance owns {assignment} yet; {taker} can take it",
        _LATER,
    ),
)

# Reasons why the owner does not work on the assignment. The first rule that holds applies.
_OWNED = (
    CauseRule(
        "growing",
        lambda f: f.row.owner == GROWTH,
        "{topic} is growing: {assignment} is read after {group} has acknowledged all messages of"
        " the old partitions",
        "run `streamqd topic grow` with the same number again, until the growth is complete. It"
        " shows how many messages are left",
    ),
    CauseRule(
        "owner-silent",
        lambda f: f.holder and f.holder.state == "silent",
        "{owner}, the owner of {assignment}, {silence}",
        "check that the host of {owner} is up and reaches Redis. Its lease expires automatically",
    ),
    CauseRule(
        "no-report",
        _in_states("", "unknown"),
        "{owner} owns {assignment}, but has not published its state",
        f"{_LATER}. If this persists, read the log of that instance",
    ),
    CauseRule(
        "internal-error",
        _in_states("failed"),
        "{owner} released {assignment} temporarily after an internal error of streamqd{last}",
        _FIX_INTERNAL,
    ),
    CauseRule(
        "crash-loop",
        lambda f: _in_states("broken")(f) or (f.holder and f.row.assignment in f.holder.broken),
        "the worker of {assignment} crashes in a loop on {owner} and is backing off{last}",
        _FIX_CRASHES,
    ),
)

# Reasons why the worker is delayed. Several rules may apply.
_AT_WORK = (
    CauseRule(
        "no-capacity",
        lambda f: (
            f.holder and f.holder.limit and _in_states("gone", "booting")(f) and not f.row.running
        ),
        "{owner} owns {assignment}, but will release it soon: the operating system refuses more"
        " processes ({limit})",
        _FIX_LIMITS,
    ),
    CauseRule(
        "blocked",
        _in_states("blocked"),
        "{assignment} is blocked on {owner} by its first message, which failed{next}{last}",
        'fix the handler for this message. With on_error = "block", all later messages wait for it',
    ),
    CauseRule(
        "circuit-open",
        _in_states("halted"),
        "the circuit breaker of {assignment} is open on {owner}, so no message runs{next}"
        "{last_outage}",
        _FIX_CIRCUIT,
    ),
    CauseRule(
        "circuit-open",
        _in_states("probing"),
        "the circuit breaker of {assignment} is half-open on {owner}: one message runs as a"
        " probe{next}{last_outage}",
        _FIX_CIRCUIT,
    ),
    CauseRule(
        "flood",
        _in_states("flooded"),
        "the flood guard has stopped {assignment} on {owner}, because most of its messages"
        " are dead-lettered{last}",
        "fix the handler, then run `streamqd resume {assignment}`",
    ),
    CauseRule(
        "throttled",
        _in_states("throttled"),
        "{assignment} is throttled on {owner} by its rate of {rate}",
        "wait, or raise the rate of the consumer{more_rate}",
    ),
    CauseRule(
        "keys-held",
        _keeps_messages,
        "the worker of {assignment} on {owner} holds {held}{next}{last}",
        "fix the handler for the first message of each key. held_max limits the number of held"
        " messages",
    ),
    CauseRule(
        "loop-blocked",
        lambda f: f.row.loop_blocked_seconds,
        "a coroutine has blocked the event loop of {assignment} on {owner} for {blocked}{blocker},"
        " which stops all other coroutines there",
        "replace the blocking call with an asynchronous one, or move it to a thread with"
        " asyncio.to_thread. loop.blocked in the log of {owner} contains the stack",
    ),
    CauseRule(
        "slow-handler",
        lambda f: f.run_seconds >= STUCK_SECONDS,
        "the handler of {assignment} on {owner} has been working on one message{running} for {run}"
        "{progress}; {waiting}",
        "{hard_timeout}; `streamqd stack {assignment}` prints the stack of the handler",
    ),
    CauseRule(
        "crashing",
        lambda f: f.crashes and _in_states("gone", "booting")(f),
        "the worker of {assignment} on {owner} keeps crashing ({crash}) and is being restarted",
        "read the last worker.crashed events in the log of {owner}",
    ),
    CauseRule(
        "failing",
        lambda f: _fails(f) and _dead_letters_failures(f),
        "{failing_share} of the runs of {assignment} fail, and the messages are dead-lettered"
        " without another attempt ({failed} runs/s){last}",
        "fix the handler or its dependency{see_failed}; then run `streamqd dlq replay {topic}"
        " --group {group} --dry-run`",
    ),
    CauseRule(
        "failing",
        lambda f: _fails(f) and not _dead_letters_failures(f),
        "{failing_share} of the runs of {assignment} fail{last}",
        "fix the handler or its dependency{see_failed}",
    ),
    CauseRule(
        "recovering",
        _in_states("recovering"),
        "{assignment} is recovering on {owner}: {recovery}",
        "wait: streamqd runs these messages in rounds to find the one that crashes its process",
    ),
    CauseRule(
        "quarantine",
        lambda f: f.row.quarantine and f.acked <= MOVING and not _in_states("recovering")(f),
        "{assignment} runs the pending messages of its lost owner in rounds",
        "wait: streamqd runs these messages in rounds, in case one of them crashes the whole host",
    ),
    CauseRule(
        "housekeeping",
        lambda f: f.housekeeping,
        "the housekeeper of {owner} fails on {assignment} with an internal error: {housekeeping}",
        "report the traceback of housekeeper.failed in the log of {owner}",
    ),
    CauseRule(
        "redis-unavailable",
        lambda f: f.holder and f.holder.redis_up is False,
        "{owner}, the owner of {assignment}, cannot reach Redis",
        "check the network from the host of {owner} to Redis",
    ),
)

# Entries that other clients hold. Several rules may apply.
_OTHER_CLIENTS = (
    CauseRule(
        "unowned",
        lambda f: f.other_clients.get(""),
        "{assignment} has {unowned} pending without a consumer, because a client returned them"
        " (XNACK)",
        "wait: if an instance owns the partition, it takes them over within 15 s",
    ),
    CauseRule(
        "other-client",
        lambda f: any(f.other_clients),
        "another client fetched messages of {assignment} and did not acknowledge them: {clients}",
        "stop that client. streamqd takes over its entries after reclaim_idle",
    ),
)

# States in which nothing is wrong with the assignment. The first rule that holds applies.
_FALLBACK = (
    CauseRule("idle", lambda f: not f.waits, "{assignment}: no messages waiting"),
    CauseRule(
        "lag-growing",
        lambda f: f.acked > MOVING and f.slope > STEADY,
        "{assignment} lags: {waiting}, growing by {slope}/s, while {owner} handles {acked}{takes}",
        "make the handler faster, or grow the topic. Messages arrive faster than one worker handles"
        " them",
    ),
    CauseRule(
        "lagging",
        lambda f: f.acked > MOVING and f.late,
        "{assignment} lags: {waiting}, while {owner} handles {acked}{takes}{caught_up}",
        "{catch_up}",
    ),
    CauseRule(
        "moving",
        lambda f: f.acked > MOVING,
        "{assignment} makes progress: {acked} on {owner}, {waiting}{caught_up}",
    ),
    CauseRule(
        "waiting-for-retry",
        lambda f: f.row.waiting_retries and not f.row.oldest_unread_unix_ms and not f.row.pending,
        "{assignment} has {waiting_retries} waiting for a retry{next_due}{last}",
        "wait, or fix the error of the last attempt",
    ),
    CauseRule(
        "running",
        lambda f: f.holder and _in_states("ready")(f) and f.run_seconds >= RUNNING_SECONDS,
        "{assignment} has been running one message{running} on {owner} for {run}; {waiting}",
    ),
    CauseRule(
        "no-progress",
        lambda f: f.holder and _in_states("ready")(f),
        "{owner} owns {assignment} and its worker is ready; {waiting}, but no message was"
        " acknowledged in the last 5 seconds",
        f"{_LATER}. If this persists, run `streamqd stack {{assignment}}` to see the stack of the"
        " worker",
    ),
    CauseRule(
        "starting",
        lambda f: f.holder and f.row.worker,
        "{owner} owns {assignment} and its worker is {state}",
        _LATER,
    ),
    CauseRule(
        "unknown",
        lambda _: True,
        "{assignment} is {lease}, and no cause is known",
        f"{_LATER}. If this persists, read the log of the owner",
    ),
)

_MOVES = ("idle", "lag-growing", "lagging", "moving", "running", "recovering")
# Causes that are reported even if no message is waiting.
_ALWAYS_REPORTED = (
    *(
        "no-instance",
        "no-consumer",
        "internal-error",
        "crash-loop",
        "no-capacity",
        "max-partitions",
    ),
    *("owner-silent", "changing-hands", "paused", "stopped", "drained", "circuit-open", "flood"),
    "failing",  # even if no message waits, because all of them may already be dead letters
)
# Causes that `status` lists as problems. Directives and missing instances are left out, because
# `status` shows them elsewhere.
_PROBLEMS = (
    *(
        "no-consumer",
        "internal-error",
        "crash-loop",
        "no-capacity",
        "max-partitions",
        "changing-hands",
    ),
    *("owner-silent", "blocked", "circuit-open", "flood", "keys-held", "loop-blocked"),
    *("slow-handler", "crashing", "failing", "housekeeping"),
)

# Severities of the causes that are not problems, as `doctor` and `status` report them.
_NOTES = ("stopped", "paused", "drained", "growing", "throttled", "recovering", "quarantine")
_WARNINGS = (
    *("changing-hands", "no-report", "query-silent", "slow-handler", "loop-blocked", "keys-held"),
    *("no-progress", "lag-growing", "lagging", "other-client", "unowned", "outbox-late", "unknown"),
)
_NO_ACTION = ("idle", "moving", "running", "starting", "waiting-for-retry")


def severity(word: str) -> Severity | None:
    """Return the severity of a cause, or None if no action is needed."""
    if word in _NO_ACTION:
        return None
    for words, found in ((_NOTES, Severity.NOTE), (_WARNINGS, Severity.WARNING)):
        if word in words:
            return found
    return Severity.PROBLEM


def grade(row: AssignmentRow, cause: str) -> Severity | None:
    """Return the severity of an assignment's state, or None if the assignment is healthy.

    `cause` is the word of the assignment's first cause, or '' if the cause is unknown or harmless.
    """
    if row.worker == "full":
        return Severity.PROBLEM  # fetches nothing until a failed message succeeds
    if cause:
        return severity(cause)
    if row.condition in ("paused", "stopped"):
        return Severity.NOTE
    fails = share_failing(row.acked, row.failed) >= FAILING_SHARE
    return Severity.PROBLEM if fails or row.condition in ALARMING else None


def share_failing(acked: float | None, failed: float | None) -> float:
    """Return the share of failing runs, given acknowledged messages and failed runs per second."""
    return failed / ((acked or 0.0) + failed) if failed else 0.0


# --- parts of sentences ---------------------------------------------------------------------------


def _sentence_values(f: WaitFacts) -> dict[str, object]:
    """Return the values that are inserted into the sentences of the rules."""
    stop, pause = f.control.find_stop(f.row.assignment), f.control.find_pause(f.row.assignment)
    directive = stop or (pause and pause[1])
    scope = str(pause[0]) if pause else ""
    silence = f"has been silent for {_silent_seconds(f, f.holder):.0f} s" if f.holder else ""
    least = max(f.row.lag or 0, f.row.lag_at_least)
    left = _format_catch_up_time(least, f.slope)
    return {
        "assignment": f.row.assignment,
        "topic": f.row.assignment.topic,
        "group": f.row.assignment.group,
        "pair": f.pair,
        "lease": f.row.lease,
        "owner": f.row.owner or f.row.reporter,
        "by": _format_author(directive) if directive else "",
        "scope": scope,
        "scope_argument": as_argument(scope),
        "alive": plural(len(f.alive), "live instance"),
        "offering": ", ".join(each.instance for each in f.offering),
        "fit": ", ".join(each.instance for each in f.eligible),
        "taker": f.present[0].instance if f.present else "",
        "caps": ", ".join(f"{each.instance} {each.owned} of {each.cap}" for each in f.present),
        "limits": ", ".join(_format_limit(each) for each in f.eligible),
        "limit": _format_limit(f.holder) if f.holder else "",
        "silence": silence,
        "and_silence": f" and {silence}" if silence else "",
        "last": _format_last_failure(f.row.failures),
        "last_outage": _format_last_failure(dependency_failures(f.row.failures)),
        "see_failed": _command_for_failed(f),
        "crash": f"{f.crashes[0].error}, {f.crashes[0].seconds_ago:.0f} s ago" if f.crashes else "",
        "housekeeping": f.housekeeping[0].error if f.housekeeping else "",
        "waiting_retries": plural(f.row.waiting_retries or 0, "message"),
        "next_due": _format_seconds(
            ", the next in {} s", _seconds_until(f.row.next_due_unix_ms, f.now_unix_ms)
        ),
        "unowned": plural(f.other_clients.get("", 0), "message"),
        "clients": _format_clients(f.other_clients),
        "waiting": _format_waiting(f),
        "shown": "an unknown time"
        if f.shown_seconds is None
        else precise_duration(f.shown_seconds),
        "acked": f"{f.acked:.1f} messages/s",
        "failing_share": f"{f.failing_share:.0%}",
        "failed": f"{f.failed:.1f}",
        "slope": f"{f.slope:.1f}",
        "takes": f", and a run takes {short_duration(f.row.mean_seconds)}"
        if f.row.mean_seconds
        else "",
        "caught_up": f", caught up in about {left}" if left else "",
        "catch_up": lag_advice(least, f.slope),
        "run": precise_duration(f.run_seconds),
        "running": _running_message(f),
        **_row_values(f.row),
    }


def _format_catch_up_time(least: int, slope: float) -> str:
    """Return the time it takes to handle all unread messages, or '' if the lag is not falling."""
    return precise_duration(least / -slope) if least and slope < -STEADY else ""


def lag_advice(least: int, slope: float) -> str:
    """Return advice on a lag of `least` or more messages that grows by `slope` per second."""
    left = _format_catch_up_time(least, slope)
    if left:
        return f"wait: at this rate it takes {left} to catch up"
    return "make the handler faster, or grow the topic"


def _silent_seconds(f: WaitFacts, member: InstanceRow) -> float:
    return max(0, f.now_unix_ms - member.heartbeat_unix_ms) / 1000


def _row_values(row: AssignmentRow) -> dict[str, object]:
    full = ", the maximum, and fetches no more" if row.worker == "full" else ""
    keys = "one held key" if row.held_keys == 1 else f"{row.held_keys or 0:,} held keys"
    shared = row.rate_per == "group"
    share = "its share of the group's rate" if shared else "which each partition of the group has"
    limit = "hard_timeout stops the run" if row.hard_timeout else "no hard_timeout is set"
    return {
        "state": row.worker,
        "rate": f"{row.rate or 0:g} runs/s, {share}",
        "more_rate": "" if shared else "; more partitions allow a higher rate",
        "held": f"{plural(row.held or 0, 'message')} of {keys}{full}",
        "hard_timeout": limit,
        "blocked": precise_duration(row.loop_blocked_seconds or 0.0),
        "blocker": f" at {row.loop_blocker}" if row.loop_blocker else "",
        "recovery": recovery(row.suspects_left, row.suspects, row.round_size),
        "next": _format_seconds(", next attempt in {} s", row.waits_seconds),
        "progress": _format_seconds(" (it reported progress {} s ago)", row.progress_seconds),
    }


def _format_last_failure(failures: Iterable[RecentFailure]) -> str:
    last = min(failures, key=lambda each: each.seconds_ago, default=None)
    return f"; last: {last.error}, {last.seconds_ago:.0f} s ago" if last else ""


def _command_for_failed(f: WaitFacts) -> str:
    """Return a clause with the command that shows dead letters or waiting retries, or ''."""
    topic, group = f.row.assignment[::2]
    if f.row.dead_letters:
        return f"; `streamqd dlq stats {topic}` counts its dead letters by error"
    if f.row.waiting_retries:
        return f"; `streamqd retry list {topic} {group}` shows the messages and their errors"
    return ""


def _seconds_until(then_unix_ms: int | None, now_unix_ms: int | None) -> float | None:
    if then_unix_ms is None or now_unix_ms is None:
        return None
    return (then_unix_ms - now_unix_ms) / 1000


def _format_seconds(text: str, seconds: float | None) -> str:
    return "" if seconds is None else text.format(f"{max(0.0, seconds):.0f}")


def _format_author(directive: Directive) -> str:
    who = f" by {directive.by}" if directive.by else ""
    return f"{who} ({directive.why})" if directive.why else who


def as_argument(scope: str) -> str:
    """Return a scope as an argument of `resume`, without asterisks, which a shell would expand."""
    match scope.split("/"):
        case ["*", "*", "*"]:
            return "--all"
        case [topic, "*", "*"]:
            return topic
        case [topic, "*", group]:
            return f"{topic}/{group}"
        case [topic, partition, "*"]:
            return f"{topic} --partition {partition}"
        case _:
            return scope


def _format_limit(member: InstanceRow) -> str:
    return f"{member.instance} runs {member.owned}: {member.limit}"


def _format_clients(other_clients: Mapping[str, int]) -> str:
    return " and ".join(
        f"{client!r} holds {plural(count, 'message')}"
        for client, count in sorted(other_clients.items())
        if client
    )


def _running_message(f: WaitFacts) -> str:
    """Return the running message as a uid for `trace`, or as a place if it has no uid."""
    kind, _, entry_id = f.row.running.partition(":")
    if kind == "m" and not f.row.assignment.reads_dead_letters:
        return f" ({f.row.assignment.topic}/{f.row.assignment.partition}/{entry_id})"
    return f" ({f.row.running})" if f.row.running else ""


def _format_waiting(f: WaitFacts) -> str:
    lag = f"{f.row.lag_at_least:,} or more" if f.row.lag is None else f"{f.row.lag:,}"
    oldest = _seconds_until(f.now_unix_ms, f.row.oldest_unix_ms)
    age = "" if oldest is None else f", the oldest {precise_duration(oldest)} old"
    return f"{lag} unread and {f.row.pending or 0:,} pending{age}"
