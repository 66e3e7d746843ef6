"""Checks of stored topics: registry, count, set of partitions, configuration."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import DiagnosisFacts
from streamqd.words import plural


@check("topics.without-meta", Severity.PROBLEM, Need.TOPICS)
def _without_meta(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A topic is in the registry, but its partition count is missing."""
    for topic in facts.topics:
        if (
            topic.registered
            and topic.partitions is None
            and not (topic.deleting or topic.unreadable)
        ):
            yield CheckResult(
                f"{topic.name} is in the registry, but its partition count is missing:"
                " no client can write or read it",
                f"`streamqd topic create {topic.name} --partitions N` with as many as it had, or,"
                " if it is not needed,"
                f" `redis-cli SREM {facts.keys.registry()} {topic.name}`",
                about=topic.name,
                evidence={"registered": True, "meta": facts.keys.meta(topic.name)},
            )


@check("topics.unregistered", Severity.WARNING, Need.TOPICS)
def _unregistered(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A consumed topic exists, but is not in the registry."""
    for topic in facts.topics:
        if topic.partitions is not None and not topic.registered:
            yield CheckResult(
                f"{topic.name} exists with {plural(topic.partitions, 'partition')}, but is not in"
                " the registry: views and retention skip it",
                f"`redis-cli SADD {facts.keys.registry()} {topic.name}`",
                about=topic.name,
                evidence={"registered": False, "partitions": topic.partitions},
            )


@check("topics.partition-set", Severity.PROBLEM, Need.TOPICS)
def _set_differs(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The set of partition streams does not match the partition count."""
    for topic in facts.topics:
        if topic.partitions is None:
            continue
        keys = facts.keys
        wanted = {keys.stream(topic.name, number) for number in range(topic.partitions)}
        lacking, unexpected = sorted(wanted - topic.members), sorted(topic.members - wanted)
        if not lacking and not unexpected:
            continue
        name = keys.partitions(topic.name)
        fixes = [f"`redis-cli SADD {name} {' '.join(lacking[:4])}`"] if lacking else []
        fixes += [f"`redis-cli SREM {name} {' '.join(unexpected[:4])}`"] if unexpected else []
        yield CheckResult(
            f"{topic.name} has {plural(topic.partitions, 'partition')}, but its set of partition"
            f" streams lacks {len(lacking)} and has {len(unexpected)} others",
            f"correct the set: {', '.join(fixes)}",
            about=topic.name,
            evidence={
                "partitions": topic.partitions,
                "members": len(topic.members),
                "lacking": lacking[:8],
                "unexpected": unexpected[:8],
            },
        )


@check("topics.configured-count", Severity.WARNING, Need.TOPICS)
def _configured_differs(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The configured partition count differs from the registered one."""
    for topic in facts.topics:
        stated = facts.settings.topics.get(topic.name)
        if stated is None or "partitions" not in stated.explicit or topic.partitions is None:
            continue
        count, name = stated.partitions, f"topics.{topic.name}.partitions"
        if count == topic.partitions:
            continue
        small = count < topic.partitions
        yield CheckResult(
            f"the configuration sets {name} = {count}, and {topic.partitions} are registered,"
            + (" so a daemon does not start" if small else ", which stay"),
            f"write `partitions = {topic.partitions}`: a topic cannot shrink"
            if small
            else f"`streamqd topic grow {topic.name} {count}`, or write {topic.partitions}",
            about=topic.name,
            evidence={"configured": count, "registered": topic.partitions},
            severity=Severity.PROBLEM if small else None,
        )


@check("topics.deletion", Severity.WARNING, Need.TOPICS)
def _deletion(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A deletion was not finished."""
    for topic in facts.topics:
        if topic.deleting:
            yield CheckResult(
                f"the deletion of {topic.name} is incomplete: it can be neither used"
                " nor created again",
                f"`streamqd topic delete {topic.name} --yes`",
                about=topic.name,
                evidence={"meta": facts.keys.meta(topic.name)},
            )


@check("topics.unreadable", Severity.PROBLEM, Need.TOPICS)
def _unreadable(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The stored data of a topic cannot be read."""
    for topic in facts.topics:
        if topic.unreadable:
            meta = facts.keys.meta(topic.name)
            yield CheckResult(
                f"the stored data of {topic.name} cannot be read: {topic.unreadable}",
                f"see `redis-cli HGETALL {meta}`, and correct the field with `redis-cli HSET`"
                if topic.stored
                else f"see who writes it, then `redis-cli RENAME {meta} ELSEWHERE`",
                about=topic.name,
                evidence={"meta": facts.keys.meta(topic.name), "problem": topic.unreadable},
            )
