"""Replay and purge dead letters. Each replay or purge is a job of the console.

A dry run examines a limited number of dead letters, and states this number. The form contains the
time of its dry run, so that the job applies only to dead letters that existed then. The job reads
them page by page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from streamqd.admin import dead_letters
from streamqd.admin.dead_letters import MatchCount, Purged, ReplayPlan, ReplayResult, Target
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import server_unix_ms
from streamqd.console.access import Role
from streamqd.console.backend import Resources
from streamqd.console.formats import reason, sentence
from streamqd.console.forms import DRY_RUN_PREFIX, check_typed
from streamqd.console.jobs import ConsoleJob
from streamqd.console.view import (
    PARTITION_MAX,
    Act,
    ActResult,
    FormField,
    Preview,
    Visit,
    path_topic,
)
from streamqd.console.views.dead import read_choice
from streamqd.dead_letter import REASONS
from streamqd.errors import InvalidRequestError
from streamqd.words import plural

Result = TypeVar("Result", ReplayResult, Purged)

LARGE = 1_000  # number of dead letters above which the topic's name must be typed
EXAMINED = 10_000  # dead letters that a dry run examines by default
EXAMINED_MAX = 100_000
EXAMINING_SECONDS = 5.0  # seconds that a dry run may take
ROWS = 20  # causes that a dry run shows at most
AT, COUNT = (
    f"{DRY_RUN_PREFIX}at",
    f"{DRY_RUN_PREFIX}letters",
)  # fields: the time (unix ms) and count of the dry run
_LIMIT, _SCAN = "Limit", "Scan at most"  # labels of the fields `canary` and `examine`
_FILTERS = (
    ("group", "Group", "Default: all groups."),
    ("fingerprint", "Fingerprint", "One cause."),
    ("error", "Error class", ""),
    ("reason", "Reason", ""),
    ("key", "Key", ""),
    ("header", "Header", "NAME=VALUE."),
    ("partition", "Partition", "Default: all partitions."),
    ("since", "Since", "An age such as 12h or 7d, or a time such as 2026-11-27T22:00 (UTC)."),
    ("until", "Until", "An age such as 12h or 7d, or a time such as 2026-11-27T22:00 (UTC)."),
    ("id", "IDs", "PARTITION:MS-SEQ, separated by spaces."),
)


def _filter_fields(visit: Visit) -> list[FormField]:
    shown = visit.person.bodies == "show"
    fields = [
        visit.field(name, label, hint, _choices(visit) if name == "reason" else ())
        for name, label, hint in _FILTERS
        if shown or name not in ("key", "header")
    ]
    return [replace(each, folded=True) for each in fields]


def _choices(visit: Visit) -> list[tuple[str, str]]:
    """Return the reasons of dead letters for a list. An unknown reason from the URL is added."""
    given = visit.text("reason")
    known = [*REASONS, *([given] if given and given not in REASONS else [])]
    return [("", "any"), *((each, reason(each)) for each in known)]


def _purge_fields(visit: Visit) -> Sequence[FormField]:
    hint = f"Dead letters that the dry run reads, up to {EXAMINED_MAX:,}. Default: {EXAMINED:,}."
    return [*_filter_fields(visit), visit.field("examine", _SCAN, hint)]


def _replay_fields(visit: Visit) -> Sequence[FormField]:
    receivers = (("", "the original group"), ("all", "every group"))
    return [
        visit.field("to", "Deliver to", choices=receivers),
        visit.field("canary", _LIMIT, "Dead letters. To test a fix, replay a few first."),
        visit.field("rate", "Rate", "Messages per second. Default: as fast as possible."),
        visit.field("to_topic", "To topic", "Another topic, for all its groups."),
        visit.field("to_partition", "To partition", "Default: the partition of each message."),
        *_purge_fields(visit),
    ]


def _read_target(visit: Visit) -> Target:
    """Return the destination that was chosen in the form. Raises InvalidRequestError."""
    all_groups, topic = visit.text("to") == "all", visit.text("to_topic")
    if all_groups and topic:
        raise InvalidRequestError(
            '"To topic" already sends to all groups of that topic; set "Deliver to" to the original'
            " group"
        )
    return Target(
        all_groups, visit.optional_number("to_partition", most=PARTITION_MAX), topic or None
    )


def _read_limit(visit: Visit) -> int | None:
    return visit.optional_number("canary", least=1, label=_LIMIT)


def _read_rate(visit: Visit) -> float | None:
    text = visit.text("rate").removesuffix("/s")
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.01 <= rate <= 1e6:
        raise InvalidRequestError('"Rate" must be a number from 0.01 to 1,000,000')
    return rate


def _choice_until(visit: Visit, at_unix_ms: int) -> MessageFilter:
    """Return the form's filter, without messages that were dead-lettered after `at_unix_ms`."""
    choice = read_choice(visit, at_unix_ms)
    if choice.ids:
        return choice
    until = choice.until_unix_ms
    return replace(choice, until_unix_ms=at_unix_ms if until is None else min(until, at_unix_ms))


