"""A repeating archive survives a failover of Redis, and reports that Spark's JVM was killed."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from streamqd import config
from streamqd.spark.pipelines.storage import Archive
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from tests.support.spark_process import (
    QUICK,
    family,
    need_spark,
    pipeline,
    process_name,
    read_output,
)
from tests.support.waiting import wait_until

deltalake = pytest.importorskip("deltalake")


def test_run_retries_an_outage_and_reports_a_dead_jvm(
    link: Connection, store: Store, keys: Keys, server: Server, tmp_path: Path
) -> None:
    """An outage does not stop `--every`, and the error for a dead JVM names the JVM."""
    need_spark()
    topics.create(store, "orders", config.Topic(partitions=1))
    folder = tmp_path / "archive"

    def add() -> None:
        link.execute("XADD", keys.stream("orders", 0), "*", "payload", b"x")

    def archived() -> int:
        if not (folder / "_archive.json").exists():
            return 0
        table = Archive(folder).table("orders")
        return 0 if table is None else sum(each.rows for each in table.files())

    add()
    with FaultProxy(server.socket_path) as proxy:
        file = tmp_path / "streamq.toml"
        file.write_text(f"[redis]\nurl = {json.dumps(proxy.settings.url)}\n", "utf-8")
        verb = ["archive", "--archive", str(folder), "--every", "1s", "--master", "local[1]"]
        with pipeline(tmp_path, file, *verb, *QUICK) as running:

            def so_far(done: bool) -> bool:
                assert running.poll() is None, read_output(tmp_path)
                return done

            wait_until(lambda: so_far("1 row archived in" in read_output(tmp_path)), timeout=200)
            proxy.hold(requests=True)
            wait_until(lambda: so_far("Error: " in read_output(tmp_path)), timeout=60)
            proxy.heal()
            add()
            wait_until(lambda: so_far(archived() == 2), timeout=60)
            [java] = [each for each in family(running.pid) if process_name(each) == "java"]
            java.send_signal(psutil.signal.SIGKILL)
            add()
            assert running.wait(120) == 1, read_output(tmp_path)
    assert (
        "Error: Spark's JVM exited with signal 9 (SIGKILL) before the command was done; run the"
        " command again" in read_output(tmp_path)
    )
    assert "Traceback" not in read_output(tmp_path)
    assert "-v prints the traceback" not in read_output(tmp_path)


def test_jvm_that_cannot_start_is_reported(
    link: Connection, store: Store, keys: Keys, server: Server, tmp_path: Path
) -> None:
    """A JVM that cannot start is reported without Spark's own error, `JAVA_GATEWAY_EXITED`."""
    need_spark()
    topics.create(store, "orders", config.Topic(partitions=1))
    link.execute("XADD", keys.stream("orders", 0), "*", "payload", b"x")
    file = tmp_path / "streamq.toml"
    file.write_text(f"[redis]\nurl = {json.dumps(server.url)}\n", "utf-8")
    memory = ["--conf", "spark.driver.memory=1k"]
    with pipeline(tmp_path, file, "report", "--out", str(tmp_path / "out"), *memory) as running:
        assert running.wait(60) == 1, read_output(tmp_path)
    assert "Error: Spark's JVM exited before it was ready; run the command with -v" in read_output(
        tmp_path
    )
    assert "Traceback" not in read_output(tmp_path)
