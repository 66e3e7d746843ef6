"""Source, sink and SQL work with tasks in executors, which are separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.spark.conftest import Shop
from tests.support.servers import free_port
from tests.support.spark_process import CLUSTER, cluster_conf, family, need_spark, spark_home
from tests.support.waiting import wait_until

PATIENCE = 120.0
JOB = """
import json, sys
from streamqd import spark as streamq
url, master, folder, conf = sys.argv[1:]
spark = streamq.session("cluster", master, json.loads(conf) | {"spark.executor.memory": "512m"})
assert len(set(spark.sparkContext.parallelize(range(8), 8).map(
    lambda _: __import__("os").getppid()).collect())) >= 1
given = {"url": url, "partitions": "2"}
rows = spark.range(0, 100, 1, 4).selectExpr("string(id) AS key", "concat('row ', id) AS value")
rows.write.format("streamq").options(**given, topic="orders").mode("append").save()
assert streamq.read_topic(spark, "orders", url=url).where("partition = 0").count() < 100
stream = (spark.readStream.format("streamq").option("url", url).option("subscribe", "orders")
    .option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 40).load())
query = (stream.select("key", "value").writeStream.format("streamq").options(**given, topic="copy")
    .option("checkpointLocation", folder).trigger(availableNow=True).start())
query.awaitTermination()
spark.sql(f"CREATE TABLE copy USING streamq OPTIONS (url '{url}', topic 'copy')")
spark.sql("INSERT INTO copy (value) SELECT binary(concat('sql ', id)) FROM range(10)")
print(spark.sql("SELECT count(*), count(DISTINCT value), count(key) FROM copy").collect()[0])
executors = spark._jsc.sc().getExecutorMemoryStatus().size() - 1
print(executors, "executors")
"""


@contextlib.contextmanager
def run_standalone(folder: Path, home: Path) -> Iterator[str]:
    """Run a Spark master and a worker as processes, and yield the URL of the master."""
    port = free_port()
    spark_class = [str(home / "bin" / "spark-class")]
    master = f"spark://127.0.0.1:{port}"
    commands = {
        "master": ["org.apache.spark.deploy.master.Master", "-h", "127.0.0.1", "-p", str(port),
                   "--webui-port", str(free_port())],
        "worker": ["org.apache.spark.deploy.worker.Worker", "-h", "127.0.0.1", "-c", "2",
                   "-m", "1g", "--webui-port", str(free_port()),
                   "-d", str(folder / "work"), master],
    }  # fmt: skip
    conf = cluster_conf()
    environment = {
        **os.environ,
        "SPARK_DAEMON_JAVA_OPTS": conf["spark.executor.extraJavaOptions"],
        "SPARK_DAEMON_CLASSPATH": conf.get("spark.executor.extraClassPath", ""),
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, command in commands.items():
            with (folder / name).open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [*spark_class, *command],
                        stdout=log, stderr=log, cwd=folder, env=environment,
                    )
                )  # fmt: skip
        wait_until(
            lambda: b"registered with master" in (folder / "worker").read_bytes(),
            timeout=PATIENCE, what="the worker is registered",
        )  # fmt: skip
        yield master
    finally:
        for each in [process for one in started for process in family(one.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for one in started:
            one.wait(30)


@pytest.mark.parametrize("kind", ["standalone", "local-cluster"])
def test_executors_of_a_cluster_read_and_write_topics(
    shop: Shop, tmp_path: Path, kind: str
) -> None:
    need_spark()
    home = spark_home(tmp_path)
    with contextlib.ExitStack() as stack:
        standing = kind == "standalone"
        master = stack.enter_context(run_standalone(tmp_path, home)) if standing else CLUSTER
        arguments = [shop.server.url, master, str(tmp_path / "checkpoint")]
        command = [sys.executable, "-c", JOB, *arguments, json.dumps(cluster_conf())]
        environment = {**os.environ, "SPARK_HOME": str(home)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240
        )

    assert done.returncode == 0, done.stderr
    assert "count(DISTINCT value)=110, count(key)=100" in done.stdout
    assert ("1 executors" if standing else "2 executors") in done.stdout
    assert len(shop.payloads("copy", 2)) == 110
