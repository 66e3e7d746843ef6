"""The spans of a fleet reach a collector, and a daemon without traces does no work for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.collector import Collector, Received, collecting
from tests.support.daemon import GROUP, ROOT, TOPIC, Daemon
from tests.support.shapes import SHAPES
from tests.support.waiting import wait_until

NewDaemon = Callable[..., Daemon]

SOON = {"kind": "fixed", "base": "10ms", "max": "10ms", "jitter": "none"}

HANDLERS = """
import logging, os, signal, time

from opentelemetry import trace

from streamqd import Failures, Message, Release, Retry

log = logging.getLogger("shop")
released = set()


def do(message):
    word, _, rest = message.text().partition(" ")
    log.info("%s sampled=%s", word, trace.get_current_span().get_span_context().trace_flags.sampled)
    with trace.get_tracer("shop").start_as_current_span("charge"):
        pass
    if word == "fail":
        raise ValueError(f"the card {rest} was declined")
    if word == "once" and message.attempt == 1:
        raise ValueError("declined")
    if word == "release" and message.uid not in released:
        released.add(message.uid)
        raise Release
    if word == "returned":
        return Retry(after=0.01) if message.attempt == 1 else None
    if word == "die" and message.crash_count == 0 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang" and not os.path.exists("died"):
        open("died", "w").close()
        time.sleep(600)


def plain(message: Message):
    return do(message)


def slow(message: Message):
    time.sleep(0.01)
    return do(message)


async def coroutine(message: Message):
    return do(message)


def batch(messages: list[Message]) -> None:
    failed = {}
    for message in messages:
        try:
            do(message)
        except Exception as error:
            failed[message] = error
    if failed:
        raise Failures(failed)


async def coroutine_batch(messages: list[Message]) -> None:
    batch(messages)
"""

BATCHES: dict[str, dict[str, Any]] = {
    "batch": {"handler": "work:batch"},
    "coroutine for batches": {"handler": "work:coroutine_batch"},
}

SENDER = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from streamqd import Producer, config

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
texts, headers = json.loads(sys.argv[2]), json.loads(sys.argv[3])
with Producer(settings=config.load(sys.argv[1])) as producer:
    print(json.dumps([producer.send("orders", text, headers=headers) for text in texts]))
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def new_traced_daemon(new_daemon: NewDaemon, collector: Collector) -> NewDaemon:
    """Configure daemons that make traces and send their spans to the collector."""

    def make(telemetry: dict[str, Any] | None = None, **options: Any) -> Daemon:
        daemon = new_daemon(**{"code": HANDLERS, **options})
        daemon.environment |= collector.environment
        daemon.write_config(telemetry={"traces": True, **(telemetry or {})})
        return daemon

    return make


def send(daemon: Daemon, *texts: str, headers: Any = None, **environment: str) -> list[str]:
    """Send messages with traces from a separate program. Return their uids."""
    run = subprocess.run(
        [sys.executable, "-c", SENDER, daemon.config_path, json.dumps(texts), json.dumps(headers)],
        env=os.environ | daemon.environment | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: list[str] = json.loads(run.stdout)
    return found


def wait_killed_and_next(collector: Collector, uid: str) -> list[Received]:
    """Wait for the killed run of a message and for the next run. They may arrive in any order."""
    return sorted(wait_run_spans(collector, uid, 2), key=lambda span: not span.error)


def wait_run_spans(collector: Collector, uid: str, count: int = 1) -> list[Received]:
    """Wait for the spans of the runs of a message."""
    found: list[Received] = collector.wait(count, "process", messaging__message__id=uid)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_span_of_a_run_links_to_the_span_of_its_send(
    new_traced_daemon: NewDaemon, collector: Collector, shape: str
):
    with new_traced_daemon(consumer=SHAPES[shape], partitions=2) as daemon:
        uids = send(daemon, *[f"ok {number}" for number in range(10)])
        runs = [wait_run_spans(collector, uid)[0] for uid in uids]
        assert daemon.stop() == 0

    sends = {each.attributes["messaging.message.id"]: each for each in collector.spans("send")}
    assert sorted(sends) == sorted(uids)
    charges = {each.parent: each for each in collector.spans("charge")}
    for uid, run in zip(uids, runs, strict=True):
        sent = sends[uid]
        assert (sent.name, sent.kind) == (f"send {TOPIC}", "producer")
        assert (run.name, run.kind) == (f"process {TOPIC}", "consumer")
        assert run.links == [sent.ids]
        assert run.parent == ""
        assert run.trace_id != sent.trace_id
        assert run.attributes["messaging.system"] == "streamqd"
        assert run.attributes["messaging.operation.name"] == "process"
        assert run.attributes["messaging.consumer.group.name"] == GROUP
        assert run.attributes["messaging.destination.partition.id"] == uid.split("/")[1]
        assert run.attributes["streamqd.attempt"] == 1
        assert run.attributes["streamqd.verdict"] == "ack"
        assert not run.error
        assert run.resource["service.name"] == "streamqd"
        for span in (sent, run):
            assert span.attributes["server.address"] == run.attributes["server.address"] != ""
        assert charges[run.span_id].trace_id == run.trace_id
    assert len(collector.spans("process")) == len(uids)
    assert not list((daemon.folder / "var" / "runs").iterdir())


@pytest.mark.parametrize("shape", BATCHES)
def test_batch_has_one_span_with_a_link_per_message(
    new_traced_daemon: NewDaemon, collector: Collector, shape: str
):
    daemon = new_traced_daemon(consumer={**BATCHES[shape], "backoff": SOON})
    uids = send(daemon, "ok 1", "once 2", "ok 3")
    with daemon:
        daemon.wait_settled()
        assert daemon.stop() == 0

    sends = {each.attributes["messaging.message.id"]: each.ids for each in collector.spans("send")}
    first, second = collector.spans("process")
    assert first.links == [sends[uid] for uid in uids]
    assert first.attributes["messaging.batch.message_count"] == 3
    assert first.attributes["streamqd.batch.failed_count"] == 1
    assert first.error
    assert second.links == [sends[uids[1]], first.ids]


def test_batch_with_empty_failures_closes_its_span(
    new_traced_daemon: NewDaemon, collector: Collector
):
    code = """
