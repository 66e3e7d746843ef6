"""If one field of a key has a bad value, commands handle everything else, and doctor names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from streamqd.admin import pending
from streamqd.admin.reading import SEQ_MAX, Id, read_forwards
from streamqd.cli import cli
from streamqd.model import Assignment
from streamqd.store import messages, scripts
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.doctor_case import GROUP, INSTANCE, TOPIC, DoctorCase
from tests.support.proxy import FaultProxy
from tests.support.servers import Server

KEYS = Keys()
ASSIGNMENT = Assignment(TOPIC, 0, GROUP)
PLACE = (TOPIC, 0)
FLEET = "default"
META, TRIM, FENCE = KEYS.meta(TOPIC), KEYS.trim(*PLACE), KEYS.fence(*ASSIGNMENT)
MEMBERS, INFO, DIRECTIVES = KEYS.members(FLEET), KEYS.info(FLEET), KEYS.directives(FLEET)
SUMMARY, REGISTRY = KEYS.instance(FLEET, INSTANCE), KEYS.registry()
SCHEDULES = KEYS.schedule_index()
ATTEMPTS, RETRY = KEYS.attempts(*ASSIGNMENT), KEYS.retry(*ASSIGNMENT)
LAST = f"{SEQ_MAX}-{SEQ_MAX}"
NOT_UTF8 = b"\xff\xfe"
HUGE = "1" + "0" * 400
NESTED = "[" * 100_000 + "]" * 100_000

# Every reading command, with the exit codes that it may return if a value is bad. In a healthy
# system, it may return 0 as well.
COMMANDS = {
    "status": {0},
    "why access/0": {0, 1},
    "why access/1": {0, 1},
    "partitions": {0},
    "partitions access": {0},
    "top --once": {0},
    "topic list": {0},
    "topic describe access": {0},
    "topic settings access": {0},
    "group list": {0},
    "group list access": {0},
    "group describe access hits": {0},
    "retry list access hits": {0},
    "delayed list access": {0},
    "dlq list": {0},
    "dlq list access": {0},
    "dlq stats access": {0},
    "pending access -g hits": {0},
    "control list": {0},
    "schedule list": {0},
    "doctor": {1},
    "doctor stream access": {0, 1},
    "trim access --max-length 1 --dry-run": {0},
}
# These commands are about this topic, so they may refuse. They print in one sentence why they
# cannot show it.
OF_THE_TOPIC = frozenset(verb for verb in COMMANDS if "access" in verb)
PUBLISHED = ("status", "top --once")
FLEET_VERBS = ("status", "why access/0", "top --once", "control list")


class Bad(NamedTuple):
    """A bad value, the command that plants it, the doctor's finding, and the refusing commands."""

    name: str
    command: tuple[object, ...]
    key: str
    field: str
    shown_by: tuple[str, ...]  # commands that read the value and name it
    may_refuse: frozenset[str] = frozenset()


def _hash(key: str, field: str, value: object, *shown_by: str, part: str = "") -> Bad:
    name = f"{key.split(':')[2]}.{field}={str(value)[:12]}"
    return Bad(name, ("HSET", key, field, value), key, part or field, shown_by)


_UNIT_VERBS = (
    *("status", "why access/0", "partitions", "partitions access", "group list"),
    *("group describe access hits", "doctor stream access"),
)
_EVERY_TOPIC = ("status", "partitions", "topic list", "group list", "dlq list")

