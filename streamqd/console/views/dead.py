"""The workbench for dead letters: causes, letters, one dossier, replay, purge, edit and send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamqd.admin import audit, dead_letters
from streamqd.admin.dead_letters import Target
from streamqd.admin.messages import MessageFilter
from streamqd.admin.topics import partition_count
from streamqd.console.access import Role
from streamqd.console.jobs import ConsoleJob
from streamqd.console.view import (
    Act,
    ActResult,
    ConsoleView,
    Context,
    Download,
    FormField,
    Preview,
    Visit,
)
from streamqd.errors import Malformed, Refused
from streamqd.producer.producer import Producer
from streamqd.words import plural

COUNTED = 10_000  # newest letters that are grouped by cause
BUDGET = 10_000  # letters that one page looks at
EXPORT_MAX = 10_000
CAUSES_SHOWN = 100
FILTERS = ("group", "fingerprint", "error", "reason", "key", "since", "until", "partition", "id")
EDITED = "x-edited-from"
_MINUTES = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}


def choice_of(visit: Visit, now_unix_ms: int) -> MessageFilter:
    """Return the filter that the URL or form states. Raises Malformed, Refused."""
    partition = visit.text("partition")
    if visit.text("key") and visit.person.bodies != "show":
        raise Refused("you may not filter by a key, because you may not see keys")
    return MessageFilter(
        ids=tuple(visit.text("id").split()),
        group=visit.text("group") or None,
        fingerprint=visit.text("fingerprint") or None,
        error_class=visit.text("error") or None,
        reason=visit.text("reason") or None,
        key=visit.text("key").encode() or None,
        since_unix_ms=_instant(visit, "since", now_unix_ms),
        until_unix_ms=_instant(visit, "until", now_unix_ms),
        partition=visit.number("partition", 0, most=1 << 20) if partition else None,
    )


def _instant(visit: Visit, name: str, now_unix_ms: int) -> int | None:
    """Return a time: unix milliseconds, or an age such as 30m, 12h or 7d."""
    text = visit.text(name)
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text)
    number, unit = text[:-1], text[-1:]
    if unit in _MINUTES and number.isascii() and number.isdigit() and len(number) < 6:
        return now_unix_ms - int(number) * _MINUTES[unit]
    raise Malformed(f"{name}: write an age such as 30m, 12h or 7d, or unix milliseconds")


def stated(visit: Visit) -> dict[str, str]:
    """Return the filters as they are written, for links and forms."""
    return {name: visit.text(name) for name in FILTERS if visit.text(name)}


def show_topics(visit: Visit) -> Context:
    """Return the topics that have dead letters, the latest first."""
    rows = dead_letters.overview(visit.desk.store)
    rows.sort(key=lambda row: -(row.newest_unix_ms or 0))
    return {
        "now": visit.now,
        "rows": rows[: visit.limit],
        "total": len(rows),
        "jobs": visit.desk.backend.jobs.listed(),
    }


def show(visit: Visit) -> Context:
    """Return the causes of a topic's letters, and a page of the letters that match."""
    topic, store, now = visit.path["topic"], visit.desk.store, visit.now
    choice = choice_of(visit, now.now_unix_ms)
    letters = dead_letters.messages(store, topic)
    page = letters.page(choice, limit=visit.limit, cursor=visit.text("cursor"), budget=BUDGET)
    causes = None
    if not visit.text("cursor"):
        causes = dead_letters.causes(store, topic, choice, last=COUNTED)
    reader = visit.reader
    return {
        "now": now,
        "topic": topic,
        "filters": stated(visit),
        "page": page,
        "causes": causes,
        "shown": causes.causes[:CAUSES_SHOWN] if causes else [],
        "cursor": visit.text("cursor"),
        "limit": visit.limit,
        "budget": BUDGET,
        "reader": reader,
        "jobs": visit.desk.backend.jobs.listed(topic)[:5],
    }


def show_letter(visit: Visit) -> Context:
    """Return the dossier of one letter."""
    topic = visit.path["topic"]
    letter = dead_letters.show(visit.desk.store, topic, visit.path["letter"])
    reader = visit.reader
    return {
        "now": visit.now,
        "topic": topic,
        "letter": letter,
        "body": reader.body(letter.payload),
        "reader": reader,
        "headers": reader.headers(letter.headers),
    }


