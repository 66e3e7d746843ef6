"""Every parser of Redis data returns a value within bounds, or raises InvalidValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamqd.config.setting import NAME
from streamqd.errors import InvalidValueError
from streamqd.model import Assignment
from streamqd.store import (
    dead,
    directives,
    growth,
    leases,
    members,
    messages,
    retention,
    retries,
    spark,
    statistics,
    topics,
    untrusted,
)
from streamqd.store.keys import Keys
from streamqd.store.scripts import Reply
from streamqd.store.store import Store
from tests.support.quick import examples

ODD = [
    *(b"", b"abc", b"1e308", b"inf", b"-inf", b"nan", b"9" * 26, b"-1", b"0x10", b" 7", b"7 "),
    *(b"never", b"9007199254740991", b"9007199254740992", b"[" * 5_000, b'{"a":' * 5_000),
    *(b"\xff", b"null", b"0-0", b"1-", b"\xc2\xb2", b"\xd9\xa1", b"1_000", b"3\n"),
]
odd = st.sampled_from(ODD) | st.binary(max_size=40) | st.integers().map(lambda n: b"%d" % n)
odds = st.none() | odd
found: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
nested = st.recursive(
    found,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
quick = settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.too_slow],
)


T = TypeVar("T")


class Answers:
    """A connection that gives every command the same answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def execute(self, *_command: Any) -> Any:
        return self._answer


def read(parse: Callable[[], T], key: str, *fields: str) -> T | None:
    """Return the parsed value, or None for an InvalidValueError that names key and field."""
    try:
        return parse()
    except InvalidValueError as error:
        bad = error
    assert bad.key == key
    assert bad.field in fields or not fields
    assert str(bad).isprintable()
    return None


def assert_in_range(number: int | None, low: int = 0, high: int = untrusted.INTEGER_MAX) -> None:
    assert number is None or low <= number <= high


@quick
@given(odds, odds, odds, odds, odds, st.integers(-2, 2**62))
def test_fence_parser_reports_bad_values(
    token: Any, epoch: Any, owner: Any, since: Any, quarantine: Any, ttl_ms: int
) -> None:
    """If an epoch or time is invalid, the parser reports it with its key and field."""
    fence = (token, epoch, owner, since, quarantine)
    key = "the fence of a"
    view = read(lambda: leases.LeaseView.parse(fence, ttl_ms, key), key, "epoch", "since")
    if view is not None:
        assert_in_range(view.epoch)
        assert_in_range(view.since_unix_ms)


INFO = ("weight", "cap", "owned", "reloaded", "ttl", "offers", "broken", "leaving", "nonce")


@quick
@given(st.dictionaries(st.sampled_from(INFO), nested, max_size=4), odd)
def test_member_parser_bounds_its_values(info: dict[str, Any], score: bytes) -> None:
    """Values such as `"owned": 10**400` are replaced by values within the bounds."""
    told = json.dumps(info).encode()
    (heartbeat,) = members.heartbeats([b"one", score], [b"one", told])
    assert_in_range(heartbeat.heartbeat_unix_ms)
    seen = members.to_member_view(heartbeat)
    assert_in_range(seen.member.weight, 1, members.WEIGHT_MAX)
    assert_in_range(seen.member.cap, 0, members.ASSIGNMENTS_MAX)
    assert_in_range(seen.owned, 0, members.ASSIGNMENTS_MAX)
    assert_in_range(seen.reloaded)
    assert seen.ttl is None or 0 < seen.ttl <= members.TTL_MAX
    for topic, group in seen.member.offers:
        assert isinstance(topic, str)
        assert isinstance(group, str)
    assert all(isinstance(assignment, Assignment) for assignment in seen.broken)


def test_member_parser_names_an_out_of_range_number() -> None:
    """The error names the key and the field."""
    (heartbeat,) = members.heartbeats([b"one", b"5"], [b"one", b'{"owned": 1%s}' % (b"0" * 400)])
    with pytest.raises(InvalidValueError, match=r"one\.owned of the info"):
        members.parse_member(heartbeat, "the info")
    assert members.to_member_view(heartbeat).leaving


@quick
@given(odd, odd, odd)
def test_parsers_report_records_that_are_not_json(name: bytes, score: bytes, info: bytes) -> None:
    """Names, scores and records of any bytes are parsed without an unexpected error."""
    for heartbeat in members.heartbeats([name, score], [name, info]):
        assert members.to_member_view(heartbeat).member.id.isprintable() or name
        assert isinstance(heartbeat.info, dict)
    present = members.HeartbeatReply.parse(Reply("OK", [b"5", [[name, score, info]], [name, info]]))
    assert len(present.members) == 1
    assert directives.read(present.directives) is not None


@quick
@given(st.dictionaries(st.sampled_from(("version", "at_unix_ms", "by", "why", "to")), nested))
def test_directive_parser_lists_unreadable_directives(told: dict[str, Any]) -> None:
    """A directive is either parsed or listed as unreadable."""
    raw = json.dumps({"version": 1, "at_unix_ms": 1} | told).encode()
    known = directives.read([b"pause:a/0/b", raw, b"move:a/0/b", raw, b"reload:*", raw])
    assert_in_range(known.find_reload_unix_ms("x"))


