"""The table of metrics for a scoreboard and figures that the test makes by hand."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import streamqd
from streamqd.idle_reason import Wait
from streamqd.metrics.exporter import Exporter
from streamqd.metrics.table import METRICS, SECTIONS
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import (
    BUCKETS,
    DELAY_BUCKETS,
    InstanceFlags,
    Scoreboard,
    WorkerSlot,
    WorkerState,
    now_ns,
)
from streamqd.store.outbox import OutboxView
from streamqd.store.statistics import AssignmentFigures, Backlog, PartitionFigures, QueryFigures
from tests.support.sources import nodes

ASSIGNMENT = Assignment("access", 3, "hits")
HERE = {"topic": "access", "partition": "3", "group": "hits"}
ME = {"streamqd_instance": "web-1"}
NOW = 1_700_000_000_000


def figures(*, unread: int | None = 7, oldest: str = f"{NOW - 90_000}-0") -> AssignmentFigures:
    return AssignmentFigures(
        main=Backlog(4, f"{NOW - 100_000}-0", unread, oldest, 60),
        retry=Backlog(1, f"{NOW - 1000}-0", 0, "", 2),
        waiting_retries=5,
        next_due_unix_ms=None,
    )


@pytest.fixture
def board() -> Scoreboard:
    return Scoreboard(8)


SHOP = OutboxView(
    *("shop", 7, "web-2", NOW - 90_000, 4.0, NOW - 60_000),
    rows=3, more=False, oldest_seconds=2.5, sent=40, dead=1, error="",
    cause="", topic="", failing_seconds=0.0, table="",
)  # fmt: skip


@pytest.fixture
def slot(board: Scoreboard) -> WorkerSlot:
    slot = board.allot(ASSIGNMENT)
    slot.owned = 1
    slot.state = WorkerState.READY
    slot.epoch = NOW
    return slot


@pytest.fixture
def view(board: Scoreboard) -> MetricsView:
    return MetricsView(
        instance="web-1",
        board=board,
        consumers=(("access", "hits"), ("access", "audit")),
        partitions={
            ("access", 3): PartitionFigures(
                *(60, 1234, "5-0", "9-0", 2, 1, f"{NOW}-5"),
                queries=(
                    QueryFigures("spark:etl", 7, 1500),
                    QueryFigures("spark:old", None, None),
                ),
            ),
        },
        assignments={ASSIGNMENT: figures()},
        outboxes=(SHOP,),
        server_unix_ms=NOW,
        asked_ns=now_ns(),
        redis_up=True,
    )


def scrape(view: MetricsView) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    text = Exporter(view).render()[0].decode()
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in samples.setdefault(sample.name, {}), "a series appears twice"
            samples[sample.name][labels] = sample.value
    return samples


def value(view: MetricsView, name: str, **labels: str) -> float | None:
    return scrape(view).get(name, {}).get(frozenset(labels.items()))


@pytest.mark.parametrize(
    ("counter", "metric"),
    [
        ("fetched", "consumed"),
        ("acked", "acked"),
        ("retried", "retried"),
        ("dead_lettered", "dead_lettered"),
        ("released", "released"),
        ("crashes", "crashes"),
        ("charged", "charged"),
        ("restarts", "restarts"),
        ("recycled", "recycled"),
        ("fenced", "fenced"),
        ("missing_entries", "missing_entries"),
        ("reclaimed", "reclaimed"),
        ("deferred", "deferred"),
        ("bytes", "received_bytes"),
        ("round_trips", "redis_round_trips"),
        ("redis_errors", "redis_errors"),
    ],
)
def test_metrics_include_slot_counters(
    view: MetricsView, slot: WorkerSlot, counter: str, metric: str
) -> None:
    slot.add(counter, 41)
    slot.add(counter)
    assert value(view, f"streamqd_{metric}_total", **HERE, **ME) == 42


def test_metrics_count_failures_by_result(view: MetricsView, slot: WorkerSlot) -> None:
    slot.add("failed", 5)
    slot.add("timeouts", 2)
    assert value(view, "streamqd_failures_total", **HERE, **ME, result="error") == 3
    assert value(view, "streamqd_failures_total", **HERE, **ME, result="timeout") == 2


def test_counters_outlive_ownership_but_gauges_do_not(view: MetricsView, slot: WorkerSlot) -> None:
    slot.add("acked", 9)
    slot.owned = 0
    assert value(view, "streamqd_acked_total", **HERE, **ME) == 9
    assert value(view, "streamqd_in_flight", **HERE, **ME) is None
    assert value(view, "streamqd_worker_up", **HERE, **ME) is None


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("topic_length", 60),
        ("dlq_length", 2),
        ("delayed_sends", 1),
        ("produced_total", 1234),
        ("trim_floor_timestamp_seconds", NOW / 1000),
    ],
)
def test_metrics_include_partition_gauges(view: MetricsView, metric: str, expected: float) -> None:
    assert value(view, f"streamqd_{metric}", topic="access", partition="3") == expected


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("pending", 5), ("lag", 7), ("waiting_retries", 5), ("retry_length", 2)],
)
def test_metrics_include_group_gauges(view: MetricsView, metric: str, expected: float) -> None:
    assert value(view, f"streamqd_{metric}", **HERE) == expected


def test_metrics_include_a_spark_query_position(view: MetricsView) -> None:
    """The metrics of a query include its lag and the time of its last position.

    Unknown values are left out.
    """
    labels = frozenset({("topic", "access"), ("partition", "3"), ("group", "spark:etl")})
    assert scrape(view)["streamqd_query_lag"] == {labels: 7.0}
    assert scrape(view)["streamqd_query_idle_seconds"] == {labels: 1.5}


def test_metrics_include_outbox_gauges(view: MetricsView) -> None:
    """The age of the oldest row grows even without a relay, because nothing else measures it."""
    shop = frozenset({("outbox", "shop")})
    for name, expected in [("rows", 3), ("oldest_age_seconds", 2.5), ("relay_up", 1),
                           ("sent_total", 40), ("dead_total", 1)]:  # fmt: skip
        assert scrape(view)[f"streamqd_outbox_{name}"] == {shop: expected}, name
    view.outboxes = (SHOP._replace(ttl=None), SHOP._replace(name="other", ttl=None, rows=0))
    samples = scrape(view)
    assert samples["streamqd_outbox_relay_up"][shop] == 0
    ages = samples["streamqd_outbox_oldest_age_seconds"]
    assert ages.pop(shop) == pytest.approx(62.5, abs=30.0)
    assert [*ages.values()] == [2.5]


def test_message_age_uses_the_clock_of_the_server(view: MetricsView) -> None:
    age = value(view, "streamqd_oldest_unread_age_seconds", **HERE)
    assert age == pytest.approx(90, abs=5)
    view.assignments = {ASSIGNMENT: figures(oldest="")}
    assert value(view, "streamqd_oldest_unread_age_seconds", **HERE) == 0


def test_metrics_omit_an_unknown_lag(view: MetricsView) -> None:
    view.assignments = {ASSIGNMENT: figures(unread=None)}
    assert value(view, "streamqd_lag", **HERE) is None
    assert value(view, "streamqd_pending", **HERE) == 5


def test_metrics_include_owned_partitions(view: MetricsView, slot: WorkerSlot) -> None:
    owned = scrape(view)["streamqd_partitions_owned"]
    assert owned == {
        frozenset({"topic": "access", "group": "hits", **ME}.items()): 1,
        frozenset({"topic": "access", "group": "audit", **ME}.items()): 0,
    }


def test_metrics_include_worker_gauges(view: MetricsView, slot: WorkerSlot) -> None:
    slot.post_batch([b"m:1-0", b"m:2-0"])
    slot.states[1] = 1
    slot.lanes[0], slot.lanes[1] = 1, now_ns() - 3_000_000_000
    slot.rss = 1 << 20
    assert value(view, "streamqd_in_flight", **HERE, **ME) == 2
    assert value(view, "streamqd_epoch", **HERE, **ME) == NOW
    assert value(view, "streamqd_worker_up", **HERE, **ME) == 1
    assert value(view, "streamqd_worker_resident_memory_bytes", **HERE, **ME) == 1 << 20
    run = value(view, "streamqd_longest_run_seconds", **HERE, **ME)
    assert run == pytest.approx(3, abs=2)
    slot.state = WorkerState.BROKEN
    assert value(view, "streamqd_worker_up", **HERE, **ME) == 0
    assert value(view, "streamqd_worker_crash_loop", **HERE, **ME) == 1


def test_metrics_include_the_instance(view: MetricsView, board: Scoreboard) -> None:
    board.add("rebalance_acquired", 3)
    board.add("rebalance_shed", 1)
    board.add("renew_late", 2)
    board.flags = InstanceFlags.STARTED | InstanceFlags.DRAINING
    view.count("promoted", ("access", "3", "hits"), 12)
    view.count("failures", ("web-1", "trim"))
    assert value(view, "streamqd_rebalance_moves_total", **ME, result="acquired") == 3
    assert value(view, "streamqd_rebalance_moves_total", **ME, result="shed") == 1
    assert value(view, "streamqd_late_renewals_total", **ME) == 2
    assert value(view, "streamqd_draining", **ME) == 1
    assert value(view, "streamqd_paused", **ME) == 0
    assert value(view, "streamqd_limited", **ME) == 0
    assert value(view, "streamqd_partitions_given_up_total", **ME) == 0
    assert value(view, "streamqd_redis_up", **ME) == 1
    assert value(view, "streamqd_promoted_total", **HERE) == 12
    assert value(view, "streamqd_housekeeper_failures_total", **ME, task="trim") == 1


def test_histograms_merge_partitions_and_are_cumulative(
    view: MetricsView, board: Scoreboard, slot: WorkerSlot
) -> None:
    other = board.allot(Assignment("access", 4, "hits"))
    slot.handle_histogram[0] = 2  # shorter than every exposed bound
    slot.handle_histogram[10] = 5
    slot.handle_histogram[33] = 1  # longer than every exposed bound
    slot.handle_histogram[34] = 1_500_000_000
    other.handle_histogram[10] = 3
    other.handle_histogram[34] = 500_000_000

    buckets = scrape(view)["streamqd_handle_seconds_bucket"]
    by_bound = {float(dict(labels)["le"]): count for labels, count in buckets.items()}
    assert all("partition" not in dict(labels) for labels in buckets)
    assert list(by_bound.values()) == sorted(by_bound.values())
    assert by_bound[BUCKETS[9]] == 2
    assert by_bound[BUCKETS[10]] == 10
    assert by_bound[float("inf")] == 11
    labels = {"topic": "access", "group": "hits", **ME}
    assert value(view, "streamqd_handle_seconds_count", **labels) == 11
    assert value(view, "streamqd_handle_seconds_sum", **labels) == 2.0


def test_delay_histogram_has_its_own_buckets(view: MetricsView, slot: WorkerSlot) -> None:
    slot.delay_histogram[0] = 4
    slot.delay_histogram[20] = 2
    slot.delay_histogram[34] = 2_500  # the sum of the delays in milliseconds
    buckets = scrape(view)["streamqd_delay_seconds_bucket"]
    by_bound = {float(dict(labels)["le"]): count for labels, count in buckets.items()}
    assert by_bound[DELAY_BUCKETS[0]] == by_bound[DELAY_BUCKETS[19]] == 4
    assert by_bound[DELAY_BUCKETS[20]] == by_bound[float("inf")] == 6
    assert max(bound for bound in by_bound if bound != float("inf")) > 2 * 86_400
    labels = {"topic": "access", "group": "hits", **ME}
    assert value(view, "streamqd_delay_seconds_sum", **labels) == 2.5


# --- the table itself -----------------------------------------------------------------------------


def test_metric_names_and_texts_are_valid() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.name.startswith("streamqd_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith("_seconds") or metric.kind != "histogram"
        assert metric.help.endswith(".")
        assert set(metric.labels) <= {
            *(
                "topic",
                "partition",
                "group",
                "streamqd_instance",
                "result",
                "task",
                "version",
                "python",
            ),
            *("reason", "outbox"),
        }
    assert not any("partition" in m.labels for m in METRICS if m.kind == "histogram")


def test_metrics_are_sorted_within_each_section() -> None:
    for section in SECTIONS.values():
        names = [metric.name for metric in section]
        assert names == sorted(names)


def test_every_documented_metric_exists() -> None:
    promised = {
        *(
            "produced_total",
            "consumed_total",
            "acked_total",
            "retried_total",
            "dead_lettered_total",
        ),
        *("topic_length", "pending", "in_flight", "partitions_owned"),
        *("handle_seconds", "ack_latency_seconds", "delay_seconds"),
        *(
            "lag",
            "oldest_unread_age_seconds",
            "waiting_retries",
            "dlq_length",
            "epoch",
            "fenced_total",
        ),
        *("restarts_total", "charged_total", "rebalance_moves_total"),
        *("trim_floor_timestamp_seconds", "redis_round_trips_total"),
    }
    assert {f"streamqd_{name}" for name in promised} <= {metric.name for metric in METRICS}


def _full_view(view: MetricsView, slot: WorkerSlot) -> MetricsView:
    slot.add("acked")
    slot.rate_micro = 100_000_000
    slot.handle_histogram[3] = 1
    slot.ack_histogram[3] = 1
    slot.delay_histogram[3] = 1
    view.held["x", 1] = ("x", 1)
    for name in ("promoted", "failures", "sent", "trimmed", "dropped", "expired"):
        metric = next(m for m in METRICS if name in m.name.replace("delayed_sends_written", "sent"))
        if name == "failures":
            metric = next(m for m in METRICS if m.name == "streamqd_housekeeper_failures_total")
        view.count(name, tuple("x" for _ in metric.labels))
    for name in ("schedules_fired", "schedules_late_ms"):
        view.count(name, ("x",))
    view.count("schedules_skipped", ("x", "misfire"))
    return view


def test_every_metric_has_a_sample(view: MetricsView, slot: WorkerSlot) -> None:
    samples = scrape(_full_view(view, slot))
    silent = [
        metric.name
        for metric in METRICS
        if metric.name not in samples and f"{metric.name}_count" not in samples
    ]
    assert silent == []


def test_promtool_accepts_the_metrics(view: MetricsView, slot: WorkerSlot) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    text, _ = Exporter(_full_view(view, slot)).render()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_openmetrics_format_is_returned_on_request(view: MetricsView, slot: WorkerSlot) -> None:
    plain = Exporter(view).render()
    assert plain[1].startswith("text/plain")
    body, content_type = Exporter(view).render("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def _importers(module: str) -> Iterator[str]:
    package = Path(streamqd.__file__).parent
    for path in package.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == module for name in names):
                yield str(path.relative_to(package))


def test_one_module_imports_prometheus_client() -> None:
    assert set(_importers("prometheus_client")) == {"metrics/exporter.py"}


def test_metrics_include_the_wait_of_a_worker(view: MetricsView, slot: WorkerSlot):
    waits = slot.waits
    slot.pid = 4711
    waits.hold(12, 3)
    waits.count_opening()
    waits.count_flood()
    figures = ("partition_blocked", "held_messages", "held_keys", "circuit_open")
    for kind, expected in (
        (Wait.NOTHING, (0, 12, 3, 0)),
        (Wait.BLOCKED, (1, 12, 3, 0)),
        (Wait.OPEN, (0, 12, 3, 1)),
        (Wait.PROBING, (0, 12, 3, 1)),
        (Wait.FULL, (0, 12, 3, 0)),
    ):
        waits.begin(kind)
        found = tuple(value(view, f"streamqd_{name}", **HERE, **ME) for name in figures)
        assert found == expected
    slot.pid = 0
    assert value(view, "streamqd_held_messages", **HERE, **ME) == 0, "nobody holds them"
    assert value(view, "streamqd_circuit_openings_total", **HERE, **ME) == 1
    assert value(view, "streamqd_flood_stops_total", **HERE, **ME) == 1


def test_metrics_include_the_rate_and_its_waits(view: MetricsView, slot: WorkerSlot):
    assert value(view, "streamqd_rate_limit", **HERE, **ME) is None, "there is no limit"
    slot.rate_micro = 1_500_000
    slot.add("throttled_ns", 250_000_000)
    assert value(view, "streamqd_rate_limit", **HERE, **ME) == 1.5
    assert value(view, "streamqd_throttled_seconds_total", **HERE, **ME) == 0.25


LOADED = """
import sys
from streamqd import housekeeper, supervisor
from streamqd.cli import root
from streamqd.config import Http, Settings
for bind in ("", "127.0.0.1:0"):
    housekeeper.preload(Settings(http=Http(bind=bind)))
    print(bool(sys.modules.keys() & {"prometheus_client", "http.server", "psutil"}))
"""


def test_only_a_daemon_with_http_loads_prometheus_client() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