from streamqd import Failures, Message


def batch(messages: list[Message]) -> None:
    raise Failures({})
"""
    with new_traced_daemon(code=code, consumer={"handler": "work:batch"}) as daemon:
        [uid] = daemon.send(["ok"])
        [run] = wait_run_spans(collector, uid)
        assert daemon.stop() == 0
    assert (run.attributes["streamqd.verdict"], run.error) == ("ack", False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("on_error", ["requeue", "hold-key"])
def test_retry_links_to_its_previous_run(
    new_traced_daemon: NewDaemon, collector: Collector, shape: str, on_error: str
):
    consumer = {**SHAPES[shape], "on_error": on_error, "backoff": SOON, "max_attempts": 3}
    with new_traced_daemon(consumer=consumer) as daemon:
        [uid] = send(daemon, "fail 7")
        first, second, third = wait_run_spans(collector, uid, 3)
        daemon.wait_event("message.dead_lettered")
        assert daemon.stop() == 0
        [letter] = daemon.letters()

    [sent] = collector.spans("send")
    assert [each.links for each in (first, second, third)] == [
        [sent.ids],
        [sent.ids, first.ids],
        [sent.ids, second.ids],
    ]
    assert [each.attributes["streamqd.attempt"] for each in (first, second, third)] == [1, 2, 3]
    assert [each.attributes["streamqd.verdict"] for each in (first, second, third)] == [
        *("retry", "retry", "dead"),
    ]
    assert {each.attributes["error.type"] for each in (first, second, third)} == {"ValueError"}
    assert {each.status for each in (first, second, third)} == {"the card 7 was declined"}
    assert "in do" in third.events[0]["exception.stacktrace"]
    assert letter["lastRun"][:53] == f"00-{third.trace_id}-{third.span_id}-"
    [line] = daemon.events("message.dead_lettered")
    assert (line["trace_id"], line["span_id"]) == third.ids


def test_spans_of_released_and_failed_runs_finish(
    new_traced_daemon: NewDaemon, collector: Collector
):
    with new_traced_daemon(consumer={"handler": "work:plain", "backoff": SOON}) as daemon:
        released, returned = send(daemon, "release", "returned")
        first, second = wait_run_spans(collector, released, 2)
        third, fourth = wait_run_spans(collector, returned, 2)
        assert daemon.stop() == 0
    assert (first.attributes["streamqd.verdict"], first.error) == ("release", False)
    assert first.ids in second.links
    assert third.attributes["streamqd.verdict"] == "retry"
    assert third.ids in fourth.links


def test_replayed_message_links_to_its_last_run(new_traced_daemon: NewDaemon, collector: Collector):
    with new_traced_daemon(consumer={"handler": "work:plain", "max_attempts": 1}) as daemon:
        [uid] = send(daemon, "fail 7")
        [first] = wait_run_spans(collector, uid)
        daemon.wait_event("message.dead_lettered")
        run_cli(daemon, "dlq", "replay", TOPIC, "--group", GROUP, "--yes")
        _, second = wait_run_spans(collector, uid, 2)
        assert daemon.stop() == 0
    assert first.ids in second.links
    assert second.attributes["streamqd.replays"] == 1


def run_cli(daemon: Daemon, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "streamqd", "--config", daemon.config_path, *arguments],
        cwd=daemon.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("shape", {**SHAPES, **BATCHES})
def test_span_of_a_killed_run_is_exported_once(
    new_traced_daemon: NewDaemon, collector: Collector, shape: str
):
    with new_traced_daemon(consumer={**SHAPES, **BATCHES}[shape]) as daemon:
        [uid] = send(daemon, "die")
        killed, after = wait_killed_and_next(collector, uid)
        daemon.wait_settled()
        assert daemon.stop() == 0

    [sent] = collector.spans("send")
    assert (killed.error, after.error) == (True, False)
    assert killed.attributes["error.type"] == "SIGKILL"
    assert killed.status == "the process ended during this run: signal SIGKILL"
    assert killed.links == after.links == [sent.ids]
    assert len(collector.spans("process")) == 2
    assert len({each.ids for each in collector.spans("process")}) == 2
    assert not list((daemon.folder / "var" / "runs").iterdir())


def test_span_of_a_killed_run_has_the_ids_of_its_log_lines(
    new_traced_daemon: NewDaemon, collector: Collector
):
    with new_traced_daemon(consumer={"handler": "work:plain"}) as daemon:
        [uid] = send(daemon, "die")
        killed, _ = wait_killed_and_next(collector, uid)
        assert daemon.stop() == 0
    lines = daemon.log_path.read_text().splitlines()
    lines = [json.loads(line) for line in lines if '"logger":"shop"' in line]
    assert (lines[0]["trace_id"], lines[0]["span_id"]) == killed.ids


def test_hard_limit_is_the_error_type_of_its_span(
    new_traced_daemon: NewDaemon, collector: Collector
):
    consumer = {"handler": "work:plain", "hard_timeout": "300ms"}
    with new_traced_daemon(consumer=consumer) as daemon:
        [uid] = send(daemon, "hang")
        killed, _ = wait_killed_and_next(collector, uid)
        assert daemon.stop() == 0
    assert killed.attributes["error.type"] == "timeout"
    assert killed.seconds >= 0.3


def test_runs_of_a_lost_daemon_are_exported_by_the_next_one(
    new_traced_daemon: NewDaemon, collector: Collector
):
    with new_traced_daemon(consumer={"handler": "work:plain"}) as daemon:
        [uid] = send(daemon, "hang")
        wait_until((daemon.folder / "died").exists)
        daemon.kill_all()
        daemon.start()
        daemon.wait_event("daemon.ready", after=daemon.mark())
        killed, _ = wait_killed_and_next(collector, uid)
        assert daemon.stop() == 0
    assert killed.attributes["error.type"] == "process_lost"


def test_collector_outage_delays_only_spans_of_killed_runs(
    new_traced_daemon: NewDaemon, collector: Collector
):
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    daemon.environment["OTEL_EXPORTER_OTLP_TIMEOUT"] = "1"
    collector.refuses = True
    with daemon:
        daemon.send(["die", "ok", "ok"])
        daemon.wait_settled()
        daemon.wait_event("telemetry.failed")
        assert list((daemon.folder / "var" / "runs").iterdir())
        collector.refuses = False
        [killed] = collector.wait(1, "process", error__type="SIGKILL")
        daemon.wait_event("telemetry.recovered")
        assert daemon.stop() == 0
    assert killed.error


def test_spans_survive_recycles_and_a_drain(new_traced_daemon: NewDaemon, collector: Collector):
    """The spans survive recycles and a drain, because each worker exports them before it exits."""
    with new_traced_daemon(
        consumer={"handler": "work:plain", "max_messages": 5}, partitions=2
    ) as daemon:
        uids = daemon.send([f"ok {number}" for number in range(100)])
        daemon.wait_settled()
        assert daemon.stop() == 0
    found = [each.attributes["messaging.message.id"] for each in collector.spans("process")]
    assert sorted(found) == sorted(uids)


@pytest.mark.parametrize("trouble", ["refuses", "hangs"])
def test_drain_waits_at_most_one_second_for_the_collector(
    new_traced_daemon: NewDaemon, collector: Collector, trouble: str
):
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    daemon.environment["OTEL_BSP_SCHEDULE_DELAY"] = "60000"
    setattr(collector, trouble, True)
    with daemon:
        daemon.send(["ok"])
        daemon.wait_settled()
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 3.0
    assert daemon.events("telemetry.spans_lost")


@pytest.mark.parametrize("shape", SHAPES)
def test_unsampled_message_has_no_span(
    new_traced_daemon: NewDaemon, collector: Collector, shape: str
):
    """An unsampled message has no span.

    Client libraries in its handler see the unsampled context, so they make no spans either.
    """
    with new_traced_daemon(consumer=SHAPES[shape]) as daemon:
        send(daemon, "ok 1", "once 2", OTEL_TRACES_SAMPLER="always_off")
        daemon.wait_settled()
        uids = send(daemon, "ok 3")
        wait_run_spans(collector, uids[0])
        assert daemon.stop() == 0
    assert len(collector.spans("process")) == 1
    assert len(collector.spans("charge")) == 1
    text = daemon.log_path.read_text()
    assert text.count("ok sampled=False") == 1
    assert text.count("ok sampled=True") == 1


def test_resource_variables_override_the_defaults(
    new_traced_daemon: NewDaemon, collector: Collector
):
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    daemon.environment["OTEL_RESOURCE_ATTRIBUTES"] = "service.instance.id=pod-7"
    daemon.environment["OTEL_SERVICE_NAME"] = "billing"
    with daemon:
        [uid] = daemon.send(["die"])
        runs = wait_killed_and_next(collector, uid)
        assert daemon.stop() == 0
    for run in runs:
        assert run.resource["service.instance.id"] == "pod-7"
        assert run.resource["service.name"] == "billing"


def test_sampling_ratio_applies_to_a_send_and_its_runs(
    new_traced_daemon: NewDaemon, collector: Collector
):
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    ratio = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.3"}
    daemon.environment |= ratio
    with daemon:
        send(daemon, *["ok"] * 60)
        daemon.wait_settled()
        assert daemon.stop() == 0
    sends, runs = collector.spans("send"), collector.spans("process")
    assert 0 < len(sends) < 60
    assert sorted(each.ids for each in sends) == sorted(each.links[0] for each in runs)


def test_payload_that_resembles_headers_sets_no_span_context(
    new_traced_daemon: NewDaemon, collector: Collector
):
    unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    with new_traced_daemon(consumer={"handler": "work:plain"}) as daemon:
        [uid] = daemon.send([json.dumps({"traceparent": unsampled}, separators=(",", ":"))])
        wait_run_spans(collector, uid)
        assert daemon.stop() == 0


def test_run_can_continue_the_trace_of_its_send(new_traced_daemon: NewDaemon, collector: Collector):
    consumer = {"handler": "work:plain", "backoff": SOON}
    with new_traced_daemon({"producer_span": "parent"}, consumer=consumer) as daemon:
        [uid] = send(daemon, "once")
        first, second = wait_run_spans(collector, uid, 2)
        assert daemon.stop() == 0
    [sent] = collector.spans("send")
    assert {each.trace_id for each in (first, second)} == {sent.trace_id}
    assert {each.parent for each in (first, second)} == {sent.span_id}
    assert (first.links, second.links) == ([], [first.ids])


def test_traceparent_of_the_caller_is_kept(new_traced_daemon: NewDaemon, collector: Collector):
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with new_traced_daemon(consumer={"handler": "work:plain"}) as daemon:
        [uid] = send(daemon, "ok", headers={"traceparent": given, "a": "b"})
        [run] = wait_run_spans(collector, uid)
        assert daemon.stop() == 0
    assert run.links == [("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")]


@pytest.mark.parametrize(
    "headers",
    [
        "no JSON",
        "[1]",
        '{"traceparent": 7}',
        '{"traceparent": "00-zz-zz-01"}',
        '{"traceparent": "00-00000000000000000000000000000000-0000000000000000-01"}',
        '{"tracestate": {}, "baggage": ["="]}',
        '{"traceparent": "' + "0" * 100_000 + '"}',
    ],
)
def test_hostile_trace_headers_do_not_affect_a_run(
    new_traced_daemon: NewDaemon, collector: Collector, headers: str
):
    with new_traced_daemon(consumer={"handler": "work:plain"}) as daemon:
        stream = daemon.keys.stream(TOPIC, 0)
        fields = ("payload", "ok", "headers", headers, "lastRun", "00-x")
        daemon.link.execute("XADD", stream, "*", *fields)
        [run] = collector.wait(1, "process")
        daemon.wait_settled()
        assert daemon.stop() == 0
    assert run.links == []
    assert not daemon.events("telemetry.failed")
    assert not daemon.letters()


@pytest.mark.parametrize(
    "content", [b"", b"x" * 4096, b"streamqd runs 1\n\x08\0\0\0" + b"\xff" * 900]
)
def test_damaged_span_file_is_removed(
    new_traced_daemon: NewDaemon, collector: Collector, content: bytes
):
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    folder = daemon.folder / "var" / "runs"
    folder.mkdir(parents=True)
    (folder / "one-999999-100").write_bytes(content)
    with daemon:
        wait_until(lambda: not (folder / "one-999999-100").exists(), timeout=20.0)
        [uid] = send(daemon, "die")
        wait_run_spans(collector, uid, 2)
        assert daemon.stop() == 0


def test_span_file_of_another_instance_is_kept(new_traced_daemon: NewDaemon):
    """An instance keeps the span files of others.

    Their processes may be running in another container.
    """
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    folder = daemon.folder / "var" / "runs"
    folder.mkdir(parents=True)
    ours, other = folder / "one-999999-100", folder / "one-2-999999-100"
    for path in (ours, other):
        path.write_bytes(b"")
    with daemon:
        wait_until(lambda: not ours.exists(), timeout=20.0)
        assert daemon.stop() == 0
    assert other.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of only 64 KiB as the directory of the run files."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted: not root, or in a container without rights")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_loses_no_run_and_no_span(
    new_traced_daemon: NewDaemon, collector: Collector, small_disk: Path
):
    daemon = new_traced_daemon(consumer={"handler": "work:slow", "concurrency": 8})
    (daemon.folder / "var").mkdir()
    (daemon.folder / "var" / "runs").symlink_to(small_disk)
    with daemon:
        (small_disk / "ballast").write_bytes(b"x" * 60_000)
        uids = daemon.send([f"ok {number}" for number in range(50)])
        daemon.wait_settled()
        assert daemon.stop() == 0
    found = [each.attributes["messaging.message.id"] for each in collector.spans("process")]
    assert sorted(found) == sorted(uids)
    assert daemon.events("telemetry.failed")
    assert not daemon.events("worker.crashed")


SLOW_EXTRACTION = """
import time