def _now_unix_ms(visit: Visit) -> int:
    """Return a time that is later than any existing dead letter (Unix ms, Redis time)."""
    return server_unix_ms(visit.resources.store.connection) + 1


def _dry_run_ms(visit: Visit) -> int:
    """Return the time of the dry run that the person saw, or the current time if there was none."""
    present = _now_unix_ms(visit)
    return min(present, visit.number(AT, present))


def _dry_run_count(visit: Visit) -> int | None:
    """Return the count from the dry run that the person saw, or None if there was no exact one."""
    return visit.optional_number(COUNT)


def _read_budget(visit: Visit) -> int:
    return visit.number("examine", EXAMINED, least=1, most=EXAMINED_MAX, label=_SCAN)


def _form_values(at_unix_ms: int, count: int, *, complete: bool) -> dict[str, str]:
    """Return the values that the form passes on to the act.

    A count that is not exact is left out.
    """
    return {AT: str(at_unix_ms)} | ({COUNT: str(count)} if complete else {})


def _format_count(number: int, *, complete: bool) -> str:
    text = plural(number, "dead letter")
    return text if complete else f"At least {text}"


def _describe_unexamined(seen: ReplayPlan | MatchCount, act: str) -> str:
    """Return sentences about the dead letters that a dry run did not examine."""
    return (
        f"The dry run examined {seen.examined:,} of {plural(seen.total, 'dead letter')}. The {act}"
        f' examines the others too. To get the exact number, narrow the filter or raise "{_SCAN}".'
    )


# --- replay ---------------------------------------------------------------------------------------


def _make_plan(visit: Visit, at_unix_ms: int) -> ReplayPlan:
    return dead_letters.plan(
        visit.resources.store,
        visit.path["topic"],
        _choice_until(visit, at_unix_ms),
        fleet=visit.resources.fleet.name,
        target=_read_target(visit),
        limit=_read_limit(visit),
        budget=_read_budget(visit),
        stop=dead_letters.stop_after(EXAMINING_SECONDS),
    )


def preview_replay(visit: Visit) -> Preview:
    """Return the dry run of a replay, from its plan."""
    rate, at = _read_rate(visit), _now_unix_ms(visit)
    plan = _make_plan(visit, at)
    risks = _risks(plan, _read_target(visit))
    rows = [
        (each.error_class or reason(each.reason), each.group, each.count, each.replayed)
        for each in plan.causes[:ROWS]
    ]
    heading = "Dead letters" if plan.complete else "Dead letters, at least"
    return Preview(
        _sentences(plan, rate),
        refusal="No dead letter would be replayed." if plan.complete and not rows else "",
        warnings=[sentence(each) for each in plan.warnings],
        rows=(("Cause", "Group", heading, "Replayed before"), rows) if rows else None,
        typed=plan.topic if risks else "",
        typed_reason=", ".join(risks),
        stated=_form_values(at, plan.dead_letters, complete=plan.complete),
    )


def _sentences(plan: ReplayPlan, rate: float | None) -> list[str]:
    matches = _format_count(plan.dead_letters, complete=plan.complete)
    sentences = [f"{matches} of {plan.topic} would be replayed to {plan.target}."]
    if not plan.dead_letters and not plan.complete:
        sentences = ["None of the examined dead letters would be replayed."]
    if not plan.complete:
        sentences.append(_describe_unexamined(plan, "replay"))
        if plan.dead_letters:
            sentences.append(
                f'To replay only the {plan.dead_letters:,} found, set "{_LIMIT}" to'
                f" {plan.dead_letters}."
            )
    for why, number in plan.refused.items():
        sentences.append(f"{plural(number, 'dead letter')} would be kept: {why}.")
    if rate is not None and plan.dead_letters:
        least = "" if plan.complete else "at least "
        seconds = plan.dead_letters / rate
        sentences.append(f"At {rate:g} per second this takes {least}{seconds:,.0f} s.")
    for each in plan.receivers:
        where = f"{each.owned} of {plural(each.partitions, 'partition')} owned"
        paused = f", {each.paused} paused" if each.paused else ""
        sentences.append(f"{each.group} receives {each.dead_letters:,}: {where}{paused}.")
    return sentences + [sentence(note) for note in plan.notes if note not in plan.warnings]


def _risks(plan: ReplayPlan, target: Target) -> list[str]:
    """Return the reasons why a person must type the topic's name before a replay."""
    crashed = any(each.reason == "crashes" for each in plan.causes)
    found = {
        f"more than {LARGE:,} dead letters match": plan.dead_letters > LARGE,
        "the dry run did not examine all of them": not plan.complete,
        "every group receives them": target.all_groups or target.topic is not None,
        "some crashed their worker": crashed,
        f"{plan.replayed_before:,} were replayed before": plan.replayed_before > 0,
    }
    return [text for text, applies in found.items() if applies]


