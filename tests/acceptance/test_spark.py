"""Pipelines run as processes: the full loop on a real log, and an archive on a small cluster."""

from __future__ import annotations

import contextlib
import datetime as dt
import gzip
import json
import re
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import psutil
import pytest

from streamqd import config
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support import spark_process
from tests.support.daemon import Daemon
from tests.support.servers import Server
from tests.support.spark_process import CLUSTER, QUICK, executors, need_spark, pipeline, read_output
from tests.support.waiting import wait_until

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyspark")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PATIENCE = 150  # seconds; an idle machine needs only a few
Board = dict[tuple[str, str], int]


def log_lines() -> list[str]:
    data = resources.files("streamqd.examples") / "data" / "apache_access.log.gz"
    return gzip.decompress(data.read_bytes()).decode().splitlines()


def hits(lines: list[str]) -> Board:
    """Return the expected counts, which are computed without Spark."""
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        at = dt.datetime.strptime(line.split("[")[1].split("]")[0], "%d/%b/%Y:%H:%M:%S %z")
        status = re.search(r'" ([0-9]{3}) [0-9-]', line)
        assert status is not None
        found[f"{at.astimezone(dt.UTC):%Y-%m-%dT%H:%MZ}", status[1]] += 1
    return dict(found)


def test_spark_round_trip_counts_every_line_of_a_log(
    new_daemon: Callable[..., Daemon], link: Connection, store: Store, keys: Keys, tmp_path: Path
) -> None:
    """Spark counts every line of a log, and the counts come back to a handler.

    The loop is web server log -> access -> Spark -> hits_per_minute -> a handler's board.
    """
    need_spark()
    module = "streamqd.examples.hits_per_minute"
    daemon = new_daemon(daemon={"handlers": [module], "state_dir": "."}, groups=())
    daemon.write_config(topics={"hits_per_minute": {"partitions": 1}})
    topics.create(store, "access", config.Topic(partitions=3))
    daemon.start()
    daemon.wait_event("daemon.ready")
    lines = log_lines()[:2000]

    def serve(some: list[str]) -> None:
        link.pipeline(
            [
                ("XADD", keys.stream("access", number % 3), "*", "payload", line)
                for number, line in enumerate(some)
            ]
        )

    def board() -> Board:
        # The test reads the board like any other client, while the handler is writing it.
        with sqlite3.connect(f"file:{tmp_path}/hits_per_minute.db?mode=ro", uri=True) as read:
            rows = read.execute("SELECT minute, status, hits FROM board").fetchall()
        read.close()
        return {(minute, status): count for minute, status, count in rows}

    serve(lines[:1500])
    job = ["run", f"{module}:count", "--checkpoints", str(tmp_path / "checkpoints")]
    job += ["--set", "every=200 milliseconds", "--master", "local[2]", *QUICK]
    with pipeline(tmp_path, daemon.config_path, *job) as running:

        def arrived(some: list[str]) -> bool:
            assert running.poll() is None, read_output(tmp_path)
            return board() == hits(some)

        daemon.wait_for(lambda: arrived(lines[:1500]), timeout=PATIENCE, what="the first lines")
        serve(lines[1500:])
        daemon.wait_for(lambda: arrived(lines), timeout=PATIENCE, what="the other lines")
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 128 + signal.SIGINT, read_output(tmp_path)
    assert "Traceback" not in read_output(tmp_path)
    assert daemon.stop() == 0