BAD = [
    # the fence
    *(_hash(FENCE, "epoch", value, *_UNIT_VERBS) for value in ("abc", "1e308", "9" * 26, "")),
    *(_hash(FENCE, "since", value, *_UNIT_VERBS) for value in ("never", NOT_UTF8, "-1")),
    # members, their heartbeats and their summaries
    *(
        Bad(f"members={score}", ("ZADD", MEMBERS, score, "two"), MEMBERS, "two", FLEET_VERBS)
        for score in ("inf", "-inf", "-5", "1.5")
    ),
    Bad(
        "members-name", ("ZADD", MEMBERS, "1", NOT_UTF8), MEMBERS, "\\xff\\xfe", FLEET_VERBS
    ),
    *(
        Bad(
            f"info={text[:24]}",
            ("HSET", INFO, INSTANCE, text),
            INFO,
            field,
            FLEET_VERBS,
        )
        for text, field in (
            ("{", INSTANCE),
            (NESTED, INSTANCE),
            ('{"owned": ' + HUGE + "}", f"{INSTANCE}.owned"),
            ('{"offers": [1]}', f"{INSTANCE}.offers"),
            ('{"weight": "x"}', f"{INSTANCE}.weight"),
            ('{"cap": -1}', f"{INSTANCE}.cap"),
            ('{"broken": [["a", "b", "c"]]}', f"{INSTANCE}.broken"),
            ('{"ttl": 1e999}', f"{INSTANCE}.ttl"),
            ('{"reloaded": []}', f"{INSTANCE}.reloaded"),
        )
    ),
    *(
        Bad(f"summary={text[:30]}", ("SET", SUMMARY, text), SUMMARY, field, PUBLISHED)
        for text, field in (
            ("[]", ""),
            (NOT_UTF8.decode("latin-1"), ""),
            ('{"at_unix_ms": 1e999}', "at_unix_ms"),
            ('{"started_unix_ms": ' + HUGE + "}", "started_unix_ms"),
            ('{"pid": NaN}', "pid"),
            ('{"assignments": {}}', "assignments"),
            (
                '{"assignments": [{"topic": "access", "partition": 1e999, "lag": -Infinity}]}',
                "assignments.lag",
            ),
            (
                '{"assignments": [{"longest_run_seconds": ' + HUGE + "}]}",
                "assignments.longest_run_seconds",
            ),
        )
    ),
    # directives
    _hash(DIRECTIVES, "last", 1 << 53, *FLEET_VERBS),
    _hash(DIRECTIVES, "last", "abc", *FLEET_VERBS),
    # topics
    Bad("registry", ("SADD", REGISTRY, NOT_UTF8), REGISTRY, "", _EVERY_TOPIC),
    Bad("registry..", ("SADD", REGISTRY, ".."), REGISTRY, "", _EVERY_TOPIC),
    *(
        _hash(META, "partitionCount", count, *_EVERY_TOPIC)._replace(may_refuse=OF_THE_TOPIC)
        for count in ("abc", "0", "99999999999", "-1")
    ),
    _hash(META, "created", "abc", "topic list", "topic describe access"),
    *(
        _hash(META, "settings", text, "topic list", "topic describe access")._replace(
            may_refuse=frozenset(
                ("topic settings access", "trim access --max-length 1 --dry-run")
            )
        )
        for text in (
            *("[]", NESTED, '{"retention": {"max_age": [{}]}}', '{"retention": []}', NOT_UTF8),
        )
    ),
    _hash(META, "group:hits", "abc"),
    _hash(META, "growSince", "abc"),
    # schedules
    _hash(SCHEDULES, "nightly", "abc", "status", "schedule list"),
    Bad("schedule-name", ("HSET", SCHEDULES, NOT_UTF8, "default file access 0"), SCHEDULES,
        "\\xff\\xfe", ("status", "schedule list")),
    # partitions
    *(_hash(TRIM, field, "abc") for field in ("first", "archived", "dead_archived", "shrink_from")),
    _hash(TRIM, "removed", "abc"),
    *(_hash(TRIM, field, "abc") for field in ("shrunk", "size", "floor:hits")),
    _hash(TRIM, "dropped_unread:hits", "abc"),
    _hash(KEYS.moving(*PLACE), "1-0", "abc"),
    *(
        Bad(
            f"group-{verb}", ("XGROUP", "CREATE", stream, NOT_UTF8, "0", "MKSTREAM"), stream,
            "group", verbs,
        )
        for verb, stream, verbs in (
            ("stream", KEYS.stream(*PLACE), ("status", "why access/0", "partitions", "topic list")),
            ("dlq", KEYS.dlq(*PLACE), ("status", "why access/0", "partitions", "topic list")),
        )
    ),
    Bad("scheduled=inf", ("ZADD", KEYS.delayed_sends(*PLACE), "inf", "x"),
        KEYS.delayed_sends(*PLACE), "x", ("delayed list access",)),
    # assignments
    *(_hash(ATTEMPTS, "m:1-0:c", value) for value in ("abc", HUGE, "-1")),
    _hash(ATTEMPTS, "m:1-0:f", "abc"),
    _hash(ATTEMPTS, "r:1-0:due", "abc"),
    *(
        Bad(f"retry={score}", ("ZADD", RETRY, score, "m:9-9"), RETRY, "m:9-9",
            ("retry list access hits",))
        for score in ("inf", "-inf", "1e300")
    ),
    Bad("retry-place", ("ZADD", RETRY, "1", NOT_UTF8), RETRY, "\\xff\\xfe", ()),
]  # fmt: skip


