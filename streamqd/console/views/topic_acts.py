"""Changes that require an admin: grow or delete a topic, and reset or delete a group."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.admin import directives, groups, growth, topics, topics_deletion
from streamqd.admin.groups import GroupReset
from streamqd.admin.topics_deletion import DeletionExtent
from streamqd.console.access import Role
from streamqd.console.backend import Resources, record
from streamqd.console.formats import sentence
from streamqd.console.forms import NOT_AUDITED
from streamqd.console.jobs import ConsoleJob
from streamqd.console.view import (
    PARTITION_MAX,
    Act,
    ActResult,
    AuditNote,
    FormField,
    Preview,
    Visit,
    path_topic,
)
from streamqd.errors import RequestRefusedError
from streamqd.words import plural, spans

POLL_SECONDS = 1.0  # seconds between two checks of the groups of a growing topic
ROWS = 50  # partitions that a dry run shows at most


def _path_group(visit: Visit) -> str:
    return visit.path["group"]


# --- grow -----------------------------------------------------------------------------------------


def _grow_fields(visit: Visit) -> Sequence[FormField]:
    text = visit.text("partitions") or str(_wanted_partitions(visit))
    hint = "A multiple of the current number. A topic cannot shrink."
    return (FormField("partitions", "Partitions", text, hint),)


def _wanted_partitions(visit: Visit) -> int:
    """Return the number of partitions in the form, or by default twice the current number."""
    given = visit.optional_number("partitions", least=1, most=growth.PARTITIONS_MAX)
    if given is not None:
        return given
    count = topics.partition_count(visit.resources.store, visit.path["topic"])
    return min(2 * count, growth.PARTITIONS_MAX)


def _find_growth(visit: Visit, to: int) -> growth.Progress | None:
    """Return the growth that the act would continue, or None if it would start a new one.

    Raises InvalidRequestError, TopicNotFoundError and RequestRefusedError.
    """
    name, settings = visit.path["topic"], visit.resources.settings
    found = growth.progress(visit.resources.store, name, to)
    if found is not None and found.done:
        raise RequestRefusedError(f"{name} already has {plural(to, 'partition')}")
    growth.check_configured(name, to, settings.topics.get(name), settings.source)
    return found


def preview_grow(visit: Visit) -> Preview:
    """Return the effect of growing a topic."""
    name, store, to = visit.path["topic"], visit.resources.store, _wanted_partitions(visit)
    under_way, goal = _find_growth(visit, to), plural(to, "partition")
    if under_way is not None:
        rows = [(each.group, each.left) for each in under_way.groups]
        return Preview(
            [f"The growth of {name} to {goal} would continue."],
            rows=(("Group", "Left to acknowledge"), rows) if rows else None,
        )
    count = topics.partition_count(store, name)
    known = ", ".join(topics.groups(store, name, range(count), only_messages=True)) or "none"
    present = "the current messages of the old partitions"
    return Preview(
        [
            f"{name} would have {goal} instead of {count:,}.",
            "It cannot shrink again.",
            "Producers use the new partitions immediately, and each key keeps its order.",
            f"Each group ({known}) reads them after it has acknowledged {present}.",
            "The daemons of the fleet reload. Write the new number into their configuration first.",
        ]
    )


def grow(visit: Visit) -> ActResult:
    """Start or continue a growth in a job.

    As with the command, the audit log records only its start.
    """
    name, to = visit.path["topic"], _wanted_partitions(visit)
    under_way = _find_growth(visit, to)

    def work(resources: Resources, job: ConsoleJob) -> str:
        notify = growth.notifier(resources.fleet, name, to)
        while True:
            found = growth.grow(resources.store, name, to, notify=notify)
            waiting = sum(not each.done for each in found.groups)
            job.total = max(job.total or 0, len(found.groups))
            job.done = job.total - waiting
            if found.done:
                return f"{name} has {plural(to, 'partition')}, and every group reads them."
            if job.stopping.wait(POLL_SECONDS):
                return f"Stopped, and {found.left}. Grow the topic again to continue."
            job.note = found.left

    job = ConsoleJob(visit.person.name, f"Grow to {to:,}", name)
    started = AuditNote([name], "topic grow", {"partitions": to})
    note = started if under_way is None else None
    return ActResult.for_job(visit.resources.backend.start_job(job, work), note)


# --- delete a topic -------------------------------------------------------------------------------


def _refuse_in_use(visit: Visit, found: DeletionExtent) -> None:
    offering = directives.consuming_instances(visit.resources.fleet, found.topic)
    if offering:
        raise RequestRefusedError(
            f"{', '.join(offering)} would create the topic again, empty; stop these instances, or"
            f" remove the consumers of {found.topic} from their configuration and reload them"
        )
    if found.owned:
        raise RequestRefusedError(
            f"topic {found.topic} is in use ({plural(len(found.owned), 'assignment')}, such as"
            f" {found.owned[0]}); stop its consumers first"
        )


def preview_delete_topic(visit: Visit) -> Preview:
    """Return what the deletion of a topic would delete."""
    found = topics_deletion.measure_extent(visit.resources.store, visit.path["topic"])
    _refuse_in_use(visit, found)
    names = f"the groups {', '.join(found.groups)}" if found.groups else "no group"
    messages, dead_letters = (
        plural(found.messages, "message"),
        plural(found.dead_letters, "dead letter"),
    )
    parts = [
        f"{found.topic} with {plural(found.partitions, 'partition')} would be deleted permanently.",
        f"It has {messages}, {dead_letters} and {names}.",
        "Retries, delayed sends, schedules and the audit log of the topic are deleted too.",
    ]
    if found.partly_deleted:
        parts.append("An earlier deletion was interrupted. This one finishes it.")
    return Preview(parts, warnings=["A producer that keeps sending creates the topic again."])


def delete_topic(visit: Visit) -> ActResult:
    """Start a job that deletes a topic."""
    name = visit.path["topic"]
    found = topics_deletion.measure_extent(visit.resources.store, name)
    _refuse_in_use(visit, found)

    def work(resources: Resources, job: ConsoleJob) -> str:
        def progress(removed: int) -> None:
            job.done = removed

        done = topics_deletion.delete(resources.store, name, force=False, progress=progress)
        # The topic's audit log was deleted with the topic, so this becomes the first entry of a new
        # log.
        arguments = {"groups": found.groups, "partitions": done.partitions, "force": False}
        counts = {"messages": found.messages, "dead_letters": found.dead_letters, "keys": done.keys}
        written = record(resources, [name], "topic delete", arguments, counts)
        text = f"{name} was deleted: {plural(done.keys, 'key')}."
        return text if written else f"{text} {NOT_AUDITED}"

    job = ConsoleJob(visit.person.name, "Delete the topic", name)
    return ActResult.for_job(visit.resources.backend.start_job(job, work))


# --- reset a group --------------------------------------------------------------------------------


def _reset_fields(visit: Visit) -> Sequence[FormField]:
    positions = (
        "earliest, latest, an ID, a time such as 2026-11-27T22:00:00Z, or an age such as 2h."
    )
    return (
        visit.field("to", "First message to read", positions),
        visit.field("partition", "Partition", "Empty: all partitions."),
        visit.field("retries", "Waiting retries", choices=(("", "keep"), ("drop", "drop"))),
    )


def _reset(visit: Visit, *, dry_run: bool) -> GroupReset:
    number = visit.optional_number("partition", most=PARTITION_MAX)
    return groups.reset(
        visit.resources.store,
        visit.path["topic"],
        visit.path["group"],
        visit.text("to"),
        partitions=() if number is None else (number,),
        drop_retries=visit.text("retries") == "drop",
        dry_run=dry_run,
    )


def preview_reset(visit: Visit) -> Preview:
    """Return the positions that a reset would set."""
    if not visit.text("to"):
        owned = _describe_owners(visit)
        text = "Enter the first message to read, then update the dry run."
        return Preview([], refusal=text, warnings=[owned] if owned else [])
    done = _reset(visit, dry_run=True)
    rows = [
        (
            each.partition,
            groups.format_position(each.before),
            each.reached,
            each.unread,
            each.pending,
        )
        for each in done.partitions
    ]
    unread = sum(each.unread for each in done.partitions)
    least = "" if all(each.unread_exact for each in done.partitions) else "at least "
    dropped = done.counts["dropped"]
    sentences = [
        f"{done.group} would read {least}{plural(unread, 'message')} of {done.topic} next.",
        f"{plural(done.counts['forgotten'], 'pending message')} would be released.",
        "Messages before the new position count as handled.",
        *([f"{plural(dropped, 'retry')} would be dropped."] if dropped else []),
        *([f"The table shows {ROWS} of {len(rows):,} partitions."] if len(rows) > ROWS else []),
    ]
    heads = ("Partition", "Last read now", "Then", "Unread then", "Pending")
    return Preview(
        sentences, refusal=_refuse_consumed(visit, done.obstacle), rows=(heads, rows[:ROWS])
    )


def _refuse_consumed(visit: Visit, obstacle: str) -> str:
    """Return a refusal with a remedy that the console offers, or '' if there is no obstacle."""
    return obstacle and (_describe_owners(visit) or sentence(obstacle))


def _describe_owners(visit: Visit) -> str:
    """Return a sentence that names the group's owned partitions, or '' if none has an owner."""
    rows = visit.now.rows(visit.path["topic"], visit.path["group"])
    owned = [row for row in rows if row.owner]
    if not owned:
        return ""
    where = spans(row.partition for row in owned)
    return f"Instances own {where} of {owned[0].topic}/{owned[0].group}. Stop the group first."


