"""Script calls that count entries for Spark, and publish each row of a batch once.

Only `streamqd.spark` uses these calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.errors import ContractError, InvalidValueError
from streamqd.model import QUERY_PREFIX
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

STEP_MAX = 500  # maximum number of entries in one step
ROWS_MAX = 250  # maximum number of rows in one call
# Maximum number of names and values in one row, because `unpack` in Lua fails near 8,000.
FIELDS_MAX = 4000
PLAN_BYTES_MAX = untrusted.OBJECT_BYTES_MAX

Plan = Mapping[str, Mapping[str, Sequence[int]]]  # partitions by task attempt and topic


def step(stream: str, after: str, upto: str, count: int) -> Call:
    """Build a call that returns the position `count` entries after the ID `after`.

    The position is never after the ID `upto`. `StreamStep` parses the reply.
    """
    if not 1 <= count <= STEP_MAX:
        raise ContractError(f"stream_step: {count} entries, not 1 to {STEP_MAX}")
    return scripts.get("stream_step").call({"stream": stream}, after=after, upto=upto, count=count)


class StreamStep(NamedTuple):
    """The result of a step through a stream.

    `passed` is the number of entries in the step, and `last` is the ID of the last one. If `more`
    is True, there may be further entries before the end of the range.
    """

    passed: int
    last: str
    more: bool

    @classmethod
    def parse(cls, reply: Reply, _key: str = "") -> StreamStep:
        """Parse an OK reply."""
        passed, last, more = reply.values
        return cls(int(passed), last.decode(), bool(more))


def query_position(
    keys: Keys,
    topic: str,
    partition: int,
    query: str,
    entry_id: str,
    read: int | None,
    *,
    hold: bool,
) -> Call:
    """Build a call that publishes how far a query has read a partition.

    `entry_id` is the ID of the last entry that the query has read, and `read` the number of entries
    up to and including it, or None if that number is unknown. If `hold` is True, entries that the
    query has not read yet are not trimmed, even if they exceed the topic's retention limits.
    """
    return scripts.build_call(
        "query_position",
        keys,
        (topic, partition),
        group=QUERY_PREFIX + query,
        after=entry_id,
        read=-1 if read is None else read,
        hold=hold,
    )


def begin(keys: Keys, query: str, batch: int, plan: Plan, ttl: float, rows: int) -> Call:
    """Build a call that decides which task attempts make up a batch.

    Spark may repeat a batch with other tasks, but only the rows of one set of attempts may be
    published. The first decision is therefore final: if a plan is already recorded for the batch, a
    later call returns that plan. The record is kept for `ttl` seconds.
    """
    names = {name for topics in plan.values() for name in topics}
    return scripts.get("sink_start").call(
        {"record": keys.sink(query)},
        batch=batch,
        plan=write_plan(plan),
        ttl_ms=round(ttl * 1000),
        rows=rows,
        topics=" ".join(sorted(names)),
    )


def publish(keys: Keys, topic: str, partition: int, query: str, attempt: str, ttl: float) -> Call:
    """Build a call that moves up to ROWS_MAX staged rows of an attempt to the partition.

    The reply contains the number of rows moved and the number of rows left. Repeat the call until
    no rows are left. If it is not repeated, the remaining rows expire after `ttl` seconds.
    """
    return scripts.get("sink_publish").call(
        {
            "stream": keys.stream(topic, partition),
            "staged": keys.staged_rows(topic, partition, query, attempt),
        },
        limit=ROWS_MAX,
        ttl_ms=round(ttl * 1000),
    )


def end(keys: Keys, query: str, batch: int, ttl: float) -> Call:
    """Build a call which records that a batch is completely published."""
    return scripts.get("sink_finish").call(
        {"record": keys.sink(query)}, batch=batch, ttl_ms=round(ttl * 1000)
    )


def write_plan(plan: Plan) -> str:
    """Return a plan as JSON, in the form that the record of a query stores."""
    return json.dumps(plan, separators=(",", ":"))


def read_plan(raw: bytes | None, key: str = "the record of a query") -> Plan:
    """Parse the plan in the record of a query, with the attempts in their original order.

    Raises InvalidValueError if it is missing or invalid.
    """
    found = untrusted.json_object(raw, key, "plan")
    for topics in found.values():
        if not isinstance(topics, dict) or not all(map(_are_partitions, topics.values())):
            raise InvalidValueError(
                key, "plan", untrusted.format_value(raw), "partitions by attempt and topic"
            )
        for name in topics:
            untrusted.name(name.encode("utf-8", "replace"), key, "plan")
    return found


def _are_partitions(found: Any) -> bool:
    return isinstance(found, list) and all(
        type(number) is int and 0 <= number <= untrusted.INTEGER_MAX for number in found
    )