from opentelemetry import propagate
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


class Slow(TraceContextTextMapPropagator):
    def extract(self, *given, **named):
        time.sleep(5)
        return super().extract(*given, **named)


def on_start(_context):
    propagate.set_global_textmap(Slow())


def plain(message):
    open("called", "w").close()
"""


def test_time_limit_applies_while_the_span_is_created(new_traced_daemon: NewDaemon):
    consumer = {"handler": "work:plain", "timeout": "300ms", "max_attempts": 1}
    with new_traced_daemon(code=SLOW_EXTRACTION, consumer=consumer) as daemon:
        daemon.send(["ok"])
        daemon.wait_event("message.dead_lettered")
        assert daemon.stop() == 0
    assert not (daemon.folder / "called").exists()


def test_reload_turns_traces_on_and_off(new_traced_daemon: NewDaemon, collector: Collector):
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    daemon.write_config(telemetry={"traces": False})
    with daemon:
        for on in (False, True, False):
            if on != daemon.tables["telemetry"]["traces"]:
                daemon.write_config(telemetry={"traces": on})
                mark = daemon.mark()
                daemon.signal(signal.SIGHUP)
                daemon.wait_event("reload.finished", after=mark)
            [uid] = daemon.send(["die" if on else "ok"])
            if on:
                killed, _ = wait_killed_and_next(collector, uid)
                assert killed.attributes["error.type"] == "SIGKILL"
            daemon.wait_settled()
        assert daemon.stop() == 0
    assert len(collector.spans("process")) == 2


SENDERS = """
import asyncio, json, sys, threading
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from streamqd import AsyncProducer, BufferedProducer, Outgoing, Producer, config

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
settings = config.load(sys.argv[1])