def reset(visit: Visit) -> ActResult:
    """Reset a group."""
    topic = visit.path["topic"]
    done = _reset(visit, dry_run=False)
    note = AuditNote([topic], "group reset", done.arguments, done.counts)
    text = f"{done.group} reads {topic} from {done.to} next, once it is started."
    return ActResult(text, note)


# --- delete a group -------------------------------------------------------------------------------


def _delete_fields(visit: Visit) -> Sequence[FormField]:
    choices = (("", "refuse"), ("yes", "discard"))
    return (visit.field("discard", "Unfinished messages", choices=choices),)


def _check_group(visit: Visit) -> groups.GroupDetail:
    """Return the group.

    Raises TopicNotFoundError. Raises RequestRefusedError if the group is in use, or must not be
    deleted yet.
    """
    topic, group = visit.path["topic"], visit.path["group"]
    found = groups.describe(visit.resources.store, topic, group)
    if owned := [row for row in found.partitions if row.lease == "owned"]:
        raise RequestRefusedError(
            f"{owned[0].owner} owns {spans(row.partition for row in owned)} of {topic}/{group};"
            " stop the group first"
        )
    if why := groups.growth_obstacle(visit.resources.store, topic, group):
        raise RequestRefusedError(f"{why}; wait until the growth is complete")
    left = groups.count_unfinished(found.partitions)
    if left.total and not visit.text("discard"):
        raise RequestRefusedError(
            f"{topic}/{group} has {plural(left.pending, 'pending message')} and"
            f" {plural(left.retries, 'waiting retry')}; choose discard to delete them"
        )
    return found