@pytest.fixture
def doctor_case(tmp_path: Path, server: Server, link: Connection) -> DoctorCase:
    """A fleet that has messages in every state, and a second, healthy topic."""
    made = DoctorCase(tmp_path, server.url, link)
    made.settle_in()
    harness = made.harness
    for number in range(4):
        harness.add(f"{number + 1}-0", "payload", "x")
    harness.fetch(3)
    place = [(b"m:2-0", 3600.0, {})]
    made.link.run(messages.retry(made.keys, harness.leased("t0"), place))
    made.do("XADD", harness.dlq, "*", "payload", "x", "group", GROUP)
    return made


@pytest.fixture
def invoke(doctor_case: DoctorCase) -> Callable[[str], Result]:
    def run(line: str) -> Result:
        return CliRunner().invoke(cli, ["--config", str(doctor_case.path), *line.split()])

    return run


def test_commands_succeed_without_bad_values(
    doctor_case: DoctorCase, invoke: Callable[[str], Result]
) -> None:
    for verb, codes in COMMANDS.items():
        done = invoke(verb)
        assert done.exit_code in codes | {0}, (verb, done.output)
        assert "cannot be read" not in done.output, (verb, done.output)
    doctor_case.silent("values.unreadable")


@pytest.mark.parametrize("bad", BAD, ids=[each.name[:60] for each in BAD])
def test_commands_survive_one_bad_value(
    doctor_case: DoctorCase, invoke: Callable[[str], Result], bad: Bad
) -> None:
    """Every command survives a bad value.

    Commands that read the value name it, and `doctor` prints a fix.
    """
    doctor_case.do(*bad.command)
    for verb, codes in COMMANDS.items():
        for form in ("", " --json"):
            done = invoke(verb + form)
            assert "Traceback" not in done.output, (verb, done.output)
            assert isinstance(done.exception, SystemExit | None), (verb, done.exception)
            if verb in bad.may_refuse and done.exit_code == 8:
                assert bad.key in done.output or "cannot be read" in done.output
                continue
            allowed = codes | ({1} if verb in bad.shown_by and verb.startswith("doctor") else set())
            assert done.exit_code in allowed, (verb, done.output)
            if form:
                assert json.loads(done.stdout or "null") is not None, (verb, done.output)
            if verb in bad.shown_by:
                assert bad.key in done.output, (verb, done.output)
            if verb == "status" and "partitionCount" not in bad.name:
                assert "access" in done.output
    told = [
        each["evidence"]
        for each in doctor_case.run("--only", "values")["findings"]
        if each["check"] == "values.unreadable"
    ]
    assert (bad.key, bad.field) in [(each["key"], each["field"]) for each in told], told


