"""Sentry gets each cause once a minute, and no more of an error than `dlq_error` allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import shapes
from tests.support.daemon import GROUP, ROOT, TOPIC, Daemon
from tests.support.optional import need
from tests.support.sentry import SentryServer, reporting

pytestmark = need("sentry_sdk")

NewDaemon = Callable[..., Daemon]

SOON = {"kind": "fixed", "base": "10ms", "max": "10ms", "jitter": "none"}

HANDLERS = """
from streamqd import Dead, Failures, Message, Release, Retry


def do(message):
    secret = message.text()  # a local variable of the failing frame
    word, _, rest = message.text().partition(" ")
    if word == "declined":
        raise ValueError(f"the card {rest} was declined")
    if word == "other":
        raise KeyError(rest)
    if word == "dead":
        raise Dead("refused")
    if word == "asked":
        raise Retry(after=0.01)


def plain(message: Message) -> None:
    do(message)


slow = plain


async def coroutine(message: Message) -> None:
    do(message)


def batch(messages: list[Message]) -> None:
    failed = {}
    for message in messages:
        try:
            do(message)
        except Exception as error:
            failed[message] = error
    if failed:
        raise Failures(failed)


def redact_error(text: str) -> str:
    return text.replace("4111", "****")
"""
REDACTED = HANDLERS
KEPT = HANDLERS.replace("def redact_error", "def unused")

SHAPES: dict[str, dict[str, Any]] = {**shapes.SHAPES, "batch": {"handler": "work:batch"}}

SENDER = """
import json, os, sys
import sentry_sdk
from streamqd import Producer, config

sentry_sdk.init(traces_sample_rate=1.0)
with Producer(settings=config.load(sys.argv[1])) as producer:
    with sentry_sdk.start_transaction(op="http.server", name="checkout"):
        print(producer.send("orders", "ok"))
sentry_sdk.flush()
"""


@pytest.fixture
def sentry() -> Iterator[SentryServer]:
    with reporting() as running:
        yield running


@pytest.fixture
def new_sentry_daemon(new_daemon: NewDaemon, sentry: SentryServer) -> NewDaemon:
    """Configure daemons that report errors to the Sentry server."""

    def make(**options: Any) -> Daemon:
        consumer = {"backoff": SOON, "max_attempts": 2, **options.pop("consumer")}
        daemon = new_daemon(**{"code": KEPT, "consumer": consumer, **options})
        daemon.environment["SENTRY_DSN"] = sentry.dsn
        daemon.write_config(telemetry={"sentry": True})
        return daemon

    return make


@pytest.mark.parametrize("shape", SHAPES)
def test_sentry_reports_each_cause_once_a_minute(
    new_sentry_daemon: NewDaemon, sentry: SentryServer, shape: str
):
    with new_sentry_daemon(consumer=SHAPES[shape]) as daemon:
        daemon.send([f"declined {number}" for number in range(20)] + ["other 1", "other 2", "ok"])
        daemon.wait_settled()
        assert daemon.stop() == 0

    events = sorted(sentry.errors(), key=lambda each: each["exception"]["values"][-1]["type"])
    causes = [each["exception"]["values"][-1] for each in events]
    assert [each["type"] for each in causes] == ["KeyError", "ValueError"]
    assert causes[1]["value"].endswith("was declined")
    assert causes[1]["stacktrace"]["frames"][-1]["function"] == "do"
    assert not any("vars" in frame for frame in causes[1]["stacktrace"]["frames"])
    letters = {letter["errorClass"]: letter for letter in daemon.letters()}
    for event, cause in zip(events, causes, strict=True):
        tags = event["tags"]
        assert tags["streamqd.topic"], tags["streamqd.group"] == (TOPIC, GROUP)
        assert event["contexts"]["message"]["uid"].startswith(f"{TOPIC}/")
        assert event["fingerprint"] == [letters[cause["type"]]["fingerprint"]]


def test_sentry_ignores_verdicts_raised_by_a_handler(
    new_sentry_daemon: NewDaemon, sentry: SentryServer
):
    with new_sentry_daemon(consumer={"handler": "work:plain"}) as daemon:
        daemon.send(["dead", "asked", "declined 7"])
        daemon.wait_settled()
        assert daemon.stop() == 0
    [event] = sentry.errors()
    assert event["exception"]["values"][-1]["value"] == "the card 7 was declined"


@pytest.mark.parametrize(
    ("detail", "code", "values"),
    [
        ("traceback", KEPT, ["the card 4111 was declined"]),
        ("message", REDACTED, ["the card **** was declined"]),
        ("class", KEPT, [""]),
        ("none", KEPT, []),
    ],
)
def test_sentry_report_respects_dlq_error_and_redact_error(
    new_sentry_daemon: NewDaemon, sentry: SentryServer, detail: str, code: str, values: list[str]
):
    consumer = {"handler": "work:plain", "dlq_error": detail}
    with new_sentry_daemon(consumer=consumer, code=code) as daemon:
        daemon.send(["declined 4111"])
        daemon.wait_settled()
        assert daemon.stop() == 0
    found = [each["exception"]["values"][-1]["value"] for each in sentry.errors()]
    assert found == values
    if code is REDACTED or detail != "traceback":
        assert "4111" not in json.dumps(sentry.errors())


def test_sentry_client_of_a_handler_reports_no_local_variables(
    new_sentry_daemon: NewDaemon, sentry: SentryServer
):
    code = (
        KEPT
        + """