async def later():
    async with AsyncProducer(settings=settings) as producer:
        await producer.send("orders", "async")
        await producer.send_many("orders", ["async many"])


with Producer(settings=settings) as producer:
    producer.send_many("orders", ["many", Outgoing("with headers", headers={"a": "b"})])
    for _ in producer.send_chunks("orders", (f"chunk {number}" for number in range(10_000))):
        break
    try:
        producer.send("orders", "secret", dedup_id=["secret"])
    except TypeError:
        pass
    thread = threading.Thread(target=producer.send, args=("orders", "thread"))
    thread.start()
    thread.join()
with BufferedProducer(settings=settings) as producer:
    producer.send("orders", "buffered")
asyncio.run(later())
assert not trace.get_current_span().get_span_context().is_valid
"""


def test_every_producer_and_send_method_creates_a_span(
    new_traced_daemon: NewDaemon, collector: Collector
):
    daemon = new_traced_daemon(consumer={"handler": "work:plain"})
    run = subprocess.run(
        [sys.executable, "-c", SENDERS, daemon.config_path],
        env=os.environ | daemon.environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    spans = collector.wait(7)
    names = [(each.name, each.attributes.get("messaging.batch.message_count")) for each in spans]
    assert names == [
        (f"send {TOPIC}", 2),
        (f"send {TOPIC}", 512),
        (f"send {TOPIC}", None),
        (f"send {TOPIC}", None),
        (f"create {TOPIC}", None),
        (f"send {TOPIC}", None),
        (f"send {TOPIC}", 1),
    ]
    refused = spans[2]
    assert refused.attributes["error.type"] == "TypeError"
    assert "secret" not in repr(refused)
    assert [each.error for each in spans] == [number == 2 for number in range(7)]
    stored = daemon.link.execute("XRANGE", daemon.keys.stream(TOPIC, 0), "-", "+")
    parents = [json.loads(fields[fields.index(b"headers") + 1]) for _, fields in stored]
    sent = {each.ids for each in spans}
    assert {tuple(each["traceparent"].split("-")[1:3]) for each in parents} == sent - {refused.ids}
    assert [each["a"] for each in parents if "a" in each] == ["b"]


TRAP = """
import os, sys
open(os.environ["TRAP"], "a").write(f"{os.getpid()} {sys.argv}\\n")
raise ImportError("a trap")
"""

OFF = """
import os, signal


