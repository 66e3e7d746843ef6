"""Changes of dead letters: replay and purge. Each runs as a job of the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamqd.admin import audit, dead_letters
from streamqd.admin.dead_letters import Target
from streamqd.console.access import Role
from streamqd.console.forms import check_typed
from streamqd.console.jobs import ConsoleJob
from streamqd.console.view import Act, ActResult, FormField, Preview, Visit, topic_of
from streamqd.console.views.dead import choice_of
from streamqd.errors import Malformed
from streamqd.words import plural

LARGE = 1_000  # more dead letters are replayed only if the name of the topic is typed
_FILTERS = (
    ("group", "Group", "Empty: dead letters of all groups."),
    ("fingerprint", "Fingerprint", "One cause."),
    ("error", "Error class", ""),
    ("since", "Since", "An age such as 12h or 7d, or unix milliseconds."),
    ("until", "Until", "An age, or unix milliseconds."),
    ("id", "IDs", "PARTITION:MS-SEQ with spaces between."),
)


def _filter_fields(visit: Visit) -> list[FormField]:
    return [
        FormField(name, label, visit.text(name), hint, folded=True)
        for name, label, hint in _FILTERS
    ]


def _replay_fields(visit: Visit) -> Sequence[FormField]:
    return [
        *_filter_fields(visit),
        FormField(
            "to", "To", visit.text("to"), choices=(("", "their own group"), ("all", "every group"))
        ),
        FormField(
            "canary", "At most", visit.text("canary"), "A few first, to see whether they work now."
        ),
        FormField("rate", "Per second", visit.text("rate"), "Empty: as fast as possible."),
    ]


def _target(visit: Visit) -> Target:
    return Target(everyone=visit.text("to") == "all")


def _canary(visit: Visit) -> int | None:
    return visit.number("canary", 0, least=1) if visit.text("canary") else None


def _rate(visit: Visit) -> float | None:
    text = visit.text("rate").removesuffix("/s")
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.01 <= rate <= 1e6:
        raise Malformed("per second: write a number from 0.01 to 1,000,000")
    return rate


def _plan(visit: Visit) -> dead_letters.ReplayPlan:
    return dead_letters.plan(
        visit.desk.store,
        visit.path["topic"],
        choice_of(visit, visit.now.now_unix_ms),
        fleet=visit.desk.fleet.name,
        target=_target(visit),
        limit=_canary(visit),
    )


def preview_replay(visit: Visit) -> Preview:
    """Return the plan of a replay."""
    rate = _rate(visit)
    plan = _plan(visit)
    letters = plural(plan.dead_letters, "dead letter")
    sentences = [f"{letters} of {plan.topic} would be replayed to {plan.target}."]
    for reason, number in plan.refused.items():
        sentences.append(f"{plural(number, 'dead letter')} would stay: {reason}.")
    if rate is not None and plan.dead_letters:
        sentences.append(f"At {rate:g} per second this takes {plan.dead_letters / rate:,.0f} s.")
    for each in plan.receivers:
        where = f"{each.owned} of {plural(each.partitions, 'partition')} owned"
        paused = f", {each.paused} paused" if each.paused else ""
        sentences.append(f"{each.group} receives {each.dead_letters:,}: {where}{paused}.")
    sentences += [_sentence(note) for note in plan.notes if note not in plan.warnings]
    risks = _risks(plan, _target(visit))
    rows = [
        (each.error_class or each.reason, each.group, each.count, each.replayed)
        for each in plan.causes[:20]
    ]
    return Preview(
        sentences,
        refusal="" if plan.dead_letters else "No dead letter would be replayed.",
        warnings=[_sentence(each) for each in plan.warnings],
        rows=(("Cause", "Group", "Dead letters", "Replayed before"), rows) if rows else None,
        typed=plan.topic if risks else "",
        typed_reason=", ".join(risks),
    )


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _risks(plan: dead_letters.ReplayPlan, target: Target) -> list[str]:
    """Return why the name of the topic must be typed ahead of a replay. Empty: it need not be."""
    crashed = any(each.reason == "crashes" for each in plan.causes)
    found = {
        f"these are more than {LARGE:,} dead letters": plan.dead_letters > LARGE,
        "every group receives them": target.everyone,
        "some crashed their worker": crashed,
        f"{plan.replayed_before:,} were replayed before": plan.replayed_before > 0,
    }
    return [text for text, applies in found.items() if applies]


def replay(visit: Visit) -> ActResult:
    """Start a replay as a job."""
    topic, rate, canary = visit.path["topic"], _rate(visit), _canary(visit)
    plan = _plan(visit)
    check_typed(visit.typed, topic if _risks(plan, _target(visit)) else "")
    choice = choice_of(visit, visit.now.now_unix_ms)
    if not choice.ids:  # only the letters that the dry run has counted
        bounds = (each for each in (choice.until_unix_ms, plan.until_unix_ms) if each is not None)
        choice = replace(choice, until_unix_ms=min(bounds))
    target, person = _target(visit), audit.who()
    backend = visit.desk.backend

    def work(job: ConsoleJob) -> str:
        with backend.own_desk() as desk, audit.acting_as(person):
            done = dead_letters.replay(
                desk.store,
                topic,
                choice,
                target=target,
                rate=rate,
                limit=canary,
                stop=job.stop,
                progress=job.progress,
            )
        job.failed = done.result == "failed"
        parts = [f"{plural(done.replayed, 'dead letter')} replayed to {done.target}"]
        parts += [f"{number:,} stay: {reason}" for reason, number in done.refused.items()]
        if done.missing:
            parts.append(f"{done.missing:,} had been replayed or purged already")
        if done.unknown:
            parts.append(f"{done.unknown:,} may have been replayed or not")
        if done.result in ("stopped", "failed"):
            parts.append(f"{done.result}{f': {done.error}' if done.error else ''}")
        return "; ".join(parts) + "."

    job = backend.jobs.start(
        visit.person.name, f"Replay to {target}", topic, plan.dead_letters, work
    )
    return ActResult(
        f"The replay of {plural(plan.dead_letters, 'dead letter')} has started.",
        "job",
        {"job": job.id},
    )


def preview_purge(visit: Visit) -> Preview:
    """Return how many letters a purge would delete."""
    topic = visit.path["topic"]
    choice = choice_of(visit, visit.now.now_unix_ms)
    number = dead_letters.count(visit.desk.store, topic, choice)
    return Preview(
        [f"{plural(number, 'dead letter')} of {topic} would be deleted for good."],
        refusal="" if number else "No dead letter matches.",
    )


def purge(visit: Visit) -> ActResult:
    """Start a purge as a job, of the letters that exist now."""
    topic, now = visit.path["topic"], visit.now.now_unix_ms
    choice = choice_of(visit, now)
    if not choice.ids:  # not the ones that die after this
        until = choice.until_unix_ms
        choice = replace(choice, until_unix_ms=now if until is None else min(until, now))
    number = dead_letters.count(visit.desk.store, topic, choice)
    person, backend = audit.who(), visit.desk.backend

    def work(job: ConsoleJob) -> str:
        with backend.own_desk() as desk, audit.acting_as(person):
            done = dead_letters.purge(
                desk.store, topic, choice, stop=job.stop, progress=job.progress
            )
        job.failed = done.result == "failed"
        text = f"{plural(done.purged, 'dead letter')} purged"
        return f"{text}; {done.result}: {done.error}." if done.error else f"{text}."

    job = backend.jobs.start(visit.person.name, "Purge", topic, number, work)
    return ActResult("The purge has started.", "job", {"job": job.id})


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
        example="/topics/orders/dead-replay",
    ),
    Act(
        "purge",
        "/topics/{topic}/dead-purge",
        "Purge dead letters",
        "Delete for good",
        Role.ADMIN,
        preview_purge,
        purge,
        _filter_fields,
        topic_of,
        back="dead",
        example="/topics/orders/dead-purge",
    ),
)
