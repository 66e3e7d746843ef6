"""Spark's calls: count entries, and publish each row of a batch once.

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

STEP_MAX = 500  # entries per step
ROWS_MAX = 250  # rows per call
FIELDS_MAX = 4000  # names and values of one row. Lua's `unpack` fails near 8,000.
PLAN_BYTES_MAX = untrusted.OBJECT_BYTES_MAX

Plan = Mapping[str, Mapping[str, Sequence[int]]]  # attempt -> topic -> partitions


def step(stream: str, after: str, upto: str, count: int) -> Call:
    """Advance `count` entries from `after`, at most to `upto`. `StreamStep` parses the reply."""
    if not 1 <= count <= STEP_MAX:
        raise ContractError(f"stream_step: {count} entries, not 1 to {STEP_MAX}")
    return scripts.get("stream_step").call({"stream": stream}, after=after, upto=upto, count=count)


class StreamStep(NamedTuple):
    """A step over `passed` entries up to `last`. `more`: there may be entries after it."""

    passed: int
    last: str
    more: bool

    @classmethod
    def parse(cls, reply: Reply, _key: str = "") -> StreamStep:
        """Parse the reply OK."""
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
    """Publish the position of a query on a partition. `read` is the number of entries before it."""
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
    """Record the task attempts that form a batch, unless recorded already. `ttl` is in seconds."""
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
    """Move up to ROWS_MAX rows of an attempt. The reply has the moved and the remaining number."""
    return scripts.get("sink_publish").call(
        {
            "stream": keys.stream(topic, partition),
            "staged": keys.staged_rows(topic, partition, query, attempt),
        },
        limit=ROWS_MAX,
        ttl_ms=round(ttl * 1000),
    )


def end(keys: Keys, query: str, batch: int, ttl: float) -> Call:
    """Record that a batch is published."""
    return scripts.get("sink_finish").call(
        {"record": keys.sink(query)}, batch=batch, ttl_ms=round(ttl * 1000)
    )


def write_plan(plan: Plan) -> str:
    """Return the JSON of a plan for the record of a query."""
    return json.dumps(plan, separators=(",", ":"))


def read_plan(raw: bytes | None, key: str = "the record of a query") -> Plan:
    """Parse the plan of a record, with the attempts in order. Raises InvalidValueError."""
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