def plain(message):
    if message.text() == "die" and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_without_traces_no_process_imports_opentelemetry(new_daemon: NewDaemon):
    daemon = new_daemon(code=OFF, consumer={"handler": "work:plain"})
    (daemon.folder / "opentelemetry.py").write_text(TRAP)
    trap = daemon.folder / "trap"
    daemon.environment["TRAP"] = str(trap)
    with daemon:
        daemon.send(["die", "ok"])
        daemon.wait_settled()
        assert daemon.stop() == 0
    assert not trap.exists()
    assert not (daemon.folder / "var" / "runs").exists()


def test_missing_telemetry_package_is_named_at_the_start(new_daemon: NewDaemon):
    daemon = new_daemon(code=OFF, consumer={"handler": "work:plain"})
    daemon.write_config(telemetry={"traces": True})
    (daemon.folder / "opentelemetry.py").write_text(TRAP)
    daemon.environment["TRAP"] = str(daemon.folder / "trap")
    daemon.start()
    failed = daemon.wait_event("worker.boot_failed")
    assert failed["error"].startswith("telemetry.traces needs OpenTelemetry, which cannot be")
    assert "opentelemetry-sdk" in failed["error"]


def test_workers_have_no_thread_before_the_fork(new_traced_daemon: NewDaemon):
    """The supervisor has only one thread when it forks a worker, so its forks are safe."""
    with new_traced_daemon(consumer={"handler": "work:plain"}) as daemon:
        assert psutil.Process(daemon.pid).num_threads() == 1
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