def test_archive_with_a_lost_executor_has_each_row_once(
    link: Connection, store: Store, keys: Keys, server: Server, tmp_path: Path
) -> None:
    """An archive has each row once, although one of its executors is killed midway.

    Each executor is a separate process.
    """
    need_spark()
    topics.create(store, "access", config.Topic(partitions=2))
    ledger: Counter[tuple[int, str]] = Counter()
    for partition in range(2):
        commands = [("XADD", keys.stream("access", partition), "*", "payload", "x" * 100)] * 3000
        ledger.update((partition, each.decode()) for each in link.pipeline(commands))
    (tmp_path / "streamq.toml").write_text(f'[redis]\nurl = "{server.url}"\n', "utf-8")
    folder = tmp_path / "archive"
    verb = ["archive", "--archive", str(folder), "--batch-rows", "500", "--json", *QUICK]
    verb += ["--master", CLUSTER, "--conf", "spark.executor.memory=512m"]
    for name, value in spark_process.cluster_conf().items():
        verb += ["--conf", f"{name}={value}"]
    home = spark_process.spark_home(tmp_path)

    def published() -> int:
        return len(list(folder.glob("tables/access/_delta_log/*[1-9].json")))

    with pipeline(tmp_path, tmp_path / "streamq.toml", *verb, home=home) as running:
        wait_until(
            lambda: published() or running.poll() is not None, timeout=PATIENCE, what="a batch"
        )
        there = wait_until(
            lambda: running.poll() is not None or _pair(executors(running.pid)),
            timeout=PATIENCE, what="two executors",
        )  # fmt: skip
        assert isinstance(there, list), read_output(tmp_path)
        assert published() < 12
        there[0].kill()
        assert running.wait(PATIENCE) == 0, read_output(tmp_path)
    done = json.loads((tmp_path / "pipeline.out").read_text())
    assert (done["rows"], done["topics"][0]["batches"]) == (6000, 12)
    table = deltalake.DeltaTable(str(folder / "tables" / "access")).to_pyarrow_table()
    found = Counter(zip(table["partition"].to_pylist(), table["id"].to_pylist(), strict=True))
    assert found == ledger


def _pair(found: list[psutil.Process]) -> list[psutil.Process]:
    return found if len(found) == 2 else []


JOB = """
def copy(job):
    lines = job.spark.readStream.format("text").load(job.arguments["lines"])
    rows = lines.select("value").repartition(int(job.arguments["tasks"]))
    job.sink(rows, "out", "copy").trigger(availableNow=True).start()
"""


def test_driver_killed_during_a_commit_writes_rows_once(
    link: Connection, keys: Keys, server: Server, tmp_path: Path
) -> None:
    """A driver that is killed during a commit writes its rows once.

    Its first run uses 4 cores. The next one uses the same checkpoint, but has other cores and
    tasks.
    """
    need_spark()
    topics.create(Store(link, keys), "out", config.Topic(partitions=2))
    streams = [keys.stream("out", number) for number in range(2)]
    lines = tmp_path / "lines"
    lines.mkdir()
    expected = [b"%d" % number for number in range(100_000)]
    for number in range(8):
        (lines / f"{number}.txt").write_bytes(b"\n".join(expected[number::8]))
    (tmp_path / "job.py").write_text(JOB, "utf-8")
    (tmp_path / "streamq.toml").write_text(f'[redis]\nurl = "{server.url}"\n', "utf-8")

    def run(cores: int, tasks: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        verb = ["run", "job:copy", "--checkpoints", str(tmp_path / "checkpoints"), *QUICK]
        verb += ["--set", f"lines={lines}", "--set", f"tasks={tasks}"]
        return pipeline(tmp_path, tmp_path / "streamq.toml", *verb, "--master", f"local[{cores}]")

    def published() -> int:
        return sum(link.pipeline([("XLEN", stream) for stream in streams]))

    with run(4, 7) as running:
        wait_until(
            lambda: published() or running.poll() is not None,
            timeout=PATIENCE, what="the first rows", every=0.001,
        )  # fmt: skip
        assert running.poll() is None, read_output(tmp_path)
        for each in spark_process.family(running.pid):
            each.kill()
        running.wait(30)
    partly = published()
    assert 0 < partly < len(expected)
    for cores, tasks in ((1, 3), (2, 1)):
        with run(cores, tasks) as running:
            assert running.wait(PATIENCE) == 0, read_output(tmp_path)
        pages = link.pipeline([("XRANGE", stream, "-", "+") for stream in streams])
        assert sorted(int(fields[1]) for page in pages for _, fields in page) == [
            *range(len(expected))
        ]
    # Emptied staging streams are kept for one more batch, and this was the only one.
    left = link.execute("KEYS", f"{keys.control}:sink:{{out:*")
    assert sum(link.execute("XLEN", stream) for stream in left) == 0
    assert all(link.execute("PTTL", stream) > 0 for stream in left)
