"""A real Prometheus scrapes a real daemon and evaluates the alerting rules and the dashboard."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamqd.outbox.database import connect
from streamqd.outbox.schema import create
from streamqd.store import history
from streamqd.store.spark import query_position
from tests.acceptance.test_steering import run_command
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "etc" / "alerts.yml"
DASHBOARD = ROOT / "etc" / "grafana.json"

CONFIG = """\
global: {{ scrape_interval: 500ms, evaluation_interval: 500ms }}
rule_files: [{alerts}]
scrape_configs:
  - job_name: streamqd
    static_configs: [{{ targets: ["127.0.0.1:{port}"] }}]
"""

NewDaemon = Callable[..., Daemon]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Prometheus:
    """A Prometheus server for one test, on loopback, with its own data directory."""

    def __init__(self, folder: Path, target: int) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
        folder.mkdir()
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(alerts=json.dumps(str(ALERTS)), port=target))
        self._address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def get(self, what: str, **parameters: str) -> Any:
        """Return the `data` of an answer, or None as long as there is none.

        Fails if the answer is an error.
        """
        address = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # Prometheus is still starting
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        except urllib.error.URLError:
            return None

    def value(self, query: str) -> float | None:
        """Return the number that a query yields, or None if it does not yield exactly one."""
        data = self.get("query", query=query)
        rows = data["result"] if data else []
        return float(rows[0]["value"][1]) if len(rows) == 1 else None

    def wait_value(self, query: str, wanted: float) -> None:
        wait_until(
            lambda: self.value(query) == wanted,
            timeout=20.0,
            what=f"{query} is {wanted:g}",
            every=0.1,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


@pytest.fixture
def monitored_daemon(
    new_daemon: NewDaemon, tmp_path: Path
) -> Iterator[tuple[Daemon, Prometheus, int]]:
    port = free_port()
    daemon = new_daemon(
        partitions=2,
        http=f"127.0.0.1:{port}",
        consumer={"max_attempts": 2, "backoff": {"kind": "fixed", "base": "20ms"}},
    )
    prometheus = Prometheus(tmp_path / "prometheus", port)
    try:
        with daemon:
            yield daemon, prometheus, port
    finally:
        prometheus.close()


def expressions() -> list[str]:
    """Return the queries of the dashboard.

    Its variables are replaced in the same way as in Grafana.
    """
    found = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
    ]
    variables = {"$__rate_interval": "1m", "$topic": ".*", "$group": ".*", "$instance": ".*"}
    for name, value in variables.items():
        found = [query.replace(name, value) for query in found]
    return found


def test_prometheus_evaluates_metrics_rules_and_dashboard(
    monitored_daemon: tuple[Daemon, Prometheus, int], tmp_path: Path
) -> None:
    daemon, prometheus, _ = monitored_daemon
    # The panels about schedules need data. A separate topic keeps the other sums exact.
    tick = {"name": "tick", "topic": "ticks", "every": "1s"}
    topics = daemon.tables["topics"] | {"ticks": {"partitions": 1}}
    # The panels about outboxes need data.
    url = f"sqlite:///{tmp_path}/shop.db"
    with connect(url, create=True) as database:
        create(database)
    shop = {"name": "shop", "database": url}
    daemon.write_config(topics=topics, schedules=[tick], outboxes=[shop])
    daemon.signal(signal.SIGHUP)
    daemon.send(["ok"] * 20 + ["dead"] * 2 + ["fail"])
    daemon.wait_settled()
    # The panels about Spark need data. No query is running, so its position stays the same.
    position = query_position(daemon.keys, TOPIC, 0, "report", "1-0", 1, hold=False)
    daemon.link.run(position)

    of_group = f'{{topic="{TOPIC}",group="{GROUP}"}}'
    prometheus.wait_value(f"sum(streamqd_acked_total{of_group})", 20)
    prometheus.wait_value(f"sum(streamqd_dead_lettered_total{of_group})", 3)
    prometheus.wait_value(f"sum(streamqd_retried_total{of_group})", 1)
    prometheus.wait_value(f"sum(streamqd_consumed_total{of_group})", 24)
    prometheus.wait_value(f"sum(streamqd_handle_seconds_count{of_group})", 24)
    prometheus.wait_value(f'sum(streamqd_produced_total{{topic="{TOPIC}"}})', 23)
    prometheus.wait_value("sum(streamqd_partitions_owned)", 2)
    prometheus.wait_value('streamqd_outbox_relay_up{outbox="shop"}', 1)
    prometheus.wait_value("count(rate(streamqd_outbox_sent_total[1m]))", 1)
    prometheus.wait_value("sum(max by (topic, partition) (streamqd_dlq_length))", 3)
    prometheus.wait_value(f"sum(max by (partition) (streamqd_lag{of_group}))", 0)

    [target] = prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    kinds = {name: each[0]["type"] for name, each in prometheus.get("metadata").items()}
    assert kinds["streamqd_handle_seconds"] == "histogram"

    # The counters continue when a worker is replaced.
    daemon.send(["exit 1"], partition=0)
    prometheus.wait_value(f"sum(streamqd_crashes_total{of_group}) >= bool 1", 1)
    assert (prometheus.value(f"sum(streamqd_acked_total{of_group})") or 0) >= 20

    # The same Prometheus server also evaluates the rules and the dashboard.
    def rules() -> list[dict[str, Any]]:
        groups = prometheus.get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(
        lambda: {rule["health"] for rule in rules()} == {"ok"},
        timeout=20.0,
        what=f"all rules are evaluated: {rules()}",
        every=0.1,
    )
    pending = {rule["name"] for rule in rules() if rule["state"] != "inactive"}
    assert "StreamqdDeadLetters" in pending
    assert pending.isdisjoint({"StreamqdDown", "StreamqdAllDown", "StreamqdWorkerDown"})
    for query in expressions():
        empty = " == " in query
        assert prometheus.get("query", query=query)["result"] != [] or empty, query


def test_metrics_count_partitions_without_an_owner(new_daemon: NewDaemon) -> None:
    """The metric counts partitions that `max_partitions` leaves without an owner.

    It ignores a stopped group, which needs no owner.
    """
    port = free_port()
    daemon = new_daemon(partitions=3, http=f"127.0.0.1:{port}", daemon={"max_partitions": 1})

    def unowned() -> float | None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            if family.name == "streamqd_partitions_unowned":
                return family.samples[0].value
        return None

    with daemon:
        wait_until(lambda: unowned() == 2, timeout=20.0, what=f"2 unowned, not {unowned()}")
        run_command(daemon, "group", "stop", TOPIC, GROUP)
        wait_until(lambda: unowned() == 0, timeout=20.0, what=f"0 unowned, not {unowned()}")
        assert daemon.stop() == 0


def test_metric_labels_are_bounded_by_the_configuration(
    monitored_daemon: tuple[Daemon, Prometheus, int],
) -> None:
    daemon, _, port = monitored_daemon

    def series() -> dict[str, set[str]]:
        address = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for label, value in sample.labels.items():
                    found.setdefault(label, set()).add(value)
                found.setdefault("series", set()).add(
                    f"{sample.name}{sorted(sample.labels.items())}"
                )
        return found

    daemon.send(["ok", "dead", "fail", "exit 1"])
    daemon.wait_settled()
    before = series()
    daemon.send(
        [f"{word} {number}" for number in range(150) for word in ("nonsense", "dead", "ok")]
    )
    daemon.wait_settled()
    after = series()

    assert after["topic"] == {TOPIC}
    assert after["partition"] == {"0", "1"}
    assert after["group"] == {GROUP}
    assert after["streamqd_instance"] == {"one"}
    assert after["result"] <= {"error", "timeout", "acquired", "shed"}
    assert after.keys() == before.keys() | (after.keys() & {"task"})
    # Only the housekeeper's counters start with their first event, so all others must exist
    # already.
    new = {each.partition("[")[0] for each in after["series"] - before["series"]}
    assert new <= {
        "streamqd_promoted_total",
        "streamqd_trimmed_total",
        "streamqd_delayed_sends_written_total",
        "streamqd_housekeeper_failures_total",
    }


def test_stop_and_reload_write_the_unfinished_minute_to_history(
    new_daemon: NewDaemon,
) -> None:
    """A daemon that stops or reloads also writes the current minute.

    The sum of all entries equals the handled messages, because none is counted twice or left out.
    """
    daemon = new_daemon(partitions=2)

    def entries() -> list[history.Interval]:
        return list(history.read(daemon.store, "default", 0))

    with daemon:
        daemon.send(["ok"] * 30)
        daemon.wait_settled()
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: entries() != [], timeout=20.0, what="the reload wrote an entry")
        wait_until(
            lambda: len(daemon.events("housekeeper.started")) > 1,
            timeout=20.0,
            what="the next housekeeper has started",
        )
        daemon.send(["ok"] * 12)
        daemon.wait_settled()
        assert daemon.stop() == 0
    found = entries()
    assert len(found) >= 2
    assert all(each.bad is None and 0 < each.seconds < 90 for each in found)
    assert sum(row.counts["acked"] for each in found for row in each.rows) == 42
    assert sum(sum(row.handled.values()) for each in found for row in each.rows) == 42
