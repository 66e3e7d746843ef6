"""Why a partition does not move: facts in, causes out, the most likely first.

Each cause is one sentence and one advice. They are judged in the order in which one hides the
other: a pause says nothing of the handler, and without an owner no handler runs at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from streamqd.admin import live, partitions, published, topics
from streamqd.admin.backlog import other_clients
from streamqd.admin.condition import RUNNING_SECONDS
from streamqd.admin.growth import OWNER as GROWTH
from streamqd.admin.live import LiveDirective, LiveFailure, LiveUnit, LiveView
from streamqd.admin.partitions import MeasuredUnit
from streamqd.admin.reading import BadValues, Unreadable
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import members
from streamqd.store.store import Store
from streamqd.words import lasting, plural

STUCK_SECONDS = 10.0  # one run that lasts longer is named as what holds the partition
FAILING_SHARE = 0.5  # of the runs that fail, from which on failing is the cause
RECENT_SECONDS = 300.0
MOVING = 0.05  # messages per second that count as moving


@dataclass(frozen=True, slots=True)
class WaitCause:
    """One reason. `word` is stable; `moves` tells that nothing is wrong."""

    word: str
    sentence: str
    advice: str
    moves: bool = False


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A member, for one unit. `state` as in `status`; `cap` 0 is no limit; `owned` counts units.

    `capacity` is how many units the system lets it serve, None for no such limit, and `limit` what
    the system says of it.
    """

    instance: str
    state: str
    offers: bool
    broken: bool
    leaving: bool
    cap: int
    owned: int
    redis_up: bool | None
    silent_seconds: float
    capacity: int | None = None
    limit: str = ""


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """What is known of one unit. Durations in seconds.

    `lease` is owned, expired or free. `told` is what the owner has published of it, None when it
    has not; `foreign` are the other clients that hold pending entries of the group, with how many;
    '' stands for entries that no client holds.
    `lag` is None when the server cannot count it. `unread` says whether anything is unread.
    """

    unit: Unit
    lease: str
    owner: str
    lag: int | None
    unread: bool
    pending: int
    delayed: int
    next_due_seconds: float | None
    oldest_seconds: float | None
    foreign: dict[str, int]
    told: LiveUnit | None
    failures: tuple[LiveFailure, ...]
    pause: LiveDirective | None
    drained: tuple[str, ...]
    members: tuple[MemberFacts, ...]
    solo: bool
    stop: LiveDirective | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Why one unit does not move: `causes[0]` is the likeliest. `moves`: nothing holds it.

    `lag`, `pending`, `delayed` and `oldest_unix_ms` as in `partitions`; `lag_per_second` is how
    fast the lag grows, null when its owner has not told. `unreadable` are values in Redis that
    cannot be read, of this unit and of the fleet: they count as missing.
    """

    topic: str
    partition: int
    group: str
    owner: str
    moves: bool
    causes: list[WaitCause]
    lag: int | None
    pending: int
    delayed: int
    oldest_unix_ms: int | None
    lag_per_second: float | None
    unreadable: list[Unreadable]


def answer(
    store: Store,
    fleet: str,
    topic: str,
    partition: int | None = None,
    group: str | None = None,
    *,
    stale: float,
) -> list[Answer]:
    """Say it of one partition or all of a topic, of one group or each. Group by group.

    Raises TopicMissing, Refused.
    """
    count = topics.partition_count(store, topic)
    if partition is not None:
        topics.check_partition(topic, partition, count)
    bad = BadValues()
    known = topics.groups(store, topic, range(count), bad=bad)
    if group is not None and group not in known:
        raise Refused(f"no group {group} reads the topic {topic}")
    if not known:
        raise Refused(f"no group reads the topic {topic}, so nothing of it can move")
    numbers = range(count) if partition is None else (partition,)
    units = [
        Unit(topic, number, each)
        for each in sorted(known)
        if group in (None, each)
        for number in numbers
    ]
    state = published.fleet_state(store, fleet, stale=stale, bad=bad)
    view = live.look(store, fleet, stale=stale, state=state)
    for row in view.unreadable:
        bad.keep(row)
    measured = partitions.measured(store, units, bad)
    held = other_clients(store, units, bad)
    answers = [_one(view, state, *each) for each in zip(measured, held, strict=True)]
    return [replace(each, unreadable=bad.rows) for each in answers]


def _one(
    view: LiveView, state: published.FleetState, measured: MeasuredUnit, foreign: dict[str, int]
) -> Answer:
    unit, row = measured.unit, measured.row()
    due = measured.figures.next_due_unix_ms if measured.figures else None
    told = _told(view, unit, row.owner)
    failures = [each for each in view.failures if each.unit == unit]
    now = view.now_unix_ms
    pause, stop = state.control.pause_of(unit), state.control.stop_of(unit)
    facts = WaitFacts(
        unit=unit,
        lease=row.state,
        owner=row.owner,
        lag=row.lag,
        unread=row.oldest_unread_unix_ms is not None,
        pending=row.pending,
        delayed=row.delayed,
        next_due_seconds=None if due is None else (due - now) / 1000,
        oldest_seconds=None if row.oldest_unix_ms is None else (now - row.oldest_unix_ms) / 1000,
        foreign=foreign,
        told=told,
        failures=tuple(failures),
        pause=None if pause is None else live.order_of("pause", str(pause[0]), pause[1]),
        drained=tuple(state.control.drains),
        members=_members(view, state, unit),
        solo=measured.lease.solo,
        stop=None if stop is None else live.order_of("stop", f"{unit.topic}/{unit.group}", stop),
    )
    found = causes(facts)
    return Answer(
        topic=unit.topic,
        partition=unit.partition,
        group=unit.group,
        owner=row.owner,
        moves=found[0].moves,
        causes=found,
        lag=row.lag,
        pending=row.pending,
        delayed=row.delayed,
        oldest_unix_ms=row.oldest_unix_ms,
        lag_per_second=told.lag_per_second if told else None,
        unreadable=[],
    )


def _told(view: LiveView, unit: Unit, owner: str) -> LiveUnit | None:
    """What its owner says of it. A worker that crashes in a loop is told by its last owner."""
    for each in view.units:
        if each.unit == unit and each.state not in ("free", "expired", "unknown"):
            return each if owner in ("", each.owner) else None
    return None


def _members(view: LiveView, state: published.FleetState, unit: Unit) -> tuple[MemberFacts, ...]:
    found = []
    for each in view.instances:
        info = state.infos[each.instance]
        seen = members.seen_of(members.Heartbeat(each.instance, each.beat_unix_ms, info))
        found.append(
            MemberFacts(
                instance=each.instance,
                state=each.state,
                offers=(unit.topic, unit.group) in seen.member.offers,
                broken=unit in seen.broken,
                leaving=seen.leaving,
                cap=seen.member.cap,
                owned=each.owned,
                redis_up=each.redis_up,
                capacity=_capacity(info),
                limit=str(info.get("capacity_problem", ""))[:200],
                silent_seconds=max(0, view.now_unix_ms - each.beat_unix_ms) / 1000,
            )
        )
    return tuple(found)


def _capacity(info: dict[str, object]) -> int | None:
    return published.whole(info.get("capacity"))


# --- the causes -----------------------------------------------------------------------------------


def causes(facts: WaitFacts) -> list[WaitCause]:
    """All that holds the unit, the first of them first; never empty."""
    found = list(_held(facts))
    waiting = bool(facts.unread or facts.pending or facts.delayed)
    owner = _owner(facts)
    grave = [each for each in found if each.word in _GRAVE]
    if not waiting and not grave:
        return [
            WaitCause("idle", f"nothing waits in {facts.unit}: every message is settled", "", True)
        ]
    if found:
        return found
    if facts.told is not None and (facts.told.acked or 0) > MOVING:
        return [_moving(facts, facts.told)]
    if facts.delayed and not facts.unread and not facts.pending:
        return [_delayed(facts)]
    if owner is not None and facts.told is not None:
        text = f"{facts.unit} is owned by {owner.instance} and its worker is {facts.told.state}"
        run = facts.told.longest_run_seconds or 0.0
        if facts.told.state == "ready" and run >= RUNNING_SECONDS:
            text = (
                f"{facts.unit} has been running one message{_which(facts.told, facts.unit)} for"
                f" {lasting(run)} on {owner.instance}; {_waiting(facts)}"
            )
            return [WaitCause("running", text, "", True)]
        if facts.told.state == "ready":
            return [
                WaitCause(
                    "starting",
                    f"{text}; {_waiting(facts)}, and nothing was acknowledged in the last seconds",
                    "look again in some seconds; if it stays so, send the supervisor SIGUSR1 and"
                    " read the stack of the worker in the log",
                )
            ]
        return [WaitCause("starting", text, "look again in some seconds")]
    return [
        WaitCause(
            "unknown",
            f"{facts.unit} is {facts.lease} and nothing that is known holds it",
            "look again in some seconds, then at the log of the owner",
        )
    ]


# These hold the unit also while nothing waits.
_GRAVE = frozenset(
    {
        "no-member",
        "no-offer",
        "crash-loop",
        "no-capacity",
        "caps-full",
        "owner-silent",
        "paused",
        "stopped",
        "drained",
    }
)


def _held(facts: WaitFacts) -> Iterator[WaitCause]:
    if facts.stop is not None:
        # That no instance owns it, or soon will not, follows from it.
        yield _stopped(facts.unit, facts.stop)
        return
    yield from _paused(facts)
    yield from _ownerless(facts) if facts.lease != "owned" else _owned(facts)
    for client, count in sorted(facts.foreign.items()):
        if not client:
            yield WaitCause(
                "unowned",
                f"no consumer has {plural(count, 'message')} of {facts.unit} that were handed out:"
                " a client has given them up (XNACK)",
                "streamqd takes them over by itself within 15 s while the unit is owned",
            )
            continue
        yield WaitCause(
            "foreign-client",
            f"the client {client!r} holds {plural(count, 'message')} of {facts.unit} that it never"
            " acknowledged",
            "stop that client; streamqd takes its entries over after reclaim_idle",
        )


def _stopped(unit: Unit, order: LiveDirective) -> WaitCause:
    return WaitCause(
        "stopped",
        f"the group {unit.group} of {unit.topic} is stopped{_by(order)}",
        f"`streamqd group start {unit.topic} {unit.group}`",
    )


def _paused(facts: WaitFacts) -> Iterator[WaitCause]:
    order = facts.pause
    if order is not None:
        yield WaitCause(
            "paused",
            f"{facts.unit} is paused{_by(order)}, by the order for {order.scope}",
            f"`streamqd resume {_as_argument(order.scope)}`",
        )
    owner = _owner(facts)
    told = facts.told
    if order is None and owner is not None and owner.state == "paused":
        yield WaitCause(
            "paused",
            f"the instance {owner.instance}, which owns {facts.unit}, is paused by a signal",
            f"send SIGCONT to the supervisor of {owner.instance}",
        )
    elif order is None and told is not None and told.state == "paused":
        yield WaitCause(
            "paused", f"the worker of {facts.unit} on {told.owner} is paused", "`streamqd resume`"
        )


def _by(order: LiveDirective) -> str:
    who = f" by {order.by}" if order.by else ""
    return f"{who} ({order.why})" if order.why else who


def _as_argument(scope: str) -> str:
    """A scope as `resume` takes it, without a star that a shell would expand."""
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


def _ownerless(facts: WaitFacts) -> Iterator[WaitCause]:
    unit = facts.unit
    alive = [each for each in facts.members if each.state != "silent"]
    if facts.lease == "expired":
        owner = _owner(facts)
        silent = f" and has been silent for {owner.silent_seconds:.0f} s" if owner else ""
        yield WaitCause(
            "owner-silent",
            f"{facts.owner}, the owner of {unit}, does not renew its lease{silent}",
            "another member takes over by itself if one offers it; else see whether that host"
            " lives and reaches Redis",
        )
    if not alive:
        yield WaitCause(
            "no-member",
            f"no instance owns {unit}: no instance of the fleet is alive",
            "start streamqd",
        )
        return
    offering = [each for each in alive if each.offers]
    pair = f"{unit.topic}/{unit.group}"
    if not offering:
        yield WaitCause(
            "no-offer",
            f"no instance owns {unit}: none of {plural(len(alive), 'live instance')} offers {pair}",
            f"start an instance whose configuration has a consumer of {pair}",
        )
        return
    fit = [each for each in offering if not each.broken]
    if not fit:
        names = ", ".join(each.instance for each in offering)
        yield WaitCause(
            "crash-loop",
            f"the worker of {unit} crashes in a loop on {names}, and rests{_last_error(facts)}",
            "read the last worker.crashed events of the log, fix the handler, then reload",
        )
        return
    full = [each for each in fit if each.capacity is not None and each.owned >= each.capacity]
    if full and len(full) == len(fit):
        yield _no_capacity(f"no instance owns {unit}", full)
        return
    present = [each for each in fit if not each.leaving and each.instance not in facts.drained]
    if not present:
        names = ", ".join(each.instance for each in fit)
        yield WaitCause(
            "drained",
            f"no instance owns {unit}: all that offer {pair} are drained or leaving ({names})",
            "start another instance, or take the drain back",
        )
        return
    if all(each.cap and each.owned >= each.cap for each in present):
        names = ", ".join(f"{each.instance} {each.owned} of {each.cap}" for each in present)
        yield WaitCause(
            "caps-full",
            f"no instance owns {unit}: every instance that offers {pair} owns as many partitions as"
            f" it may ({names})",
            "raise daemon.max_partitions, or start another instance",
        )
        return
    if facts.lease == "free":
        yield WaitCause(
            "changing-hands",
            f"{unit} is between two owners; {present[0].instance} may take it",
            "look again in some seconds",
        )


def _no_capacity(what: str, full: Sequence[MemberFacts]) -> WaitCause:
    told = ", ".join(f"{each.instance} runs {each.owned}: {each.limit}" for each in full)
    return WaitCause(
        "no-capacity",
        f"{what}: the system lets {'it' if len(full) == 1 else 'them'} start no more processes"
        f" ({told})",
        "raise LimitNOFILE, TasksMax or the memory of that service, or start another instance; it"
        " takes partitions again by itself",
    )


def _owned(facts: WaitFacts) -> Iterator[WaitCause]:
    unit, told, owner = facts.unit, facts.told, _owner(facts)
    if facts.owner == GROWTH:
        yield WaitCause(
            "growing",
            f"{unit.topic} grows: {unit} is read when {unit.group} has settled what is in the old"
            " partitions",
            "`streamqd topic grow` with the new number shows how much is left, and must be run"
            " until it is over",
        )
        return
    if owner is not None and owner.state == "silent":
        yield WaitCause(
            "owner-silent",
            f"{facts.owner}, the owner of {unit}, has been silent for {owner.silent_seconds:.0f} s",
            "see whether that host lives and reaches Redis; its lease expires by itself",
        )
        return
    if told is None:
        yield WaitCause(
            "owner-untold",
            f"{facts.owner} owns {unit} but has published nothing of it",
            "look again in some seconds; if it stays so, read the log of that instance",
        )
        return
    if told.state == "broken" or (owner is not None and owner.broken):
        yield WaitCause(
            "crash-loop",
            f"the worker of {unit} on {told.owner} crashes in a loop, and rests"
            f"{_last_error(facts)}",
            "read the last worker.crashed events of its log, fix the handler, then reload",
        )
        return
    yield from _waits(facts, told)
    yield from _at_work(facts, told)
    if owner is not None and owner.redis_up is False:
        yield WaitCause(
            "redis-away",
            f"{told.owner}, the owner of {unit}, does not reach Redis",
            "see whether that host reaches Redis",
        )


def _at_work(facts: WaitFacts, told: LiveUnit) -> Iterator[WaitCause]:
    """What the runs of a worker say: slow, crashing, failing, or in quarantine."""
    unit = facts.unit
    run = told.longest_run_seconds or 0.0
    if run >= STUCK_SECONDS:
        limit = "the limit ends it by itself" if told.hard_timeout else "no hard_timeout ends it"
        yield WaitCause(
            "slow-handler",
            f"the handler of {unit} on {told.owner} has been working on one message"
            f"{_which(told, unit)} for {lasting(run)}{_gets_on(told)}; {_waiting(facts)}",
            f"{limit}; SIGUSR1 to the supervisor of {told.owner} logs where the handler stands",
        )
    crashes = [each for each in _recent(facts) if each.error.startswith("process ended")]
    if crashes and told.state in ("gone", "booting"):
        yield WaitCause(
            "crashing",
            f"the worker of {unit} on {told.owner} keeps ending ({crashes[0].error},"
            f" {crashes[0].seconds_ago:.0f} s ago) and is being started again",
            "read the last worker.crashed events of its log",
        )
    acked, failed = told.acked or 0.0, told.failed or 0.0
    if failed > MOVING and failed >= FAILING_SHARE * (acked + failed):
        yield WaitCause(
            "failing",
            f"{failed / (acked + failed):.0%} of the runs of {unit} fail{_last_error(facts)}",
            f"fix the handler or what it depends on; `streamqd dlq stats {unit.topic}` shows"
            " what died of it",
        )
    if facts.solo and acked <= MOVING:
        yield WaitCause(
            "solo",
            f"{unit} runs what it inherited from an owner that was lost one message at a time",
            "wait: it is how the message is found that kills its process",
        )


def _waits(facts: WaitFacts, told: LiveUnit) -> Iterator[WaitCause]:
    owner = _owner(facts)
    if owner and owner.limit and told.state in ("gone", "booting") and not told.running:
        what = f"{owner.instance} owns {facts.unit} and is about to give it up"
        yield _no_capacity(what, [owner])
    others = facts.unread or facts.pending > (told.held or 0)
    moving = bool(others) and (told.acked or 0.0) > MOVING
    yield from _worker_waits(told, moving=moving, last_error=_last_error(facts))


def _worker_waits(told: LiveUnit, *, moving: bool, last_error: str) -> Iterator[WaitCause]:
    """Say what holds a unit; `last_error` completes a sentence.

    `moving` tells that messages are settled besides those that are held.
    """
    name, on = told.name, f"on {told.owner}"
    left = told.waits_seconds
    when = "" if left is None else f", the next try in {left:.0f} s"
    if told.state == "blocked":
        yield WaitCause(
            "blocked",
            f"{name} waits {on} for the message at the head of its line, which has"
            f" failed{when}{last_error}",
            'fix what it fails of; with on_error = "block" nothing gets past it',
        )
    elif told.state in ("halted", "probing"):
        half = told.state == "probing"
        begins = "half-open" if half else "open"
        then = "one message at a time is tried" if half else "no message is started"
        yield WaitCause(
            "circuit-open",
            f"the circuit breaker of {name} is {begins} {on}: {then}{when}{last_error}",
            "fix what the handler depends on: the circuit closes by itself when a message succeeds",
        )
    elif told.state == "flooded":
        yield WaitCause(
            "flood",
            f"the flood guard has stopped {name} {on}, because most of its messages die"
            f"{last_error}",
            f"fix the handler, then `streamqd resume {name}`",
        )
    elif told.state == "throttled":
        yield WaitCause(
            "throttled",
            f"{name} is held {on} by its rate of {told.rate or 0:g} runs/s, which the group has in"
            " each partition",
            "wait, or raise the rate of the consumer; more partitions have more rate",
        )
    elif told.held and not moving:
        full = ", as many as it may, and reads no more" if told.state == "full" else ""
        keys = "one held key" if told.held_keys == 1 else f"{told.held_keys:,} held keys"
        yield WaitCause(
            "keys-held",
            f"the worker of {name} {on} keeps {told.held:,} messages of {keys}{full}{when}"
            f"{last_error}",
            "fix what the first message of each fails of; held_max is how many it may keep",
        )


# --- what does not hold it --------------------------------------------------------------------


def _moving(facts: WaitFacts, told: LiveUnit) -> WaitCause:
    acked, slope = told.acked or 0.0, told.lag_per_second or 0.0
    text = f"{facts.unit} moves: {acked:.1f} messages/s on {told.owner}, {_waiting(facts)}"
    if slope > 0.5:
        return WaitCause(
            "falling-behind",
            f"{text}, growing by {slope:.1f}/s",
            "it gets more than one worker handles: make the handler faster, or grow the topic",
            True,
        )
    if slope < -0.5 and facts.lag:
        return WaitCause(
            "moving", f"{text}, caught up in about {facts.lag / -slope:.0f} s", "", True
        )
    return WaitCause("moving", text, "", True)


def _delayed(facts: WaitFacts) -> WaitCause:
    due = facts.next_due_seconds
    when = "" if due is None else f", the next in {max(0.0, due):.0f} s"
    return WaitCause(
        "waiting-for-retry",
        f"{plural(facts.delayed, 'message')} of {facts.unit} wait for their next attempt{when}"
        f"{_last_error(facts)}",
        "wait, or fix what they fail of",
    )


def _owner(facts: WaitFacts) -> MemberFacts | None:
    return next((each for each in facts.members if each.instance == facts.owner), None)


def _recent(facts: WaitFacts) -> list[LiveFailure]:
    return [each for each in facts.failures if each.seconds_ago <= RECENT_SECONDS]


def _last_error(facts: WaitFacts) -> str:
    last = min(facts.failures, key=lambda each: each.seconds_ago, default=None)
    return "" if last is None else f"; last: {last.error}, {last.seconds_ago:.0f} s ago"


def _gets_on(told: LiveUnit) -> str:
    beat = told.progress_seconds
    return "" if beat is None else f" (it reported progress {beat:.0f} s ago)"


def _which(told: LiveUnit, unit: Unit) -> str:
    """The message that runs: by its uid, which `trace` takes; by its place where that is no uid."""
    kind, _, entry_id = told.running.partition(":")
    if kind == "m" and not unit.reads_letters:
        return f" ({unit.topic}/{unit.partition}/{entry_id})"
    return f" ({told.running})" if told.running else ""


def _waiting(facts: WaitFacts) -> str:
    lag = "more than 1,000" if facts.lag is None else f"{facts.lag:,}"
    age = (
        "" if facts.oldest_seconds is None else f", the oldest {lasting(facts.oldest_seconds)} old"
    )
    return f"{lag} unread and {facts.pending:,} pending{age}"
