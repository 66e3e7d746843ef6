"""A real daemon keeps messages in order despite failures, and survives outages and bad code."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.producer import Outgoing, Producer
from tests.support.daemon import GROUP, TOPIC, Daemon

NewDaemon = Callable[..., Daemon]

# The handler writes one line per run with the outcome, key, number and attempt. The payload
# controls the outcome.
LINES = """
import json, os
from pathlib import Path
from streamqd import Dead, Message, Retry

told = os.open("told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def obey(message: Message) -> None:
    key = (message.key or b"").decode()
    number, fails, how = message.json()
    failing = message.attempt <= fails
    line = f"{'fail' if failing else 'end'} {key} {number} {message.attempt}\\n"
    os.write(told, line.encode())
    if not failing:
        return
    if how == "exit" and not Path("exited").exists():
        Path("exited").touch()
        os._exit(9)
    if how == "dead":
        raise Dead("it was told to")
    if how == "wait":
        raise Retry(after=3600)
    if how == "down":
        raise ConnectionError
    raise ValueError(number)
"""


def produce(daemon: Daemon, messages: list[tuple[str, Any]]) -> None:
    """Send (key, payload) pairs. An empty key means that the message has none."""
    with Producer(settings=config.load(daemon.config_path)) as producer:
        for start in range(0, len(messages), 1000):
            part = messages[start : start + 1000]
            producer.send_many(
                TOPIC, [Outgoing(json.dumps(body), key=key or None) for key, body in part]
            )


def read_runs(daemon: Daemon) -> list[tuple[str, str, int, int]]:
    """Return the runs in order: outcome, key, number, attempt."""
    path = daemon.folder / "told"
    text = path.read_text() if path.exists() else ""
    lines = [line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(what, key, int(number), int(attempt)) for what, key, number, attempt in lines]


def make_all_due(daemon: Daemon) -> None:
    """Set the due time of every waiting message to 0 in Redis."""
    key = daemon.keys.attempts(TOPIC, 0, GROUP)
    for name in daemon.link.execute("HKEYS", key):
        if name.endswith(b":due"):
            daemon.link.execute("HSET", key, name, 0)


def run_command(daemon: Daemon, *words: str) -> str:
    result = CliRunner().invoke(cli, ["--config", str(daemon.config_path), *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.output


def wait_cause(daemon: Daemon, word: str) -> dict[str, Any]:
    """Wait until `why` reports a cause first. Return the cause."""
    found: list[dict[str, Any]] = []

    def named() -> bool:
        (answer,) = json.loads(run_command(daemon, "why", f"{TOPIC}/0", "--json"))["answers"]
        found[:] = answer["causes"]
        return bool(found[0]["word"] == word)

    daemon.wait_for(named, what=f"why says {word}", every=0.1)
    return found[0]


def wait_worker(daemon: Daemon, state: str) -> str:
    """Wait until `status` shows the worker in the given state. Return its output."""
    daemon.wait_for(
        lambda: any(
            each["worker"] == state
            for each in json.loads(run_command(daemon, "status", "--json"))["assignments"]
        ),
        what=f"a worker is {state}",
        every=0.1,
    )
    return run_command(daemon, "status")


# --- the order of each key ------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 8])
def test_random_failures_keep_the_order_of_each_of_10000_keys(
    new_daemon: NewDaemon, chance: Any, concurrency: int
):
    """Each of 10,000 keys stays in order, despite random failures and a worker that is killed."""
    keys = [f"k{number}" for number in range(10_000)]
    sequence = keys + chance.choices(keys, k=3_000)
    numbers: Counter[str] = Counter()
    messages = []
    for key in sequence:
        numbers[key] += 1
        fails = chance.choices((0, 1, 2), (18, 1, 1))[0]
        messages.append((key, [numbers[key], fails, "fail"]))
    consumer = {
        "on_error": "hold-key",
        "max_attempts": 0,
        "concurrency": concurrency,
        "backoff": {"kind": "exponential", "base": "10ms", "max": "50ms"},
        "held_max": 5000,
    }
    with new_daemon(partitions=2, consumer=consumer, code=LINES) as daemon:
        produce(daemon, messages)
        daemon.wait_for(lambda: len(read_runs(daemon)) > 5000, what="it is under way", every=0.1)
        os.kill(daemon.pids()[0], signal.SIGKILL)
        daemon.wait_settled(60.0)
        seen = read_runs(daemon)
        assert daemon.letters() == []
    ended: dict[str, list[int]] = defaultdict(list)
    for what, key, number, _ in seen:
        # A message that was running at the kill may finish twice, but no message finishes out of
        # order.
        if what == "end" and ended[key][-1:] != [number]:
            ended[key].append(number)
    assert len(ended) == 10_000
    assert {key for key, found in ended.items() if found != [*range(1, numbers[key] + 1)]} == set()
    failed = sum(what == "fail" for what, *_ in seen)
    print(f"{len(messages)} messages, {failed} failures, concurrency {concurrency}")


def test_healthy_keys_finish_before_a_held_key_is_retried(new_daemon: NewDaemon):
    healthy = [(f"k{number % 200}", [number, 0, ""]) for number in range(2000)]
    held = [("held", [1, 1, "wait"]), ("held", [2, 0, ""])]
    consumer = {"on_error": "hold-key", "max_attempts": 0}
    daemon = new_daemon(consumer=consumer, code=LINES)
    with daemon:
        produce(daemon, [held[0], *healthy[:1000], held[1], *healthy[1000:]])
        daemon.wait_for(lambda: daemon.pending() == 2, what="only the held ones are left")
        daemon.wait_for(lambda: len(read_runs(daemon)) == 2001, what="the others are done")
        assert {key for what, key, *_ in read_runs(daemon) if what == "fail"} == {"held"}
        cause = wait_cause(daemon, "keys-held")
        assert "holds 2 messages of one held key" in cause["sentence"]
        assert "holds 2 messages of one held key" in run_command(daemon, "status")
        assert daemon.stop() == 0
        # The new owner keeps the messages waiting and continues to count their attempts.
        daemon.start()
        wait_cause(daemon, "keys-held")
        assert daemon.stop() == 0
        assert len(read_runs(daemon)) == 2001
        make_all_due(daemon)
        daemon.start()
        daemon.wait_settled()
    assert read_runs(daemon)[2001:] == [("end", "held", 1, 2), ("end", "held", 2, 1)]


def test_blocked_partition_keeps_order_over_crash_and_takeover(new_daemon: NewDaemon):
    messages = [("", [number, 0, ""]) for number in range(1, 61)]
    messages[19] = ("", [20, 3, "exit"])
    messages[39] = ("", [40, 1, "wait"])
    consumer = {
        "on_error": "block",
        "max_attempts": 0,
        "backoff": {"kind": "fixed", "base": "5ms", "max": "5ms", "jitter": "none"},
    }
    daemon = new_daemon(consumer=consumer, code=LINES)
    with daemon:
        produce(daemon, messages)
        daemon.wait_for(lambda: ("fail", "", 40, 1) in read_runs(daemon), what="it blocks")
        said = wait_worker(daemon, "blocked")
        assert "is blocked on one by its first message" in said
        cause = wait_cause(daemon, "blocked")
        assert "is blocked on one by its first message" in cause["sentence"]
        assert "ValueError" in cause["sentence"] or "Retry" in cause["sentence"]
        charged = daemon.events("worker.charged")
        assert len(charged) == 1, "the crash was charged, once"
        daemon.close()  # kills every process while the messages are waiting
        daemon.link.open()
        daemon.start()
        wait_worker(daemon, "blocked")
        daemon.close()
        daemon.link.open()
        make_all_due(daemon)
        daemon.start()
        daemon.wait_settled()
        assert daemon.letters() == []
        assert daemon.stop() == 0
    seen = read_runs(daemon)
    assert [number for _, _, number, _ in seen] == sorted(number for _, _, number, _ in seen)
    assert [each for each in seen if each[2] == 20] == [
        *(("fail", "", 20, 1), ("fail", "", 20, 1), ("fail", "", 20, 2), ("fail", "", 20, 3)),
        ("end", "", 20, 4),
    ]
    assert [each for each in seen if each[2] == 40] == [("fail", "", 40, 1), ("end", "", 40, 2)]
    assert Counter(number for what, _, number, _ in seen if what == "end") == dict.fromkeys(
        range(1, 61), 1
    )


# --- guards ---------------------------------------------------------------------------------------


def test_outage_of_a_dependency_dead_letters_no_message(new_daemon: NewDaemon):
    code = LINES.replace("failing = ", 'failing = Path("down").exists() or ')
    consumer = {
        "max_attempts": 1,
        "backoff": {"kind": "fixed", "base": "10ms", "max": "10ms"},
        "breaker": {"failures": 5, "probe_every": "50ms", "on": ["ConnectionError"]},
    }
    daemon = new_daemon(consumer=consumer, code=code)
    (daemon.folder / "down").touch()
    began = time.monotonic()
    with daemon:
        produce(daemon, [("", [number, 0, "down"]) for number in range(1, 301)])
        daemon.wait_event("circuit.opened", error="ConnectionError")
        cause = wait_cause(daemon, "circuit-open")
        assert "the circuit breaker of orders/0/bill is open on one" in cause["sentence"]
        assert "last: ConnectionError" in cause["sentence"]
        before = len(read_runs(daemon))
        daemon.wait_for(lambda: len(read_runs(daemon)) >= before + 5, what="five more probes")
        assert daemon.letters() == []
        (daemon.folder / "down").unlink()
        daemon.wait_settled()
        daemon.wait_event("circuit.closed")
        assert daemon.letters() == []
    seen = read_runs(daemon)
    assert {attempt for *_, attempt in seen} == {1}, "no attempt was spent"
    assert sorted(number for what, _, number, _ in seen if what == "end") == [*range(1, 301)]
    most = 5 + (time.monotonic() - began) / 0.05 + 1
    assert sum(what == "fail" for what, *_ in seen) <= most, "one message at a time, now and then"


def test_flood_guard_pauses_a_bad_release_until_it_is_fixed(
    new_daemon: NewDaemon,
):
    guard = {"dead_letters": 20, "window": "1m", "share": 0.5}
    daemon = new_daemon(consumer={"flood_guard": guard}, code=LINES)
    with daemon:
        produce(daemon, [("", [number, 1, "dead"]) for number in range(1, 501)])
        event = daemon.wait_event("flood.stopped")
        assert (event["level"], event["why"]) == ("error", "20 dead letters within 60 s")
        daemon.wait_event("pause.requested", directive=f"{TOPIC}/0/{GROUP}")
        assert len(daemon.letters()) == 20
        wait_worker(daemon, "paused")
        said = run_command(daemon, "status")
        assert said.startswith(f"PAUSED {TOPIC}/0/{GROUP} for ")
        assert "by the flood guard of one: 20 dead letters within 60 s" in said
        cause = wait_cause(daemon, "paused")
        assert "by the flood guard of one" in cause["sentence"]
        daemon.write_code(LINES.replace("if not failing:", "if True:"))
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished")
        run_command(daemon, "resume", f"{TOPIC}/0/{GROUP}")
        daemon.wait_settled()
        assert len(daemon.letters()) == 20
        assert daemon.stop() == 0
    assert len({number for _, _, number, _ in read_runs(daemon)}) == 500


# --- the examples ---------------------------------------------------------------------------------


class Hook(BaseHTTPRequestHandler):
    """An HTTP service that answers 404 for /gone, and otherwise 503 the first time, then 200."""

    seen: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen[self.path] += 1
        code = 404 if self.path == "/gone" else 503 if self.seen[self.path] == 1 else 200
        self.send_response(code)
        if code == 503:
            self.send_header("Retry-After", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


class Line(socketserver.StreamRequestHandler):
    """A service that counts the lines it receives."""

    taken: ClassVar[Counter[bytes]] = Counter()

    def handle(self) -> None:
        self.taken[self.rfile.readline().strip()] += 1
        self.wfile.write(b"ok\n")


@contextmanager
def serve_webhooks(server: socketserver.BaseServer) -> Iterator[socketserver.BaseServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_examples_behave_as_documented(new_daemon: NewDaemon):
    daemon = new_daemon(groups=[])
    names = ("webhooks", "statements", "profiles", "gateway")
    modules = [f"streamqd.examples.{name}" for name in names]
    daemon.write_config(
        topics={}, daemon=daemon.tables["daemon"] | {"handlers": modules, "state_dir": "state"}
    )
    state = daemon.folder / "state"
    # The service's address is known, but nothing listens on it yet.
    service = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Line, bind_and_activate=False)
    service.server_bind()
    daemon.environment["GATEWAY"] = f"127.0.0.1:{service.server_address[1]}"
    Hook.seen.clear()
    Line.taken.clear()
    with (
        serve_webhooks(HTTPServer(("127.0.0.1", 0), Hook)) as hooks,
        daemon,
        Producer(settings=config.load(daemon.config_path)) as producer,
    ):
        # The gateway example: the service is down at first and becomes available later.
        producer.send_many("gateway", [f"line {number}" for number in range(50)])
        daemon.wait_event("circuit.opened")
        service.server_activate()
        with serve_webhooks(service):
            daemon.wait_event("circuit.closed")
            daemon.wait_for(lambda: len(Line.taken) == 50, what="all lines have come")
        # The webhooks example: one URL is busy at first, and the other one is gone.
        port = hooks.server_address[1]  # type: ignore[attr-defined]
        for path in ("ok", "gone"):
            producer.send("webhooks", "{}", headers={"to": f"http://127.0.0.1:{port}/{path}"})
        daemon.wait_for(lambda: Hook.seen["/ok"] == 2, what="the second try")
        dlq = daemon.keys.dlq("webhooks", 0)
        daemon.wait_for(lambda: daemon.link.execute("XLEN", dlq), what="a letter")
        assert Hook.seen["/gone"] == 1
        # The statements example: the directory does not exist yet.
        for line in ("+ 1.00", "+ 2.00", "- 3.00"):
            producer.send("statements", line)

        def missed() -> bool:
            failures = daemon.events("message.retried")
            return any(each["error"].startswith("FileNotFoundError") for each in failures)

        daemon.wait_for(missed, what="the missing folder is told")
        (state / "statements").mkdir()
        page = state / "statements/0.txt"
        daemon.wait_for(lambda: page.exists() and page.read_text().count("\n") == 3, what="lines")
        written = [line.partition(" ")[2] for line in page.read_text().splitlines()]
        assert written == ["+ 1.00", "+ 2.00", "- 3.00"]
        # The profiles example: one user is locked.
        lock = state / "profiles/ann.lock"
        lock.touch()
        for user, name in (("ann", "A1"), ("bob", "B1"), ("ann", "A2"), ("bob", "B2")):
            producer.send("profiles", name, key=user)
        bob, ann = state / "profiles/bob.json", state / "profiles/ann.json"
        daemon.wait_for(lambda: bob.exists() and bob.read_text() == "B2", what="Bob's profile")
        assert not ann.exists()
        lock.unlink()
        daemon.wait_for(lambda: ann.exists() and ann.read_text() == "A2", what="Ann's profile")
        for topic in ("gateway", "statements", "profiles"):
            assert daemon.link.execute("XLEN", daemon.keys.dlq(topic, 0)) == 0
        assert daemon.stop() == 0