@pytest.mark.parametrize(
    "key",
    [
        *(
            REGISTRY,
            META,
            MEMBERS,
            INFO,
            DIRECTIVES,
            SUMMARY,
            ATTEMPTS,
            RETRY,
            FENCE,
            TRIM,
            SCHEDULES,
        ),
        *(
            KEYS.lease(*ASSIGNMENT),
            KEYS.retry_items(*ASSIGNMENT),
            KEYS.stream(*PLACE),
            KEYS.dlq(*PLACE),
        ),
        *(
            KEYS.retry_stream(*ASSIGNMENT),
            KEYS.delayed_sends(*PLACE),
            KEYS.delayed_send_items(*PLACE),
        ),
        *(KEYS.partitions(TOPIC), KEYS.moving(*PLACE)),
    ],
)
def test_commands_survive_a_key_of_another_type(
    doctor_case: DoctorCase, invoke: Callable[[str], Result], key: str
) -> None:
    """Commands that need a key of the wrong type name it, and all others still work."""
    doctor_case.do("DEL", key)
    doctor_case.do("RPUSH", key, "x")
    problems = {}
    for verb, codes in COMMANDS.items():
        for form in ("", " --json"):
            done = invoke(verb + form)
            named = key in done.output and (verb in OF_THE_TOPIC or verb == "control list")
            if (
                "Traceback" in done.output
                or not isinstance(done.exception, SystemExit | None)
                or (done.exit_code not in codes and not (done.exit_code in (4, 8) and named))
            ):
                problems[verb + form] = (done.exit_code, done.output[-300:])
    assert problems == {}


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(b"*1\r\n$3\r\nWAT\r\n", id="unknown-word"),
        pytest.param(b":7\r\n", id="no-list"),
        pytest.param(b"*5\r\n$2\r\nOK\r\n:1\r\n*0\r\n$1\r\nx\r\n*0\r\n", id="wrong-types"),
    ],
)
@pytest.mark.parametrize("verb", ["status", "why access", "group list", "top --once"])
def test_commands_survive_an_invalid_reply_about_one_partition(
    doctor_case: DoctorCase,
    invoke: Callable[[str], Result],
    proxy: FaultProxy,
    verb: str,
    reply: bytes,
) -> None:
    """If the server returns an invalid reply about one partition, commands show the others."""
    script = scripts.get("assignment_measure")
    names = (script.sha.encode(), script.source)
    place = KEYS.stream(TOPIC, 1).encode()
    forged = proxy.forge(reply, lambda command: place in command and command[1] in names)
    doctor_case.url = proxy.url
    doctor_case.write()
    done = invoke(verb)
    assert forged.happened.is_set()
    assert done.exit_code in COMMANDS.get(verb, {0, 1}) | {0}, done.output
    assert verb.startswith("top") or "measured with an invalid reply" in done.output
    assert KEYS.stream(TOPIC, 0) not in done.output
    if verb == "status":
        seen = json.loads(invoke(f"status {TOPIC} --json").stdout)
        lags = {row["partition"]: row["lag"] for row in seen["assignments"]}
        assert lags == {0: 1, 1: None}


@pytest.mark.parametrize("order", ["id", "idle"])
def test_commands_page_up_to_the_greatest_id(
    doctor_case: DoctorCase, link: Connection, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Commands page up to the greatest ID without a crash.

    The server refuses a range that starts after it.
    """
    monkeypatch.setattr(pending, "PAGE", 1)
    stream = KEYS.stream(*PLACE)
    doctor_case.do("XADD", stream, LAST, "payload", "x")
    doctor_case.do("XREADGROUP", "GROUP", GROUP, "else", "COUNT", 100, "STREAMS", stream, ">")
    told = pending.messages(Store(link, doctor_case.keys), TOPIC, GROUP, order).page(limit=100)
    assert f"m:{LAST}" in [row.place for row in told.rows]
    pages = list(read_forwards(link, stream, size=1))
    assert str(pages[-1][0][0]) == LAST
    assert list(read_forwards(link, stream, after=Id(SEQ_MAX, SEQ_MAX), size=1)) == []