def replay(visit: Visit) -> ActResult:
    """Start a job that runs the replay which the person saw in the dry run."""
    topic, rate, canary = visit.path["topic"], _read_rate(visit), _read_limit(visit)
    at = _dry_run_ms(visit)
    # The plan gets the same budget as the dry run. If it does not reach all dead letters, the
    # person must type the name of the topic.
    check_typed(visit.typed, topic if _risks(_make_plan(visit, at), _read_target(visit)) else "")
    target = _read_target(visit)
    change = functools.partial(dead_letters.replay, target=target, rate=rate, limit=canary)
    return _start_job(
        visit,
        f"Replay to {target}",
        _choice_until(visit, at),
        change,
        _describe_replay,
        replayed_since_unix_ms=_now_unix_ms(visit),
        rest=_remaining_form(visit),
    )


def _remaining_form(visit: Visit) -> dict[str, str]:
    """Return the values of a form that replays the dead letters beyond the limit of this one.

    They are empty if the form has no limit or selects dead letters by ID.
    """
    stated = {each.name: each.value for each in _replay_fields(visit) if each.value}
    if not stated.pop("canary", "") or "id" in stated:
        return {}
    return stated


def _describe_replay(done: ReplayResult) -> tuple[int, list[str]]:
    """Return the number of replayed dead letters, and clauses about these and the others."""
    parts = [f"{plural(done.replayed, 'dead letter')} replayed to {done.target}"]
    parts += [f"{number:,} kept: {why}" for why, number in done.refused.items()]
    if done.missing:
        parts.append(f"{done.missing:,} were replayed or purged by another client")
    if done.unknown:
        parts.append(f"{done.unknown:,} may have been replayed: the connection was lost")
    return done.replayed, parts


# --- purge ----------------------------------------------------------------------------------------


def preview_purge(visit: Visit) -> Preview:
    """Return the number of dead letters that a purge would delete."""
    topic, at = visit.path["topic"], _now_unix_ms(visit)
    found = dead_letters.count_within(
        visit.resources.store,
        topic,
        read_choice(visit, at),  # exact if there is no filter
        budget=_read_budget(visit),
        stop=dead_letters.stop_after(EXAMINING_SECONDS),
    )
    matches = _format_count(found.dead_letters, complete=found.complete)
    sentences = [f"{matches} of {topic} would be deleted permanently."]
    if not found.complete:
        sentences.append(_describe_unexamined(found, "purge"))
    return Preview(
        sentences,
        refusal="" if found.dead_letters or not found.complete else "No dead letters match.",
        stated=_form_values(at, found.dead_letters, complete=found.complete),
    )


def purge(visit: Visit) -> ActResult:
    """Start a job that runs the purge which the person saw in the dry run."""
    configured = visit.resources.settings.topics.get(visit.path["topic"])
    change = functools.partial(dead_letters.purge, configured=configured)
    return _start_job(
        visit, "Purge", _choice_until(visit, _dry_run_ms(visit)), change, _describe_purge
    )


def _describe_purge(done: Purged) -> tuple[int, list[str]]:
    """Return the number of purged dead letters, and clauses about these and any that were kept."""
    parts = [f"{plural(done.purged, 'dead letter')} purged"]
    if done.unarchived:
        parts.append(f"{done.unarchived:,} kept, because they are not archived yet")
    return done.purged, parts


# --- jobs -----------------------------------------------------------------------------------------


def _start_job(
    visit: Visit,
    title: str,
    choice: MessageFilter,
    change: Callable[..., Result],
    clauses: Callable[[Result], tuple[int, list[str]]],
    *,
    replayed_since_unix_ms: int | None = None,
    rest: Mapping[str, str] | None = None,
) -> ActResult:
    """Start a job that changes the chosen dead letters, in the name of the person.

    `clauses` returns the number of changed dead letters, and the result in words. Raises
    TopicNotFoundError and RequestRefusedError.
    """
    topic, store, stated = visit.path["topic"], visit.resources.store, _dry_run_count(visit)
    if choice.ids:
        dead_letters.count(
            store, topic, choice
        )  # raises RequestRefusedError if a dead letter is missing

    def work(resources: Resources, job: ConsoleJob) -> str:
        done = change(
            *(resources.store, topic, choice),
            stop=job.stop,
            progress=job.progress,
            examining=job.count_examined,
        )
        job.failed = done.result == "failed"
        job.done, parts = clauses(done)
        if done.result in ("stopped", "failed"):
            parts.append(f"{done.result}{f': {done.error}' if done.error else ''}")
        elif stated is not None and job.done != stated:
            parts.append(f"the dry run counted {stated:,}")
        return "; ".join(parts) + "."

    total = dead_letters.total(store, topic)
    job = ConsoleJob(visit.person.name, title, topic, stated, total, replayed_since_unix_ms, rest)
    return ActResult.for_job(visit.resources.backend.start_job(job, work))


ACTS = (
    Act(
        "replay",
        "/topics/{topic}/dead-replay",
        "Replay dead letters",
        "Replay",
        Role.OPERATOR,
        preview_replay,
        replay,
        _replay_fields,
        back="dead",
    ),
    Act(
        "purge",
        "/topics/{topic}/dead-purge",
        "Purge dead letters",
        "Delete permanently",
        Role.ADMIN,
        preview_purge,
        purge,
        _purge_fields,
        path_topic,
        back="dead",
    ),
)