@quick
@given(odds, odds, odds, odds, odds)
def test_topic_parsers_report_bad_values(
    count: Any, created: Any, stored: Any, token: Any, barriers: Any
) -> None:
    """Bad counts, times and settings of a topic are reported, and so are those of its growth."""
    keys = Keys()
    key, registered = keys.meta("orders"), Answers([count, created, stored])
    growing = Answers([count, count, created, token, barriers])
    fields = ("partitionCount", "created", "settings")
    meta = read(lambda: topics.meta(Store(registered, keys), "orders"), key, *fields)  # type: ignore[arg-type]
    if meta is not None:
        assert isinstance(meta.settings, dict)
        assert_in_range(meta.partitions, 1, topics.PARTITIONS_MAX)
        assert_in_range(meta.created_unix_ms)
    read(lambda: growth.in_progress(Store(growing, keys), "orders"), key)  # type: ignore[arg-type]


@quick
@given(st.lists(odd | st.just(b"orders"), max_size=5))
def test_registry_parser_returns_invalid_names_separately(raw: list[bytes]) -> None:
    """Invalid names are listed separately, so that they hide no valid name."""
    names, bad = topics.read_registry(Store(Answers(raw), Keys()))  # type: ignore[arg-type]
    assert len(names) + len(bad) == len(raw)
    assert raw.count(b"orders") == names.count("orders")
    assert all(name.isascii() and not name.startswith(".") for name in names)
    assert topics.known_groups(Store(Answers(raw), Keys()), "orders") is not None  # type: ignore[arg-type]


@quick
@given(odd, odd, odd)
def test_figure_parsers_report_bad_values(kept: bytes, name: bytes, due: bytes) -> None:
    """A bad record of trimming is reported, and the names of foreign groups are decoded."""
    rest = [3, b"5", b"1-0", b"2-0", 0, 0, kept, b"17", [[name, 3, b""]], 1]
    figures = statistics.partition_figures(Reply("OK", rest), "the record")
    assert figures.length == 3
    assert (figures.trimmed_to, figures.bad is None) in (
        (kept.decode("latin-1"), True),
        ("", not kept),
    )
    assert all(isinstance(each.group, str) for each in figures.queries)
    group = [name, 0, b"", b"", b"", 0, 0]
    answer = Reply("OK", [1, b"", b"", b"", kept, b"", [group], b""])
    stand = read(
        lambda: retention.PartitionPositions.parse(answer, "the record"), "the record", "archived"
    )
    assert stand is None or isinstance(stand.groups[0].name, str)
    trimmed = retention.Trimmed.parse(Reply("OK", [1, b"1-0", name, b"", 0]))
    assert isinstance(trimmed.holder, str)
    assert_in_range(
        read(lambda: statistics.parse_due_time(due), "a due time"), -untrusted.INTEGER_MAX
    )
    read(lambda: dead.Marked.parse(Reply("OK", [name, due])), "a mark of a move")


@quick
@given(st.integers(-1, 2**62), st.integers(-1, 2**62), st.integers(-1, 2**62), st.binary())
def test_counter_parser_reports_bad_values(
    crashes: int, failures: int, wait_ms: int, context: bytes
) -> None:
    """Unreadable counters of an entry count as 0, and the page names their fields."""
    row = [b"1-0", [], crashes, failures, context, wait_ms]
    page = messages.Recovered.parse(
        Reply("OK", [0, b"", b"", [row], [row], 0, 0, b""]), "the counters"
    )
    for entry in page.main + page.retry:
        assert_in_range(entry.crashes, 0, messages.COUNT_MAX)
        assert_in_range(entry.failures, 0, messages.COUNT_MAX)
        assert_in_range(entry.wait_ms, 0, messages.WAIT_MS_MAX)
    first = page.main[0]
    counted = first.crashes, first.failures, first.wait_ms
    assert bool(page.bad) == (counted != (crashes, failures, wait_ms))
    assert all(bad.field.startswith(("m:1-0:", "r:1-0:")) for bad in page.bad)


@quick
@given(odds, st.lists(st.tuples(odd, odd, st.lists(odd | st.integers(), max_size=3)), max_size=2))
def test_plan_and_delay_parsers_report_bad_values(
    raw: Any, rows: list[tuple[bytes, bytes, list[Any]]]
) -> None:
    """Bad plans of the sink and bad waiting retries are reported."""
    plan = read(lambda: spark.read_plan(raw, "the record"), "the record") or {}
    for of_attempt in plan.values():
        for name, partitions in of_attempt.items():
            assert NAME.fullmatch(name)
            for number in partitions:
                assert_in_range(number)
    delayed = [[place, due, 0, fields * 2] for place, due, fields in rows]
    read(lambda: retries.rows(Reply("OK", [delayed, 0])), "due times")
