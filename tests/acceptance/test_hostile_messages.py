"""Any entry in a stream is handled or dead-lettered, and harms neither daemon nor operator."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator

import pytest

from tests.support.daemon import ROOT, TOPIC, Daemon

NewDaemon = Callable[..., Daemon]

pytestmark = pytest.mark.fault("F35")

# `look` reads every part of a message. It reads `json` last, because that may fail.
CODE = """
from dataclasses import dataclass

import pydantic
from streamqd import Message

def look(message: Message) -> None:
    seen = [message.id, message.uid, message.original_id, message.origin, message.key]
    seen += [message.attempt, message.retry_count, message.crash_count, message.replay_count]
    seen += [message.timestamp, message.expires_at, message.dead_letter]
    seen += [repr(message), message.fields]
    message.headers
    message.text()
    message.json()
    print(repr(seen)[:300])

@dataclass
class Order:
    number: int
    lines: list[dict[str, float]]

class Model(pydantic.BaseModel):
    number: int
    lines: list[dict[str, float]]

def typed(order: Order) -> None:
    print(order)

def model(order: Model) -> None:
    print(order)
"""
CONSUMERS = {
    "message": {"handler": "work:look"},
    "concurrent": {"handler": "work:look", "concurrency": 4, "order": "none"},
    "json": {"handler": "work:typed"},
    "msgpack": {"handler": "work:typed", "codec": "msgpack"},
    "model": {"handler": "work:model"},
}

GOOD = b'{"number":1,"lines":[{"a":1.5}]}'
FORGED = b'x\r\n{"event":"daemon.ready","level":"info"}\r\n\x1b[2J\x1b]0;t\x07\xe2\x80\xae\x00'
PAYLOADS = [
    b"",
    b"\xff\xfe\x00",
    b"[" * 200_000,
    b'{"number":' * 60_000,
    b"9" * 20_000,
    b"-1e99999",
    b"NaN",
    b'{"number":NaN,"lines":[{"a":-Infinity}]}',
    b'"\\ud800"',
    b'{"number":1,"number":"\\udc80","lines":[]}',
    b'{"number":1,"number":2,"lines":[],"lines":[{"a":1}]}',
    b'\xef\xbb\xbf{"number":1}',
    b" " * 500_000,
    b"\x91" * 200_000,
    b"\xdf\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"cposix\nsystem\n(S'kill -9 $PPID'\ntR.",
    b"!!python/object/apply:os.abort []",
    FORGED,
    GOOD,
]
FIELDS: list[list[bytes]] = [
    [b"payload", GOOD, b"payload", b"{}"],
    [b"\xff\x00", b"x", b"", b"", b"payload", GOOD],
    [b"nothing", b"at all"],
    [b"payload", GOOD, b"key", FORGED],
    [b"payload", GOOD, b"headers", b"[" * 100_000],
    [b"payload", GOOD, b"headers", b"[]"],
    [b"payload", GOOD, b"headers", b'{"a":NaN,"b":{"c":"\\ud800"},"a":1}'],
    [b"payload", GOOD, b"headers", b"\xff"],
    [b"payload", GOOD, b"headers", b"9" * 20_000],
    [b"payload", GOOD, b"originalId", b"1-1\r\n", b"originalTopic", FORGED],
    [b"payload", GOOD, b"originalId", b"9" * 20 + b"-" + b"9" * 20],
    [b"payload", GOOD, b"originalId", b"0-0", b"originalTopic", b"a", b"originalPartition", b"-1"],
    [b"payload", GOOD, b"retryCount", b"-1", b"crashCount", b"9" * 5_000, b"replayCount", b"\xb2"],
    [b"payload", GOOD, b"expiresAt", b"9" * 400, b"expiresAfter", b"-5"],
    [b"payload", GOOD, b"expiresAt", b"0"],
    [b"payload", b"no", b"reason", b"x", b"group", FORGED, b"failedAt", b"y"],
    [b"payload", b"no", b"payloadBytes", b"z", b"fingerprint", b"\xff"],
    [part for number in range(3_000) for part in (b"f%d" % number, b"v")],
    [b"payload", b"x" * 2_000_000],
    [b"payload", GOOD, b"key", b"k" * 1_500_000],
]


def hostile_entries(chance: random.Random) -> Iterator[list[bytes]]:
    """Yield all of the entries above, and damaged copies of them."""
    for payload in PAYLOADS:
        yield [b"payload", payload]
    yield from FIELDS
    for _ in range(100):
        fields = list(chance.choice([*FIELDS[:-3], [b"payload", chance.choice(PAYLOADS)[:200]]]))
        at = chance.randrange(len(fields))
        raw = bytearray(fields[at])
        for _ in range(chance.randint(1, 4)):
            if raw and chance.random() < 0.7:
                raw[chance.randrange(len(raw))] = chance.randrange(256)
            else:
                raw.insert(chance.randint(0, len(raw)), chance.randrange(256))
        fields[at] = bytes(raw)
        yield fields


def test_hostile_entries_are_handled_or_dead_lettered(
    new_daemon: NewDaemon, chance: random.Random
) -> None:
    daemon = new_daemon(code=CODE, groups=CONSUMERS)
    daemon.write_config(
        consumers=[
            {"topic": TOPIC, "group": group, "max_attempts": 1, **more}
            for group, more in CONSUMERS.items()
        ]
    )
    with daemon:
        before = {group: daemon.pids(group) for group in CONSUMERS}
        stream = daemon.keys.stream(TOPIC, 0)
        sent = list(hostile_entries(chance))
        for fields in sent:
            daemon.link.execute("XADD", stream, "*", *fields)
        daemon.wait_settled()

        assert {group: daemon.pids(group) for group in CONSUMERS} == before
        assert not [each for each in daemon.events() if each["level"] == "error"]
        letters = read_dead_letters(daemon)
        for group in CONSUMERS:
            ours = [each[b"reason"] for each in letters if each[b"group"] == group.encode()]
            assert set(ours) <= {b"attempts", b"undecodable", b"too-large"}
            assert ours.count(b"too-large") == 2
            assert 20 < len(ours) < len(sent)
        # No payload has forged a line in the log.
        assert len(daemon.events("daemon.ready")) == 1
        assert not [line for line in daemon.plain if line.startswith("{")]
        check_commands(daemon, letters)


def read_dead_letters(daemon: Daemon) -> list[dict[bytes, bytes]]:
    found = daemon.link.execute("XRANGE", daemon.keys.dlq(TOPIC, 0), "-", "+")
    return [{b"id": id_, **dict(zip(flat[::2], flat[1::2], strict=True))} for id_, flat in found]


def check_commands(daemon: Daemon, letters: list[dict[bytes, bytes]]) -> None:
    """Check that all commands of an operator succeed, and print no control characters."""
    shown = [f"0:{each[b'id'].decode()}" for each in letters[-3:]]
    verbs = [
        ("dlq", "list", TOPIC, "--limit", "500"),
        ("dlq", "stats", TOPIC),
        ("dlq", "export", TOPIC),
        ("tail", TOPIC, "--lines", "500"),
        *(("dlq", "show", TOPIC, each) for each in shown),
        ("status",),
        ("topic", "describe", TOPIC),
        ("group", "describe", TOPIC, "json"),
    ]
    script = (
        "import sys, json; from click.testing import CliRunner; from streamqd.cli import cli\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    for more in ([], ['--json']):\n"
        "        done = CliRunner().invoke(cli, [*args, *more])\n"
        "        said = [args + more, done.exit_code, done.output, repr(done.exception)]\n"
        "        print(json.dumps(said))"
    )
    command = [["--config", str(daemon.config_path), *verb] for verb in verbs]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        args, code, output, error = json.loads(line)
        assert code == 0, (args, output[-500:], error)
        assert not [each for each in set(output) if is_harmful(each)], args


def is_harmful(char: str) -> bool:
    """Return True if it controls a terminal, ends a line, or changes the writing direction."""
    category, direction = unicodedata.category(char), unicodedata.bidirectional(char)
    turns = direction in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return char not in "\n\t" and (turns or category in {"Cc", "Cs", "Zl", "Zp"})