def on_start(_context):
    import sentry_sdk

    sentry_sdk.init(environment="its own")
"""
    )
    with new_sentry_daemon(consumer={"handler": "work:plain"}, code=code) as daemon:
        daemon.send(["declined 7"])
        daemon.wait_settled()
        assert daemon.stop() == 0
    [event] = sentry.errors()
    assert event["environment"] == "its own"
    frames = event["exception"]["values"][-1]["stacktrace"]["frames"]
    assert not any("vars" in frame for frame in frames)


@pytest.mark.parametrize("shape", SHAPES)
def test_sentry_report_belongs_to_the_trace_of_its_run(
    new_sentry_daemon: NewDaemon, sentry: SentryServer, shape: str
):
    daemon = new_sentry_daemon(consumer={**SHAPES[shape], "max_attempts": 1})
    daemon.environment["SENTRY_TRACES_SAMPLE_RATE"] = "1"
    with daemon:
        daemon.send(["declined 7"])
        daemon.wait_settled()
        assert daemon.stop() == 0
    [event], [run] = sentry.errors(), sentry.transactions()
    [process] = [each for each in run["spans"] if each["op"] == "queue.process"]
    assert event["contexts"]["trace"]["trace_id"] == run["contexts"]["trace"]["trace_id"]
    assert event["contexts"]["trace"]["span_id"] == process["span_id"]


@pytest.mark.parametrize("shape", SHAPES)
def test_sentry_shows_a_run_on_the_queues_page(
    new_sentry_daemon: NewDaemon, sentry: SentryServer, shape: str
):
    daemon = new_sentry_daemon(consumer=SHAPES[shape])
    daemon.environment["SENTRY_TRACES_SAMPLE_RATE"] = "1"
    with daemon:
        run = subprocess.run(
            [sys.executable, "-c", SENDER, daemon.config_path],
            env=os.environ | daemon.environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        uid = run.stdout.strip()
        daemon.wait_settled()
        assert daemon.stop() == 0

    found = {each["contexts"]["trace"]["op"]: each for each in sentry.transactions()}
    checkout, run_ = found["http.server"], found["queue.process"]
    [publish] = [each for each in checkout["spans"] if each["op"] == "queue.publish"]
    [process] = [each for each in run_["spans"] if each["op"] == "queue.process"]
    for span in (publish, process):
        assert span["data"]["messaging.destination.name"] == TOPIC
        assert span["data"]["messaging.message.id"] == uid
    assert process["data"]["messaging.message.retry.count"] == 0
    assert process["data"]["messaging.message.body.size"] == len("ok")
    assert process["data"]["messaging.message.receive.latency"] >= 0
    assert run_["contexts"]["trace"]["trace_id"] == checkout["contexts"]["trace"]["trace_id"]
    assert run_["contexts"]["trace"]["parent_span_id"] == publish["span_id"]


def test_sentry_without_a_dsn_is_logged(new_sentry_daemon: NewDaemon):
    daemon = new_sentry_daemon(consumer={"handler": "work:plain"})
    daemon.environment["SENTRY_DSN"] = ""
    with daemon:
        daemon.send(["declined 7"])
        daemon.wait_settled()
        assert daemon.stop() == 0
    [event] = daemon.events("telemetry.failed")
    assert "SENTRY_DSN" in event["error"]


@pytest.mark.parametrize("variable", ["SENTRY_DSN", "SENTRY_TRACES_SAMPLE_RATE"])
def test_invalid_sentry_variable_is_named(new_sentry_daemon: NewDaemon, variable: str):
    daemon = new_sentry_daemon(consumer={"handler": "work:plain"})
    daemon.environment[variable] = "nonsense"
    daemon.start()
    failed = daemon.wait_event("worker.boot_failed")
    assert variable in failed["error"]