def preview_delete_group(visit: Visit) -> Preview:
    """Return the effect of deleting a group."""
    found = _check_group(visit)
    left, least = groups.count_unfinished(found.partitions), "" if found.lag_exact else "at least "
    unread = plural(found.lag - left.due, "unread message")
    pending, retries = (
        plural(left.pending, "pending message"),
        plural(left.retries, "waiting retry"),
    )
    where = f"{plural(len(found.partitions), 'partition')} of {found.topic}"
    return Preview(
        [
            f"The position of {found.group} on {where} would be deleted.",
            f"It has {least}{unread}, {pending} and {retries}.",
            "The topic's messages and dead letters are kept.",
        ],
        warnings=["A daemon whose configuration names the group creates it again."],
    )


def delete_group(visit: Visit) -> ActResult:
    """Delete a group."""
    found, discard = _check_group(visit), bool(visit.text("discard"))
    topic, group = found.topic, found.group
    done = groups.delete(visit.resources.store, topic, group, force=discard)
    arguments, counts = {"group": group, "force": discard}, {"partitions": done.partitions}
    note = AuditNote([topic], "group delete", arguments, counts)
    return ActResult(f"{topic}/{group} is deleted.", note)


ACTS = (
    Act(
        "grow",
        "/topics/{topic}/grow",
        "Grow a topic",
        "Grow",
        Role.ADMIN,
        preview_grow,
        grow,
        _grow_fields,
        back="topic_data",
    ),
    Act(
        "delete_topic",
        "/topics/{topic}/delete",
        "Delete a topic",
        "Delete permanently",
        Role.ADMIN,
        preview_delete_topic,
        delete_topic,
        typed=path_topic,
        back="topic_data",
    ),
    Act(
        "reset",
        "/groups/{topic}/{group}/reset",
        "Reset a group",
        "Reset",
        Role.ADMIN,
        preview_reset,
        reset,
        _reset_fields,
        _path_group,
        back="topic_data",
    ),
    Act(
        "delete_group",
        "/groups/{topic}/{group}/delete",
        "Delete a group",
        "Delete permanently",
        Role.ADMIN,
        preview_delete_group,
        delete_group,
        _delete_fields,
        _path_group,
        back="topic_data",
    ),
)
