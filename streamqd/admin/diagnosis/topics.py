"""Checks of what is stored of topics: registry, count, set of partitions, the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin.diagnosis.declaration import Check, CheckResult, Need, Severity, plural
from streamqd.admin.diagnosis.facts import DiagnosisFacts
from streamqd.store.keys import Keys


def _without_meta(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for topic in facts.topics:
        if (
            topic.registered
            and topic.partitions is None
            and not (topic.deleting or topic.unreadable)
        ):
            yield CheckResult(
                f"{topic.name} is in the registry, but nothing says how many partitions it has:"
                " nobody can write or read it",
                f"`streamqd topic create {topic.name} --partitions N` with as many as it had, or,"
                " if nobody needs it,"
                f" `redis-cli SREM {_keys(facts).registry()} {topic.name}`",
                about=topic.name,
                evidence={"registered": True, "meta": _keys(facts).meta(topic.name)},
            )


def _unregistered(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for topic in facts.topics:
        if topic.partitions is not None and not topic.registered:
            yield CheckResult(
                f"{topic.name} exists with {plural(topic.partitions, 'partition')}, but is not in"
                " the registry: views and retention pass it over",
                f"`redis-cli SADD {_keys(facts).registry()} {topic.name}`",
                about=topic.name,
                evidence={"registered": False, "partitions": topic.partitions},
            )


def _set_differs(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for topic in facts.topics:
        if topic.partitions is None:
            continue
        keys = _keys(facts)
        wanted = {keys.stream(topic.name, number) for number in range(topic.partitions)}
        lacking, strange = sorted(wanted - topic.members), sorted(topic.members - wanted)
        if not lacking and not strange:
            continue
        name = keys.partitions(topic.name)
        mends = [f"`redis-cli SADD {name} {' '.join(lacking[:4])}`"] if lacking else []
        mends += [f"`redis-cli SREM {name} {' '.join(strange[:4])}`"] if strange else []
        yield CheckResult(
            f"{topic.name} has {plural(topic.partitions, 'partition')}, but its set of partition"
            f" streams lacks {len(lacking)} of them and holds {len(strange)} others",
            f"the count is what counts: {', '.join(mends)}",
            about=topic.name,
            evidence={
                "partitions": topic.partitions,
                "members": len(topic.members),
                "lacking": lacking[:8],
                "strange": strange[:8],
            },
        )


def _configured_differs(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for topic in facts.topics:
        stated = facts.settings.topics.get(topic.name)
        if stated is None or "partitions" not in stated.stated or topic.partitions is None:
            continue
        count, name = stated.partitions, f"topics.{topic.name}.partitions"
        if count == topic.partitions:
            continue
        small = count < topic.partitions
        yield CheckResult(
            f"the configuration says {name} = {count}, and {topic.partitions} are registered,"
            + (" so a daemon does not start" if small else ", which stay"),
            f"write `partitions = {topic.partitions}`: a topic cannot shrink"
            if small
            else f"`streamqd topic grow {topic.name} {count}`, or write {topic.partitions}",
            about=topic.name,
            evidence={"configured": count, "registered": topic.partitions},
            severity=Severity.PROBLEM if small else None,
        )


def _deletion(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for topic in facts.topics:
        if topic.deleting:
            yield CheckResult(
                f"the deletion of {topic.name} was begun and not finished: it can be neither used"
                " nor created again",
                f"`streamqd topic delete {topic.name} --yes`",
                about=topic.name,
                evidence={"meta": _keys(facts).meta(topic.name)},
            )


def _unreadable(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for topic in facts.topics:
        if topic.unreadable:
            yield CheckResult(
                f"what is stored of {topic.name} cannot be read: {topic.unreadable}",
                f"see `redis-cli HGETALL {_keys(facts).meta(topic.name)}`, and set the field right"
                " with `redis-cli HSET`",
                about=topic.name,
                evidence={"meta": _keys(facts).meta(topic.name), "problem": topic.unreadable},
            )


def _keys(facts: DiagnosisFacts) -> Keys:
    return Keys(facts.settings.keys.control, facts.settings.keys.streams)


_NEEDS = (Need.TOPICS,)
_PROBLEM, _WARNING = Severity.PROBLEM, Severity.WARNING
CHECKS = (
    Check(
        "topics.without-meta",
        _PROBLEM,
        "A topic is in the registry, but not stored.",
        _NEEDS,
        _without_meta,
    ),
    Check(
        "topics.unregistered",
        _WARNING,
        "A topic that is consumed is stored, but not in the registry.",
        _NEEDS,
        _unregistered,
    ),
    Check(
        "topics.partition-set",
        _PROBLEM,
        "The set of partition streams does not match the partition count.",
        _NEEDS,
        _set_differs,
    ),
    Check(
        "topics.configured-count",
        _WARNING,
        "The configuration names another partition count than is registered.",
        _NEEDS,
        _configured_differs,
    ),
    Check("topics.deletion", _WARNING, "A deletion was not finished.", _NEEDS, _deletion),
    Check(
        "topics.unreadable", _PROBLEM, "What is stored of a topic is spoiled.", _NEEDS, _unreadable
    ),
)
