"""Decoders of foreign input return a value or raise their own error, whatever the input is.

The inputs are messages, HTTP requests, configurations, URLs, and the Redis keys through which
instances exchange state.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamqd import config
from streamqd.admin import as_json
from streamqd.cli.output import json_text, printable
from streamqd.config import topology
from streamqd.config.endpoint import url_fault
from streamqd.dead_letter import DeadLetter
from streamqd.errors import ConfigError, InvalidValueError
from streamqd.handlers.payloads import decoder
from streamqd.handlers.verdicts import Undecodable
from streamqd.http import REQUEST_BYTES_MAX, HttpResponse, HttpServer
from streamqd.message import HEADERS_MAX, Delivery, Message
from streamqd.model import Assignment
from streamqd.producer.encoding import Outgoing, encode_fields
from streamqd.store import directives, members, topics
from streamqd.worker import dead_letters
from tests.support.quick import examples

pytestmark = pytest.mark.fault("F35")

quick = settings(
    max_examples=examples(80),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

DEEP = [b"[" * 100_000, b'{"a":' * 50_000, b"\x91" * 100_000, b"9" * 10_000]
NAMES = [
    *(b"payload", b"key", b"headers", b"originalId", b"originalTopic", b"originalPartition"),
    *(b"retryCount", b"crashCount", b"replayCount", b"expiresAt", b"expiresAfter"),
    *(b"reason", b"group", b"failedAt", b"attempts", b"exitCode", b"traceback", b"errorMessage"),
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
raws = st.one_of(
    st.binary(max_size=60),
    values.map(lambda value: json.dumps(value).encode()),
    st.integers(min_value=-(10**30), max_value=10**30).map(lambda number: b"%d" % number),
    st.sampled_from(DEEP),
    st.from_regex(rb"[0-9]{1,22}-[0-9]{1,22}", fullmatch=True),
)
entries = st.dictionaries(st.sampled_from(NAMES) | st.binary(max_size=12), raws, max_size=8)

LOOKS = [
    *("id", "uid", "topic", "partition", "key", "payload", "origin", "original_id", "timestamp"),
    *("attempt", "retry_count", "crash_count", "replay_count", "expires_at", "dead_letter"),
]


def message(fields: dict[bytes, bytes], *, retried: bool, group: str = "bill") -> Message:
    flat = [part for pair in fields.items() for part in pair]
    return Message(
        Delivery(Assignment("orders", 0, group), "one", 1), b"1-1", flat, retried=retried
    )


# --- messages -------------------------------------------------------------------------------------


@quick
@given(entries, st.booleans(), st.sampled_from(["bill", "bill@dlq"]))
def test_any_message_can_be_inspected(
    fields: dict[bytes, bytes], retried: bool, group: str
) -> None:
    found = message(fields, retried=retried, group=group)
    for name in LOOKS:
        getattr(found, name)
    assert repr(found).isprintable()
    for parse in (lambda: found.headers, found.json, found.text):
        with suppress(ValueError):
            parse()


@quick
@given(entries, st.booleans())
def test_any_message_can_become_a_dead_letter(fields: dict[bytes, bytes], retried: bool) -> None:
    found = message(fields, retried=retried)
    delivery = Delivery(Assignment("orders", 0, "bill"), "one", 1)
    why = ("too-large", "too-large", "text")
    buried = dead_letters.build_fields_without_run(found, delivery, "work:obey", why, crashes=1)
    assert all(isinstance(each, bytes) for pair in buried.items() for each in pair)
    assert dead_letters.find_oversize(found, 1 << 20) == ""
    # The limit applies to the payload and the other fields, but not to our own fields.
    limit = 1
    small = sum(map(len, found.fields.values())) <= limit + limit + dead_letters.BOOKKEEPING
    assert dead_letters.find_oversize(found, limit) or small
    for policy in ("hash", "none"):
        kept = dead_letters.replacement_fields(found, policy)
        assert kept[b"payload"] == b""
        assert kept[b"payloadBytes"] == b"%d" % len(found.payload)
    read = DeadLetter.read(buried | fields)
    assert read.attempts >= 0
    assert math.isfinite(read.failed_at)


@given(st.binary(max_size=80))
def test_any_crash_record_can_be_read(raw: bytes) -> None:
    what, fields = dead_letters.crash_fields(raw)
    assert what
    assert all(isinstance(each, bytes) for pair in fields.items() for each in pair)


@dataclass
class Order:
    number: int
    lines: list[dict[str, float]]


ANNOTATIONS: list[Any] = [bytes, str, Order, dict[str, Any], list[int], int | None, Any]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
@settings(max_examples=examples(30))
@given(raws)
def test_any_payload_is_decoded_or_rejected(codec: str, annotation: Any, raw: bytes) -> None:
    decode = decoder(annotation, codec, "work:obey")
    with suppress(Undecodable):
        decode(raw)


@pytest.mark.parametrize("raw", DEEP, ids=["list", "object", "msgpack", "number"])
def test_decoders_reject_too_deep_nesting(raw: bytes) -> None:
    for codec in ("json", "msgpack"):
        with pytest.raises(Undecodable):
            decoder(Order, codec, "work:obey")(raw)
    deep = message({b"payload": raw, b"headers": raw}, retried=False)
    with pytest.raises(ValueError):  # noqa: PT011 - its text is Python's for a long number
        deep.json()
    with pytest.raises(ValueError):  # noqa: PT011
        _ = deep.headers


def test_number_of_headers_is_bounded() -> None:
    few = {f"name-{number}": "v" for number in range(HEADERS_MAX)}
    assert encode_fields(Outgoing(b"x", headers=few), 1 << 20)
    with pytest.raises(ValueError, match="at most 256 headers, not 257"):
        encode_fields(Outgoing(b"x", headers=few | {"one-more": "v"}), 1 << 20)


# --- output for operators -------------------------------------------------------------------------


@given(st.text(st.characters()) | st.binary())
@example("\ud800")
def test_printable_returns_one_encodable_line(text: str | bytes) -> None:
    shown = printable(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    json_text(as_json({"text": text})).encode()


# --- the pages ------------------------------------------------------------------------------------


@pytest.fixture
def server() -> HttpServer:
    return HttpServer(("127.0.0.1", 0), {"/": lambda _: HttpResponse(200, b"front")})


requests = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from([b"GET", b" ", b"/", b"HTTP/1.1", b"\r\n", b":", b"\xff", b"\0", b"%0d%0a"])
        | st.binary(max_size=8),
        max_size=30,
    ).map(b"".join),
    st.binary(max_size=8).map(lambda end: b"GET /" + b"x" * REQUEST_BYTES_MAX + end),
)


@quick
@given(requests)
def test_every_http_request_gets_a_response(server: HttpServer, raw: bytes) -> None:
    status = server._respond(raw).split(b" ")[1]
    assert int(status) in (200, 400, 404, 405)


# --- the configuration ----------------------------------------------------------------------------

TABLES = ["redis", "daemon", "http", "log", "keys", "topics", "consumers", "strange"]
SETTINGS = ["url", "bind", "lease_ttl", "handlers", "partitions", "topic", "group", "retention"]


@quick
@given(st.binary(max_size=200))
def test_any_config_bytes_are_read_or_refused(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "streamq.toml"
    file.write_bytes(raw)
    _load(file, {})


@quick
@given(
    st.dictionaries(
        st.sampled_from(TABLES),
        st.dictionaries(st.sampled_from(SETTINGS) | st.text(max_size=6), values, max_size=4)
        | values,
        max_size=4,
    ),
    st.dictionaries(
        st.tuples(st.sampled_from(TABLES), st.sampled_from(SETTINGS) | st.text(max_size=5)),
        st.text(max_size=20),
        max_size=3,
    ),
)
def test_any_config_document_is_read_or_refused(
    tmp_path: Path, tables: dict[str, Any], variables: dict[tuple[str, str], str]
) -> None:
    file = tmp_path / "streamq.toml"
    lines = []
    for name, table in tables.items():
        pairs = table.items() if isinstance(table, dict) else [(name, table)]
        lines += [
            f"[{name}]",
            *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in pairs),
        ]
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    environ = {f"STREAMQ_{'__'.join(path).upper()}": text for path, text in variables.items()}
    _load(file, environ)
    _load(file, {}, {".".join(path): text for path, text in variables.items()})


def _load(file: Path, environ: dict[str, str], overrides: dict[str, str] | None = None) -> None:
    problems = ["none"]
    try:
        config.load(file, overrides or {}, environ)
    except ConfigError as error:
        problems = error.problems
    assert problems
    assert not [each for each in problems if "\n" in each]


SCHEMES = ["redis", "rediss", "unix", "redis+sentinel", "rediss+cluster", "redis+cluster", "http"]
urls = st.one_of(
    st.text(max_size=40),
    st.builds(
        lambda scheme, rest: f"{scheme}://{rest}",
        st.sampled_from(SCHEMES),
        st.text(alphabet="h1[]:@/,?#%.-_\n\0 é\ud800", max_size=30),
    ),
)


@settings(max_examples=examples(200))
@given(urls)
def test_any_url_is_parsed_or_refused(url: str) -> None:
    fault = url_fault(url)
    assert fault is None or fault
    config.mask_passwords(url)
    repr(config.Redis(url=url))
    with suppress(ValueError):
        topology.parse(url)


# --- state shared between instances ---------------------------------------------------------------

ORDERS = [b"pause:a/0/b", b"move:a/0/b", b"drain:one", b"reload:*", b"rebalance", b"pause:*/*/*"]
scores = st.floats(allow_nan=False) | st.integers(0, 2**53).map(float)


@quick
@given(st.lists(st.tuples(st.sampled_from(ORDERS) | raws, raws, scores), max_size=4))
def test_any_directives_and_members_can_be_read(told: list[tuple[bytes, bytes, float]]) -> None:
    known = directives.read([part for name, raw, _ in told for part in (name, raw)])
    assert isinstance(known.unreadable, dict)
    heartbeats = [part for name, _, score in told for part in (name, b"%.17g" % score)]
    infos = [part for name, raw, _ in told for part in (name, raw)]
    for heartbeat in members.heartbeats(heartbeats, infos):
        members.to_member_view(heartbeat)


@given(raws)
def test_any_partition_count_is_read_or_refused(raw: bytes) -> None:
    try:
        assert 1 <= topics.parse_partition_count("orders", raw) <= topics.PARTITIONS_MAX
    except InvalidValueError as error:
        refused = str(error)
        assert len(refused) < 300


def test_recursion_limit_is_the_default() -> None:
    """The recursion limit is the default.

    If it were raised, deeper values would be accepted here and fail later.
    """
    assert sys.getrecursionlimit() <= 10_000