# --- replay ---------------------------------------------------------------------------------------


def _filter_fields(visit: Visit) -> list[FormField]:
    return [
        FormField("group", "Group", visit.text("group"), "Letters of this group. Empty: of all."),
        FormField("fingerprint", "Fingerprint", visit.text("fingerprint"), "One cause."),
        FormField("error", "Error class", visit.text("error")),
        FormField("since", "Since", visit.text("since"), "An age such as 12h or 7d."),
        FormField("until", "Until", visit.text("until"), "An age, or unix milliseconds."),
        FormField("id", "Letters", visit.text("id"), "Ids PARTITION:MS-SEQ with spaces between."),
    ]


def _replay_fields(visit: Visit) -> Sequence[FormField]:
    return [
        *_filter_fields(visit),
        FormField(
            "to", "To", visit.text("to"), choices=(("", "their own group"), ("all", "every group"))
        ),
        FormField(
            "canary", "At most", visit.text("canary"), "Replay this many first, and look at them."
        ),
        FormField("rate", "Letters per second", visit.text("rate"), "Empty: as fast as possible."),
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
        raise Malformed("letters per second must be a number from 0.01 to 1,000,000")
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
    sentences += [f"{note[:1].upper()}{note[1:]}." for note in plan.notes]
    rows = [
        (each.error_class or each.reason, each.group, each.count, each.replayed)
        for each in plan.causes[:20]
    ]
    return Preview(
        sentences,
        refusal="" if plan.dead_letters else "No dead letter would be replayed.",
        rows=(("Cause", "Group", "Letters", "Replayed before"), rows) if rows else None,
    )


def replay(visit: Visit) -> ActResult:
    """Start a replay as a job."""
    topic, rate, canary = visit.path["topic"], _rate(visit), _canary(visit)
    plan = _plan(visit)
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
        typed=topic,
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


# --- jobs -----------------------------------------------------------------------------------------


def show_job(visit: Visit) -> Context:
    """Return one job with its progress."""
    return {"job": visit.desk.backend.jobs.get(visit.path["job"])}


def preview_stop(visit: Visit) -> Preview:
    """Return what stopping a job would do."""
    job = visit.desk.backend.jobs.get(visit.path["job"])
    if not job.running:
        return Preview([], refusal=f"The job has ended: {job.result}")
    return Preview([f"{job.title} would stop after its current batch. What is done stays done."])


def stop(visit: Visit) -> ActResult:
    """Stop a job."""
    job = visit.desk.backend.jobs.get(visit.path["job"])
    job.stopping.set()
    return ActResult("The job stops after its current batch.", "job", {"job": job.id})


# --- edit and send --------------------------------------------------------------------------------


def _edit_fields(visit: Visit) -> Sequence[FormField]:
    letter = dead_letters.show(visit.desk.store, visit.path["topic"], visit.path["letter"])
    try:
        text, key = letter.payload.decode(), (letter.key or b"").decode()
    except UnicodeDecodeError:
        return ()
    if "\0" in text + key:  # no form can hold it
        return ()
    if visit.person.bodies != "show":
        return ()
    return (
        FormField("payload", "Payload", visit.query.get("payload", text), rows=12),
        FormField("key", "Key", visit.query.get("key", key)),
        FormField(
            "headers",
            "Headers",
            visit.query.get("headers", json.dumps(dict(letter.headers or {}))),
            "A JSON object of strings.",
        ),
    )


def stated_headers(visit: Visit) -> dict[str, str]:
    """Return the headers of a form. Raises Malformed."""
    try:
        found = json.loads(visit.text("headers") or "{}")
    except (ValueError, RecursionError):
        raise Malformed("the headers are not JSON") from None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise Malformed("the headers are not a JSON object of strings")
    return found


def preview_edit(visit: Visit) -> Preview:
    """Return what sending the edited message would do."""
    topic, name = visit.path["topic"], visit.path["letter"]
    if not _edit_fields(visit):
        return Preview(
            [], refusal="This payload cannot be edited as text, or you may not see all of it."
        )
    stated_headers(visit)
    return Preview(
        [
            f"A new message with this payload would be sent to every group of {topic}.",
            f"It has the header {EDITED}. The dead letter {name} stays until it is purged.",
        ]
    )


def edit(visit: Visit) -> ActResult:
    """Send the edited message."""
    topic, name = visit.path["topic"], visit.path["letter"]
    if not _edit_fields(visit):
        raise Refused("you may not see all of this payload, so it cannot be edited")
    letter = dead_letters.show(visit.desk.store, topic, name)
    headers = stated_headers(visit) | {EDITED: letter.uid or f"{topic} {name}"}
    payload = visit.query.get("payload", "")
    if b"\r\n" in letter.payload:
        payload = payload.replace("\n", "\r\n")
    uid = send(visit, topic, payload, visit.query.get("key", ""), headers)
    audit.record(
        visit.desk.store,
        topic,
        "dlq edit",
        arguments={"letter": name, "uid": uid},
        counts={"sent": 1},
    )
    return ActResult(f"Sent as {uid}.", "dead_letter", {"topic": topic, "letter": name})


def send(
    visit: Visit,
    topic: str,
    payload: str,
    key: str,
    headers: Mapping[str, str],
    delay: float | None = None,
) -> str:
    """Send one message and return its uid. The topic must exist."""
    partition_count(visit.desk.store, topic)
    with Producer(None, visit.desk.settings, create=False) as producer:
        try:
            return producer.send(
                topic, payload, key=key or None, headers=dict(headers) or None, delay=delay
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise Malformed(f"nothing was sent: {error}") from None


def export(visit: Visit) -> tuple[str, str, bytes]:
    """Return the letters that match as JSON lines, at most EXPORT_MAX."""
    topic = visit.path["topic"]
    if visit.person.bodies != "show":
        raise Refused("you may not see the bodies of messages, so you cannot export them")
    choice = choice_of(visit, visit.now.now_unix_ms)
    with audit.acting_as(f"{visit.person.name} (console)"):
        found = dead_letters.Export(
            visit.desk.store, topic, choice, stop=lambda: len(lines) >= EXPORT_MAX
        )
        lines: list[str] = []
        for line in found.lines():
            if len(lines) == EXPORT_MAX:
                break
            lines.append(line)
        found.finish("console")
    return f"{topic}-dead-letters.jsonl", "application/x-ndjson", "\n".join([*lines, ""]).encode()


def payload(visit: Visit) -> tuple[str, str, bytes]:
    """Return the payload of one letter."""
    if visit.person.bodies != "show":
        raise Refused("you may not see the bodies of messages")
    letter = dead_letters.show(visit.desk.store, visit.path["topic"], visit.path["letter"])
    return f"{letter.id.replace(':', '-')}.bin", "application/octet-stream", letter.payload


VIEWS = (
    ConsoleView("dead_topics", "/dead", "Dead letters", show_topics, label="Dead letters", key="l"),
    ConsoleView(
        "dead", "/topics/{topic}/dead", "Dead letters", show, example="/topics/orders/dead"
    ),
    ConsoleView(
        "dead_letter",
        "/topics/{topic}/dead/{letter}",
        "Dead letter",
        show_letter,
        example="/topics/orders/dead/LETTER",
    ),
    ConsoleView("job", "/jobs/{job}", "Job", show_job, live=True, example="/jobs/JOB"),
)
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
        example="/topics/orders/dead-purge",
    ),
    Act(
        "edit",
        "/topics/{topic}/dead/{letter}/edit",
        "Edit and send",
        "Send",
        Role.OPERATOR,
        preview_edit,
        edit,
        _edit_fields,
        example="/topics/orders/dead/LETTER/edit",
    ),
    Act(
        "job_stop",
        "/jobs/{job}/stop",
        "Stop a job",
        "Stop",
        Role.OPERATOR,
        preview_stop,
        stop,
        example="/jobs/JOB/stop",
    ),
)
DOWNLOADS = (
    Download("dead_export", "/topics/{topic}/dead-export", Role.OPERATOR, export),
    Download("dead_payload", "/topics/{topic}/dead/{letter}/payload", Role.VIEWER, payload),
)
